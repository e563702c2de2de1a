//! [`Policy`]: all rules of one daemon.

use super::hold::{Hold, Release};
use super::{PolicyOptions, PolicyReport, PollBudget};

/// The plan of one round of a daemon. It restricts nothing unless a rule acts.
#[derive(Debug, Clone, Copy)]
pub struct RoundPlan {
    /// Number of polls to add to the round until its polls have found enough completions.
    pub extra: PollBudget,
    /// Maximum number of answers that the daemon holds until [`Policy::releases`] returns `true`.
    /// The daemon delivers further answers at once.
    pub most_held: usize,
    /// Whether the round takes requests.
    pub takes_requests: bool,
}

impl RoundPlan {
    const FREE: Self = Self {
        extra: PollBudget::NONE,
        most_held: 0,
        takes_requests: true,
    };
}

/// The result of a round's polls.
#[derive(Debug, Clone, Copy, Default)]
pub struct Found {
    /// Number of polls.
    pub polls: u32,
    /// Answers that were delivered at once.
    pub passed: usize,
    /// Answers that are held, including answers of earlier rounds.
    pub held: usize,
}

/// The policy of one daemon: all rules of the job. A round begins with the [`plan`](Self::plan) of
/// the rules, and passes the findings of its polls to [`releases`](Self::releases). Each
/// restriction is bounded in time. Without rules there are no restrictions, and a call of this type
/// costs one branch that the processor predicts.
#[derive(Debug)]
pub struct Policy {
    has_rules: bool,
    acts: bool,
    plan: RoundPlan,
    now_ns: u64,
    hold: Option<Hold>,
    coalesce: Option<Coalesce>,
    extra: PollBudget,
    flush_every: u32,
    /// Rounds with work since the last flush.
    unflushed: u32,
    /// Requests sent up to the last flush.
    sent: u64,
    done: PolicyReport,
}

impl Policy {
    /// Makes the policy of a daemon in a job of `ranks`.
    pub fn new(options: &PolicyOptions, ranks: usize) -> Self {
        let mut policy = Self {
            has_rules: options.govern(),
            acts: false,
            plan: RoundPlan::FREE,
            now_ns: 0,
            hold: Hold::new(options.hold, ranks),
            coalesce: options.coalesce_rtt_us.map(Coalesce::new),
            extra: options.poll_budget,
            flush_every: options.flush_every,
            unflushed: 0,
            sent: 0,
            done: PolicyReport::default(),
        };
        policy.act(true);
        policy
    }

    /// Switches the rules on or off; they are on from the start. After a switch, the daemon has to
    /// deliver the answers that it holds.
    pub fn act(&mut self, acts: bool) {
        self.acts = acts && self.has_rules;
        self.plan = RoundPlan::FREE;
        if self.acts {
            self.plan.extra = self.extra;
        }
    }

    /// Returns whether a rule that acts depends on the time. If not, the plan is the same for all
    /// rounds, and the daemon does not call [`begin`](Self::begin).
    #[inline]
    pub fn needs_time(&self) -> bool {
        self.acts && (self.hold.is_some() || self.coalesce.is_some())
    }

    /// Begins a round, and makes the plan of the round. `outstanding` requests to other ranks are
    /// in flight.
    pub fn begin(&mut self, now_ns: u64, outstanding: usize) {
        let coalesce = self.coalesce.as_mut();
        let gathers = coalesce.is_some_and(|coalesce| coalesce.gathers(now_ns, outstanding));
        self.done.gathering_rounds += u64::from(gathers);
        self.now_ns = now_ns;
        self.plan = RoundPlan {
            extra: self.extra,
            most_held: self.hold.as_ref().map_or(0, Hold::most_held),
            takes_requests: !gathers,
        };
    }

    /// Returns the plan of the round.
    #[inline]
    pub const fn plan(&self) -> RoundPlan {
        self.plan
    }

    /// Notes what the round's polls found. Returns whether to deliver the held answers now.
    #[inline]
    pub fn releases(&mut self, found: Found) -> bool {
        self.acts && self.releases_after(found)
    }

    fn releases_after(&mut self, found: Found) -> bool {
        self.done.extra_polls += u64::from(found.polls.saturating_sub(1));
        let Some(hold) = &mut self.hold else {
            return false;
        };
        self.done.held += hold.note(found.held, found.passed, self.now_ns);
        match hold.release(self.now_ns) {
            Some(Release::Full) => self.done.full_releases += 1,
            Some(Release::Late) => self.done.late_releases += 1,
            None => return false,
        }
        true
    }

    /// Returns whether this round flushes. `has_moved`: whether the round moved a message. A round
    /// that moved nothing flushes, so that no message waits until new work arrives.
    #[inline]
    pub fn flushes(&mut self, has_moved: bool) -> bool {
        if !self.acts {
            return true;
        }
        self.unflushed += 1;
        let flushes = !has_moved || self.unflushed >= self.flush_every;
        if flushes {
            self.unflushed = 0;
        }
        self.done.delayed_flushes += u64::from(!flushes);
        flushes
    }

    /// Notes a flush; `sent` requests were sent to other ranks since the start.
    #[inline]
    pub fn flushed(&mut self, sent: u64) {
        let Some(coalesce) = self.coalesce.as_mut().filter(|_| self.acts) else {
            return;
        };
        // The beginning of the round is used as the time of the flush. The error does not matter:
        // either rounds are short compared with a round trip, or coalescing gains nothing.
        if std::mem::replace(&mut self.sent, sent) != sent {
            coalesce.sent_ns = Some(self.now_ns);
        }
    }

    /// Returns the maximum time for which an answer that arrives now is held, in ns; 0 if answers
    /// are not held.
    pub fn hold_ns(&self) -> u64 {
        let hold = self.hold.as_ref().filter(|_| self.acts);
        hold.map_or(0, Hold::hold_ns)
    }

    /// Returns the counters; `None` without rules.
    pub fn report(&self) -> Option<PolicyReport> {
        self.has_rules.then(|| PolicyReport {
            hold_ns: self.hold.as_ref().map_or(0, Hold::hold_ns),
            ..self.done
        })
    }
}

/// Receive coalescing: a daemon that has sent requests takes only answers for some time.
#[derive(Debug)]
struct Coalesce {
    wait_ns: u64,
    sent_ns: Option<u64>,
}

impl Coalesce {
    fn new(wait_us: f64) -> Self {
        Self {
            wait_ns: (wait_us * 1000.0).round() as u64,
            sent_ns: None,
        }
    }

    /// Returns whether this round takes only answers: never without requests in flight.
    fn gathers(&mut self, now_ns: u64, outstanding: usize) -> bool {
        let is_waiting = |sent_ns: &u64| now_ns.saturating_sub(*sent_ns) < self.wait_ns;
        self.sent_ns = self
            .sent_ns
            .filter(|sent_ns| outstanding > 0 && is_waiting(sent_ns));
        self.sent_ns.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(set: impl FnOnce(&mut PolicyOptions)) -> Policy {
        let mut options = PolicyOptions::default();
        set(&mut options);
        Policy::new(&options, 4)
    }

    fn hold(choice: &str) -> Policy {
        policy(|options| options.hold = choice.parse().unwrap())
    }

    #[test]
    fn what_is_not_asked_for_restricts_nothing() {
        assert!(policy(|_| ()).report().is_none());
        let mut policy = policy(|options| options.poll_budget.polls = 3);
        policy.act(false);
        assert_eq!(policy.plan().extra.polls, 0);
        policy.act(true);
        let RoundPlan {
            extra,
            most_held,
            takes_requests,
        } = policy.plan();
        assert_eq!((extra.polls, most_held), (3, 0));
        assert!(!policy.needs_time() && takes_requests && policy.flushes(true));
        assert!(!policy.releases(Found {
            polls: 4,
            passed: 1,
            held: 0
        }));
        assert_eq!(
            policy.report().unwrap(),
            PolicyReport {
                extra_polls: 3,
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
    fn each_hold_rule_is_chosen_by_its_flag() {
        assert_eq!(hold("20us").report().unwrap().hold_ns, 20_000);
        let adaptive = |choice| {
            let mut policy = hold(choice);
            let initial_ns = policy.report().unwrap().hold_ns;
            let one_held = Found {
                polls: 1,
                passed: 0,
                held: 1,
            };
            policy.begin(1_000, 1);
            assert!(policy.plan().most_held == 3 && !policy.releases(one_held));
            policy.begin(1_000_000, 1);
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

    /// If a hold is full, the daemon does not hold further answers that arrive, but the hold counts
    /// these answers.
    #[test]
    fn answers_that_pass_a_hold_have_made_it_full() {
        let mut policy = hold("10us");
        assert!(policy.needs_time());
        policy.begin(1_000, 8);
        assert_eq!(policy.plan().most_held, 3);
        assert!(policy.releases(Found {
            polls: 1,
            passed: 2,
            held: 3
        }));
        let report = policy.report().unwrap();
        assert_eq!((report.held, report.full_releases), (5, 1));
        policy.begin(2_000, 8);
        assert_eq!(
            policy.plan().most_held,
            0,
            "a full batch ends the fixed hold"
        );
    }

    #[test]
    fn flushes_wait_for_rounds_but_never_for_work() {
        let mut every_third = policy(|options| options.flush_every = 3);
        let rounds = [
            true, true, true, true, false, true, true, true, false, false,
        ];
        let flushes = [
            false, false, true, false, true, false, false, true, true, true,
        ];
        assert_eq!(
            rounds.map(|has_moved| every_third.flushes(has_moved)),
            flushes
        );
        let mut each = policy(|options| options.poll_budget.polls = 1);
        assert!(each.flushes(true) && each.flushes(false));
    }

    #[test]
    fn gathering_ends_with_its_time_or_when_nothing_can_come() {
        let mut policy = policy(|options| options.coalesce_rtt_us = Some(1.0));
        assert!(policy.needs_time());
        let mut sent = 0;
        let mut send = |policy: &mut Policy, now_ns| {
            policy.begin(now_ns, 1);
            sent += 1;
            policy.flushed(sent);
        };
        let gathers = |policy: &mut Policy, now_ns, outstanding| {
            policy.begin(now_ns, outstanding);
            !policy.plan().takes_requests
        };
        assert!(!gathers(&mut policy, 0, 5), "nothing was sent yet");
        send(&mut policy, 100);
        assert!(gathers(&mut policy, 100, 5) && gathers(&mut policy, 1_099, 1));
        assert!(!gathers(&mut policy, 1_100, 5));
        send(&mut policy, 2_000);
        assert!(!gathers(&mut policy, 2_001, 0), "no request is in flight");
        assert!(
            !gathers(&mut policy, 2_002, 1),
            "a wait that has ended does not begin again"
        );
        send(&mut policy, 5_000);
        assert!(gathers(&mut policy, 4_000, 1), "time went back");
        assert!(!gathers(&mut policy, 6_000, 1));
    }
}
