//! Sleeping until there is something to poll for.

use std::time::Duration;

use super::{Context, Inner, PollError};

/// How long to sleep at most while a connection has something to post that it could not. What it waits for mostly wakes, as a completion;
/// a READ that is put off does not.
const BLOCKED_SLEEP: Duration = Duration::from_millis(1);

impl<U> Context<U> {
    /// Posts what gathered, as [`Context::flush_endpoints`], then sleeps until there is something to take with [`Context::poll`],
    /// [`Context::drain`] or [`Context::recv`], at most for `timeout` (`None`: without end). Returns whether there is; `false` also when this
    /// context has to look at the clock: for deadlines, for peers that answer nothing, and, while peers wait for answers of this end, to
    /// tell them that it lives. So call it again and again, with a poll in between:
    ///
    /// ```no_run
    /// # fn serve(context: copyrpc::Context<()>) -> Result<(), Box<dyn std::error::Error>> {
    /// loop {
    ///     context.wait(None)?;
    ///     context.poll(|(), _| ())?;
    ///     while let Some(request) = context.recv() {
    ///         request.reply(b"yes")?;
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// No arrival is missed: it arms both completion queues and then looks whether one holds anything. It does not sleep while a request
    /// is there to be received. Nothing but arrivals, completions and time wakes it.
    ///
    /// # Errors
    /// [`PollError::Reentrant`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool, PollError> {
        let _polling = self.inner.enter()?;
        Ok(self.inner.wait(timeout))
    }
}

impl<U> Inner<U> {
    fn wait(&self, timeout: Option<Duration>) -> bool {
        self.flush();
        if self.worklist.has_something_to_take() {
            return true;
        }
        self.recv_cq.borrow_mut().arm(false);
        self.send_cq.borrow_mut().arm(false);
        // Who is about to sleep has time to look at all connections; who has something to do has not.
        let is_ready = self.device.wait(Some(Duration::ZERO)) || self.device.wait(self.longest_sleep(timeout));
        self.worklist.timers().look_next();
        is_ready
    }

    fn longest_sleep(&self, timeout: Option<Duration>) -> Option<Duration> {
        let timers = self.worklist.timers();
        let is_timed = || self.connections.borrow().iter().any(|connection| connection.with_link(|link| link.is_timed()));
        let own = if self.worklist.has_dirty() {
            Some(BLOCKED_SLEEP)
        } else if is_timed() {
            Some(timers.sweep_interval())
        } else {
            None
        };
        [timeout, own, timers.until_next()].into_iter().flatten().min()
    }
}
