//! The server's side: connecting peers exchange records with it, all at the same time, and no peer
//! delays another.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::events::{Event, Events, Peer};
use crate::secret::{Proof, Secret};

/// Maximum number of peers that wait to be accepted; the system allows `net.core.somaxconn`, 4,096
/// by default.
const BACKLOG: i32 = 4096;
/// Number of peers that one poll accepts.
const PEERS_PER_POLL: usize = 256;

/// Number of peers that this process has accepted.
static PEERS: AtomicU64 = AtomicU64::new(0);

/// Options of a [`Gate`].
#[derive(Clone, Debug)]
pub struct GateOptions {
    /// Time after which a peer that has not arrived is disconnected.
    pub patience: Duration,
    /// Hears of peers that have arrived, and of those that are refused.
    pub events: Events,
    /// A secret that peers have to prove.
    pub secret: Option<Secret>,
    /// The record for a peer that offers no proof of the secret:
    /// [`Refusal::Secret`](crate::record::Refusal::Secret) in place of the first one that it
    /// expects.
    pub refusal: Vec<u8>,
}

/// A TCP address at which peers arrive; `A` is the state of a peer's exchange. Its calls never
/// block.
pub struct Gate<A> {
    listener: TcpListener,
    connecting: Vec<Connecting<A>>,
    options: GateOptions,
    peers_per_poll: usize,
}

struct Connecting<A> {
    stream: TcpStream,
    peer: Peer,
    proof: Proof,
    stage: A,
    since: Instant,
}

impl<A> fmt::Debug for Gate<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("listener", &self.listener)
            .field("connecting", &self.connecting.len())
            .finish_non_exhaustive()
    }
}

impl<A> Gate<A> {
    /// Listens at `address`; port 0 is any free port.
    ///
    /// # Errors
    /// The errors of socket(2), bind(2) and listen(2).
    pub fn bind(address: impl ToSocketAddrs, options: GateOptions) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        // The standard library lets 128 wait, and the system makes others retry for seconds.
        let _ = rustix::net::listen(&listener, BACKLOG);
        listener.set_nonblocking(true)?;
        Ok(Self::over(listener, options))
    }

    /// Makes a gate like [`bind`](Self::bind), over the [listener](Self::listener) of another gate:
    /// both accept peers.
    #[must_use]
    pub const fn over(listener: TcpListener, options: GateOptions) -> Self {
        Self {
            listener,
            connecting: Vec::new(),
            options,
            peers_per_poll: PEERS_PER_POLL,
        }
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

    /// Accepts peers, each with the state that `begin` makes, and advances every exchange as far as
    /// its socket allows. `advance` returns `None` until the peer has arrived, and is not called
    /// for it again; `arrived` gets its socket, to keep it in [`Lifelines`] or to close it. A peer
    /// whose `advance` fails is disconnected, as is one that does not prove the secret.
    ///
    /// [`Lifelines`]: crate::Lifelines
    pub fn poll<T, E: fmt::Display>(
        &mut self,
        begin: impl Fn() -> A,
        mut advance: impl FnMut(&mut A, &mut TcpStream, Peer) -> Result<Option<T>, E>,
        mut arrived: impl FnMut(T, TcpStream, Peer),
    ) {
        // accept(2) fails for a connection that is gone, or for lack of descriptors, which may end.
        for _ in 0..self.peers_per_poll {
            let Ok((stream, address)) = self.listener.accept() else {
                break;
            };
            if stream.set_nonblocking(true).is_ok() {
                let peer = Peer {
                    address,
                    number: PEERS.fetch_add(1, Ordering::Relaxed),
                };
                self.connecting.push(Connecting {
                    stream,
                    peer,
                    proof: Proof::default(),
                    stage: begin(),
                    since: Instant::now(),
                });
            }
        }
        let GateOptions {
            patience,
            events,
            secret,
            refusal,
        } = &self.options;
        let mut next = 0;
        while let Some(Connecting {
            stream,
            peer,
            proof,
            stage,
            since,
        }) = self.connecting.get_mut(next)
        {
            let outcome = match proof.advance(stream, secret.as_ref(), refusal) {
                Ok(true) => advance(stage, stream, *peer).map_err(|error| error.to_string()),
                Ok(false) => Ok(None),
                Err(error) => Err(error.to_string()),
            };
            match outcome {
                Ok(None) if since.elapsed() < *patience => next += 1,
                Ok(Some(met)) => {
                    let Connecting { stream, peer, .. } = self.connecting.swap_remove(next);
                    events.tell(Event::Connected(peer));
                    arrived(met, stream, peer);
                }
                // The peer knows the reason, is gone, or takes too long.
                Ok(None) | Err(_) => {
                    let reason = outcome.err();
                    events.tell(Event::Refused(
                        *peer,
                        reason.as_deref().unwrap_or("it took too long to connect"),
                    ));
                    drop(self.connecting.swap_remove(next));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::pieces::Incoming;
    use crate::record::{Kind, Refusal};

    fn options(patience: Duration) -> GateOptions {
        GateOptions {
            patience,
            events: Events::default(),
            secret: None,
            refusal: Vec::new(),
        }
    }

    /// Two bytes make a peer arrive; the other peers are silent, gone, or send one byte.
    #[test]
    fn peers_that_arrive_are_handed_out_and_others_are_disconnected() {
        let mut gate =
            Gate::<Incoming<2>>::bind("127.0.0.1:0", options(Duration::from_millis(200))).unwrap();
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
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{} still arrive",
                gate.connecting().count()
            );
            gate.poll(
                Incoming::default,
                |stage, stream, _| stage.advance(stream).map(|bytes| bytes.copied()),
                |bytes, _, _| peers.push(bytes),
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(peers, [*b"ab"]);
        for mut left in [silent, half] {
            assert_eq!(
                left.read(&mut [0]).unwrap_or(0),
                0,
                "its connection is closed"
            );
        }
        drop(good);
    }

    const KIND: Kind = Kind {
        name: "test",
        magic: *b"test\0\0\0\0",
        version: 1,
    };

    /// Each pair of ends with and without secrets: who is connected, and what both ends are told.
    #[test]
    fn ends_with_one_secret_meet_and_all_others_are_told_why_not() {
        let secrets = |byte: u8| Some(Secret::from(vec![byte; 32]));
        let cases = [
            (None, None, Ok(())),
            (secrets(1), secrets(1), Ok(())),
            (secrets(1), None, Err(Refusal::Secret)),
            (None, secrets(1), Err(Refusal::NoSecret)),
            (secrets(1), secrets(2), Err(Refusal::WrongSecret)),
        ];
        for (of_server, of_client, expected) in cases {
            let heard = Arc::new(Mutex::new(Vec::new()));
            let hears = Arc::clone(&heard);
            let events = Events::new(move |event| hears.lock().unwrap().push(event.to_string()));
            let refusal = KIND.refuse::<16>(Refusal::Secret).to_vec();
            let options = GateOptions {
                events,
                secret: of_server,
                refusal,
                ..options(Duration::from_secs(20))
            };
            let mut gate = Gate::<Incoming<16>>::bind("127.0.0.1:0", options).unwrap();
            let address = gate.local_addr().unwrap();
            let client = std::thread::spawn(
                move || -> Result<SocketAddr, Box<dyn std::error::Error + Send + Sync>> {
                    let mut stream = TcpStream::connect(address)?;
                    if let Some(secret) = of_client {
                        secret.prove::<Box<dyn std::error::Error + Send + Sync>>(&mut stream)?;
                    }
                    stream.write_all(&KIND.begin::<16>())?;
                    KIND.check(
                        &KIND
                            .receive::<16, Box<dyn std::error::Error + Send + Sync>>(&mut stream)?,
                    )?;
                    Ok(stream.local_addr()?)
                },
            );
            let start = Instant::now();
            while heard.lock().unwrap().is_empty() {
                assert!(start.elapsed() < Duration::from_secs(20), "{expected:?}");
                let arrived =
                    |_, mut stream: TcpStream, _| stream.write_all(&KIND.begin::<16>()).unwrap();
                gate.poll(
                    Incoming::default,
                    |stage, stream, _| stage.advance(stream).map(|bytes| bytes.copied()),
                    arrived,
                );
            }
            let heard = heard.lock().unwrap();
            match (client.join().unwrap(), expected) {
                (Ok(client), Ok(())) => {
                    assert!(
                        heard[0].starts_with(&client.to_string())
                            && heard[0].ends_with("has connected"),
                        "{heard:?}"
                    )
                }
                (Err(error), Err(refusal)) => {
                    assert_eq!(error.to_string(), format!("refused by the peer: {refusal}"));
                    assert!(
                        heard[0].ends_with(&format!("was refused: {refusal}")),
                        "{heard:?}"
                    );
                }
                (met, expected) => panic!("{met:?} {expected:?}"),
            }
        }
    }
}
