//! The policies of one daemon, put together.

use super::rtt::RttProbe;
use super::rule::{Polled, Round, Rule};
use super::{PolicyOptions, PolicyReport, Sample};

/// The rules that a job asked for, as the one policy of a daemon.
#[derive(Debug)]
pub struct Governor {
    rules: Vec<Box<dyn Rule>>,
    rtt: Option<RttProbe>,
    round: Round,
    /// The round takes requests.
    pub(super) takes_requests: bool,
    /// Requests sent up to the last flush.
    sent: u64,
}

impl Governor {
    /// Returns the governor of a daemon in a job of `ranks`, or `None` if the job asks for nothing.
    #[must_use]
    pub fn new(options: &PolicyOptions, ranks: usize) -> Option<Box<Self>> {
        let rules = options.rules(ranks);
        let rtt = rules.iter().filter_map(|rule| rule.rtt_weight()).min_by(f64::total_cmp).map(RttProbe::new);
        (!rules.is_empty()).then(|| Box::new(Self { rules, rtt, round: Round::default(), takes_requests: true, sent: 0 }))
    }

    /// Begins a round, with so many requests `outstanding` at other ranks.
    pub fn begin(&mut self, now_ns: u64, outstanding: usize) {
        let Self { rules, round, .. } = self;
        (round.now_ns, round.outstanding) = (now_ns, outstanding);
        self.takes_requests = rules.iter_mut().fold(true, |takes, rule| takes & rule.takes_requests(round));
    }

    /// Returns what was done so far.
    #[must_use]
    pub fn report(&self) -> PolicyReport {
        let mut report = PolicyReport { rtt_ns: self.rtt_ns(), ..PolicyReport::default() };
        self.rules.iter().for_each(|rule| rule.report(&mut report));
        report
    }

    /// Returns the state of its rules, for the series of the daemon.
    #[must_use]
    pub fn gauges(&self) -> Sample {
        let mut sample = Sample { rtt_ns: self.rtt_ns(), ..Sample::default() };
        self.rules.iter().for_each(|rule| rule.gauge(&mut sample));
        sample
    }

    fn rtt_ns(&self) -> u64 {
        self.round.rtt_ns.map_or(0, |ns| ns as u64)
    }
}

/// The questions of [`Policy`](super::Policy); see there. Every rule is asked, as each counts what it was asked.
impl Governor {
    pub(super) fn open_links(&mut self, links: usize, has_work: bool) -> Option<usize> {
        let Self { rules, round, .. } = self;
        rules.iter_mut().filter_map(|rule| rule.open_links(round, links, has_work)).min()
    }

    pub(super) fn extra_polls(&self) -> u32 {
        self.rules.iter().map(|rule| rule.extra_polls()).sum()
    }

    pub(super) fn keeps_answer(&mut self) -> bool {
        let Self { rules, round, .. } = self;
        rules.iter_mut().fold(false, |keeps, rule| keeps | rule.keeps_answer(round))
    }

    pub(super) fn polled(&mut self, polls: u32, cqes: usize, passed: usize) {
        let Self { rules, rtt, round, .. } = self;
        if let Some(rtt) = rtt.as_mut().filter(|_| cqes > 0) {
            rtt.completed(round.now_ns);
            round.rtt_ns = rtt.rtt_ns();
        }
        rules.iter_mut().for_each(|rule| rule.polled(round, Polled { polls, cqes, passed }));
    }

    pub(super) fn releases(&mut self) -> bool {
        let Self { rules, round, .. } = self;
        rules.iter_mut().fold(false, |releases, rule| releases | rule.releases(round))
    }

    pub(super) fn looks_at_clients(&mut self) -> bool {
        self.rules.iter_mut().fold(true, |looks, rule| looks & rule.looks_at_clients())
    }

    pub(super) fn looked_at_clients(&mut self, found: usize) {
        self.rules.iter_mut().for_each(|rule| rule.looked_at_clients(found));
    }

    pub(super) fn flushes(&mut self, has_moved: bool) -> bool {
        self.rules.iter_mut().fold(true, |flushes, rule| flushes & rule.flushes(has_moved))
    }

    pub(super) fn flushed(&mut self, sent: u64) {
        if std::mem::replace(&mut self.sent, sent) == sent {
            return;
        }
        // The round's begin stands for its end: rounds are short beside a round trip, or there is nothing to gain.
        let now_ns = self.round.now_ns;
        if let Some(rtt) = &mut self.rtt {
            rtt.flushed(now_ns);
        }
        self.rules.iter_mut().for_each(|rule| rule.sent(now_ns));
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
        let mut governor = governor(|options| options.polls.poll_budget = 3);
        governor.begin(100, 7);
        assert_eq!((governor.open_links(3, true), governor.extra_polls()), (None, 3));
        assert!(!governor.keeps_answer() && !governor.releases() && governor.takes_requests);
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
        let mut governor = governor(|options| options.hold.hold_rtt_multiplier = Some(2.0));
        assert_eq!(governor.report().hold_ns, 10_000, "before one is known");
        for (now_ns, sent, cqes) in [(1_000, 0, 0), (2_000, 5, 0), (4_000, 5, 0), (6_000, 5, 3)] {
            governor.begin(now_ns, 5);
            governor.polled(1, cqes, 0);
            governor.flushed(sent);
        }
        assert_eq!((governor.rtt_ns(), governor.report().hold_ns), (4_000, 8_000));
    }

    #[test]
    fn the_budget_learns_only_from_rounds_that_wait_for_something() {
        let mut governor = governor(|options| options.polls.adaptive_budget = true);
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
        assert_eq!(governor(|options| options.hold.batch_hold_us = Some(20.0)).report().hold_ns, 20_000);
        let adaptive = |hold: Option<f64>| {
            let mut governor = governor(|options| (options.hold.batch_hold_us, options.hold.adaptive_hold) = (hold, true));
            let initial_ns = governor.report().hold_ns;
            governor.begin(1_000, 1);
            assert!(governor.keeps_answer());
            governor.begin(1_000_000, 1);
            assert!(governor.releases());
            (initial_ns, governor.report().hold_ns > initial_ns, governor.report().late_releases)
        };
        assert_eq!(adaptive(None), (10_000, true, 1));
        assert_eq!(adaptive(Some(5.0)), (5_000, true, 1));
    }

    #[test]
    fn staggering_ends_when_all_may_send() {
        let mut governor = governor(|options| options.stagger.initial_stagger_us = Some(1.0));
        let opened = [(0, false), (500, true), (1_500, true), (2_500, true), (2_600, true)].map(|(now_ns, has_work)| {
            governor.begin(now_ns, 0);
            governor.open_links(3, has_work)
        });
        assert_eq!(opened, [Some(1), Some(1), Some(2), Some(3), None]);
    }
}
