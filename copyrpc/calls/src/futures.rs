//! Calls as futures: any number of threads make them, and one thread, which has the connection,
//! sends them.

pub(crate) mod further;
mod posting;
mod wakes;

use std::borrow::Borrow;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::connection::{
    Arrival, Connection, Dial, EndOf, Ended, ErrorOf, Facts, Refusal, Repeats,
};
use crate::error::{CallFailure, ClientError, EndReason};
use crate::oneshot::{Receiver, Sender, lock, oneshot};
use crate::{Patience, methods, yield_core};

use self::further::{Coming, Further, IDLE};
use self::posting::{Posted, Poster, posting};

/// Number of turns ([`Worker::turn`]) after which the thread itself wakes the tasks that another
/// thread was to wake. These turns take some microseconds.
const TURNS_TO_WAKE: u32 = 64;

/// Number of turns after which a busy thread publishes its counters.
const TURNS_PER_NEWS: u64 = 1024;

struct Job<C: Connection> {
    kind: C::Kind,
    request: Owned<C>,
    /// End of the call's time; `None`: no deadline.
    end: Option<Instant>,
    reply: Sender<Result<C::Reply, ErrorOf<C>>>,
}

type Owned<C> = <<C as Connection>::Request as ToOwned>::Owned;

/// The calls that a connection has taken, by number.
type UnderWay<C> = FxHashMap<u64, (<C as Connection>::Call, Job<C>)>;

impl<C: Connection> posting::Job for Job<C> {
    fn end(&self) -> Option<Instant> {
        self.end
    }

    fn end_late(self) {
        self.reply.send(Err(ClientError::NotSent));
    }
}

/// A client whose calls are futures, for any executor and from any thread. Clones share the
/// connection, which is closed with the last clone. As many calls are under way as the connection
/// has room for; further calls wait in their order.
///
/// If the oldest waiting call finds no room for 100 ms, because calls wait at the server, the
/// waiting calls go over a further connection, and so do later calls that find no room. The options
/// limit the number of connections. To the server, each connection is a client of its own, with a
/// peer and a place of its own; calls over different connections have no order. A further
/// connection is closed after 10 s without calls, or with the client.
///
/// The number of waiting calls has no limit. A program that may make too many calls bounds them
/// itself, for instance by a semaphore, since only the program knows whether a further call is to
/// wait or to fail.
///
/// A call that was given up, or whose time ended, keeps its room until its handler has ended. While
/// such calls hold all of the room of the last connection, other calls wait, then end as
/// [`ClientError::NoCredit`], and the client connects again for later calls.
///
/// The connection has a thread of its own. The thread sleeps while there is nothing to do; calls
/// and replies wake it. A call after the end of the connection connects again; calls made meanwhile
/// wait for the new connection.
pub struct AsyncClient<C: Connection> {
    poster: Arc<Poster<Job<C>>>,
    timeout: Option<Duration>,
    news: Arc<Mutex<News<C>>>,
}

/// The state that the thread publishes before each sleep and in one of 1,024 turns.
struct News<C: Connection> {
    facts: Facts<C::Stats>,
    /// The device, as of the last connection.
    device: C::Device,
    turns: u64,
    /// The number of the last call that the thread has taken from the callers, if all calls up to it
    /// had ended at that time, and no connection was made for calls that found no room.
    done: Option<u64>,
}

impl<C: Connection> Clone for AsyncClient<C> {
    fn clone(&self) -> Self {
        Self {
            poster: Arc::clone(&self.poster),
            timeout: self.timeout,
            news: Arc::clone(&self.news),
        }
    }
}

impl<C: Connection> fmt::Debug for AsyncClient<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncClient")
            .field("device", &lock(&self.news).device)
            .field("poster", &self.poster)
            .finish_non_exhaustive()
    }
}

impl<C: Connection> AsyncClient<C> {
    /// Connects to the server at `address`. Waits for a server that has not started yet, as long as
    /// `connect_timeout` of the default options: 5 s over copyrpc and scalerpc, not at all over ipc.
    /// The client's thread keeps the address, so a borrowed address has to be made an owned one:
    /// `address.to_owned()`.
    ///
    /// In a function that is generic over `C`, the future is `Send` only with the bound
    /// `C: Dial<A, Options: Sync>`.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub async fn connect<A: Clone + Send + 'static>(address: A) -> Result<Self, C::Error>
    where
        C: Dial<A> + 'static,
    {
        Self::with_options(address, &C::Options::default()).await
    }

    /// Like [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub async fn with_options<A: Clone + Send + 'static>(
        address: A,
        options: &C::Options,
    ) -> Result<Self, C::Error>
    where
        C: Dial<A> + 'static,
    {
        Self::begin(Arc::new(Mutex::new((address, options.clone()))), None).await
    }

    /// Connects. `connections`: the maximum number of connections from this one on; `None`: as in
    /// the options.
    async fn begin<A: Clone + Send + 'static>(
        to: Arc<Mutex<(A, C::Options)>>,
        connections: Option<usize>,
    ) -> Result<Self, C::Error>
    where
        C: Dial<A> + 'static,
    {
        let (tell, told) = oneshot();
        let run = move || {
            let (address, options) = lock(&to).clone();
            match C::dial(address, &options, true, &|| tell.is_wanted()) {
                Err(error) => tell.send(Err(error)),
                Ok(connection) => {
                    let connections = connections.unwrap_or(connection.facts().connections);
                    let (mut worker, client) = Worker::new(connection);
                    if connections > 1 {
                        let connect = move || -> Coming<Self> {
                            let next = Self::begin(Arc::clone(&to), Some(connections - 1));
                            Box::pin(async { next.await.ok() })
                        };
                        worker.further = Further::new(Some(Box::new(connect)));
                    }
                    tell.send(Ok(client));
                    worker.serve();
                }
            }
        };
        let thread = thread::Builder::new()
            .name(C::THREAD.to_owned())
            .spawn(run)
            .map_err(C::no_thread)?;
        let client: Self = told
            .await
            .unwrap_or_else(|| Err(C::no_thread(io::Error::other("it ended at once"))))?;
        client.poster.set_thread(thread);
        Ok(client)
    }

    /// Sends a request with the first poll of the future, and waits for its reply, as long as the
    /// options allow. Dropping the future gives the call up, and informs the server. Calls
    /// reach the server in the order of their first polls, unless a further connection carries some.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&self, request: impl Into<Owned<C>>) -> AsyncCall<C> {
        self.call_for(C::Kind::default(), request.into(), self.timeout)
    }

    /// Like [`call`](Self::call), with the timeout of this call. The timeout counts from the first
    /// poll, and includes the time for a new connection.
    ///
    /// # Errors
    /// The errors of [`Client::call_within`](crate::Client::call_within).
    pub fn call_within(&self, request: impl Into<Owned<C>>, timeout: Duration) -> AsyncCall<C> {
        self.call_for(C::Kind::default(), request.into(), Some(timeout))
    }

    fn call_for(
        &self,
        kind: C::Kind,
        request: Owned<C>,
        timeout: Option<Duration>,
    ) -> AsyncCall<C> {
        AsyncCall {
            poster: Arc::clone(&self.poster),
            stage: Stage::New(kind, request, timeout),
        }
    }

    /// Returns the maximum length of a request in bytes.
    #[must_use]
    pub fn max_request(&self) -> usize {
        lock(&self.news).facts.max_request
    }

    /// Returns the maximum length of a reply in bytes.
    #[must_use]
    pub fn max_reply(&self) -> usize {
        lock(&self.news).facts.max_reply
    }

    /// Returns the counters of the first connection and of the connections that replaced it, as
    /// they were when the thread last slept, or at most 1,024 polls ago. Further connections, made
    /// for calls that found no room, do not count.
    #[must_use]
    pub fn stats(&self) -> C::Stats {
        lock(&self.news).facts.stats
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> C::Device {
        lock(&self.news).device.clone()
    }

    /// Returns the number of polls of the connection, at the time of the counters that
    /// [`stats`](Self::stats) returns.
    #[doc(hidden)]
    #[must_use]
    pub fn polls(&self) -> u64 {
        lock(&self.news).turns
    }
}

impl<C: Connection<Kind = u16>> AsyncClient<C> {
    /// Like [`call`](Self::call), for the handler of the type `rpc_type`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_type(&self, rpc_type: u16, request: impl Into<Owned<C>>) -> AsyncCall<C> {
        self.call_for(rpc_type, request.into(), self.timeout)
    }
}

impl<C: Connection<Request = [u8], Reply = Vec<u8>>> methods::AsyncCaller for AsyncClient<C> {
    type Error = ErrorOf<C>;

    fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    fn call(
        &self,
        request: Vec<u8>,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<Vec<u8>, ErrorOf<C>>> + Send {
        self.call_for(C::Kind::default(), request, timeout)
    }
}

/// The reply to a call of an [`AsyncClient`]. Dropping it gives the call up.
#[must_use = "a call begins when it is polled"]
pub struct AsyncCall<C: Connection> {
    poster: Arc<Poster<Job<C>>>,
    stage: Stage<C>,
}

enum Stage<C: Connection> {
    New(C::Kind, Owned<C>, Option<Duration>),
    Posted(u64, Receiver<Result<C::Reply, ErrorOf<C>>>),
    Over,
}

impl<C: Connection> fmt::Debug for AsyncCall<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncCall")
            .field("is_posted", &!matches!(self.stage, Stage::New(..)))
            .finish_non_exhaustive()
    }
}

impl<C: Connection> Future for AsyncCall<C> {
    type Output = Result<C::Reply, ErrorOf<C>>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        let closed = || Err(ClientError::Closed(C::EndReason::CLOSED_HERE));
        self.poster.wakes.wake_all();
        let (number, mut receiver) = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Over => return Poll::Ready(closed()),
            Stage::Posted(number, receiver) => (number, receiver),
            Stage::New(kind, request, timeout) => {
                let (reply, receiver) = oneshot();
                let job = Job {
                    kind,
                    request,
                    end: timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
                    reply,
                };
                (self.poster.post(|_| job), receiver)
            }
        };
        match Pin::new(&mut receiver).poll(task) {
            Poll::Ready(reply) => Poll::Ready(reply.unwrap_or_else(closed)),
            Poll::Pending => {
                self.stage = Stage::Posted(number, receiver);
                Poll::Pending
            }
        }
    }
}

impl<C: Connection> Drop for AsyncCall<C> {
    fn drop(&mut self) {
        if let Stage::Posted(number, _) = self.stage {
            // A further connection, which does not know the number, checks whether the call has a
            // receiver, so the receiver is dropped before.
            self.stage = Stage::Over;
            // This call may have been chosen to wake the other waiting calls.
            self.poster.wakes.wake_all();
            self.poster.give_up(number);
        }
    }
}

struct Alarm(Mutex<Waker>);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        lock(&self.0).wake_by_ref();
    }
}

/// The thread's side of an [`AsyncClient`]. The drop of the worker ends the calls that are left.
pub struct Worker<C: Connection> {
    /// The connection in use.
    pub connection: C,
    /// The posted calls that the connection has not taken yet.
    posted: Posted<Job<C>>,
    further: Further<AsyncClient<C>>,
    under_way: UnderWay<C>,
    unsent: Unsent,
    /// Calls that have ended; empty between turns.
    ended: Ended<C>,
    /// Wakers of the ended calls; empty between turns.
    wakers: Vec<Waker>,
    /// Number of successive turns in which wakes were due.
    turns_due: u32,
    turns: u64,
    alarm: Arc<Alarm>,
    news: Arc<Mutex<News<C>>>,
}

impl<C: Connection> fmt::Debug for Worker<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("under_way", &self.under_way.len())
            .finish_non_exhaustive()
    }
}

impl<C: Connection + 'static> Worker<C> {
    /// Makes the thread's side and a client.
    pub fn new(connection: C) -> (Self, AsyncClient<C>) {
        let alarm = Arc::new(Alarm(Mutex::new(connection.waker())));
        let (poster, posted) = posting(Arc::clone(&alarm).into());
        let facts = connection.facts();
        let news = News {
            facts,
            device: connection.device(),
            turns: 0,
            done: None,
        };
        let news = Arc::new(Mutex::new(news));
        let worker = Self {
            connection,
            posted,
            further: Further::new(None),
            under_way: FxHashMap::default(),
            unsent: Unsent {
                patience: facts.connect_timeout,
                calls: FxHashMap::default(),
            },
            ended: Vec::new(),
            wakers: Vec::new(),
            turns_due: 0,
            turns: 0,
            alarm,
            news: Arc::clone(&news),
        };
        let client = AsyncClient {
            poster: Arc::new(poster),
            timeout: facts.timeout,
            news,
        };
        (worker, client)
    }

    /// Runs until no caller is left.
    pub fn serve(mut self) {
        let mut patience = Patience::new();
        while let Some(moved) = self.turn() {
            self.turns += 1;
            if self.turns % TURNS_PER_NEWS == 0 {
                self.publish();
            }
            // The callers may need this core, and more calls gather meanwhile.
            if yield_core() {
                patience.exhaust();
            }
            if moved {
                patience.reset();
            } else if let Some(start) = patience.idle() {
                self.posted.wakes.wake_all();
                self.publish();
                let stuck = self.further.left().filter(|_| self.posted.len() > 0);
                let idle = self.further.client().map(|_| IDLE);
                let limit = [self.posted.left(), stuck, idle]
                    .into_iter()
                    .flatten()
                    .min();
                self.connection.sleep(limit);
                patience.slept(start);
            }
        }
    }

    fn publish(&mut self) {
        if self.further.is_coming() {
            let waker = Arc::clone(&self.alarm).into();
            self.further.arrive(Instant::now(), &waker);
        }
        let is_done = self.under_way.is_empty() && self.posted.len() == 0;
        let mut news = lock(&self.news);
        news.facts = self.connection.facts();
        news.turns = self.turns;
        news.done = (is_done && self.further.client().is_none()).then(|| self.posted.last());
        drop(news);
        if self.further.client().is_some() {
            self.close_idle();
        }
    }

    /// Closes the next connection if it had no calls for a while, in a thread of its own, as the
    /// client's drop waits for the connection.
    #[cold]
    fn close_idle(&mut self) {
        let is_idle =
            |client: &AsyncClient<C>| lock(&client.news).done == Some(client.poster.last());
        if let Some(client) = self.further.take_idle(Instant::now(), is_idle) {
            // If no thread can be started, the client is dropped here.
            let _ = thread::Builder::new().spawn(|| drop(client));
        }
    }

    /// Ends calls, then sends waiting calls as far as there is room. Returns whether there was
    /// anything to do; `None` if no caller is left.
    pub fn turn(&mut self) -> Option<bool> {
        if !self.posted.take() {
            return None;
        }
        self.turns_due = if self.posted.wakes.are_due() {
            self.turns_due + 1
        } else {
            0
        };
        if self.turns_due == TURNS_TO_WAKE {
            self.posted.wakes.wake_all();
        }
        if !self.posted.given_up.is_empty() {
            let cancel = &mut |call| self.connection.cancel(call);
            give_up::<C>(&mut self.posted, &self.further, &mut self.under_way, cancel);
        }
        // The poll comes before the sends, so that a connection that has ended since the last turn
        // takes no call.
        let ended = &mut self.ended;
        let mut moved = self
            .connection
            .poll(|number, reply| ended.push((number, reply.map(Arrival::into_reply))));
        for (number, reply) in self.ended.drain(..) {
            self.wakers.extend(end::<C>(
                &mut self.under_way,
                &mut self.posted,
                &mut self.unsent,
                number,
                reply,
            ));
        }
        if !self.wakers.is_empty() {
            self.posted.wakes.wake_one_of(&mut self.wakers);
        }
        if self.send() {
            moved = true;
            self.connection.flush();
        }
        Some(moved)
    }

    /// Makes the waiting calls that the connection has room for. Returns whether a call was made or
    /// has ended, or the connection was replaced.
    fn send(&mut self) -> bool {
        let (mut moved, mut now) = (false, None);
        while let Some((number, job)) = self.posted.pop() {
            let left = job
                .end
                .map(|end| end.saturating_duration_since(*now.get_or_insert_with(Instant::now)));
            let outcome = match left {
                Some(Duration::ZERO) => Err(Refusal::Failed(self.connection.late())),
                _ => self
                    .connection
                    .call(number, job.kind, job.request.borrow(), left),
            };
            match outcome {
                Ok(call) => drop(self.under_way.insert(number, (call, job))),
                Err(Refusal::Failed(error)) => job.reply.send(Err(error)),
                Err(Refusal::Ended) => {
                    self.posted.put_back(number, job);
                    self.reconnect();
                    return true;
                }
                Err(Refusal::NoRoom) => {
                    self.posted.put_back(number, job);
                    while let Some(late) = self.posted.pop_late() {
                        late.reply.send(Err(self.connection.late()));
                    }
                    self.pass_on(number);
                    break;
                }
            }
            moved = true;
        }
        moved
    }

    /// Passes the waiting calls, which found no room, to the next connection, once there is one.
    /// `oldest` is the number of the oldest call.
    #[cold]
    fn pass_on(&mut self, oldest: u64) {
        let waker = Arc::clone(&self.alarm).into();
        let client = self.further.for_stuck(oldest, Instant::now(), &waker);
        if let Some(client) = client {
            for job in self.posted.drain() {
                client.poster.post(|_| job);
            }
        }
    }

    /// Connects again. Meanwhile, the calls of the previous connection end. If no other connection
    /// is possible, every waiting call ends.
    fn reconnect(&mut self) {
        let Self {
            connection,
            posted,
            further,
            under_way,
            alarm,
            unsent,
            ..
        } = self;
        // The new connection may take long, so no wake waits for it.
        posted.wakes.wake_all();
        let connected = posted.reconnect(unsent.patience, |within, posted| {
            connection.reconnect(within, &mut |ended, cancel| {
                ended
                    .drain(..)
                    .filter_map(|(number, reply)| {
                        end::<C>(under_way, posted, unsent, number, reply)
                    })
                    .for_each(Waker::wake);
                let is_wanted = posted.is_wanted();
                give_up::<C>(posted, further, under_way, cancel);
                is_wanted
            })
        });
        *lock(&alarm.0) = connection.waker();
        if let Err(error) = connected {
            for job in posted.drain() {
                job.reply.send(Err(error.again()));
            }
        }
        lock(&self.news).device = connection.device();
        self.publish();
    }
}

/// Cancels the calls under way that were given up. If the numbers of some calls are not known,
/// because they were passed on, drops the calls without a caller on this and the next connections.
#[cold]
fn give_up<C: Connection>(
    posted: &mut Posted<Job<C>>,
    further: &Further<AsyncClient<C>>,
    under_way: &mut UnderWay<C>,
    cancel: &mut dyn FnMut(C::Call),
) {
    let mut is_elsewhere = false;
    for number in posted.given_up.drain(..) {
        if let Some((call, _)) = under_way.remove(&number) {
            cancel(call);
        } else {
            is_elsewhere |= number == posting::SOME || further.client().is_some();
        }
    }
    if !is_elsewhere {
        return;
    }
    under_way.retain(|_, (call, job)| {
        let is_wanted = job.reply.is_wanted();
        if !is_wanted {
            cancel(*call);
        }
        is_wanted
    });
    posted.drop_unwanted(|job| job.reply.is_wanted());
    if let Some(client) = further.client() {
        client.poster.give_up(posting::SOME);
    }
}

/// The calls that no handler got, and that were made again.
struct Unsent {
    patience: Duration,
    /// Repeats of each such call by its number. Some of these calls have ended since.
    calls: FxHashMap<u64, Repeats>,
}

impl Unsent {
    /// Returns whether this call, which no handler got, is made once more.
    #[cold]
    fn go_on<C: Connection>(
        &mut self,
        under_way: &UnderWay<C>,
        posted: &Posted<Job<C>>,
        number: u64,
    ) -> bool {
        if self.calls.len() > 64 + under_way.len() + posted.len() {
            self.calls
                .retain(|call, _| under_way.contains_key(call) || posted.waits(*call));
        }
        self.calls.entry(number).or_default().go_on(self.patience)
    }
}

/// Ends a call that a connection has taken, or makes it wait for the next connection. Returns the
/// waker of the call's task.
#[inline]
fn end<C: Connection>(
    under_way: &mut UnderWay<C>,
    posted: &mut Posted<Job<C>>,
    unsent: &mut Unsent,
    number: u64,
    reply: EndOf<C>,
) -> Option<Waker> {
    let (_, job) = under_way.remove(&number)?;
    match reply {
        // The server was closing, and no handler got the call. There may be another server by now.
        Err(ClientError::NotSent)
            if job.reply.is_wanted() && unsent.go_on::<C>(under_way, posted, number) =>
        {
            posted.put_back(number, job);
            None
        }
        reply => job.reply.put(reply.map_err(CallFailure::of_client)),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::convert::Infallible;
    use std::future::poll_fn;
    use std::rc::Rc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{GoesOn, SessionEnd};

    type End = ClientError<Infallible, SessionEnd>;

    /// Answers each call with its request, in the next poll. Each attempt of a `REFUSED` call first
    /// takes the last refusal of the list, until the list is empty; `UNSENT` calls reach no
    /// handler.
    #[derive(Default)]
    struct Echo(Ended<Self>, Vec<Refusal<End>>);

    const REFUSED: u8 = 3;
    const UNSENT: u8 = 9;

    impl Connection for Echo {
        type Kind = ();
        type Request = u8;
        type Reply = Vec<u8>;
        type Arrival<'a> = Vec<u8>;
        type ConnectError = Infallible;
        type EndReason = SessionEnd;
        type Call = ();
        type Stats = ();
        type Device = ();

        fn call(
            &mut self,
            number: u64,
            (): (),
            request: &u8,
            _: Option<Duration>,
        ) -> Result<(), Refusal<End>> {
            if let Some(refusal) = (*request == REFUSED).then(|| self.1.pop()).flatten() {
                return Err(refusal);
            }
            let reply = if *request == UNSENT {
                Err(ClientError::NotSent)
            } else {
                Ok(vec![*request])
            };
            self.0.push((number, reply));
            Ok(())
        }

        fn end_within(&mut self, (): (), _: Duration) {}

        fn flush(&mut self) {}

        fn poll(&mut self, mut on_end: impl FnMut(u64, Result<Vec<u8>, End>)) -> bool {
            for (number, reply) in self.0.drain(..) {
                on_end(number, reply);
            }
            false
        }

        fn late(&mut self) -> End {
            ClientError::NotSent
        }

        fn cancel(&mut self, (): ()) {}

        fn sleep(&mut self, _: Option<Duration>) {}

        fn waker(&self) -> Waker {
            Waker::noop().clone()
        }

        fn reconnect(&mut self, _: Duration, _: &mut GoesOn<'_, Self>) -> Result<(), End> {
            Ok(())
        }

        fn has_ended(&mut self) -> bool {
            false
        }

        fn facts(&self) -> Facts<()> {
            Facts {
                connect_timeout: Duration::ZERO,
                timeout: None,
                connections: 1,
                max_request: 1,
                max_reply: 1,
                stats: (),
            }
        }

        fn device(&self) {}
    }

    impl Dial<()> for Echo {
        type Options = ();
        type Error = Infallible;
        const THREAD: &'static str = "echo";

        fn dial((): (), (): &(), _: bool, _: &dyn Fn() -> bool) -> Result<Self, Infallible> {
            Ok(Self::default())
        }

        fn no_thread(error: io::Error) -> Infallible {
            unreachable!("{error}")
        }
    }

    #[test]
    fn a_call_that_no_handler_gets_is_repeated_for_as_long_as_a_connection_may_take() {
        let mut client = crate::Client::<Echo>::connect(()).unwrap();
        assert_eq!(client.call(&UNSENT), Err(ClientError::NotSent));
        assert_eq!(client.call(&1), Ok(&[1][..]));
        let (mut worker, calls) = Worker::new(Echo::default());
        let mut made = (calls.call(UNSENT), Arc::default());
        for _ in 0..3 {
            assert!(poll(&mut made).is_pending());
            worker.turn();
        }
        assert_eq!(poll(&mut made), Poll::Ready(Err(ClientError::NotSent)));
    }

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    type Made = (AsyncCall<Echo>, Arc<Wakes>);

    /// Returns the worker after the turn that takes three replies, with the three calls and the
    /// number of wakes of each call.
    fn three() -> (Worker<Echo>, Vec<Made>) {
        let (mut worker, calls) = Worker::new(Echo::default());
        let mut made: Vec<_> = (0..3)
            .map(|request| (calls.call(request), Arc::default()))
            .collect();
        assert!(made.iter_mut().all(|call| poll(call).is_pending()));
        assert_eq!((worker.turn(), wakes(&made)), (Some(true), 0));
        assert_eq!((worker.turn(), wakes(&made)), (Some(false), 1));
        (worker, made)
    }

    fn poll((call, wakes): &mut Made) -> Poll<Result<Vec<u8>, End>> {
        Pin::new(call).poll(&mut Context::from_waker(&Arc::clone(wakes).into()))
    }

    fn wakes(calls: &[Made]) -> usize {
        calls
            .iter()
            .map(|(_, wakes)| wakes.0.load(Ordering::Relaxed))
            .sum()
    }

    /// In the turn that takes three replies, the fourth call finds that the connection has ended.
    #[test]
    fn wakes_that_are_due_do_not_wait_for_a_new_connection() {
        let (mut worker, calls) =
            Worker::new(Echo(Vec::new(), vec![Refusal::Ended, Refusal::NoRoom]));
        let mut made: Vec<_> = (0..=REFUSED)
            .map(|request| (calls.call(request), Arc::default()))
            .collect();
        assert!(made.iter_mut().all(|call| poll(call).is_pending()));
        assert_eq!((worker.turn(), wakes(&made)), (Some(true), 0));
        assert_eq!((worker.turn(), wakes(&made)), (Some(true), 3));
        assert!(worker.connection.1.is_empty(), "it was refused twice");
    }

    #[test]
    fn replies_that_come_together_take_one_wake_of_the_thread_and_their_tasks_do_the_rest() {
        let (_worker, mut calls) = three();
        let woken = calls
            .iter()
            .position(|(_, wakes)| wakes.0.load(Ordering::Relaxed) == 1)
            .unwrap();
        assert_eq!(poll(&mut calls[woken]), Poll::Ready(Ok(vec![woken as u8])));
        assert_eq!(
            poll(&mut calls[woken]),
            Poll::Ready(Err(ClientError::Closed(SessionEnd::PeerGone))),
            "it had its end, and waits for no other"
        );
        assert!(
            calls
                .iter()
                .all(|(_, wakes)| wakes.0.load(Ordering::Relaxed) == 1)
        );
        for (request, call) in (0..)
            .zip(&mut calls)
            .filter(|(request, _)| usize::from(*request) != woken)
        {
            assert_eq!(poll(call), Poll::Ready(Ok(vec![request])));
        }
    }

    #[test]
    fn a_call_that_is_given_up_wakes_the_others_and_so_does_the_end_of_the_thread() {
        let (_worker, mut calls) = three();
        let woken = calls
            .iter()
            .position(|(_, wakes)| wakes.0.load(Ordering::Relaxed) == 1)
            .unwrap();
        drop(calls.remove(woken));
        assert_eq!(wakes(&calls), 2);
        let (worker, calls) = three();
        drop(worker);
        assert_eq!(wakes(&calls), 3);
    }

    #[test]
    fn a_task_that_does_not_run_delays_no_other_for_long() {
        let (mut worker, calls) = three();
        assert!((1..TURNS_TO_WAKE).all(|_| worker.turn().is_some() && wakes(&calls) == 1));
        worker.turn();
        assert_eq!(wakes(&calls), 3);
    }

    /// Otherwise nothing would close the connection, which keeps a place at the server.
    #[test]
    fn a_further_connection_is_taken_although_no_call_waits_for_it_any_more() {
        let (mut worker, _calls) = Worker::new(Echo::default());
        let (_next, client) = Worker::new(Echo::default());
        let is_up = Rc::new(Cell::new(false));
        let up = Rc::clone(&is_up);
        let connect = move || -> Coming<AsyncClient<Echo>> {
            let (up, client) = (Rc::clone(&up), client.clone());
            Box::pin(poll_fn(move |_| {
                if up.get() {
                    Poll::Ready(Some(client.clone()))
                } else {
                    Poll::Pending
                }
            }))
        };
        worker.further = Further::new(Some(Box::new(connect)));
        let start = Instant::now();
        for now in [start, start + IDLE] {
            let client = worker.further.for_stuck(1, now, Waker::noop());
            assert!(client.is_none());
        }
        is_up.set(true);
        worker.publish();
        assert!(worker.further.client().is_some());
    }
}
