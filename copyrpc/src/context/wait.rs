//! The sleep of a context until there is something to poll for.

use std::task::Waker;
use std::time::Duration;

use copyrpc_shm::sleep::{self, Due, Look, Sleeper, Watch};

use super::{Context, Inner};
use crate::error::Reentrant;

/// Maximum sleep while a connection has messages that it could not post. Usually a completion makes
/// room for the messages, and ends the sleep earlier. While all such connections only wait for
/// their next READ, the sleep is as long as the pause before the READ, if that is longer.
const BLOCKED_SLEEP: Duration = Duration::from_millis(1);

impl<U> Context<U> {
    /// Posts gathered messages, as [`Context::flush_endpoints`] does, then sleeps until there is
    /// something to take with [`Context::poll`], [`Context::drain`] or [`Context::recv`], at most
    /// for `timeout` of real time (`None`: without limit). Returns whether there is something. It
    /// also returns `false` when this context has to check the clock: for deadlines, for peers that
    /// do not answer, and, while peers wait for answers of this end, to send them a heartbeat. So
    /// call it repeatedly, with a poll in between:
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
    /// No arrival is missed: the wait arms both completion queues and then checks whether one holds
    /// anything. It does not sleep while a request waits to be received. Only arrivals,
    /// completions, time and [`waker`](Self::waker) wake it.
    ///
    /// # Errors
    /// [`Reentrant`].
    pub fn wait(&self, timeout: Option<Duration>) -> Result<bool, Reentrant> {
        self.inner.wait(timeout, || self.inner.has_requests())
    }

    /// Posts gathered messages, as [`Context::flush_endpoints`] does. Returns the time for which
    /// there is nothing to do unless a completion arrives ([`Duration::MAX`]: without limit);
    /// `None` if there is work now, or a connection counts polls until its next READ. For drivers
    /// that poll several contexts in turn, in virtual time or not. Inside a callback of a poll it
    /// posts nothing and returns `None`: the poll continues.
    #[must_use]
    pub fn idle_for(&self) -> Option<Duration> {
        let _polling = self.inner.enter().ok()?;
        self.inner.flush_all();
        self.inner.worklist.timers().read_clock_next();
        (!self.has_work() && !self.inner.worklist.counts_polls())
            .then(|| self.inner.longest_sleep(None).unwrap_or(Duration::MAX))
    }

    /// Returns whether a poll, [`Context::recv`] or a flush has work, except for work that is due
    /// by the clock. Inside a callback of a poll it may also return `true` for completions that the
    /// poll is about to take.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.inner.has_work()
    }

    /// Returns the waker that ends a [`wait`](Self::wait) from any thread: the present wait, or, if
    /// there is none, the next wait that would sleep. See [`mlx5::Device::waker`].
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.inner.device.waker()
    }
}

/// Sleeps on a context and on other things at once: see [`copyrpc_shm::sleep::wait`]. Before the
/// sleep, gathered messages are posted, as [`Context::wait`] does. The sleep ends as a sleep of
/// `Context::wait` does. Poll after the sleep in every case.
impl<U> Sleeper for Context<U> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.inner.with_watch(then);
    }
}

impl<U> Inner<U> {
    /// Calls `then` with a [`Watch`] of everything that ends a sleep of the context: the device,
    /// the next due time, and work that exists already. Must not be called inside a poll.
    fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.flush_all();
        let mut due = Due(self.longest_sleep(None).unwrap_or(Duration::MAX));
        let mut has_something = Look(|| self.has_work());
        sleep::join(
            [
                &mut &self.device as &mut dyn Sleeper,
                &mut due,
                &mut has_something,
            ],
            then,
        );
        self.worklist.timers().read_clock_next();
    }

    /// Flushes and sleeps, unless there is `something_else` to do after the flush.
    pub(crate) fn wait(
        &self,
        timeout: Option<Duration>,
        something_else: impl FnOnce() -> bool,
    ) -> Result<bool, Reentrant> {
        let _polling = self.enter()?;
        Ok(self.flush_and_sleep(timeout, something_else))
    }

    fn flush_and_sleep(
        &self,
        timeout: Option<Duration>,
        something_else: impl FnOnce() -> bool,
    ) -> bool {
        self.flush_all();
        if self.worklist.has_unfinished() || something_else() {
            return true;
        }
        self.device.progress();
        let is_ready = self.has_completions() || {
            let queues = &mut *self.queues.borrow_mut();
            queues.recv_cq.arm(false);
            queues.send_cq.arm(false);
            // `longest_sleep` checks all connections in use, for which there is time only before a
            // sleep.
            self.device.wait(self.longest_sleep(timeout))
        };
        self.worklist.timers().read_clock_next();
        is_ready
    }

    fn has_work(&self) -> bool {
        self.worklist.has_unfinished() || self.has_requests() || self.has_completions()
    }

    fn has_completions(&self) -> bool {
        // If the queues are borrowed, a poll is in progress, which is about to take completions.
        self.queues.try_borrow().map_or(true, |queues| {
            queues.recv_cq.has_completion() || queues.send_cq.has_completion()
        })
    }

    /// Flushes twice, since there is no further flush while this end sleeps: the second flush also
    /// serves the connections that the first flush skipped.
    fn flush_all(&self) {
        self.flush();
        self.worklist.forget_counts();
        self.flush();
    }

    fn longest_sleep(&self, timeout: Option<Duration>) -> Option<Duration> {
        let timers = self.worklist.timers();
        let blocked = self
            .worklist
            .has_listed()
            .then(|| self.worklist.rest().unwrap_or_default().max(BLOCKED_SLEEP));
        let timed = self.worklist.has_timed().then(|| timers.sweep_interval());
        [timeout, blocked, timed, timers.until_next()]
            .into_iter()
            .flatten()
            .min()
    }
}

#[cfg(test)]
mod tests {
    use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;
    use crate::{ContextBuilder, EndpointConfig};

    #[test]
    fn a_context_does_not_rest_while_a_connection_counts_polls_until_its_next_read() {
        let fabric = LocalFabric::new();
        let context = || -> Context<()> {
            let fabric = FabricSpec::Local(fabric.clone());
            ContextBuilder::new(DeviceSpec::Soft(SoftOptions {
                fabric,
                ..SoftOptions::default()
            }))
            .build()
            .unwrap()
        };
        let (caller, answerer) = (context(), context());
        let config = EndpointConfig {
            batches_in_flight: 1,
            ..EndpointConfig::default()
        };
        let a = caller.create_endpoint(&config).unwrap();
        let b = answerer.create_endpoint(&config).unwrap();
        let (of_a, of_b) = (a.local_info(), b.local_info());
        let (endpoint, _peer) = (a.connect(&of_b).unwrap(), b.connect(&of_a).unwrap());
        assert!(caller.idle_for().is_some());
        // The second call cannot be posted, and no READ finds that the peer has done anything.
        for _ in 0..2 {
            endpoint.call(b"", (), 0).unwrap();
            caller.poll(|(), _| ()).unwrap();
        }
        for _ in 0..1_000 {
            caller.poll(|(), _| ()).unwrap();
            assert_eq!(caller.idle_for(), None);
        }
        let reads = endpoint.stats().reads;
        assert!(
            reads > 2 && reads < 500,
            "{reads} READs, with polls in between"
        );
        while endpoint.outstanding_calls() > 0 {
            answerer.poll(|(), _| ()).unwrap();
            while let Some(request) = answerer.recv() {
                request.reply(b"").unwrap();
            }
            caller.poll(|(), _| ()).unwrap();
        }
        caller.poll(|(), _| ()).unwrap();
        assert!(caller.idle_for().is_some());
    }

    /// Asserts the lengths of sleeps, which a test from outside could only measure.
    #[test]
    fn sleeps_are_as_long_as_the_connections_allow() {
        let fabric = FabricSpec::Local(LocalFabric::new());
        let context: Context<()> = ContextBuilder::new(DeviceSpec::Soft(SoftOptions {
            fabric,
            ..SoftOptions::default()
        }))
        .build()
        .unwrap();
        let config = EndpointConfig {
            idle_keepalive: None,
            idle_timeout: Some(Duration::from_secs(7_200)),
            ..EndpointConfig::default()
        };
        let pending = [(); 2].map(|()| context.create_endpoint(&config).unwrap());
        let records = [pending[1].local_info(), pending[0].local_info()];
        let mut endpoints = pending
            .into_iter()
            .zip(records)
            .map(|(pending, record)| pending.connect(&record).unwrap());
        let (endpoint, _peer) = (endpoints.next().unwrap(), endpoints.next().unwrap());
        let longest = |timeout| context.inner.longest_sleep(timeout);
        let (ms, hour) = (Duration::from_millis(1), Duration::from_secs(3600));
        assert!(longest(None) > Some(hour), "until it is idle for too long");
        assert_eq!(longest(Some(hour)), Some(hour));
        endpoint.call(b"", (), 0).unwrap();
        assert_eq!(longest(Some(hour)), Some(BLOCKED_SLEEP), "not flushed");
        context.flush_endpoints().unwrap();
        assert_eq!(
            [longest(None), longest(Some(ms))],
            [Some(10 * ms), Some(ms)]
        );
        endpoint.call_within(b"", (), 0, 2 * ms).unwrap();
        context.flush_endpoints().unwrap();
        assert!(longest(None) <= Some(2 * ms), "{:?}", longest(None));
    }
}
