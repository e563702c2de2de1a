//! Calls on their way to the thread that owns a connection: any number of threads post them, and the thread takes them in the order in which
//! they were posted.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::oneshot::lock;

/// A call that waits in a [`Posted`].
pub trait Job {
    /// Returns when the call ends without a reply, or `None` if it waits without limit.
    fn end(&self) -> Option<Instant>;

    /// Tells the caller that the call has no time left.
    fn end_late(self);
}

/// Returns the time until the call ends.
fn left(job: &impl Job) -> Duration {
    job.end().map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
}

struct Mailbox<J> {
    jobs: Vec<J>,
    given_up: Vec<u64>,
    /// The number of the last job.
    last: u64,
    /// Whether no poster is left, or the thread has ended.
    is_over: bool,
    /// Whether the thread connects again, which may take long.
    is_away: bool,
}

/// The posting side. Its drop ends the thread and waits for it, except while the thread connects again.
pub struct Poster<J> {
    mailbox: Arc<Mutex<Mailbox<J>>>,
    /// Ends the sleep of the thread.
    waker: Waker,
    thread: OnceLock<JoinHandle<()>>,
}

/// The thread's side: the jobs that it has taken and not sent yet. Its drop drops every job, and each later one as it is posted.
pub struct Posted<J> {
    mailbox: Arc<Mutex<Mailbox<J>>>,
    /// The jobs that wait, the oldest first.
    pub waiting: VecDeque<J>,
    /// The numbers of the jobs that were given up since they were last drained.
    pub given_up: Vec<u64>,
}

/// Makes both sides. `waker` ends the thread's sleep.
#[must_use]
pub fn posting<J: Job>(waker: Waker) -> (Poster<J>, Posted<J>) {
    let mailbox = Mailbox { jobs: Vec::new(), given_up: Vec::new(), last: 0, is_over: false, is_away: false };
    let mailbox = Arc::new(Mutex::new(mailbox));
    let posted = Posted { mailbox: Arc::clone(&mailbox), waiting: VecDeque::new(), given_up: Vec::new() };
    (Poster { mailbox, waker, thread: OnceLock::new() }, posted)
}

impl<J> Poster<J> {
    /// Posts the job that `job` makes of its number, under the lock of all posters, and wakes the thread. Drops the job if the thread has ended. Returns the number.
    pub fn post(&self, job: impl FnOnce(u64) -> J) -> u64 {
        let (number, refused) = {
            let mut mailbox = lock(&self.mailbox);
            mailbox.last += 1;
            let number = mailbox.last;
            let job = job(number);
            if mailbox.is_over {
                (number, Some(job))
            } else {
                mailbox.jobs.push(job);
                (number, None)
            }
        };
        // Outside the lock: the drop of a job wakes its caller, which may post at once.
        drop(refused);
        self.waker.wake_by_ref();
        number
    }

    /// Tells the thread that nobody waits for the job of this number any more.
    pub fn give_up(&self, number: u64) {
        lock(&self.mailbox).given_up.push(number);
        self.waker.wake_by_ref();
    }

    /// Sets the thread that the drop waits for.
    pub fn set_thread(&self, thread: JoinHandle<()>) {
        // It is set once, by the function that started it.
        let _ = self.thread.set(thread);
    }
}

impl<J> Drop for Poster<J> {
    fn drop(&mut self) {
        let is_away = {
            let mut mailbox = lock(&self.mailbox);
            mailbox.is_over = true;
            mailbox.is_away
        };
        self.waker.wake_by_ref();
        let thread = self.thread.take().filter(|thread| !is_away && thread.thread().id() != thread::current().id());
        if let Some(thread) = thread {
            // A panic of the thread has nobody else to go to.
            let _ = thread.join();
        }
    }
}

impl<J: Job> Posted<J> {
    /// Moves the jobs and the given up numbers of the posters to this side. Returns whether a poster is left.
    pub fn take(&mut self) -> bool {
        let mut mailbox = lock(&self.mailbox);
        self.waiting.extend(mailbox.jobs.drain(..));
        self.given_up.append(&mut mailbox.given_up);
        !mailbox.is_over
    }

    /// Returns the time until the first waiting job ends, or `None` if none does.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        self.waiting.iter().map(left).min().filter(|left| *left != Duration::MAX)
    }

    /// Ends the waiting jobs that have no time left.
    pub fn end_late(&mut self) {
        if self.waiting.iter().any(|job| left(job).is_zero()) {
            let (late, in_time) = self.waiting.drain(..).partition(|job| left(job).is_zero());
            self.waiting = in_time;
            let late: VecDeque<J> = late;
            late.into_iter().for_each(Job::end_late);
        }
    }

    /// Connects again for the waiting jobs, for `patience` at most. `connect` makes one attempt of a length, and gives it up when the function
    /// that it is lent returns `false`. Each job that has no time left meanwhile ends at its time.
    ///
    /// # Errors
    /// The error of the last attempt. The jobs that still wait are the caller's to end.
    pub fn reconnect<E>(
        &mut self,
        patience: Duration,
        mut connect: impl FnMut(Duration, &mut dyn FnMut() -> bool) -> Result<(), E>,
    ) -> Result<(), E> {
        lock(&self.mailbox).is_away = true;
        let start = Instant::now();
        let outcome = loop {
            let whole = patience.saturating_sub(start.elapsed());
            // An attempt ends with the first job, as a server may never say anything.
            let attempt = self.left().map_or(whole, |first| first.min(whole));
            let began = Instant::now();
            let connected = connect(attempt, &mut || {
                let has_posters = self.take();
                self.end_late();
                has_posters && !self.waiting.is_empty()
            });
            if connected.is_ok() {
                break connected;
            }
            self.end_late();
            // There is another attempt only if this one ended with a job, and others still have time.
            if self.waiting.is_empty() || attempt == whole || began.elapsed() < attempt {
                break connected;
            }
        };
        lock(&self.mailbox).is_away = false;
        outcome
    }
}

impl<J> Drop for Posted<J> {
    fn drop(&mut self) {
        let jobs = {
            let mut mailbox = lock(&self.mailbox);
            mailbox.is_over = true;
            std::mem::take(&mut mailbox.jobs)
        };
        // Outside the lock: the drop of a job wakes its caller, which may drop another at once.
        drop(jobs);
    }
}

impl<J> fmt::Debug for Poster<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poster").field("has_thread", &self.thread.get().is_some()).finish_non_exhaustive()
    }
}

impl<J> fmt::Debug for Posted<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Posted").field("waiting", &self.waiting.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    /// Tells its end: late, or dropped.
    struct Call {
        number: u64,
        end: Option<Instant>,
        told: Sender<(u64, bool)>,
        is_late: bool,
    }

    impl Job for Call {
        fn end(&self) -> Option<Instant> {
            self.end
        }

        fn end_late(mut self) {
            self.is_late = true;
        }
    }

    impl Drop for Call {
        fn drop(&mut self) {
            let _ = self.told.send((self.number, self.is_late));
        }
    }

    struct Pair {
        poster: Poster<Call>,
        posted: Posted<Call>,
        told: Receiver<(u64, bool)>,
        tell: Sender<(u64, bool)>,
    }

    fn pair() -> Pair {
        let ((poster, posted), (tell, told)) = (posting(Waker::noop().clone()), channel());
        Pair { poster, posted, told, tell }
    }

    fn post(poster: &Poster<Call>, tell: &Sender<(u64, bool)>, time: Option<Duration>) -> u64 {
        let end = time.and_then(|time| Instant::now().checked_add(time));
        poster.post(|number| Call { number, end, told: tell.clone(), is_late: false })
    }

    #[test]
    fn jobs_are_taken_in_order_with_what_was_given_up() {
        let Pair { poster, mut posted, tell, told } = pair();
        assert_eq!([post(&poster, &tell, None), post(&poster, &tell, Some(LONG))], [1, 2]);
        poster.give_up(1);
        assert!(posted.take());
        assert_eq!(posted.waiting.iter().map(|job| job.number).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(posted.given_up, [1]);
        assert!(posted.left().is_some_and(|left| left > LONG / 2 && left <= LONG));
        posted.waiting.pop_back();
        assert_eq!(posted.left(), None, "the other has no end");
        drop(poster);
        assert!(!posted.take());
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(2, false)]);
    }

    #[test]
    fn only_late_jobs_end() {
        let Pair { poster, mut posted, tell, told } = pair();
        for time in [Some(Duration::ZERO), None, Some(Duration::ZERO), Some(LONG)] {
            post(&poster, &tell, time);
        }
        posted.take();
        posted.end_late();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, true), (3, true)]);
        assert_eq!(posted.waiting.iter().map(|job| job.number).collect::<Vec<_>>(), [2, 4]);
    }

    #[test]
    fn nobody_posts_to_a_thread_that_has_ended() {
        let Pair { poster, posted, tell, told } = pair();
        post(&poster, &tell, None);
        drop(posted);
        post(&poster, &tell, None);
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, false), (2, false)]);
    }

    #[test]
    fn attempts_end_with_the_first_job_until_one_succeeds() {
        let Pair { poster, mut posted, tell, told } = pair();
        post(&poster, &tell, Some(SHORT));
        post(&poster, &tell, Some(LONG));
        posted.take();
        let mut attempts = Vec::new();
        let outcome = posted.reconnect(LONG, |attempt, is_wanted| {
            attempts.push(attempt);
            if attempts.len() > 1 {
                return Ok(());
            }
            assert!(is_wanted());
            // One that comes meanwhile is kept.
            post(&poster, &tell, None);
            thread::sleep(attempt + Duration::from_millis(1));
            assert!(is_wanted());
            Err("silent")
        });
        assert_eq!(outcome, Ok(()));
        assert!(attempts[0] <= SHORT && attempts[1] > LONG / 2, "{attempts:?}");
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, true)]);
        assert_eq!(posted.waiting.iter().map(|job| job.number).collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn an_attempt_that_fails_early_is_the_last() {
        let Pair { poster, mut posted, tell, .. } = pair();
        post(&poster, &tell, Some(LONG));
        posted.take();
        let mut attempts = 0;
        let outcome = posted.reconnect(LONG * 2, |_, _| {
            attempts += 1;
            Err::<(), _>("refused")
        });
        assert_eq!((outcome, attempts, posted.waiting.len()), (Err("refused"), 1, 1));
    }

    #[test]
    fn an_attempt_is_unwanted_without_jobs_and_without_posters() {
        let Pair { poster, mut posted, tell, .. } = pair();
        post(&poster, &tell, Some(SHORT));
        posted.take();
        let outcome = posted.reconnect(LONG, |attempt, is_wanted| {
            thread::sleep(attempt + Duration::from_millis(1));
            assert!(!is_wanted(), "the only job is late");
            Err::<(), _>("silent")
        });
        assert_eq!((outcome, posted.waiting.len()), (Err("silent"), 0));
        post(&poster, &tell, None);
        drop(poster);
        let outcome = posted.reconnect(LONG, |_, is_wanted| {
            assert!(!is_wanted(), "the last poster is gone");
            Err::<(), _>("given up")
        });
        assert_eq!(outcome, Err("given up"));
    }

    #[test]
    fn the_last_poster_waits_for_the_thread_but_not_while_it_is_away() {
        let Pair { poster, mut posted, tell, .. } = pair();
        let (tell_end, told_end) = channel();
        poster.set_thread(thread::spawn(move || {
            while posted.take() {
                thread::yield_now();
            }
            let _ = tell_end.send(());
        }));
        drop(poster);
        assert_eq!(told_end.try_recv(), Ok(()), "the drop has waited");

        let Pair { poster, mut posted, .. } = pair();
        post(&poster, &tell, None);
        let ((tell_away, told_away), (let_go, may_go)) = (channel(), channel::<()>());
        poster.set_thread(thread::spawn(move || {
            let _ = posted.reconnect(LONG, |_, _| {
                let _ = tell_away.send(());
                may_go.recv().map_err(|_| ())
            });
        }));
        told_away.recv().unwrap();
        drop(poster);
        let_go.send(()).unwrap();
    }
}
