//! The allocator of all sides: mimalloc, or the system's allocator if memory is measured. Wheels use the system's allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

use mimalloc::MiMalloc;

/// The environment variable that selects the allocator, and its value for the system's allocator.
const VARIABLE: &CStr = c"KVEVENTS_BENCH_ALLOCATOR";
const SYSTEM: &CStr = c"system";

/// Makes a process of this program use the system's allocator.
pub fn use_system(command: &mut Command) -> &mut Command {
    command.env(OsStr::from_bytes(VARIABLE.to_bytes()), OsStr::from_bytes(SYSTEM.to_bytes()))
}

const UNKNOWN: u8 = 0;
const MIMALLOC: u8 = 1;
const OF_SYSTEM: u8 = 2;

/// Whether the process uses the system's allocator; determined at the first allocation, and constant afterwards.
static CHOICE: AtomicU8 = AtomicU8::new(UNKNOWN);

#[global_allocator]
static ALLOCATOR: Chosen = Chosen;

struct Chosen;

#[cold]
fn choose() -> u8 {
    // SAFETY: both texts end with a zero. The first allocation is in the start of the runtime, before any code changes the environment.
    let value = unsafe {
        let value = libc::getenv(VARIABLE.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    };
    let choice = if value == Some(SYSTEM) { OF_SYSTEM } else { MIMALLOC };
    CHOICE.store(choice, Ordering::Relaxed);
    choice
}

#[inline]
fn is_mimalloc() -> bool {
    match CHOICE.load(Ordering::Relaxed) {
        UNKNOWN => choose() == MIMALLOC,
        choice => choice == MIMALLOC,
    }
}

// SAFETY: all calls go to the same one of two sound allocators, since the choice is made before the first allocation.
unsafe impl GlobalAlloc for Chosen {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller fulfils the conditions of `GlobalAlloc`, which are those of both allocators.
        unsafe {
            if is_mimalloc() {
                MiMalloc.alloc(layout)
            } else {
                System.alloc(layout)
            }
        }
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above, and the chosen allocator has created the pointer.
        unsafe {
            if is_mimalloc() {
                MiMalloc.dealloc(pointer, layout)
            } else {
                System.dealloc(pointer, layout)
            }
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        unsafe {
            if is_mimalloc() {
                MiMalloc.alloc_zeroed(layout)
            } else {
                System.alloc_zeroed(layout)
            }
        }
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        unsafe {
            if is_mimalloc() {
                MiMalloc.realloc(pointer, layout, size)
            } else {
                System.realloc(pointer, layout, size)
            }
        }
    }
}
