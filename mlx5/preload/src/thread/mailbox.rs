//! The path of a command to the thread that owns the HCA, and of its result back.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::command::Call;
use crate::options::errno::Errno;

/// A command on the way to the thread.
#[derive(Debug)]
pub(crate) struct Job {
    /// The command.
    pub(crate) call: Call,
    answer: Arc<Answer>,
}

impl Job {
    fn new(call: Call) -> Self {
        Self { call, answer: Arc::new(Answer::default()) }
    }

    /// Lets the waiting thread go on with this result.
    pub(crate) fn answer(self, result: Result<(), Errno>) {
        *self.answer.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    }
}

impl Drop for Job {
    /// A job without a result means that the HCA failed while it ran.
    fn drop(&mut self) {
        self.answer.result.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(Err(Errno(libc::EIO)));
        self.answer.is_there.notify_one();
    }
}

#[derive(Debug, Default)]
struct Answer {
    result: Mutex<Option<Result<(), Errno>>>,
    is_there: Condvar,
}

impl Answer {
    fn wait(&self) -> Result<(), Errno> {
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match result.take() {
                Some(result) => return result,
                None => result = self.is_there.wait(result).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// The thread's next task.
#[derive(Debug)]
pub(crate) enum Mail {
    /// No command within the time.
    Nothing,
    /// A command.
    Job(Job),
    /// The device is being closed.
    Close,
}

/// Queue of commands for the thread.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    is_news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    is_closed: bool,
    /// Whether the thread has failed, and takes no commands any more.
    is_dead: bool,
}

impl Mailbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a command to the thread of the HCA, and waits for its result.
    ///
    /// # Errors
    /// The command's error, or `EIO` if the HCA has failed.
    ///
    /// # Safety
    /// The memory that the command names fulfils a driver's contract with the kernel: see the commands.
    pub(crate) unsafe fn execute(&self, call: Call) -> Result<(), Errno> {
        let job = Job::new(call);
        let answer = Arc::clone(&job.answer);
        self.post(job)?;
        answer.wait()
    }

    fn post(&self, job: Job) -> Result<(), Errno> {
        let mut state = self.state();
        if state.is_dead {
            return Err(Errno(libc::EIO));
        }
        state.jobs.push_back(job);
        self.is_news.notify_one();
        Ok(())
    }

    /// Tells the thread that the device is being closed.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.is_news.notify_one();
    }

    /// Returns the next command. Waits for at most `for_at_most`.
    pub(crate) fn take(&self, for_at_most: Duration) -> Mail {
        let mut state = self.state();
        if state.jobs.is_empty() && !state.is_closed && !for_at_most.is_zero() {
            state = self.is_news.wait_timeout(state, for_at_most).unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.jobs.pop_front() {
            Some(job) => Mail::Job(job),
            None if state.is_closed => Mail::Close,
            None => Mail::Nothing,
        }
    }

    /// Refuses all commands from now on.
    pub(crate) fn die(&self) {
        let jobs = {
            let mut state = self.state();
            state.is_dead = true;
            core::mem::take(&mut state.jobs)
        };
        drop(jobs);
    }
}
