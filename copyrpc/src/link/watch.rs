//! Watches a peer that owes this end something: when to probe it (K1 of docs/copyrpc-protocol.md),
//! and when to give it up although its device answers (K2).

/// Number of READs without news before a peer counts as stalled.
const IDLE_PROBES: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Wait,
    Probe,
    Stalled,
}

#[derive(Debug)]
pub(super) struct Watch {
    keepalive_ns: u64,
    stall_ns: u64,
    /// Whether the peer acted since the last check, or the watch has begun.
    has_news: bool,
    /// Whether a READ without news completed since the last check: the peer's device answers.
    is_answering: bool,
    /// Time since which the peer's device has been silent, in ns.
    silent_since_ns: u64,
    /// Time since which the peer has done nothing, in ns.
    idle_since_ns: u64,
    last_look_ns: u64,
    /// Number of READs without news since the last news.
    idle_probes: u32,
}

impl Watch {
    pub(super) const fn new(keepalive_ns: u64, stall_ns: u64) -> Self {
        Self {
            keepalive_ns,
            stall_ns,
            has_news: true,
            is_answering: true,
            silent_since_ns: 0,
            idle_since_ns: 0,
            // An impossible time, so the first check has a new time.
            last_look_ns: u64::MAX,
            idle_probes: 0,
        }
    }

    /// Notes an action of the peer, or the beginning of a wait for the peer.
    pub(super) const fn news(&mut self) {
        self.has_news = true;
    }

    pub(super) const fn idle_probe(&mut self) {
        self.is_answering = true;
        self.idle_probes = self.idle_probes.saturating_add(1);
    }

    /// Notes that the peer has run a handler since the last time that it seemed stalled: the peer
    /// gets another quarter of `stall_ns` (K7).
    pub(super) const fn doubt(&mut self) {
        self.is_answering = true;
        self.idle_probes = 0;
        self.idle_since_ns = self.last_look_ns.saturating_sub(self.stall_ns / 4 * 3);
    }

    /// Returns whether at least [`IDLE_PROBES`] READs have completed since the last news.
    pub(super) const fn is_silent(&self) -> bool {
        !self.has_news && self.idle_probes >= IDLE_PROBES
    }

    /// Returns whether no check was made at this time before: further checks at the same time have
    /// no effect.
    #[inline(always)]
    pub(super) const fn is_new_time(&self, now_ns: u64) -> bool {
        now_ns != self.last_look_ns
    }

    /// Checks for how long the peer has been silent. Called repeatedly while the peer owes
    /// something.
    pub(super) const fn check(&mut self, now_ns: u64) -> Verdict {
        if !self.is_new_time(now_ns) {
            return Verdict::Wait;
        }
        // This process was stopped, or checks too rarely to know the peer's actions.
        let was_away = now_ns.saturating_sub(self.last_look_ns) > self.stall_ns / 4;
        self.last_look_ns = now_ns;
        if self.has_news || was_away {
            self.idle_since_ns = now_ns;
            self.idle_probes = 0;
        }
        if self.has_news || self.is_answering {
            self.silent_since_ns = now_ns;
        }
        self.has_news = false;
        self.is_answering = false;
        if self.is_silent() && now_ns.saturating_sub(self.idle_since_ns) >= self.stall_ns {
            Verdict::Stalled
        } else if now_ns.saturating_sub(self.silent_since_ns) >= self.keepalive_ns {
            Verdict::Probe
        } else {
            Verdict::Wait
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks every `step`; each probe is answered at once, without news. Returns the time at which
    /// the peer counts as stalled, if before `end`.
    fn stalled_at(watch: &mut Watch, from: u64, end: u64, step: u64) -> Option<u64> {
        (from..end)
            .step_by(step as usize)
            .find(|now| match watch.check(*now) {
                Verdict::Stalled => true,
                Verdict::Wait => false,
                Verdict::Probe => {
                    watch.idle_probe();
                    false
                }
            })
    }

    #[test]
    fn a_peer_without_news_is_stalled_after_the_timeout_and_news_begin_it_again() {
        let mut watch = Watch::new(100, 5_000);
        assert_eq!(stalled_at(&mut watch, 10, 4_000, 10), None);
        watch.news();
        assert_eq!(stalled_at(&mut watch, 4_000, 20_000, 10), Some(9_000));
    }

    #[test]
    fn time_alone_calls_nobody_stalled() {
        let mut watch = Watch::new(100, 5_000);
        for now in (0..100_000).step_by(10) {
            assert_ne!(watch.check(now), Verdict::Stalled, "no probe was answered");
        }
        let mut watch = Watch::new(3_000, 5_000);
        assert_eq!(
            stalled_at(&mut watch, 0, 20_000, 10),
            Some(9_030),
            "three probes"
        );
    }

    #[test]
    fn a_process_that_was_stopped_looks_again_for_the_whole_timeout() {
        let mut watch = Watch::new(100, 5_000);
        assert_eq!(stalled_at(&mut watch, 0, 4_990, 10), None);
        assert_eq!(stalled_at(&mut watch, 600_000, 700_000, 10), Some(605_000));
    }

    #[test]
    fn an_owner_that_looks_rarely_still_probes() {
        let mut watch = Watch::new(100, 5_000);
        watch.check(0);
        assert_eq!(watch.check(2_000), Verdict::Probe);
    }
}
