//! The server's side: connecting peers exchange records with it, all at the same time, and no peer delays another.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Maximum number of peers that wait to be accepted; the system allows `net.core.somaxconn`, 4,096 by default.
const BACKLOG: i32 = 4096;
/// Number of peers that one poll accepts.
const PEERS_PER_POLL: usize = 256;

/// A TCP address at which peers arrive; `A` is the state of a peer's exchange. Its calls never block.
pub struct Gate<A> {
    listener: TcpListener,
    connecting: Vec<Connecting<A>>,
    patience: Duration,
    peers_per_poll: usize,
}

struct Connecting<A> {
    stream: TcpStream,
    stage: A,
    since: Instant,
}

impl<A> fmt::Debug for Gate<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("listener", &self.listener).field("connecting", &self.connecting.len()).finish_non_exhaustive()
    }
}

impl<A> Gate<A> {
    /// Listens at `address`; port 0 is any free port. Disconnects a peer that has not arrived within `patience`.
    ///
    /// # Errors
    /// The errors of socket(2), bind(2) and listen(2).
    pub fn bind(address: impl ToSocketAddrs, patience: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        // The standard library lets 128 wait, and the system makes others retry for seconds.
        // SAFETY: plain numbers, of a socket that already listens.
        let _ = unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) };
        listener.set_nonblocking(true)?;
        Ok(Self::over(listener, patience))
    }

    /// Makes a gate like [`bind`](Self::bind), over the [listener](Self::listener) of another gate: both accept peers.
    #[must_use]
    pub const fn over(listener: TcpListener, patience: Duration) -> Self {
        Self { listener, connecting: Vec::new(), patience, peers_per_poll: PEERS_PER_POLL }
    }

    /// Returns a listener for another gate at the same address.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn listener(&self) -> io::Result<TcpListener> {
        self.listener.try_clone()
    }

    /// Sets the maximum number of peers that one poll accepts. Default 256.
    pub const fn accept_at_most(&mut self, peers: usize) {
        self.peers_per_poll = peers;
    }

    /// Returns the address it listens at.
    ///
    /// # Errors
    /// The system cannot tell.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Returns the states of the peers that have not yet arrived.
    pub fn connecting(&self) -> impl Iterator<Item = &A> {
        self.connecting.iter().map(|connecting| &connecting.stage)
    }

    /// Accepts peers, each with the state that `begin` makes, and advances every exchange as far as its socket allows. `advance` returns
    /// `None` until the peer has arrived, and is not called for it again; `arrived` gets its socket, to keep it in [`Lifelines`] or to close
    /// it. A peer whose `advance` fails is disconnected.
    ///
    /// [`Lifelines`]: crate::Lifelines
    pub fn poll<T, E>(
        &mut self,
        begin: impl Fn() -> A,
        mut advance: impl FnMut(&mut A, &mut TcpStream) -> Result<Option<T>, E>,
        mut arrived: impl FnMut(T, TcpStream),
    ) {
        // accept(2) fails for a connection that is gone, or for lack of descriptors, which may end.
        for _ in 0..self.peers_per_poll {
            let Ok((stream, _)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                self.connecting.push(Connecting { stream, stage: begin(), since: Instant::now() });
            }
        }
        let mut next = 0;
        while let Some(Connecting { stream, stage, since }) = self.connecting.get_mut(next) {
            match advance(stage, stream) {
                Ok(None) if since.elapsed() < self.patience => next += 1,
                Ok(Some(peer)) => arrived(peer, self.connecting.swap_remove(next).stream),
                // The peer knows the reason, is gone, or takes too long.
                Ok(None) | Err(_) => drop(self.connecting.swap_remove(next)),
            }
        }
    }
}

/// Moves bytes by `step`, from `done` to `all`, until the stream would block. Returns whether all are moved. `end` is the error of its end.
fn advance(done: &mut usize, all: usize, end: ErrorKind, mut step: impl FnMut(usize) -> io::Result<usize>) -> io::Result<bool> {
    while *done < all {
        match step(*done) {
            Ok(0) => return Err(end.into()),
            Ok(bytes) => *done += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// `N` bytes being received.
#[derive(Clone, Debug)]
pub struct Incoming<const N: usize> {
    bytes: [u8; N],
    count: usize,
}

impl<const N: usize> Default for Incoming<N> {
    fn default() -> Self {
        Self { bytes: [0; N], count: 0 }
    }
}

impl<const N: usize> Incoming<N> {
    /// Receives the bytes that are available. Returns `None` if some are still missing and the stream would block.
    ///
    /// # Errors
    /// The errors of the stream; its end is [`ErrorKind::UnexpectedEof`].
    pub fn advance(&mut self, stream: &mut impl Read) -> io::Result<Option<&[u8; N]>> {
        let is_whole = advance(&mut self.count, N, ErrorKind::UnexpectedEof, |count| stream.read(&mut self.bytes[count..]))?;
        Ok(is_whole.then_some(&self.bytes))
    }
}

/// `N` bytes being sent.
#[derive(Clone, Debug)]
pub struct Outgoing<const N: usize> {
    bytes: [u8; N],
    sent: usize,
}

impl<const N: usize> From<[u8; N]> for Outgoing<N> {
    fn from(bytes: [u8; N]) -> Self {
        Self { bytes, sent: 0 }
    }
}

impl<const N: usize> Outgoing<N> {
    /// Sends the bytes that the stream takes. Returns whether all are sent; otherwise the stream would block.
    ///
    /// # Errors
    /// The errors of the stream; its end is [`ErrorKind::WriteZero`].
    pub fn advance(&mut self, stream: &mut impl Write) -> io::Result<bool> {
        advance(&mut self.sent, N, ErrorKind::WriteZero, |sent| stream.write(&self.bytes[sent..]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that moves at most `step` bytes in a call, and would block at every other call.
    struct Slow {
        bytes: Vec<u8>,
        step: usize,
        calls: usize,
    }

    impl Slow {
        fn turn(&mut self) -> io::Result<usize> {
            self.calls += 1;
            if self.calls % 2 == 0 { Err(ErrorKind::WouldBlock.into()) } else { Ok(self.step) }
        }
    }

    impl Read for Slow {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.turn()?.min(buffer.len()).min(self.bytes.len());
            buffer[..count].copy_from_slice(&self.bytes[..count]);
            self.bytes.drain(..count);
            Ok(count)
        }
    }

    impl Write for Slow {
        fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
            let count = self.turn()?.min(buffer.len());
            self.bytes.extend(&buffer[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn bytes_cross_in_whatever_pieces_and_an_end_in_the_middle_is_an_error() {
        for step in 1..12 {
            let mut channel = Slow { bytes: Vec::new(), step, calls: 0 };
            let mut outgoing = Outgoing::from(*b"0123456789");
            while !outgoing.advance(&mut channel).unwrap() {}
            assert_eq!(channel.bytes, b"0123456789");
            let mut incoming = Incoming::<10>::default();
            let taken = loop {
                if let Some(taken) = incoming.advance(&mut channel).unwrap() {
                    break *taken;
                }
            };
            assert_eq!(taken, *b"0123456789");
        }
        let mut cut = io::Cursor::new(b"01234");
        let error = Incoming::<10>::default().advance(&mut cut).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }

    /// Two bytes make a peer arrive; the other peers are silent, gone, or send one byte.
    #[test]
    fn peers_that_arrive_are_handed_out_and_others_are_disconnected() {
        let mut gate = Gate::<Incoming<2>>::bind("127.0.0.1:0", Duration::from_millis(200)).unwrap();
        let address = gate.local_addr().unwrap();
        let connect = |said: &[u8]| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(said).unwrap();
            stream
        };
        let (silent, half) = (connect(b""), connect(b"x"));
        drop(connect(b"y"));
        let good = connect(b"ab");
        let (start, mut peers) = (Instant::now(), Vec::new());
        while peers.is_empty() || gate.connecting().count() > 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "{} still arrive", gate.connecting().count());
            gate.poll(Incoming::default, |stage, stream| stage.advance(stream).map(|bytes| bytes.copied()), |bytes, _| peers.push(bytes));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(peers, [*b"ab"]);
        for mut left in [silent, half] {
            assert_eq!(left.read(&mut [0]).unwrap_or(0), 0, "its connection is closed");
        }
        drop(good);
    }
}
