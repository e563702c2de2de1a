//! The client's end of a connection to a server. The connection is made again when it has ended.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use mlx5::DeviceSpec;
use thiserror::Error;
use zerocopy::FromBytes;

use super::default_device;
use crate::config::EndpointConfig;
use crate::context::{BuildError, Context, ContextBuilder, PollError};
use crate::endpoint::{CallToken, Endpoint};
use crate::error::{CallError, CallFailure, CloseReason};
use crate::handshake::Handshake;
use crate::pending::ConnectFailure;
use crate::ring::RecvBytes;
use crate::typed::SizeError;

/// Number of endpoints: the endpoint in use, and an ended endpoint whose resources are not free yet.
const ENDPOINTS: u32 = 2;

/// Options of a [`Client`](crate::Client).
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Its device, of the same kind as the server's. Default: the device that the environment variable `COPYRPC_DEVICE` names (`soft`,
    /// `mlx5_0`, `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// Options of the connection. The ring size must be the server's.
    pub endpoint: EndpointConfig,
    /// Maximum time to wait, whenever a connection is made, for a server that is not there yet, does not answer, or has no room for another
    /// client. Default: 5 s.
    pub connect_timeout: Duration,
    /// Maximum bytes of a reply; longer replies are refused. A call takes that much of the credit, which is a quarter of the ring, until
    /// the server answers it, even if it is given up before; calls for which no credit is left wait. The limit is 3/16 of the ring.
    /// Default: a quarter of the limit, 48 KiB with rings of 1 MiB; but for an [`AsyncClient`](crate::AsyncClient), whose calls share the
    /// credit, at most 4 KiB, which is enough for 63 calls at once with such rings.
    pub max_reply: Option<usize>,
    /// Timeout of [`Client::call`](crate::Client::call). Default: none; a call waits as long as the server lives and polls
    /// ([`EndpointConfig::stall_timeout`]).
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

/// Why a client could not be made, or a call has no reply.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The device could not be opened, or its queues could not be created.
    #[error(transparent)]
    Device(#[from] BuildError),
    /// The address is invalid, or no server listens there.
    #[error("connecting to the server at {address}: {source}")]
    Unreachable {
        /// The address.
        address: String,
        /// The socket's error.
        source: io::Error,
    },
    /// [`ClientOptions::max_reply`] is above the limit.
    #[error("a max_reply of {wanted} bytes, the limit is {max}: larger rings permit more (EndpointConfig::ring_size)")]
    MaxReply {
        /// The option.
        wanted: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// The thread of an [`AsyncClient`](crate::AsyncClient) could not be started.
    #[error("starting the thread of a client: {0}")]
    Thread(#[source] io::Error),
    /// The server and this client could not be connected.
    #[error(transparent)]
    Connect(#[from] ConnectFailure),
    /// The request is longer than the ring permits. It was not sent.
    #[error("request of {len} bytes, the limit is {max}: larger rings take more (EndpointConfig::ring_size)")]
    TooLarge {
        /// Bytes of the request.
        len: usize,
        /// Maximum bytes of a request.
        max: usize,
    },
    /// The time of the call ended before it was sent to a server that takes calls: the client was connecting again, or waited for room in
    /// the ring. No handler got the request, and none will.
    #[error("the request was not sent in time: there was no connection, or no room in its ring")]
    NotSent,
    /// The request was sent, and no reply arrived in time. It is not known whether the handler ran, or will run.
    #[error("no reply in time")]
    TimedOut,
    /// The handler refused the request, or its reply was too long.
    #[error("the server refused the request, or its reply has more than {max_reply} bytes (ClientOptions::max_reply)")]
    Refused {
        /// Maximum bytes of a reply.
        max_reply: usize,
    },
    /// The handler dropped the request.
    #[error("the server dropped the request")]
    Dropped,
    /// The connection ended before a reply arrived. It is not known whether the handler ran. The next call connects again.
    #[error("no reply: {0}")]
    Closed(CloseReason),
    /// The reply does not have the size of the requested type.
    #[error("the reply: {0}")]
    Reply(#[from] SizeError),
    /// The device reported an error.
    #[error(transparent)]
    Poll(#[from] PollError),
}

/// The device and the connection.
pub(super) struct Caller<U> {
    /// Declared before the context.
    pub(super) endpoint: Endpoint<U>,
    pub(super) context: Context<U>,
    /// The socket over which the endpoint was connected. Its end tells the server that this client may have died, so it is declared after the
    /// context, whose drop tells the server of a graceful end.
    lifeline: TcpStream,
    /// The address as given, for errors.
    pub(super) address: String,
    addresses: Vec<SocketAddr>,
    pub(super) options: ClientOptions,
    /// Maximum bytes of a reply.
    pub(super) max_reply: usize,
}

impl<U> Caller<U> {
    /// Opens the device, and connects to the server at `address`. Waits for the server as long as it `is_wanted`. By default a reply
    /// has at most `default_reply` bytes.
    pub(super) fn connect(
        address: impl ToSocketAddrs + fmt::Debug,
        options: &ClientOptions,
        default_reply: usize,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Self, ClientError> {
        let name = format!("{address:?}");
        let addresses = address.to_socket_addrs().map(Vec::from_iter);
        let addresses = addresses.map_err(|source| ClientError::Unreachable { address: name.clone(), source })?;
        let context = ContextBuilder::new(options.device.clone()).endpoints_with(ENDPOINTS, &options.endpoint).build()?;
        let (endpoint, lifeline) = reach(&context, &name, &addresses, options, options.connect_timeout, is_wanted)?;
        let max = endpoint.max_response_allowance();
        let max_reply = options.max_reply.unwrap_or_else(|| default_reply.min(max / 4));
        if max_reply > max {
            return Err(ClientError::MaxReply { wanted: max_reply, max });
        }
        Ok(Self { endpoint, context, lifeline, address: name, addresses, options: options.clone(), max_reply })
    }

    /// Makes a new connection in place of an ended one. Tries for the time `patience`, and as long as it `is_wanted`.
    pub(super) fn reconnect(&mut self, patience: Duration, is_wanted: impl FnMut() -> bool) -> Result<(), ClientError> {
        self.endpoint.abort();
        let connected = reach(&self.context, &self.address, &self.addresses, &self.options, patience, is_wanted)?;
        (self.endpoint, self.lifeline) = connected;
        Ok(())
    }

    /// Makes a call. `left` is the time until its deadline; `None`: no deadline.
    pub(super) fn call(&self, request: &[u8], user_data: U, left: Option<Duration>) -> Result<CallToken, CallError<U>> {
        match left {
            Some(left) => self.endpoint.call_within(request, user_data, self.max_reply, left),
            None => self.endpoint.call(request, user_data, self.max_reply),
        }
    }
}

/// Connects to the first address that has a server. Waits for a server that is not there yet.
fn reach<U>(
    context: &Context<U>,
    name: &str,
    addresses: &[SocketAddr],
    options: &ClientOptions,
    patience: Duration,
    is_wanted: impl FnMut() -> bool,
) -> Result<(Endpoint<U>, TcpStream), ClientError> {
    let unreachable = |source| ClientError::Unreachable { address: name.to_owned(), source };
    let meet = |stream| Ok(meet(context, stream, options)?);
    rendezvous::reach(addresses, patience, is_wanted, meet, may_pass, unreachable)
}

/// Returns whether another attempt may succeed: the server left while this client waited for its admission or during the handshake, or has
/// no room until another client has gone, maybe this one's predecessor.
fn may_pass(error: &ClientError) -> bool {
    use mlx5::ConnectError::{NoSuchDevice, NoSuchQp, StaleDevice};

    match error {
        ClientError::Connect(error) if error.is_for_lack_of_room() => true,
        ClientError::Connect(ConnectFailure::Channel(error)) => rendezvous::stream_has_ended(error),
        ClientError::Connect(ConnectFailure::Qp(error)) => {
            matches!(error, NoSuchQp { .. } | NoSuchDevice { .. } | StaleDevice { .. })
        }
        _ => false,
    }
}

fn meet<U>(context: &Context<U>, mut stream: TcpStream, options: &ClientOptions) -> Result<(Endpoint<U>, TcpStream), ConnectFailure> {
    let met = Handshake::of(context, &options.endpoint).advance(&mut stream)?;
    met.map(|endpoint| (endpoint, stream)).ok_or_else(|| ConnectFailure::Channel(ErrorKind::TimedOut.into()))
}

/// Returns the end of a call as its caller hears it. Credit has blocks, so a reply with a few bytes too many can arrive.
pub(super) fn ended(outcome: Result<RecvBytes<'_>, CallFailure>, max_reply: usize) -> Result<Vec<u8>, ClientError> {
    match outcome {
        Ok(reply) if reply.len() <= max_reply => Ok(reply.to_vec()),
        Ok(_) | Err(CallFailure::Refused) => Err(ClientError::Refused { max_reply }),
        Err(CallFailure::Dropped) => Err(ClientError::Dropped),
        Err(CallFailure::DeadlineExceeded) => Err(ClientError::TimedOut),
        Err(CallFailure::Closed(reason)) => Err(ClientError::Closed(reason)),
    }
}

/// Reads a reply as a `Reply`.
pub(super) fn read_reply<Reply: FromBytes>(reply: &[u8]) -> Result<Reply, ClientError> {
    Reply::read_from_bytes(reply).map_err(|_| SizeError { received: reply.len(), expected: size_of::<Reply>() }.into())
}
