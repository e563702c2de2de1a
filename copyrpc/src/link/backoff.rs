//! The pause of an end that waits for its peer's words, after READs that brought none (L5 of
//! docs/copyrpc-protocol.md).

/// Maximum number of calls of [`Link::poll_read`](super::Link::poll_read) that post no READ,
/// although a READ is wanted, after a READ without new words.
const MAX_PAUSE: u32 = 64;
/// Time, in ns, that counts as much as one poll of the pause.
const POLL_NS: u64 = 1_000_000;

#[derive(Debug)]
pub(super) struct Backoff {
    /// Number of polls to skip after the last READ; 0 if the READ brought words.
    pause: u32,
    left: u32,
    /// Time of the first skipped poll, in ns.
    since_ns: u64,
    /// Number of batches that had arrived at the last check. The next check ends the pause if the
    /// number has changed, so an arrival need not do that.
    arrived: u64,
}

impl Backoff {
    pub(super) const fn new() -> Self {
        Self {
            pause: 0,
            left: 0,
            since_ns: 0,
            arrived: 0,
        }
    }

    /// Returns whether a wanted READ is posted at this poll; `arrived` is the number of batches
    /// that have arrived in total. The pause also ends after as many milliseconds as it has polls:
    /// an owner that sleeps between polls need not wake for each of them.
    #[inline(never)]
    pub(super) const fn ends_at_this_poll(&mut self, arrived: u64, now_ns: u64) -> bool {
        if arrived != self.arrived {
            self.arrived = arrived;
            self.news();
        }
        if self.left == 0 {
            return true;
        }
        if self.left == self.pause {
            self.since_ns = now_ns;
        }
        self.left -= 1;
        self.rest_ns(now_ns) == 0
    }

    pub(super) const fn rest_ns(&self, now_ns: u64) -> u64 {
        (self.since_ns + self.pause as u64 * POLL_NS).saturating_sub(now_ns)
    }

    pub(super) fn idle_read(&mut self) {
        self.pause = (2 * self.pause).clamp(1, MAX_PAUSE);
        self.left = self.pause;
    }

    pub(super) const fn news(&mut self) {
        self.pause = 0;
        self.left = 0;
    }
}

#[cfg(test)]
impl Backoff {
    /// Changes the state as if `batches` had arrived before.
    pub(super) const fn skip(&mut self, batches: u64) {
        self.arrived = batches;
    }
}
