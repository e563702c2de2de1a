//! An open device: the mailbox through which the program's threads reach the thread that owns its HCA.
//!
//! The HCA belongs to one thread for its whole life, which is what its peers take its being alive from. So a command is carried out there: the
//! thread that wrote it waits, and what it points to stays valid meanwhile.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::command::Call;
use crate::errno::Errno;
use crate::poller;
use crate::settings::Settings;

/// An open device. Dropping it closes it, and waits until that is done.
#[derive(Debug)]
pub(crate) struct Context {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl Context {
    /// Starts the thread.
    ///
    /// # Errors
    /// `EAGAIN`: there is no room for another thread.
    pub(crate) fn open(settings: &'static Settings) -> Result<Self, Errno> {
        let mailbox = Arc::new(Mailbox::default());
        let thread = poller::spawn(Arc::clone(&mailbox), settings).map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        Ok(Self { mailbox, thread: Some(thread) })
    }

    /// Carries out a command.
    ///
    /// # Errors
    /// The command's, or `EIO` if the HCA broke down.
    ///
    /// # Safety
    /// What the command points to is what a driver gives the kernel: see the commands.
    pub(crate) unsafe fn execute(&self, call: Call) -> Result<(), Errno> {
        let job = Job { call, answer: Arc::new(Answer::default()) };
        let answer = Arc::clone(&job.answer);
        self.mailbox.post(job)?;
        answer.wait()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.mailbox.close();
        if let Some(thread) = self.thread.take() {
            // It catches its own panics.
            let _ = thread.join();
        }
    }
}

/// A command on its way.
#[derive(Debug)]
pub(crate) struct Job {
    /// The command.
    pub(crate) call: Call,
    answer: Arc<Answer>,
}

impl Job {
    /// Lets its thread go on.
    pub(crate) fn answer(self, result: Result<(), Errno>) {
        *self.answer.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
    }
}

impl Drop for Job {
    /// Without an answer the HCA broke down over it.
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

/// What the thread finds when it looks.
#[derive(Debug)]
pub(crate) enum Mail {
    /// Nothing came.
    Nothing,
    /// A command.
    Job(Job),
    /// The device is closed.
    Close,
}

/// Commands for the thread.
#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
    is_news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    jobs: VecDeque<Job>,
    is_closed: bool,
    /// Nobody takes commands any more.
    is_dead: bool,
}

impl Mailbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn close(&self) {
        self.state().is_closed = true;
        self.is_news.notify_one();
    }

    /// The next command, waited for no longer than `for_at_most`.
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
