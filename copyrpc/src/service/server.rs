//! The server: accepts clients, polls, answers.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::task::Waker;
use std::time::{Duration, Instant};

use copyrpc_calls::{Answer, Bind, Patience, Serving, Share, StopHandle};
use mlx5::{DeviceInfo, DeviceSpec};
use mlx5_rendezvous::{Events, Gate, GateOptions, GracePeriod, Peer, Secret};

use super::default_device;
use crate::config::EndpointConfig;
use crate::connect::{ExchangeRecord, Handshake, RecordError, Refusal};
use crate::context::{Context, ContextBuilder, DEFAULT_ENDPOINTS, LINGER};
use crate::endpoint::Endpoint;
use crate::error::{Reentrant, SetupError};
use crate::recv::{RecvHandle, Reply};
use crate::ring::RecvBytes;
use crate::stats::Stats;
use crate::wire::Status;

/// Maximum sleep of a server. The events of its sockets do not wake it, and wait until the sleep is
/// over.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);
/// Maximum sleep while clients connect.
const SHORT_SLEEP: Duration = Duration::from_millis(1);
/// Number of turns, each of which polls the context once, between two polls of the sockets, for a
/// server that always has something to do.
const TURNS_PER_SOCKETS: u32 = 1024;
/// Maximum time for a client to connect. Other clients do not wait meanwhile. The client has no
/// endpoint until its record has arrived.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Default of [`ServerOptions::stop_timeout`].
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Default of [`ServerOptions::max_buffered`].
const MAX_BUFFERED: usize = 64 << 20;

/// Options of a [`Server`](crate::Server).
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Device of the server. Default: the device given by the environment variable `COPYRPC_DEVICE`
    /// (`soft`, `mlx5_0`, `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// Maximum number of clients at once; a further client waits for a place, at most for its
    /// [`connect_timeout`](crate::ClientOptions::connect_timeout), and is refused if it gets no
    /// place in that time. Default: [`DEFAULT_ENDPOINTS`]. Each client takes a descriptor, for the
    /// socket over which it connected, and the memory that [`EndpointConfig`] gives: 2 MiB of rings
    /// by default. Devices have receives for about 680 clients with the default
    /// [`batches_in_flight`](EndpointConfig::batches_in_flight), and for more clients with fewer
    /// batches.
    pub max_clients: u32,
    /// Options of the connections. Clients need the same ring size.
    pub endpoint: EndpointConfig,
    /// Maximum number of bytes of requests that wait for
    /// [`AsyncServer::recv`](crate::AsyncServer::recv). Above it, an `AsyncServer` takes no further
    /// requests. Further requests stay in the rings of their clients, whose calls then wait for
    /// room. Default: 64 MiB.
    pub max_buffered: usize,
    /// Maximum time for which the [end](Host::close) and the drop of the server wait, both
    /// together: for clients that have begun to call while they connect, and then until the
    /// server's answers and its close have arrived at all clients' devices. Time in which its
    /// thread is suspended does not count. Before that, a stopped server continues for at most this
    /// time while clients fetch replies in [parts](crate::parts). Default: 1 s; the server waits for
    /// all of it only if a client's host is gone.
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
            max_clients: DEFAULT_ENDPOINTS,
            endpoint: EndpointConfig::default(),
            max_buffered: MAX_BUFFERED,
            stop_timeout: STOP_TIMEOUT,
            events: Events::default(),
            secret: None,
        }
    }
}

/// The address of a server, shared with further servers: see
/// [`Server::beside`](crate::Server::beside).
pub type SharedAddress = copyrpc_calls::SharedAddress<ServerOptions>;

/// The device of a [`Server`](crate::Server), its address and its clients.
#[derive(Debug)]
pub struct Host {
    /// The connected clients. The field is declared before the context: its drop closes the
    /// endpoints, and the drop of the context waits until their last answers have arrived.
    clients: Vec<Member>,
    gate: Gate<Handshake<()>>,
    pub(super) context: Context<()>,
    options: ServerOptions,
    stop: StopHandle,
    turns_to_sockets: u32,
    patience: Patience,
    /// Whether a sleep continues although requests wait to be received.
    holds_back: bool,
}

#[derive(Debug)]
struct Member {
    endpoint: Endpoint<()>,
    peer: Peer,
}

/// [Closes](Host::close) the server.
impl Drop for Host {
    fn drop(&mut self) {
        self.close();
        for Member { endpoint, peer } in &self.clients {
            let reason = endpoint.closed().map_or_else(
                || "the server stopped".to_owned(),
                |reason| reason.to_string(),
            );
            self.gate.leave(*peer, &reason);
        }
    }
}

impl Host {
    fn at(
        gate: Gate<Handshake<()>>,
        options: ServerOptions,
        stop: Option<StopHandle>,
    ) -> Result<Self, SetupError> {
        let context = ContextBuilder::new(options.device.clone())
            .endpoints_with(options.max_clients, &options.endpoint)
            .build()?;
        let stop = stop.unwrap_or_else(|| StopHandle::new(context.waker(), options.stop_timeout));
        context.inner.linger.set(options.stop_timeout);
        Ok(Self {
            clients: Vec::new(),
            gate,
            context,
            options,
            stop,
            turns_to_sockets: 0,
            patience: Patience::new(),
            holds_back: false,
        })
    }

    /// Does one turn of [`serve`](crate::Server::serve). Returns the number of completions and of requests
    /// that it took. For counts of instructions.
    #[doc(hidden)]
    #[inline(always)]
    pub fn serve_turn<R: AsRef<[u8]>>(
        &mut self,
        handler: &mut impl FnMut(RecvBytes<'_>) -> R,
    ) -> Result<usize, SetupError> {
        let answer =
            |request: RecvBytes<'_>, reply: Reply<'_, ()>| reply.answer(handler(request).as_ref());
        self.turn(|context| context.serve(answer, |(), _| ()))
    }

    /// Returns a handle that ends the sleep of a [`step`](Self::step), the present step or else the
    /// next step, from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.context.waker()
    }

    /// Does one bounded step: connects clients, sends answers, and takes requests for
    /// [`recv`](Self::recv). If there was nothing to do for a while, it sleeps for at most 10 ms,
    /// then polls for new clients; [`waker`](Self::waker) ends the sleep.
    ///
    /// # Errors
    /// [`SetupError::Broken`].
    pub fn step(&mut self) -> Result<(), SetupError> {
        self.turn(|context| context.poll(|(), _| ())).map(drop)
    }

    /// Does one turn: calls `take`, polls the sockets if it is time to, and sleeps if there was
    /// nothing to do for a while. Returns the number of completions and of requests that `take`
    /// moved.
    #[inline(always)]
    fn turn(
        &mut self,
        take: impl FnOnce(&Context<()>) -> Result<usize, Reentrant>,
    ) -> Result<usize, SetupError> {
        // The polls of a server do not nest, so none fails.
        let moved = take(&self.context).unwrap_or(0);
        if self.turns_to_sockets == 0 {
            self.poll_sockets();
            self.turns_to_sockets = TURNS_PER_SOCKETS;
        }
        self.turns_to_sockets -= 1;
        if moved > 0 {
            self.patience.reset();
        } else if let Some(start) = self.patience.idle() {
            if let Some(event) = self.context.inner.breakdown() {
                return Err(SetupError::Broken(event));
            }
            let is_quiet = self.gate.connecting().next().is_none();
            let longest = if is_quiet { LONGEST_SLEEP } else { SHORT_SLEEP };
            let _woken = self.context.inner.wait(Some(longest), || {
                !self.holds_back && self.context.inner.has_requests()
            });
            self.patience.slept(start);
            self.turns_to_sockets = 0;
        }
        Ok(moved)
    }

    /// Takes no more clients, and with the next [`step`](Self::step) sends a close to the connected
    /// clients: their next calls are for another server. Requests that were received can still be
    /// answered: drop the server after the last answer. Other requests, and requests that arrive
    /// later, reach no handler, and this is reported to their callers: a `Client` makes the call
    /// again at the next server of its addresses, or ends it as
    /// [`NotSent`](crate::ClientError::NotSent), which is retryable. A client that connects and may
    /// call already is waited for (G6 of docs/copyrpc-protocol.md), at most for
    /// [`stop_timeout`](ServerOptions::stop_timeout). [`serve`](crate::Server::serve) closes the server at
    /// its end, and so does the drop.
    pub fn close(&mut self) {
        let mut grace = GracePeriod::new(self.context.inner.linger.get(), Instant::now());
        while self.gate.connecting().any(Handshake::has_told) {
            self.gate.stop_accepting();
            self.poll_sockets();
            if grace.is_over(Instant::now()) {
                break;
            }
            std::thread::yield_now();
        }
        // The drop may wait for the rest of the stop timeout, but at least for `LINGER`, so that
        // answers reach the clients that did not delay this close.
        let linger = &self.context.inner.linger;
        linger.set(grace.left().max(LINGER.min(linger.get())));
        self.gate.close();
        self.clients
            .iter()
            .for_each(|client| client.endpoint.close());
    }

    /// Returns the oldest request that arrived. Its answer is sent with the next
    /// [`step`](Self::step).
    #[must_use]
    pub fn recv(&self) -> Option<RecvHandle<()>> {
        self.context.recv()
    }

    /// Admits new clients, continues with clients that connect, and drops clients that have
    /// disconnected.
    fn poll_sockets(&mut self) {
        let Self {
            clients,
            gate,
            context,
            options,
            ..
        } = self;
        clients.retain(|client| {
            let closed = client.endpoint.closed();
            if let Some(reason) = closed {
                gate.leave(client.peer, &reason.to_string());
            }
            closed.is_none()
        });
        if gate.is_closed() {
            return;
        }
        let mut is_full = false;
        gate.poll(
            Handshake::awaited,
            |handshake, stream, peer| {
                // The queues may have room for more endpoints, as devices round up, so the limit is
                // checked here.
                let begin = || {
                    if context.shares() < options.max_clients {
                        Handshake::of(context, &options.endpoint)
                    } else {
                        Handshake::full()
                    }
                };
                let outcome = handshake.serve(stream, peer, begin);
                is_full |= matches!(
                    &outcome,
                    Err(SetupError::Record(RecordError::Refused(Refusal::Full)))
                );
                outcome
            },
            |endpoint, peer| clients.push(Member { endpoint, peer }),
        );
        for number in gate.ended() {
            clients
                .iter()
                .filter(|client| client.peer.number == number)
                .for_each(|client| client.endpoint.probe());
        }
        // A client that lived when its socket was cut may have died since, and another client needs
        // its place. A client that connects may have died too: each client that has sent its record
        // has a place.
        if is_full {
            gate.make_room();
            clients
                .iter()
                .filter(|client| !gate.has_lifeline(client.peer))
                .for_each(|client| client.endpoint.probe());
        }
    }
}

fn gate_options(options: &ServerOptions) -> GateOptions {
    GateOptions {
        patience: CONNECT_TIME,
        events: options.events.clone(),
        secret: options.secret.clone(),
        refusal: ExchangeRecord::refuse(Refusal::Secret).to_vec(),
        lifelines: usize::MAX,
    }
}

impl Serving for Host {
    type Options = ServerOptions;
    type Request<'a> = RecvBytes<'a>;
    type Token = RecvHandle<()>;
    type Peer = Peer;
    type Error = SetupError;
    type Address = SocketAddr;
    type Stats = Stats;
    type Device = DeviceInfo;
    const THREAD: &'static str = "copyrpc-server";

    fn address(&self) -> io::Result<SocketAddr> {
        self.gate.local_addr()
    }

    fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    fn device(&self) -> DeviceInfo {
        self.context.device_info()
    }

    fn clients(&self) -> usize {
        self.context.endpoints()
    }

    fn stats(&self) -> Stats {
        self.context.stats()
    }

    fn serve<R: AsRef<[u8]>>(
        &mut self,
        mut handler: impl FnMut(RecvBytes<'_>) -> R,
    ) -> Result<(), SetupError> {
        let mut grace = None;
        loop {
            if self.stop.is_stopped() {
                grace.get_or_insert_with(|| GracePeriod::new(LINGER, Instant::now()));
            }
            let moved = self.serve_turn(&mut handler)?;
            // A turn takes a bounded number of requests, so more may have arrived. The loop ends
            // after a turn that took nothing, or after the grace period.
            if grace
                .as_mut()
                .is_some_and(|grace| moved == 0 || grace.is_over(Instant::now()))
            {
                self.close();
                self.context.inner.flush();
                return Ok(());
            }
        }
    }

    fn step(&mut self, holds_back: bool) -> Result<(), SetupError> {
        self.holds_back = holds_back;
        self.step()
    }

    fn hurry(&mut self) {
        self.turns_to_sockets = 0;
        self.patience.exhaust();
    }

    fn recv(&mut self) -> Option<(RecvHandle<()>, Vec<u8>, Peer)> {
        loop {
            let mut request = Self::recv(self)?;
            // Every client was admitted by the server, so every request has a peer.
            let Some(peer) = request.peer() else { continue };
            let data = request.data().to_vec();
            request.release_data();
            return Some((request, data, peer));
        }
    }

    fn answer(&mut self, request: RecvHandle<()>, answer: Answer) {
        match answer {
            Answer::Reply(reply) => request.answer(&reply),
            Answer::Refusal => drop(request.refuse()),
            Answer::SentBack => drop(request.respond(Status::Closing, &[])),
            Answer::Dropped => drop(request),
        }
    }

    fn has(&self, client: u64) -> bool {
        self.clients
            .iter()
            .any(|member| member.peer.number == client && member.endpoint.closed().is_none())
    }

    fn is_wanted(&self, request: &RecvHandle<()>) -> bool {
        request.is_wanted()
    }

    fn close(&mut self) {
        self.close();
    }

    fn max_buffered(options: &ServerOptions) -> usize {
        options.max_buffered
    }

    fn no_thread(error: io::Error) -> SetupError {
        SetupError::Thread(error)
    }
}

impl<A: ToSocketAddrs + fmt::Debug> Bind<A> for Host {
    fn bind_with(address: A, options: &ServerOptions) -> Result<Self, SetupError> {
        Self::at(
            Gate::bind(address, gate_options(options))?,
            options.clone(),
            None,
        )
    }
}

impl Share for Host {
    fn share(&mut self) -> io::Result<SharedAddress> {
        Ok(SharedAddress {
            listener: self.gate.share()?,
            options: self.options.clone(),
            stop: self.stop.clone(),
        })
    }

    fn beside(other: SharedAddress) -> Result<Self, SetupError> {
        let gate = Gate::beside(other.listener, gate_options(&other.options))?;
        Self::at(gate, other.options, Some(other.stop))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use copyrpc_testing::limits;
    use mlx5::{FabricSpec, LocalFabric, SoftOptions};

    use super::*;

    /// The client of this test sends its record, but not the byte that ends the connecting, so
    /// `close` waits for the client for the whole stop timeout. Only `LINGER` is then left for the
    /// drop.
    #[test]
    fn the_end_of_a_server_and_its_drop_share_one_stop_timeout() {
        limits::watchdog(Duration::from_secs(60));
        let device = DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(LocalFabric::new()),
            ..SoftOptions::default()
        });
        let stop_timeout = Duration::from_millis(50);
        let options = ServerOptions {
            device: device.clone(),
            stop_timeout,
            ..ServerOptions::default()
        };
        let mut server = Host::bind_with(limits::any_port(), &options).unwrap();
        let context = ContextBuilder::new(device).build::<()>().unwrap();
        let pending = context.create_endpoint(&options.endpoint).unwrap();
        let mut stream = TcpStream::connect(server.address().unwrap()).unwrap();
        stream.write_all(&pending.local_info().encode()).unwrap();
        while !server.gate.connecting().any(Handshake::has_told) {
            server.step().unwrap();
        }
        assert_eq!(server.context.inner.linger.get(), stop_timeout);
        server.close();
        assert_eq!(server.context.inner.linger.get(), LINGER, "for the answers");
    }
}
