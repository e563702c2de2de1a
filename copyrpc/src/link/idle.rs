//! An end on which nothing happens: whether its peer is there still (K4), and when it has lasted too long (K5).

use super::Link;
use crate::error::CloseReason;

const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct Idle {
    keepalive_ns: u64,
    timeout_ns: u64,
    /// Batches sent and received at the last look; before the first, a number that they never are.
    batches: u64,
    /// The look that found something outstanding, or more batches than the one before.
    since_ns: u64,
    /// The peer is known to have connected its end.
    has_met_peer: bool,
    /// The peer is to be READ.
    pub(super) probe_is_due: bool,
}

impl Idle {
    pub(super) const fn new(keepalive_ns: u64, timeout_ns: u64) -> Self {
        Self { keepalive_ns, timeout_ns, batches: NEVER, since_ns: 0, has_met_peer: false, probe_is_due: false }
    }
}

impl<U> Link<U> {
    /// The peer has connected its end, so that a READ finds it even before the first message.
    pub(crate) fn note_peer_connected(&mut self) {
        self.idle.has_met_peer = true;
    }

    /// Looks whether anything happened since the last look; called when the connection was made, and at the times that
    /// [`Link::next_idle_look`] says. Asks for a READ if
    /// not (K4), and ends the connection when that has lasted too long (K5). Whether a flush has something to do for that.
    pub(crate) fn look_idle(&mut self, now_ns: u64) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let batches = self.tx.batches_sent() + self.rx.batches_received();
        let is_still = std::mem::replace(&mut self.idle.batches, batches) == batches;
        if !is_still || self.is_timed() {
            self.idle.since_ns = now_ns;
        }
        if self.ending.is_none() && now_ns.saturating_sub(self.idle.since_ns) >= self.idle.timeout_ns {
            self.begin_closing(CloseReason::IdleTimeout);
            return true;
        }
        let has_met_peer = batches > 0 || self.idle.has_met_peer;
        // K1 watches a peer that something is waited for.
        self.idle.probe_is_due = self.idle.keepalive_ns != NEVER && is_still && has_met_peer && !self.is_watching() && !self.read_in_flight;
        self.idle.probe_is_due
    }

    /// When to look next, after a look at `now_ns`; `None` for never.
    #[must_use]
    pub(crate) fn next_idle_look(&self, now_ns: u64) -> Option<u64> {
        let Idle { keepalive_ns, timeout_ns, since_ns, .. } = self.idle;
        let timeout_at_ns = if self.ending.is_some() { NEVER } else { since_ns.saturating_add(timeout_ns) };
        let at_ns = now_ns.saturating_add(keepalive_ns).min(timeout_at_ns);
        (self.closed.is_none() && at_ns != NEVER).then_some(at_ns)
    }
}
