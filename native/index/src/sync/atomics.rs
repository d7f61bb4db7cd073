//! The atomic numbers and the lock by which a writer and lookups share a view. For model checks (`make model`), loom provides them and
//! tries all orders of threads and memory accesses.

#[cfg(not(all(loom, test)))]
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, fence};

#[cfg(not(all(loom, test)))]
pub(crate) use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(all(loom, test))]
pub(crate) use loom::sync::atomic::fence;

#[cfg(all(loom, test))]
pub(crate) use checked::{AtomicU32, AtomicU64, RwLock, be_the_writer};

#[cfg(all(loom, test))]
pub(crate) use loom::sync::{RwLockReadGuard, RwLockWriteGuard};

#[cfg(all(loom, test))]
mod checked {
    use std::cell::Cell;
    use std::sync::atomic::Ordering;

    use loom::sync::{RwLockReadGuard, RwLockWriteGuard, atomic};

    loom::thread_local! {
        static IS_WRITER: Cell<bool> = Cell::new(false);
    }

    /// Declares that this thread is the only one that stores values.
    pub fn be_the_writer() {
        IS_WRITER.with(|is_writer| is_writer.set(true));
    }

    macro_rules! atomic {
        ($name:ident, $number:ty) => {
            #[derive(Debug)]
            pub struct $name(atomic::$name);

            impl $name {
                pub fn new(value: $number) -> Self {
                    Self(atomic::$name::new(value))
                }

                /// Loads a value. If the writer loads a value that it has stored itself, loom must not notice the load. Loom remembers only
                /// the latest access to a number. After such a load, loom would not try to run the writer's next store before a lookup.
                pub fn load(&self, order: Ordering) -> $number {
                    if IS_WRITER.with(Cell::get) {
                        // SAFETY: no other thread stores a value; loom checks this condition.
                        unsafe { self.0.unsync_load() }
                    } else {
                        self.0.load(order)
                    }
                }

                pub fn store(&self, value: $number, order: Ordering) {
                    self.0.store(value, order);
                }
            }
        };
    }

    atomic!(AtomicU32, u32);
    atomic!(AtomicU64, u64);

    /// A lock of loom with the interface of `parking_lot`.
    #[derive(Debug)]
    pub struct RwLock<T>(loom::sync::RwLock<T>);

    impl<T> RwLock<T> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::RwLock::new(value))
        }

        pub fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().expect("a model stops at its first panic")
        }

        pub fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().expect("a model stops at its first panic")
        }
    }
}
