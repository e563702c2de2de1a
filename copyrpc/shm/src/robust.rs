//! The cheap hint that a region's owner died: a robust process-shared mutex that is held by the
//! thread that created the region.
//!
//! When a thread ends, however it ends, the kernel sets `FUTEX_OWNER_DIED` in the futex words that
//! the thread holds. So peers detect a death with one load. It is a hint only: a *thread* that ends
//! marks the word as well, although its process lives. [`crate::region`] has the proof of a death.

use std::cell::UnsafeCell;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

/// linux/futex.h `FUTEX_OWNER_DIED`.
const OWNER_DIED: u32 = 0x4000_0000;
/// linux/futex.h `FUTEX_TID_MASK`.
const TID_MASK: u32 = 0x3fff_ffff;
/// Offset of the futex word in the C library's `pthread_mutex_t`, as checked by `lock_new`.
const WORD_OFFSET: usize = if cfg!(target_env = "musl") { 4 } else { 0 };

pub(crate) const ROBUST_BYTES: usize = 64;

/// A `pthread_mutex_t` in shared memory. Zeroed bytes are a word that was never held.
#[repr(C, align(64))]
pub(crate) struct RobustWord(UnsafeCell<[u8; ROBUST_BYTES]>);

const _: () = {
    assert!(size_of::<libc::pthread_mutex_t>() <= ROBUST_BYTES);
    assert!(align_of::<libc::pthread_mutex_t>() <= align_of::<RobustWord>());
    assert!(size_of::<RobustWord>() == ROBUST_BYTES);
};

// SAFETY: after `lock_new` only the C library, the kernel and atomic accesses touch the bytes.
unsafe impl Sync for RobustWord {}

/// Returns the hint of a header that was read from the file and is not mapped; `bytes` are its
/// [`RobustWord`].
pub(crate) fn owner_died_in(bytes: &[u8; ROBUST_BYTES]) -> bool {
    let word = bytes
        .get(WORD_OFFSET..)
        .and_then(|b| b.first_chunk::<4>())
        .copied();
    word.is_some_and(|word| owner_died(u32::from_ne_bytes(word)))
}

/// Returns whether `word`, the value of a region's
/// [`owner_word`](crate::region::Region::owner_word), shows that the owner may be gone: the word is
/// 0, or is marked.
#[must_use]
#[inline(always)]
pub const fn owner_may_be_gone(word: u32) -> bool {
    // The uppermost bit, which marks waiters, is shifted out. Then the mark is the sign bit, so the
    // word is positive exactly if it is not marked and not zero.
    (word << 1) as i32 <= 0
}

/// Returns whether the owner died, and no thread took the mutex over.
fn owner_died(word: u32) -> bool {
    word & OWNER_DIED != 0 && word & TID_MASK == 0
}

impl RobustWord {
    pub(crate) fn word(&self) -> &AtomicU32 {
        // SAFETY: the offset lies inside the bytes and is aligned to 4; an atomic may be shared.
        unsafe {
            &*self
                .0
                .get()
                .cast::<u8>()
                .add(WORD_OFFSET)
                .cast::<AtomicU32>()
        }
    }

    fn mutex(&self) -> *mut libc::pthread_mutex_t {
        self.0.get().cast()
    }

    /// Initialises the mutex and locks it for the calling thread.
    ///
    /// # Safety
    /// The memory is zeroed, no other thread or process uses it yet, and it stays mapped until
    /// [`unlock`](Self::unlock) returned `true` or the calling thread ended: it is in that thread's
    /// robust list.
    pub(crate) unsafe fn lock_new(&self) -> io::Result<()> {
        let mut attributes = std::mem::MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        let attributes = attributes.as_mut_ptr();
        // SAFETY: `attributes` is initialised by the first call and destroyed by the last. The
        // mutex is zeroed, and only this thread uses it (contract of this function).
        unsafe {
            check(libc::pthread_mutexattr_init(attributes))?;
            let made = check(libc::pthread_mutexattr_setrobust(
                attributes,
                libc::PTHREAD_MUTEX_ROBUST,
            ))
            .and_then(|()| {
                check(libc::pthread_mutexattr_setpshared(
                    attributes,
                    libc::PTHREAD_PROCESS_SHARED,
                ))
            })
            .and_then(|()| check(libc::pthread_mutex_init(self.mutex(), attributes)));
            libc::pthread_mutexattr_destroy(attributes);
            made?;
            check(libc::pthread_mutex_lock(self.mutex()))?;
        }
        // SAFETY: gettid takes no arguments.
        let tid = unsafe { libc::syscall(libc::SYS_gettid) };
        if i64::from(self.word().load(Ordering::Relaxed) & TID_MASK) == tid {
            return Ok(());
        }
        // SAFETY: this thread locked the mutex just now, and has not forked since.
        unsafe { self.unlock() };
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this C library keeps the futex word of a mutex at an unknown place",
        ))
    }

    /// Unlocks the mutex. Returns `false` if another thread locked it.
    ///
    /// # Safety
    /// [`lock_new`](Self::lock_new) succeeded and `unlock` has not returned `true` yet, and the
    /// process has not forked since.
    pub(crate) unsafe fn unlock(&self) -> bool {
        // SAFETY: the mutex is initialised (contract of this function). A robust mutex checks its
        // owner, and returns `EPERM` to another thread.
        unsafe { libc::pthread_mutex_unlock(self.mutex()) == 0 }
    }

    /// Sets the word to the value of a held mutex. This is for memory that only this process has:
    /// there the kernel does not maintain the word.
    pub(crate) fn hold(&self) {
        self.word().store(1, Ordering::Relaxed);
    }

    /// Marks the word, so that peers take the owner for gone although the mutex is locked. An
    /// unlocked mutex needs no mark.
    pub(crate) fn mark(&self) {
        self.word().fetch_or(OWNER_DIED, Ordering::Release);
    }

    /// Returns whether the thread that locked the mutex may have ended or have unlocked it, or
    /// whether the word is [marked](Self::mark). Costs one load.
    #[inline(always)]
    pub(crate) fn owner_may_have_died(&self) -> bool {
        // No read depends on this result, so it needs no ordering.
        owner_may_be_gone(self.word().load(Ordering::Relaxed))
    }

    /// Returns whether the thread that held the mutex ended, and no other took it. Costs one load.
    #[inline(always)]
    pub(crate) fn owner_died(&self) -> bool {
        // No read depends on this result, so it needs no ordering.
        owner_died(self.word().load(Ordering::Relaxed))
    }
}

fn check(code: libc::c_int) -> io::Result<()> {
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(code))
    }
}
