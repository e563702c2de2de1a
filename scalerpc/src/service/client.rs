//! The client: one call at a time, which ends with a response or an error.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use copyrpc_calls::methods;
use mlx5::{Device, DeviceInfo, DeviceSpec};
use mlx5_rendezvous::{Addresses, LIFELINE_INTERVAL, Meeting, Secret, has_hung_up};
use thiserror::Error;

use super::{DEFAULT_TYPE, Idle, default_device};
use crate::protocol::{CallError, CallFailure, CallToken, CloseReason, State};
use crate::rdma::exchange::{RecordError, Refusal};
use crate::rdma::{RdmaClient, RdmaOptions, SetupError, SyncCallError};

/// Options of a [`Client`].
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Its device, of the same kind as the server's. Default: the device that the environment
    /// variable `COPYRPC_DEVICE` names (`soft`, `mlx5_0`, `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// Options of its queues.
    pub rdma: RdmaOptions,
    /// Maximum time to wait, at each connection, for a server that is not there yet, does not
    /// answer, or has no room for another client. A refusal that does not pass ends it at once:
    /// another secret or version, or a device that this process may not reach. Default 5 s.
    pub connect_timeout: Duration,
    /// Maximum time of [`Client::call`]. Default 5 s.
    pub timeout: Duration,
    /// The server's secret ([`ServerOptions::secret`](crate::ServerOptions::secret)), which both
    /// ends prove to each other. A client with another secret, or without the server's, is refused:
    /// [`Refusal`]. Default: none.
    pub secret: Option<Secret>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        let within = Duration::from_secs(5);
        Self {
            device: default_device(),
            rdma: RdmaOptions::default(),
            connect_timeout: within,
            timeout: within,
            secret: None,
        }
    }
}

/// The reason why a client could not be made, or why a call has no response.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The address is invalid, or no server listens there.
    #[error("connecting to the server at {address}: {source}")]
    Unreachable {
        /// The address.
        address: String,
        /// The error of the socket.
        source: io::Error,
    },
    /// The thread of an [`AsyncClient`](crate::AsyncClient) could not be started.
    #[error("starting the thread of a client: {0}")]
    Thread(#[source] io::Error),
    /// The server and this client could not be connected.
    #[error(transparent)]
    Connect(#[from] SetupError),
    /// The call was not made, or ended without a response. [`CallFailure`](crate::CallFailure) says
    /// whether its handler ran.
    #[error(transparent)]
    Call(#[from] SyncCallError),
    /// The time of the call ended before it was sent: calls that ran out of time before it hold
    /// every slot until the server answers them. No handler got this one. The next call connects
    /// again if they still do.
    #[error(
        "not sent: the server has answered none of {given_up} calls that ran out of time; the next call connects again"
    )]
    NoCredit {
        /// Number of those calls.
        given_up: usize,
    },
}

impl ClientError {
    /// Returns whether the same call can succeed later: no handler got the request, and none will.
    /// See [`Ending::is_retryable`](copyrpc_calls::Ending::is_retryable).
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        match self {
            Self::Thread(_) => false,
            Self::Connect(error) => error.may_pass(),
            Self::Unreachable { .. } | Self::NoCredit { .. } => true,
            Self::Call(error) => error.is_retryable(),
        }
    }

    /// Returns whether a handler may have got the request, or may still get it. See
    /// [`Ending::may_have_executed`](copyrpc_calls::Ending::may_have_executed).
    #[must_use]
    pub const fn may_have_executed(&self) -> bool {
        matches!(self, Self::Call(error) if error.may_have_executed())
    }
}

copyrpc_calls::ending!(ClientError);

/// A connection to a [`Server`](crate::Server). A call after the end of the connection connects
/// again. A client belongs to one thread.
///
/// It polls only in its calls. Between them it may pause for any time: it keeps its zone until
/// another client needs one, and the server takes the zone back without its answer (S26 of the
/// protocol). Exception: after a timeout, the client cannot give up its zone until the late
/// response is polled. If other clients need the zone, the server evicts it after
/// [`ServerConfig::drain_ns`](crate::ServerConfig::drain_ns). Its next call finds that out before
/// the server can see it, and connects again.
///
/// A call that ran out of time keeps its slot until the server answers it. While such calls hold
/// every slot ([`ServerConfig::depth`](crate::ServerConfig::depth)), a call waits for one of them;
/// at its own time it ends with [`ClientError::NoCredit`], and the next one connects again, which
/// gives up all of them.
///
/// ```no_run
/// let mut client = scalerpc::Client::connect("127.0.0.1:7480")?;
/// assert_eq!(client.call(b"ping")?, b"PING");
/// # Ok::<(), scalerpc::ClientError>(())
/// ```
pub struct Client(Connection);

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("address", &self.0.address)
            .field("state", &self.0.rdma.state())
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Opens the device, and connects to the server at `address`. Waits for a server that is not
    /// there yet.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub fn connect(address: impl ToSocketAddrs + fmt::Debug) -> Result<Self, ClientError> {
        Self::with_options(address, &ClientOptions::default())
    }

    /// Like [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub fn with_options(
        address: impl ToSocketAddrs + fmt::Debug,
        options: &ClientOptions,
    ) -> Result<Self, ClientError> {
        Ok(Self(Connection::open(address, options.clone(), || true)?))
    }

    /// Sends a request and waits for its response, as long as the options allow. If the connection
    /// has ended, connects again first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&mut self, request: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.call_for(DEFAULT_TYPE, request, self.0.options.timeout)
    }

    /// Like [`call`](Self::call), with a timeout of its own, which includes a new connection.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_within(
        &mut self,
        request: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>, ClientError> {
        self.call_for(DEFAULT_TYPE, request, timeout)
    }

    /// Like [`call`](Self::call), for the handler of another type.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_type(&mut self, rpc_type: u16, request: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.call_for(rpc_type, request, self.0.options.timeout)
    }

    /// Maximum bytes of a request, and of a response.
    #[must_use]
    pub const fn max_payload(&self) -> usize {
        self.0.rdma.max_payload()
    }

    /// Name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        self.0.rdma.device().info()
    }

    /// Returns the client on its device, of the current connection: for many calls at once.
    #[must_use]
    pub const fn rdma(&mut self) -> &mut RdmaClient {
        &mut self.0.rdma
    }

    fn call_for(
        &mut self,
        rpc_type: u16,
        request: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>, ClientError> {
        let Self(connection) = self;
        let start = Instant::now();
        if start - std::mem::replace(&mut connection.called, start) >= LIFELINE_INTERVAL {
            connection.end_pause();
        }
        loop {
            // Learn of an end of the connection since the last call.
            connection.rdma.poll();
            if connection.is_stuck() || connection.is_closed() {
                let within = timeout
                    .saturating_sub(start.elapsed())
                    .min(connection.options.connect_timeout);
                connection.reconnect(within, || true)?;
            }
            let left = timeout.saturating_sub(start.elapsed());
            connection.set_timeout(left);
            let mut idle = Idle::default();
            let wait = |rdma: &mut RdmaClient| {
                if idle.pass() {
                    take_events(rdma);
                }
            };
            match connection
                .rdma
                .call_and_wait(rpc_type, request, &mut connection.response, wait)
            {
                Ok(len) => return Ok(connection.response.get(..len).unwrap_or_default().to_vec()),
                // The connection had ended, so the server has not seen the call.
                Err(
                    SyncCallError::Failure(CallFailure::NotSent)
                    | SyncCallError::Call(CallError::Closed(_)),
                ) if connection.is_closed() && start.elapsed() < timeout => {}
                Err(SyncCallError::Call(error @ CallError::NoSlot)) => {
                    return Err(connection
                        .starved()
                        .unwrap_or_else(|| SyncCallError::from(error).into()));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl methods::Caller for Client {
    type Error = ClientError;

    fn timeout(&self) -> Option<Duration> {
        Some(self.0.options.timeout)
    }

    fn call(&mut self, request: &[u8], timeout: Option<Duration>) -> Result<Vec<u8>, ClientError> {
        self.call_for(DEFAULT_TYPE, request, timeout.unwrap_or(Duration::MAX))
    }
}

/// A connection to a server, and everything that another one needs.
pub(super) struct Connection {
    pub(super) rdma: RdmaClient,
    /// The socket over which it connected, whose end makes the server probe this client. Closed
    /// after the queue pair.
    lifeline: TcpStream,
    /// The address as given, for errors.
    pub(super) address: String,
    addresses: Addresses,
    pub(super) options: ClientOptions,
    /// Buffer of a response.
    pub(super) response: Vec<u8>,
    /// A call waited for its whole time while calls that ran out of time held every slot.
    had_no_slot: bool,
    /// The server's socket ended while no call was under way.
    is_left: bool,
    /// Begin of the last blocking call.
    called: Instant,
}

impl Connection {
    /// Opens the device, and connects. Waits for a server as long as it `is_wanted`.
    pub(super) fn open(
        address: impl ToSocketAddrs + fmt::Debug,
        options: ClientOptions,
        is_wanted: impl FnMut() -> bool,
    ) -> Result<Self, ClientError> {
        let name = mlx5_rendezvous::name_of(&address);
        let unreachable = |source| ClientError::Unreachable {
            address: name.clone(),
            source,
        };
        let addresses = Addresses::of(address).map_err(unreachable)?;
        let device = Device::open(&options.device).map_err(SetupError::from)?;
        let (rdma, lifeline) = connect_any(
            &device,
            &name,
            &addresses,
            &options,
            options.connect_timeout,
            is_wanted,
        )?;
        let response = vec![0; rdma.max_payload()];
        Ok(Self {
            rdma,
            lifeline,
            address: name,
            addresses,
            options,
            response,
            had_no_slot: false,
            is_left: false,
            called: Instant::now(),
        })
    }

    /// Connects again, where the server is now, on another device if this one broke down.
    pub(super) fn reconnect(
        &mut self,
        within: Duration,
        mut is_wanted: impl FnMut() -> bool,
    ) -> Result<(), ClientError> {
        let is_broken = take_events(&mut self.rdma);
        let device = if is_broken {
            Device::open(&self.options.device).map_err(SetupError::from)?
        } else {
            self.rdma.device().clone()
        };
        // A server that leaves waits until its last messages were taken, by packets in this thread.
        let mut goes_on = || {
            device.progress();
            is_wanted()
        };
        let start = Instant::now();
        self.addresses
            .refresh(&self.address, within / 2, &mut goes_on);
        (self.rdma, self.lifeline) = connect_any(
            &device,
            &self.address,
            &self.addresses,
            &self.options,
            within.saturating_sub(start.elapsed()),
            goes_on,
        )?;
        self.is_left = false;
        self.response.resize(self.rdma.max_payload(), 0);
        Ok(())
    }

    /// Makes a call; the next poll sends it.
    pub(super) fn call(
        &mut self,
        rpc_type: u16,
        request: &[u8],
        timeout: Duration,
    ) -> Result<CallToken, CallError> {
        self.set_timeout(timeout);
        self.rdma.call(rpc_type, request)
    }

    fn set_timeout(&mut self, timeout: Duration) {
        self.rdma
            .set_timeout_ns(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Returns the error of a call whose time ended while only calls that ran out of time held the
    /// slots. Unless the server answers one of them, the next call finds the connection
    /// [stuck](Self::is_stuck).
    pub(super) fn starved(&mut self) -> Option<ClientError> {
        let given_up = self.rdma.given_up_calls();
        self.had_no_slot =
            given_up > 0 && self.rdma.free_slots() == 0 && !self.rdma.core().is_busy();
        self.had_no_slot
            .then_some(ClientError::NoCredit { given_up })
    }

    /// Learns after a pause without calls whether the server has died, which only the socket tells.
    pub(super) fn end_pause(&mut self) {
        self.is_left = has_hung_up(&self.lifeline);
    }

    /// Returns whether only another connection takes calls: the server died in a pause, or a call
    /// found no slot in its whole time, and none is free.
    pub(super) fn is_stuck(&mut self) -> bool {
        self.is_left || std::mem::take(&mut self.had_no_slot) && self.rdma.free_slots() == 0
    }

    pub(super) const fn is_closed(&self) -> bool {
        matches!(self.rdma.state(), State::Closed(_))
    }
}

/// Takes the events of a client's device, which it does not share. Returns whether the device or
/// its queue broke down.
pub(super) fn take_events(rdma: &mut RdmaClient) -> bool {
    let mut is_broken = matches!(rdma.state(), State::Closed(CloseReason::Device));
    while let Some(event) = rdma.device().take_async_event() {
        is_broken |= rdma.heed(event);
    }
    is_broken
}

/// Connects to the first of the addresses that has a server. Waits for a server as long as it
/// `is_wanted`.
fn connect_any(
    device: &Device,
    name: &str,
    addresses: &[SocketAddr],
    options: &ClientOptions,
    within: Duration,
    is_wanted: impl FnMut() -> bool,
) -> Result<(RdmaClient, TcpStream), ClientError> {
    let unreachable = |source| ClientError::Unreachable {
        address: name.to_owned(),
        source,
    };
    let meet = |mut meeting: Meeting<'_>| {
        if let Some(secret) = &options.secret {
            secret.prove::<SetupError>(&mut meeting)?;
        }
        let rdma = RdmaClient::connect_on(device, &options.rdma, &mut meeting)?;
        Ok((rdma, meeting.into_lifeline().map_err(SetupError::Channel)?))
    };
    mlx5_rendezvous::reach(addresses, within, is_wanted, meet, may_pass, unreachable)
}

/// Returns whether another attempt may succeed: the server left while this client waited to be
/// accepted or while the two connected, or has no room until another client has gone, maybe this
/// one's predecessor.
fn may_pass(error: &ClientError) -> bool {
    match error {
        ClientError::Connect(SetupError::Record(RecordError::Refused(Refusal::Full))) => true,
        ClientError::Connect(SetupError::Channel(error)) => {
            mlx5_rendezvous::stream_has_ended(error)
        }
        ClientError::Connect(SetupError::Connect(error @ mlx5::ConnectError::Soft(_))) => {
            error.may_pass()
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use copyrpc_calls::Ending;

    use super::*;

    /// Every variant, with the two answers.
    #[test]
    fn an_error_says_whether_the_call_may_be_made_again() {
        let io = || io::Error::other("test");
        let call = |error: CallError| ClientError::from(SyncCallError::from(error));
        let failure = |failure: CallFailure| ClientError::from(SyncCallError::from(failure));
        let later = (true, false);
        let never = (false, false);
        let made = (false, true);
        let errors = [
            (
                ClientError::Unreachable {
                    address: String::new(),
                    source: io(),
                },
                later,
            ),
            (ClientError::Thread(io()), never),
            (ClientError::Connect(SetupError::Channel(io())), later),
            (
                ClientError::Connect(SetupError::Record(RecordError::Refused(Refusal::Full))),
                later,
            ),
            (
                ClientError::Connect(SetupError::Record(RecordError::Refused(
                    Refusal::WrongSecret,
                ))),
                never,
            ),
            (
                ClientError::Connect(SetupError::Record(RecordError::Version {
                    name: "",
                    version: 2,
                    known: 1,
                })),
                never,
            ),
            (
                ClientError::Connect(SetupError::Connect(mlx5::ConnectError::NoGid)),
                never,
            ),
            (ClientError::NoCredit { given_up: 1 }, later),
            (call(CallError::NoSlot), later),
            (call(CallError::PayloadTooLarge { len: 2, max: 1 }), never),
            (call(CallError::Closed(CloseReason::ClosedHere)), later),
            (failure(CallFailure::UnknownType), never),
            (failure(CallFailure::Refused), made),
            (failure(CallFailure::ReplyTooLong), made),
            (failure(CallFailure::Dropped), made),
            (failure(CallFailure::NotSent), later),
            (failure(CallFailure::TimedOut), made),
            (
                failure(CallFailure::Closed(CloseReason::Disconnected)),
                made,
            ),
        ];
        for (error, expected) in errors {
            assert_eq!(
                (error.is_retryable(), error.may_have_executed()),
                expected,
                "{error}"
            );
            let ending: &dyn Ending = &error;
            assert_eq!(
                (ending.is_retryable(), ending.may_have_executed()),
                expected,
                "{ending}"
            );
        }
    }

    /// No later attempt has access; a device that is not there may come.
    #[test]
    fn a_refused_access_is_not_tried_again() {
        use mlx5::hca::ConnectError::{NoAccess, NoSuchDevice};
        let refused = |error| {
            may_pass(&ClientError::Connect(SetupError::Connect(
                mlx5::ConnectError::Soft(error),
            )))
        };
        assert!(!refused(NoAccess {
            lid: 1,
            reason: String::new()
        }));
        assert!(refused(NoSuchDevice {
            lid: 1,
            reason: String::new()
        }));
    }
}
