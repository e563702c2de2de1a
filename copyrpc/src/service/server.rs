//! The server: accepts clients, polls, answers.

use std::fmt;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

use mlx5::{DeviceInfo, DeviceSpec};
use rendezvous::{Gate, Incoming, Lifelines};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use super::{SPINS, default_device};
use crate::config::EndpointConfig;
use crate::context::{BuildError, Context, ContextBuilder, DEFAULT_ENDPOINTS, PollError};
use crate::endpoint::Endpoint;
use crate::exchange::{EXCHANGE_RECORD_SIZE, ExchangeRecord, Refusal};
use crate::handshake::Handshake;
use crate::pending::ConnectFailure;
use crate::recv::{RecvHandle, Reply};
use crate::ring::RecvBytes;
use crate::stats::Stats;
use crate::typed::Call;

/// Maximum sleep of a server, in which no event of a socket wakes it.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);
/// Maximum sleep while clients connect.
const SHORT_SLEEP: Duration = Duration::from_millis(1);
/// Number of polls between two looks at the socket, for a server that always has something to do.
const POLLS_PER_LOOK: u32 = 1024;
/// Maximum time for a client to connect. Other clients do not wait meanwhile. The client has no endpoint until its record has arrived.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Options of a [`Server`].
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Its device. Default: the device that the environment variable `COPYRPC_DEVICE` names (`soft`, `mlx5_0`, `mlx5_0:2`), or the
    /// software HCA.
    pub device: DeviceSpec,
    /// Maximum number of clients at once; a further client waits for a place, at most for its
    /// [`connect_timeout`](crate::ClientOptions::connect_timeout), and gets a refusal that says so. Default: [`DEFAULT_ENDPOINTS`]. Each
    /// client takes a descriptor, for the socket over which it connected, and the memory that [`EndpointConfig`] gives: 2 MiB of rings by
    /// default. Devices have receives for about 680 with the default [`batches_in_flight`](EndpointConfig::batches_in_flight), and for more
    /// with fewer of them.
    pub clients: u32,
    /// Options of the connections. Clients need the same ring size.
    pub endpoint: EndpointConfig,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { device: default_device(), clients: DEFAULT_ENDPOINTS, endpoint: EndpointConfig::default() }
    }
}

/// Why a server could not be made, or cannot continue.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The device could not be opened, or its queues could not be created.
    #[error(transparent)]
    Device(#[from] BuildError),
    /// The thread of an [`AsyncServer`](crate::AsyncServer) could not be started.
    #[error("starting the thread of a server: {0}")]
    Thread(#[source] io::Error),
    /// The server cannot listen at the address.
    #[error("listening at {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// The socket's error.
        source: io::Error,
    },
    /// The device reported an error.
    #[error(transparent)]
    Poll(#[from] PollError),
}

/// Ends [`Server::serve`], from any thread.
#[derive(Clone, Debug)]
pub struct StopHandle {
    is_stopped: Arc<AtomicBool>,
    waker: Waker,
}

impl StopHandle {
    /// Makes [`Server::serve`] return as soon as its handler has returned. Requests that have arrived by then are answered.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        self.waker.wake_by_ref();
    }
}

/// A server at a TCP address. It belongs to one thread, and serves all its clients in that thread.
///
/// A client that leaves, in any way, or takes its time to connect delays no other client. One process or thread may have several servers,
/// each with its own address and device. The socket over which a client connected stays open as long as the client lives: its end makes
/// the server ask the client's device at once whether the client still exists, and free the place of a client that died. It is no more
/// than a hint: a client whose socket is cut stays connected.
///
/// ```no_run
/// let mut server = copyrpc::Server::bind("127.0.0.1:7479")?;
/// server.serve(|request| request.to_vec().to_ascii_uppercase())?;
/// # Ok::<(), copyrpc::ServerError>(())
/// ```
pub struct Server {
    /// Declared before the context, whose drop waits until the endpoints' last answers have arrived.
    clients: Vec<Member>,
    gate: Gate<Arriving>,
    lifelines: Lifelines,
    context: Context<()>,
    endpoint: EndpointConfig,
    /// Maximum number of clients at once.
    most: u32,
    stop: StopHandle,
    polls_to_look: u32,
    /// Number of polls in a row that found nothing.
    in_vain: u32,
}

/// A client that is connected.
struct Member {
    endpoint: Endpoint<()>,
    /// The socket over which it connected; `None` once the client has closed it.
    lifeline: Option<TcpStream>,
}

/// The progress of a client that connects.
enum Arriving {
    /// Its record has not arrived. It costs a descriptor only.
    Record(Incoming<EXCHANGE_RECORD_SIZE>),
    Meeting(Box<Handshake<()>>),
}

impl Arriving {
    /// Proceeds as far as the socket permits.
    fn advance(
        &mut self,
        stream: &mut TcpStream,
        context: &Context<()>,
        config: &EndpointConfig,
        most: u32,
    ) -> Result<Option<Endpoint<()>>, ConnectFailure> {
        if let Self::Record(incoming) = self {
            let Some(record) = incoming.advance(stream)? else { return Ok(None) };
            if let Err(error) = ExchangeRecord::decode(record) {
                // A client of another version reads there the version of this server. A client that cannot take the record at once does
                // not learn of it.
                let _ = stream.write(&ExchangeRecord::refuse(Refusal::Failed));
                return Err(error.into());
            }
            // The queues may have room for more, as devices round up.
            let handshake = if context.shares() < most { Handshake::of(context, config) } else { Handshake::full() };
            *self = Self::Meeting(Box::new(handshake.after(record)));
        }
        match self {
            Self::Meeting(handshake) => handshake.advance(stream),
            Self::Record(_) => Ok(None),
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("gate", &self.gate).field("clients", &self.clients.len()).finish_non_exhaustive()
    }
}

impl Server {
    /// Opens the device, and listens at `address`. Port 0 is any free port.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is left behind.
    pub fn bind(address: impl ToSocketAddrs + fmt::Debug) -> Result<Self, ServerError> {
        Self::with_options(address, &ServerOptions::default())
    }

    /// Like [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is left behind.
    pub fn with_options(address: impl ToSocketAddrs + fmt::Debug, options: &ServerOptions) -> Result<Self, ServerError> {
        let listening = Gate::bind(&address, CONNECT_TIME).and_then(|gate| Ok((gate, Lifelines::new()?)));
        let (gate, lifelines) = listening.map_err(|source| ServerError::Listen { address: format!("{address:?}"), source })?;
        let context = ContextBuilder::new(options.device.clone()).endpoints_with(options.clients, &options.endpoint).build()?;
        let stop = StopHandle { is_stopped: Arc::default(), waker: context.waker() };
        let (endpoint, most) = (options.endpoint.clone(), options.clients);
        Ok(Self { clients: Vec::new(), gate, lifelines, context, endpoint, most, stop, polls_to_look: 0, in_vain: 0 })
    }

    /// Returns the address at which it listens.
    ///
    /// # Errors
    /// The system cannot tell the address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.gate.local_addr()
    }

    /// Returns the number of connected clients.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.context.endpoints()
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        self.context.device_info()
    }

    /// Returns the counters of all clients since the server was made.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.context.stats()
    }

    /// Returns a handle that ends [`serve`](Self::serve), from any thread.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Answers each request with the return value of `handler`, until the server is stopped. A reply longer than the client accepts
    /// becomes a refusal. For handlers that answer later, or answer only some requests, see [`step`](Self::step) and
    /// [`recv`](Self::recv).
    ///
    /// # Errors
    /// [`ServerError::Poll`].
    pub fn serve<R: AsRef<[u8]>>(&mut self, mut handler: impl FnMut(RecvBytes<'_>) -> R) -> Result<(), ServerError> {
        self.answer(|request, reply| {
            // A client that has left gets no reply.
            if let Err(crate::ReplyError::TooLarge { request: reply, .. }) = reply.send(handler(request).as_ref()) {
                let _refused = reply.refuse();
            }
        })
    }

    fn answer(&mut self, mut answer: impl FnMut(RecvBytes<'_>, Reply<'_, ()>)) -> Result<(), ServerError> {
        loop {
            let is_stopped = self.is_stopped();
            self.turn(|context| context.serve(&mut answer, |(), _| ()))?;
            if is_stopped {
                self.context.flush_endpoints()?;
                return Ok(());
            }
        }
    }

    /// Like [`serve`](Self::serve), for requests that are structs. A request of another size is refused.
    ///
    /// # Errors
    /// [`ServerError::Poll`].
    pub fn serve_typed<C: Call + FromBytes>(&mut self, mut handler: impl FnMut(C) -> C::Reply) -> Result<(), ServerError> {
        self.answer(|request, reply| {
            let outcome = match request.read_as() {
                Ok(request) => reply.send(handler(request).as_bytes()),
                Err(_) => reply.refuse(),
            };
            if let Err(crate::ReplyError::TooLarge { request: reply, .. }) = outcome {
                let _refused = reply.refuse();
            }
        })
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.is_stopped.load(Ordering::Acquire)
    }

    /// Returns a handle that ends the sleep of a [`step`](Self::step), the present or the next one, from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.stop.waker.clone()
    }

    /// One bounded step: connects clients, sends answers, and takes requests for [`recv`](Self::recv). If there was nothing to do for a
    /// while, it sleeps for at most 10 ms; [`waker`](Self::waker) ends the sleep.
    ///
    /// # Errors
    /// [`ServerError::Poll`].
    pub fn step(&mut self) -> Result<(), ServerError> {
        self.turn(|context| context.poll(|(), _| ()))
    }

    fn turn(&mut self, take: impl FnOnce(&Context<()>) -> Result<usize, PollError>) -> Result<(), ServerError> {
        let moved = take(&self.context)?;
        self.in_vain = if moved > 0 { 0 } else { self.in_vain.saturating_add(1) };
        if self.polls_to_look == 0 {
            self.look_at_sockets();
            self.polls_to_look = POLLS_PER_LOOK;
        }
        self.polls_to_look -= 1;
        if self.in_vain > SPINS {
            let longest = if self.gate.arriving().next().is_none() { LONGEST_SLEEP } else { SHORT_SLEEP };
            self.context.wait(Some(longest))?;
            self.polls_to_look = 0;
        }
        Ok(())
    }

    /// Returns the oldest request that arrived. Its answer is sent with the next [`step`](Self::step).
    #[must_use]
    pub fn recv(&self) -> Option<RecvHandle<()>> {
        self.context.recv()
    }

    /// Admits new clients, continues with clients that connect, and drops those that have left.
    fn look_at_sockets(&mut self) {
        self.clients.retain(|client| client.endpoint.closed().is_none());
        let Self { clients, gate, lifelines, context, endpoint, most, .. } = self;
        let mut is_full = false;
        gate.look(
            || Arriving::Record(Incoming::default()),
            |arriving, stream| {
                let outcome = arriving.advance(stream, context, endpoint, *most);
                is_full |= matches!(&outcome, Err(error) if error.is_for_lack_of_room());
                outcome
            },
            |endpoint, stream| {
                lifelines.add(&stream);
                clients.push(Member { endpoint, lifeline: Some(stream) });
            },
        );
        for ended in lifelines.ended() {
            let is_ended = |client: &&mut Member| client.lifeline.as_ref().is_some_and(|lifeline| lifeline.as_raw_fd() == ended);
            if let Some(client) = clients.iter_mut().find(is_ended) {
                client.lifeline = None;
                client.endpoint.probe();
            }
        }
        // A client that lived when its socket was cut may have died since, and another one needs its place.
        if is_full {
            clients.iter().filter(|client| client.lifeline.is_none()).for_each(|client| client.endpoint.probe());
        }
    }
}
