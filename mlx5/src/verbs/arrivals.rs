//! Ends a sleep on words when the device has an event: a thread waits for events on the completion channel.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use shm::sleep::{Alarm, Sleep, Watch, Word};
use shm::threads::without_signals;

/// The thread. Its drop ends it.
pub(super) struct Arrivals {
    sleep: Arc<Sleep>,
    end: Arc<Alarm>,
    thread: Option<JoinHandle<()>>,
}

impl Arrivals {
    /// Starts the thread, for the events of this channel.
    pub(super) fn of(channel: RawFd) -> io::Result<Self> {
        let (sleep, end) = (Arc::<Sleep>::default(), Arc::new(Alarm::with_descriptor()?));
        // SAFETY: plain numbers; no other code has the descriptor.
        let epoll = unsafe { OwnedFd::from_raw_fd(check(libc::epoll_create1(libc::EPOLL_CLOEXEC))?) };
        for (number, fd) in [(0, Some(channel)), (1, end.descriptor())] {
            // Edges: the events stay in the channel until the thread of the device takes them.
            let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: number };
            // SAFETY: the descriptors are open, and the event lives through the call.
            check(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.unwrap_or(-1), &raw mut event) })?;
        }
        let word = Arc::clone(&sleep);
        let thread = without_signals(|| Builder::new().name("mlx5-events".to_owned()).spawn(move || wake(&epoll, &word)))?;
        Ok(Self { sleep, end, thread: Some(thread) })
    }

    /// Returns the watch that these events end. `arm` arms all queues of the device.
    pub(super) fn watch(&self, arm: impl FnMut()) -> impl Watch {
        Armed { arm, sleep: &self.sleep }
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        self.end.waker().wake();
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Wakes the sleeper at each event, until the end.
fn wake(epoll: &OwnedFd, sleep: &Sleep) {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: room for one event.
    while event.u64 == 0 && (unsafe { libc::epoll_wait(epoll.as_raw_fd(), &raw mut event, 1, -1) } >= 0 || is_interrupted()) {
        sleep.wake();
    }
}

fn is_interrupted() -> bool {
    io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// All queues of the device, armed for a sleep. The sleeper checks the queues itself, as after any arming, because an event is only a
/// reason to check.
struct Armed<'a, F> {
    arm: F,
    sleep: &'a Sleep,
}

impl<F: FnMut()> Watch for Armed<'_, F> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.sleep.word());
    }

    fn arm(&mut self) {
        (self.arm)();
    }

    fn look(&mut self, _is_told: bool) -> bool {
        false
    }
}
