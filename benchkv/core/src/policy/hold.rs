//! Batch hold: answers of other ranks are held and delivered to their callers together, so that the
//! callers' next requests come together and fill batches.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::Args;
use harness::range::RangeError;
use harness::units;
use serde::{Deserialize, Serialize};

use super::ewma::Ewma;
use super::rule::{Asked, Found, RoundPlan, RoundState, Rule, needs_exchange};
use super::{PolicyReport, Sample};
use crate::topology::Topology;

/// Minimum and maximum time that answers are held, in ns.
const HOLD_NS: RangeInclusive<f64> = 500.0..=100_000.0;
/// Number of round trips that answers are held.
const FACTORS: RangeInclusive<f64> = 0.1..=100.0;
/// First length of an adaptive hold, or of a hold by round trips.
const DEFAULT_HOLD_US: f64 = 10.0;
/// Weight of the newest arrival rate.
const RATE_ALPHA: f64 = 0.125;
/// Weight of the newest round trip, of which the hold is a multiple.
const RTT_ALPHA: f64 = 0.125;

/// The flag of the hold.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct HoldArgs {
    /// Collect answers from other ranks and deliver them together: when one per rank has arrived,
    /// or after TIME, 0.5us to 100us. Pauses while batches are full anyway. adaptive, or
    /// adaptive:TIME, follows the rate of answers and begins with TIME (10us); rtt:FACTOR holds for
    /// 0.1 to 100 round trips. Simulated (docs/study.md): none lifts the low state; 10us gains a
    /// third at depth 1 and 8 ranks, 9 and 4 % with 16 and 32; adaptive gains as much, and costs a
    /// fifth in the high state; rtt:2 gains a tenth at most.
    #[arg(long, hide_short_help = true, value_name = "off|TIME|adaptive[:TIME]|rtt:FACTOR", default_value_t = HoldChoice::Off)]
    #[serde(with = "harness::as_text")]
    #[doc(alias = "batch_hold_us")]
    #[doc(alias = "hold_rtt_multiplier")]
    #[doc(alias = "adaptive_hold")]
    pub hold: HoldChoice,
}

/// The choices of `--hold`; times in us.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum HoldChoice {
    /// Nothing is held.
    #[default]
    Off,
    /// For this time.
    Fixed(f64),
    /// For a time that follows the rate of answers; at first this time.
    Adaptive(Option<f64>),
    /// For this number of round trips.
    Rtt(f64),
}

impl fmt::Display for HoldChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Fixed(us) => write!(f, "{us}us"),
            Self::Adaptive(None) => f.write_str("adaptive"),
            Self::Adaptive(Some(us)) => write!(f, "adaptive:{us}us"),
            Self::Rtt(factor) => write!(f, "rtt:{factor}"),
        }
    }
}

impl FromStr for HoldChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || {
            "use off, a time from 0.5us to 100us, adaptive, adaptive:TIME, or rtt:FACTOR with 0.1 to 100".to_owned()
        };
        let us = |time: &str| {
            // A number without a unit would be seconds.
            let us = units::seconds(time)
                .ok()
                .filter(|_| time.ends_with('s'))
                .map(|seconds| seconds * 1e6);
            us.filter(|us| HOLD_NS.contains(&(us * 1000.0)))
                .ok_or_else(known)
        };
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            None if text == "adaptive" => Ok(Self::Adaptive(None)),
            None => us(text).map(Self::Fixed),
            Some(("adaptive", time)) => us(time).map(|us| Self::Adaptive(Some(us))),
            Some(("rtt", factor)) => factor
                .parse()
                .ok()
                .filter(|factor| FACTORS.contains(factor))
                .map(Self::Rtt)
                .ok_or_else(known),
            Some(_) => Err(known()),
        }
    }
}

impl Asked for HoldArgs {
    fn typed(&self) -> Option<String> {
        (self.hold != HoldChoice::Off).then(|| format!("hold {}", self.hold))
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        needs_exchange("--hold", topology)
    }

    fn rule(&self, ranks: usize) -> Option<Box<dyn Rule>> {
        let (rule, us) = match self.hold {
            HoldChoice::Off => return None,
            HoldChoice::Fixed(us) => (HoldRule::Fixed, us),
            HoldChoice::Adaptive(us) => (HoldRule::Adaptive, us.unwrap_or(DEFAULT_HOLD_US)),
            HoldChoice::Rtt(factor) => (HoldRule::Rtt(factor), DEFAULT_HOLD_US),
        };
        Some(Box::new(Hold::new(rule, ranks, us * 1000.0)))
    }
}

/// The maximum time for which answers are held.
#[derive(Debug, Clone, Copy, PartialEq)]
enum HoldRule {
    /// The time at the start. Answers are held only while batches are too small: a batch that
    /// reaches the target by itself ends the hold, a smaller one begins it again.
    Fixed,
    /// The time in which the target number of answers arrives: target / rate of past batches,
    /// smoothed.
    Adaptive,
    /// This number of round trips; on and off like the fixed hold.
    Rtt(f64),
}

/// The controller. It counts the held answers; the daemon stores them.
#[derive(Debug)]
struct Hold {
    rule: HoldRule,
    /// Number of answers that ends a hold: one from each rank of the job.
    target: usize,
    hold_ns: f64,
    /// Answers per ns.
    rate: Ewma,
    is_on: bool,
    /// Held answers.
    count: usize,
    /// Arrival of the oldest held answer.
    since_ns: u64,
    done: HoldCounts,
}

/// The counts of a hold since the start.
#[derive(Debug, Default)]
struct HoldCounts {
    held: u64,
    full_releases: u64,
    late_releases: u64,
}

/// The reason to deliver held answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Release {
    /// There were enough.
    Full,
    /// Their time was over.
    Late,
}

impl Hold {
    /// Makes a hold of up to `target` answers, at first for `initial_ns`.
    fn new(rule: HoldRule, target: usize, initial_ns: f64) -> Self {
        let target = target.max(1);
        let hold_ns = initial_ns.clamp(*HOLD_NS.start(), *HOLD_NS.end());
        let rate = Ewma::starting_at(target as f64 / hold_ns, RATE_ALPHA);
        Self {
            rule,
            target,
            hold_ns,
            rate,
            is_on: true,
            count: 0,
            since_ns: 0,
            done: HoldCounts::default(),
        }
    }

    /// Notes that `count` answers are held now.
    fn holds(&mut self, count: usize, now_ns: u64) {
        if self.count == 0 {
            self.since_ns = now_ns;
        }
        self.done.held += count.saturating_sub(self.count) as u64;
        self.count = count;
    }

    /// Returns why to deliver the held answers now, and counts them as delivered; `None` to hold
    /// them longer.
    fn release(&mut self, now_ns: u64) -> Option<Release> {
        let held_ns = now_ns.saturating_sub(self.since_ns);
        let release = match self.count {
            0 => return None,
            count if count >= self.target => Release::Full,
            _ if held_ns as f64 >= self.hold_ns => Release::Late,
            _ => return None,
        };
        match release {
            Release::Full => self.done.full_releases += 1,
            Release::Late => self.done.late_releases += 1,
        }
        self.note_batch(self.count, held_ns);
        self.count = 0;
        Some(release)
    }

    /// Notes the answers that a round delivered without a hold.
    fn passed(&mut self, answers: usize) {
        if answers > 0 && answers < self.target {
            self.is_on = true;
        }
    }

    fn note_batch(&mut self, answers: usize, held_ns: u64) {
        match self.rule {
            HoldRule::Fixed | HoldRule::Rtt(_) => self.is_on = answers < self.target,
            HoldRule::Adaptive => {
                self.rate.add(answers as f64 / held_ns.max(1) as f64);
                // The rate begins positive, and each sample is.
                self.set_hold(
                    self.rate
                        .mean()
                        .map_or(self.hold_ns, |rate| self.target as f64 / rate),
                );
            }
        }
    }

    /// Sets the round trip, in ns.
    fn set_rtt(&mut self, rtt_ns: f64) {
        if let HoldRule::Rtt(multiplier) = self.rule {
            self.set_hold(rtt_ns * multiplier);
        }
    }

    fn set_hold(&mut self, hold_ns: f64) {
        self.hold_ns = hold_ns.clamp(*HOLD_NS.start(), *HOLD_NS.end());
    }

    /// Returns the maximum time for which an answer that comes now is held, in ns; 0 while nothing
    /// is held back.
    const fn hold_ns(&self) -> u64 {
        if self.is_on { self.hold_ns as u64 } else { 0 }
    }
}

impl Rule for Hold {
    fn rtt_weight(&self) -> Option<f64> {
        matches!(self.rule, HoldRule::Rtt(_)).then_some(RTT_ALPHA)
    }

    fn begin(&mut self, _round: &RoundState, plan: &mut RoundPlan) {
        plan.most_held = if self.is_on { self.target - 1 } else { 0 };
    }

    fn polled(&mut self, round: &RoundState, found: Found) -> bool {
        // Answers passed although the hold is on: they made it full.
        if self.is_on {
            self.holds(found.held + found.passed, round.now_ns);
        } else {
            self.passed(found.passed);
        }
        if let Some(rtt_ns) = round.rtt_ns.filter(|_| found.cqes > 0) {
            self.set_rtt(rtt_ns);
        }
        self.release(round.now_ns).is_some()
    }

    fn report(&self, report: &mut PolicyReport) {
        let HoldCounts {
            held,
            full_releases,
            late_releases,
        } = self.done;
        *report = PolicyReport {
            held,
            full_releases,
            late_releases,
            hold_ns: self.hold_ns(),
            ..*report
        };
    }

    fn gauge(&self, sample: &mut Sample) {
        sample.hold_ns = self.hold_ns();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_are_named_with_their_times() {
        for (text, choice) in [
            ("off", HoldChoice::Off),
            ("10us", HoldChoice::Fixed(10.0)),
            ("500ns", HoldChoice::Fixed(0.5)),
            ("adaptive", HoldChoice::Adaptive(None)),
            ("adaptive:5us", HoldChoice::Adaptive(Some(5.0))),
            ("rtt:2", HoldChoice::Rtt(2.0)),
        ] {
            let found: HoldChoice = text.parse().unwrap();
            match (found, choice) {
                (HoldChoice::Fixed(found), HoldChoice::Fixed(us)) => {
                    assert!((found - us).abs() < 1e-9, "{text}")
                }
                (HoldChoice::Adaptive(Some(found)), HoldChoice::Adaptive(Some(us))) => {
                    assert!((found - us).abs() < 1e-9, "{text}")
                }
                (found, choice) => assert_eq!(found, choice, "{text}"),
            }
            assert_eq!(
                found.to_string().parse(),
                Ok(found),
                "it is printed as it is typed"
            );
        }
        for text in [
            "",
            "10",
            "0.4us",
            "101us",
            "1s",
            "rtt",
            "rtt:0",
            "rtt:101",
            "rtt:NaN",
            "adaptive:",
            "adaptive:10",
            "never",
        ] {
            assert!(
                text.parse::<HoldChoice>()
                    .unwrap_err()
                    .contains("0.5us to 100us"),
                "{text}"
            );
        }
    }

    /// Lets an answer arrive. Returns whether it is held.
    fn keeps(hold: &mut Hold, now_ns: u64) -> bool {
        if hold.is_on {
            hold.holds(hold.count + 1, now_ns);
        }
        hold.is_on
    }

    /// Delivers an answer every `gap_ns` until `count` batches were released. Returns the time for
    /// which the last was held.
    fn batches(hold: &mut Hold, gap_ns: u64, count: usize) -> u64 {
        let mut now_ns = 1_000_000;
        let mut released = 0;
        let mut since_ns = 0;
        loop {
            now_ns += gap_ns;
            if hold.count == 0 {
                since_ns = now_ns;
            }
            if !keeps(hold, now_ns) {
                hold.passed(1);
                continue;
            }
            if hold.release(now_ns).is_some() {
                released += 1;
                if released == count {
                    return now_ns - since_ns;
                }
            }
        }
    }

    #[test]
    fn a_batch_is_released_when_it_is_full_or_its_time_has_come() {
        let mut hold = Hold::new(HoldRule::Fixed, 3, 10_000.0);
        assert_eq!(hold.release(50_000_000), None, "nothing is held");
        for now_ns in [100, 200] {
            assert!(keeps(&mut hold, now_ns));
            assert_eq!(hold.release(now_ns), None);
        }
        assert_eq!(hold.release(10_099), None);
        assert_eq!(
            hold.release(10_100),
            Some(Release::Late),
            "10 us after the first"
        );
        assert_eq!(hold.release(10_100), None);
        for now_ns in [20_000, 20_001, 20_002] {
            assert_eq!(hold.release(now_ns), None);
            assert!(keeps(&mut hold, now_ns));
        }
        assert_eq!(hold.release(20_002), Some(Release::Full));
    }

    #[test]
    fn a_fixed_hold_ends_with_a_full_batch_and_begins_with_a_small_one() {
        let mut hold = Hold::new(HoldRule::Fixed, 2, 10_000.0);
        assert_eq!(hold.hold_ns(), 10_000);
        (0..5).for_each(|now_ns| assert!(keeps(&mut hold, now_ns)));
        assert_eq!((hold.release(5), hold.hold_ns()), (Some(Release::Full), 0));
        for passed in [2, 7, 0] {
            assert!(!keeps(&mut hold, 6));
            hold.passed(passed);
        }
        hold.passed(1);
        assert!(keeps(&mut hold, 7));
        assert_eq!(
            (hold.release(20_000), hold.hold_ns()),
            (Some(Release::Late), 10_000),
            "a late batch was too small"
        );
    }

    #[test]
    fn fast_arrivals_make_an_adaptive_hold_about_nothing() {
        // Forty million a second, and more than the clock can tell apart.
        for gap_ns in [25, 0] {
            let mut hold = Hold::new(HoldRule::Adaptive, 8, 10_000.0);
            batches(&mut hold, gap_ns, 40);
            assert_eq!(hold.hold_ns(), 500, "the shortest there is");
        }
    }

    #[test]
    fn slow_arrivals_make_an_adaptive_hold_grow_to_its_clamp() {
        let mut hold = Hold::new(HoldRule::Adaptive, 8, 1_000.0);
        let mut last = 0;
        for _ in 0..8 {
            batches(&mut hold, 50_000, 5);
            assert!(hold.hold_ns() >= last, "it only grows");
            last = hold.hold_ns();
        }
        assert_eq!(last, 100_000);
    }

    /// The adaptive hold, unlike the fixed one, finds the time that a full batch takes, from either
    /// side.
    #[test]
    fn an_adaptive_hold_finds_the_time_of_a_batch() {
        for initial_ns in [500.0, 100_000.0] {
            let mut hold = Hold::new(HoldRule::Adaptive, 8, initial_ns);
            batches(&mut hold, 1_000, 200);
            // Eight that come every microsecond: seven gaps from the first to the last.
            assert!(
                (6_000..=8_000).contains(&hold.hold_ns()),
                "{}",
                hold.hold_ns()
            );
        }
    }

    #[test]
    fn a_rtt_hold_is_a_multiple_of_the_round_trip_within_the_clamp() {
        let mut hold = Hold::new(HoldRule::Rtt(1.5), 8, 10_000.0);
        assert_eq!(hold.hold_ns(), 10_000, "before the first is known");
        for (rtt_ns, hold_ns) in [(4_000.0, 6_000), (0.0, 500), (1e12, 100_000)] {
            hold.set_rtt(rtt_ns);
            assert_eq!(hold.hold_ns(), hold_ns);
        }
        let mut fixed = Hold::new(HoldRule::Fixed, 8, 10_000.0);
        fixed.set_rtt(4_000.0);
        assert_eq!(fixed.hold_ns(), 10_000);
    }

    #[test]
    fn time_that_stands_still_or_goes_back_spoils_nothing() {
        let mut hold = Hold::new(HoldRule::Adaptive, 2, 10_000.0);
        for now_ns in [1_000, 1_000, 500, 2_000] {
            assert!(keeps(&mut hold, now_ns));
            hold.release(0);
        }
        assert!((500..=100_000).contains(&hold.hold_ns()));
        let mut alone = Hold::new(HoldRule::Adaptive, 0, f64::MAX);
        assert_eq!(alone.hold_ns(), 100_000);
        assert!(keeps(&mut alone, 0) && alone.release(0) == Some(Release::Full));
    }
}
