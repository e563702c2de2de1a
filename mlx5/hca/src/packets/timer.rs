//! The times at which a requester does something by itself (P3 and P4 of `packets`).

/// Minimum time without an answer, in ns, before packets are sent again for the first time: far
/// below the time-outs that programs set. Twice the longest recent time without progress is used if
/// that is longer. Each repeat doubles the time, up to the time-out. Only the time-out counts as a
/// retry.
const FIRST_REPEAT_NS: u64 = 2_000_000;
/// The time for which a requester has waited for an answer, and its action at the end of this time.
#[derive(Debug)]
pub(super) struct Timer {
    /// Time without an answer before a retry, in ns.
    timeout_ns: u64,
    /// Number of repeats since the last progress, before the time-out.
    repeats: u32,
    /// Number of times that the wait before the next repeat is doubled: the number of repeats since
    /// the last answer to packets that were sent only once (RFC 6298, 5.7).
    backoff: u32,
    /// Longest recent time without progress that ended without a repeat, in ns.
    quiet_ns: u64,
    /// Time at which the present wait for an answer began.
    wait_ns: u64,
    repeat_ns: Option<u64>,
    /// Time at which a retry is due, while packets are under way.
    retry_ns: Option<u64>,
    /// Time until which nothing is sent, after an RNR NAK.
    pause_ns: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Everything that is not acknowledged is sent again. This does not count as a retry.
    Repeat,
    Retry,
}

impl Timer {
    pub(super) const fn new(timeout_ns: u64) -> Self {
        Self {
            timeout_ns,
            repeats: 0,
            backoff: 0,
            quiet_ns: 0,
            wait_ns: 0,
            repeat_ns: None,
            retry_ns: None,
            pause_ns: None,
        }
    }

    /// Returns the time at which [`Timer::on_time`] has something to do.
    pub(super) fn due_ns(&self) -> Option<u64> {
        self.pause_ns
            .or(self.repeat_ns.into_iter().chain(self.retry_ns).min())
    }

    /// Returns whether nothing may be sent now.
    pub(super) const fn is_paused(&self) -> bool {
        self.pause_ns.is_some()
    }

    /// Returns whether the requester waits for an answer.
    pub(super) const fn is_running(&self) -> bool {
        self.retry_ns.is_some()
    }

    /// Begins to wait for an answer.
    pub(super) fn wait(&mut self, now_ns: u64) {
        self.wait_ns = now_ns;
        self.retry_ns = Some(now_ns.saturating_add(self.timeout_ns));
        let wait_ns = FIRST_REPEAT_NS
            .max(2 * self.quiet_ns)
            .saturating_mul(1 << self.backoff);
        self.repeat_ns = (wait_ns < self.timeout_ns).then(|| now_ns + wait_ns);
    }

    /// Pauses until this time. During the pause, the requester waits for no answer.
    pub(super) fn pause(&mut self, until_ns: u64) {
        (self.pause_ns, self.retry_ns, self.repeat_ns) = (Some(until_ns), None, None);
    }

    /// Ends the wait, as an answer arrived. The wait is a measure of the time of answers, unless
    /// packets were sent again: then `is_first` is false, or there were repeats.
    pub(super) fn progress(&mut self, now_ns: u64, is_first: bool) {
        if self.is_running() && self.repeats == 0 && is_first {
            let quiet_ns = now_ns.saturating_sub(self.wait_ns);
            self.quiet_ns = (self.quiet_ns - self.quiet_ns / 8).max(quiet_ns);
            self.backoff = 0;
        }
        self.repeats = 0;
        (self.pause_ns, self.retry_ns, self.repeat_ns) = (None, None, None);
    }

    /// Ends a pause, or returns what is due at this time.
    pub(super) fn on_time(&mut self, now_ns: u64) -> Option<Due> {
        self.due_ns().filter(|due_ns| *due_ns <= now_ns)?;
        if self.pause_ns.take().is_some() {
            return None;
        }
        let retry_ns = self.retry_ns.filter(|retry_ns| *retry_ns > now_ns);
        if retry_ns.is_none() {
            return Some(Due::Retry);
        }
        self.repeats += 1;
        // The backoff grows only while the wait is below the time-out, so the shift in `wait` does
        // not overflow.
        self.backoff += 1;
        self.wait(now_ns);
        // `wait` set a new retry time, but a repeat does not extend the time-out.
        self.retry_ns = retry_ns;
        Some(Due::Repeat)
    }
}
