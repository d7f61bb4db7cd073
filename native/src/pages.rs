//! Memory for tables and records: pieces of one size, cut from huge pages.
//!
//! Everything in an index is found by hashes, so nearly every access is to another page. With pages of 4 KiB most of them also miss
//! the processor's cache of page addresses, which costs as much as the access itself; pieces of huge pages share one entry there. The
//! pool also gives whole regions back to the system, which a general allocator rarely can.

use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::NonNull;

use parking_lot::Mutex;

/// Bytes of a region: one huge page of x86-64 and of most others.
const REGION: usize = 2 << 20;
/// Bytes at the end of a region that hold its header.
const HEADER: usize = 512;
/// Empty regions of a size that are kept, so that an index at a limit does not ask the system again and again.
const SPARE: usize = 1;
/// Regions of a size from which on huge pages are asked for: a part of one that is not used yet is memory all the same.
const HUGE_FROM: usize = 16;

/// At the end of each region.
struct Header {
    /// A bit for each free piece.
    free: [u64; 16],
    used: usize,
    listed: bool,
}

/// All pieces of one size.
struct Pool {
    size: usize,
    /// Regions with free pieces.
    open: Vec<NonNull<Header>>,
    empty: usize,
    mapped: usize,
}

// SAFETY: a pool owns its regions, and they are memory like any other.
unsafe impl Send for Pool {}

fn header_of(piece: NonNull<u8>) -> NonNull<Header> {
    let end = (piece.as_ptr().addr() & !(REGION - 1)) + REGION - HEADER;
    // SAFETY: regions are aligned to their size, so this is the address of the header of the one that holds the piece.
    unsafe { NonNull::new_unchecked(piece.as_ptr().with_addr(end).cast()) }
}

impl Pool {
    const fn new(size: usize) -> Self {
        Self {
            size,
            open: Vec::new(),
            empty: 0,
            mapped: 0,
        }
    }

    fn pieces(&self) -> usize {
        (REGION - HEADER) / self.size
    }

    fn take(&mut self) -> NonNull<u8> {
        let mut header = match self.open.last() {
            Some(&header) => header,
            None => self.map(),
        };
        // SAFETY: headers in `open` are those of mapped regions, and the pool's lock is held.
        let found = unsafe { header.as_mut() };
        self.empty -= usize::from(found.used == 0);
        let word = found.free.iter().position(|&bits| bits != 0).unwrap_or(0);
        let at = word * 64 + found.free[word].trailing_zeros() as usize;
        found.free[word] &= found.free[word] - 1;
        found.used += 1;
        if found.used == self.pieces() {
            found.listed = false;
            self.open.pop();
        }
        let base = (header.as_ptr().addr() & !(REGION - 1)) + at * self.size;
        // SAFETY: inside of the region.
        unsafe { NonNull::new_unchecked(header.as_ptr().with_addr(base).cast()) }
    }

    fn give(&mut self, piece: NonNull<u8>) {
        let mut header = header_of(piece);
        let at = (piece.as_ptr().addr() & (REGION - 1)) / self.size;
        // SAFETY: the piece came from `take`, so its region is mapped, and the pool's lock is held.
        let found = unsafe { header.as_mut() };
        found.free[at / 64] |= 1 << (at % 64);
        found.used -= 1;
        if !found.listed {
            found.listed = true;
            self.open.push(header);
        }
        if found.used > 0 {
            return;
        }
        if self.empty < SPARE {
            self.empty += 1;
            return;
        }
        self.open.retain(|&other| other != header);
        self.mapped -= 1;
        // SAFETY: no piece of this region is in use, and nothing else knows it.
        unsafe { libc::munmap(header.as_ptr().byte_sub(REGION - HEADER).cast(), REGION) };
    }

    /// A region from the system.
    #[cold]
    fn map(&mut self) -> NonNull<Header> {
        // SAFETY: plain calls; what is mapped beyond an aligned region is given back at once.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let found = libc::mmap(
                std::ptr::null_mut(),
                2 * REGION,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            );
            if found == libc::MAP_FAILED {
                handle_alloc_error(Layout::from_size_align_unchecked(REGION, REGION));
            }
            let before = found.addr().wrapping_neg() & (REGION - 1);
            let base = found.byte_add(before);
            if before > 0 {
                libc::munmap(found, before);
            }
            libc::munmap(base.byte_add(REGION), REGION - before);
            if self.mapped >= HUGE_FROM {
                // Only a wish: where huge pages are switched off everything works, slower.
                libc::madvise(base, REGION, libc::MADV_HUGEPAGE);
            }
            base
        };
        let mut free = [0; 16];
        for at in 0..self.pieces() {
            free[at / 64] |= 1 << (at % 64);
        }
        // SAFETY: the header lies inside of the new region, which nobody else knows.
        let header = unsafe {
            let header = base.byte_add(REGION - HEADER).cast::<Header>();
            header.write(Header {
                free,
                used: 0,
                listed: true,
            });
            NonNull::new_unchecked(header)
        };
        self.open.push(header);
        self.empty += 1;
        self.mapped += 1;
        header
    }
}

/// What pieces of `COUNT` values are made of.
pub trait Pooled<const COUNT: usize>: Copy {
    /// The pool of its pieces.
    fn pool() -> &'static Sizes;
}

/// A pool behind its lock.
pub struct Sizes(Mutex<Pool>);

impl Sizes {
    /// A pool of pieces of `size` bytes, a multiple of 64 of which at most 1024 fit in a region.
    pub const fn new(size: usize) -> Self {
        assert!(size >= REGION / 1024 && size <= REGION - HEADER && size.is_multiple_of(64));
        Self(Mutex::new(Pool::new(size)))
    }
}

/// Room for `COUNT` values, aligned to 64 bytes.
pub struct Piece<T: Pooled<COUNT>, const COUNT: usize> {
    at: NonNull<T>,
    owned: PhantomData<T>,
}

// SAFETY: it owns its values, as a box does.
unsafe impl<T: Pooled<COUNT> + Send, const COUNT: usize> Send for Piece<T, COUNT> {}
// SAFETY: as above.
unsafe impl<T: Pooled<COUNT> + Sync, const COUNT: usize> Sync for Piece<T, COUNT> {}

impl<T: Pooled<COUNT>, const COUNT: usize> Piece<T, COUNT> {
    /// A piece with `value` everywhere.
    pub fn filled(value: T) -> Self {
        let at: NonNull<T> = T::pool().0.lock().take().cast();
        for index in 0..COUNT {
            // SAFETY: the piece has room for that many, and is aligned for what 64 bytes align.
            unsafe { at.add(index).write(value) };
        }
        Self { at, owned: PhantomData }
    }
}

impl<T: Pooled<COUNT>, const COUNT: usize> std::ops::Deref for Piece<T, COUNT> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: all values were written when the piece was made.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), COUNT) }
    }
}

impl<T: Pooled<COUNT>, const COUNT: usize> std::ops::DerefMut for Piece<T, COUNT> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and there is no other way to them.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), COUNT) }
    }
}

impl<T: Pooled<COUNT>, const COUNT: usize> Drop for Piece<T, COUNT> {
    fn drop(&mut self) {
        T::pool().0.lock().give(self.at.cast());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Pooled<2> for [u64; 512] {
        fn pool() -> &'static Sizes {
            static POOL: Sizes = Sizes::new(8192);
            &POOL
        }
    }

    /// Pieces never overlap, and come back.
    #[test]
    fn pieces_are_apart() {
        let mut pieces: Vec<Piece<[u64; 512], 2>> = (0..700).map(|number| Piece::filled([number; 512])).collect();
        for round in 0..3_u64 {
            for (number, piece) in pieces.iter_mut().enumerate() {
                assert!(piece.iter().flatten().all(|&value| value == number as u64 + round * 1000));
                piece.fill([number as u64 + (round + 1) * 1000; 512]);
            }
            let kept: Vec<_> = pieces.drain(..).enumerate().filter(|(number, _)| number % 3 == 0).collect();
            let more = 700 - kept.len();
            let kept_numbers: Vec<u64> = kept.iter().map(|(number, _)| *number as u64).collect();
            drop(
                (0..more)
                    .map(|_| Piece::<[u64; 512], 2>::filled([7; 512]))
                    .collect::<Vec<_>>(),
            );
            assert!(
                kept.iter()
                    .zip(kept_numbers)
                    .all(|((_, piece), number)| piece[1][511] == number + (round + 1) * 1000)
            );
            pieces = (0..700)
                .map(|number| Piece::filled([number + (round + 1) * 1000; 512]))
                .collect();
        }
        pieces.clear();
        let pool = <[u64; 512] as Pooled<2>>::pool().0.lock();
        assert!(pool.open.len() <= SPARE && pool.empty == pool.open.len());
    }
}
