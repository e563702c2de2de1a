//! The client: one call at a time, answered or ended.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use mlx5::{DeviceInfo, DeviceSpec};
use thiserror::Error;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{SPINS, default_device};
use crate::context::{BuildError, Context, ContextBuilder, PollError};
use crate::endpoint::{ConnectFailure, Endpoint, EndpointConfig};
use crate::error::{CallError, CallFailure, CloseReason};
use crate::handshake::Handshake;
use crate::stats::Stats;
use crate::typed::SizeError;

/// Between two attempts to reach a server that is not there.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(20);

/// The one in use, and one that has ended and is not given back yet.
const ENDPOINTS: u32 = 2;

/// What a [`Client`] is made with.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Its device, of the kind that the server's is. Default: the one that the environment variable `COPYRPC_DEVICE` names (`soft`, `mlx5_0`,
    /// `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// What the connection is made with; the ring size is the server's.
    pub endpoint: EndpointConfig,
    /// For how long a server that is not there yet, or does not answer, is waited for, whenever a connection is made. Default 5 s.
    pub connect_timeout: Duration,
    /// Most bytes of a reply; larger ones are refused. A call that was given up keeps that much of the credit, a quarter of the ring, until it is
    /// answered after all. Default: a quarter of the most, which is 3/16 of the ring: 48 KiB with rings of 1 MiB.
    pub max_reply: Option<usize>,
    /// How long [`Client::call`] waits. Default: as long as the server lives and polls ([`EndpointConfig::stall_timeout`]).
    pub timeout: Option<Duration>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            device: default_device(),
            endpoint: EndpointConfig::default(),
            connect_timeout: Duration::from_secs(5),
            max_reply: None,
            timeout: None,
        }
    }
}

/// Why there is no client, or no reply.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The device could not be opened, or its queues not be made.
    #[error(transparent)]
    Device(#[from] BuildError),
    /// The address is none, or nobody listens there.
    #[error("the server at {address}: {source}")]
    Unreachable {
        /// The address.
        address: String,
        /// What the socket says.
        source: io::Error,
    },
    /// The server and this client could not be connected.
    #[error(transparent)]
    Connect(#[from] ConnectFailure),
    /// The request is longer than a ring takes. It was not sent.
    #[error("request of {len} bytes, the limit is {max}: larger rings take more (EndpointConfig::ring_size)")]
    TooLarge {
        /// Its bytes.
        len: usize,
        /// Most bytes of a request.
        max: usize,
    },
    /// There was no reply in time. Whether the handler ran, or will, is not known.
    #[error("no reply in time")]
    TimedOut,
    /// The handler refused the request, or its reply was too long.
    #[error("the server refused the request, or its reply has more than {max_reply} bytes (ClientOptions::max_reply)")]
    Refused {
        /// Most bytes of a reply.
        max_reply: usize,
    },
    /// The handler dropped the request.
    #[error("the server dropped the request")]
    Dropped,
    /// The connection ended before there was a reply. Whether the handler ran is not known; the next call connects again.
    #[error("no reply: {0}")]
    Closed(CloseReason),
    /// The reply is not the type that was asked for.
    #[error("the reply: {0}")]
    Reply(#[from] SizeError),
    /// The device refused something.
    #[error(transparent)]
    Poll(#[from] PollError),
}

/// A connection to a [`Server`](crate::Server), which calls make again when it has ended. It belongs to one thread.
///
/// For many calls at once there are [`Context`](crate::Context) and [`Endpoint`](crate::Endpoint), which this is made of.
///
/// ```no_run
/// let mut client = copyrpc::Client::connect("127.0.0.1:7479")?;
/// assert_eq!(&client.call(b"ping")?[..], b"PING");
/// # Ok::<(), copyrpc::ClientError>(())
/// ```
pub struct Client {
    /// Declared before the context.
    endpoint: Endpoint<u64>,
    context: Context<u64>,
    address: String,
    addresses: Vec<SocketAddr>,
    options: ClientOptions,
    /// Numbers the calls: a reply that comes after its call was given up is not the next one's.
    calls: u64,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("address", &self.address).field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

impl Client {
    /// Opens the device, and connects to the server at `address`, which is waited for.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub fn connect(address: impl ToSocketAddrs + fmt::Debug) -> Result<Self, ClientError> {
        Self::with_options(address, &ClientOptions::default())
    }

    /// As [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub fn with_options(address: impl ToSocketAddrs + fmt::Debug, options: &ClientOptions) -> Result<Self, ClientError> {
        let name = format!("{address:?}");
        let addresses = address.to_socket_addrs().map(Vec::from_iter);
        let addresses = addresses.map_err(|source| ClientError::Unreachable { address: name.clone(), source })?;
        let context = ContextBuilder::new(options.device.clone()).endpoints_with(ENDPOINTS, &options.endpoint).build()?;
        let endpoint = reach(&context, &name, &addresses, options)?;
        Ok(Self { endpoint, context, address: name, addresses, options: options.clone(), calls: 0 })
    }

    /// Sends a request and waits for its reply, for as long as the options say. If the connection has ended, it is made again first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&mut self, request: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.call_for(request, self.options.timeout)
    }

    /// As [`call`](Self::call), but waits for so long at most. Connecting again, if that is needed, takes its own time.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_within(&mut self, request: &[u8], timeout: Duration) -> Result<Vec<u8>, ClientError> {
        self.call_for(request, Some(timeout))
    }

    /// Sends the bytes of `request`, and takes the reply's as a `Reply`: see [`typed`](crate::typed).
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_typed<Request, Reply>(&mut self, request: &Request) -> Result<Reply, ClientError>
    where
        Request: IntoBytes + Immutable,
        Reply: FromBytes,
    {
        let reply = self.call(request.as_bytes())?;
        Reply::read_from_bytes(&reply).map_err(|_| SizeError { received: reply.len(), expected: size_of::<Reply>() }.into())
    }

    /// Most bytes of a request.
    #[must_use]
    pub fn max_request(&self) -> usize {
        self.endpoint.max_payload()
    }

    /// Most bytes of a reply.
    #[must_use]
    pub fn max_reply(&self) -> usize {
        let most = self.endpoint.max_response_allowance();
        self.options.max_reply.unwrap_or(most / 4).min(most)
    }

    /// Name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        self.context.device_info()
    }

    /// Counters of all connections there were.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.context.stats()
    }

    fn call_for(&mut self, request: &[u8], timeout: Option<Duration>) -> Result<Vec<u8>, ClientError> {
        // What ended it while nobody looked.
        self.context.poll(|_, _| ())?;
        if self.endpoint.closed().is_some() {
            self.reconnect()?;
        }
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        match self.attempt(request, end) {
            // No handler got it: the server was leaving. There may be another by now.
            Err(ClientError::Closed(CloseReason::ClosedByPeer)) => {
                self.reconnect()?;
                self.attempt(request, end)
            }
            outcome => outcome,
        }
    }

    fn reconnect(&mut self) -> Result<(), ClientError> {
        self.endpoint.abort();
        // Gives back what it has.
        self.context.poll(|_, _| ())?;
        self.endpoint = reach(&self.context, &self.address, &self.addresses, &self.options)?;
        Ok(())
    }

    fn attempt(&mut self, request: &[u8], end: Option<Instant>) -> Result<Vec<u8>, ClientError> {
        self.calls += 1;
        let number = self.calls;
        let (mut is_made, mut in_vain) = (false, 0);
        loop {
            // Of what a call is not taken yet, too.
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if !is_made {
                let made = match left {
                    Some(left) => self.endpoint.call_within(request, number, self.max_reply(), left),
                    None => self.endpoint.call(request, number, self.max_reply()),
                };
                is_made = match made {
                    Ok(_) => true,
                    Err(CallError::Closed { reason, .. }) => return Err(ClientError::Closed(reason)),
                    Err(CallError::PayloadTooLarge { len, max, .. }) => return Err(ClientError::TooLarge { len, max }),
                    Err(_) if left == Some(Duration::ZERO) => return Err(ClientError::TimedOut),
                    Err(_) => false,
                };
            }
            let mut ended = None;
            let moved = self.context.poll(|of, outcome| {
                if of == number {
                    ended = Some(outcome.map(|reply| reply.to_vec()));
                }
            })?;
            if let Some(outcome) = ended {
                return outcome.map_err(|failure| match failure {
                    CallFailure::Dropped => ClientError::Dropped,
                    CallFailure::Refused => ClientError::Refused { max_reply: self.max_reply() },
                    CallFailure::DeadlineExceeded => ClientError::TimedOut,
                    CallFailure::Closed(reason) => ClientError::Closed(reason),
                });
            }
            in_vain = if moved > 0 { 0 } else { in_vain + 1 };
            if in_vain > SPINS {
                // Of one that is made the context knows the deadline.
                self.context.wait(left.filter(|_| !is_made))?;
            }
        }
    }
}

/// Connects to the first of the addresses that has a server, which is waited for.
fn reach(context: &Context<u64>, name: &str, addresses: &[SocketAddr], options: &ClientOptions) -> Result<Endpoint<u64>, ClientError> {
    let start = Instant::now();
    let left = || options.connect_timeout.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
    loop {
        let mut failure = io::Error::from(ErrorKind::AddrNotAvailable);
        for address in addresses {
            match TcpStream::connect_timeout(address, left()) {
                Ok(stream) => return Ok(meet(context, stream, left(), options)?),
                Err(error) => failure = error,
            }
        }
        if start.elapsed() >= options.connect_timeout || failure.kind() != ErrorKind::ConnectionRefused {
            return Err(ClientError::Unreachable { address: name.to_owned(), source: failure });
        }
        std::thread::sleep(ATTEMPT_INTERVAL);
    }
}

fn meet(
    context: &Context<u64>,
    mut stream: TcpStream,
    timeout: Duration,
    options: &ClientOptions,
) -> Result<Endpoint<u64>, ConnectFailure> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    let met = Handshake::of(context, &options.endpoint).advance(&mut stream)?;
    met.ok_or_else(|| ConnectFailure::Channel(ErrorKind::TimedOut.into()))
}
