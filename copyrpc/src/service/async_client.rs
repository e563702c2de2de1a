//! The client whose calls are futures: a thread of its own has the connection, and sleeps while nothing is called.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::io;
use std::net::ToSocketAddrs;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context as TaskContext, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mlx5::DeviceInfo;
use rendezvous::oneshot::{Receiver, Sender, lock, oneshot};

use super::SPINS;
use super::caller::{Caller, ClientError, ClientOptions, failed, read_reply};
use crate::endpoint::CallToken;
use crate::error::{CallError, CloseReason};
use crate::typed::Call;

type Reply = Result<Vec<u8>, ClientError>;

/// A connection to a [`Server`](crate::Server) whose calls are futures, for any executor and from any thread. Clones are the same connection, and
/// so share its WRITEs; it is closed with the last of them, which waits until the server knows, 20 ms at most.
///
/// A thread of its own has the device. It sleeps on the completion channel while there is nothing to do; calls and replies wake it. A call that is
/// made while the connection has ended connects again, and what is called meanwhile waits for that.
///
/// ```no_run
/// # async fn caller() -> Result<(), copyrpc::ClientError> {
/// let client = copyrpc::AsyncClient::connect("127.0.0.1:7479").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncClient(Arc<Handle>);

/// What the thread and the clients of its connection share.
struct Queue {
    posted: Mutex<Posted>,
    limits: Limits,
}

/// What the thread has not seen yet.
#[derive(Default)]
struct Posted {
    calls: Vec<Job>,
    /// Numbers of calls that nobody waits for any more.
    dropped: Vec<u64>,
    /// Numbers the calls.
    last: u64,
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

/// Of the device and the connection, which are the same after connecting again.
#[derive(Clone)]
struct Limits {
    device: DeviceInfo,
    max_request: usize,
    max_reply: usize,
    timeout: Option<Duration>,
}

/// A call, until it ends.
struct Job {
    number: u64,
    request: Arc<[u8]>,
    end: Option<Instant>,
    reply: Sender<Reply>,
    /// The server was leaving when it was sent: it is sent once more.
    is_second: bool,
}

impl fmt::Debug for AsyncClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncClient").field("device", &self.0.queue.limits.device.name).finish_non_exhaustive()
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
        let (options, (tell, told)) = (options.clone(), oneshot());
        let run = move || match Caller::connect(address, &options, || tell.is_wanted()) {
            Err(error) => tell.send(Err(error)),
            Ok(caller) => Worker::serve(caller, tell),
        };
        let thread = thread::Builder::new().name("copyrpc-client".to_owned()).spawn(run).map_err(ClientError::Thread)?;
        let client: Self = told.await.unwrap_or(Err(ClientError::Closed(CloseReason::ClosedHere)))?;
        let _ = client.0.thread.set(thread);
        Ok(client)
    }

    /// Sends a request, with the first poll of the future, and waits for its reply, for as long as the options say. A future that is dropped gives the
    /// call up. Calls of one client reach the server in the order of their first polls.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&self, request: impl Into<Vec<u8>>) -> AsyncCall {
        self.call_for(request.into(), self.0.queue.limits.timeout)
    }

    /// Like [`call`](Self::call), but waits for so long at most, from the first poll on, for a connection that is made again, too.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_within(&self, request: impl Into<Vec<u8>>, timeout: Duration) -> AsyncCall {
        self.call_for(request.into(), Some(timeout))
    }

    /// Sends the bytes of `request`, and takes the reply's as a [`Call::Reply`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn call_typed<C: Call + Sync>(&self, request: &C) -> Result<C::Reply, ClientError> {
        read_reply(&self.call(request.as_bytes()).await?)
    }

    fn call_for(&self, request: Vec<u8>, timeout: Option<Duration>) -> AsyncCall {
        AsyncCall { handle: Arc::clone(&self.0), stage: Stage::New(request, timeout) }
    }

    /// The maximum number of bytes of a request.
    #[must_use]
    pub fn max_request(&self) -> usize {
        self.0.queue.limits.max_request
    }

    /// The maximum number of bytes of a reply.
    #[must_use]
    pub fn max_reply(&self) -> usize {
        self.0.queue.limits.max_reply
    }

    /// Name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> &DeviceInfo {
        &self.0.queue.limits.device
    }
}

impl Handle {
    /// Its number, and where its reply comes.
    fn post(&self, request: Vec<u8>, timeout: Option<Duration>) -> (u64, Receiver<Reply>) {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (reply, receiver) = oneshot();
        let number = {
            let mut posted = lock(&self.queue.posted);
            posted.last += 1;
            let number = posted.last;
            if !posted.is_over {
                posted.calls.push(Job { number, request: request.into(), end, reply, is_second: false });
            }
            number
        };
        self.waker.wake_by_ref();
        (number, receiver)
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

/// The reply to a call of an [`AsyncClient`].
#[must_use = "a call begins when it is polled"]
pub struct AsyncCall {
    handle: Arc<Handle>,
    stage: Stage,
}

enum Stage {
    New(Vec<u8>, Option<Duration>),
    Posted(u64, Receiver<Reply>),
    Over,
}

impl fmt::Debug for AsyncCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncCall").field("is_posted", &!matches!(self.stage, Stage::New(..))).finish_non_exhaustive()
    }
}

impl Future for AsyncCall {
    type Output = Reply;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Reply> {
        if let Stage::New(request, timeout) = &mut self.stage {
            let (request, timeout) = (std::mem::take(request), *timeout);
            let max = self.handle.queue.limits.max_request;
            if request.len() > max {
                self.stage = Stage::Over;
                return Poll::Ready(Err(ClientError::TooLarge { len: request.len(), max }));
            }
            let (number, receiver) = self.handle.post(request, timeout);
            self.stage = Stage::Posted(number, receiver);
        }
        let Stage::Posted(_, receiver) = &mut self.stage else { return Poll::Pending };
        let reply = Pin::new(receiver).poll(task);
        reply.map(|reply| {
            self.stage = Stage::Over;
            // The thread has ended.
            reply.unwrap_or(Err(ClientError::Closed(CloseReason::ClosedHere)))
        })
    }
}

impl Drop for AsyncCall {
    fn drop(&mut self) {
        if let Stage::Posted(number, _) = self.stage {
            lock(&self.handle.queue.posted).dropped.push(number);
            self.handle.waker.wake_by_ref();
        }
    }
}

/// What the thread has.
struct Worker {
    caller: Caller<Job>,
    queue: Arc<Queue>,
    /// Calls that the endpoint has not taken yet, the oldest first.
    waiting: VecDeque<Job>,
    /// The others.
    under_way: HashMap<u64, CallToken>,
}

impl Worker {
    /// Until nobody can call any more.
    fn serve(caller: Caller<Job>, tell: Sender<Result<AsyncClient, ClientError>>) {
        let limits = Limits {
            device: caller.context.device_info(),
            max_request: caller.endpoint.max_payload(),
            max_reply: caller.max_reply(),
            timeout: caller.options.timeout,
        };
        let queue = Arc::new(Queue { posted: Mutex::default(), limits });
        let handle = Handle { queue: Arc::clone(&queue), waker: caller.context.waker(), thread: OnceLock::new() };
        tell.send(Ok(AsyncClient(Arc::new(handle))));
        let mut worker = Self { caller, queue, waiting: VecDeque::new(), under_way: HashMap::new() };
        let mut in_vain = 0;
        while worker.take_posted() {
            let Ok(moved) = worker.step() else { return };
            in_vain = if moved { 0 } else { in_vain + 1 };
            if in_vain > SPINS && worker.caller.context.wait(time_left(&worker.waiting)).is_err() {
                return;
            }
        }
    }

    /// Takes what was posted; whether anybody can still call.
    fn take_posted(&mut self) -> bool {
        let (calls, dropped) = {
            let mut posted = lock(&self.queue.posted);
            if posted.is_over {
                return false;
            }
            (std::mem::take(&mut posted.calls), std::mem::take(&mut posted.dropped))
        };
        self.waiting.extend(calls);
        for number in dropped {
            match self.under_way.remove(&number) {
                Some(token) => drop(self.caller.endpoint.cancel(token)),
                None => self.waiting.retain(|job| job.number != number),
            }
        }
        true
    }

    /// Sends what there is room for, and takes replies. Whether anything happened.
    fn step(&mut self) -> Result<bool, ClientError> {
        let moved = self.send()?;
        let Self { caller, waiting, under_way, .. } = self;
        let max_reply = caller.max_reply();
        let mut again = Vec::new();
        let replies = caller.context.poll(|job, outcome| {
            under_way.remove(&job.number);
            match outcome {
                Ok(reply) => job.reply.send(Ok(reply.to_vec())),
                // No handler got it: the server was leaving. There may be another by now.
                Err(failure) => match failed(failure, max_reply) {
                    ClientError::Closed(CloseReason::ClosedByPeer) if !job.is_second => again.push(Job { is_second: true, ..job }),
                    error => job.reply.send(Err(error)),
                },
            }
        })?;
        let has_more = !again.is_empty();
        again.into_iter().rev().for_each(|job| waiting.push_front(job));
        Ok(moved || has_more || replies > 0)
    }

    fn send(&mut self) -> Result<bool, ClientError> {
        let mut moved = false;
        while let Some(job) = self.waiting.pop_front() {
            if self.caller.endpoint.closed().is_some() {
                self.waiting.push_front(job);
                self.reconnect();
                return Ok(true);
            }
            let left = job.end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                job.reply.send(Err(ClientError::TimedOut));
                moved = true;
                continue;
            }
            let (number, request) = (job.number, Arc::clone(&job.request));
            match self.caller.call(&request, job, left) {
                Ok(token) => drop(self.under_way.insert(number, token)),
                Err(CallError::Closed { user_data: job, .. } | CallError::RingFull(job) | CallError::InsufficientCredit(job)) => {
                    self.waiting.push_front(job);
                    break;
                }
                Err(_) => {}
            }
            moved = true;
        }
        Ok(moved)
    }

    /// If that is not possible, all that waits ends; what has no time left meanwhile ends before.
    fn reconnect(&mut self) {
        let (start, patience) = (Instant::now(), self.caller.options.connect_timeout);
        lock(&self.queue.posted).is_away = true;
        let Self { caller, queue, waiting, .. } = self;
        let error = loop {
            let left = patience.saturating_sub(start.elapsed());
            let attempt = time_left(waiting).map_or(left, |first| first.min(left));
            let began = Instant::now();
            let connected = caller.reconnect(attempt, || {
                let is_over = {
                    let mut posted = lock(&queue.posted);
                    waiting.extend(posted.calls.drain(..));
                    posted.is_over
                };
                end_late(waiting);
                !is_over && !waiting.is_empty()
            });
            let Err(error) = connected else { break None };
            end_late(waiting);
            // It was not for lack of time, or all of that is over.
            if waiting.is_empty() || attempt == left || began.elapsed() < attempt {
                break Some(error);
            }
        };
        lock(&self.queue.posted).is_away = false;
        let Some(error) = error else { return };
        let text = error.to_string();
        let mut error = Some(error);
        let address = &self.caller.address;
        for job in self.waiting.drain(..) {
            let source = || io::Error::other(text.clone());
            job.reply.send(Err(error.take().unwrap_or_else(|| ClientError::Unreachable { address: address.clone(), source: source() })));
        }
    }
}

/// Until the end of a call that the endpoint has not taken. Of the others the context knows it.
fn time_left(waiting: &VecDeque<Job>) -> Option<Duration> {
    let end = waiting.iter().filter_map(|job| job.end).min()?;
    Some(end.saturating_duration_since(Instant::now()))
}

/// Ends the calls that wait and have no time left.
fn end_late(waiting: &mut VecDeque<Job>) {
    let now = Instant::now();
    let is_late = |job: &Job| job.end.is_some_and(|end| end <= now);
    if !waiting.iter().any(is_late) {
        return;
    }
    for job in std::mem::take(waiting) {
        if is_late(&job) {
            job.reply.send(Err(ClientError::TimedOut));
        } else {
            waiting.push_back(job);
        }
    }
}

/// Who still waits is told by the drops of what it waits for.
impl Drop for Worker {
    fn drop(&mut self) {
        let calls = {
            let mut posted = lock(&self.queue.posted);
            posted.is_over = true;
            std::mem::take(&mut posted.calls)
        };
        // Not under the lock: whom this wakes may drop another call at once.
        drop(calls);
    }
}
