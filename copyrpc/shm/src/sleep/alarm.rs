//! The end of one thread's sleep by any other thread: a flag, and the word or descriptor on which
//! the thread sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};

use super::{Sleep, Watch, Word};
use crate::sync::{AtomicBool, Ordering};

/// An alarm, on which one thread sleeps, alone or with other conditions. Any thread can ring it
/// through its [`waker`](Self::waker).
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
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            descriptor: Some(descriptor),
            ..Self::default()
        })
    }

    /// Returns the descriptor, which is readable from a ring until [`take`](Self::take); `None` if
    /// the alarm was made without a descriptor.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// Returns whether the alarm was rung since the last call.
    pub fn take(&self) -> bool {
        let is_rung = self.is_rung.swap(false, Ordering::AcqRel);
        if let (true, Some(fd)) = (is_rung, self.descriptor()) {
            // If the ring has not yet written the descriptor, the next sleep ends early.
            let _ = read(fd, &mut [0; size_of::<u64>()]);
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
            let _ = write(fd, &1_u64.to_ne_bytes());
        }
    }
}

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
