//! The policies of one daemon, put together.

use std::fmt;

use super::budget::{BudgetController, Observed};
use super::defer::{Coalesce, FlushEvery, SkipIdle, Stagger};
use super::hold::{Hold, HoldRule, Release};
use super::options::{DEFAULT_HOLD_US, PolicyOptions, nanos};
use super::rtt::RttProbe;
use crate::counters;
use crate::trace::Sample;

/// Weight of the newest round trip: in what the hold is a multiple of, and in what the budget is chosen by.
const HOLD_RTT_ALPHA: f64 = 0.125;
const BUDGET_RTT_ALPHA: f64 = 0.02;

/// Polls added to a round.
#[derive(Debug)]
enum Budget {
    Fixed(u32),
    Adaptive(Box<BudgetController>),
}

/// What a job asked for, as the policy of one of its daemons.
#[derive(Debug)]
pub struct Governor {
    hold: Option<Hold>,
    budget: Budget,
    coalesce: Option<Coalesce>,
    flush_every: Option<FlushEvery>,
    skip_idle: Option<SkipIdle>,
    stagger: Option<Stagger>,
    rtt: Option<RttProbe>,
    /// When this round began, and the one before.
    now_ns: u64,
    last_ns: Option<u64>,
    /// Requests sent up to the last flush.
    sent: u64,
    /// Whether requests are under way, as this round began.
    is_waiting: bool,
    report: PolicyReport,
}

counters! {
    /// What the policies of a daemon did in the whole job; of several, of what can be compared only, the larger.
    pub struct PolicyReport {
        /// Answers held back.
        sum held,
        /// Releases because enough were held.
        sum full_releases,
        /// Releases because their time had come.
        sum late_releases,
        /// How long answers are held at most, at the end; 0: not.
        max hold_ns,
        /// Polls added to rounds.
        sum extra_polls,
        /// How many may be added, at the end.
        max poll_budget,
        /// The most that could be.
        max poll_budget_peak,
        /// Rounds that took nothing but answers.
        sum gathering_rounds,
        /// Rounds that left what they gathered for a later flush.
        sum delayed_flushes,
        /// Rounds that did not look at clients.
        sum skipped_looks,
        /// Rounds before all connections could send.
        sum staggered_rounds,
        /// From a flush to the next completion, smoothed; 0: not measured.
        max rtt_ns,
    }
}

/// What was done, in words; what was not is left out.
impl fmt::Display for PolicyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let holds = format!(
            "{} answers held, released {} times full and {} times late, hold {} ns at the end",
            self.held, self.full_releases, self.late_releases, self.hold_ns
        );
        let parts = [
            (self.held, holds),
            (
                self.extra_polls,
                format!("{} polls added, budget {} at the end, peak {}", self.extra_polls, self.poll_budget, self.poll_budget_peak),
            ),
            (self.gathering_rounds, format!("{} rounds for answers only", self.gathering_rounds)),
            (self.delayed_flushes, format!("{} flushes delayed", self.delayed_flushes)),
            (self.skipped_looks, format!("{} looks at clients left out", self.skipped_looks)),
            (self.staggered_rounds, format!("{} staggered rounds", self.staggered_rounds)),
            (self.rtt_ns, format!("round trip {} ns", self.rtt_ns)),
        ];
        let done: Vec<String> = parts.into_iter().filter_map(|(count, text)| (count > 0).then_some(text)).collect();
        f.write_str(if done.is_empty() { "nothing to do" } else { "" })?;
        f.write_str(&done.join(", "))
    }
}

impl Governor {
    /// Of a daemon in a job of `ranks`; `None`: it is asked for nothing.
    #[must_use]
    pub fn new(options: &PolicyOptions, ranks: usize) -> Option<Box<Self>> {
        if !options.govern() {
            return None;
        }
        let initial_ns = options.batch_hold_us.unwrap_or(DEFAULT_HOLD_US) * 1000.0;
        let rule = match (options.adaptive_hold, options.hold_rtt_multiplier) {
            (true, _) => Some(HoldRule::Adaptive),
            (false, Some(multiplier)) => Some(HoldRule::Rtt(multiplier)),
            (false, None) => options.batch_hold_us.map(|_| HoldRule::Fixed),
        };
        let adaptive = || Budget::Adaptive(Box::new(BudgetController::new(options.budget_tuning)));
        let alpha = if options.adaptive_budget { Some(BUDGET_RTT_ALPHA) } else { options.hold_rtt_multiplier.map(|_| HOLD_RTT_ALPHA) };
        Some(Box::new(Self {
            hold: rule.map(|rule| Hold::new(rule, ranks, initial_ns)),
            budget: if options.adaptive_budget { adaptive() } else { Budget::Fixed(options.poll_budget) },
            coalesce: options.coalesce_rtt_us.map(|us| Coalesce::new(nanos(us))),
            flush_every: (options.flush_every > 1).then(|| FlushEvery::new(options.flush_every)),
            skip_idle: (options.ipc_skip_idle > 0).then(|| SkipIdle::new(options.ipc_skip_idle)),
            stagger: options.initial_stagger_us.map(|us| Stagger::new(nanos(us))),
            rtt: alpha.map(RttProbe::new),
            now_ns: 0,
            last_ns: None,
            sent: 0,
            is_waiting: false,
            report: PolicyReport::default(),
        }))
    }

    /// A round begins, with so many requests `outstanding` at other ranks.
    pub fn begin(&mut self, now_ns: u64, outstanding: usize) {
        (self.now_ns, self.is_waiting) = (now_ns, outstanding > 0);
    }

    /// What was done so far.
    #[must_use]
    pub fn report(&self) -> PolicyReport {
        let (hold_ns, rtt_ns) = (self.hold_ns(), self.rtt_ns());
        PolicyReport { hold_ns, rtt_ns, poll_budget: self.extra_polls().into(), ..self.report }
    }

    /// How its controllers stand, for the series of the daemon.
    #[must_use]
    pub fn gauges(&self) -> Sample {
        let (hold_ns, rtt_ns) = (self.hold_ns(), self.rtt_ns());
        Sample { hold_ns, rtt_ns, poll_budget: self.extra_polls().into(), ..Sample::default() }
    }

    /// How long answers are held at most now; 0: not.
    #[must_use]
    pub fn hold_ns(&self) -> u64 {
        self.hold.as_ref().map_or(0, Hold::hold_ns)
    }

    /// The round trip it reckons with; 0: none.
    #[must_use]
    pub fn rtt_ns(&self) -> u64 {
        self.rtt.as_ref().and_then(RttProbe::rtt_ns).map_or(0, |ns| ns as u64)
    }

    fn note_round_trip(&mut self) {
        let Some(rtt) = &mut self.rtt else { return };
        rtt.completed(self.now_ns);
        if let (Some(hold), Some(rtt_ns)) = (&mut self.hold, rtt.rtt_ns()) {
            hold.set_rtt(rtt_ns);
        }
    }
}

/// What [`Policy`](super::Policy) asks; see there.
impl Governor {
    pub(super) fn open_links(&mut self, links: usize, has_work: bool) -> Option<usize> {
        let open = self.stagger.as_mut()?.open(self.now_ns, has_work);
        self.report.staggered_rounds += u64::from(has_work);
        if open >= links {
            self.stagger = None;
        }
        Some(open)
    }

    pub(super) fn extra_polls(&self) -> u32 {
        match &self.budget {
            Budget::Fixed(polls) => *polls,
            Budget::Adaptive(controller) => controller.polls(),
        }
    }

    pub(super) fn keeps_answer(&mut self) -> bool {
        let keeps = self.hold.as_mut().is_some_and(|hold| hold.keeps(self.now_ns));
        self.report.held += u64::from(keeps);
        keeps
    }

    pub(super) fn polled(&mut self, polls: u32, cqes: usize, passed: usize) {
        self.report.extra_polls += u64::from(polls.saturating_sub(1));
        if cqes > 0 {
            self.note_round_trip();
        }
        if let Some(hold) = &mut self.hold {
            hold.passed(passed);
        }
        let last_ns = self.last_ns.replace(self.now_ns);
        if let (Budget::Adaptive(controller), Some(last_ns)) = (&mut self.budget, last_ns.filter(|_| self.is_waiting)) {
            let rtt_ns = self.rtt.as_ref().and_then(RttProbe::rtt_ns);
            controller.note(Observed { cqes, round_ns: self.now_ns.saturating_sub(last_ns), rtt_ns });
        }
        self.report.poll_budget_peak = self.report.poll_budget_peak.max(self.extra_polls().into());
    }

    pub(super) fn releases(&mut self) -> bool {
        match self.hold.as_mut().and_then(|hold| hold.release(self.now_ns)) {
            Some(Release::Full) => self.report.full_releases += 1,
            Some(Release::Late) => self.report.late_releases += 1,
            None => return false,
        }
        true
    }

    pub(super) fn takes_requests(&mut self, outstanding: usize) -> bool {
        let gathers = self.coalesce.as_mut().is_some_and(|coalesce| coalesce.gathers(self.now_ns, outstanding));
        self.report.gathering_rounds += u64::from(gathers);
        !gathers
    }

    pub(super) fn looks_at_clients(&mut self) -> bool {
        let looks = self.skip_idle.as_mut().is_none_or(SkipIdle::looks);
        self.report.skipped_looks += u64::from(!looks);
        looks
    }

    pub(super) fn looked_at_clients(&mut self, found: usize) {
        if let Some(skip_idle) = &mut self.skip_idle {
            skip_idle.looked(found);
        }
    }

    pub(super) fn flushes(&mut self, has_moved: bool) -> bool {
        let flushes = self.flush_every.as_mut().is_none_or(|policy| policy.flushes(has_moved));
        self.report.delayed_flushes += u64::from(!flushes);
        flushes
    }

    pub(super) fn flushed(&mut self, sent: u64) {
        if std::mem::replace(&mut self.sent, sent) == sent {
            return;
        }
        // The round's begin stands for its end: rounds are short beside a round trip, or there is nothing to gain.
        if let Some(rtt) = &mut self.rtt {
            rtt.flushed(self.now_ns);
        }
        if let Some(coalesce) = &mut self.coalesce {
            coalesce.sent(self.now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn governor(set: impl FnOnce(&mut PolicyOptions)) -> Governor {
        let mut options = PolicyOptions::default();
        set(&mut options);
        *Governor::new(&options, 4).unwrap()
    }

    #[test]
    fn what_is_not_asked_for_restricts_nothing() {
        assert!(Governor::new(&PolicyOptions::default(), 4).is_none());
        let mut governor = governor(|options| options.poll_budget = 3);
        governor.begin(100, 7);
        assert_eq!((governor.open_links(3, true), governor.extra_polls()), (None, 3));
        assert!(!governor.keeps_answer() && !governor.releases() && governor.takes_requests(7));
        assert!(governor.looks_at_clients() && governor.flushes(true));
        governor.polled(4, 1, 1);
        let report = governor.report();
        assert_eq!(report, PolicyReport { extra_polls: 3, poll_budget: 3, poll_budget_peak: 3, ..PolicyReport::default() });
    }

    #[test]
    fn reports_add_up_and_say_what_was_done() {
        let mut sum = PolicyReport::default();
        assert_eq!(sum.to_string(), "nothing to do");
        for hold_ns in [500, 9_000, 700] {
            sum.add(&PolicyReport { held: 2, late_releases: 1, hold_ns, delayed_flushes: 5, ..PolicyReport::default() });
        }
        assert_eq!(sum.to_string(), "6 answers held, released 0 times full and 3 times late, hold 9000 ns at the end, 15 flushes delayed");
    }

    #[test]
    fn the_round_trip_is_that_of_flushes_that_sent_something_and_sets_the_hold() {
        let mut governor = governor(|options| options.hold_rtt_multiplier = Some(2.0));
        assert_eq!(governor.hold_ns(), 10_000, "before one is known");
        for (now_ns, sent, cqes) in [(1_000, 0, 0), (2_000, 5, 0), (4_000, 5, 0), (6_000, 5, 3)] {
            governor.begin(now_ns, 5);
            governor.polled(1, cqes, 0);
            governor.flushed(sent);
        }
        assert_eq!((governor.rtt_ns(), governor.hold_ns()), (4_000, 8_000));
    }

    #[test]
    fn the_budget_learns_only_from_rounds_that_wait_for_something() {
        let mut governor = governor(|options| options.adaptive_budget = true);
        for round in 0..2_000 {
            governor.begin(round * 100, 0);
            governor.polled(1, 0, 0);
        }
        assert_eq!(governor.extra_polls(), 0);
        for round in 2_000..4_000 {
            governor.begin(round * 100, 1);
            governor.polled(1, 0, 0);
        }
        assert_eq!(governor.report().poll_budget_peak, 8, "it has collapsed, and no round trip is known");
    }

    #[test]
    fn each_hold_rule_is_chosen_by_its_flag() {
        assert_eq!(governor(|options| options.batch_hold_us = Some(20.0)).hold_ns(), 20_000);
        let adaptive = |hold: Option<f64>| {
            let mut governor = governor(|options| (options.batch_hold_us, options.adaptive_hold) = (hold, true));
            let initial_ns = governor.hold_ns();
            governor.begin(1_000, 1);
            assert!(governor.keeps_answer());
            governor.begin(1_000_000, 1);
            assert!(governor.releases());
            (initial_ns, governor.hold_ns() > initial_ns, governor.report().late_releases)
        };
        assert_eq!(adaptive(None), (10_000, true, 1));
        assert_eq!(adaptive(Some(5.0)), (5_000, true, 1));
    }

    #[test]
    fn staggering_ends_when_all_may_send() {
        let mut governor = governor(|options| options.initial_stagger_us = Some(1.0));
        let opened = [(0, false), (500, true), (1_500, true), (2_500, true), (2_600, true)].map(|(now_ns, has_work)| {
            governor.begin(now_ns, 0);
            governor.open_links(3, has_work)
        });
        assert_eq!(opened, [Some(1), Some(1), Some(2), Some(3), None]);
    }
}
