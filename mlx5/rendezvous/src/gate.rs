//! The server's side: peers that connect exchange records with it, all at the same time, and none keeps another waiting.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// Peers that wait to be taken; the system allows as many as `net.core.somaxconn`, 4,096 by default.
const BACKLOG: i32 = 4096;
/// Peers that one look takes.
const PEERS_PER_LOOK: usize = 256;

/// A TCP address at which peers arrive, each as far as its `A` says. Nothing here blocks.
pub struct Gate<A> {
    listener: TcpListener,
    arriving: Vec<Arriving<A>>,
    patience: Duration,
    peers_per_look: usize,
}

struct Arriving<A> {
    stream: TcpStream,
    stage: A,
    since: Instant,
}

impl<A> fmt::Debug for Gate<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("listener", &self.listener).field("arriving", &self.arriving.len()).finish_non_exhaustive()
    }
}

impl<A> Gate<A> {
    /// Listens at `address`; port 0 is any that is free. A peer that has not arrived within `patience` is let go.
    ///
    /// # Errors
    /// Those of socket(2), bind(2) and listen(2).
    pub fn bind(address: impl ToSocketAddrs, patience: Duration) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        // The standard library has 128 wait, and the system lets the others try again for seconds.
        // SAFETY: plain numbers, of a socket that listens already.
        let _ = unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) };
        listener.set_nonblocking(true)?;
        Ok(Self::over(listener, patience))
    }

    /// As [`bind`](Self::bind), with the [listener](Self::listener) of another one: both take peers.
    #[must_use]
    pub const fn over(listener: TcpListener, patience: Duration) -> Self {
        Self { listener, arriving: Vec::new(), patience, peers_per_look: PEERS_PER_LOOK }
    }

    /// For another gate at the same address.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn listener(&self) -> io::Result<TcpListener> {
        self.listener.try_clone()
    }

    /// Takes so many peers in a look, at most. Default 256.
    pub const fn take_by(&mut self, peers: usize) {
        self.peers_per_look = peers;
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system cannot tell.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// How far those have come that have not arrived yet.
    pub fn arriving(&self) -> impl Iterator<Item = &A> {
        self.arriving.iter().map(|arriving| &arriving.stage)
    }

    /// Takes peers, for which there is a `begin`, and goes on with each as far as its socket lets it: `advance` gives `None` until it has arrived,
    /// and is not called again after. One whose `advance` fails is let go.
    pub fn look<T, E>(
        &mut self,
        begin: impl Fn() -> A,
        mut advance: impl FnMut(&mut A, &mut TcpStream) -> Result<Option<T>, E>,
        mut arrived: impl FnMut(T),
    ) {
        // Errors of accept(2) are those of a connection that is gone, or of want of descriptors, which may end.
        for _ in 0..self.peers_per_look {
            let Ok((stream, _)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                self.arriving.push(Arriving { stream, stage: begin(), since: Instant::now() });
            }
        }
        let patience = self.patience;
        self.arriving.retain_mut(|Arriving { stream, stage, since }| match advance(stage, stream) {
            Ok(Some(peer)) => {
                arrived(peer);
                false
            }
            Ok(None) => since.elapsed() < patience,
            // It knows why, or is gone.
            Err(_) => false,
        });
    }
}

/// Bytes that are being received, `N` of them.
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
    /// Takes what there is. `None`: not all of it yet, and the stream would block.
    ///
    /// # Errors
    /// Those of the stream; its end is [`ErrorKind::UnexpectedEof`].
    pub fn advance(&mut self, stream: &mut impl Read) -> io::Result<Option<&[u8; N]>> {
        while self.count < N {
            match stream.read(&mut self.bytes[self.count..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => self.count += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(&self.bytes))
    }
}

/// Bytes that are being sent, `N` of them.
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
    /// Sends what the stream takes. Whether all of it is sent; if not, the stream would block.
    ///
    /// # Errors
    /// Those of the stream; its end is [`ErrorKind::WriteZero`].
    pub fn advance(&mut self, stream: &mut impl Write) -> io::Result<bool> {
        while self.sent < N {
            match stream.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives and takes at most so many bytes at a time, and would block after every other call.
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
    fn bytes_cross_in_whatever_pieces_and_an_end_in_the_middle_is_told() {
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

    /// Two bytes make a peer arrive; the others are silent, gone, or say one byte.
    #[test]
    fn who_arrives_is_told_and_who_does_not_is_let_go() {
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
        while peers.is_empty() || gate.arriving().count() > 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "{} still arrive", gate.arriving().count());
            gate.look(Incoming::default, |stage, stream| stage.advance(stream).map(|bytes| bytes.copied()), |bytes| peers.push(bytes));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(peers, [*b"ab"]);
        for mut left in [silent, half] {
            assert_eq!(left.read(&mut [0]).unwrap_or(0), 0, "its connection is closed");
        }
        drop(good);
    }
}
