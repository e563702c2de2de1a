//! Adaptive poll budget: a controller that adds polls to rounds without completions, so that a
//! round takes as long as the round trip to other ranks.
//!
//! The idea: a round that is much shorter than a round trip finds one completion or none, does
//! little, and so stays short; a longer one finds many, which makes it long. The controller watches
//! the ratio rho of the two times and the share of empty rounds, and adds polls when the daemon is
//! about to fall into the first state. `docs/study.md` judges the idea.

use super::ewma::Ewma;

/// Weight of the newest round in the means of batch, emptiness and length.
const ROUND_ALPHA: f64 = 0.05;
/// A daemon has collapsed if its mean batch is below, and its share of empty rounds is above these
/// values.
const COLLAPSED_BATCH: f64 = 1.0;
const COLLAPSED_EMPTY: f64 = 0.9;
/// Range of the upper limit of the budget.
const MAX_POLLS: std::ops::RangeInclusive<f64> = 8.0..=64.0;
/// Minimum round trip, in ns; a shorter one is a measurement error.
const MIN_RTT_NS: f64 = 500.0;
/// Minimum effect of a poll on the batch.
const MIN_EFFECT: f64 = 1e-6;
/// Ratio of the length of a round to the round trip: below the first, rounds are too short; above
/// the second, polls may be removed.
const RHO_LOW: f64 = 0.8;
const RHO_HIGH: f64 = 1.2;
/// Share of empty rounds: below the first, polls may be removed; above the second, polls are added.
const EMPTY_LOW: f64 = 0.4;
const EMPTY_HIGH: f64 = 0.75;
/// Number of consecutive rounds that adds polls, and that removes polls.
const LOW_NEED: u32 = 64;
const HIGH_NEED: u32 = 128;
/// Number of rounds after a change in which only a collapse changes the budget.
const HOLD_MIN: u32 = 32;
/// Number of rounds of each of the two steps of the identification, and of the polls added in the
/// second.
const IDENTIFY_ROUNDS: u32 = 128;
const PROBE: u32 = 8;

/// The controller.
#[derive(Debug)]
pub struct BudgetController {
    step: Identification,
    /// Polls after the identification.
    then: u32,
    /// Number of rounds from one identification to the next; 0: there is only one.
    again: u32,
    since: u32,
    batch: Ewma,
    empty: Ewma,
    round_ns: Ewma,
    gains: Gains,
    polls: u32,
    low: u32,
    high: u32,
    hold: u32,
}

/// The progress of the identification: rounds without added polls, then rounds with them.
#[derive(Debug, Clone, Copy)]
enum Identification {
    Unaided {
        rounds: u32,
        cqes: u64,
    },
    Probed {
        rounds: u32,
        cqes: u64,
        unaided: f64,
    },
    Done,
}

/// Polls added or removed at a time, and their maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gains {
    step_up: u32,
    step_down: u32,
    max: u32,
}

impl Gains {
    /// Computes the gains from the effect of one poll on the batch, and the round trip.
    fn new(effect: f64, rtt_ns: f64) -> Self {
        let step_up = (2.0 / effect.max(MIN_EFFECT)).round().clamp(1.0, 8.0) as u32;
        Self {
            step_up,
            step_down: (2 * step_up).max(2),
            max: Self::max_polls(rtt_ns),
        }
    }

    /// Returns 2.5 polls for each us of the round trip, within [`MAX_POLLS`].
    fn max_polls(rtt_ns: f64) -> u32 {
        (2.5 * rtt_ns / 1000.0)
            .round()
            .clamp(*MAX_POLLS.start(), *MAX_POLLS.end()) as u32
    }
}

/// The measurements of a round.
#[derive(Debug, Clone, Copy)]
pub struct Observed {
    /// Completions.
    pub cqes: usize,
    /// Length of the round, in ns.
    pub round_ns: u64,
    /// Smoothed round trip, in ns; `None`: not known yet.
    pub rtt_ns: Option<f64>,
}

impl BudgetController {
    /// Makes a controller without observations that identifies again each `again` rounds, or once
    /// if that is 0.
    #[must_use]
    pub fn new(again: u32) -> Self {
        Self {
            step: Identification::Unaided { rounds: 0, cqes: 0 },
            then: PROBE,
            again,
            since: 0,
            batch: Ewma::new(ROUND_ALPHA),
            empty: Ewma::new(ROUND_ALPHA),
            round_ns: Ewma::new(ROUND_ALPHA),
            gains: Gains::new(0.0, 0.0),
            polls: 0,
            low: 0,
            high: 0,
            hold: 0,
        }
    }

    /// Returns the number of polls to add while a round finds nothing.
    #[must_use]
    pub const fn polls(&self) -> u32 {
        self.polls
    }

    /// Notes a round that began with requests in flight; other rounds say nothing.
    pub fn note(&mut self, observed: Observed) {
        let cqes = observed.cqes as f64;
        self.batch.add(cqes);
        self.empty.add(if observed.cqes == 0 { 1.0 } else { 0.0 });
        self.round_ns.add(observed.round_ns as f64);
        let rtt_ns = observed.rtt_ns.unwrap_or(0.0).max(MIN_RTT_NS);
        match self.step {
            Identification::Done => self.adapt(rtt_ns),
            _ => self.identify(observed.cqes as u64, rtt_ns),
        }
    }

    fn identify(&mut self, found: u64, rtt_ns: f64) {
        let mean = |cqes| cqes as f64 / f64::from(IDENTIFY_ROUNDS);
        self.step = match self.step {
            Identification::Unaided { rounds, cqes } if rounds + 1 < IDENTIFY_ROUNDS => {
                Identification::Unaided {
                    rounds: rounds + 1,
                    cqes: cqes + found,
                }
            }
            Identification::Unaided { cqes, .. } => {
                // The limit comes from the round trip without added polls.
                self.gains.max = Gains::max_polls(rtt_ns);
                self.polls += PROBE;
                Identification::Probed {
                    rounds: 0,
                    cqes: 0,
                    unaided: mean(cqes + found),
                }
            }
            Identification::Probed {
                rounds,
                cqes,
                unaided,
            } if rounds + 1 < IDENTIFY_ROUNDS => Identification::Probed {
                rounds: rounds + 1,
                cqes: cqes + found,
                unaided,
            },
            Identification::Probed { cqes, unaided, .. } => {
                let effect = (mean(cqes + found) - unaided) / f64::from(PROBE);
                self.gains = Gains {
                    max: self.gains.max,
                    ..Gains::new(effect, rtt_ns)
                };
                (self.polls, self.since) = (self.then, 0);
                Identification::Done
            }
            Identification::Done => Identification::Done,
        };
    }

    fn adapt(&mut self, rtt_ns: f64) {
        let [Some(batch), Some(empty), Some(round_ns)] =
            [self.batch, self.empty, self.round_ns].map(|ewma| ewma.mean())
        else {
            return;
        };
        // Checked before the pause after a change: a collapse feeds itself, and would be complete
        // when the pause is over.
        if batch < COLLAPSED_BATCH && empty > COLLAPSED_EMPTY {
            self.raise(2 * self.gains.step_up);
            return;
        }
        self.since = self.since.saturating_add(1);
        if self.again > 0 && self.since >= self.again {
            // The current polls stay during both steps: a daemon without them could collapse.
            (self.step, self.then) = (Identification::Unaided { rounds: 0, cqes: 0 }, self.polls);
            return;
        }
        if self.hold > 0 {
            self.hold -= 1;
            return;
        }
        let rho = round_ns / rtt_ns;
        let is_low = rho < RHO_LOW || empty > EMPTY_HIGH;
        let is_high = rho > RHO_HIGH && empty < EMPTY_LOW;
        (self.low, self.high) = if is_low {
            (self.low + 1, 0)
        } else if is_high {
            (0, self.high + 1)
        } else {
            (0, 0)
        };
        if self.low >= LOW_NEED {
            self.raise(self.gains.step_up);
        } else if self.high >= HIGH_NEED {
            self.change(self.polls.saturating_sub(self.gains.step_down));
        }
    }

    fn raise(&mut self, by: u32) {
        self.change((self.polls + by).min(self.gains.max));
    }

    fn change(&mut self, polls: u32) {
        (self.polls, self.low, self.high, self.hold) = (polls, 0, 0, HOLD_MIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT_NS: f64 = 6_000.0;

    fn round(cqes: usize, round_ns: u64) -> Observed {
        Observed {
            cqes,
            round_ns,
            rtt_ns: Some(RTT_NS),
        }
    }

    /// Makes a controller whose two steps had `unaided` and `probed` completions in each round.
    fn identified(unaided: usize, probed: usize) -> BudgetController {
        let mut controller = BudgetController::new(0);
        for (cqes, polls) in [(unaided, 0), (probed, PROBE)] {
            for _ in 0..IDENTIFY_ROUNDS {
                assert_eq!(controller.polls(), polls);
                controller.note(round(cqes, RTT_NS as u64));
            }
        }
        controller
    }

    /// Returns the number of rounds until the budget changes.
    fn until_change(
        controller: &mut BudgetController,
        observed: Observed,
        limit: u32,
    ) -> Option<u32> {
        let before = controller.polls();
        (1..=limit).find(|_| {
            controller.note(observed);
            controller.polls() != before
        })
    }

    #[test]
    fn identification_sets_the_gains() {
        // Eight polls bring 2, 4, 32 and no completions more: an effect of 0.25, 0.5, 4 and 0 each.
        for (probed, step_up, step_down) in [(3, 8, 16), (5, 4, 8), (33, 1, 2), (1, 8, 16)] {
            let gains = identified(1, probed).gains;
            assert_eq!(
                (gains.step_up, gains.step_down, gains.max),
                (step_up, step_down, 15),
                "{probed}"
            );
        }
        // Fewer than before, too.
        assert_eq!(identified(9, 1).gains.step_up, 8);
        for (rtt_us, max) in [(0.0, 8), (2.0, 8), (6.0, 15), (20.0, 50), (1000.0, 64)] {
            assert_eq!(Gains::max_polls(rtt_us * 1000.0), max);
        }
    }

    #[test]
    fn the_limit_comes_from_the_round_trip_of_the_unaided_daemon() {
        let mut controller = BudgetController::new(0);
        for (rtt_ns, cqes) in [(Some(4_000.0), 1), (Some(40_000.0), 5)] {
            (0..IDENTIFY_ROUNDS).for_each(|_| {
                controller.note(Observed {
                    cqes,
                    round_ns: 1,
                    rtt_ns,
                })
            });
        }
        assert_eq!(
            controller.gains,
            Gains {
                step_up: 4,
                step_down: 8,
                max: 10
            }
        );
    }

    /// The seven connections of eight ranks: rounds become shorter than the round trip, and more
    /// and more find nothing.
    #[test]
    fn short_rounds_raise_the_budget_a_step_at_a_time_up_to_its_limit() {
        let mut controller = identified(1, 5);
        let short = round(1, 700);
        // The mean length has to come down first.
        assert!(until_change(&mut controller, short, 100).is_some_and(|rounds| rounds >= LOW_NEED));
        assert_eq!(controller.polls(), PROBE + 4);
        assert_eq!(
            until_change(&mut controller, short, 1000),
            Some(HOLD_MIN + LOW_NEED),
            "a pause, then as many rounds in a row"
        );
        assert_eq!(controller.polls(), 15, "the limit");
        assert_eq!(until_change(&mut controller, short, 1000), None);
    }

    #[test]
    fn rounds_that_find_nothing_raise_it_however_long_they_are() {
        let mut controller = identified(1, 5);
        // Nothing in four of five, and ten in the fifth: not a collapse.
        for at in 0..400 {
            controller.note(round(if at % 5 == 0 { 10 } else { 0 }, 6_000));
        }
        assert!(controller.polls() > PROBE, "{}", controller.polls());
    }

    /// The fifteen connections of sixteen ranks: rounds are long by themselves.
    #[test]
    fn long_rounds_that_find_something_take_polls_back_to_none() {
        let mut controller = identified(100, 104);
        let long = round(28, 40_000);
        assert!(until_change(&mut controller, long, 500).is_some_and(|rounds| rounds >= HIGH_NEED));
        assert_eq!(controller.polls(), 0);
        assert_eq!(
            until_change(&mut controller, long, 1000),
            None,
            "there is nothing below 0"
        );
    }

    #[test]
    fn long_rounds_that_often_find_nothing_keep_their_polls() {
        let mut controller = identified(1, 5);
        // Every second one.
        (0..1000).for_each(|at| controller.note(round(if at % 2 == 0 { 10 } else { 0 }, 40_000)));
        assert_eq!(controller.polls(), PROBE);
    }

    #[test]
    fn between_the_thresholds_nothing_changes_and_counting_starts_again() {
        let mut controller = identified(1, 5);
        assert_eq!(until_change(&mut controller, round(1, 6_000), 1000), None);
        for _ in 0..10 {
            // Just too few in a row, with a pause that clears the mean.
            assert_eq!(until_change(&mut controller, round(1, 3_000), 60), None);
            assert_eq!(until_change(&mut controller, round(1, 7_000), 60), None);
        }
    }

    #[test]
    fn a_collapse_raises_the_budget_also_in_the_pause_after_a_change() {
        let mut controller = identified(1, 33);
        controller.gains.max = 64;
        until_change(&mut controller, round(1, 700), 200).unwrap();
        assert_eq!((controller.polls(), controller.hold), (PROBE + 1, HOLD_MIN));
        let rounds = until_change(&mut controller, round(0, 700), 200);
        // A share of 0.9 is reached after this many rounds without anything; the pause was shorter,
        // so it is begun again.
        controller.hold = HOLD_MIN;
        let before = controller.polls();
        assert_eq!(
            until_change(&mut controller, round(0, 700), 200),
            Some(1),
            "while it pauses: {rounds:?}"
        );
        assert_eq!(controller.polls(), before + 2, "two steps");
        (0..100).for_each(|_| controller.note(round(0, 700)));
        assert_eq!(controller.polls(), 64);
    }

    #[test]
    fn the_pause_holds_back_everything_else() {
        let mut controller = identified(1, 5);
        (0..100).for_each(|_| controller.note(round(1, 100)));
        controller.hold = HOLD_MIN;
        controller.low = LOW_NEED - 1;
        assert_eq!(
            until_change(&mut controller, round(1, 100), 200),
            Some(HOLD_MIN + 1)
        );
    }

    #[test]
    fn times_of_nothing_and_beyond_measure_leave_it_within_its_limits() {
        let mut controller = BudgetController::new(0);
        for (at, rtt_ns) in [None, Some(0.0), Some(f64::INFINITY), Some(f64::NAN)]
            .into_iter()
            .cycle()
            .take(4000)
            .enumerate()
        {
            controller.note(Observed {
                cqes: at % 3,
                round_ns: if at % 2 == 0 { 0 } else { u64::MAX },
                rtt_ns,
            });
            assert!(controller.polls() <= 64);
        }
        assert!(controller.batch.mean().is_some_and(f64::is_finite));
    }

    /// The load changes so that a poll brings more: the gains follow, and the budget stays where it
    /// was.
    #[test]
    fn it_identifies_again_from_where_it_stands() {
        let mut controller = BudgetController::new(500);
        let mut rounds = |count: u32, cqes| {
            (0..count).for_each(|_| controller.note(round(cqes, RTT_NS as u64)));
            (controller.polls(), controller.gains)
        };
        let gains = Gains {
            step_up: 8,
            step_down: 16,
            max: 15,
        };
        assert_eq!(rounds(2 * IDENTIFY_ROUNDS, 1), (PROBE, gains));
        assert_eq!(
            rounds(500 + IDENTIFY_ROUNDS, 1),
            (2 * PROBE, gains),
            "the second step"
        );
        let gains = Gains {
            step_up: 1,
            step_down: 2,
            max: 15,
        };
        assert_eq!(rounds(IDENTIFY_ROUNDS, 33), (PROBE, gains));
        assert_eq!(rounds(499, 33), (PROBE, gains), "not yet again");
        assert_eq!(rounds(1 + IDENTIFY_ROUNDS, 33), (2 * PROBE, gains));
    }
}
