//! The sockets over which peers have connected. Both ends keep their sockets open for the life of a
//! connection. The system closes the sockets of a process that ends, so the end of a socket reports
//! at once, and without a message, that a peer has died.

use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use rustix::event::{Timespec, epoll};

use crate::peer::Peer;

/// Maximum number of sockets that one call returns.
const ENDS_PER_CALL: usize = 64;

/// The sockets of peers, a descriptor each. Finds the sockets that were closed by their peers, by
/// one system call.
///
/// The end of a socket is only a hint, and an open socket proves nothing: a middlebox may close the
/// socket of a peer that lives, and a forked child may keep the socket of a peer that died. So the
/// server probes the peer of a closed socket over the connection itself, and has a keep-alive too.
#[derive(Debug)]
pub(crate) struct Lifelines {
    epoll: OwnedFd,
    /// The sockets, by the numbers of their peers.
    sockets: HashMap<u64, TcpStream>,
    max: usize,
}

impl Lifelines {
    /// Makes an empty set, for at most `max` sockets. The set takes one descriptor.
    ///
    /// # Errors
    /// The errors of epoll_create1(2).
    pub(crate) fn new(max: usize) -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            sockets: HashMap::new(),
            max,
        })
    }

    /// Keeps the socket of a peer, or closes it if there is no room. If the system cannot watch the
    /// socket, [`ended`](Self::ended) does not return the peer.
    pub(crate) fn add(&mut self, peer: Peer, stream: TcpStream) {
        if self.sockets.len() < self.max {
            let end = epoll::EventFlags::RDHUP | epoll::EventFlags::ONESHOT;
            let _ = epoll::add(
                &self.epoll,
                &stream,
                epoll::EventData::new_u64(peer.number),
                end,
            );
            self.sockets.insert(peer.number, stream);
        }
    }

    /// Closes the socket of a peer that has disconnected.
    pub(crate) fn remove(&mut self, peer: Peer) {
        self.sockets.remove(&peer.number);
    }

    /// Returns whether the socket of a peer is open.
    #[must_use]
    pub(crate) fn has(&self, peer: Peer) -> bool {
        self.sockets.contains_key(&peer.number)
    }

    /// Closes sockets that their peers have closed. Returns the numbers of these peers.
    pub(crate) fn ended(&mut self) -> Vec<u64> {
        let mut events = [MaybeUninit::uninit(); ENDS_PER_CALL];
        let (ended, _) =
            epoll::wait(&self.epoll, &mut events, Some(&Timespec::default())).unwrap_or_default();
        // A socket that was closed here can still have an event, if a forked child keeps the
        // socket.
        ended
            .iter()
            .map(|event| event.data.u64())
            .filter(|number| self.sockets.remove(number).is_some())
            .collect()
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
        let pair = || {
            (
                TcpStream::connect(listener.local_addr().unwrap()).unwrap(),
                listener.accept().unwrap().0,
            )
        };
        const ALL: u64 = ENDS_PER_CALL as u64 + 10;
        let mut lines = Lifelines::new(ALL as usize).unwrap();
        let name = |number| Peer {
            address: listener.local_addr().unwrap(),
            number,
        };
        let mut peers: Vec<_> = (0..ALL)
            .map(|_| pair())
            .map(|(peer, ours)| (peer, Some(ours)))
            .collect();
        for (number, (peer, ours)) in (0..).zip(&mut peers) {
            lines.add(name(number), ours.take().unwrap());
            peer.write_all(b"?").unwrap();
        }
        assert_eq!(lines.ended(), []);
        let (one_too_many, ours) = pair();
        lines.add(name(ALL), ours);
        drop(one_too_many);
        lines.remove(name(7));
        drop(peers.split_off(5));
        let (start, mut told) = (std::time::Instant::now(), Vec::new());
        while told.len() < ALL as usize - 6 {
            assert!(
                start.elapsed().as_secs() < 20,
                "{} of {}",
                told.len(),
                ALL - 6
            );
            told.extend(lines.ended());
        }
        told.sort_unstable();
        assert_eq!(
            told,
            (5..ALL).filter(|number| *number != 7).collect::<Vec<_>>()
        );
        assert_eq!(lines.ended(), []);
        assert_eq!(
            [4, 5, 7, ALL].map(|number| lines.has(name(number))),
            [true, false, false, false]
        );
    }
}
