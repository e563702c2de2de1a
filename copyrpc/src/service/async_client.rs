//! The client whose calls are futures. A thread of its own has the connection, and sleeps while no
//! call is under way.

use std::fmt;
use std::io;
use std::net::ToSocketAddrs;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use copyrpc_calls::futures::{self, Calls, Connection, Ended, GoesOn, Refusal};
use copyrpc_calls::methods;
use copyrpc_calls::oneshot::lock;
use mlx5::DeviceInfo;

use super::caller::{Caller, ClientError, ClientOptions, ended, poll};
use crate::endpoint::CallToken;
use crate::error::{CallError, CloseReason};
use crate::stats::Stats;

/// Number of polls after which a busy thread publishes its counters.
const POLLS_PER_STATS: u32 = 1024;

/// A connection to a [`Server`](crate::Server) whose calls are futures, for any executor and from
/// any thread. Clones share the connection, and therefore its WRITEs. Dropping the last clone
/// closes the connection, and waits until the server knows, at most 20 ms. A call that an
/// [`AsyncServer`](crate::AsyncServer) holds for long stops no other; it keeps its
/// [`max_reply`](ClientOptions::max_reply) from the credit of the connection. Once such calls keep
/// all of it, further calls wait behind them, also one that would end them: it needs another
/// client.
///
/// Calls that wait are kept without limit: a program that may make too many bounds them itself, for
/// instance by a semaphore, since only it knows whether a further call is to wait or to fail.
///
/// A thread of its own has the device. The thread sleeps on the completion channel while there is
/// nothing to do; calls and replies wake it. A call after the end of the connection connects again;
/// calls made meanwhile wait for the new connection.
///
/// ```no_run
/// # async fn caller() -> Result<(), copyrpc::ClientError> {
/// let client = copyrpc::AsyncClient::connect("127.0.0.1:7479").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncClient {
    pub(super) calls: Calls<Vec<u8>, Vec<u8>, ClientError>,
    pub(super) properties: Arc<Properties>,
}

/// The reply to a call of an [`AsyncClient`].
pub type AsyncCall = futures::AsyncCall<Vec<u8>, Vec<u8>, ClientError>;

/// Properties of the device and the connection, which are the same after connecting again.
pub(super) struct Properties {
    /// Counters as of the time before the thread's last sleep, or of one in 1,024 polls.
    stats: Arc<Mutex<Stats>>,
    device: DeviceInfo,
    max_request: usize,
    max_reply: usize,
    timeout: Option<Duration>,
}

impl fmt::Debug for AsyncClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncClient")
            .field("device", &self.properties.device.name)
            .finish_non_exhaustive()
    }
}

impl AsyncClient {
    /// Opens the device, and connects to the server at `address`. Waits for a server that is not
    /// there yet. The client's thread keeps the address, so one that is borrowed has to be made an
    /// owned one: `address.to_owned()`.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub async fn connect(
        address: impl ToSocketAddrs + fmt::Debug + Send + 'static,
    ) -> Result<Self, ClientError> {
        Self::with_options(address, &ClientOptions::default()).await
    }

    /// Like [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub async fn with_options(
        address: impl ToSocketAddrs + fmt::Debug + Send + 'static,
        options: &ClientOptions,
    ) -> Result<Self, ClientError> {
        let options = options.clone();
        let connect = move |is_wanted: &dyn Fn() -> bool| {
            Caller::connect(address, &options, is_wanted).map(AsyncConnection::new)
        };
        let (calls, properties) =
            Calls::start("copyrpc-client", ClientError::Thread, connect).await?;
        Ok(Self {
            calls,
            properties: Arc::new(properties),
        })
    }

    /// Sends a request with the first poll of the future, and waits for its reply, as long as the
    /// options allow. Dropping the future gives the call up. Calls of one client reach the server
    /// in the order of their first polls.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&self, request: impl Into<Vec<u8>>) -> AsyncCall {
        self.calls.call(request.into(), self.properties.timeout)
    }

    /// Like [`call`](Self::call), with a timeout of its own. The timeout counts from the first
    /// poll, and includes a new connection.
    ///
    /// # Errors
    /// As of [`Client::call_within`](crate::Client::call_within).
    pub fn call_within(&self, request: impl Into<Vec<u8>>, timeout: Duration) -> AsyncCall {
        self.calls.call(request.into(), Some(timeout))
    }

    /// Returns the maximum bytes of a request.
    #[must_use]
    pub fn max_request(&self) -> usize {
        self.properties.max_request
    }

    /// Returns the maximum bytes of a reply.
    #[must_use]
    pub fn max_reply(&self) -> usize {
        self.properties.max_reply
    }

    /// Returns the counters of all connections ever made, as they were when the thread last slept,
    /// or at most 1,024 polls ago.
    #[must_use]
    pub fn stats(&self) -> Stats {
        *lock(&self.properties.stats)
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> &DeviceInfo {
        &self.properties.device
    }
}

impl methods::AsyncCaller for AsyncClient {
    type Error = ClientError;

    fn timeout(&self) -> Option<Duration> {
        self.properties.timeout
    }

    fn call(
        &self,
        request: Vec<u8>,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<Vec<u8>, ClientError>> + Send {
        self.calls.call(request, timeout)
    }
}

impl futures::CallError for ClientError {
    fn not_sent() -> Self {
        Self::NotSent
    }

    fn closed() -> Self {
        Self::Closed(CloseReason::ClosedHere)
    }
}

/// The connection of the thread.
pub(super) struct AsyncConnection {
    pub(super) caller: Caller,
    stats: Arc<Mutex<Stats>>,
    polls: u32,
    /// A call waits for credit or room.
    has_no_room: bool,
}

impl AsyncConnection {
    pub(super) fn new(caller: Caller) -> (Self, Properties) {
        let stats = Arc::new(Mutex::new(caller.stats()));
        let properties = Properties {
            stats: Arc::clone(&stats),
            device: caller.context.device_info(),
            max_request: caller.endpoint.max_payload(),
            max_reply: caller.max_reply,
            timeout: caller.options.timeout,
        };
        (
            Self {
                caller,
                stats,
                polls: 0,
                has_no_room: false,
            },
            properties,
        )
    }

    fn publish(&self) {
        *lock(&self.stats) = self.caller.stats();
    }

    /// Returns the error of a call that waits for credit or room which given up calls keep. Later
    /// calls are made on another connection.
    fn starved(&mut self, is_late: bool) -> Option<ClientError> {
        let starved = self.caller.starved(is_late);
        if starved.is_some() {
            self.caller.endpoint.close();
        }
        starved
    }
}

impl Connection for AsyncConnection {
    type Request = Vec<u8>;
    type Reply = Vec<u8>;
    type Error = ClientError;
    type Call = CallToken;

    fn call(
        &mut self,
        number: u64,
        request: &Vec<u8>,
        left: Option<Duration>,
    ) -> Result<CallToken, Refusal<ClientError>> {
        if let Some(error) = self.starved(false) {
            return Err(Refusal::Failed(error));
        }
        let refused = match self.caller.call(request, number, left) {
            Ok(call) => return Ok(call),
            Err(refused) => refused,
        };
        let endpoint = &self.caller.endpoint;
        self.has_no_room = true;
        match refused {
            CallError::PayloadTooLarge { len, max, .. } => {
                Err(Refusal::Failed(ClientError::TooLarge { len, max }))
            }
            // Its calls end before those of the next one begin.
            CallError::Closed { .. }
                if endpoint.closed().is_some() && endpoint.outstanding_calls() > 0 =>
            {
                Err(Refusal::NoRoom)
            }
            _ if endpoint.closed().is_some() || endpoint.is_closing() => Err(Refusal::Ended),
            _ => Err(Refusal::NoRoom),
        }
    }

    fn flush(&mut self) {
        self.caller.flush();
    }

    fn poll(&mut self, replies: &mut Ended<Vec<u8>, ClientError>) -> bool {
        self.polls += 1;
        if self.polls % POLLS_PER_STATS == 0 {
            self.publish();
        }
        let max_reply = self.caller.max_reply;
        poll(&self.caller.context, |number, outcome| {
            replies.push((number, ended(outcome, max_reply)))
        }) > 0
    }

    /// The server was leaving. There may be another server by now.
    fn repeats(error: &ClientError, is_second: bool) -> bool {
        matches!(error, ClientError::Closed(CloseReason::ClosedByPeer)) && !is_second
    }

    fn late(&mut self) -> ClientError {
        self.starved(true).unwrap_or(ClientError::NotSent)
    }

    fn cancel(&mut self, call: CallToken) {
        self.caller.cancel(call);
    }

    fn sleep(&mut self, limit: Option<Duration>) {
        self.publish();
        // The context knows the deadlines of the calls that the endpoint has taken. A call that
        // still waits is tried again after the sleep.
        let has_no_room = std::mem::take(&mut self.has_no_room);
        let starves_for = self.caller.starves_for().filter(|_| has_no_room);
        self.caller
            .sleep(limit.into_iter().chain(starves_for).min());
    }

    fn waker(&self) -> Waker {
        self.caller.context.waker()
    }

    fn reconnect(
        &mut self,
        within: Duration,
        goes_on: &mut GoesOn<'_, Self>,
    ) -> Result<(), ClientError> {
        let (max_reply, mut replies) = (self.caller.max_reply, Vec::new());
        self.caller.reconnect(within, |context| {
            poll(context, |number, outcome| {
                replies.push((number, ended(outcome, max_reply)))
            });
            goes_on(&mut replies)
        })
    }

    fn connect_timeout(&self) -> Duration {
        self.caller.options.connect_timeout
    }

    fn again(&self, error: &ClientError) -> ClientError {
        let source = match error {
            ClientError::Connect(error) => return error.again().into(),
            ClientError::Unreachable { source, .. } => {
                io::Error::new(source.kind(), source.to_string())
            }
            error => io::Error::other(error.to_string()),
        };
        ClientError::Unreachable {
            address: self.caller.address.clone(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::Context as TaskContext;
    use std::thread;

    use copyrpc_calls::futures::Worker;
    use copyrpc_testing::executor::block_on;
    use copyrpc_testing::limits;
    use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;
    use crate::service::async_server::AsyncServer;
    use crate::service::server::ServerOptions;

    /// Connecting again takes an hour, for no server listens any more.
    #[test]
    fn the_calls_of_a_connection_that_has_ended_end_before_another_one_is_made() {
        limits::watchdog(Duration::from_secs(60));
        let fabric = FabricSpec::Local(LocalFabric::new());
        let device = DeviceSpec::Soft(SoftOptions {
            fabric,
            ..SoftOptions::default()
        });
        let options = ServerOptions {
            device: device.clone(),
            ..ServerOptions::default()
        };
        let server = block_on(AsyncServer::with_options(limits::any_port(), &options)).unwrap();
        let options = ClientOptions {
            device,
            connect_timeout: Duration::from_secs(3600),
            ..ClientOptions::default()
        };
        let caller = Caller::connect(server.local_addr(), &options, || true).unwrap();
        let (mut worker, calls) = Worker::new(AsyncConnection::new(caller).0);
        let poll =
            |call: &mut AsyncCall| Pin::new(call).poll(&mut TaskContext::from_waker(Waker::noop()));
        let (mut first, mut second) = (calls.call(vec![1], None), calls.call(vec![2], None));
        assert!(poll(&mut first).is_pending());
        assert_eq!(worker.turn(), Some(true));
        drop(server);
        // As if a flush had seen the end.
        worker.connection.caller.endpoint.abort();
        assert!(poll(&mut second).is_pending());
        let caller = thread::spawn(move || {
            assert!(matches!(block_on(first), Err(ClientError::Closed(_))));
            assert!(poll(&mut second).is_pending(), "it waits for a connection");
        });
        while !caller.is_finished() {
            worker.turn();
        }
        caller.join().unwrap();
    }
}
