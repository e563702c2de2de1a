//! Ends the sleep of one thread from any other: a flag, and the word or descriptor that the thread sleeps on.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

use super::{Sleep, Watch, Word};
use crate::sync::{AtomicBool, Ordering};

/// The alarm of a thread that sleeps on it, among others, until it is rung: through its [`waker`](Self::waker), from any thread.
///
/// | word | writer | reader | pairing |
/// |---|---|---|---|
/// | `is_rung` | any thread, to `true`; the sleeper, to `false` | the sleeper | Release and Acquire: a woken thread sees the stores before the ring. Both accesses are read-modify-writes, so a ring that finds the flag set merges with the earlier ring |
#[derive(Debug, Default)]
pub struct Alarm {
    is_rung: AtomicBool,
    sleep: Sleep,
    /// An eventfd(2), for a thread that sleeps in poll(2).
    descriptor: Option<OwnedFd>,
}

impl Alarm {
    /// Makes an alarm with a descriptor too, for a thread that sleeps in poll(2).
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn with_descriptor() -> io::Result<Self> {
        // SAFETY: plain numbers; no other code has the descriptor.
        let descriptor = unsafe {
            match libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
                -1 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        Ok(Self { descriptor: Some(descriptor), ..Self::default() })
    }

    /// Returns the descriptor, which is readable from a ring until [`take`](Self::take).
    #[must_use]
    pub fn descriptor(&self) -> Option<RawFd> {
        self.descriptor.as_ref().map(OwnedFd::as_raw_fd)
    }

    /// Returns whether the alarm was rung since the last call.
    pub fn take(&self) -> bool {
        let is_rung = self.is_rung.swap(false, Ordering::AcqRel);
        if let (true, Some(fd)) = (is_rung, self.descriptor()) {
            let mut rings = 0u64;
            // If the ring has not yet written the descriptor, the next sleep ends early.
            // SAFETY: room for the counter.
            unsafe { libc::read(fd, (&raw mut rings).cast(), size_of::<u64>()) };
        }
        is_rung
    }

    /// Returns a waker that rings the alarm.
    #[must_use]
    pub fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(Arc::clone(self))
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_rung.swap(true, Ordering::AcqRel) {
            return;
        }
        self.sleep.wake();
        if let Some(fd) = self.descriptor() {
            // SAFETY: 8 bytes.
            unsafe { libc::write(fd, (&raw const ONE).cast(), size_of::<u64>()) };
        }
    }
}

static ONE: u64 = 1;

impl Watch for &Alarm {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.sleep.word());
    }

    fn look(&mut self, _is_told: bool) -> bool {
        self.is_rung.load(Ordering::Acquire)
    }

    fn slice(&mut self) -> Duration {
        Duration::MAX
    }
}
