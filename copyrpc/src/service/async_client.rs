//! The client whose calls are futures. A thread of its own has the connection, and sleeps while no call is under way.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::ToSocketAddrs;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mlx5::DeviceInfo;
use rendezvous::oneshot::{Receiver, Sender, lock, oneshot};
use rendezvous::posting::{self, Posted, Poster, posting};

use super::SPINS;
use super::caller::{Caller, ClientError, ClientOptions, ended, read_reply};
use crate::endpoint::CallToken;
use crate::error::{CallError, CloseReason};
use crate::stats::Stats;
use crate::typed::Call;

/// Number of turns after which a busy thread tells its counters.
const TURNS_PER_STATS: u32 = 1024;

type Reply = Result<Vec<u8>, ClientError>;

/// A connection to a [`Server`](crate::Server) whose calls are futures, for any executor and from any thread. Clones share the
/// connection, and therefore its WRITEs. Dropping the last clone closes the connection, and waits until the server knows, at most 20 ms.
/// A call that an [`AsyncServer`](crate::AsyncServer) holds for long stops no other; it keeps its
/// [`max_reply`](ClientOptions::max_reply) from the credit of the connection.
///
/// A thread of its own has the device. The thread sleeps on the completion channel while there is nothing to do; calls and replies wake
/// it. A call after the end of the connection connects again; calls made meanwhile wait for the new connection.
///
/// ```no_run
/// # async fn caller() -> Result<(), copyrpc::ClientError> {
/// let client = copyrpc::AsyncClient::connect("127.0.0.1:7479").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct AsyncClient(pub(super) Arc<Handle>);

/// The shared part of a connection's clients. Its drop ends the thread.
pub(super) struct Handle {
    poster: Poster<Job>,
    /// Counters as of the time before the thread's last sleep, or of one in 1,024 turns.
    stats: Arc<Mutex<Stats>>,
    // The properties of the device and the connection, which are the same after connecting again.
    device: DeviceInfo,
    max_request: usize,
    max_reply: usize,
    timeout: Option<Duration>,
}

/// A call, until it ends.
pub(super) struct Job {
    number: u64,
    request: Arc<[u8]>,
    end: Option<Instant>,
    reply: Sender<Reply>,
    /// The server was leaving when the call was sent first: this is its second and last try.
    is_second: bool,
}

impl posting::Job for Job {
    fn end(&self) -> Option<Instant> {
        self.end
    }

    fn end_late(self) {
        self.reply.send(Err(ClientError::NotSent));
    }
}

impl fmt::Debug for AsyncClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncClient").field("device", &self.0.device.name).finish_non_exhaustive()
    }
}

impl AsyncClient {
    /// Opens the device, and connects to the server at `address`. Waits for a server that is not there yet. The client's thread keeps the
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
        let (options, (tell, told)) = (options.clone(), oneshot());
        let run = move || match Caller::connect(address, &options, || tell.is_wanted()) {
            Err(error) => tell.send(Err(error)),
            Ok(caller) => {
                let (worker, handle) = Worker::new(caller);
                tell.send(Ok(Self(Arc::new(handle))));
                worker.serve();
            }
        };
        let thread = thread::Builder::new().name("copyrpc-client".to_owned()).spawn(run).map_err(ClientError::Thread)?;
        let client: Self = told.await.unwrap_or(Err(ClientError::Closed(CloseReason::ClosedHere)))?;
        client.0.poster.set_thread(thread);
        Ok(client)
    }

    /// Sends a request with the first poll of the future, and waits for its reply, as long as the options allow. Dropping the future
    /// gives the call up. Calls of one client reach the server in the order of their first polls.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&self, request: impl Into<Vec<u8>>) -> AsyncCall {
        self.call_for(request.into(), self.0.timeout)
    }

    /// Like [`call`](Self::call), with a timeout of its own. The timeout counts from the first poll, and includes a new connection.
    ///
    /// # Errors
    /// As of [`Client::call_within`](crate::Client::call_within).
    pub fn call_within(&self, request: impl Into<Vec<u8>>, timeout: Duration) -> AsyncCall {
        self.call_for(request.into(), Some(timeout))
    }

    /// Sends the bytes of `request`, and reads the reply as a [`Call::Reply`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn call_typed<C: Call + Sync>(&self, request: &C) -> Result<C::Reply, ClientError> {
        read_reply(&self.call(request.as_bytes()).await?)
    }

    /// Like [`call_typed`](Self::call_typed), with a timeout of its own: see [`call_within`](Self::call_within).
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn call_typed_within<C: Call + Sync>(&self, request: &C, timeout: Duration) -> Result<C::Reply, ClientError> {
        read_reply(&self.call_within(request.as_bytes(), timeout).await?)
    }

    fn call_for(&self, request: Vec<u8>, timeout: Option<Duration>) -> AsyncCall {
        AsyncCall { handle: Arc::clone(&self.0), stage: Stage::New(request, timeout) }
    }

    /// Returns the maximum bytes of a request.
    #[must_use]
    pub fn max_request(&self) -> usize {
        self.0.max_request
    }

    /// Returns the maximum bytes of a reply.
    #[must_use]
    pub fn max_reply(&self) -> usize {
        self.0.max_reply
    }

    /// Returns the counters of all connections ever made, as they were when the thread last slept, or at most 1,024 polls ago.
    #[must_use]
    pub fn stats(&self) -> Stats {
        *lock(&self.0.stats)
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> &DeviceInfo {
        &self.0.device
    }
}

impl Handle {
    /// Posts a call to the thread. Returns the number of the call, and the receiver of its reply.
    fn post(&self, request: Vec<u8>, timeout: Option<Duration>) -> (u64, Receiver<Reply>) {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let ((reply, receiver), request) = (oneshot(), request.into());
        (self.poster.post(|number| Job { number, request, end, reply, is_second: false }), receiver)
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
            let max = self.handle.max_request;
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
            self.handle.poster.give_up(number);
        }
    }
}

/// The state of the thread.
pub(super) struct Worker {
    pub(super) caller: Caller<Job>,
    /// Its waiting calls are those that the endpoint has not taken yet.
    pub(super) posted: Posted<Job>,
    /// The calls that an endpoint has taken, by their numbers.
    under_way: HashMap<u64, CallToken>,
    /// Ends the sleep of the thread.
    waker: Arc<Forward>,
    stats: Arc<Mutex<Stats>>,
}

/// The waker of the context in use, which is another one after the device broke down.
struct Forward(Mutex<Waker>);

impl Wake for Forward {
    fn wake(self: Arc<Self>) {
        lock(&self.0).wake_by_ref();
    }
}

impl Worker {
    pub(super) fn new(caller: Caller<Job>) -> (Self, Handle) {
        let stats = Arc::new(Mutex::new(caller.stats()));
        let waker = Arc::new(Forward(Mutex::new(caller.context.waker())));
        let (poster, posted) = posting(Arc::clone(&waker).into());
        let handle = Handle {
            poster,
            stats: Arc::clone(&stats),
            device: caller.context.device_info(),
            max_request: caller.endpoint.max_payload(),
            max_reply: caller.max_reply,
            timeout: caller.options.timeout,
        };
        (Self { caller, posted, under_way: HashMap::new(), waker, stats }, handle)
    }

    /// Runs until every [`AsyncClient`] is dropped. The drop of the worker ends the calls that are left.
    fn serve(mut self) {
        let (mut idle_turns, mut turns) = (0, 0);
        while self.posted.take() {
            turns += 1;
            if turns == TURNS_PER_STATS || idle_turns > SPINS {
                turns = 0;
                *lock(&self.stats) = self.caller.stats();
            }
            self.cancel_given_up();
            idle_turns = if self.step() { 0 } else { idle_turns + 1 };
            // The context knows the deadlines of the calls that the endpoint has taken.
            if idle_turns > SPINS {
                self.caller.sleep(self.posted.left().into_iter().chain(self.caller.starves_for()).min());
            }
        }
    }

    fn cancel_given_up(&mut self) {
        for number in self.posted.given_up.drain(..) {
            if let Some(token) = self.under_way.remove(&number) {
                drop(self.caller.cancel(token));
            }
        }
    }

    /// Sends waiting calls as far as there is room, and takes replies. Connects again for waiting calls if the connection has ended and the
    /// calls that it had are told. Returns whether anything happened.
    pub(super) fn step(&mut self) -> bool {
        let has_ended = self.caller.endpoint.closed().is_some();
        if has_ended && self.caller.endpoint.outstanding_calls() == 0 && !self.posted.is_empty() {
            self.reconnect();
            return true;
        }
        let moved = !has_ended && self.send();
        let Self { caller, posted, under_way, .. } = self;
        let (max_reply, mut has_more) = (caller.max_reply, false);
        let replies = caller.poll(|job, outcome| {
            under_way.remove(&job.number);
            match ended(outcome, max_reply) {
                // The server was leaving, and no handler got the call. There may be another server by now.
                Err(ClientError::Closed(CloseReason::ClosedByPeer)) if !job.is_second => {
                    has_more = true;
                    posted.put_back(job.number, Job { is_second: true, ..job });
                }
                end => job.reply.send(end),
            }
        });
        moved || has_more || replies > 0
    }

    fn send(&mut self) -> bool {
        let mut moved = false;
        while let Some((number, job)) = self.posted.pop() {
            if let Some(error) = self.caller.starved(job.end) {
                job.reply.send(Err(error));
                self.reconnect();
                return true;
            }
            let left = job.end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                posting::Job::end_late(job);
                moved = true;
                continue;
            }
            let request = Arc::clone(&job.request);
            match self.caller.call(&request, job, left) {
                Ok(token) => drop(self.under_way.insert(number, token)),
                Err(CallError::Closed { user_data: job, .. } | CallError::RingFull(job) | CallError::InsufficientCredit(job)) => {
                    self.posted.put_back(number, job);
                    // The server is leaving, as soon as the calls that it has are over.
                    if self.caller.endpoint.is_closing() {
                        self.reconnect();
                        return true;
                    }
                    self.posted.end_late();
                    break;
                }
                Err(_) => {}
            }
            moved = true;
        }
        moved
    }

    /// Connects again. If that is not possible, every waiting call ends.
    fn reconnect(&mut self) {
        let Self { caller, posted, waker, .. } = self;
        let connected = posted.reconnect(caller.options.connect_timeout, |attempt, is_wanted| caller.reconnect(attempt, is_wanted));
        *lock(&waker.0) = caller.context.waker();
        let Err(error) = connected else { return };
        let (text, mut error) = (error.to_string(), Some(error));
        for job in posted.drain() {
            let again = || ClientError::Unreachable { address: caller.address.clone(), source: io::Error::other(text.clone()) };
            job.reply.send(Err(error.take().unwrap_or_else(again)));
        }
    }
}

#[cfg(test)]
mod tests {
    use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
    use shm_testing::executor::block_on;
    use shm_testing::limits;

    use super::*;
    use crate::service::async_server::AsyncServer;
    use crate::service::server::ServerOptions;

    /// Connecting again takes an hour, for no server listens any more.
    #[test]
    fn the_calls_of_a_connection_that_has_ended_end_before_another_one_is_made() {
        limits::watchdog(Duration::from_secs(60));
        let fabric = FabricSpec::Local(LocalFabric::new());
        let device = DeviceSpec::Soft(SoftOptions { fabric, ..SoftOptions::default() });
        let options = ServerOptions { device: device.clone(), ..ServerOptions::default() };
        let server = block_on(AsyncServer::with_options(limits::any_port(), &options)).unwrap();
        let options = ClientOptions { device, connect_timeout: Duration::from_secs(3600), ..ClientOptions::default() };
        let (mut worker, handle) = Worker::new(Caller::connect(server.local_addr(), &options, || true).unwrap());
        let (_, first) = handle.post(vec![1], None);
        assert!(worker.posted.take() && worker.step());
        drop(server);
        // As if a flush had seen the end.
        worker.caller.endpoint.abort();
        let (_, mut second) = handle.post(vec![2], None);
        while !worker.under_way.is_empty() {
            worker.posted.take();
            worker.step();
        }
        assert!(matches!(block_on(first), Some(Err(ClientError::Closed(_)))));
        assert!(
            Pin::new(&mut second).poll(&mut TaskContext::from_waker(std::task::Waker::noop())).is_pending(),
            "it waits for a connection"
        );
    }
}
