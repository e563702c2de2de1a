//! The sockets by which peers have met. Both ends keep them open for the life of a connection. The system closes them with a process, so their
//! end reports at once, and without a message, that a peer has died.

use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Maximum number of sockets that one call returns.
const ENDS_PER_CALL: usize = 64;

/// Finds those of many sockets that their peers have closed, by one system call. The owner keeps the sockets, a descriptor each.
///
/// The end of a socket is a hint, and its absence is none: a middlebox may close the socket of a peer that lives, and a forked child may
/// keep the socket of a peer that died. So the owner asks the peer over the connection itself, and has a keep-alive too.
#[derive(Debug)]
pub struct Lifelines {
    epoll: OwnedFd,
}

impl Lifelines {
    /// Makes an empty set; it takes a descriptor.
    ///
    /// # Errors
    /// The errors of epoll_create1(2).
    pub fn new() -> io::Result<Self> {
        // SAFETY: a plain number; no other code has the descriptor.
        let epoll = unsafe {
            match libc::epoll_create1(libc::EPOLL_CLOEXEC) {
                -1 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        Ok(Self { epoll })
    }

    /// Adds a socket, until its drop. The system may have no room for it; then [`ended`](Self::ended) does not return it.
    pub fn add(&self, stream: &TcpStream) {
        let fd = stream.as_raw_fd();
        let mut event = libc::epoll_event { events: (libc::EPOLLRDHUP | libc::EPOLLONESHOT) as u32, u64: fd as u64 };
        // SAFETY: two open descriptors and a structure that lives during the call.
        let _ = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) };
    }

    /// Returns the descriptors of sockets that their peers have closed, each once. It may return a descriptor again that the owner has closed
    /// and a forked child has not.
    pub fn ended(&self) -> impl Iterator<Item = RawFd> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; ENDS_PER_CALL];
        // SAFETY: room for this number of events; the call does not wait.
        let count = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), ENDS_PER_CALL as i32, 0) };
        events.into_iter().take(count.max(0) as usize).map(|event| event.u64 as RawFd)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn each_end_is_returned_once_and_bytes_are_none() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair = || (TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0);
        let lines = Lifelines::new().unwrap();
        let mut pairs: Vec<_> = (0..ENDS_PER_CALL + 10).map(|_| pair()).collect();
        for (peer, ours) in &mut pairs {
            lines.add(ours);
            peer.write_all(b"?").unwrap();
        }
        assert_eq!(lines.ended().count(), 0);
        let gone = pairs.split_off(5);
        let (peers, ours): (Vec<_>, Vec<_>) = gone.into_iter().unzip();
        drop(peers);
        let (start, mut told) = (std::time::Instant::now(), Vec::new());
        while told.len() < ours.len() {
            assert!(start.elapsed().as_secs() < 20, "{} of {}", told.len(), ours.len());
            told.extend(lines.ended());
        }
        told.sort_unstable();
        let mut expected: Vec<_> = ours.iter().map(AsRawFd::as_raw_fd).collect();
        expected.sort_unstable();
        assert_eq!(told, expected);
        assert_eq!(lines.ended().count(), 0);
    }
}
