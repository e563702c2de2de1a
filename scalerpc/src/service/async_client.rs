//! The client whose calls are futures. A thread of its own has the connection, and sleeps while nothing arrives.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::ToSocketAddrs;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mlx5::DeviceInfo;
use rendezvous::oneshot::{Receiver, Sender, oneshot};
use rendezvous::posting::{self, Posted, Poster, posting};

use super::client::{ClientError, ClientOptions, Connection, take_events};
use super::{DEFAULT_TYPE, SPINS};
use crate::protocol::{CallError, CallFailure, CallHandle, CloseReason};
use crate::rdma::SyncCallError;

type Reply = Result<Vec<u8>, ClientError>;

/// A connection to a [`Server`](crate::Server) whose calls are futures, for any executor and from any thread. Clones share the
/// connection, which is closed with the last clone. As many calls are under way as the server gives slots to a client; further calls wait
/// for a slot in their order.
///
/// A call that ran out of time keeps its slot until the server answers it. While such calls hold every slot, the others wait; once one of
/// those has waited for its whole time, it ends with [`ClientError::NoCredit`], and the client connects again for the rest.
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
        self.reply.send(Err(failed(CallFailure::NotSent)));
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
    /// Opens the device, and connects to the server at `address`. Waits for a server that is not there yet. The client's thread resolves
    /// the address, so a borrowed address has to be made owned: `address.to_owned()`.
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
    connection: Connection,
    posted: Posted<Job>,
    limits: Arc<Limits>,
    alarm: Arc<Alarm>,
    /// Calls that have a slot, with their numbers.
    under_way: HashMap<CallHandle, (u64, Job)>,
    /// A call waited for its whole time while calls that ran out of time held every slot.
    had_no_slot: bool,
}

/// The waker of the thread's device, which is another one after a breakdown.
struct Alarm(Mutex<Waker>);

impl Alarm {
    fn set(&self, waker: Waker) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = waker;
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).wake_by_ref();
    }
}

impl Worker {
    fn connect(
        address: impl ToSocketAddrs + fmt::Debug,
        options: ClientOptions,
        is_wanted: impl FnMut() -> bool,
    ) -> Result<(Self, Handle), ClientError> {
        let connection = Connection::open(address, options, is_wanted)?;
        let rdma = &connection.rdma;
        let limits = Arc::new(Limits {
            device: rdma.device().info(),
            max_payload: rdma.max_payload(),
            timeout: connection.options.timeout,
            polls: AtomicU64::new(0),
        });
        let alarm = Arc::new(Alarm(Mutex::new(rdma.device().waker())));
        let (poster, posted) = posting(Arc::clone(&alarm).into());
        let handle = Handle { poster, limits: Arc::clone(&limits) };
        Ok((Self { connection, posted, limits, alarm, under_way: HashMap::new(), had_no_slot: false }, handle))
    }

    /// Runs until every [`AsyncClient`] is dropped. Dropping the worker fails all pending calls.
    fn serve(mut self) {
        let mut idle_polls = 0;
        while self.posted.take() {
            let moved = self.step();
            idle_polls = if moved { 0 } else { idle_polls + 1 };
            if idle_polls > SPINS {
                self.connection.rdma.wait(self.posted.left());
                take_events(&mut self.connection.rdma);
            }
        }
    }

    /// Takes responses, and sends waiting calls as far as there are slots. Returns whether anything happened.
    fn step(&mut self) -> bool {
        self.limits.polls.fetch_add(1, Ordering::Relaxed);
        self.connection.rdma.poll();
        let mut moved = false;
        let is_closed = self.connection.is_closed();
        while let Some(completion) = self.connection.rdma.poll_completion(&mut self.connection.response) {
            moved = true;
            let Some((number, job)) = self.under_way.remove(&completion.handle) else { continue };
            // The server has not seen it: it goes to the next connection.
            if is_closed && completion.outcome == Err(CallFailure::NotSent) {
                self.posted.put_back(number, job);
                continue;
            }
            let response = completion.outcome.map(|len| self.connection.response.get(..len).unwrap_or_default().to_vec());
            job.reply.send(response.map_err(failed));
        }
        if self.send() {
            moved = true;
            self.connection.rdma.poll();
        }
        moved
    }

    /// Makes waiting calls as far as there are slots; the next poll sends them. Returns whether anything happened.
    fn send(&mut self) -> bool {
        let given_up = self.connection.rdma.given_up_calls();
        if given_up == self.connection.rdma.core().layout().depth {
            return self.end_starved(given_up);
        }
        self.had_no_slot = false;
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
            self.connection.rdma.set_timeout_ns(u64::try_from(left.as_nanos()).unwrap_or(u64::MAX));
            match self.connection.rdma.call(job.rpc_type, &job.request) {
                Ok(handle) => drop(self.under_way.insert(handle, (number, job))),
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

    /// Ends the waiting calls that have no time left, while calls that ran out of time hold every slot. After the first of them the others
    /// get a new connection. Returns whether they do.
    fn end_starved(&mut self, given_up: usize) -> bool {
        while let Some(job) = self.posted.pop_late() {
            self.had_no_slot = true;
            job.reply.send(Err(ClientError::NoCredit { given_up }));
        }
        let reconnects = !self.posted.is_empty() && std::mem::take(&mut self.had_no_slot);
        if reconnects {
            self.reconnect();
        }
        reconnects
    }

    /// Connects again. If that is not possible, every waiting call ends.
    fn reconnect(&mut self) {
        let Self { connection, posted, alarm, .. } = self;
        let connected: Result<(), ClientError> = posted.reconnect(connection.options.connect_timeout, |attempt, is_wanted| {
            connection.reconnect(attempt, is_wanted)?;
            alarm.set(connection.rdma.device().waker());
            Ok(())
        });
        let Err(error) = connected else { return };
        let (text, mut error) = (error.to_string(), Some(error));
        for job in posted.drain() {
            let again = || ClientError::Unreachable { address: connection.address.clone(), source: io::Error::other(text.clone()) };
            job.reply.send(Err(error.take().unwrap_or_else(again)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::Server;

    const WATCHDOG: Duration = Duration::from_secs(60);

    /// No completion reports the breakdown, and the thread sleeps on the device.
    #[test]
    fn a_client_whose_device_breaks_down_goes_on_with_another_one_and_is_woken_through_it() {
        let (tell, told) = mpsc::channel();
        let server = thread::spawn(move || {
            let mut server = Server::bind("127.0.0.1:0").unwrap();
            tell.send((server.local_addr().unwrap(), server.stop_handle())).unwrap();
            server.serve(|request| request.to_ascii_uppercase()).unwrap();
        });
        let (address, stop) = told.recv_timeout(WATCHDOG).unwrap();
        let (tell, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            let mut options = ClientOptions { timeout: WATCHDOG, ..ClientOptions::default() };
            options.rdma.sleeps = true;
            let (worker, handle) = Worker::connect(address, options, || true).unwrap();
            worker.connection.rdma.device().soft().unwrap().break_down();
            tell.send(handle).unwrap();
            worker.serve();
        });
        let client = AsyncClient(Arc::new(told.recv_timeout(WATCHDOG).unwrap()));
        let (tell, told) = mpsc::channel();
        let caller = thread::spawn(move || {
            for _ in 0..3 {
                tell.send(shm_testing::executor::block_on(client.call(b"x"))).unwrap();
                // The client's thread sleeps before the next call.
                thread::sleep(Duration::from_millis(100));
            }
        });
        // The thread may find out before it gets the first call, or that call finds out.
        if let Err(closed) = told.recv_timeout(WATCHDOG).unwrap() {
            let expected = SyncCallError::Failure(CallFailure::Closed(CloseReason::Device));
            assert!(matches!(closed, ClientError::Call(error) if error == expected), "{closed}");
        }
        for _ in 0..2 {
            assert_eq!(told.recv_timeout(WATCHDOG).expect("the thread is not woken").unwrap(), b"X");
        }
        caller.join().unwrap();
        thread.join().unwrap();
        stop.stop();
        server.join().unwrap();
    }
}
