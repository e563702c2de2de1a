//! Ends a sleep on words when packets arrive: a thread waits for them with epoll(7).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use shm::sleep::{Sleep, Word};
use shm::threads::without_signals;

const SOCKET: u64 = 0;
const END: u64 = 1;

/// The thread. Its drop ends it.
pub(crate) struct Waker {
    sleep: Arc<Sleep>,
    epoll: Arc<OwnedFd>,
    socket: RawFd,
    end: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: a new descriptor, which no other code has.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

fn control(epoll: &OwnedFd, operation: libc::c_int, fd: RawFd, events: libc::c_int, number: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events: events as u32, u64: number };
    // SAFETY: the descriptors are open, and the event lives through the call.
    let result = unsafe { libc::epoll_ctl(epoll.as_raw_fd(), operation, fd, &raw mut event) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Waker {
    /// Starts the thread, for this socket, which outlives it.
    ///
    /// # Errors
    /// There is no descriptor or thread left.
    pub(crate) fn start(socket: RawFd) -> io::Result<Self> {
        // SAFETY: plain numbers.
        let (epoll, end) = unsafe { (owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))?, owned(libc::eventfd(0, libc::EFD_CLOEXEC))?) };
        control(&epoll, libc::EPOLL_CTL_ADD, socket, 0, SOCKET)?;
        control(&epoll, libc::EPOLL_CTL_ADD, end.as_raw_fd(), libc::EPOLLIN, END)?;
        let (sleep, epoll) = (Arc::<Sleep>::default(), Arc::new(epoll));
        let (word, events) = (Arc::clone(&sleep), Arc::clone(&epoll));
        let thread = without_signals(|| Builder::new().name("mlx5-packets".to_owned()).spawn(move || wake(&events, &word)))?;
        Ok(Self { sleep, epoll, socket, end, thread: Some(thread) })
    }

    /// Makes the next packet, or one that waits, wake the sleeper once.
    pub(crate) fn arm(&self) {
        // It was added, so this cannot fail.
        let _ = control(&self.epoll, libc::EPOLL_CTL_MOD, self.socket, libc::EPOLLIN | libc::EPOLLONESHOT, SOCKET);
    }

    pub(crate) fn word(&self) -> Word<'_> {
        self.sleep.word()
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        let one = 1_u64;
        // SAFETY: the kernel reads the number.
        unsafe { libc::write(self.end.as_raw_fd(), (&raw const one).cast(), size_of::<u64>()) };
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Wakes the sleeper at each event, until the end.
fn wake(epoll: &OwnedFd, sleep: &Sleep) {
    let mut event = libc::epoll_event { events: 0, u64: SOCKET };
    loop {
        // SAFETY: room for one event.
        let count = unsafe { libc::epoll_wait(epoll.as_raw_fd(), &raw mut event, 1, -1) };
        let is_interrupted = count < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        if event.u64 == END || count < 0 && !is_interrupted {
            return;
        }
        sleep.wake();
    }
}
