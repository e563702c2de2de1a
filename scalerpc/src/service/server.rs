//! The server: admits clients, steps, answers.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use copyrpc_calls::StopHandle;
use mlx5::{AsyncEvent, Device, DeviceSpec};
use mlx5_rendezvous::{Events, Gate, GateOptions, GracePeriod, Incoming, Outgoing, Peer, Secret};

use super::{Idle, default_device};
use crate::protocol::{Handlers, ServerConfig};
use crate::rdma::exchange::{Accept, Admission, Hello, Offer, Refusal, refusal_of};
use crate::rdma::{PendingPeer, RdmaOptions, RdmaServer, SetupError};

/// Maximum number of requests that one step answers.
const BUDGET: usize = 64;
/// Number of steps between two checks of the sockets, for a server that always has something to do.
const STEPS_PER_CHECK: u32 = 1024;
/// Maximum time for a client to connect. Other clients do not wait meanwhile.
const CONNECT_TIME: Duration = Duration::from_secs(5);
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum time for the last messages of a server that gave up.
const LINGER: Duration = Duration::from_millis(20);
/// Maximum number of clients that have a queue pair and are not admitted yet. Further clients wait.
const MAX_OFFERED: usize = 64;
/// Time after which a connecting client loses its place, if [`MAX_OFFERED`] clients connect.
const SHORT_CONNECT_TIME: Duration = Duration::from_millis(250);

/// Maximum number of clients whose sockets are kept: half of the descriptors that a process usually
/// has. Other clients that die are detected by a probe once a second (S20 of docs/scalerpc.md), and
/// when a client that connects finds no room.
const LIFELINES: usize = 512;
/// Minimum time between two rounds of probes that are sent because a client that connects found no
/// room. A round probes all clients whose sockets are not kept.
const FULL_INTERVAL: Duration = Duration::from_millis(100);

/// Options of a [`Server`](crate::Server).
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Device of the server. Default: the device that the environment variable `COPYRPC_DEVICE`
    /// names (`soft`, `mlx5_0`, `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// Numbers of clients and slots, groups and slices.
    pub config: ServerConfig,
    /// Options of the server's queues.
    pub rdma: RdmaOptions,
    /// Maximum time of each of the two phases of a stopped server. First the server continues while
    /// clients fetch replies in [parts](crate::parts). Then it ends: the requests that it took,
    /// including held requests, are answered, and its messages arrive at all clients' devices. Held
    /// requests that are not answered in this time end as [`CallFailure::Dropped`]. In the second
    /// phase, time in which the server's thread is suspended does not count. Default: 1 s.
    ///
    /// [`CallFailure::Dropped`]: crate::CallFailure::Dropped
    pub stop_timeout: Duration,
    /// Callback for clients that connect, disconnect or are refused, called in the server's thread.
    /// Default: none.
    pub events: Events,
    /// A secret that clients have to prove
    /// ([`ClientOptions::secret`](crate::ClientOptions::secret)), as the server proves it to them,
    /// before any key of memory is sent. Messages are not encrypted. Default: none; every process
    /// that reaches the address may call.
    pub secret: Option<Secret>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            device: default_device(),
            config: ServerConfig::default(),
            rdma: RdmaOptions::default(),
            stop_timeout: STOP_TIMEOUT,
            events: Events::default(),
            secret: None,
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The address of a server, shared with further servers: see
/// [`Server::beside`](crate::Server::beside).
pub type SharedAddress = copyrpc_calls::SharedAddress<ServerOptions>;

/// A server that its owner steps, with the handlers as an argument.
pub struct Stepped {
    pub(super) rdma: RdmaServer,
    pub(super) gate: Gate<Connecting>,
    /// The time of the last round of probes that was sent because a client found no room
    /// ([`FULL_INTERVAL`]).
    probed: Option<Instant>,
    pub(super) options: ServerOptions,
    pub(super) stop: StopHandle,
    /// The event that ended the server. From then on each step returns it.
    breakdown: Option<AsyncEvent>,
    steps_to_check: u32,
    idle: Idle,
}

pub(super) enum Connecting {
    /// The client has not identified itself. Such a client costs only a descriptor.
    Silent(Incoming<{ Hello::BYTES }>),
    Offered(Box<Offered>),
    /// The client is admitted; its admission is being sent.
    Admitted(Outgoing<{ Admission::BYTES }>),
}

pub(super) struct Offered {
    since: Instant,
    /// `None` once the client is admitted or refused.
    peer: Option<PendingPeer>,
    offer: Outgoing<{ Offer::BYTES }>,
    accept: Incoming<{ Accept::BYTES }>,
}

impl Connecting {
    /// Proceeds as far as the socket permits. Returns `None` while something is left to do.
    fn advance(
        &mut self,
        stream: &mut TcpStream,
        peer_of: Peer,
        server: &mut RdmaServer,
        offered: &mut usize,
    ) -> Result<Option<()>, SetupError> {
        if let Self::Silent(hello) = self {
            if *offered >= MAX_OFFERED {
                return Ok(None);
            }
            let Some(hello) = hello.advance(stream)? else {
                return Ok(None);
            };
            // The refusal is lost if the socket cannot take it at once.
            let refuse =
                |stream: &mut TcpStream, refusal| drop(stream.write(&Offer::refuse(refusal)));
            Hello::decode(hello).inspect_err(|_| refuse(stream, Refusal::Failed))?;
            let peer = server
                .offer()
                .inspect_err(|error| refuse(stream, refusal_of(error)))?;
            *offered += 1;
            let (offer, accept) = (peer.record().encode().into(), Incoming::default());
            *self = Self::Offered(Box::new(Offered {
                since: Instant::now(),
                peer: Some(peer),
                offer,
                accept,
            }));
        }
        if let Self::Offered(stage) = self {
            let Offered {
                since,
                peer,
                offer,
                accept,
            } = &mut **stage;
            let accept = if offer.advance(stream)? {
                accept.advance(stream)?
            } else {
                None
            };
            let Some(accept) = accept else {
                let is_in_the_way = *offered >= MAX_OFFERED && since.elapsed() > SHORT_CONNECT_TIME;
                return if is_in_the_way {
                    Err(io::Error::from(ErrorKind::TimedOut).into())
                } else {
                    Ok(None)
                };
            };
            let refuse =
                |stream: &mut TcpStream, refusal| drop(stream.write(&Admission::refuse(refusal)));
            let accept = Accept::decode(accept).inspect_err(|_| refuse(stream, Refusal::Failed))?;
            let Some(peer) = peer.take() else {
                return Ok(None);
            };
            let admission = server
                .admit(peer, &accept)
                .inspect_err(|error| refuse(stream, refusal_of(error)))?;
            server.set_peer(admission.0.client, peer_of);
            *self = Self::Admitted(admission.encode().into());
        }
        match self {
            Self::Admitted(admission) => Ok(admission.advance(stream)?.then_some(())),
            _ => Ok(None),
        }
    }
}

impl fmt::Debug for Stepped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stepped")
            .field("gate", &self.gate)
            .field("clients", &self.rdma.clients())
            .finish_non_exhaustive()
    }
}

impl Stepped {
    pub(super) fn at(
        gate: Gate<Connecting>,
        options: ServerOptions,
        stop: Option<StopHandle>,
    ) -> Result<Self, SetupError> {
        let rdma = RdmaServer::on(
            &Device::open(&options.device)?,
            &options.config,
            &options.rdma,
        )?;
        let stop = stop.unwrap_or_else(|| {
            let waker = Waker::from(Arc::new(Unpark(thread::current())));
            StopHandle::new(waker, options.stop_timeout)
        });
        Ok(Self {
            rdma,
            gate,
            probed: None,
            options,
            stop,
            breakdown: None,
            steps_to_check: 0,
            idle: Idle::default(),
        })
    }

    /// Returns the maximum number of bytes of a request, and of a response.
    #[must_use]
    pub const fn max_payload(&self) -> usize {
        self.rdma.max_payload()
    }

    /// Answers each request with the handler of its type, until the server is stopped. A handler
    /// that takes long delays the calls of all clients, and clients that connect, but no client
    /// loses its connection, however long the handler takes. With [`Handlers::insert_held`] a
    /// handler can answer later.
    ///
    /// # Errors
    /// [`SetupError::Broken`].
    pub fn serve_types(&mut self, handlers: &mut Handlers<'_>) -> Result<(), SetupError> {
        while !self.stop.is_stopped() {
            self.step(handlers)?;
        }
        self.close(handlers);
        Ok(())
    }

    /// Takes no more clients and no more requests, answers the requests that have arrived, and
    /// sends a close to each client when its requests are answered. Waits for that, held requests
    /// included, at most for [`stop_timeout`](ServerOptions::stop_timeout). No handler gets any
    /// other request: a `Client` makes the call of such a request again at the next server of its
    /// addresses, or ends the call as [`CallFailure::NotSent`](crate::CallFailure::NotSent), which
    /// is retryable. [`serve_types`](Self::serve_types) closes the server at its end; call this
    /// after a loop of your own, and then drop the server.
    pub fn close(&mut self, handlers: &mut Handlers<'_>) {
        if self.begin_end() {
            self.finish(handlers);
        }
    }

    /// Takes no more clients and no more requests. Returns whether this call is the first.
    pub(super) fn begin_end(&mut self) -> bool {
        let is_first = self.gate.close();
        if is_first {
            self.rdma.close();
        }
        is_first
    }

    pub(super) const fn is_closed(&self) -> bool {
        self.gate.is_closed()
    }

    /// Does one bounded step of the end, in which held requests can be answered.
    pub(super) fn step_to_end(&mut self, handlers: &mut Handlers<'_>) {
        if self.steps_to_check == 0 {
            handlers.mark_given_up(self.rdma.core());
            self.steps_to_check = STEPS_PER_CHECK;
        }
        self.steps_to_check -= 1;
        self.rdma.step_to_end(handlers, BUDGET, false);
        if self.idle.pass() {
            self.steps_to_check = 0;
        }
    }

    /// Waits, at most for `stop_timeout`, until the accepted requests are answered and the messages
    /// have arrived. Then gives up the requests that are left.
    pub(super) fn finish(&mut self, handlers: &mut Handlers<'_>) {
        for (time, gives_up) in [(self.options.stop_timeout, false), (LINGER, true)] {
            let (mut grace, mut idle) = (GracePeriod::new(time, Instant::now()), Idle::default());
            while !self.rdma.step_to_end(handlers, BUDGET, gives_up)
                && !grace.is_over(Instant::now())
            {
                idle.pass();
            }
        }
    }

    /// Does one bounded step: connects clients, answers requests, and sleeps for at most a
    /// millisecond if there was nothing to do for a while. Returns whether anything moved.
    ///
    /// # Errors
    /// [`SetupError::Broken`].
    pub fn step(&mut self, handlers: &mut Handlers<'_>) -> Result<bool, SetupError> {
        if self.steps_to_check == 0 {
            self.take_events()?;
            self.check_sockets();
            handlers.mark_given_up(self.rdma.core());
            self.steps_to_check = STEPS_PER_CHECK;
        }
        self.steps_to_check -= 1;
        let moved = self.rdma.step(handlers, BUDGET) > 0;
        if moved {
            self.idle.reset();
        } else if (self.rdma.may_sleep() || !self.idle.sleeps_next()) && self.idle.pass() {
            self.steps_to_check = 0;
        }
        Ok(moved)
    }

    /// Makes the next step take events and check the sockets, and sleep if nothing moved.
    pub(super) fn hurry(&mut self) {
        self.steps_to_check = 0;
        self.idle.exhaust();
    }

    /// Returns the server on its device, for statistics, groups and slices.
    #[must_use]
    pub const fn rdma(&mut self) -> &mut RdmaServer {
        &mut self.rdma
    }

    fn tell_departed(&mut self) {
        for (peer, reason) in self.rdma.take_departed() {
            self.gate.leave(peer, reason);
        }
    }

    fn take_events(&mut self) -> Result<(), SetupError> {
        while let Some(event) = self.rdma.device().take_async_event() {
            if self.rdma.heed(event) {
                self.breakdown = Some(event);
            }
        }
        self.breakdown
            .map_or(Ok(()), |event| Err(SetupError::Broken(event)))
    }

    fn check_sockets(&mut self) {
        self.tell_departed();
        let Self { rdma, gate, .. } = self;
        if gate.is_closed() {
            return;
        }
        let mut offered = gate
            .connecting()
            .filter(|connecting| matches!(connecting, Connecting::Offered(_)))
            .count();
        let mut is_full = false;
        gate.poll(
            || Connecting::Silent(Incoming::default()),
            |connecting, stream, peer| {
                let outcome = connecting.advance(stream, peer, rdma, &mut offered);
                is_full |= matches!(outcome, Err(SetupError::Full(_)));
                outcome
            },
            |(), _| (),
        );
        for number in gate.ended() {
            rdma.probe_those(|peer| peer.number == number);
        }
        if is_full
            && self
                .probed
                .is_none_or(|probed| probed.elapsed() >= FULL_INTERVAL)
        {
            self.probed = Some(Instant::now());
            rdma.probe_those(|peer| !gate.has_lifeline(peer));
        }
    }
}

/// Sends the answers of a step that a panic of its handler ended, the end of that call among them,
/// and waits until they have arrived, for a short time at most. Reports the clients that are still
/// connected as disconnected.
impl Drop for Stepped {
    fn drop(&mut self) {
        if self.rdma.has_unposted() {
            self.rdma.settle();
            let mut grace = GracePeriod::new(LINGER, Instant::now());
            while !self.rdma.post_rest() && !grace.is_over(Instant::now()) {
                std::thread::yield_now();
            }
        }
        self.tell_departed();
        let Self { rdma, gate, .. } = self;
        rdma.peers()
            .for_each(|peer| gate.leave(peer, "the server stopped"));
    }
}

pub(super) fn gate_options(options: &ServerOptions) -> GateOptions {
    GateOptions {
        patience: CONNECT_TIME,
        events: options.events.clone(),
        secret: options.secret.clone(),
        refusal: Offer::refuse(Refusal::Secret).to_vec(),
        lifelines: LIFELINES,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::{Client, Server};

    const WATCHDOG: Duration = Duration::from_secs(60);

    /// A step checks 64 entries in addition to the entries of two groups. A server that slept after
    /// each step would find a waiting client after many sleeps.
    #[test]
    fn a_server_looks_at_all_entries_between_two_sleeps() {
        let (start, (quit, over)) = (Instant::now(), mpsc::channel::<()>());
        let config = ServerConfig {
            max_clients: 1024,
            ..ServerConfig::default()
        };
        let mut server = Server::with_options(
            "127.0.0.1:0",
            &ServerOptions {
                config,
                ..ServerOptions::default()
            },
        )
        .unwrap();
        let address = server.local_addr().unwrap();
        // Keeps one client idle: without an idle client no entry needs a check.
        let client = thread::spawn(move || {
            let client = Client::connect(address).unwrap();
            assert!(over.recv_timeout(WATCHDOG).is_ok());
            drop(client);
        });
        let mut handlers = Handlers::new(server.max_payload());
        let mut step = |server: &mut Server| {
            assert!(start.elapsed() < WATCHDOG);
            server.step(&mut handlers).unwrap()
        };
        loop {
            while server.clients() == 0 || !server.idle.sleeps_next() {
                step(&mut server);
            }
            let before = server.idle.idle_polls;
            // Once in a second a probe moves something, and then the measurement is repeated.
            if (0..8 * 1024 / 64).all(|_| !step(&mut server)) {
                assert_eq!(
                    server.idle.idle_polls - before,
                    8,
                    "one sleep in each round"
                );
                break;
            }
        }
        quit.send(()).unwrap();
        client.join().unwrap();
    }
}
