//! Memory that is asked for before it is needed: hints, which change nothing but the time that something takes.

/// Asks for the cache line of an address.
#[inline]
pub fn line<T: ?Sized>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint, which may be about any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Bytes that `beginning` prefetches. After them the hardware prefetcher continues.
const BEGINNING: usize = 512;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for the beginning of bytes that are read next, and have lain somewhere for long.
#[inline]
pub fn beginning(bytes: &[u8]) {
    bytes.chunks(LINE).take(BEGINNING / LINE).for_each(|part| line(part));
}
