//! The client whose calls are futures. A thread of its own has the connection, and sleeps while
//! nothing arrives.

use std::fmt;
use std::io;
use std::net::ToSocketAddrs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::Duration;

use copyrpc_calls::futures::{self, Calls, Ended, GoesOn, Refusal};
use copyrpc_calls::methods;
use mlx5::DeviceInfo;

use super::DEFAULT_TYPE;
use super::client::{ClientError, ClientOptions, Connection, take_events};
use crate::protocol::{CallError, CallFailure, CallToken, CloseReason};
use crate::rdma::SyncCallError;

/// The type of a request, and its bytes.
type Request = (u16, Vec<u8>);

/// A connection to a [`Server`](crate::Server) whose calls are futures, for any executor and from
/// any thread. Clones share the connection, which is closed with the last clone. As many calls are
/// under way as the server gives slots to a client; further calls wait for a slot in their order.
///
/// Calls that wait are kept without limit: a program that may make too many bounds them itself, for
/// instance by a semaphore, since only it knows whether a further call is to wait or to fail.
///
/// A call that ran out of time keeps its slot until the server answers it. While such calls hold
/// every slot, the others wait; once one of those has waited for its whole time, it ends with
/// [`ClientError::NoCredit`], and the client connects again for the rest.
///
/// A thread of its own has the device. The thread sleeps on the completion channel while there is
/// nothing to do. Calls, responses and the server's events wake it
/// ([`RdmaOptions::sleeps`](crate::rdma::RdmaOptions::sleeps), which it sets). A call after the end
/// of the connection connects again; calls made meanwhile wait for the new connection.
///
/// ```no_run
/// # async fn caller() -> Result<(), scalerpc::ClientError> {
/// let client = scalerpc::AsyncClient::connect("127.0.0.1:7480").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncClient {
    calls: Calls<Request, Vec<u8>, ClientError>,
    properties: Arc<Properties>,
}

/// The response to a call of an [`AsyncClient`].
pub type AsyncCall = futures::AsyncCall<Request, Vec<u8>, ClientError>;

/// Properties of the device and the connection, which are the same after connecting again.
struct Properties {
    device: DeviceInfo,
    max_payload: usize,
    timeout: Duration,
    /// Number of polls of the connection.
    polls: Arc<AtomicU64>,
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
    /// there yet. The client's thread resolves the address, so a borrowed address has to be made
    /// owned: `address.to_owned()`.
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
        let mut options = options.clone();
        options.rdma.sleeps = true;
        let connect = move |is_wanted: &dyn Fn() -> bool| {
            Connection::open(address, options, is_wanted).map(AsyncConnection::new)
        };
        let (calls, properties) =
            Calls::start("scalerpc-client", ClientError::Thread, connect).await?;
        Ok(Self {
            calls,
            properties: Arc::new(properties),
        })
    }

    /// Sends a request with the first poll of the future, and waits for its response, as long as
    /// the options allow. Dropping the future gives the call up; its slot is free when the response
    /// has arrived. Calls of one client are sent in the order of their first polls.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&self, request: impl Into<Vec<u8>>) -> AsyncCall {
        self.call_type(DEFAULT_TYPE, request)
    }

    /// Like [`call`](Self::call), with a timeout of its own. The timeout counts from the first
    /// poll, and includes a new connection.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_within(&self, request: impl Into<Vec<u8>>, timeout: Duration) -> AsyncCall {
        self.call_for(DEFAULT_TYPE, request.into(), timeout)
    }

    /// Like [`call`](Self::call), for the handler of another type.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_type(&self, rpc_type: u16, request: impl Into<Vec<u8>>) -> AsyncCall {
        self.call_for(rpc_type, request.into(), self.properties.timeout)
    }

    fn call_for(&self, rpc_type: u16, request: Vec<u8>, timeout: Duration) -> AsyncCall {
        self.calls.call((rpc_type, request), Some(timeout))
    }

    /// Maximum bytes of a request, and of a response.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.properties.max_payload
    }

    /// Name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> &DeviceInfo {
        &self.properties.device
    }

    /// Returns the number of polls of the connection by the thread; it does not poll while it
    /// sleeps.
    #[doc(hidden)]
    #[must_use]
    pub fn polls(&self) -> u64 {
        self.properties.polls.load(Ordering::Relaxed)
    }
}

impl methods::AsyncCaller for AsyncClient {
    type Error = ClientError;

    fn timeout(&self) -> Option<Duration> {
        Some(self.properties.timeout)
    }

    fn call(
        &self,
        request: Vec<u8>,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<Vec<u8>, ClientError>> + Send {
        self.calls.call((DEFAULT_TYPE, request), timeout)
    }
}

fn failed(failure: CallFailure) -> ClientError {
    SyncCallError::from(failure).into()
}

impl futures::CallError for ClientError {
    fn not_sent() -> Self {
        failed(CallFailure::NotSent)
    }

    fn closed() -> Self {
        failed(CallFailure::Closed(CloseReason::ClosedHere))
    }
}

/// The connection of the thread.
struct AsyncConnection {
    connection: Connection,
    /// The calls that have a slot, with their numbers.
    under_way: Vec<(CallToken, u64)>,
    polls: Arc<AtomicU64>,
}

impl AsyncConnection {
    fn new(connection: Connection) -> (Self, Properties) {
        let rdma = &connection.rdma;
        let timeout = connection.options.timeout;
        let polls = Arc::<AtomicU64>::default();
        let properties = Properties {
            device: rdma.device().info(),
            max_payload: rdma.max_payload(),
            timeout,
            polls: Arc::clone(&polls),
        };
        (
            Self {
                connection,
                under_way: Vec::new(),
                polls,
            },
            properties,
        )
    }
}

impl futures::Connection for AsyncConnection {
    type Request = Request;
    type Reply = Vec<u8>;
    type Error = ClientError;
    /// A call that is given up keeps its slot until its response has arrived.
    type Call = ();

    fn call(
        &mut self,
        number: u64,
        (rpc_type, request): &Request,
        left: Option<Duration>,
    ) -> Result<(), Refusal<ClientError>> {
        if self.connection.is_stuck() {
            return Err(Refusal::Ended);
        }
        match self
            .connection
            .call(*rpc_type, request, left.unwrap_or(Duration::MAX))
        {
            Ok(token) => {
                self.under_way.push((token, number));
                Ok(())
            }
            Err(CallError::NoSlot) => Err(Refusal::NoRoom),
            Err(CallError::Closed(_)) => Err(Refusal::Ended),
            Err(error) => Err(Refusal::Failed(SyncCallError::from(error).into())),
        }
    }

    fn flush(&mut self) {
        self.connection.rdma.poll();
    }

    fn poll(&mut self, ended: &mut Ended<Vec<u8>, ClientError>) -> bool {
        self.polls.fetch_add(1, Ordering::Relaxed);
        let Connection { rdma, response, .. } = &mut self.connection;
        rdma.poll();
        let mut moved = false;
        while let Some(completion) = rdma.poll_completion(response) {
            moved = true;
            let Some(at) = self
                .under_way
                .iter()
                .position(|(token, _)| *token == completion.call)
            else {
                continue;
            };
            let reply = completion
                .outcome
                .map(|len| response.get(..len).unwrap_or_default().to_vec());
            ended.push((self.under_way.swap_remove(at).1, reply.map_err(failed)));
        }
        moved
    }

    /// The server has not seen the call: its connection had ended. Or its time is over, and it ends
    /// at once.
    fn repeats(error: &ClientError, _: bool) -> bool {
        matches!(
            error,
            ClientError::Call(SyncCallError::Failure(CallFailure::NotSent))
        )
    }

    fn late(&mut self) -> ClientError {
        self.connection
            .starved()
            .unwrap_or_else(futures::CallError::not_sent)
    }

    fn cancel(&mut self, (): ()) {}

    fn sleep(&mut self, limit: Option<Duration>) {
        self.connection.rdma.wait(limit);
        if self.under_way.is_empty() {
            self.connection.end_pause();
        }
        take_events(&mut self.connection.rdma);
    }

    fn waker(&self) -> Waker {
        self.connection.rdma.device().waker()
    }

    fn reconnect(
        &mut self,
        within: Duration,
        goes_on: &mut GoesOn<'_, Self>,
    ) -> Result<(), ClientError> {
        self.connection
            .reconnect(within, || goes_on(&mut Vec::new()))
    }

    fn connect_timeout(&self) -> Duration {
        self.connection.options.connect_timeout
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
            address: self.connection.address.clone(),
            source,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use copyrpc_calls::futures::Worker;

    use super::*;
    use crate::Server;

    const WATCHDOG: Duration = Duration::from_secs(60);

    /// No completion reports the breakdown, and the thread sleeps on the device.
    #[test]
    fn a_client_whose_device_breaks_down_goes_on_with_another_one_and_is_woken_through_it() {
        let (tell, told) = mpsc::channel();
        let server = thread::spawn(move || {
            let mut server = Server::bind("127.0.0.1:0").unwrap();
            tell.send((server.local_addr().unwrap(), server.stop_handle()))
                .unwrap();
            server
                .serve(|request| request.to_ascii_uppercase())
                .unwrap();
        });
        let (address, stop) = told.recv_timeout(WATCHDOG).unwrap();
        let (tell, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut options = ClientOptions {
                timeout: WATCHDOG,
                ..ClientOptions::default()
            };
            options.rdma.sleeps = true;
            let (connection, properties) =
                AsyncConnection::new(Connection::open(address, options, || true).unwrap());
            let properties = Arc::new(properties);
            connection
                .connection
                .rdma
                .device()
                .soft()
                .unwrap()
                .break_down();
            let (worker, calls) = Worker::new(connection);
            tell.send(AsyncClient { calls, properties }).unwrap();
            worker.serve();
        });
        let client = told.recv_timeout(WATCHDOG).unwrap();
        let (tell, told) = mpsc::channel();
        let caller = thread::spawn(move || {
            for _ in 0..3 {
                tell.send(copyrpc_testing::executor::block_on(client.call(b"x")))
                    .unwrap();
                // The client's thread sleeps before the next call.
                thread::sleep(Duration::from_millis(100));
            }
        });
        // The thread may find out before it gets the first call, or that call finds out.
        if let Err(closed) = told.recv_timeout(WATCHDOG).unwrap() {
            let expected = SyncCallError::Failure(CallFailure::Closed(CloseReason::Device));
            assert!(
                matches!(closed, ClientError::Call(error) if error == expected),
                "{closed}"
            );
        }
        for _ in 0..2 {
            assert_eq!(
                told.recv_timeout(WATCHDOG)
                    .expect("the thread is not woken")
                    .unwrap(),
                b"X"
            );
        }
        caller.join().unwrap();
        thread.join().unwrap();
        stop.stop();
        server.join().unwrap();
    }
}
