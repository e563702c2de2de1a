//! The server's side: connecting peers exchange records with the server, all at the same time, and
//! no peer delays another.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::lifelines::Lifelines;
use crate::names::name_of;
use crate::peer::{Event, Events, Peer};
use crate::secret::{Proof, Secret};
use crate::setup::SetupError;

/// Maximum number of peers that wait to be accepted; the system allows `net.core.somaxconn`, 4,096
/// by default.
const BACKLOG: i32 = 4096;
/// Maximum number of peers that one poll accepts.
const PEERS_PER_POLL: usize = 64;
/// Maximum number of peers that one poll of a gate with a shared address accepts: so few that the
/// peers are distributed among the gates.
const SHARED_PEERS_PER_POLL: usize = 1;
/// Maximum number of peers that connect at once, each with a descriptor: a quarter of the
/// descriptors that a process usually has. Further peers wait in the backlog, which costs the
/// process nothing.
const PLACES: usize = 256;
/// Time after which a peer that connects loses its place, if another peer needs it. With a shorter
/// time, many clients that connect at once would be disconnected before their turn, and would then
/// connect again.
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
    /// Maximum number of peers that have arrived and whose sockets the gate keeps.
    pub lifelines: usize,
}

/// A TCP address at which peers arrive: a peer connects, and has arrived when its exchange of
/// records is complete. The gate keeps the sockets of peers that have arrived, as their
/// [lifelines](Self::ended). `A` is the state of an exchange. No call of a gate blocks.
pub struct Gate<A> {
    /// `None` once the gate is closed.
    listener: Option<TcpListener>,
    connecting: Vec<Connecting<A>>,
    lifelines: Lifelines,
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
    /// [`SetupError::Listen`]: the errors of socket(2), bind(2), listen(2) and epoll_create1(2).
    pub fn bind(
        address: impl ToSocketAddrs + fmt::Debug,
        options: GateOptions,
    ) -> Result<Self, SetupError> {
        let listen = || {
            let listener = TcpListener::bind(&address)?;
            // The standard library lets 128 peers wait; other peers would retry for seconds.
            let _ = rustix::net::listen(&listener, BACKLOG);
            listener.set_nonblocking(true)?;
            Self::over(listener, options, PEERS_PER_POLL)
        };
        listen().map_err(|source| SetupError::Listen {
            address: name_of(&address),
            source,
        })
    }

    /// Makes a gate at the address of another gate, which has [shared](Self::share) `listener`:
    /// both accept peers.
    ///
    /// # Errors
    /// [`SetupError::Listen`]: the errors of epoll_create1(2).
    pub fn beside(listener: TcpListener, options: GateOptions) -> Result<Self, SetupError> {
        let address = listener.local_addr();
        Self::over(listener, options, SHARED_PEERS_PER_POLL).map_err(|source| SetupError::Listen {
            address: address.map_or_else(|_| String::new(), |address| address.to_string()),
            source,
        })
    }

    fn over(
        listener: TcpListener,
        options: GateOptions,
        peers_per_poll: usize,
    ) -> io::Result<Self> {
        Ok(Self {
            listener: Some(listener),
            connecting: Vec::new(),
            lifelines: Lifelines::new(options.lifelines)?,
            options,
            peers_per_poll,
            next: 0,
            is_crowded: false,
        })
    }

    /// Returns a listener for a gate [beside](Self::beside) this one.
    ///
    /// # Errors
    /// No descriptor is free, or the gate is closed.
    pub fn share(&mut self) -> io::Result<TcpListener> {
        let listener = self.listener()?.try_clone()?;
        self.peers_per_poll = SHARED_PEERS_PER_POLL;
        Ok(listener)
    }

    fn listener(&self) -> io::Result<&TcpListener> {
        let closed = io::ErrorKind::NotConnected;
        self.listener.as_ref().ok_or_else(|| closed.into())
    }

    /// Returns the address at which the gate listens.
    ///
    /// # Errors
    /// The system does not return the address, or the gate is closed.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener()?.local_addr()
    }

    /// Stops accepting peers. The peers that are already connecting continue.
    pub const fn stop_accepting(&mut self) {
        self.peers_per_poll = 0;
    }

    /// Stops listening, and disconnects the peers that have not yet arrived. Returns whether the
    /// gate was open before.
    pub fn close(&mut self) -> bool {
        self.connecting.clear();
        self.listener.take().is_some()
    }

    /// Returns whether the gate is closed.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.listener.is_none()
    }

    /// Closes the sockets that peers have closed at their end, at most 64 in one call. Returns the
    /// numbers of these peers, which may have died.
    pub fn ended(&mut self) -> Vec<u64> {
        self.lifelines.ended()
    }

    /// Returns whether the gate has the socket of a peer that has arrived.
    #[must_use]
    pub fn has_lifeline(&self, peer: Peer) -> bool {
        self.lifelines.has(peer)
    }

    /// Closes the socket of a peer that is disconnected, and reports the event.
    pub fn leave(&mut self, peer: Peer, reason: &str) {
        self.lifelines.remove(peer);
        self.options.events.tell(Event::Disconnected(peer, reason));
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
    /// arrived. Then `arrived` gets the result. A peer whose `advance` fails is disconnected, and so
    /// is a peer that does not prove the secret.
    pub fn poll<T, E: fmt::Display>(
        &mut self,
        begin: impl Fn() -> A,
        mut advance: impl FnMut(&mut A, &mut TcpStream, Peer) -> Result<Option<T>, E>,
        mut arrived: impl FnMut(T, Peer),
    ) {
        let is_crowded = std::mem::take(&mut self.is_crowded) || self.connecting.len() >= PLACES;
        // accept(2) fails for a connection that has ended, or for lack of descriptors, which may be
        // temporary: the next poll tries again.
        for _ in 0..self
            .peers_per_poll
            .min(PLACES.saturating_sub(self.connecting.len()))
        {
            let Some(Ok((stream, address))) = self.listener.as_ref().map(TcpListener::accept)
            else {
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
            ..
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
                    self.lifelines.add(peer, stream);
                    arrived(met, peer);
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
            lifelines: 0,
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
                |bytes, _| peers.push(bytes),
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
                        .try_for_each(|secret| secret.prove(&mut stream))
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
                    Incoming::<2>::default,
                    |stage, stream, _| {
                        let bytes = stage.advance(stream)?.copied();
                        if bytes == Some(*b"ab") {
                            let _ = stream.write(b"a");
                        }
                        io::Result::Ok(bytes)
                    },
                    |_, _| (),
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
                        secret.prove(&mut stream)?;
                    }
                    stream.write_all(&KIND.begin::<16>())?;
                    KIND.check(&KIND.receive::<16>(&mut stream)?)?;
                    Ok(stream.local_addr()?)
                },
            );
            let start = Instant::now();
            while heard.lock().unwrap().is_empty() {
                assert!(start.elapsed() < Duration::from_secs(20), "{expected:?}");
                gate.poll(
                    Incoming::<16>::default,
                    |stage, stream, _| {
                        let bytes = stage.advance(stream)?.copied();
                        if bytes.is_some() {
                            stream.write_all(&KIND.begin::<16>())?;
                        }
                        io::Result::Ok(bytes)
                    },
                    |_, _| (),
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
