//! The times at which a requester acts although no answer has arrived (P3 and P4 of `packets`).

/// Minimum time without an answer, in ns, before packets are sent again: far below the time-outs
/// that programs set. The time that RFC 6298 computes from round trips is used if it is longer.
/// Each repeat doubles the time, up to the time-out. Only the time-out counts as a retry.
const MIN_REPEAT_NS: u64 = 2_000_000;

/// The times at which a requester repeats packets, retries, or ends a pause.
#[derive(Debug)]
pub(super) struct Timer {
    /// Time without an answer before a retry, in ns.
    timeout_ns: u64,
    /// Number of times that the wait before the next repeat is doubled: the number of repeats since
    /// the last round trip was measured (RFC 6298, 5.7).
    backoff: u32,
    /// Smoothed round trip and its variation, in ns (SRTT and RTTVAR of RFC 6298).
    round_trip_ns: Option<(u64, u64)>,
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
            backoff: 0,
            round_trip_ns: None,
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

    /// Returns the smoothed round trip, in ns; 0 if it is not known.
    pub(super) fn round_trip_ns(&self) -> u64 {
        self.round_trip_ns.map_or(0, |(smoothed, _)| smoothed)
    }

    /// Begins to wait for an answer.
    pub(super) fn wait(&mut self, now_ns: u64) {
        self.retry_ns = Some(now_ns.saturating_add(self.timeout_ns));
        let learned_ns = self.round_trip_ns.map_or(0, |(smoothed, variation)| {
            smoothed + (4 * variation).max(smoothed / 4)
        });
        let wait_ns = MIN_REPEAT_NS
            .max(learned_ns)
            .saturating_mul(1 << self.backoff);
        self.repeat_ns = (wait_ns < self.timeout_ns).then(|| now_ns + wait_ns);
    }

    /// Pauses until this time. During the pause, the requester waits for no answer.
    pub(super) fn pause(&mut self, until_ns: u64) {
        (self.pause_ns, self.retry_ns, self.repeat_ns) = (Some(until_ns), None, None);
    }

    /// Ends the wait, as an answer arrived.
    pub(super) fn progress(&mut self) {
        (self.pause_ns, self.retry_ns, self.repeat_ns) = (None, None, None);
    }

    /// Adds a measured round trip: the time between a packet that was sent once and its answer (RFC
    /// 6298, 2 and 3).
    pub(super) fn measured(&mut self, sample_ns: u64) {
        self.backoff = 0;
        self.round_trip_ns = Some(match self.round_trip_ns {
            None => (sample_ns, sample_ns / 2),
            Some((smoothed, variation)) => (
                smoothed - smoothed / 8 + sample_ns / 8,
                variation - variation / 4 + smoothed.abs_diff(sample_ns) / 4,
            ),
        });
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
        // The backoff grows only while the wait is below the time-out, so the shift in `wait` does
        // not overflow.
        self.backoff += 1;
        self.wait(now_ns);
        // `wait` set a new retry time, but a repeat does not extend the time-out.
        self.retry_ns = retry_ns;
        Some(Due::Repeat)
    }
}
