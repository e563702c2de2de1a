//! The server: accepts, polls, answers.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use mlx5::{DeviceInfo, DeviceSpec};
use thiserror::Error;
use zerocopy::{FromBytes, IntoBytes};

use super::{SPINS, default_device};
use crate::context::{BuildError, Context, ContextBuilder, DEFAULT_ENDPOINTS, PollError};
use crate::endpoint::{ConnectFailure, Endpoint, EndpointConfig};
use crate::exchange::{EXCHANGE_RECORD_SIZE, ExchangeRecord, Refusal};
use crate::handshake::Handshake;
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
/// Clients that wait to be taken; the system allows as many as `net.core.somaxconn`, 4,096 by default.
const BACKLOG: i32 = 4096;
/// New clients that one look takes.
const CLIENTS_PER_LOOK: usize = 256;
/// How long a client may take to connect. It keeps nobody else waiting, and has no endpoint before its record is there.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// What a [`Server`] is made with.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Its device. Default: the one that the environment variable `COPYRPC_DEVICE` names (`soft`, `mlx5_0`, `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// Most clients at once; one more is told so. Default [`DEFAULT_ENDPOINTS`]. Each takes the memory that [`EndpointConfig`] says: 2 MiB of
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
    /// Has the server return as soon as its handler has. Requests that have arrived by then are answered.
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
    arriving: Vec<Arriving>,
    context: Context<()>,
    listener: TcpListener,
    endpoint: EndpointConfig,
    stop: StopHandle,
    polls_to_look: u32,
    /// Polls in a row that found nothing.
    in_vain: u32,
}

/// A client that is being connected.
struct Arriving {
    stream: TcpStream,
    stage: Stage,
    since: Instant,
}

enum Stage {
    /// So much of its record has come. It costs nothing but a descriptor.
    Record([u8; EXCHANGE_RECORD_SIZE], usize),
    Meeting(Box<Handshake<()>>),
}

impl Arriving {
    fn new(stream: TcpStream) -> Self {
        Self { stream, stage: Stage::Record([0; EXCHANGE_RECORD_SIZE], 0), since: Instant::now() }
    }

    /// Goes on as far as the socket lets it: a client, or whether there may still be one.
    fn advance(&mut self, context: &Context<()>, config: &EndpointConfig) -> Result<Option<Endpoint<()>>, ConnectFailure> {
        if let Stage::Record(record, count) = &mut self.stage {
            while *count < EXCHANGE_RECORD_SIZE {
                match self.stream.read(&mut record[*count..]) {
                    Ok(0) => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
                    Ok(bytes) => *count += bytes,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if let Err(error) = ExchangeRecord::decode(record) {
                // One of another version reads there which one this is. Who cannot take it at once does not learn it.
                let _ = self.stream.write(&Refusal::Failed.encode());
                return Err(error.into());
            }
            let handshake = Handshake::of(context, config).after(record);
            self.stage = Stage::Meeting(Box::new(handshake));
        }
        match &mut self.stage {
            Stage::Meeting(handshake) => handshake.advance(&mut self.stream),
            Stage::Record(..) => Ok(None),
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("listener", &self.listener).field("clients", &self.clients.len()).finish_non_exhaustive()
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

    /// As [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is left behind.
    pub fn with_options(address: impl ToSocketAddrs, options: &ServerOptions) -> Result<Self, ServerError> {
        let listener = TcpListener::bind(address).map_err(ServerError::Listen)?;
        // The standard library has 128 wait, and the system lets the others try again for seconds.
        // SAFETY: plain numbers, of a socket that listens already.
        let _ = unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) };
        listener.set_nonblocking(true).map_err(ServerError::Listen)?;
        let context = ContextBuilder::new(options.device.clone()).endpoints_with(options.clients, &options.endpoint).build()?;
        let stop = StopHandle { is_stopped: Arc::default(), waker: context.waker() };
        Ok(Self {
            clients: Vec::new(),
            arriving: Vec::new(),
            context,
            listener,
            endpoint: options.endpoint.clone(),
            stop,
            polls_to_look: 0,
            in_vain: 0,
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system cannot tell.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
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

    /// As [`serve`](Self::serve), for requests that are structs: one of another size is refused.
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
            let longest = if self.arriving.is_empty() { LONGEST_SLEEP } else { SHORT_SLEEP };
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
        // Errors of accept(2) are those of a connection that is gone, or of want of descriptors, which may end.
        for _ in 0..CLIENTS_PER_LOOK {
            let Ok((stream, _)) = self.listener.accept() else { break };
            if stream.set_nonblocking(true).is_ok() {
                self.arriving.push(Arriving::new(stream));
            }
        }
        let Self { clients, arriving, context, endpoint, .. } = self;
        arriving.retain_mut(|arriving| match arriving.advance(context, endpoint) {
            Ok(Some(client)) => {
                clients.push(client);
                false
            }
            Ok(None) => arriving.since.elapsed() < CONNECT_TIME,
            // It knows why, or is gone.
            Err(_) => false,
        });
    }
}
