//! The server whose requests are futures. A thread of its own has the device, and sleeps while no request arrives.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::thread::{self, JoinHandle};

use mlx5::DeviceInfo;
use rendezvous::oneshot::{Sender, lock, oneshot};

use super::server::{Server, ServerError, ServerOptions, StopHandle};
use crate::recv::RecvHandle;
use crate::stats::Stats;
use crate::wire::Status;

/// A server at a TCP address whose requests are futures, for any executor and from any thread.
///
/// A thread of its own has the device, connects the clients, and sleeps while there is nothing to do; requests and answers wake it.
/// Dropping the server ends it, and waits until the answers given have arrived, at most 20 ms. Received requests that are not answered by then
/// end as [`ClientError::Dropped`](crate::ClientError::Dropped); calls whose requests were not received go to another server.
///
/// ```no_run
/// # async fn serve(spawn: impl Fn(std::pin::Pin<Box<dyn Future<Output = ()> + Send>>)) -> Result<(), copyrpc::ServerError> {
/// let server = copyrpc::AsyncServer::bind("127.0.0.1:7479").await?;
/// while let Some(request) = server.recv().await? {
///     // With tokio: `tokio::spawn`.
///     spawn(Box::pin(async move {
///         let reply = request.data().to_ascii_uppercase();
///         request.reply(reply);
///     }));
/// }
/// # Ok(())
/// # }
/// ```
pub struct AsyncServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    device: DeviceInfo,
    stop: StopHandle,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    queues: Mutex<Queues>,
    /// Ends the sleep of the thread.
    waker: Waker,
    /// Bytes of requests above which the thread offers no more.
    max_buffered: usize,
}

#[derive(Default)]
struct Queues {
    /// Number and bytes of requests that are not received yet.
    requests: VecDeque<(u64, Vec<u8>)>,
    /// Sum of their bytes.
    buffered: usize,
    answers: Vec<(u64, Answer)>,
    /// Wakers of the tasks that wait for requests.
    wakers: Vec<Waker>,
    /// There are no more requests. The reason is `error`, until a receiver takes it.
    is_over: bool,
    error: Option<ServerError>,
    /// The counters, and the number of clients, when the thread last polled its sockets.
    stats: Stats,
    clients: usize,
    /// The thread answers no more requests.
    is_closed: bool,
}

enum Answer {
    Reply(Vec<u8>),
    Refusal,
    /// The request was dropped.
    Nothing,
}

impl fmt::Debug for AsyncServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl AsyncServer {
    /// Opens the device, and listens at `address`. Port 0 is any free port.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is left behind.
    pub async fn bind(address: impl ToSocketAddrs + fmt::Debug + Send + 'static) -> Result<Self, ServerError> {
        Self::with_options(address, &ServerOptions::default()).await
    }

    /// Like [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// [`ServerError`]; nothing is left behind.
    pub async fn with_options(
        address: impl ToSocketAddrs + fmt::Debug + Send + 'static,
        options: &ServerOptions,
    ) -> Result<Self, ServerError> {
        let (options, (tell, told)) = (options.clone(), oneshot());
        let run = move || serve(address, &options, tell);
        let thread = thread::Builder::new().name("copyrpc-server".to_owned()).spawn(run).map_err(ServerError::Thread)?;
        let bound: Result<Self, _> = told.await.unwrap_or_else(|| Err(ServerError::Thread(io::Error::other("it ended at once"))));
        let mut server = bound?;
        server.thread = Some(thread);
        Ok(server)
    }

    /// Returns the address at which it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub const fn device_info(&self) -> &DeviceInfo {
        &self.device
    }

    /// Returns the number of connected clients, as it was at most 10 ms or 1,024 polls ago.
    #[must_use]
    pub fn clients(&self) -> usize {
        lock(&self.shared.queues).clients
    }

    /// Returns the counters of all clients since the server was made, as they were at most 10 ms or 1,024 polls ago.
    #[must_use]
    pub fn stats(&self) -> Stats {
        lock(&self.shared.queues).stats
    }

    /// Returns a handle that makes [`recv`](Self::recv) return `None`, from any thread. The server listens no more then, so another one can take
    /// its address, and tells its clients to go: their next calls are for another server, and so are the calls whose requests were not
    /// received. Received requests can still be answered, until the server is dropped.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Waits for a request, and returns the oldest one; returns `None` once the server is stopped. Several tasks may wait; each request
    /// reaches one of them.
    ///
    /// # Errors
    /// [`ServerError::Broken`]: the server cannot continue. One of the waiting tasks gets the error, the others get `None`.
    pub async fn recv(&self) -> Result<Option<ServerRequest>, ServerError> {
        poll_fn(|task| {
            let mut queues = lock(&self.shared.queues);
            let is_stopped = self.stop.is_stopped();
            let next = if is_stopped { None } else { queues.requests.pop_front() };
            if let Some((number, data)) = next {
                let was_full = queues.buffered > self.shared.max_buffered;
                queues.buffered -= data.len();
                if was_full && queues.buffered <= self.shared.max_buffered {
                    self.shared.waker.wake_by_ref();
                }
                let request = ServerRequest { data, number, shared: Some(Arc::clone(&self.shared)) };
                return Poll::Ready(Ok(Some(request)));
            }
            if is_stopped || queues.is_over {
                return Poll::Ready(queues.error.take().map_or(Ok(None), Err));
            }
            if !queues.wakers.iter().any(|waker| waker.will_wake(task.waker())) {
                queues.wakers.push(task.waker().clone());
            }
            Poll::Pending
        })
        .await
    }
}

impl Drop for AsyncServer {
    fn drop(&mut self) {
        lock(&self.shared.queues).is_closed = true;
        self.shared.waker.wake_by_ref();
        if let Some(thread) = self.thread.take().filter(|thread| thread.thread().id() != thread::current().id()) {
            // The result would only report a panic of the thread.
            let _ = thread.join();
        }
    }
}

/// A request, to be answered at any time, in any order and from any thread. Dropping it without an answer tells the caller:
/// [`ClientError::Dropped`](crate::ClientError::Dropped).
///
/// A request that waits for long stops no other. Until it is answered, it keeps its client's
/// [`max_reply`](crate::ClientOptions::max_reply) from the credit of the client's connection, which is a quarter of the ring: a client that
/// makes many calls that wait for an event needs a small one.
#[must_use = "dropping a request answers it with an error"]
pub struct ServerRequest {
    data: Vec<u8>,
    number: u64,
    /// `None` once it is answered.
    shared: Option<Arc<Shared>>,
}

impl fmt::Debug for ServerRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerRequest").field("bytes", &self.data.len()).finish_non_exhaustive()
    }
}

impl ServerRequest {
    /// Returns the request's bytes.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.data
    }

    /// Sends a reply. A client that has left gets none. A reply longer than the client accepts becomes a
    /// [`ClientError::ReplyTooLong`](crate::ClientError::ReplyTooLong).
    pub fn reply(mut self, reply: impl Into<Vec<u8>>) {
        self.answer(Answer::Reply(reply.into()));
    }

    /// Refuses the request.
    pub fn refuse(mut self) {
        self.answer(Answer::Refusal);
    }

    fn answer(&mut self, answer: Answer) {
        if let Some(shared) = self.shared.take() {
            lock(&shared.queues).answers.push((self.number, answer));
            shared.waker.wake_by_ref();
        }
    }
}

impl Drop for ServerRequest {
    fn drop(&mut self) {
        self.answer(Answer::Nothing);
    }
}

/// Runs the thread: makes the server, tells `tell` of it, and serves until its end.
fn serve(address: impl ToSocketAddrs + fmt::Debug, options: &ServerOptions, tell: Sender<Result<AsyncServer, ServerError>>) {
    let bound = Server::with_options(&address, options).and_then(|server| {
        let address = server.local_addr().map_err(|source| ServerError::Listen { address: rendezvous::name_of(&address), source })?;
        Ok((server, address))
    });
    let (mut server, address) = match bound {
        Ok(bound) => bound,
        Err(error) => return tell.send(Err(error)),
    };
    let (stop, device) = (server.stop_handle(), server.device_info());
    let shared = Arc::new(Shared { queues: Mutex::default(), waker: server.waker(), max_buffered: options.max_buffered });
    // Its drop marks the end, in a panic too.
    let over = Over(&shared);
    if !tell.is_wanted() {
        return;
    }
    tell.send(Ok(AsyncServer { shared: Arc::clone(&shared), address, device, stop, thread: None }));
    let (mut held, mut last) = (HashMap::<u64, RecvHandle<()>>::new(), 0);
    let send_back = |request: RecvHandle<()>| drop(request.respond(Status::Closing, &[]));
    let mut is_leaving = false;
    loop {
        let (answers, is_closed, mut is_full) = {
            let mut queues = lock(&shared.queues);
            if server.polls_sockets_next() {
                (queues.stats, queues.clients) = (server.stats(), server.clients());
            }
            (std::mem::take(&mut queues.answers), queues.is_closed, queues.buffered > shared.max_buffered)
        };
        for (number, answer) in answers {
            let Some(request) = held.remove(&number) else { continue };
            match answer {
                Answer::Reply(reply) => request.answer(&reply),
                Answer::Refusal => drop(request.refuse()),
                Answer::Nothing => drop(request),
            }
        }
        if (is_closed || server.is_stopped()) && !is_leaving {
            is_leaving = true;
            shared.end(None).iter().filter_map(|number| held.remove(number)).for_each(send_back);
            server.close();
        }
        if is_closed {
            break;
        }
        while !is_leaving && !is_full {
            let Some(mut request) = server.recv() else { break };
            last += 1;
            is_full = shared.offer(last, request.data().to_vec());
            request.release_data();
            held.insert(last, request);
        }
        server.holds_back = is_full;
        if let Err(error) = server.step() {
            shared.end(Some(error));
            break;
        }
    }
    drop((held, over));
}

impl Shared {
    /// Offers a request to the receivers. Returns whether there is no room for more.
    fn offer(&self, number: u64, data: Vec<u8>) -> bool {
        let (wakers, is_full) = {
            let mut queues = lock(&self.queues);
            queues.buffered += data.len();
            queues.requests.push_back((number, data));
            (std::mem::take(&mut queues.wakers), queues.buffered > self.max_buffered)
        };
        wakers.into_iter().for_each(Waker::wake);
        is_full
    }

    /// Marks that there are no more requests. Returns the numbers of the requests that were not received.
    fn end(&self, error: Option<ServerError>) -> Vec<u64> {
        let (requests, wakers) = {
            let mut queues = lock(&self.queues);
            queues.is_over = true;
            queues.buffered = 0;
            queues.error = queues.error.take().or(error);
            (std::mem::take(&mut queues.requests), std::mem::take(&mut queues.wakers))
        };
        wakers.into_iter().for_each(Waker::wake);
        requests.into_iter().map(|(number, _)| number).collect()
    }
}

/// Its drop marks that the thread serves no more requests.
struct Over<'a>(&'a Shared);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.end(None);
    }
}
