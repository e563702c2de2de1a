//! Calls as futures: any number of threads make them, and one thread, which has the connection,
//! sends them.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::Patience;
use crate::oneshot::{Receiver, Sender, lock, oneshot};
use crate::posting::{self, Posted, Poster, posting};

/// Turns after which the thread wakes the tasks that another one should have woken. They take some
/// microseconds.
const TURNS_TO_WAKE: u32 = 64;

/// Calls that have ended, by number.
pub type Ended<P, E> = Vec<(u64, Result<P, E>)>;

/// The error of a call.
pub trait CallError: fmt::Display + Sized {
    /// Returns the error of a call whose time ended before it was sent.
    fn not_sent() -> Self;

    /// Returns the error of a call whose thread has ended.
    fn closed() -> Self;
}

/// The reason why a connection does not take a call now.
#[derive(Debug)]
pub enum Refusal<E> {
    /// The connection has no room. The call waits.
    NoRoom,
    /// The connection has ended, or is to be replaced. The call waits for the next one.
    Ended,
    /// The call ends.
    Failed(E),
}

/// A connection to a server. It belongs to one thread.
pub trait Connection {
    /// The request of a call.
    type Request;
    /// The reply.
    type Reply;
    /// The error of a call.
    type Error: CallError;
    /// The name of a call under way, to cancel it.
    type Call;

    /// Makes the call of this number. It is sent with the next [`flush`](Self::flush). `left` is
    /// the time until its deadline; `None`: no deadline.
    ///
    /// # Errors
    /// [`Refusal`]; the call was not made.
    fn call(
        &mut self,
        number: u64,
        request: &Self::Request,
        left: Option<Duration>,
    ) -> Result<Self::Call, Refusal<Self::Error>>;

    /// Sends the calls that were made.
    fn flush(&mut self);

    /// Appends the calls that have ended, by number. Returns whether anything moved.
    fn poll(&mut self, ended: &mut Ended<Self::Reply, Self::Error>) -> bool;

    /// Returns whether a call with this error is made again: no handler has seen it. `is_second` is
    /// set if that was its second time.
    fn repeats(error: &Self::Error, is_second: bool) -> bool;

    /// Returns the error of a call whose time ended while it waited for room.
    fn late(&mut self) -> Self::Error;

    /// Cancels a call: its end does not matter any more.
    fn cancel(&mut self, call: Self::Call);

    /// Sleeps until there is something to poll for or the waker is called, at most for `limit`.
    fn sleep(&mut self, limit: Option<Duration>);

    /// Returns the waker that ends the sleep. It is another one after a new connection.
    fn waker(&self) -> Waker;

    /// Makes a new connection, on which later calls are made. Tries for `within`, and as long as
    /// `goes_on` returns true, which takes the calls that have ended meanwhile over the connection
    /// before.
    ///
    /// # Errors
    /// The error of a call that waits for the connection.
    fn reconnect(
        &mut self,
        within: Duration,
        goes_on: &mut GoesOn<'_, Self>,
    ) -> Result<(), Self::Error>;

    /// Returns the maximum time for a new connection.
    fn connect_timeout(&self) -> Duration;

    /// Returns the error of [`reconnect`](Self::reconnect) once more, for a further call that
    /// waited for the connection.
    fn again(&self, error: &Self::Error) -> Self::Error;
}

/// Takes the calls that have ended, and returns whether a connection is still wanted.
pub type GoesOn<'a, C> =
    dyn FnMut(&mut Ended<<C as Connection>::Reply, <C as Connection>::Error>) -> bool + 'a;

/// A call, until it ends.
struct Job<R, P, E> {
    request: R,
    /// End of its time. `None`: no deadline.
    end: Option<Instant>,
    reply: Sender<Result<P, E>>,
    /// The call was made before, and is made again.
    is_second: bool,
}

/// The side of the callers of a connection.
pub type CallsOf<C> =
    Calls<<C as Connection>::Request, <C as Connection>::Reply, <C as Connection>::Error>;

/// The calls that a connection has taken, by number.
type UnderWay<C> = FxHashMap<u64, (<C as Connection>::Call, JobOf<C>)>;

type JobOf<C> = Job<<C as Connection>::Request, <C as Connection>::Reply, <C as Connection>::Error>;

impl<R, P, E: CallError> posting::Job for Job<R, P, E> {
    fn end(&self) -> Option<Instant> {
        self.end
    }

    fn end_late(self) {
        self.reply.send(Err(E::not_sent()));
    }
}

/// The side of the callers: `R` is a request, `P` a reply, `E` the error of a call. The drop of the
/// last clone, and of the last call, ends the thread.
pub struct Calls<R, P, E>(Arc<Poster<Job<R, P, E>>>);

impl<R, P, E> Clone for Calls<R, P, E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<R, P, E> fmt::Debug for Calls<R, P, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<R: Send + 'static, P: Send + 'static, E: CallError + Send + 'static> Calls<R, P, E> {
    /// Starts the thread of this name. `connect` makes the connection there, as long as it
    /// `is_wanted`, and the properties of it that callers share.
    ///
    /// # Errors
    /// The error of `connect`; `no_thread` if there is none.
    pub async fn start<
        C: Connection<Request = R, Reply = P, Error = E>,
        S: Send + 'static,
        F: Send + 'static,
    >(
        name: &str,
        no_thread: impl Fn(io::Error) -> F,
        connect: impl FnOnce(&dyn Fn() -> bool) -> Result<(C, S), F> + Send + 'static,
    ) -> Result<(Self, S), F> {
        let (tell, told) = oneshot();
        let run = move || match connect(&|| tell.is_wanted()) {
            Err(error) => tell.send(Err(error)),
            Ok((connection, shared)) => {
                let (worker, calls) = Worker::new(connection);
                tell.send(Ok((calls, shared)));
                worker.serve();
            }
        };
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(run)
            .map_err(&no_thread)?;
        let (calls, shared): (Self, S) = told
            .await
            .unwrap_or_else(|| Err(no_thread(io::Error::other("it ended at once"))))?;
        calls.0.set_thread(thread);
        Ok((calls, shared))
    }
}

impl<R, P, E> Calls<R, P, E> {
    /// Makes a call with the first poll of the future. Its `timeout` counts from then on; `None`:
    /// no deadline.
    pub fn call(&self, request: R, timeout: Option<Duration>) -> AsyncCall<R, P, E> {
        AsyncCall {
            poster: Arc::clone(&self.0),
            stage: Stage::New(request, timeout),
        }
    }
}

/// The reply to a call of a client whose calls are futures. Dropping it gives the call up.
#[must_use = "a call begins when it is polled"]
pub struct AsyncCall<R, P, E> {
    poster: Arc<Poster<Job<R, P, E>>>,
    stage: Stage<R, P, E>,
}

enum Stage<R, P, E> {
    New(R, Option<Duration>),
    Posted(u64, Receiver<Result<P, E>>),
    Over,
}

impl<R, P, E> fmt::Debug for AsyncCall<R, P, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncCall")
            .field("is_posted", &!matches!(self.stage, Stage::New(..)))
            .finish_non_exhaustive()
    }
}

impl<R: Unpin, P, E: CallError> Future for AsyncCall<R, P, E> {
    type Output = Result<P, E>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Result<P, E>> {
        self.poster.wakes.wake_all();
        let (number, mut receiver) = match std::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Over => return Poll::Ready(Err(E::closed())),
            Stage::Posted(number, receiver) => (number, receiver),
            Stage::New(request, timeout) => {
                let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
                let (reply, receiver) = oneshot();
                (
                    self.poster.post(|_| Job {
                        request,
                        end,
                        reply,
                        is_second: false,
                    }),
                    receiver,
                )
            }
        };
        match Pin::new(&mut receiver).poll(task) {
            Poll::Ready(reply) => Poll::Ready(reply.unwrap_or_else(|| Err(E::closed()))),
            Poll::Pending => {
                self.stage = Stage::Posted(number, receiver);
                Poll::Pending
            }
        }
    }
}

impl<R, P, E> Drop for AsyncCall<R, P, E> {
    fn drop(&mut self) {
        if let Stage::Posted(number, _) = self.stage {
            // It may be the one that was to wake the others.
            self.poster.wakes.wake_all();
            self.poster.give_up(number);
        }
    }
}

/// The waker of the connection in use.
struct Alarm(Mutex<Waker>);

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        lock(&self.0).wake_by_ref();
    }
}

/// The side of the thread. Its drop ends the calls that are left.
pub struct Worker<C: Connection> {
    /// The connection in use.
    pub connection: C,
    /// Its waiting calls are those that the connection has not taken yet.
    posted: Posted<JobOf<C>>,
    under_way: UnderWay<C>,
    /// Calls that have ended; empty between turns.
    ended: Ended<C::Reply, C::Error>,
    /// Their wakers; empty too.
    wakers: Vec<Waker>,
    /// Turns since wakes are due.
    turns_due: u32,
    alarm: Arc<Alarm>,
}

impl<C: Connection> fmt::Debug for Worker<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("under_way", &self.under_way.len())
            .finish_non_exhaustive()
    }
}

impl<C: Connection> Worker<C> {
    /// Makes both sides.
    pub fn new(connection: C) -> (Self, CallsOf<C>) {
        let alarm = Arc::new(Alarm(Mutex::new(connection.waker())));
        let (poster, posted) = posting(Arc::clone(&alarm).into());
        let under_way = FxHashMap::default();
        let ended = Vec::new();
        let wakers = Vec::new();
        (
            Self {
                connection,
                posted,
                under_way,
                ended,
                wakers,
                turns_due: 0,
                alarm,
            },
            Calls(Arc::new(poster)),
        )
    }

    /// Runs until no caller is left.
    pub fn serve(mut self) {
        let mut patience = Patience::new();
        while let Some(moved) = self.turn() {
            // The callers may need this core, and more calls gather meanwhile.
            thread::yield_now();
            if moved {
                patience.reset();
            } else if let Some(start) = patience.idle() {
                self.posted.wakes.wake_all();
                self.connection.sleep(self.posted.left());
                patience.slept(start);
            }
        }
    }

    /// Ends calls, then sends waiting ones as far as there is room. Returns whether anything moved;
    /// `None` if no caller is left.
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
        for number in self.posted.given_up.drain(..) {
            if let Some((call, _)) = self.under_way.remove(&number) {
                self.connection.cancel(call);
            }
        }
        // A connection that has ended since the last turn takes no call.
        let mut moved = self.connection.poll(&mut self.ended);
        for (number, reply) in self.ended.drain(..) {
            self.wakers.extend(end::<C>(
                &mut self.under_way,
                &mut self.posted,
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

    /// Makes the waiting calls that the connection has room for. Returns whether anything happened.
    fn send(&mut self) -> bool {
        let (mut moved, mut now) = (false, None);
        while let Some((number, job)) = self.posted.pop() {
            let left = job
                .end
                .map(|end| end.saturating_duration_since(*now.get_or_insert_with(Instant::now)));
            let outcome = match left {
                Some(Duration::ZERO) => Err(Refusal::Failed(self.connection.late())),
                _ => self.connection.call(number, &job.request, left),
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
                    break;
                }
            }
            moved = true;
        }
        moved
    }

    /// Connects again. Calls of the connection before end meanwhile. If no other connection is
    /// possible, every waiting call ends.
    fn reconnect(&mut self) {
        let Self {
            connection,
            posted,
            under_way,
            alarm,
            ..
        } = self;
        // It may take long.
        posted.wakes.wake_all();
        let connected = posted.reconnect(connection.connect_timeout(), |within, posted| {
            connection.reconnect(within, &mut |ended| {
                ended
                    .drain(..)
                    .filter_map(|(number, reply)| end::<C>(under_way, posted, number, reply))
                    .for_each(Waker::wake);
                posted.is_wanted()
            })
        });
        *lock(&alarm.0) = connection.waker();
        let Err(error) = connected else { return };
        for job in posted.drain() {
            job.reply.send(Err(connection.again(&error)));
        }
    }
}

/// Ends a call that a connection has taken, or makes it wait for the next one. Returns the waker of
/// its task.
#[inline]
fn end<C: Connection>(
    under_way: &mut UnderWay<C>,
    posted: &mut Posted<JobOf<C>>,
    number: u64,
    reply: Result<C::Reply, C::Error>,
) -> Option<Waker> {
    let (_, job) = under_way.remove(&number)?;
    match reply {
        Err(error) if C::repeats(&error, job.is_second) && job.reply.is_wanted() => {
            posted.put_back(
                number,
                Job {
                    is_second: true,
                    ..job
                },
            );
            None
        }
        reply => job.reply.put(reply),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Debug, PartialEq, thiserror::Error)]
    #[error("no")]
    struct No;

    impl CallError for No {
        fn not_sent() -> Self {
            Self
        }

        fn closed() -> Self {
            Self
        }
    }

    /// Answers each call in the poll after it, with the request. The calls of `REFUSED` are refused
    /// first, from the last refusal on.
    #[derive(Default)]
    struct Echo(Ended<u8, No>, Vec<Refusal<No>>);

    const REFUSED: u8 = 3;

    impl Connection for Echo {
        type Request = u8;
        type Reply = u8;
        type Error = No;
        type Call = ();

        fn call(
            &mut self,
            number: u64,
            request: &u8,
            _: Option<Duration>,
        ) -> Result<(), Refusal<No>> {
            if let Some(refusal) = (*request == REFUSED).then(|| self.1.pop()).flatten() {
                return Err(refusal);
            }
            self.0.push((number, Ok(*request)));
            Ok(())
        }

        fn flush(&mut self) {}

        fn poll(&mut self, ended: &mut Ended<u8, No>) -> bool {
            ended.append(&mut self.0);
            false
        }

        fn repeats(_: &No, _: bool) -> bool {
            false
        }

        fn late(&mut self) -> No {
            No
        }

        fn cancel(&mut self, (): ()) {}

        fn sleep(&mut self, _: Option<Duration>) {}

        fn waker(&self) -> Waker {
            Waker::noop().clone()
        }

        fn reconnect(&mut self, _: Duration, _: &mut GoesOn<'_, Self>) -> Result<(), No> {
            Ok(())
        }

        fn connect_timeout(&self) -> Duration {
            Duration::ZERO
        }

        fn again(&self, _: &No) -> No {
            No
        }
    }

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    type Made = (AsyncCall<u8, u8, No>, Arc<Wakes>);

    /// Returns the worker after the turn that takes three replies, with the calls and the wakes of
    /// each.
    fn three() -> (Worker<Echo>, Vec<Made>) {
        let (mut worker, calls) = Worker::new(Echo::default());
        let mut made: Vec<_> = (0..3)
            .map(|request| (calls.call(request, None), Arc::default()))
            .collect();
        assert!(made.iter_mut().all(|call| poll(call).is_pending()));
        assert_eq!((worker.turn(), wakes(&made)), (Some(true), 0));
        assert_eq!((worker.turn(), wakes(&made)), (Some(false), 1));
        (worker, made)
    }

    fn poll((call, wakes): &mut Made) -> Poll<Result<u8, No>> {
        Pin::new(call).poll(&mut Context::from_waker(&Arc::clone(wakes).into()))
    }

    fn wakes(calls: &[Made]) -> usize {
        calls
            .iter()
            .map(|(_, wakes)| wakes.0.load(Ordering::Relaxed))
            .sum()
    }

    /// The turn that takes three replies finds the connection ended for the fourth call.
    #[test]
    fn wakes_that_are_due_do_not_wait_for_a_new_connection() {
        let (mut worker, calls) =
            Worker::new(Echo(Vec::new(), vec![Refusal::Ended, Refusal::NoRoom]));
        let mut made: Vec<_> = (0..=REFUSED)
            .map(|request| (calls.call(request, None), Arc::default()))
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
        assert_eq!(poll(&mut calls[woken]), Poll::Ready(Ok(woken as u8)));
        assert_eq!(
            poll(&mut calls[woken]),
            Poll::Ready(Err(No)),
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
            assert_eq!(poll(call), Poll::Ready(Ok(request)));
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
}
