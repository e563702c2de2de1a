//! The server whose requests are futures. Its thread runs the server of a transport's crate, and
//! sleeps while no request arrives.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::context::{self, Wanted};
use crate::events::Named;
use crate::header::Header;
use crate::oneshot::{Sender, lock, oneshot};
use crate::patience::yield_core;
use crate::serving::{Answer, Bind, Serving, StopHandle};

/// Minimum time between two checks of all held requests and of the counters of all clients: a
/// server that wakes for each message has no time for a check at each wake.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// A server whose requests are futures, for any executor and from any thread.
///
/// The server has a thread that owns the server of the transport, connects the clients, and sleeps
/// while there is nothing to do; requests and answers wake the thread. Dropping the server ends the
/// thread, and waits until the given answers have arrived, as long as the options allow. To wait
/// until received requests are answered, call [`drain`](Self::drain) first. Received requests that
/// are not answered before the drop end as [`ClientError::Dropped`](crate::ClientError::Dropped);
/// calls whose requests were not received are made again at another server.
pub struct AsyncServer<S: Serving> {
    shared: Arc<Shared<S>>,
    address: S::Address,
    device: S::Device,
    stop: StopHandle,
    thread: Option<JoinHandle<()>>,
}

struct Shared<S: Serving> {
    queues: Mutex<Queues<S>>,
    waker: Waker,
    /// Maximum number of bytes of requests that no task has received. Above this number, the thread
    /// takes no further requests from the transport.
    max_buffered: usize,
}

struct Queues<S: Serving> {
    /// Requests that are not received yet.
    requests: VecDeque<Arrival<S::Peer>>,
    /// Number of bytes of these requests.
    buffered: usize,
    answers: Vec<(u64, Answer)>,
    wakers: Vec<Waker>,
    /// Whether the server has ended, and no more requests arrive. The reason is `error`, until a
    /// receiver takes it.
    is_over: bool,
    error: Option<S::Error>,
    /// The counters, and the number of clients, when the thread last checked its clients.
    stats: S::Stats,
    clients: usize,
    /// The callers of received requests, by the number of the request. The map contains a caller
    /// that no longer waits, and the caller of a request whose handler
    /// [`ServerRequest::while_wanted`] runs.
    watches: FxHashMap<u64, Watch>,
    /// The time at which the end of the thread was requested, and the maximum time for which the
    /// thread then waits for the answers to all received requests.
    ending: Option<(Instant, Duration)>,
    /// Senders that get the number of received requests that were not answered, when the thread
    /// ends.
    tell_end: Vec<Sender<usize>>,
    has_ended: bool,
}

impl<S: Serving> Default for Queues<S> {
    fn default() -> Self {
        Self {
            requests: VecDeque::new(),
            buffered: 0,
            answers: Vec::new(),
            wakers: Vec::new(),
            is_over: false,
            error: None,
            stats: S::Stats::default(),
            clients: 0,
            watches: FxHashMap::default(),
            ending: None,
            tell_end: Vec::new(),
            has_ended: false,
        }
    }
}

struct Arrival<P> {
    number: u64,
    data: Vec<u8>,
    peer: P,
    at: Instant,
}

/// The caller of a received request.
#[derive(Default)]
struct Watch {
    /// Whether the caller has disconnected, or gave up this call.
    is_gone: bool,
    /// The end of the caller's time, and the waker of the task to wake at that time.
    deadline: Option<Instant>,
    waker: Option<Waker>,
}

impl Watch {
    fn is_over(&self, now: Instant) -> bool {
        self.is_gone || self.deadline.is_some_and(|deadline| deadline <= now)
    }
}

impl<S: Serving> fmt::Debug for AsyncServer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncServer")
            .field("address", &self.address.to_string())
            .finish_non_exhaustive()
    }
}

impl<S: Serving> AsyncServer<S> {
    /// Makes the server at `address`.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub async fn bind<A: Send + 'static>(address: A) -> Result<Self, S::Error>
    where
        S: Bind<A> + 'static,
    {
        Self::with_options(address, &S::Options::default()).await
    }

    /// Like [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub async fn with_options<A: Send + 'static>(
        address: A,
        options: &S::Options,
    ) -> Result<Self, S::Error>
    where
        S: Bind<A> + 'static,
    {
        let (tell, told) = oneshot();
        let options = options.clone();
        let run = move || {
            let bound = S::bind_with(address, &options).and_then(|server| {
                let address = server.address().map_err(S::no_thread)?;
                Ok((server, address))
            });
            match bound {
                Ok((server, address)) => serve(server, address, S::max_buffered(&options), tell),
                Err(error) => tell.send(Err(error)),
            }
        };
        let thread = thread::Builder::new()
            .name(S::THREAD.to_owned())
            .spawn(run)
            .map_err(S::no_thread)?;
        let bound: Result<Self, _> = told
            .await
            .unwrap_or_else(|| Err(S::no_thread(io::Error::other("it ended at once"))));
        let mut server = bound?;
        server.thread = Some(thread);
        Ok(server)
    }

    /// Returns the address of the server, whose text a client can connect to.
    #[must_use]
    pub fn local_addr(&self) -> S::Address {
        self.address.clone()
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub const fn device_info(&self) -> &S::Device {
        &self.device
    }

    /// Returns the number of connected clients, as it was at most 15 ms ago.
    #[must_use]
    pub fn clients(&self) -> usize {
        lock(&self.shared.queues).clients
    }

    /// Returns the counters of all clients since the server was made, as they were at most 15 ms
    /// ago.
    #[must_use]
    pub fn stats(&self) -> S::Stats {
        lock(&self.shared.queues).stats
    }

    /// Returns a handle whose [`stop`](StopHandle::stop), called from any thread, stops the server:
    /// [`recv`](Self::recv) returns `None`, and the server takes no more requests. Its clients
    /// make the calls whose requests were not received, and all later calls, at another server.
    /// A server at a TCP address no longer listens, so another server can take the address. Received
    /// requests can still be answered, until the server is dropped.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Waits for a request, and returns the oldest one; returns `None` once the server is stopped.
    /// Several tasks may wait; each request reaches one of them. A future that is dropped has taken
    /// no request, so `recv` may be a branch of `tokio::select!`.
    ///
    /// # Errors
    /// The server cannot continue. One of the waiting tasks gets the error, the other tasks get
    /// `None`.
    pub async fn recv(&self) -> Result<Option<ServerRequest<S>>, S::Error> {
        poll_fn(|task| self.poll_recv(task)).await
    }

    /// Polls for the result of [`recv`](Self::recv).
    pub(crate) fn poll_recv(
        &self,
        task: &mut Context<'_>,
    ) -> Poll<Result<Option<ServerRequest<S>>, S::Error>> {
        let mut queues = lock(&self.shared.queues);
        let is_stopped = self.stop.is_stopped();
        let next = if is_stopped {
            None
        } else {
            queues.requests.pop_front()
        };
        if let Some(arrival) = next {
            let was_full = queues.buffered > self.shared.max_buffered;
            queues.buffered -= arrival.data.len();
            if was_full && queues.buffered <= self.shared.max_buffered {
                self.shared.waker.wake_by_ref();
            }
            return Poll::Ready(Ok(Some(ServerRequest {
                arrival,
                shared: Some(Arc::clone(&self.shared)),
            })));
        }
        if is_stopped || queues.is_over {
            return Poll::Ready(queues.error.take().map_or(Ok(None), Err));
        }
        if !queues
            .wakers
            .iter()
            .any(|waker| waker.will_wake(task.waker()))
        {
            queues.wakers.push(task.waker().clone());
        }
        Poll::Pending
    }

    /// Stops the server as its [`stop_handle`](Self::stop_handle) does, and waits until all
    /// received requests are answered and their answers have arrived. Returns the number of
    /// requests that were not answered within `limit`; they end as
    /// [`ClientError::Dropped`](crate::ClientError::Dropped).
    ///
    /// The server continues to drain if the future is dropped.
    pub async fn drain(&self, limit: Duration) -> usize {
        let (tell, told) = oneshot();
        self.stop.stop();
        self.shared.end_within(limit, Some(tell));
        // Without a number, the thread ended before, or panicked, and has no request.
        told.await.unwrap_or(0)
    }
}

impl<S: Serving> Drop for AsyncServer<S> {
    fn drop(&mut self) {
        self.shared.end_within(Duration::ZERO, None);
        if let Some(thread) = self
            .thread
            .take()
            .filter(|thread| thread.thread().id() != thread::current().id())
        {
            // The result would only report a panic of the thread.
            let _ = thread.join();
        }
    }
}

/// A request, which may be answered at any time, in any order and from any thread. Dropping it
/// without an answer ends the call as [`ClientError::Dropped`](crate::ClientError::Dropped).
///
/// A request that waits for long delays no other request. Until the answer, the client's connection
/// lacks the room that the call uses.
#[must_use = "dropping a request answers it with an error"]
pub struct ServerRequest<S: Serving> {
    arrival: Arrival<S::Peer>,
    /// `None` once the request is answered.
    shared: Option<Arc<Shared<S>>>,
}

impl<S: Serving> fmt::Debug for ServerRequest<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerRequest")
            .field("bytes", &self.arrival.data.len())
            .finish_non_exhaustive()
    }
}

impl<S: Serving> ServerRequest<S> {
    /// Returns the request's bytes.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.arrival.data
    }

    #[cfg(feature = "tower")]
    pub(crate) fn take_data(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.arrival.data)
    }

    /// Returns the client that called.
    #[must_use]
    pub const fn peer(&self) -> S::Peer {
        self.arrival.peer
    }

    /// Returns the end of the caller's time, if this is the request of a method
    /// ([`service!`](crate::service!)), and its caller has a limit. The time is counted from the
    /// arrival of the request, so the caller's own time has ended by then. Other bytes may look
    /// like the header of a method, so call this only if all requests are of methods. For a request
    /// in [parts](crate::parts), call [`Whole::deadline`](crate::parts::Whole::deadline) instead.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        Header::deadline(&self.arrival.data, self.arrival.at)
    }

    /// Returns whether the caller waits for the reply, or did at most 15 ms ago: the server has not
    /// ended, the client is connected, and did not give up this call, by its time limit or by
    /// dropping the future.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| {
            let queues = lock(&shared.queues);
            let watch = queues.watches.get(&self.arrival.number);
            !queues.has_ended && watch.is_none_or(|watch| !watch.is_gone)
        })
    }

    /// Runs `handler` while its reply is wanted: drops the handler and returns `None` about 10 ms
    /// after `deadline`, or after the caller [gave up](Self::is_wanted), or when the server has
    /// ended. The drop of the request returns the room that the call keeps. A caller that was
    /// suspended until then ends as [`ClientError::Dropped`](crate::ClientError::Dropped), and not
    /// as [`TimedOut`](crate::ClientError::TimedOut).
    ///
    /// ```
    /// # use copyrpc_calls::{Serving, ServerRequest};
    /// # async fn run<S: Serving>(request: ServerRequest<S>, answer: impl AsyncFn(&ServerRequest<S>) -> Vec<u8>) {
    /// // `answer` is the `answer_async` of a service.
    /// if let Some(reply) = request.while_wanted(request.deadline(), answer(&request)).await {
    ///     request.reply(reply);
    /// }
    /// # }
    /// ```
    pub async fn while_wanted<T>(
        &self,
        deadline: Option<Instant>,
        handler: impl Future<Output = T>,
    ) -> Option<T> {
        let mut handler = pin!(handler);
        poll_fn(|task| match (handler.as_mut().poll(task), &self.shared) {
            (Poll::Pending, Some(shared)) => {
                let mut queues = lock(&shared.queues);
                let has_ended = queues.has_ended;
                let watch = queues.watches.entry(self.arrival.number).or_default();
                watch.deadline = deadline;
                watch.waker = Some(task.waker().clone());
                if has_ended || watch.is_over(Instant::now()) {
                    Poll::Ready(None)
                } else {
                    Poll::Pending
                }
            }
            (outcome, _) => outcome.map(Some),
        })
        .await
    }

    /// Sends a reply. A client that has disconnected gets none. A reply longer than the client
    /// accepts becomes a [`ClientError::ReplyTooLong`](crate::ClientError::ReplyTooLong).
    pub fn reply(mut self, reply: impl Into<Vec<u8>>) {
        self.answer(Answer::Reply(reply.into()));
    }

    /// Refuses the request.
    pub fn refuse(mut self) {
        self.answer(Answer::Refusal);
    }

    fn answer(&mut self, answer: Answer) {
        if let Some(shared) = self.shared.take() {
            let mut queues = lock(&shared.queues);
            queues.watches.remove(&self.arrival.number);
            queues.answers.push((self.arrival.number, answer));
            let is_first = queues.answers.len() == 1;
            drop(queues);
            // The thread takes all answers at once, so only the first answer has to wake it.
            if is_first {
                shared.waker.wake_by_ref();
            }
        }
    }
}

impl<S: Serving> context::Request for ServerRequest<S> {
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.data())
    }

    fn context(&self) -> context::Context<'_> {
        let client = self.peer();
        context::Context::new()
            .with_client(client.number(), client.address())
            .with_deadline(self.deadline())
            .with_wanted(self)
    }
}

impl<S: Serving> Wanted for ServerRequest<S> {
    fn is_wanted(&self) -> bool {
        self.is_wanted()
    }
}

impl<S: Serving> Drop for ServerRequest<S> {
    fn drop(&mut self) {
        self.answer(Answer::Dropped);
    }
}

/// Runs the thread: passes the server's properties to `tell`, and serves until its end.
fn serve<S: Serving>(
    mut server: S,
    address: S::Address,
    max_buffered: usize,
    tell: Sender<Result<AsyncServer<S>, S::Error>>,
) {
    let (stop, device) = (server.stop_handle(), server.device());
    let shared = Arc::new(Shared {
        queues: Mutex::default(),
        waker: stop.waker().clone(),
        max_buffered,
    });
    // The drop of `over` marks the end, in a panic too.
    let over = Over(&shared);
    if !tell.is_wanted() {
        return;
    }
    tell.send(Ok(AsyncServer {
        shared: Arc::clone(&shared),
        address,
        device,
        stop: stop.clone(),
        thread: None,
    }));
    // The requests that are not answered, by number. A number is not used again, because the
    // request of a client that has disconnected is removed from the map, and a task may answer the
    // request later.
    let mut held = FxHashMap::<u64, S::Token>::default();
    let mut last = 0;
    let mut arrived = Vec::new();
    let mut is_leaving = false;
    let mut unwanted = Vec::new();
    let mut checked = None;
    loop {
        let (answers, ending, mut buffered) = {
            let mut queues = lock(&shared.queues);
            if is_check_due(&mut checked, Instant::now()) {
                (queues.clients, queues.stats) = (server.clients(), server.stats());
                unwanted = queues.watch(&server, &mut held, is_leaving);
                if stop.is_stopping() {
                    stop.forget(|client| server.has(client));
                }
            }
            (
                std::mem::take(&mut queues.answers),
                queues.ending,
                queues.buffered,
            )
        };
        unwanted.drain(..).for_each(Waker::wake);
        for (number, answer) in answers {
            if let Some(request) = held.remove(&number) {
                server.answer(request, answer);
            }
        }
        let is_over = ending.is_some_and(|(since, limit)| since.elapsed() >= limit);
        if (is_over || stop.is_stopped()) && !is_leaving {
            is_leaving = true;
            shared
                .end(None)
                .iter()
                .filter_map(|number| held.remove(number))
                .for_each(|request| server.answer(request, Answer::SentBack));
            server.close();
        }
        if is_over || is_leaving && ending.is_some() && held.is_empty() {
            break;
        }
        let mut now = None;
        while !is_leaving && buffered <= shared.max_buffered {
            let Some((request, data, peer)) = server.recv() else {
                break;
            };
            buffered += data.len();
            last += 1;
            arrived.push(Arrival {
                number: last,
                data,
                peer,
                at: *now.get_or_insert_with(Instant::now),
            });
            held.insert(last, request);
        }
        if !arrived.is_empty() {
            shared.offer(&mut arrived);
        }
        // The receivers may need this core, and more answers gather meanwhile.
        if yield_core() {
            server.hurry();
        }
        if let Err(error) = server.step(buffered > shared.max_buffered) {
            shared.end(Some(error));
            break;
        }
    }
    let unanswered = held.len();
    drop(held);
    lock(&shared.queues).stats = server.stats();
    // The drop waits until the answers have arrived.
    drop(server);
    let told = std::mem::take(&mut lock(&shared.queues).tell_end);
    told.into_iter().for_each(|tell| tell.send(unanswered));
    drop(over);
}

/// Returns whether a check is due. If it is, stores `now` in `checked` as the time of the check.
fn is_check_due(checked: &mut Option<Instant>, now: Instant) -> bool {
    let is_due = checked.is_none_or(|last| now.saturating_duration_since(last) >= CHECK_INTERVAL);
    if is_due {
        *checked = Some(now);
    }
    is_due
}

impl<S: Serving> Queues<S> {
    /// Drops the requests whose callers do not wait any more, if no task has received them, or if
    /// the server `is_leaving`. Otherwise the task of a received request drops it. The room of the
    /// call is not free before that drop, so a client never has more tasks at the server than
    /// calls. Returns the wakers of the tasks whose replies are not wanted any more.
    fn watch(
        &mut self,
        server: &S,
        held: &mut FxHashMap<u64, S::Token>,
        is_leaving: bool,
    ) -> Vec<Waker> {
        let Self {
            requests,
            buffered,
            answers,
            watches,
            ..
        } = self;
        let mut gone: FxHashSet<u64> = held
            .iter()
            .filter(|(_, request)| !server.is_wanted(request))
            .map(|(number, _)| *number)
            .collect();
        if !gone.is_empty() {
            if is_leaving {
                held.retain(|number, _| !gone.contains(number));
            }
            requests.retain(|arrival| {
                let is_gone = gone.remove(&arrival.number);
                if is_gone {
                    *buffered -= arrival.data.len();
                    held.remove(&arrival.number);
                }
                !is_gone
            });
            // An answer in `answers` has removed its request from `watches`, so the request is not
            // added again.
            answers
                .iter()
                .for_each(|(number, _)| _ = gone.remove(number));
            gone.into_iter()
                .for_each(|number| watches.entry(number).or_default().is_gone = true);
        }
        let now = Instant::now();
        watches
            .values_mut()
            .filter(|watch| watch.is_over(now))
            .filter_map(|watch| watch.waker.take())
            .collect()
    }
}

impl<S: Serving> Shared<S> {
    /// Makes the thread end when all received requests are answered, or after `limit`. The end of
    /// the thread is reported to `tell`.
    fn end_within(&self, limit: Duration, tell: Option<Sender<usize>>) {
        let mut queues = lock(&self.queues);
        queues.ending = Some((Instant::now(), limit));
        let has_ended = queues.has_ended;
        queues.tell_end.extend(tell.filter(|_| !has_ended));
        drop(queues);
        self.waker.wake_by_ref();
    }

    fn offer(&self, requests: &mut Vec<Arrival<S::Peer>>) {
        let wakers = {
            let mut queues = lock(&self.queues);
            queues.buffered += requests
                .iter()
                .map(|request| request.data.len())
                .sum::<usize>();
            queues.requests.extend(requests.drain(..));
            std::mem::take(&mut queues.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Marks that there are no more requests. Returns the numbers of the requests that were not
    /// received.
    fn end(&self, error: Option<S::Error>) -> Vec<u64> {
        let (requests, wakers) = {
            let mut queues = lock(&self.queues);
            queues.is_over = true;
            queues.buffered = 0;
            queues.error = queues.error.take().or(error);
            (
                std::mem::take(&mut queues.requests),
                std::mem::take(&mut queues.wakers),
            )
        };
        wakers.into_iter().for_each(Waker::wake);
        requests.into_iter().map(|request| request.number).collect()
    }
}

/// A guard whose drop marks that the thread serves no more requests, and wakes the tasks whose
/// requests it has ended.
struct Over<'a, S: Serving>(&'a Shared<S>);

impl<S: Serving> Drop for Over<'_, S> {
    fn drop(&mut self) {
        let panicked = || S::no_thread(io::Error::other("it panicked"));
        self.0.end(thread::panicking().then(panicked));
        let mut queues = lock(&self.0.queues);
        queues.has_ended = true;
        let unanswered = std::mem::take(&mut queues.tell_end);
        let watches = std::mem::take(&mut queues.watches);
        drop(queues);
        drop(unanswered);
        let wakers = watches.into_values().filter_map(|watch| watch.waker);
        wakers.for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With 10,000 long polls, 2,000 wake-ups in a second would be 20 million checks of requests,
    /// under the lock of all tasks.
    #[test]
    fn a_server_that_wakes_often_checks_all_held_requests_only_now_and_then() {
        let (mut checked, start) = (None, Instant::now());
        let checks = (0..2_000)
            .filter(|nth| is_check_due(&mut checked, start + Duration::from_micros(500) * *nth))
            .count();
        assert_eq!(checks, 200);
    }
}
