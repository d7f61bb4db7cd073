//! Memory for tables and records: pieces of a few sizes, allocated from huge pages.
//!
//! Everything in an index is found by hashes, so nearly every access is to a different page than the previous access. With pages of 4 KiB,
//! nearly all accesses also miss the processor's TLB, which costs as much as the access itself. All pieces in one huge page share a TLB
//! entry. The pool also returns whole regions to the system, which a general allocator can rarely do.
//!
//! A region is one huge page. A region is divided into spans, and each span into pieces of one size. Pieces of all sizes share the regions,
//! so a growing index has at most one partly used region, and can request huge pages early.

use std::alloc::{Layout, handle_alloc_error};
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
#[cfg(not(thread_sanitizer))]
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once};

/// Number of bytes of a region: one huge page of x86-64 and of most other processors.
const REGION_BYTES: usize = 2 << 20;
/// Number of bytes of a span. A span holds the records of one chunk, 12 segments of a table, or 8 wide segments.
const SPAN_BYTES: usize = 24 << 10;
/// Number of spans of a region. The region's header follows the spans.
const SPANS_PER_REGION: usize = REGION_BYTES / SPAN_BYTES;
/// Maximum number of pieces of a span.
const MAX_PIECES: usize = 16;
/// Number of empty regions that are kept, so that an index at a limit does not allocate and free regions repeatedly.
const SPARE_REGIONS: usize = 1;
/// Number of regions at which the pool begins to request huge pages. A huge page occupies memory even where it is unused; with this many
/// regions, the unused memory is at most an eighth of the total.
const MIN_HUGE_REGIONS: usize = 8;
/// `prepare` gets memory from the system if fewer spans than this are free: an event of 1,000 blocks takes two spans.
const MIN_FREE_SPANS: usize = 3;

/// The header at the end of each region.
struct Header {
    /// A bit for each free span.
    free: [u64; SPANS_PER_REGION.div_ceil(64)],
    used: usize,
    is_listed: bool,
    /// For each span, a bit for each of its free pieces.
    pieces: [u16; SPANS_PER_REGION],
    /// For each span, its position in the list of spans with free pieces of the same size.
    places: [u32; SPANS_PER_REGION],
}

const HEADER: usize = REGION_BYTES - SPANS_PER_REGION * SPAN_BYTES;
const _: () = assert!(size_of::<Header>() <= HEADER && HEADER.is_multiple_of(align_of::<Header>()));

/// A span, identified by its region and its number in the region.
#[derive(Clone, Copy)]
struct Span {
    header: NonNull<Header>,
    number: usize,
}

impl Span {
    fn containing(piece: NonNull<u8>) -> Self {
        let offset = piece.addr().get() & (REGION_BYTES - 1);
        let end = piece.addr().get() - offset + SPANS_PER_REGION * SPAN_BYTES;
        // SAFETY: regions are aligned to their size, so this is the address of the header of the region that holds the piece.
        let header = unsafe { NonNull::new_unchecked(piece.as_ptr().with_addr(end).cast()) };
        Self {
            header,
            number: offset / SPAN_BYTES,
        }
    }

    fn start(self) -> NonNull<u8> {
        // SAFETY: the spans of a region are before its header.
        unsafe {
            self.header
                .cast::<u8>()
                .byte_sub((SPANS_PER_REGION - self.number) * SPAN_BYTES)
        }
    }
}

/// All pieces.
struct Pool {
    /// Regions with free spans.
    open: Vec<NonNull<Header>>,
    /// The element `n` lists the spans that are cut into `n` pieces and have a free piece.
    cut: [Vec<Span>; MAX_PIECES + 1],
    empty: usize,
    mapped: usize,
    free: usize,
}

// SAFETY: a pool owns its regions, and any thread can use their memory.
unsafe impl Send for Pool {}

/// This is a lock of the standard library, since its locks share no state that a forked child could find locked.
static POOL: Mutex<Pool> = Mutex::new(Pool::new());
/// Number of mapped regions after the last change, readable without the lock.
static MAPPED_REGIONS: AtomicUsize = AtomicUsize::new(0);
/// Number of free spans after the last change, readable without the lock.
static FREE_SPANS: AtomicUsize = AtomicUsize::new(0);

/// Whether `prepare` would get memory from the system.
#[inline]
pub fn must_prepare() -> bool {
    FREE_SPANS.load(Ordering::Relaxed) < MIN_FREE_SPANS && MAPPED_REGIONS.load(Ordering::Relaxed) >= MIN_HUGE_REGIONS
}

/// Gets memory from the system in advance. The system clears a huge page, which takes as long as storing thousands of blocks, so threads
/// call this without holding a lock.
pub fn prepare() {
    if must_prepare() {
        let region = map(true);
        pool().add(region);
    }
}

fn pool() -> MutexGuard<'static, Pool> {
    // The sanitizer does not see waits for this lock, since the standard library was built without sanitizer support.
    #[cfg(thread_sanitizer)]
    loop {
        match POOL.try_lock() {
            Ok(pool) => return pool,
            Err(_) => std::thread::yield_now(),
        }
    }
    #[cfg(not(thread_sanitizer))]
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static HELD_LOCK: Cell<Option<MutexGuard<'static, Pool>>> = const { Cell::new(None) };
}

/// Makes this process lock the pool during each fork. So no other thread changes the pool during the fork, and the child inherits a
/// consistent pool.
fn lock_while_forking() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // SAFETY: the functions take and return nothing, and live as long as the process.
        unsafe { libc::pthread_atfork(Some(lock_pool), Some(release), Some(release)) };
    });
}

/// Locks the pool until this thread, or the only thread of a forked child, calls `release`.
extern "C" fn lock_pool() {
    let _ = HELD_LOCK.try_with(|held| held.set(Some(pool())));
}

extern "C" fn release() {
    let _ = HELD_LOCK.try_with(Cell::take);
}

impl Pool {
    const fn new() -> Self {
        Self {
            open: Vec::new(),
            cut: [const { Vec::new() }; MAX_PIECES + 1],
            empty: 0,
            mapped: 0,
            free: 0,
        }
    }

    /// Returns a piece of a span that is divided into `cut` pieces.
    fn take(&mut self, cut: usize) -> NonNull<u8> {
        let span = match self.cut[cut].last() {
            Some(&span) => span,
            None => self.cut_span(cut),
        };
        // SAFETY: `cut` names spans of mapped regions, whose headers only the holder of the pool's lock uses.
        let free = unsafe { &mut (*span.header.as_ptr()).pieces[span.number] };
        let at = free.trailing_zeros() as usize;
        *free &= *free - 1;
        if *free == 0 {
            self.cut[cut].pop();
        }
        // SAFETY: the piece is inside of the span.
        unsafe { span.start().byte_add(at * (SPAN_BYTES / cut)) }
    }

    fn give(&mut self, cut: usize, piece: NonNull<u8>) {
        let span = Span::containing(piece);
        let at = (piece.addr().get() - span.start().addr().get()) / (SPAN_BYTES / cut);
        // SAFETY: the piece came from `take`, so its region is mapped, and the pool's lock is held.
        let header = unsafe { &mut *span.header.as_ptr() };
        let before = header.pieces[span.number];
        let after = before | 1 << at;
        header.pieces[span.number] = after;
        if after.count_ones() as usize == cut {
            if before != 0 {
                self.unlist(cut, header.places[span.number] as usize);
            }
            self.give_span(span);
        } else if before == 0 {
            header.places[span.number] = self.cut[cut].len() as u32;
            self.cut[cut].push(span);
        }
    }

    /// Cuts a free span into pieces.
    fn cut_span(&mut self, cut: usize) -> Span {
        let span = self.take_span();
        // SAFETY: as in `take`.
        let header = unsafe { &mut *span.header.as_ptr() };
        header.pieces[span.number] = u16::MAX >> (MAX_PIECES - cut);
        header.places[span.number] = self.cut[cut].len() as u32;
        self.cut[cut].push(span);
        span
    }

    /// Removes a span from the list of spans with free pieces; the last span of the list takes its position.
    fn unlist(&mut self, cut: usize, place: usize) {
        self.cut[cut].swap_remove(place);
        if let Some(moved) = self.cut[cut].get(place) {
            // SAFETY: as in `take`.
            unsafe { (*moved.header.as_ptr()).places[moved.number] = place as u32 };
        }
    }

    fn take_span(&mut self) -> Span {
        let header = match self.open.last() {
            Some(&header) => header,
            None => {
                let header = map(self.mapped >= MIN_HUGE_REGIONS);
                self.add(header);
                header
            }
        };
        // SAFETY: headers in `open` belong to mapped regions, and the pool's lock is held.
        let found = unsafe { &mut *header.as_ptr() };
        self.empty -= usize::from(found.used == 0);
        let word = found.free.iter().position(|&bits| bits != 0).unwrap_or(0);
        let number = word * 64 + found.free[word].trailing_zeros() as usize;
        found.free[word] &= found.free[word] - 1;
        found.used += 1;
        if found.used == SPANS_PER_REGION {
            found.is_listed = false;
            self.open.pop();
        }
        self.count(self.free - 1);
        Span { header, number }
    }

    fn give_span(&mut self, Span { header, number }: Span) {
        // SAFETY: as in `give`.
        let found = unsafe { &mut *header.as_ptr() };
        found.free[number / 64] |= 1 << (number % 64);
        found.used -= 1;
        self.count(self.free + 1);
        if !found.is_listed {
            found.is_listed = true;
            self.open.push(header);
        }
        if found.used > 0 {
            return;
        }
        if self.empty < SPARE_REGIONS {
            self.empty += 1;
            return;
        }
        self.open.retain(|&other| other != header);
        self.mapped -= 1;
        self.count(self.free - SPANS_PER_REGION);
        // SAFETY: no span of this region is in use, and no list contains the region any more.
        unsafe { libc::munmap(header.as_ptr().byte_sub(SPANS_PER_REGION * SPAN_BYTES).cast(), REGION_BYTES) };
    }

    /// Adds a new region.
    fn add(&mut self, header: NonNull<Header>) {
        self.open.push(header);
        self.empty += 1;
        self.mapped += 1;
        self.count(self.free + SPANS_PER_REGION);
    }

    fn count(&mut self, free: usize) {
        self.free = free;
        FREE_SPANS.store(free, Ordering::Relaxed);
        MAPPED_REGIONS.store(self.mapped, Ordering::Relaxed);
    }
}

#[cfg(target_os = "linux")]
const HUGE_PAGES: libc::c_int = libc::MADV_HUGEPAGE;
#[cfg(not(target_os = "linux"))]
const HUGE_PAGES: libc::c_int = libc::MADV_NORMAL;

/// Allocates a region, and requests huge pages for it if `is_huge`.
#[cold]
fn map(is_huge: bool) -> NonNull<Header> {
    lock_while_forking();
    // SAFETY: the calls have no preconditions; memory that is mapped outside of the aligned region is unmapped at once.
    let base = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let found = libc::mmap(
            std::ptr::null_mut(),
            2 * REGION_BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        if found == libc::MAP_FAILED {
            handle_alloc_error(Layout::from_size_align_unchecked(REGION_BYTES, REGION_BYTES));
        }
        let before = found.addr().wrapping_neg() & (REGION_BYTES - 1);
        let base = found.byte_add(before);
        if before > 0 {
            libc::munmap(found, before);
        }
        libc::munmap(base.byte_add(REGION_BYTES), REGION_BYTES - before);
        // The call is only advice: a region without huge pages works too, but is slower.
        if is_huge && cfg!(target_os = "linux") {
            libc::madvise(base, REGION_BYTES, HUGE_PAGES);
        }
        base
    };
    let mut free = [0; SPANS_PER_REGION.div_ceil(64)];
    for number in 0..SPANS_PER_REGION {
        free[number / 64] |= 1 << (number % 64);
    }
    // SAFETY: the header is inside of the new region, which no other thread knows. The write also makes the system allocate the huge page.
    unsafe {
        let header = base.byte_add(SPANS_PER_REGION * SPAN_BYTES).cast::<Header>();
        header.write(Header {
            free,
            used: 0,
            is_listed: true,
            pieces: [0; SPANS_PER_REGION],
            places: [0; SPANS_PER_REGION],
        });
        NonNull::new_unchecked(header)
    }
}

/// Room for `COUNT` values, aligned to 64 bytes.
pub struct Piece<T, const COUNT: usize> {
    at: NonNull<T>,
    owned: PhantomData<T>,
}

// SAFETY: a piece owns its values, as a box does.
unsafe impl<T: Send, const COUNT: usize> Send for Piece<T, COUNT> {}
// SAFETY: as above.
unsafe impl<T: Sync, const COUNT: usize> Sync for Piece<T, COUNT> {}

impl<T, const COUNT: usize> Piece<T, COUNT> {
    /// Number of pieces of a span.
    const CUT: usize = {
        let size = COUNT * size_of::<T>();
        assert!(
            SPAN_BYTES.is_multiple_of(size)
                && SPAN_BYTES / size <= MAX_PIECES
                && size.is_multiple_of(64)
                && align_of::<T>() <= 64
        );
        assert!(!std::mem::needs_drop::<T>(), "values are given back without being dropped");
        SPAN_BYTES / size
    };

    /// Creates a piece whose values are computed one by one.
    pub fn from_fn(make: impl Fn() -> T) -> Self {
        let at: NonNull<T> = pool().take(Self::CUT).cast();
        let piece = Self { at, owned: PhantomData };
        for index in 0..COUNT {
            // SAFETY: the piece has room for `COUNT` values, and is aligned to 64 bytes, which suffices for `T`.
            unsafe { at.add(index).write(make()) };
        }
        piece
    }

    /// Creates a piece in which each value is `value`.
    pub fn from_value(value: T) -> Self
    where
        T: Copy,
    {
        Self::from_fn(|| value)
    }

    /// Turns the piece into a pointer, which owns the piece until the pointer is given to `from_raw`.
    pub fn into_raw(self) -> NonNull<T> {
        ManuallyDrop::new(self).at
    }

    /// Turns a pointer into a piece again.
    ///
    /// # Safety
    /// The pointer is from `into_raw` of the same kind of piece, and owns that piece.
    pub unsafe fn from_raw(at: NonNull<T>) -> Self {
        Self { at, owned: PhantomData }
    }
}

impl<T, const COUNT: usize> std::ops::Deref for Piece<T, COUNT> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: all values were written when the piece was made.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), COUNT) }
    }
}

impl<T, const COUNT: usize> std::ops::DerefMut for Piece<T, COUNT> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and no other reference to the values exists.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), COUNT) }
    }
}

impl<T, const COUNT: usize> Drop for Piece<T, COUNT> {
    fn drop(&mut self) {
        pool().give(Self::CUT, self.at.cast());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces never overlap, and freed pieces are used again.
    #[test]
    fn pieces_do_not_overlap() {
        let mut pieces: Vec<Piece<[u64; 512], 2>> = (0..700).map(|number| Piece::from_value([number; 512])).collect();
        for round in 0..3_u64 {
            for (number, piece) in pieces.iter_mut().enumerate() {
                assert!(piece.iter().flatten().all(|&value| value == number as u64 + round * 1000));
                piece.fill([number as u64 + (round + 1) * 1000; 512]);
            }
            let live: Vec<_> = pieces.drain(..).enumerate().filter(|(number, _)| number % 3 == 0).collect();
            let more = 700 - live.len();
            let live_numbers: Vec<u64> = live.iter().map(|(number, _)| *number as u64).collect();
            drop(
                (0..more)
                    .map(|_| Piece::<[u64; 512], 2>::from_value([7; 512]))
                    .collect::<Vec<_>>(),
            );
            assert!(
                live.iter()
                    .zip(live_numbers)
                    .all(|((_, piece), number)| piece[1][511] == number + (round + 1) * 1000)
            );
            pieces = (0..700)
                .map(|number| Piece::from_value([number + (round + 1) * 1000; 512]))
                .collect();
        }
        pieces.clear();
        assert!(pool().cut[3].is_empty());
    }

    /// Pieces of all sizes share regions, in any order of allocation and release.
    #[test]
    fn sizes_share_regions() {
        fn turn<const COUNT: usize>(live: &mut Vec<(u64, Piece<u64, COUNT>)>, number: u64, random: usize) {
            if random.is_multiple_of(5) || live.len() < 200 {
                live.push((number, Piece::from_value(number)));
            } else {
                let (number, piece) = live.swap_remove(random % live.len());
                assert!(piece.iter().all(|&value| value == number));
            }
        }
        let (mut small, mut middle, mut large) = (Vec::new(), Vec::new(), Vec::new());
        let mut random = 1_usize;
        for number in 0..20_000 {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            match random >> 60 {
                0..=6 => turn::<256>(&mut small, number, random >> 32),
                7..=13 => turn::<384>(&mut middle, number, random >> 32),
                _ => turn::<3072>(&mut large, number, random >> 32),
            }
        }
        assert!(small.iter().all(|(number, piece)| piece.iter().all(|value| value == number)));
        assert!(middle.iter().all(|(number, piece)| piece.iter().all(|value| value == number)));
        assert!(large.iter().all(|(number, piece)| piece.iter().all(|value| value == number)));
    }
}
