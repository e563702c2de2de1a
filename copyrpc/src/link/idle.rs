//! An end on which nothing happens: the check whether its peer still exists (K4 of
//! docs/copyrpc-protocol.md), and the limit of its idleness (K5).

use super::Link;
use crate::error::CloseReason;

const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct Idle {
    keepalive_ns: u64,
    timeout_ns: u64,
    /// Number of batches sent and received at the last check; [`NEVER`] before the first check.
    batches: u64,
    /// Time of the last check that found something outstanding, or more batches than the check
    /// before, in ns.
    since_ns: u64,
    /// Whether the peer is known to have connected its end.
    has_met_peer: bool,
    pub(super) probe_is_due: bool,
}

impl Idle {
    pub(super) const fn new(keepalive_ns: u64, timeout_ns: u64) -> Self {
        Self {
            keepalive_ns,
            timeout_ns,
            batches: NEVER,
            since_ns: 0,
            has_met_peer: false,
            probe_is_due: false,
        }
    }
}

impl<U> Link<U> {
    /// Notes that the peer has connected its end, so that idle checks READ the peer's record even
    /// before the first message (K4).
    pub(crate) fn note_peer_connected(&mut self) {
        self.idle.has_met_peer = true;
    }

    /// Checks whether anything happened since the last check. Called when the connection was made,
    /// and at the times that [`Link::next_idle_check`] returns. If nothing happened, asks for a
    /// READ (K4), or begins the graceful end when the idle timeout has passed (K5). Returns whether
    /// the next flush has work because of this check.
    pub(crate) fn check_idle(&mut self, now_ns: u64) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let batches = self.tx.batches_sent() + self.rx.batches_received();
        let is_still = std::mem::replace(&mut self.idle.batches, batches) == batches;
        if !is_still || self.is_timed() {
            self.idle.since_ns = now_ns;
        }
        if self.ending.is_none()
            && now_ns.saturating_sub(self.idle.since_ns) >= self.idle.timeout_ns
        {
            self.begin_closing(CloseReason::IdleTimeout);
            return true;
        }
        let has_met_peer = batches > 0 || self.idle.has_met_peer;
        // While this end waits for something, K1 watches the peer, and no READ is due here.
        self.idle.probe_is_due = self.idle.keepalive_ns != NEVER
            && is_still
            && has_met_peer
            && !self.is_watching()
            && !self.read_in_flight;
        self.idle.probe_is_due
    }

    /// Asks for a READ of the peer's record now. Called on a sign that the peer is gone (K4).
    /// Returns whether the next flush has a READ to post.
    pub(crate) fn want_probe(&mut self) -> bool {
        self.idle.probe_is_due |= self.closed.is_none() && !self.read_in_flight;
        self.idle.probe_is_due
    }

    /// Returns the time of the next check, in ns, after a check at `now_ns`; `None` for never.
    pub(crate) fn next_idle_check(&self, now_ns: u64) -> Option<u64> {
        let Idle {
            keepalive_ns,
            timeout_ns,
            since_ns,
            ..
        } = self.idle;
        let timeout_at_ns = if self.ending.is_some() {
            NEVER
        } else {
            since_ns.saturating_add(timeout_ns)
        };
        let at_ns = now_ns.saturating_add(keepalive_ns).min(timeout_at_ns);
        (self.closed.is_none() && at_ns != NEVER).then_some(at_ns)
    }
}
