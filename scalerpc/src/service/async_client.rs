//! The client whose calls are futures: a thread of its own has the connection, and sleeps while nothing comes.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context as TaskContext, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mlx5::DeviceInfo;
use rendezvous::oneshot::{Receiver, Sender, lock, oneshot};

use super::client::{ClientError, ClientOptions, open, reach, resolve};
use super::{DEFAULT_TYPE, SPINS};
use crate::protocol::{CallError, CallFailure, CallHandle, CloseReason};
use crate::rdma::{RdmaClient, SyncCallError};

type Reply = Result<Vec<u8>, ClientError>;

/// A connection to a [`Server`](crate::Server) whose calls are futures, for any executor and from any thread. Clones are the same connection, which
/// is closed with the last of them. As many calls are under way as the server gives slots to a client; the others wait for one, in their order.
///
/// A thread of its own has the device. It sleeps on the completion channel while there is nothing to do: calls, responses and the server's events
/// wake it ([`RdmaOptions::sleeps`](crate::rdma::RdmaOptions::sleeps), which it sets). A call that is made while the connection has ended connects
/// again, and what is called meanwhile waits for that.
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

/// What the thread and the clients of its connection share.
struct Queue {
    posted: Mutex<Posted>,
    device: DeviceInfo,
    max_payload: usize,
    timeout: Duration,
    /// Polls of the connection.
    polls: AtomicU64,
}

/// What the thread has not seen yet.
#[derive(Default)]
struct Posted {
    calls: Vec<Job>,
    /// No client is left, or the thread has ended.
    is_over: bool,
    /// The thread connects again, which may take long.
    is_away: bool,
}

/// Tells the thread with its drop that nobody can call any more.
struct Handle {
    queue: Arc<Queue>,
    /// Ends the sleep of the thread.
    waker: Waker,
    thread: OnceLock<JoinHandle<()>>,
}

/// A call, until it ends.
struct Job {
    rpc_type: u16,
    request: Vec<u8>,
    /// `None`: beyond what the clock can tell.
    end: Option<Instant>,
    reply: Sender<Reply>,
}

impl Job {
    fn end_late(self) {
        self.reply.send(Err(failed(CallFailure::DeadlineExceeded)));
    }

    fn left(&self) -> Duration {
        self.end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
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
        f.debug_struct("AsyncClient").field("device", &self.0.queue.device.name).finish_non_exhaustive()
    }
}

impl AsyncClient {
    /// Opens the device, and connects to the server at `address`, which is waited for.
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
            Ok(worker) => worker.serve(tell),
        };
        let thread = thread::Builder::new().name("scalerpc-client".to_owned()).spawn(run).map_err(ClientError::Thread)?;
        let client: Self = told.await.unwrap_or_else(|| Err(is_over()))?;
        let _ = client.0.thread.set(thread);
        Ok(client)
    }

    /// Sends a request, with the first poll of the future, and waits for its response, for as long as the options say. A future that is dropped gives
    /// the call up; its slot is free when the response has come. Calls of one client leave in the order of their first polls.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&self, request: impl Into<Vec<u8>>) -> AsyncCall {
        self.call_for(DEFAULT_TYPE, request.into(), self.0.queue.timeout)
    }

    /// Like [`call`](Self::call), but waits for so long at most, from the first poll on, for a connection that is made again, too.
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
        self.call_for(rpc_type, request.into(), self.0.queue.timeout)
    }

    fn call_for(&self, rpc_type: u16, request: Vec<u8>, timeout: Duration) -> AsyncCall {
        AsyncCall { handle: Arc::clone(&self.0), stage: Stage::New { rpc_type, request, timeout } }
    }

    /// Maximum bytes of a request, and of a response.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.0.queue.max_payload
    }

    /// Name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> &DeviceInfo {
        &self.0.queue.device
    }

    /// How often the thread has looked at its connection: not while it sleeps.
    #[doc(hidden)]
    #[must_use]
    pub fn polls(&self) -> u64 {
        self.0.queue.polls.load(Ordering::Relaxed)
    }
}

impl Handle {
    /// Where its reply comes.
    fn post(&self, rpc_type: u16, request: Vec<u8>, timeout: Duration) -> Receiver<Reply> {
        let (reply, receiver) = oneshot();
        let job = Job { rpc_type, request, end: Instant::now().checked_add(timeout), reply };
        {
            let mut posted = lock(&self.queue.posted);
            if posted.is_over {
                // Its drop says that nothing comes.
                return receiver;
            }
            posted.calls.push(job);
        }
        self.waker.wake_by_ref();
        receiver
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let is_away = {
            let mut posted = lock(&self.queue.posted);
            posted.is_over = true;
            posted.is_away
        };
        self.waker.wake_by_ref();
        let thread = self.thread.take().filter(|thread| !is_away && thread.thread().id() != thread::current().id());
        if let Some(thread) = thread {
            // It says to nobody else that it panicked.
            let _ = thread.join();
        }
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

/// What the thread has.
struct Worker {
    rdma: RdmaClient,
    /// As it was given, for errors.
    address: String,
    addresses: Vec<SocketAddr>,
    options: ClientOptions,
    response: Vec<u8>,
    /// Calls that have no slot yet, the oldest first.
    waiting: VecDeque<Job>,
    /// The others.
    under_way: HashMap<CallHandle, Sender<Reply>>,
}

impl Worker {
    fn connect(
        address: impl ToSocketAddrs + fmt::Debug,
        options: ClientOptions,
        is_wanted: impl FnMut() -> bool,
    ) -> Result<Self, ClientError> {
        let (address, addresses) = resolve(&address)?;
        let rdma = reach(&open(&options)?, &address, &addresses, &options, options.connect_timeout, is_wanted)?;
        let response = vec![0; rdma.max_payload()];
        Ok(Self { rdma, address, addresses, options, response, waiting: VecDeque::new(), under_way: HashMap::new() })
    }

    /// Until nobody can call any more.
    fn serve(mut self, tell: Sender<Result<AsyncClient, ClientError>>) {
        let queue = Arc::new(Queue {
            posted: Mutex::default(),
            device: self.rdma.device().info(),
            max_payload: self.rdma.max_payload(),
            timeout: self.options.timeout,
            polls: AtomicU64::new(0),
        });
        // Who is left is told by the drops of what it waits for.
        let _ending = Ending(Arc::clone(&queue));
        let handle = Handle { queue: Arc::clone(&queue), waker: self.rdma.device().waker(), thread: OnceLock::new() };
        tell.send(Ok(AsyncClient(Arc::new(handle))));
        let mut in_vain = 0;
        while !take_posted(&queue, &mut self.waiting) {
            let moved = self.step(&queue);
            in_vain = if moved { 0 } else { in_vain + 1 };
            if in_vain > SPINS {
                let limit = self.waiting.iter().map(Job::left).min().filter(|left| *left != Duration::MAX);
                self.rdma.wait(limit);
            }
        }
    }

    /// Takes responses, and sends what there are slots for. Whether anything happened.
    fn step(&mut self, queue: &Queue) -> bool {
        queue.polls.fetch_add(1, Ordering::Relaxed);
        self.rdma.poll();
        let mut moved = false;
        while let Some(completion) = self.rdma.poll_completion(&mut self.response) {
            moved = true;
            let Some(reply) = self.under_way.remove(&completion.handle) else { continue };
            let response = completion.outcome.map(|len| self.response.get(..len).unwrap_or_default().to_vec());
            reply.send(response.map_err(failed));
        }
        if self.send(queue) {
            moved = true;
            self.rdma.poll();
        }
        moved
    }

    fn send(&mut self, queue: &Queue) -> bool {
        let mut moved = false;
        while let Some(job) = self.waiting.pop_front() {
            moved = true;
            if !job.reply.is_wanted() {
                continue;
            }
            let left = job.left();
            if left.is_zero() {
                job.end_late();
                continue;
            }
            self.rdma.set_timeout_ns(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX));
            match self.rdma.call(job.rpc_type, &job.request) {
                Ok(handle) => drop(self.under_way.insert(handle, job.reply)),
                Err(CallError::NoSlot) => {
                    self.waiting.push_front(job);
                    end_late(&mut self.waiting);
                    return false;
                }
                Err(CallError::Closed(_)) => {
                    self.waiting.push_front(job);
                    self.reconnect(queue);
                }
                Err(error) => job.reply.send(Err(SyncCallError::from(error).into())),
            }
        }
        moved
    }

    /// If that is not possible, all that waits ends; what has no time left meanwhile ends before.
    fn reconnect(&mut self, queue: &Queue) {
        lock(&queue.posted).is_away = true;
        let Self { rdma, address, addresses, options, waiting, response, .. } = self;
        let (device, start) = (rdma.device().clone(), Instant::now());
        let error = loop {
            let left = options.connect_timeout.saturating_sub(start.elapsed());
            // A server that says nothing is waited for until the first call has no time left.
            let attempt = waiting.iter().map(Job::left).min().map_or(left, |first| first.min(left));
            let began = Instant::now();
            let connected = reach(&device, address, addresses, options, attempt, || {
                let is_over = take_posted(queue, waiting);
                end_late(waiting);
                !is_over && !waiting.is_empty()
            });
            match connected {
                Ok(connected) => {
                    response.resize(connected.max_payload(), 0);
                    *rdma = connected;
                    break None;
                }
                Err(error) => {
                    end_late(waiting);
                    // It was not for lack of time, or all of that is over.
                    if waiting.is_empty() || attempt == left || began.elapsed() < attempt {
                        break Some(error);
                    }
                }
            }
        };
        lock(&queue.posted).is_away = false;
        let Some(error) = error else { return };
        let (text, mut error) = (error.to_string(), Some(error));
        for job in self.waiting.drain(..) {
            let again = || ClientError::Unreachable { address: self.address.clone(), source: io::Error::other(text.clone()) };
            job.reply.send(Err(error.take().unwrap_or_else(again)));
        }
    }
}

/// Takes what was posted; whether nobody can call any more.
fn take_posted(queue: &Queue, waiting: &mut VecDeque<Job>) -> bool {
    let mut posted = lock(&queue.posted);
    waiting.extend(posted.calls.drain(..));
    posted.is_over
}

/// Ends the calls that wait and have no time left.
fn end_late(waiting: &mut VecDeque<Job>) {
    if waiting.iter().any(|job| job.left().is_zero()) {
        let (late, left) = waiting.drain(..).partition::<VecDeque<_>, _>(|job| job.left().is_zero());
        *waiting = left;
        late.into_iter().for_each(Job::end_late);
    }
}

/// However the thread ends, nobody posts to it any more.
struct Ending(Arc<Queue>);

impl Drop for Ending {
    fn drop(&mut self) {
        let calls = {
            let mut posted = lock(&self.0.posted);
            posted.is_over = true;
            std::mem::take(&mut posted.calls)
        };
        // Not under the lock: whom this wakes may drop another call at once.
        drop(calls);
    }
}
