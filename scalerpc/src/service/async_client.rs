//! The client whose calls are futures. A thread of its own has the connection, and sleeps while nothing arrives.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::thread;
use std::time::{Duration, Instant};

use mlx5::DeviceInfo;
use rendezvous::oneshot::{Receiver, Sender, oneshot};
use rendezvous::posting::{self, Posted, Poster, posting};

use super::client::{ClientError, ClientOptions, open, reach, resolve};
use super::{DEFAULT_TYPE, SPINS};
use crate::protocol::{CallError, CallFailure, CallHandle, CloseReason};
use crate::rdma::{RdmaClient, SyncCallError};

type Reply = Result<Vec<u8>, ClientError>;

/// A connection to a [`Server`](crate::Server) whose calls are futures, for any executor and from any thread. Clones share the
/// connection, which is closed with the last clone. As many calls are under way as the server gives slots to a client; further calls wait
/// for a slot in their order.
///
/// A thread of its own has the device. The thread sleeps on the completion channel while there is nothing to do. Calls, responses and the
/// server's events wake it ([`RdmaOptions::sleeps`](crate::rdma::RdmaOptions::sleeps), which it sets). A call after the end of the
/// connection connects again; calls made meanwhile wait for the new connection.
///
/// ```no_run
/// # async fn caller() -> Result<(), scalerpc::ClientError> {
/// let client = scalerpc::AsyncClient::connect("127.0.0.1:7480").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncClient(Arc<Handle>);

/// The shared part of a connection's clients. Its drop ends the thread.
struct Handle {
    poster: Poster<Job>,
    limits: Arc<Limits>,
}

/// Properties of the device and the connection, which are the same after connecting again.
struct Limits {
    device: DeviceInfo,
    max_payload: usize,
    timeout: Duration,
    /// Number of polls of the connection.
    polls: AtomicU64,
}

/// A call, until it ends.
struct Job {
    rpc_type: u16,
    request: Vec<u8>,
    /// End of the call's time. `None`: later than the clock can represent.
    end: Option<Instant>,
    reply: Sender<Reply>,
}

impl posting::Job for Job {
    fn end(&self) -> Option<Instant> {
        self.end
    }

    fn end_late(self) {
        self.reply.send(Err(failed(CallFailure::DeadlineExceeded)));
    }
}

fn failed(failure: CallFailure) -> ClientError {
    SyncCallError::from(failure).into()
}

fn is_over() -> ClientError {
    failed(CallFailure::Closed(CloseReason::ClosedHere))
}

impl fmt::Debug for AsyncClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncClient").field("device", &self.0.limits.device.name).finish_non_exhaustive()
    }
}

impl AsyncClient {
    /// Opens the device, and connects to the server at `address`. Waits for a server that is not there yet. The client's thread resolves the
    /// address, so one that is borrowed has to be made an owned one: `address.to_owned()`.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub async fn connect(address: impl ToSocketAddrs + fmt::Debug + Send + 'static) -> Result<Self, ClientError> {
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
        let (mut options, (tell, told)) = (options.clone(), oneshot());
        options.rdma.sleeps = true;
        let run = move || match Worker::connect(address, options, || tell.is_wanted()) {
            Err(error) => tell.send(Err(error)),
            Ok((worker, handle)) => {
                tell.send(Ok(Self(Arc::new(handle))));
                worker.serve();
            }
        };
        let thread = thread::Builder::new().name("scalerpc-client".to_owned()).spawn(run).map_err(ClientError::Thread)?;
        let client: Self = told.await.unwrap_or_else(|| Err(is_over()))?;
        client.0.poster.set_thread(thread);
        Ok(client)
    }

    /// Sends a request with the first poll of the future, and waits for its response, as long as the options allow. Dropping the future
    /// gives the call up; its slot is free when the response has arrived. Calls of one client are sent in the order of their first polls.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&self, request: impl Into<Vec<u8>>) -> AsyncCall {
        self.call_for(DEFAULT_TYPE, request.into(), self.0.limits.timeout)
    }

    /// Like [`call`](Self::call), with a timeout of its own. The timeout counts from the first poll, and includes a new connection.
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
        self.call_for(rpc_type, request.into(), self.0.limits.timeout)
    }

    pub(crate) fn call_for(&self, rpc_type: u16, request: Vec<u8>, timeout: Duration) -> AsyncCall {
        AsyncCall { handle: Arc::clone(&self.0), stage: Stage::New { rpc_type, request, timeout } }
    }

    /// Maximum bytes of a request, and of a response.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.0.limits.max_payload
    }

    /// Name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> &DeviceInfo {
        &self.0.limits.device
    }

    /// Returns the number of polls of the connection by the thread; it does not poll while it sleeps.
    #[doc(hidden)]
    #[must_use]
    pub fn polls(&self) -> u64 {
        self.0.limits.polls.load(Ordering::Relaxed)
    }
}

impl Handle {
    /// Posts a call to the thread. Returns the receiver of its reply.
    fn post(&self, rpc_type: u16, request: Vec<u8>, timeout: Duration) -> Receiver<Reply> {
        let ((reply, receiver), end) = (oneshot(), Instant::now().checked_add(timeout));
        self.poster.post(|_| Job { rpc_type, request, end, reply });
        receiver
    }
}

/// The response to a call of an [`AsyncClient`].
#[must_use = "a call begins when it is polled"]
pub struct AsyncCall {
    handle: Arc<Handle>,
    stage: Stage,
}

enum Stage {
    New { rpc_type: u16, request: Vec<u8>, timeout: Duration },
    Posted(Receiver<Reply>),
    Over,
}

impl fmt::Debug for AsyncCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncCall").field("is_posted", &!matches!(self.stage, Stage::New { .. })).finish_non_exhaustive()
    }
}

impl Future for AsyncCall {
    type Output = Reply;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Reply> {
        if let Stage::New { rpc_type, request, timeout } = &mut self.stage {
            let (rpc_type, request, timeout) = (*rpc_type, std::mem::take(request), *timeout);
            self.stage = Stage::Posted(self.handle.post(rpc_type, request, timeout));
        }
        let Stage::Posted(receiver) = &mut self.stage else { return Poll::Pending };
        let reply = Pin::new(receiver).poll(task);
        reply.map(|reply| {
            self.stage = Stage::Over;
            // The thread has ended.
            reply.unwrap_or_else(|| Err(is_over()))
        })
    }
}

/// The state of the thread.
struct Worker {
    rdma: RdmaClient,
    /// The address as given, for errors.
    address: String,
    addresses: Vec<SocketAddr>,
    options: ClientOptions,
    response: Vec<u8>,
    posted: Posted<Job>,
    limits: Arc<Limits>,
    /// Calls that have a slot.
    under_way: HashMap<CallHandle, Sender<Reply>>,
}

impl Worker {
    fn connect(
        address: impl ToSocketAddrs + fmt::Debug,
        options: ClientOptions,
        is_wanted: impl FnMut() -> bool,
    ) -> Result<(Self, Handle), ClientError> {
        let (address, addresses) = resolve(&address)?;
        let rdma = reach(&open(&options)?, &address, &addresses, &options, options.connect_timeout, is_wanted)?;
        let limits = Arc::new(Limits {
            device: rdma.device().info(),
            max_payload: rdma.max_payload(),
            timeout: options.timeout,
            polls: AtomicU64::new(0),
        });
        let (poster, posted) = posting(rdma.device().waker());
        let response = vec![0; rdma.max_payload()];
        let handle = Handle { poster, limits: Arc::clone(&limits) };
        Ok((Self { rdma, address, addresses, options, response, posted, limits, under_way: HashMap::new() }, handle))
    }

    /// Serves the calls until no client is left. The drop then tells every caller that still waits.
    fn serve(mut self) {
        let mut in_vain = 0;
        while self.posted.take() {
            let moved = self.step();
            in_vain = if moved { 0 } else { in_vain + 1 };
            if in_vain > SPINS {
                self.rdma.wait(self.posted.left());
            }
        }
    }

    /// Takes responses, and sends waiting calls as far as there are slots. Returns whether anything happened.
    fn step(&mut self) -> bool {
        self.limits.polls.fetch_add(1, Ordering::Relaxed);
        self.rdma.poll();
        let mut moved = false;
        while let Some(completion) = self.rdma.poll_completion(&mut self.response) {
            moved = true;
            let Some(reply) = self.under_way.remove(&completion.handle) else { continue };
            let response = completion.outcome.map(|len| self.response.get(..len).unwrap_or_default().to_vec());
            reply.send(response.map_err(failed));
        }
        if self.send() {
            moved = true;
            self.rdma.poll();
        }
        moved
    }

    /// Makes waiting calls as far as there are slots; the next poll sends them. Returns whether anything happened.
    fn send(&mut self) -> bool {
        let mut moved = false;
        while let Some((number, job)) = self.posted.pop() {
            if !job.reply.is_wanted() {
                moved = true;
                continue;
            }
            let left = job.end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                posting::Job::end_late(job);
                moved = true;
                continue;
            }
            self.rdma.set_timeout_ns(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX));
            match self.rdma.call(job.rpc_type, &job.request) {
                Ok(handle) => drop(self.under_way.insert(handle, job.reply)),
                Err(CallError::NoSlot) => {
                    self.posted.put_back(number, job);
                    self.posted.end_late();
                    break;
                }
                Err(CallError::Closed(_)) => {
                    self.posted.put_back(number, job);
                    self.reconnect();
                }
                Err(error) => job.reply.send(Err(SyncCallError::from(error).into())),
            }
            moved = true;
        }
        moved
    }

    /// Connects again. If that is not possible, every waiting call ends.
    fn reconnect(&mut self) {
        let Self { rdma, address, addresses, options, posted, response, .. } = self;
        let device = rdma.device().clone();
        let connected: Result<(), ClientError> = posted.reconnect(options.connect_timeout, |attempt, is_wanted| {
            *rdma = reach(&device, address, addresses, options, attempt, is_wanted)?;
            response.resize(rdma.max_payload(), 0);
            Ok(())
        });
        let Err(error) = connected else { return };
        let (text, mut error) = (error.to_string(), Some(error));
        for job in posted.drain() {
            let again = || ClientError::Unreachable { address: address.clone(), source: io::Error::other(text.clone()) };
            job.reply.send(Err(error.take().unwrap_or_else(again)));
        }
    }
}
