//! [`Policy`]: all rules of one daemon.

use super::rtt::RttProbe;
use super::rule::{Found, RoundPlan, RoundState, Rule};
use super::{PolicyOptions, PolicyReport, Sample};

/// The rules that a job asks for, as one policy of a daemon. A round begins with their
/// [`plan`](Self::plan), and ends with what it found; each restriction is bounded in time. Without
/// a rule everything is done at once, and a question costs one branch that always goes the same
/// way.
#[derive(Debug)]
pub struct Policy {
    rules: Vec<Box<dyn Rule>>,
    /// The rules while they rest; else empty.
    resting: Vec<Box<dyn Rule>>,
    rtt: Option<RttProbe>,
    round: RoundState,
    plan: RoundPlan,
    /// Requests sent up to the last flush.
    sent: u64,
}

impl Policy {
    /// Makes the policy of a daemon in a job of `ranks`.
    #[must_use]
    pub fn new(options: &PolicyOptions, ranks: usize) -> Self {
        let rules = options.rules(ranks);
        let rtt = rules
            .iter()
            .filter_map(|rule| rule.rtt_weight())
            .min_by(f64::total_cmp)
            .map(RttProbe::new);
        Self {
            rules,
            resting: Vec::new(),
            rtt,
            round: RoundState::default(),
            plan: RoundPlan::default(),
            sent: 0,
        }
    }

    /// Lets the rules act, as they do at first, or rest. The daemon then delivers the answers that
    /// are held.
    pub fn act(&mut self, acts: bool) {
        if acts != self.resting.is_empty() {
            std::mem::swap(&mut self.rules, &mut self.resting);
            self.plan = RoundPlan::default();
        }
    }

    /// Returns whether there are rules that act. Without one no round is begun.
    #[inline]
    #[must_use]
    pub fn acts(&self) -> bool {
        !self.rules.is_empty()
    }

    /// Begins a round: makes its plan. Returns the number of connections that may send.
    pub fn begin(&mut self, state: RoundState) -> usize {
        let Self {
            rules, round, plan, ..
        } = self;
        (*round, *plan) = (
            RoundState {
                rtt_ns: round.rtt_ns,
                ..state
            },
            RoundPlan::default(),
        );
        rules.iter_mut().for_each(|rule| rule.begin(round, plan));
        plan.open_links
    }

    /// Returns the plan of the round.
    #[inline]
    #[must_use]
    pub const fn plan(&self) -> RoundPlan {
        self.plan
    }

    /// Notes what the round's polls found. Returns whether to deliver the held answers now.
    #[inline]
    pub fn releases(&mut self, found: Found) -> bool {
        self.acts() && self.releases_after(found)
    }

    fn releases_after(&mut self, found: Found) -> bool {
        let Self {
            rules, rtt, round, ..
        } = self;
        if let Some(rtt) = rtt.as_mut().filter(|_| found.cqes > 0) {
            rtt.completed(round.now_ns);
            round.rtt_ns = rtt.rtt_ns();
        }
        rules
            .iter_mut()
            .fold(false, |releases, rule| releases | rule.polled(round, found))
    }

    /// Notes the number of requests that a poll of the clients found.
    #[inline]
    pub fn polled_clients(&mut self, found: usize) {
        if self.acts() {
            self.rules
                .iter_mut()
                .for_each(|rule| rule.polled_clients(found));
        }
    }

    /// Returns whether this round flushes. `has_moved`: it moved a message.
    #[inline]
    pub fn flushes(&mut self, has_moved: bool) -> bool {
        self.rules
            .iter_mut()
            .fold(true, |flushes, rule| flushes & rule.flushes(has_moved))
    }

    /// Notes a flush; `sent` requests were sent to other ranks since the start.
    #[inline]
    pub fn flushed(&mut self, sent: u64) {
        if self.rules.is_empty() || std::mem::replace(&mut self.sent, sent) == sent {
            return;
        }
        // The round's begin stands for its end: rounds are short beside a round trip, or there is
        // nothing to gain.
        let now_ns = self.round.now_ns;
        if let Some(rtt) = &mut self.rtt {
            rtt.flushed(now_ns);
        }
        self.rules.iter_mut().for_each(|rule| rule.sent(now_ns));
    }

    /// Returns the state of its rules, for the time series of the daemon.
    #[must_use]
    pub fn gauges(&self) -> Sample {
        let mut sample = Sample::default();
        if !self.rules.is_empty() {
            sample.rtt_ns = self.rtt_ns();
            self.rules.iter().for_each(|rule| rule.gauge(&mut sample));
        }
        sample
    }

    /// Returns the counters so far; `None` without rules.
    #[must_use]
    pub fn report(&self) -> Option<PolicyReport> {
        let rules = if self.rules.is_empty() {
            &self.resting
        } else {
            &self.rules
        };
        let mut report = PolicyReport {
            rtt_ns: self.rtt_ns(),
            ..PolicyReport::default()
        };
        rules.iter().for_each(|rule| rule.report(&mut report));
        (!rules.is_empty()).then_some(report)
    }

    fn rtt_ns(&self) -> u64 {
        self.round.rtt_ns.map_or(0, |ns| ns as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PollChoice;

    fn policy(set: impl FnOnce(&mut PolicyOptions)) -> Policy {
        let mut options = PolicyOptions::default();
        set(&mut options);
        Policy::new(&options, 4)
    }

    fn begin(policy: &mut Policy, now_ns: u64, outstanding: usize) {
        policy.begin(RoundState {
            now_ns,
            outstanding,
            ..RoundState::default()
        });
    }

    const ONE_POLL: Found = Found {
        polls: 1,
        cqes: 0,
        passed: 0,
        held: 0,
    };

    fn hold(choice: &str) -> Policy {
        policy(|options| options.hold.hold = choice.parse().unwrap())
    }

    #[test]
    fn what_is_not_asked_for_restricts_nothing() {
        assert!(Policy::new(&PolicyOptions::default(), 4).report().is_none());
        let mut policy = policy(|options| options.polls.poll_budget = PollChoice::Fixed(3));
        begin(&mut policy, 100, 7);
        let RoundPlan {
            open_links,
            extra_polls,
            most_held,
            takes_requests,
            polls_clients,
        } = policy.plan();
        assert_eq!((open_links, extra_polls, most_held), (usize::MAX, 3, 0));
        assert!(takes_requests && polls_clients && policy.flushes(true));
        assert!(!policy.releases(Found {
            polls: 4,
            cqes: 1,
            passed: 1,
            held: 0
        }));
        let report = policy.report().unwrap();
        assert_eq!(
            report,
            PolicyReport {
                extra_polls: 3,
                poll_budget: 3,
                poll_budget_peak: 3,
                ..PolicyReport::default()
            }
        );
    }

    #[test]
    fn reports_add_up_and_say_what_was_done() {
        let mut sum = PolicyReport::default();
        assert_eq!(sum.to_string(), "nothing to do");
        for hold_ns in [500, 9_000, 700] {
            sum.add(&PolicyReport {
                held: 2,
                late_releases: 1,
                hold_ns,
                delayed_flushes: 5,
                ..PolicyReport::default()
            });
        }
        assert_eq!(
            sum.to_string(),
            "6 answers held, released 0 times full and 3 times late, hold 9000 ns at the end, 15 flushes delayed"
        );
    }

    #[test]
    fn the_round_trip_is_that_of_flushes_that_sent_something_and_sets_the_hold() {
        let mut policy = hold("rtt:2");
        assert_eq!(
            policy.report().unwrap().hold_ns,
            10_000,
            "before one is known"
        );
        for (now_ns, sent, cqes) in [(1_000, 0, 0), (2_000, 5, 0), (4_000, 5, 0), (6_000, 5, 3)] {
            begin(&mut policy, now_ns, 5);
            policy.releases(Found { cqes, ..ONE_POLL });
            policy.flushed(sent);
        }
        assert_eq!(
            (policy.rtt_ns(), policy.report().unwrap().hold_ns),
            (4_000, 8_000)
        );
    }

    #[test]
    fn the_budget_learns_only_from_rounds_that_wait_for_something() {
        let mut policy = policy(|options| options.polls.poll_budget = PollChoice::Adaptive(0));
        for round in 0..2_000 {
            begin(&mut policy, round * 100, 0);
            policy.releases(ONE_POLL);
        }
        assert_eq!(policy.plan().extra_polls, 0);
        for round in 2_000..4_000 {
            begin(&mut policy, round * 100, 1);
            policy.releases(ONE_POLL);
        }
        assert_eq!(
            policy.report().unwrap().poll_budget_peak,
            8,
            "it has collapsed, and no round trip is known"
        );
    }

    #[test]
    fn each_hold_rule_is_chosen_by_its_flag() {
        assert_eq!(hold("20us").report().unwrap().hold_ns, 20_000);
        let adaptive = |choice| {
            let mut policy = hold(choice);
            let initial_ns = policy.report().unwrap().hold_ns;
            let one_held = Found {
                held: 1,
                ..ONE_POLL
            };
            begin(&mut policy, 1_000, 1);
            assert!(policy.plan().most_held == 3 && !policy.releases(one_held));
            begin(&mut policy, 1_000_000, 1);
            assert!(policy.releases(one_held));
            (
                initial_ns,
                policy.report().unwrap().hold_ns > initial_ns,
                policy.report().unwrap().late_releases,
            )
        };
        assert_eq!(adaptive("adaptive"), (10_000, true, 1));
        assert_eq!(adaptive("adaptive:5us"), (5_000, true, 1));
    }

    /// The daemon does not put aside what comes when a hold is full, and the hold counts it.
    #[test]
    fn answers_that_pass_a_hold_have_made_it_full() {
        let mut policy = hold("10us");
        begin(&mut policy, 1_000, 8);
        assert_eq!(policy.plan().most_held, 3);
        assert!(policy.releases(Found {
            polls: 1,
            cqes: 1,
            passed: 2,
            held: 3
        }));
        let report = policy.report().unwrap();
        assert_eq!((report.held, report.full_releases), (5, 1));
        begin(&mut policy, 2_000, 8);
        assert_eq!(
            policy.plan().most_held,
            0,
            "a full batch ends the fixed hold"
        );
    }

    #[test]
    fn staggering_ends_when_all_may_send() {
        let mut policy = policy(|options| options.stagger.initial_stagger_us = Some(1.0));
        let opened = [
            (0, false),
            (500, true),
            (1_500, true),
            (2_500, true),
            (2_600, true),
        ]
        .map(|(now_ns, has_work)| {
            policy.begin(RoundState {
                now_ns,
                links: 3,
                has_work,
                ..RoundState::default()
            })
        });
        assert_eq!(opened, [1, 1, 2, 3, usize::MAX]);
    }
}
