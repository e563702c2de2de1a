//! Ends a sleep on words when the device has an event: a thread waits for events on the completion channel.

use core::mem::MaybeUninit;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use shm::sleep::{Alarm, Sleep, Watch, Word};
use shm::threads::without_signals;

/// The number of events of the alarm; those of the channel have 0.
const END: u64 = 1;

/// The thread. Its drop ends it.
pub(super) struct Arrivals {
    sleep: Arc<Sleep>,
    end: Arc<Alarm>,
    thread: Option<JoinHandle<()>>,
}

impl Arrivals {
    /// Starts the thread, for the events of this channel.
    pub(super) fn of(channel: BorrowedFd<'_>) -> io::Result<Self> {
        let (sleep, end) = (Arc::<Sleep>::default(), Arc::new(Alarm::with_descriptor()?));
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for (fd, number) in [Some(channel), end.descriptor()].into_iter().flatten().zip([0, END]) {
            // Edges: the events stay in the channel until the thread of the device takes them.
            epoll::add(&epoll, fd, EventData::new_u64(number), EventFlags::IN | EventFlags::ET)?;
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
    let mut room = [MaybeUninit::uninit()];
    loop {
        match epoll::wait(epoll, &mut room, None) {
            Ok(([event], _)) if event.data.u64() == END => return,
            Ok(_) | Err(Errno::INTR) => sleep.wake(),
            Err(_) => return,
        }
    }
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
