//! Calls on their way to the thread that owns a connection: any number of threads post them, and
//! the thread takes them in the order in which they were posted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Waker;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::wakes::Wakes;
use crate::oneshot::lock;

/// The number 0, which no job has. [`Poster::give_up`] with this number reports that jobs were
/// given up whose numbers the caller does not know.
pub(crate) const SOME: u64 = 0;

/// A call that waits in a [`Posted`].
pub(crate) trait Job {
    /// Returns the time at which the call ends without a reply; `None` if the call waits without
    /// limit.
    fn end(&self) -> Option<Instant>;

    /// Reports to the caller that the call has no time left.
    fn end_late(self);
}

struct Mailbox<J> {
    jobs: VecDeque<(u64, J)>,
    given_up: Vec<u64>,
    last: u64,
    /// Whether no poster is left, or the thread has ended.
    is_over: bool,
    /// Whether the thread connects again, which may take long.
    is_away: bool,
}

/// The posting side. Its drop ends the thread and waits for it, except while the thread connects
/// again.
pub(crate) struct Poster<J> {
    mailbox: Arc<Mutex<Mailbox<J>>>,
    waker: Waker,
    pub(crate) wakes: Arc<Wakes>,
    thread: OnceLock<JoinHandle<()>>,
}

/// The thread's side: the jobs that it has taken and not sent yet. Its drop drops every job, and
/// later jobs are dropped when they are posted.
pub(crate) struct Posted<J> {
    mailbox: Arc<Mutex<Mailbox<J>>>,
    pub(crate) wakes: Arc<Wakes>,
    /// The jobs that wait, by their numbers: the oldest first. The map does not contain the jobs in
    /// `fresh`.
    waiting: BTreeMap<u64, J>,
    /// The end and the number of each job in `waiting` that has an end.
    ends: BTreeSet<(Instant, u64)>,
    /// The waiting jobs that the last [`take`](Self::take) moved here, each younger than all jobs
    /// in `waiting`. Most of these jobs are sent at once, and need no order by their ends.
    fresh: VecDeque<(u64, J)>,
    /// The number of the last job that was taken.
    last: u64,
    /// The numbers of the jobs that were given up when they did not wait here any more. The thread
    /// drains the list.
    pub(crate) given_up: Vec<u64>,
}

/// Makes both sides. `waker` ends the thread's sleep.
pub(crate) fn posting<J: Job>(waker: Waker) -> (Poster<J>, Posted<J>) {
    let mailbox = Mailbox {
        jobs: VecDeque::new(),
        given_up: Vec::new(),
        last: 0,
        is_over: false,
        is_away: false,
    };
    let (mailbox, wakes) = (Arc::new(Mutex::new(mailbox)), Arc::new(Wakes::default()));
    let posted = Posted {
        mailbox: Arc::clone(&mailbox),
        wakes: Arc::clone(&wakes),
        waiting: BTreeMap::new(),
        ends: BTreeSet::new(),
        fresh: VecDeque::new(),
        last: 0,
        given_up: Vec::new(),
    };
    (
        Poster {
            mailbox,
            waker,
            wakes,
            thread: OnceLock::new(),
        },
        posted,
    )
}

impl<J> Poster<J> {
    /// Posts a job, and wakes the thread. `job` makes the job from its number, under the lock that
    /// all posters share. Returns the number. Drops the job if the thread has ended.
    pub(crate) fn post(&self, job: impl FnOnce(u64) -> J) -> u64 {
        let (number, refused, is_first) = {
            let mut mailbox = lock(&self.mailbox);
            mailbox.last += 1;
            let number = mailbox.last;
            let job = job(number);
            if mailbox.is_over {
                (number, Some(job), true)
            } else {
                mailbox.jobs.push_back((number, job));
                (number, None, mailbox.jobs.len() == 1)
            }
        };
        // The drop is outside the lock, because the drop of a job wakes its caller, which may post
        // at once.
        drop(refused);
        // The thread takes all jobs at once, so only the first job has to wake it.
        if is_first {
            self.waker.wake_by_ref();
        }
        number
    }

    /// Returns the number of the last posted job.
    pub(crate) fn last(&self) -> u64 {
        lock(&self.mailbox).last
    }

    /// Informs the thread that no caller waits for the job of this number any more.
    pub(crate) fn give_up(&self, number: u64) {
        lock(&self.mailbox).given_up.push(number);
        self.waker.wake_by_ref();
    }

    pub(crate) fn set_thread(&self, thread: JoinHandle<()>) {
        // The thread is set once, by the function that started it.
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
        let thread = self
            .thread
            .take()
            .filter(|thread| !is_away && thread.thread().id() != thread::current().id());
        if let Some(thread) = thread {
            // A panic of the thread was reported by its own message.
            let _ = thread.join();
        }
    }
}

impl<J: Job> Posted<J> {
    /// Moves the jobs that were posted, and the numbers that were given up, from the mailbox to
    /// this side, and drops the waiting jobs that were given up. Returns whether a poster is left.
    pub(crate) fn take(&mut self) -> bool {
        self.settle();
        let (given_up, has_posters) = {
            let mut mailbox = lock(&self.mailbox);
            std::mem::swap(&mut mailbox.jobs, &mut self.fresh);
            self.last = mailbox.last;
            (std::mem::take(&mut mailbox.given_up), !mailbox.is_over)
        };
        for number in given_up {
            if self.remove(number).is_none() {
                self.given_up.push(number);
            }
        }
        has_posters
    }

    /// Drops the waiting jobs without a caller, for which `is_wanted` returns `false`.
    pub(crate) fn drop_unwanted(&mut self, is_wanted: impl Fn(&J) -> bool) {
        self.settle();
        let unwanted = self.waiting.iter().filter(|(_, job)| !is_wanted(job));
        for number in unwanted.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.remove(number);
        }
    }

    fn settle(&mut self) {
        while let Some((number, job)) = self.fresh.pop_front() {
            self.put_back(number, job);
        }
    }

    /// Takes the oldest waiting job out, with its number.
    pub(crate) fn pop(&mut self) -> Option<(u64, J)> {
        let Some((number, job)) = self.waiting.pop_first() else {
            return self.fresh.pop_front();
        };
        self.forget_end(number, &job);
        Some((number, job))
    }

    /// Makes a job that was taken out wait again, at the position of its number.
    pub(crate) fn put_back(&mut self, number: u64, job: J) {
        self.ends.extend(job.end().map(|end| (end, number)));
        self.waiting.insert(number, job);
    }

    pub(crate) fn drain(&mut self) -> impl Iterator<Item = J> + use<J> {
        self.settle();
        self.ends.clear();
        std::mem::take(&mut self.waiting).into_values()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len() + self.fresh.len()
    }

    /// Returns the number of the last job that was taken.
    pub(crate) const fn last(&self) -> u64 {
        self.last
    }

    pub(crate) fn waits(&self, number: u64) -> bool {
        self.waiting.contains_key(&number) || self.fresh.iter().any(|(job, _)| *job == number)
    }

    fn remove(&mut self, number: u64) -> Option<J> {
        self.settle();
        let job = self.waiting.remove(&number)?;
        self.forget_end(number, &job);
        Some(job)
    }

    fn forget_end(&mut self, number: u64, job: &J) {
        if let Some(end) = job.end() {
            self.ends.remove(&(end, number));
        }
    }

    /// Returns the time until the first waiting job ends, or `None` if no waiting job has a limit.
    pub(crate) fn left(&mut self) -> Option<Duration> {
        self.settle();
        self.ends
            .first()
            .map(|(end, _)| end.saturating_duration_since(Instant::now()))
    }

    /// Takes out the waiting job whose time ends first, if that time is over.
    pub(crate) fn pop_late(&mut self) -> Option<J> {
        self.settle();
        let &(_, number) = self
            .ends
            .first()
            .filter(|(end, _)| *end <= Instant::now())?;
        self.remove(number)
    }

    pub(crate) fn end_late(&mut self) {
        while let Some(job) = self.pop_late() {
            job.end_late();
        }
    }

    /// Takes the jobs that were posted, and ends the jobs whose time is over. Returns whether an
    /// attempt to connect is still wanted: there is a poster and a waiting job.
    pub(crate) fn is_wanted(&mut self) -> bool {
        let has_posters = self.take();
        self.end_late();
        has_posters && !self.waiting.is_empty()
    }

    /// Connects again for the waiting jobs, for `patience` at most. `connect` makes one attempt of
    /// the given length, and gives it up when it is no longer [wanted](Self::is_wanted). If no
    /// poster is left, drops the jobs and makes no attempt.
    ///
    /// # Errors
    /// The error of the last attempt. The caller has to end the jobs that still wait.
    pub(crate) fn reconnect<E>(
        &mut self,
        patience: Duration,
        mut connect: impl FnMut(Duration, &mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let is_over = {
            // Both flags are accessed under one lock: a poster that is dropped sets one flag and
            // reads the other, and could otherwise wait for an attempt of which it does not know.
            let mut mailbox = lock(&self.mailbox);
            mailbox.is_away = !mailbox.is_over;
            mailbox.is_over
        };
        if is_over {
            drop(self.drain());
            return Ok(());
        }
        let start = Instant::now();
        let outcome = loop {
            let whole = patience.saturating_sub(start.elapsed());
            // An attempt lasts no longer than the job that ends first, because a server may never
            // answer.
            let attempt = self.left().map_or(whole, |first| first.min(whole));
            let began = Instant::now();
            let connected = connect(attempt, self);
            if connected.is_ok() {
                break connected;
            }
            self.end_late();
            // There is another attempt only if this attempt ended because a job did, and other jobs
            // still have time.
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
        // The drop is outside the lock, because the drop of a job wakes its caller, which may drop
        // another job at once.
        drop(jobs);
        self.wakes.wake_all();
    }
}

impl<J> fmt::Debug for Poster<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poster")
            .field("has_thread", &self.thread.get().is_some())
            .finish_non_exhaustive()
    }
}

impl<J> fmt::Debug for Posted<J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Posted")
            .field("waiting", &self.waiting.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    /// A call whose end is reported: late, or dropped.
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
        Pair {
            poster,
            posted,
            told,
            tell,
        }
    }

    fn post(poster: &Poster<Call>, tell: &Sender<(u64, bool)>, time: Option<Duration>) -> u64 {
        let end = time.and_then(|time| Instant::now().checked_add(time));
        poster.post(|number| Call {
            number,
            end,
            told: tell.clone(),
            is_late: false,
        })
    }

    #[test]
    fn jobs_are_taken_in_order_with_what_was_given_up() {
        let Pair {
            poster,
            mut posted,
            tell,
            told,
        } = pair();
        assert_eq!(
            [post(&poster, &tell, None), post(&poster, &tell, Some(LONG))],
            [1, 2]
        );
        poster.give_up(1);
        assert!(posted.take());
        posted.settle();
        assert_eq!(posted.waiting.keys().copied().collect::<Vec<_>>(), [2]);
        assert!(posted.given_up.is_empty(), "it waited here");
        assert!(
            posted
                .left()
                .is_some_and(|left| left > LONG / 2 && left <= LONG)
        );
        let (number, job) = posted.pop().unwrap();
        assert_eq!((number, posted.left()), (2, None), "none waits");
        poster.give_up(2);
        assert_eq!(
            [
                post(&poster, &tell, None),
                post(&poster, &tell, Some(SHORT))
            ],
            [3, 4]
        );
        assert!(posted.take());
        assert_eq!(posted.given_up, [2]);
        posted.put_back(number, job);
        assert!(posted.left().is_some_and(|left| left <= SHORT));
        drop(poster);
        assert!(!posted.take());
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, false)]);
        drop(posted.drain());
        assert_eq!(
            told.try_iter().collect::<Vec<_>>(),
            [(2, false), (3, false), (4, false)],
            "the oldest first"
        );
        assert_eq!((posted.waiting.is_empty(), posted.left()), (true, None));
    }

    /// Each round gives up a job, takes the number of that job, ends late jobs and reads the first
    /// end. If any of these steps scanned all jobs, the test would take hours, and the watchdog
    /// would end it.
    #[test]
    fn a_turn_costs_no_more_with_many_waiting_jobs() {
        const JOBS: u64 = 200_000;
        let (done, is_done) = channel();
        let turns = thread::spawn(move || {
            let Pair {
                poster,
                mut posted,
                tell,
                told,
            } = pair();
            for job in 0..JOBS {
                post(&poster, &tell, (job % 2 == 0).then_some(LONG * 60));
            }
            for number in 1..=JOBS {
                poster.give_up(number);
                posted.take();
                posted.end_late();
                assert!(posted.left().is_none_or(|left| left > LONG));
            }
            assert_eq!(told.try_iter().count() as u64, JOBS);
            let _ = done.send(());
        });
        assert!(
            is_done.recv_timeout(LONG).is_ok(),
            "{:?}",
            turns.is_finished()
        );
    }

    #[test]
    fn only_late_jobs_end() {
        let Pair {
            poster,
            mut posted,
            tell,
            told,
        } = pair();
        for time in [Some(Duration::ZERO), None, Some(Duration::ZERO), Some(LONG)] {
            post(&poster, &tell, time);
        }
        posted.take();
        posted.end_late();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, true), (3, true)]);
        assert_eq!(posted.waiting.keys().copied().collect::<Vec<_>>(), [2, 4]);
    }

    #[test]
    fn nobody_posts_to_a_thread_that_has_ended() {
        let Pair {
            poster,
            posted,
            tell,
            told,
        } = pair();
        post(&poster, &tell, None);
        drop(posted);
        post(&poster, &tell, None);
        assert_eq!(
            told.try_iter().collect::<Vec<_>>(),
            [(1, false), (2, false)]
        );
    }

    #[test]
    fn attempts_end_with_the_first_job_until_one_succeeds() {
        let Pair {
            poster,
            mut posted,
            tell,
            told,
        } = pair();
        post(&poster, &tell, Some(SHORT));
        post(&poster, &tell, Some(LONG));
        posted.take();
        let mut attempts = Vec::new();
        let outcome = posted.reconnect(LONG, |attempt, posted| {
            attempts.push(attempt);
            if attempts.len() > 1 {
                return Ok(());
            }
            assert!(posted.is_wanted());
            // A job that is posted meanwhile is kept.
            post(&poster, &tell, None);
            thread::sleep(attempt + Duration::from_millis(1));
            assert!(posted.is_wanted());
            Err("silent")
        });
        assert_eq!(outcome, Ok(()));
        assert!(
            attempts[0] <= SHORT && attempts[1] > LONG / 2,
            "{attempts:?}"
        );
        assert_eq!(told.try_iter().collect::<Vec<_>>(), [(1, true)]);
        assert_eq!(posted.waiting.keys().copied().collect::<Vec<_>>(), [2, 3]);
    }

    #[test]
    fn an_attempt_that_fails_early_is_the_last() {
        let Pair {
            poster,
            mut posted,
            tell,
            ..
        } = pair();
        post(&poster, &tell, Some(LONG));
        posted.take();
        let mut attempts = 0;
        let outcome = posted.reconnect(LONG * 2, |_, _| {
            attempts += 1;
            Err::<(), _>("refused")
        });
        assert_eq!(
            (outcome, attempts, posted.waiting.len()),
            (Err("refused"), 1, 1)
        );
    }

    #[test]
    fn an_attempt_is_unwanted_without_jobs_and_without_posters() {
        let Pair {
            poster,
            mut posted,
            tell,
            ..
        } = pair();
        post(&poster, &tell, Some(SHORT));
        posted.take();
        let outcome = posted.reconnect(LONG, |attempt, posted| {
            thread::sleep(attempt + Duration::from_millis(1));
            assert!(!posted.is_wanted(), "the only job is late");
            Err::<(), _>("silent")
        });
        assert_eq!((outcome, posted.waiting.len()), (Err("silent"), 0));
        post(&poster, &tell, None);
        let mut poster = Some(poster);
        let outcome = posted.reconnect(LONG, |_, posted| {
            drop(poster.take());
            assert!(!posted.is_wanted(), "the last poster is gone");
            Err::<(), _>("given up")
        });
        assert_eq!((outcome, posted.waiting.len()), (Err("given up"), 1));
    }

    /// An attempt may check only at its end whether it is still wanted. If an attempt began after
    /// the drop of the last poster, that drop would wait until the end of the attempt.
    #[test]
    fn there_is_no_attempt_once_the_last_poster_is_gone() {
        let Pair {
            poster,
            mut posted,
            tell,
            told,
        } = pair();
        post(&poster, &tell, None);
        assert!(posted.take());
        drop(poster);
        let outcome = posted.reconnect(LONG, |_, _| -> Result<(), ()> { panic!("an attempt") });
        assert_eq!(
            (outcome, told.try_iter().collect::<Vec<_>>()),
            (Ok(()), vec![(1, false)])
        );
    }

    #[test]
    fn the_last_poster_waits_for_the_thread_but_not_while_it_is_away() {
        let Pair {
            poster,
            mut posted,
            tell,
            ..
        } = pair();
        let (tell_end, told_end) = channel();
        poster.set_thread(thread::spawn(move || {
            while posted.take() {
                thread::yield_now();
            }
            let _ = tell_end.send(());
        }));
        drop(poster);
        assert_eq!(told_end.try_recv(), Ok(()), "the drop has waited");

        let Pair {
            poster, mut posted, ..
        } = pair();
        post(&poster, &tell, None);
        let ((tell_away, told_away), (release, may_go)) = (channel(), channel::<()>());
        poster.set_thread(thread::spawn(move || {
            let _ = posted.reconnect(LONG, |_, _| {
                let _ = tell_away.send(());
                may_go.recv().map_err(|_| ())
            });
        }));
        told_away.recv().unwrap();
        drop(poster);
        release.send(()).unwrap();
    }
}
