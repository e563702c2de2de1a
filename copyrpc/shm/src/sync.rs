//! The atomics of this crate and of every crate built on it: from `std` normally, from `loom` under
//! `--cfg loom`, so that the models check the code that is released.
//!
//! It also holds the asymmetric barrier pair with which a producer announces work without a fence
//! of its own, see [`LightBarrier`].

#[cfg(not(loom))]
pub use std::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering, fence},
    thread::yield_now,
};

#[cfg(loom)]
pub use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering, fence},
    thread::yield_now,
};

/// First value of a counter of 32 bits that may wrap to 0. With debug assertions and in models it
/// is one step before the last value of the counter, so that the counter wraps in every test. It is
/// for counters of one process, and for counters in shared memory whose first value all processes
/// read from there.
pub const FIRST: u32 = if cfg!(any(debug_assertions, loom)) {
    u32::MAX - 1
} else {
    0
};

#[cfg(loom)]
pub use loom::cell::UnsafeCell;

/// `UnsafeCell` with loom's access methods, so that loom can see every access to the payload that
/// an atomic guards.
#[cfg(not(loom))]
#[derive(Debug)]
#[repr(transparent)]
pub struct UnsafeCell<T: ?Sized>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    /// Wraps a value.
    pub const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Runs `f` with a pointer for reading. Dereferencing it is the caller's claim that no thread
    /// writes meanwhile.
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Runs `f` with a pointer for writing. Dereferencing it is the caller's claim of exclusive
    /// access.
    #[inline(always)]
    pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}

mod barrier {
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

    use super::fence;

    // Commands of linux/membarrier.h.
    const CMD_GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
    const CMD_REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;
    const CMD_PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
    const CMD_REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

    fn membarrier(command: libc::c_int) -> bool {
        // SAFETY: membarrier(2) takes plain integers and touches no memory of this process.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    }

    /// Whether this process is registered to receive expedited barriers. Set once.
    static REGISTERED: AtomicBool = AtomicBool::new(false);

    /// Returns whether the process is registered now, after one attempt.
    #[cold]
    fn register() -> bool {
        static TRIED: Once = Once::new();
        let register = || {
            membarrier(CMD_REGISTER_GLOBAL_EXPEDITED) && membarrier(CMD_REGISTER_PRIVATE_EXPEDITED)
        };
        TRIED.call_once(|| REGISTERED.store(register(), Ordering::Release));
        REGISTERED.load(Ordering::Acquire)
    }

    #[inline(always)]
    fn is_registered() -> bool {
        REGISTERED.load(Ordering::Relaxed) || register()
    }

    /// The producer's half of the store-load barrier: [execute](Self::execute) it between
    /// publishing and reading a flag that the consumer may raise.
    ///
    /// Where `membarrier(2)` works, the barrier costs nothing (a compiler fence: [`heavy_barrier`]
    /// makes every registered CPU execute the hardware fence at the moment it matters); elsewhere
    /// it is a full fence, as in models. Pairs with [`heavy_barrier`]. A value of this type stores
    /// whether this process needs the full fence, for producers that execute a barrier with every
    /// message.
    #[derive(Debug, Clone, Copy)]
    pub struct LightBarrier {
        is_fence: bool,
    }

    impl LightBarrier {
        /// Returns the barrier of this process. Registers the process if it is not registered yet,
        /// which may take long.
        #[must_use]
        #[inline(always)]
        pub fn of_process() -> Self {
            Self {
                is_fence: cfg!(loom) || !is_registered(),
            }
        }

        /// Returns whether the barrier is a full fence, so that a full fence suffices for the
        /// consumer too.
        #[must_use]
        pub fn is_fence(self) -> bool {
            self.is_fence
        }

        /// Executes the barrier.
        #[inline(always)]
        pub fn execute(self) {
            if self.is_fence {
                fence(Ordering::SeqCst);
            }
            compiler_fence(Ordering::SeqCst);
        }
    }

    /// Like [`LightBarrier::execute`], for a producer whose consumers are all in its process: the
    /// barrier never costs anything. Where `membarrier(2)` does not work, [`heavy_barrier`] returns
    /// `false` to these consumers, so they rely on no flag.
    #[inline(always)]
    pub fn light_barrier_within_process() {
        LightBarrier {
            is_fence: cfg!(loom),
        }
        .execute();
    }

    /// The consumer's half: call it between raising a flag and the last check for published work.
    ///
    /// After it returns `true`, every producer of this process either sees the flag, or its
    /// publication is found by that check. `false`: the system cannot give that guarantee (no
    /// `membarrier(2)`), so the caller must continue to poll and not rely on the flag.
    ///
    /// Rarely, the barrier may omit a producer of *another* process. Linux (6.18,
    /// kernel/sched/membarrier.c) finds the processors that run registered processes by a word in
    /// which each processor keeps the state of the last address space to which it switched. If a
    /// processor idles after it ran a process, and that process registers on another processor
    /// meanwhile, the word of the first processor keeps the old state until it switches to another
    /// address space. So a consumer that relies on a flag across processes must also check by
    /// itself from time to time. The barrier for the own process uses the address space itself, and
    /// omits no producer.
    #[must_use]
    pub fn heavy_barrier() -> bool {
        fence(Ordering::SeqCst);
        cfg!(loom)
            || (is_registered()
                && membarrier(CMD_PRIVATE_EXPEDITED)
                && membarrier(CMD_GLOBAL_EXPEDITED))
    }
}

pub use barrier::{LightBarrier, heavy_barrier, light_barrier_within_process};
