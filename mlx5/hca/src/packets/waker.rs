//! Ends a sleep on words when packets arrive: a thread waits for them with epoll(7).

use core::mem::MaybeUninit;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use shm::sleep::{Sleep, Word};
use shm::threads::without_signals;

const SOCKET: EventData = EventData::new_u64(0);
const END: EventData = EventData::new_u64(1);

/// The thread. Its drop ends it.
pub(crate) struct Waker {
    sleep: Arc<Sleep>,
    epoll: Arc<OwnedFd>,
    socket: BorrowedFd<'static>,
    end: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Waker {
    /// Starts the thread, for this socket, which outlives it.
    ///
    /// # Errors
    /// There is no descriptor or thread left.
    pub(crate) fn start(socket: RawFd) -> io::Result<Self> {
        // SAFETY: open until the waker is gone.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) };
        let (epoll, end) = (epoll::create(CreateFlags::CLOEXEC)?, eventfd(0, EventfdFlags::CLOEXEC)?);
        epoll::add(&epoll, socket, SOCKET, EventFlags::empty())?;
        epoll::add(&epoll, &end, END, EventFlags::IN)?;
        let (sleep, epoll) = (Arc::<Sleep>::default(), Arc::new(epoll));
        let (word, events) = (Arc::clone(&sleep), Arc::clone(&epoll));
        let thread = without_signals(|| Builder::new().name("mlx5-packets".to_owned()).spawn(move || wake(&events, &word)))?;
        Ok(Self { sleep, epoll, socket, end, thread: Some(thread) })
    }

    /// Makes the next packet, or one that waits, wake the sleeper once.
    pub(crate) fn arm(&self) {
        // It was added, so this cannot fail.
        let _ = epoll::modify(&self.epoll, self.socket, SOCKET, EventFlags::IN | EventFlags::ONESHOT);
    }

    pub(crate) fn word(&self) -> Word<'_> {
        self.sleep.word()
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.end, &1_u64.to_ne_bytes());
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Wakes the sleeper at each event, until the end.
fn wake(epoll: &OwnedFd, sleep: &Sleep) {
    let mut room = [MaybeUninit::uninit()];
    loop {
        match epoll::wait(epoll, &mut room, None) {
            Ok(([event], _)) if event.data.u64() == END.u64() => return,
            Ok(_) | Err(Errno::INTR) => sleep.wake(),
            Err(_) => return,
        }
    }
}
