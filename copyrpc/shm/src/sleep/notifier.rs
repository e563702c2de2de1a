//! Ends a sleep on words when a descriptor becomes readable: a thread waits for the descriptor with
//! epoll(7).

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, write};

use super::{Sleep, Word};
use crate::threads::without_signals;

/// Number that identifies events of `end`; events of the descriptor have the number 0.
const END: u64 = 1;

/// A thread that wakes one sleeper. The drop ends the thread. A notifier takes three descriptors.
#[derive(Debug)]
pub struct Notifier {
    sleep: Arc<Sleep>,
    epoll: Arc<OwnedFd>,
    descriptor: OwnedFd,
    end: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Notifier {
    /// Starts a thread called `name` for the file of `descriptor`. The notifier keeps the file
    /// open.
    ///
    /// # Errors
    /// There is no descriptor or thread left.
    pub fn start(name: &str, descriptor: impl AsFd) -> io::Result<Self> {
        let descriptor = descriptor.as_fd().try_clone_to_owned()?;
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let end = eventfd(0, EventfdFlags::CLOEXEC)?;
        epoll::add(
            &epoll,
            &descriptor,
            EventData::new_u64(0),
            EventFlags::ONESHOT,
        )?;
        epoll::add(&epoll, &end, EventData::new_u64(END), EventFlags::IN)?;
        let (sleep, epoll) = (Arc::<Sleep>::default(), Arc::new(epoll));
        let (word, events) = (Arc::clone(&sleep), Arc::clone(&epoll));
        let thread = without_signals(|| {
            Builder::new()
                .name(name.to_owned())
                .spawn(move || wake(&events, &word))
        })?;
        Ok(Self {
            sleep,
            epoll,
            descriptor,
            end,
            thread: Some(thread),
        })
    }

    /// Makes the descriptor wake the sleeper once, when it is or becomes readable.
    pub fn arm(&self) {
        // `start` added the descriptor, so this cannot fail.
        let _ = epoll::modify(
            &self.epoll,
            &self.descriptor,
            EventData::new_u64(0),
            EventFlags::IN | EventFlags::ONESHOT,
        );
    }

    /// Returns the word to sleep on.
    #[must_use]
    pub fn word(&self) -> Word<'_> {
        self.sleep.word()
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        let _ = write(&self.end, &1_u64.to_ne_bytes());
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Wakes the sleeper at each event of the descriptor. Returns at an event of `end`.
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
