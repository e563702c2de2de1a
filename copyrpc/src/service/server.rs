//! The server: accepts, polls, answers.

use std::fmt;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

use mlx5::{DeviceInfo, DeviceSpec};
use rendezvous::{Gate, Incoming};
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

/// How long a server sleeps at most: nothing of a socket wakes it.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);
/// The same while clients are being connected.
const SHORT_SLEEP: Duration = Duration::from_millis(1);
/// So often a server that always has something to do looks at its socket all the same.
const POLLS_PER_LOOK: u32 = 1024;
/// How long a client may take to connect. It keeps nobody else waiting, and has no endpoint before its record is there.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// What a [`Server`] is made with.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Its device. Default: the one that the environment variable `COPYRPC_DEVICE` names (`soft`, `mlx5_0`, `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// The maximum number of clients at once; one more is told so. Default [`DEFAULT_ENDPOINTS`]. Each takes the memory that [`EndpointConfig`] says: 2 MiB of
    /// rings by default.
    pub clients: u32,
    /// What their connections are made with. Clients need the same ring size.
    pub endpoint: EndpointConfig,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self { device: default_device(), clients: DEFAULT_ENDPOINTS, endpoint: EndpointConfig::default() }
    }
}

/// Why a server could not be made, or cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The device could not be opened, or its queues not be made.
    #[error(transparent)]
    Device(#[from] BuildError),
    /// There was no room for the thread of an [`AsyncServer`](crate::AsyncServer).
    #[error("starting the thread of a server: {0}")]
    Thread(#[source] io::Error),
    /// The address cannot be listened at.
    #[error("listening at the server's address: {0}")]
    Listen(#[source] io::Error),
    /// The device refused something.
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
    /// Makes the server return as soon as its handler has returned. Requests that have arrived by then are answered.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        self.waker.wake_by_ref();
    }
}

/// A server at a TCP address. It belongs to one thread, and serves all its clients in it.
///
/// Clients that leave, in whatever way, and those that take their time to connect, keep no other waiting. One process, or thread, may have
/// several servers, each with its own address and device.
///
/// ```no_run
/// let mut server = copyrpc::Server::bind("127.0.0.1:7479")?;
/// server.serve(|request| request.to_vec().to_ascii_uppercase())?;
/// # Ok::<(), copyrpc::ServerError>(())
/// ```
pub struct Server {
    /// Declared before the context, which waits when it is dropped until what they have to send has arrived.
    clients: Vec<Endpoint<()>>,
    gate: Gate<Arriving>,
    context: Context<()>,
    endpoint: EndpointConfig,
    stop: StopHandle,
    polls_to_look: u32,
    /// Polls in a row that found nothing.
    in_vain: u32,
}

/// How far a client has come that is being connected.
enum Arriving {
    /// Its record is not there yet. It costs nothing but a descriptor.
    Record(Incoming<EXCHANGE_RECORD_SIZE>),
    Meeting(Box<Handshake<()>>),
}

impl Arriving {
    /// Goes on as far as the socket lets it.
    fn advance(
        &mut self,
        stream: &mut TcpStream,
        context: &Context<()>,
        config: &EndpointConfig,
    ) -> Result<Option<Endpoint<()>>, ConnectFailure> {
        if let Self::Record(incoming) = self {
            let Some(record) = incoming.advance(stream)? else { return Ok(None) };
            if let Err(error) = ExchangeRecord::decode(record) {
                // One of another version reads there which one this is. Who cannot take it at once does not learn it.
                let _ = stream.write(&ExchangeRecord::refuse(Refusal::Failed));
                return Err(error.into());
            }
            *self = Self::Meeting(Box::new(Handshake::of(context, config).after(record)));
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
    /// Opens the device, and listens at `address`; port 0 is any that is free.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is left behind.
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self, ServerError> {
        Self::with_options(address, &ServerOptions::default())
    }

    /// Like [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is left behind.
    pub fn with_options(address: impl ToSocketAddrs, options: &ServerOptions) -> Result<Self, ServerError> {
        let gate = Gate::bind(address, CONNECT_TIME).map_err(ServerError::Listen)?;
        let context = ContextBuilder::new(options.device.clone()).endpoints_with(options.clients, &options.endpoint).build()?;
        let stop = StopHandle { is_stopped: Arc::default(), waker: context.waker() };
        Ok(Self { clients: Vec::new(), gate, context, endpoint: options.endpoint.clone(), stop, polls_to_look: 0, in_vain: 0 })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system cannot tell.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.gate.local_addr()
    }

    /// Clients that are connected.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.context.endpoints()
    }

    /// Name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        self.context.device_info()
    }

    /// Counters of all clients there were.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.context.stats()
    }

    /// Ends [`serve`](Self::serve), from any thread.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Answers each request with what `handler` makes of it, until it is stopped. A reply that is longer than the client takes is answered
    /// with a refusal. For handlers that answer later, or only some: [`step`](Self::step) and [`recv`](Self::recv).
    ///
    /// # Errors
    /// [`ServerError::Poll`].
    pub fn serve<R: AsRef<[u8]>>(&mut self, mut handler: impl FnMut(RecvBytes<'_>) -> R) -> Result<(), ServerError> {
        self.answer(|request, reply| {
            // A client that left gets none.
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

    /// Like [`serve`](Self::serve), for requests that are structs: one of another size is refused.
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

    /// Ends the sleep of a [`step`](Self::step), the one under way or the next, from any thread.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.stop.waker.clone()
    }

    /// One bounded step: connects clients, sends answers, takes in requests for [`recv`](Self::recv), sleeps for at most 10 ms if there has been
    /// nothing to do for a while ([`waker`](Self::waker) ends that).
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

    /// The oldest request that arrived. Its answer leaves with the next [`step`](Self::step).
    #[must_use]
    pub fn recv(&self) -> Option<RecvHandle<()>> {
        self.context.recv()
    }

    /// Takes new clients, goes on with those that are being connected, and lets go of those that have left.
    fn look_at_sockets(&mut self) {
        self.clients.retain(|client| client.closed().is_none());
        let Self { clients, gate, context, endpoint, .. } = self;
        gate.look(
            || Arriving::Record(Incoming::default()),
            |arriving, stream| arriving.advance(stream, context, endpoint),
            |client| clients.push(client),
        );
    }
}
