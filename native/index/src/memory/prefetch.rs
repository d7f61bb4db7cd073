//! Prefetches memory. Prefetch hints change only the time of later accesses.

/// Prefetches the cache line of an address.
#[inline]
pub fn line<T: ?Sized>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint, for which any address is valid.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Number of bytes that `beginning` prefetches. After these bytes the hardware prefetcher continues.
const BEGINNING_BYTES: usize = 512;
/// Number of bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Prefetches the beginning of bytes that are read soon, and are probably in no cache.
#[inline]
pub fn beginning(bytes: &[u8]) {
    bytes
        .chunks(LINE_BYTES)
        .take(BEGINNING_BYTES / LINE_BYTES)
        .for_each(|part| line(part));
}
