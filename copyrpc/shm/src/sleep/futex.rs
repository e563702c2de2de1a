//! The system calls that sleep on words, and wake sleepers.

use std::time::Duration;

#[cfg(not(loom))]
use super::SHORT_SLICE;
use super::Watch;
use crate::sync::{AtomicU32, Ordering};

/// Maximum number of words of one sleep: `FUTEX_WAITV_MAX` of linux/futex.h.
const WORDS_MAX: usize = 128;
/// `FUTEX2_SIZE_U32`, for words shared between processes.
const SHARED_U32: u32 = 2;

/// A word and its earlier value: `struct futex_waitv` of linux/futex.h.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct KnownWord {
    value: u64,
    address: u64,
    flags: u32,
    _reserved: u32,
}

const _: () = assert!(size_of::<KnownWord>() == 24);

/// The values of a sleep's words before their flags were raised.
pub(super) struct Known {
    words: [KnownWord; WORDS_MAX],
    count: usize,
    /// Whether there were more words than a sleep takes.
    is_short: bool,
}

impl Default for Known {
    fn default() -> Self {
        Self {
            words: [KnownWord::default(); WORDS_MAX],
            count: 0,
            is_short: false,
        }
    }
}

impl Known {
    /// Stores the present value of a word. Returns `false` if the sleep takes no more words.
    pub(super) fn note(&mut self, word: &AtomicU32) -> bool {
        let Some(known) = self.words.get_mut(self.count) else {
            self.is_short = true;
            return false;
        };
        // W2, W4 (module `sleep`): the thread sleeps only while the word has this value.
        let value = word.load(Ordering::Acquire).into();
        *known = KnownWord {
            value,
            address: std::ptr::from_ref(word).addr() as u64,
            flags: SHARED_U32,
            _reserved: 0,
        };
        self.count += 1;
        true
    }

    /// Sleeps while all words are unchanged, at most for `longest`. The sleep may end early.
    #[cfg(not(loom))]
    pub(super) fn sleep(&self, _: &mut dyn Watch, longest: Duration) {
        let longest = if self.is_short {
            longest.min(SHORT_SLICE)
        } else {
            longest
        };
        match self.words.get(..self.count).unwrap_or_default() {
            [] => std::thread::sleep(longest),
            [word] => wait(word, longest),
            words @ [first, ..] => {
                if !wait_for_any(words, longest) {
                    wait(first, longest.min(SHORT_SLICE));
                }
            }
        }
    }

    /// Sleeps without a timeout under loom, so that a lost wake-up shows as a deadlock.
    #[cfg(loom)]
    pub(super) fn sleep(&self, watch: &mut dyn Watch, _: Duration) {
        let mut has_changed = false;
        while !has_changed {
            crate::sync::yield_now();
            let mut known = self.words.iter();
            watch.words(&mut |word| {
                has_changed |= known.next().is_some_and(|known| {
                    known.value != u64::from(word.wakes.load(Ordering::Acquire))
                });
            });
        }
    }
}

/// Wakes the sleepers on `word`, in any process.
#[cfg(not(loom))]
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: the address is valid; the kernel uses it only to find the sleepers on it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

#[cfg(loom)]
pub(super) fn wake(_: &AtomicU32) {}

#[cfg(not(loom))]
fn timespec(time: Duration) -> libc::timespec {
    let seconds = time.as_secs().min(i32::MAX as u64);
    libc::timespec {
        tv_sec: seconds as _,
        tv_nsec: time.subsec_nanos() as _,
    }
}

#[cfg(not(loom))]
fn wait(word: &KnownWord, longest: Duration) {
    let timeout = timespec(longest);
    // SAFETY: the kernel reads the word, and fails where there is none; the timeout lives through
    // the call. Any return is only a reason to check again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.address,
            libc::FUTEX_WAIT,
            word.value as u32,
            &raw const timeout,
        )
    };
}

/// Sleeps while all words are unchanged, at most for `longest`. Returns `false` if the kernel
/// cannot sleep on several words; then the thread has not slept.
#[cfg(not(loom))]
fn wait_for_any(words: &[KnownWord], longest: Duration) -> bool {
    use std::sync::atomic::AtomicBool;
    /// Set once the kernel refused the call: an old kernel lacks it, a sandbox may forbid it.
    static IS_MISSING: AtomicBool = AtomicBool::new(false);

    if IS_MISSING.load(std::sync::atomic::Ordering::Relaxed) {
        return false;
    }
    let end = timespec(Duration::from_nanos(crate::clock::monotonic_ns()).saturating_add(longest));
    // SAFETY: the kernel reads `words.len()` entries and the time, which live through the call. It
    // reads the words too, and fails where there is none.
    let ended = unsafe {
        libc::syscall(
            libc::SYS_futex_waitv,
            words.as_ptr(),
            words.len(),
            0,
            &raw const end,
            libc::CLOCK_MONOTONIC,
        )
    };
    let error = std::io::Error::last_os_error().raw_os_error();
    // The thread was woken, or has a reason to check again.
    if ended >= 0 || matches!(error, Some(libc::EAGAIN | libc::ETIMEDOUT | libc::EINTR)) {
        return true;
    }
    if matches!(error, Some(libc::ENOSYS | libc::EPERM)) {
        IS_MISSING.store(true, std::sync::atomic::Ordering::Relaxed);
    }
    false
}
