//! Sleeping until there is something to poll for.

use std::task::Waker;
use std::time::Duration;

use shm::sleep::{self, Due, Look, Sleeper, Watch};

use super::{Context, Inner, PollError};

/// How long to sleep at most while a connection has something to post that it could not. What it waits for mostly wakes, as a completion;
/// a READ that is put off does not.
const BLOCKED_SLEEP: Duration = Duration::from_millis(1);

impl<U> Context<U> {
    /// Posts what gathered, as [`Context::flush_endpoints`], then sleeps until there is something to take with [`Context::poll`],
    /// [`Context::drain`] or [`Context::recv`], at most for `timeout` of real time (`None`: without end). Returns whether there is; `false`
    /// also when this context has to look at the clock: for deadlines, for peers that answer nothing, and, while peers wait for answers of
    /// this end, to tell them that it lives. So call it again and again, with a poll in between:
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
    /// is there to be received. Nothing but arrivals, completions, time and [`waker`](Self::waker) wakes it.
    ///
    /// # Errors
    /// [`PollError::Reentrant`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool, PollError> {
        self.inner.wait(timeout, || self.inner.worklist.has_requests())
    }

    /// Posts what gathered, as [`Context::flush_endpoints`], and says how long there is nothing to do unless a completion comes
    /// ([`Duration::MAX`]: forever); `None`: there is something now. For drivers that poll several contexts in turn, in virtual time or
    /// not. Not inside a poll.
    #[must_use]
    pub fn idle_for(&self) -> Option<Duration> {
        self.inner.flush_all();
        self.inner.worklist.timers().look_next();
        (!self.has_work()).then(|| self.inner.longest_sleep(None).unwrap_or(Duration::MAX))
    }

    /// Whether a poll, [`Context::recv`] or a flush has something to do, but for what is due by the clock.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.inner.has_work()
    }

    /// Ends a [`wait`](Self::wait) from any thread: the one under way, or, if there is none, the next that would sleep. See [`mlx5::Device::waker`].
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.inner.device.waker()
    }
}

/// To sleep on a context and on other things at once: see [`shm::sleep::wait`]. It posts what gathered, as [`Context::wait`] does, and the sleep ends
/// where that would. Poll after it, whatever ended it. On hardware, which cannot wake such a sleep, it ends after
/// [`POLL_SLICE`](shm::sleep::POLL_SLICE).
impl<U> Sleeper for Context<U> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.inner.with_watch(then);
    }
}

impl<U> Inner<U> {
    /// Not inside a poll: that has the context borrowed.
    fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.flush_all();
        let mut due = Due(self.longest_sleep(None).unwrap_or(Duration::MAX));
        let mut has_something = Look(|| self.has_work());
        sleep::join([&mut &self.device as &mut dyn Sleeper, &mut due, &mut has_something], then);
        self.worklist.timers().look_next();
    }

    /// Does not sleep if, after a flush, there is `something_else` to do.
    pub(crate) fn wait(&self, timeout: Option<Duration>, something_else: impl FnOnce() -> bool) -> Result<bool, PollError> {
        let _polling = self.enter()?;
        Ok(self.flush_and_sleep(timeout, something_else))
    }

    fn flush_and_sleep(&self, timeout: Option<Duration>, something_else: impl FnOnce() -> bool) -> bool {
        self.flush_all();
        if self.worklist.has_unfinished() || something_else() {
            return true;
        }
        self.device.progress();
        let is_ready = self.has_completions() || {
            self.recv_cq.borrow_mut().arm(false);
            self.send_cq.borrow_mut().arm(false);
            // Who is about to sleep has time to look at all connections; who has something to do has not.
            self.device.wait(self.longest_sleep(timeout))
        };
        self.worklist.timers().look_next();
        is_ready
    }

    fn has_work(&self) -> bool {
        self.worklist.has_unfinished() || self.worklist.has_requests() || self.has_completions()
    }

    fn has_completions(&self) -> bool {
        self.recv_cq.borrow().has_completion() || self.send_cq.borrow().has_completion()
    }

    /// A flush, and another for those it passed over: nobody flushes again while this end sleeps.
    fn flush_all(&self) {
        self.flush();
        self.flush();
    }

    fn longest_sleep(&self, timeout: Option<Duration>) -> Option<Duration> {
        let timers = self.worklist.timers();
        let own = if self.worklist.has_listed() {
            Some(BLOCKED_SLEEP)
        } else if self.worklist.has_timed() {
            Some(timers.sweep_interval())
        } else {
            None
        };
        [timeout, own, timers.until_next()].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;
    use crate::{ContextBuilder, EndpointConfig};

    /// Only the lengths of sleeps differ, which tests from outside could but time.
    #[test]
    fn sleeps_are_as_long_as_the_connections_allow() {
        let fabric = FabricSpec::Local(LocalFabric::new());
        let context: Context<()> = ContextBuilder::new(DeviceSpec::Soft(SoftOptions { fabric, ..SoftOptions::default() })).build().unwrap();
        let config = EndpointConfig { idle_keepalive: None, idle_timeout: Some(Duration::from_secs(7_200)), ..EndpointConfig::default() };
        let pending = [(); 2].map(|()| context.create_endpoint(&config).unwrap());
        let records = [pending[1].local_info(), pending[0].local_info()];
        let mut endpoints = pending.into_iter().zip(records).map(|(pending, record)| pending.connect(&record).unwrap());
        let (endpoint, _peer) = (endpoints.next().unwrap(), endpoints.next().unwrap());
        let longest = |timeout| context.inner.longest_sleep(timeout);
        let (ms, hour) = (Duration::from_millis(1), Duration::from_secs(3600));
        assert!(longest(None) > Some(hour), "until it is idle for too long");
        assert_eq!(longest(Some(hour)), Some(hour));
        endpoint.call(b"", (), 0).unwrap();
        assert_eq!(longest(Some(hour)), Some(BLOCKED_SLEEP), "not flushed");
        context.flush_endpoints().unwrap();
        assert_eq!([longest(None), longest(Some(ms))], [Some(10 * ms), Some(ms)]);
        endpoint.call_within(b"", (), 0, 2 * ms).unwrap();
        context.flush_endpoints().unwrap();
        assert!(longest(None) <= Some(2 * ms), "{:?}", longest(None));
    }
}
