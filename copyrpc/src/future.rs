//! Calls, requests and one-sided operations as futures.
//!
//! This module has no executor and no thread: the futures of one [`AsyncContext`] live on its thread, in any single-threaded executor,
//! and complete when the context is polled. The context is polled by one of
//! - [`AsyncContext::run_until`], which polls one future, polls the context, and sleeps while there is nothing to do;
//! - [`AsyncContext::drive`], a future that polls the context whenever its executor polls it: for executors that have a loop of their
//!   own. It never sleeps, so it uses a core;
//! - a loop of the application, of [`AsyncContext::poll`] and [`AsyncContext::wait`].
//!
//! Calls that the plain API refuses for lack of room wait here: calls of an endpoint wait in the order of their first polls. A future
//! does nothing before its first poll and borrows its payload, which is copied into the ring once there is room. Nothing is sent before
//! the next poll of the context, so futures that are polled together share WRITEs. The reply is copied out into a `Vec`.
//!
//! ```
//! use copyrpc::future::AsyncContext;
//! # use copyrpc::mlx5::DeviceSpec;
//! # use copyrpc::{ContextBuilder, EndpointConfig, ExchangeRecord};
//! # use std::sync::mpsc::{Receiver, Sender, channel};
//! # type AnyError = Box<dyn std::error::Error + Send + Sync>;
//! # type Record = [u8; 128];
//! # fn serve(record: &Record, to_client: &Sender<Record>, served: &Sender<()>) -> Result<(), AnyError> {
//! # let context = AsyncContext::new(ContextBuilder::new(DeviceSpec::default()).build()?);
//! # let pending = context.create_endpoint(&EndpointConfig::default())?;
//! # to_client.send(pending.local_info().encode())?;
//! # let _endpoint = pending.connect(&ExchangeRecord::decode(record)?).map_err(|error| error.reason)?;
//! // The server, in its thread:
//! context.run_until(async {
//!     while let Some(request) = context.recv().await {
//!         let mut answer = request.data().to_vec();
//!         answer.reverse();
//!         request.reply(&answer).map_err(|error| error.to_string())?;
//! #       break;
//!     }
//!     Ok::<(), AnyError>(())
//! })??;
//! # served.send(())?;
//! # Ok(())
//! # }
//!
//! # fn main() -> Result<(), AnyError> {
//! # let context = AsyncContext::new(ContextBuilder::new(DeviceSpec::default()).build()?);
//! # let pending = context.create_endpoint(&EndpointConfig::default())?;
//! # let record = pending.local_info().encode();
//! # let ((to_client, from_server), (done, served)) = (channel(), channel());
//! # let server = std::thread::spawn(move || serve(&record, &to_client, &done));
//! # let connected = pending.connect(&ExchangeRecord::decode(&from_server.recv()?)?).map_err(|error| error.reason)?;
//! // The client, in its own:
//! let endpoint = context.endpoint(connected);
//! let reply = context.run_until(endpoint.call(b"ping", 16))??;
//! assert_eq!(reply, b"gnip");
//! # served.recv()?;
//! # server.join().map_err(|_| "the server panicked")??;
//! # Ok(())
//! # }
//! ```

mod operations;
mod waiting;

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread::{self, ThreadId};
use std::time::Duration;

use mlx5::{DeviceInfo, RegisterError};
pub use operations::{AsyncCallError, CallFuture, TransferFuture};
use waiting::{Lane, News, Waiting};
use zerocopy::FromBytes;

use crate::config::{CreateEndpointError, EndpointConfig};
use crate::connection::Outcome;
use crate::context::{Context, PollError};
use crate::endpoint::Endpoint;
use crate::error::{CallFailure, CloseReason};
use crate::pending::PendingEndpoint;
use crate::raw::{Memory, RemoteMemory};
use crate::recv::RecvHandle;
use crate::stats::Stats;
use crate::typed::Call;

/// Default number of polls that find nothing before [`AsyncContext::run_until`] sleeps.
const DEFAULT_SPINS: u32 = 256;

/// The link from the end of a call or operation to its future: the user data of the context below.
#[derive(Debug)]
pub struct Ticket(Rc<Progress>);

/// A request of a peer. Its answer is sent with the next poll of the context.
pub type AsyncRequest = RecvHandle<Ticket>;

/// State that a future and the end of its call share.
#[derive(Default)]
struct Progress {
    outcome: Cell<Option<Result<Vec<u8>, CallFailure>>>,
    waker: Cell<Option<Waker>>,
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Progress").finish_non_exhaustive()
    }
}

impl Progress {
    fn end(&self, outcome: Result<Vec<u8>, CallFailure>) {
        self.outcome.set(Some(outcome));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn poll(&self, task: &TaskContext<'_>) -> Poll<Result<Vec<u8>, CallFailure>> {
        if let Some(outcome) = self.outcome.take() {
            return Poll::Ready(outcome);
        }
        self.waker.set(Some(task.waker().clone()));
        Poll::Pending
    }
}

/// A context whose calls are futures. It belongs to one thread, as they do. When it is dropped its connections end, like those of a
/// [`Context`], and all waiting futures complete.
#[derive(Debug)]
pub struct AsyncContext {
    context: Context<Ticket>,
    waiting: Rc<Waiting>,
    /// Number of connections that had ended when the last poll woke the waiting futures.
    endings: Cell<u64>,
    spins: u32,
}

impl AsyncContext {
    /// Makes a context of futures from `context`.
    #[must_use]
    pub fn new(context: Context<Ticket>) -> Self {
        Self { context, waiting: Rc::default(), endings: Cell::new(0), spins: DEFAULT_SPINS }
    }

    /// Sets the number of consecutive polls that must find nothing before [`run_until`](Self::run_until) sleeps: a message that arrives
    /// meanwhile is taken sooner. Default 256; 0 sleeps at once.
    #[must_use]
    pub const fn spins(mut self, polls: u32) -> Self {
        self.spins = polls;
        self
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        self.context.device_info()
    }

    /// Returns the counters of all endpoints ever made.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.context.stats()
    }

    /// Like [`Context::create_endpoint`]. Pass the connected endpoint to [`AsyncContext::endpoint`] for calls.
    ///
    /// # Errors
    /// [`CreateEndpointError`] with the legal range.
    pub fn create_endpoint(&self, config: &EndpointConfig) -> Result<PendingEndpoint<Ticket>, CreateEndpointError> {
        self.context.create_endpoint(config)
    }

    /// Like [`Context::alloc`].
    ///
    /// # Errors
    /// [`RegisterError`]: `bytes` is 0, or no memory is left.
    pub fn alloc(&self, bytes: usize) -> Result<Memory, RegisterError> {
        self.context.alloc(bytes)
    }

    /// Returns the endpoint with calls that are futures, of a connected endpoint or of [`RecvHandle::endpoint`].
    pub fn endpoint(&self, endpoint: Endpoint<Ticket>) -> AsyncEndpoint {
        AsyncEndpoint { endpoint, waiting: Rc::clone(&self.waiting) }
    }

    /// Returns the oldest request that arrived, over all endpoints, once there is one; `None` once there is none and no connection from
    /// which one could come, because all have ended or none was made. Several futures may wait: each request reaches one of them.
    pub fn recv(&self) -> impl Future<Output = Option<AsyncRequest>> {
        let mut place = None;
        poll_fn(move |task| {
            self.waiting.admit(&mut place, Lane::Requests, None, task, || match self.context.recv() {
                None if self.context.inner.has_connections() => None,
                request => Some(request),
            })
        })
    }

    /// One bounded step, like [`Context::poll`]: completes calls and operations, posts gathered messages, and wakes the futures that can
    /// go on. Returns the number of completions plus the number of calls that ran out of time.
    ///
    /// # Errors
    /// [`PollError`].
    pub fn poll(&self) -> Result<usize, PollError> {
        let moved = self.context.poll(end)?;
        self.wake(moved > 0);
        Ok(moved)
    }

    fn wake(&self, has_moved: bool) {
        let endings = self.context.inner.endings();
        let has_ended = self.endings.replace(endings) != endings;
        self.waiting.wake(&News { has_moved, has_ended, has_requests: || self.context.inner.has_requests() });
    }

    /// Posts gathered messages, then sleeps until there is something to poll for, like [`Context::wait`], but also over requests: a
    /// future that waits for them was woken. For loops of the application: sleep only while no future was woken, and poll after it.
    ///
    /// # Errors
    /// [`PollError::Reentrant`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool, PollError> {
        self.context.inner.wait(timeout, || false)
    }

    /// Returns the waker that ends a [`wait`](Self::wait) from any thread: see [`Context::waker`].
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.context.waker()
    }

    /// Polls the context, and asks to be polled again at once: join or spawn it beside the futures that it drives. It completes only with
    /// an error.
    pub fn drive(&self) -> impl Future<Output = PollError> {
        poll_fn(|task| match self.poll() {
            Ok(_) => {
                task.waker().wake_by_ref();
                Poll::Pending
            }
            Err(error) => Poll::Ready(error),
        })
    }

    /// Polls `future` to its end, whenever it is woken, and the context in between. Sleeps while there is nothing to do. When it returns,
    /// the last messages of `future` have been posted. For several things at once, pass a future that joins them.
    ///
    /// Wake-ups from other threads end a sleep too.
    ///
    /// # Errors
    /// [`PollError`]; `future` is dropped then.
    pub fn run_until<F: Future>(&self, future: F) -> Result<F::Output, PollError> {
        let mut future = pin!(future);
        let woken = Arc::new(Woken { is_set: AtomicBool::new(true), thread: thread::current().id(), sleeper: self.waker() });
        let waker = Waker::from(Arc::clone(&woken));
        let mut task = TaskContext::from_waker(&waker);
        let mut idle_polls = 0;
        loop {
            if woken.is_set.swap(false, Ordering::Acquire) {
                idle_polls = 0;
                if let Poll::Ready(output) = future.as_mut().poll(&mut task) {
                    self.context.flush_endpoints()?;
                    return Ok(output);
                }
            }
            idle_polls = if self.poll()? == 0 { idle_polls + 1 } else { 0 };
            if idle_polls > self.spins && !woken.is_set.load(Ordering::Acquire) {
                self.wait(None)?;
            }
        }
    }
}

impl Drop for AsyncContext {
    fn drop(&mut self) {
        self.context.inner.part_all(&mut end);
        // It cannot be inside a poll.
        let _ = self.poll();
    }
}

fn end(ticket: Ticket, outcome: Outcome<'_>) {
    ticket.0.end(outcome.map(|bytes| bytes.to_vec()));
}

/// A flag that a waker sets from any thread.
struct Woken {
    is_set: AtomicBool,
    /// The thread that sleeps: it does not need a wake-up from itself.
    thread: ThreadId,
    sleeper: Waker,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_set.store(true, Ordering::Release);
        if thread::current().id() != self.thread {
            self.sleeper.wake_by_ref();
        }
    }
}

/// One end of a connection whose calls are futures. It is an [`Endpoint`]: clones name the same connection, and dropping the last of them
/// closes it.
#[derive(Clone, Debug)]
#[must_use = "dropping the last handle of an endpoint closes its connection"]
pub struct AsyncEndpoint {
    endpoint: Endpoint<Ticket>,
    waiting: Rc<Waiting>,
}

impl AsyncEndpoint {
    /// Returns the endpoint: its limits, its counters, its [`close`](Endpoint::close) and [`abort`](Endpoint::abort).
    pub const fn endpoint(&self) -> &Endpoint<Ticket> {
        &self.endpoint
    }

    /// Makes a call whose reply may have `response_allowance` bytes. Completes with the reply. Dropping the future early cancels the
    /// call: a request that was not accepted is never sent; otherwise the handler may run, and its reply is dropped.
    pub fn call<'a>(&'a self, payload: &'a [u8], response_allowance: usize) -> CallFuture<'a> {
        CallFuture::new(self, payload, response_allowance)
    }

    /// Like [`AsyncEndpoint::call`], with the bytes of `request` and a reply of the bytes of a [`Call::Reply`].
    ///
    /// # Errors
    /// [`AsyncCallError`]; `Size` for a reply of another size.
    pub async fn call_typed<C: Call>(&self, request: &C) -> Result<C::Reply, AsyncCallError> {
        let reply = self.call(request.as_bytes(), size_of::<C::Reply>()).await?;
        C::Reply::read_from_bytes(&reply).map_err(|_| AsyncCallError::wrong_size::<C::Reply>(reply.len()))
    }

    /// Copies bytes of the peer's memory to `local`, as [`Endpoint::rdma_read`] does.
    pub const fn rdma_read<'a>(
        &'a self,
        local: &'a Memory,
        local_offset: usize,
        remote: &'a RemoteMemory,
        remote_offset: u64,
        len: usize,
    ) -> TransferFuture<'a> {
        TransferFuture::new(self, Endpoint::rdma_read, (local, local_offset), (remote, remote_offset), len)
    }

    /// Copies bytes to the peer's memory, as [`Endpoint::rdma_write`] does.
    pub const fn rdma_write<'a>(
        &'a self,
        local: &'a Memory,
        local_offset: usize,
        remote: &'a RemoteMemory,
        remote_offset: u64,
        len: usize,
    ) -> TransferFuture<'a> {
        TransferFuture::new(self, Endpoint::rdma_write, (local, local_offset), (remote, remote_offset), len)
    }

    /// Completes with the reason of the connection's end, once it has ended.
    pub fn closed(&self) -> impl Future<Output = CloseReason> {
        let mut place = None;
        let lane = Lane::End(self.endpoint.connection.serial());
        poll_fn(move |task| self.waiting.admit(&mut place, lane, None, task, || self.endpoint.closed()))
    }
}
