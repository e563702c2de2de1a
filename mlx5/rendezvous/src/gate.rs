//! The server's side: connecting peers exchange records with the server, all at the same time, and
//! no peer delays another.

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
/// Default of the maximum number of peers that one poll accepts.
const PEERS_PER_POLL: usize = 64;
/// Maximum number of peers that connect at once, each with a descriptor: a quarter of the
/// descriptors that a process usually has. Further peers wait in the backlog, which costs the
/// process nothing.
const PLACES: usize = 256;
/// Time after which a peer that connects loses its place, if another peer needs it. The time is not
/// shorter, because each of many clients that connect at once needs its turn, and a client whose
/// connection is closed connects again.
const SHORT_PATIENCE: Duration = Duration::from_millis(250);
/// Time after which a poll advances no further peer: the next poll continues with that peer.
const POLL_TIME: Duration = Duration::from_millis(2);

/// Number of peers that this process has accepted.
static PEERS: AtomicU64 = AtomicU64::new(0);

/// Options of a [`Gate`].
#[derive(Clone, Debug)]
pub struct GateOptions {
    /// Time after which a peer that has not arrived, that is, has not completed its exchange of
    /// records, is disconnected.
    pub patience: Duration,
    /// Callback for peers that have arrived, and for peers that are refused.
    pub events: Events,
    /// A secret that peers have to prove.
    pub secret: Option<Secret>,
    /// The record for a peer that offers no proof of the secret:
    /// [`Refusal::Secret`](crate::record::Refusal::Secret) in place of the first record that the
    /// peer expects.
    pub refusal: Vec<u8>,
}

/// A TCP address at which peers arrive: a peer connects, and has arrived when its exchange of
/// records is complete. `A` is the state of an exchange. No call of a gate blocks.
pub struct Gate<A> {
    listener: TcpListener,
    connecting: Vec<Connecting<A>>,
    options: GateOptions,
    peers_per_poll: usize,
    /// Index of the peer with which the next poll begins.
    next: usize,
    is_crowded: bool,
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
        // The standard library lets 128 peers wait; other peers would retry for seconds.
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
            next: 0,
            is_crowded: false,
        }
    }

    /// Returns a listener for another gate at the same address.
    ///
    /// # Errors
    /// No descriptor is free.
    pub fn listener(&self) -> io::Result<TcpListener> {
        self.listener.try_clone()
    }

    /// Sets the maximum number of peers that one poll accepts. Default 64.
    pub const fn accept_at_most(&mut self, peers: usize) {
        self.peers_per_poll = peers;
    }

    /// Returns the address at which the gate listens.
    ///
    /// # Errors
    /// The system does not return the address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Requests room for another peer: the next poll disconnects peers that have been connecting
    /// for 250 ms.
    pub const fn make_room(&mut self) {
        self.is_crowded = true;
    }

    /// Returns the states of the peers that have not yet arrived.
    pub fn connecting(&self) -> impl Iterator<Item = &A> {
        self.connecting.iter().map(|connecting| &connecting.stage)
    }

    /// Accepts peers, each with the state that `begin` makes, and advances their exchanges as far
    /// as their sockets allow. A poll is bounded, whatever peers do: it reads only the records of
    /// each peer, begins with no further peer after 2 ms, and has at most 256 connecting peers at
    /// once. When that number is reached, peers that have been connecting for 250 ms are
    /// disconnected so that others get their places. `advance` returns `None` until the peer has
    /// arrived. Then `arrived` gets the peer's socket, to keep it in [`Lifelines`] or to close it.
    /// A peer whose `advance` fails is disconnected, and so is a peer that does not prove the
    /// secret.
    ///
    /// [`Lifelines`]: crate::Lifelines
    pub fn poll<T, E: fmt::Display>(
        &mut self,
        begin: impl Fn() -> A,
        mut advance: impl FnMut(&mut A, &mut TcpStream, Peer) -> Result<Option<T>, E>,
        mut arrived: impl FnMut(T, TcpStream, Peer),
    ) {
        let is_crowded = std::mem::take(&mut self.is_crowded) || self.connecting.len() >= PLACES;
        // accept(2) fails for a connection that has ended, or for lack of descriptors, which may be
        // temporary: the next poll tries again.
        for _ in 0..self
            .peers_per_poll
            .min(PLACES.saturating_sub(self.connecting.len()))
        {
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
        let patience = if is_crowded {
            SHORT_PATIENCE.min(*patience)
        } else {
            *patience
        };
        let start = Instant::now();
        for _ in 0..self.connecting.len() {
            self.next = if self.next < self.connecting.len() {
                self.next
            } else {
                0
            };
            let Some(Connecting {
                stream,
                peer,
                proof,
                stage,
                since,
            }) = self.connecting.get_mut(self.next)
            else {
                break;
            };
            let outcome = match proof.advance(stream, secret.as_ref(), refusal) {
                Ok(true) => advance(stage, stream, *peer).map_err(|error| error.to_string()),
                Ok(false) => Ok(None),
                Err(error) => Err(error.to_string()),
            };
            let now = Instant::now();
            match outcome {
                Ok(None) if now - *since < patience => self.next += 1,
                Ok(Some(met)) => {
                    let Connecting { stream, peer, .. } = self.connecting.swap_remove(self.next);
                    events.tell(Event::Connected(peer));
                    arrived(met, stream, peer);
                }
                // The peer was refused and got the reason, has disconnected, or takes too long.
                Ok(None) | Err(_) => {
                    let reason = outcome.err();
                    events.tell(Event::Refused(
                        *peer,
                        reason.as_deref().unwrap_or("it took too long to connect"),
                    ));
                    drop(self.connecting.swap_remove(self.next));
                }
            }
            if now - start >= POLL_TIME {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::atomic::AtomicBool;
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

    /// Strangers, more than the gate has places, send bytes without end, send slowly, or send
    /// nothing. Every peer that sends its two bytes arrives meanwhile.
    #[test]
    fn strangers_delay_no_peer_and_take_no_more_than_their_places() {
        for secret in [None, Some(Secret::from(*b"key"))] {
            let mut gate = Gate::<Incoming<2>>::bind(
                "127.0.0.1:0",
                GateOptions {
                    secret: secret.clone(),
                    ..options(Duration::from_secs(3600))
                },
            )
            .unwrap();
            let address = gate.local_addr().unwrap();
            let is_over = Arc::new(AtomicBool::new(false));
            let stranger = |hello: &'static [u8], then: &'static [u8], pause: Duration| {
                let is_over = Arc::clone(&is_over);
                std::thread::spawn(move || {
                    while !is_over.load(Ordering::Relaxed) {
                        let Ok(mut stream) = TcpStream::connect(address) else {
                            continue;
                        };
                        let mut sent = stream.write_all(hello);
                        while sent.is_ok() && !is_over.load(Ordering::Relaxed) {
                            std::thread::sleep(pause);
                            sent = stream.write_all(then);
                        }
                    }
                })
            };
            let challenge: &[u8; 48] =
                b"secretHS\x01\0\x30\0\0\0\0\0................................";
            let (stop, pause) = (Duration::ZERO, Duration::from_millis(20));
            let strangers = [
                stranger(challenge, &[0; 1 << 16], stop),
                stranger(b"", &[1; 1 << 16], stop),
                stranger(b"", b"s", pause),
            ];
            let silent: Vec<_> = (0..PLACES + 64)
                .map(|_| TcpStream::connect(address).unwrap())
                .collect();
            let honest = std::thread::spawn(move || -> io::Result<()> {
                for _ in 0..20 {
                    let mut stream = TcpStream::connect(address)?;
                    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
                    secret
                        .iter()
                        .try_for_each(|secret| {
                            secret.prove::<Box<dyn std::error::Error>>(&mut stream)
                        })
                        .map_err(|e| io::Error::other(e.to_string()))?;
                    stream.write_all(b"ab")?;
                    stream.read_exact(&mut [0])?;
                }
                Ok(())
            });
            let (start, mut longest) = (Instant::now(), Duration::ZERO);
            while !honest.is_finished() {
                assert!(
                    start.elapsed() < Duration::from_secs(60),
                    "peers do not arrive"
                );
                let poll = Instant::now();
                gate.poll(
                    Incoming::default,
                    |stage, stream, _| stage.advance(stream).map(|bytes| bytes.copied()),
                    |bytes, mut stream, _| {
                        drop(stream.write(&bytes[..usize::from(&bytes == b"ab")]))
                    },
                );
                longest = longest.max(poll.elapsed());
                assert!(gate.connecting().count() <= PLACES);
                std::thread::sleep(Duration::from_millis(1));
            }
            is_over.store(true, Ordering::Relaxed);
            drop((gate, silent));
            honest.join().unwrap().unwrap();
            strangers
                .into_iter()
                .for_each(|stranger| stranger.join().unwrap());
            assert!(longest < Duration::from_secs(2), "a poll took {longest:?}");
        }
    }

    const KIND: Kind = Kind {
        name: "test",
        magic: *b"test\0\0\0\0",
        version: 1,
    };

    /// Each pair of ends with and without secrets: whether they connect, and the errors of both
    /// ends.
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
                    assert_eq!(error.to_string(), format!("refused: {refusal}"));
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
