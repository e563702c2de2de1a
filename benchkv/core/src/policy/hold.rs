//! Batch hold: answers of other ranks are kept back and released to their callers together, so that the callers' next requests come together
//! and fill batches.

use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::Args;
use harness::range::{RangeError, decimal, range, within};
use harness::units;
use serde::{Deserialize, Serialize};

use super::ewma::Ewma;
use super::rule::{Asked, OUTSIDE, Polled, Round, Rule, needs_exchange};
use super::{PolicyReport, Sample};
use crate::topology::Topology;

/// Shortest and longest time that answers are held, in ns.
const HOLD_NS: RangeInclusive<f64> = 500.0..=100_000.0;
/// The same in us.
const HOLD_US: RangeInclusive<f64> = *HOLD_NS.start() / 1000.0..=*HOLD_NS.end() / 1000.0;
/// Round trips that answers are held.
const FACTORS: RangeInclusive<f64> = 0.1..=100.0;
/// First length of an adaptive hold, or of one of round trips.
const DEFAULT_HOLD_US: f64 = 10.0;
/// Weight of the newest arrival rate.
const RATE_ALPHA: f64 = 0.125;
/// Weight of the newest round trip, of which the hold is a multiple.
const RTT_ALPHA: f64 = 0.125;

/// The flags of the hold.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, Args)]
pub struct HoldArgs {
    /// Answers of other ranks are held back until there are as many as ranks, or for this long, 0.5us to 100us, and released together; off while batches are
    /// that large by themselves. adaptive or adaptive:TIME follows the rate at which answers come, and begins with TIME [default: 10us]; rtt:FACTOR is so many
    /// round trips, 0.1 to 100. Simulated (docs/study.md): none lifts the low state; 10us gains a third at depth 1 and 8 ranks, and a tenth beyond;
    /// adaptive as much, and costs a fifth in the high state; rtt:2 gains a tenth at most.
    #[arg(long, hide_short_help = true, value_name = "off|TIME|adaptive[:TIME]|rtt:FACTOR", conflicts_with_all = ["batch_hold_us", "adaptive_hold", "hold_rtt_multiplier"])]
    #[serde(skip)]
    pub hold: Option<HoldChoice>,

    /// --hold TIME, as it once was, in us.
    #[arg(long, hide = true, value_name = "US", value_parser = decimal(HOLD_US))]
    pub batch_hold_us: Option<f64>,

    /// --hold adaptive, as it once was; it begins with --batch-hold-us.
    #[arg(long, hide = true)]
    pub adaptive_hold: bool,

    /// --hold rtt:FACTOR, as it once was.
    #[arg(long, hide = true, value_name = "FACTOR", value_parser = decimal(FACTORS))]
    pub hold_rtt_multiplier: Option<f64>,
}

/// The choices of `--hold`; times in us.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HoldChoice {
    /// Nothing is held.
    Off,
    /// For so long.
    Fixed(f64),
    /// By the rate of answers; for so long at first.
    Adaptive(Option<f64>),
    /// So many round trips.
    Rtt(f64),
}

impl FromStr for HoldChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || "use off, a time from 0.5us to 100us, adaptive, adaptive:TIME, or rtt:FACTOR with 0.1 to 100".to_owned();
        let us = |time: &str| {
            // A number without a unit would be seconds, which nobody means.
            let us = units::seconds(time).ok().filter(|_| time.ends_with('s')).map(|seconds| seconds * 1e6);
            us.filter(|us| HOLD_NS.contains(&(us * 1000.0))).ok_or_else(known)
        };
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            None if text == "adaptive" => Ok(Self::Adaptive(None)),
            None => us(text).map(Self::Fixed),
            Some(("adaptive", time)) => us(time).map(|us| Self::Adaptive(Some(us))),
            Some(("rtt", factor)) => factor.parse().ok().filter(|factor| FACTORS.contains(factor)).map(Self::Rtt).ok_or_else(known),
            Some(_) => Err(known()),
        }
    }
}

impl Asked for HoldArgs {
    fn resolve(&mut self) {
        match self.hold.take() {
            Some(HoldChoice::Fixed(us)) => self.batch_hold_us = Some(us),
            Some(HoldChoice::Adaptive(us)) => (self.batch_hold_us, self.adaptive_hold) = (us, true),
            Some(HoldChoice::Rtt(factor)) => self.hold_rtt_multiplier = Some(factor),
            Some(HoldChoice::Off) | None => {}
        }
    }

    fn typed(&self) -> Option<String> {
        match (self.batch_hold_us, self.adaptive_hold, self.hold_rtt_multiplier) {
            (Some(us), true, _) => Some(format!("hold adaptive:{us}us")),
            (None, true, _) => Some("hold adaptive".to_owned()),
            (_, false, Some(factor)) => Some(format!("hold rtt:{factor}")),
            (us, false, None) => us.map(|us| format!("hold {us}us")),
        }
    }

    fn check(&self) -> Result<(), RangeError> {
        if let Some(us) = self.batch_hold_us {
            within("--batch-hold-us", us, HOLD_US, OUTSIDE, " us")?;
        }
        let Some(factor) = self.hold_rtt_multiplier else { return Ok(()) };
        within("--hold-rtt-multiplier", factor, FACTORS, OUTSIDE, "")?;
        if self.adaptive_hold {
            let why = "with --adaptive-hold there are two rules for one time";
            return Err(range("--hold-rtt-multiplier", factor, why, "one of them".to_owned()));
        }
        Ok(())
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        needs_exchange("--hold", topology)
    }

    fn rule(&self, ranks: usize) -> Option<Box<dyn Rule>> {
        let rule = match (self.adaptive_hold, self.hold_rtt_multiplier) {
            (true, _) => HoldRule::Adaptive,
            (false, Some(multiplier)) => HoldRule::Rtt(multiplier),
            (false, None) => self.batch_hold_us.map(|_| HoldRule::Fixed)?,
        };
        Some(Box::new(Hold::new(rule, ranks, self.batch_hold_us.unwrap_or(DEFAULT_HOLD_US) * 1000.0)))
    }
}

/// The maximum time for which answers are held.
#[derive(Debug, Clone, Copy, PartialEq)]
enum HoldRule {
    /// As long as at the start. Held back only while batches are too small: a batch that reaches the target by itself ends it, a smaller one
    /// begins it again.
    Fixed,
    /// As long as it takes so many answers to arrive: target / rate. The rate is that of past batches, smoothed.
    Adaptive,
    /// This many round trips; on and off as the fixed one.
    Rtt(f64),
}

/// The controller. It knows how many answers are held, and since when; the daemon has the answers.
#[derive(Debug)]
struct Hold {
    rule: HoldRule,
    /// Answers that are released at once: one from each rank of the job.
    target: usize,
    hold_ns: f64,
    /// Answers per ns.
    rate: Ewma,
    is_on: bool,
    count: usize,
    /// When the oldest of them came.
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

/// Why answers were released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Release {
    /// There were enough of them.
    Full,
    /// Their time had come.
    Late,
}

impl Hold {
    /// Holds up to `target` answers, at first for `initial_ns`.
    fn new(rule: HoldRule, target: usize, initial_ns: f64) -> Self {
        let target = target.max(1);
        let hold_ns = initial_ns.clamp(*HOLD_NS.start(), *HOLD_NS.end());
        let rate = Ewma::starting_at(target as f64 / hold_ns, RATE_ALPHA);
        Self { rule, target, hold_ns, rate, is_on: true, count: 0, since_ns: 0, done: HoldCounts::default() }
    }

    /// Whether an answer that comes now is to be kept; it counts as kept then.
    #[inline]
    fn keeps(&mut self, now_ns: u64) -> bool {
        if self.is_on {
            if self.count == 0 {
                self.since_ns = now_ns;
            }
            self.count += 1;
            self.done.held += 1;
        }
        self.is_on
    }

    /// Whether what is held is to be released now; it counts as released then.
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

    /// So many answers were passed on by one round without being held.
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
                self.set_hold(self.rate.mean().map_or(self.hold_ns, |rate| self.target as f64 / rate));
            }
        }
    }

    /// Tells the round trip, in ns.
    fn set_rtt(&mut self, rtt_ns: f64) {
        if let HoldRule::Rtt(multiplier) = self.rule {
            self.set_hold(rtt_ns * multiplier);
        }
    }

    fn set_hold(&mut self, hold_ns: f64) {
        self.hold_ns = hold_ns.clamp(*HOLD_NS.start(), *HOLD_NS.end());
    }

    /// Returns the maximum time for which an answer that comes now is held, in ns; 0 while nothing is held back.
    const fn hold_ns(&self) -> u64 {
        if self.is_on { self.hold_ns as u64 } else { 0 }
    }
}

impl Rule for Hold {
    fn rtt_weight(&self) -> Option<f64> {
        matches!(self.rule, HoldRule::Rtt(_)).then_some(RTT_ALPHA)
    }

    fn keeps_answer(&mut self, round: &Round) -> bool {
        self.keeps(round.now_ns)
    }

    fn polled(&mut self, round: &Round, found: Polled) {
        if let Some(rtt_ns) = round.rtt_ns.filter(|_| found.cqes > 0) {
            self.set_rtt(rtt_ns);
        }
        self.passed(found.passed);
    }

    fn releases(&mut self, round: &Round) -> bool {
        self.release(round.now_ns).is_some()
    }

    fn report(&self, report: &mut PolicyReport) {
        let HoldCounts { held, full_releases, late_releases } = self.done;
        *report = PolicyReport { held, full_releases, late_releases, hold_ns: self.hold_ns(), ..*report };
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
            match (text.parse().unwrap(), choice) {
                (HoldChoice::Fixed(found), HoldChoice::Fixed(us)) => assert!((found - us).abs() < 1e-9, "{text}"),
                (HoldChoice::Adaptive(Some(found)), HoldChoice::Adaptive(Some(us))) => assert!((found - us).abs() < 1e-9, "{text}"),
                (found, choice) => assert_eq!(found, choice, "{text}"),
            }
        }
        for text in ["", "10", "0.4us", "101us", "1s", "rtt", "rtt:0", "rtt:101", "rtt:NaN", "adaptive:", "adaptive:10", "never"] {
            assert!(text.parse::<HoldChoice>().unwrap_err().contains("0.5us to 100us"), "{text}");
        }
    }

    /// Answers that come every `gap_ns`, and are looked at as often, until so many batches were released. Returns how long the last was held.
    fn batches(hold: &mut Hold, gap_ns: u64, count: usize) -> u64 {
        let (mut now_ns, mut released, mut since_ns) = (1_000_000, 0, 0);
        loop {
            now_ns += gap_ns;
            if hold.count == 0 {
                since_ns = now_ns;
            }
            if !hold.keeps(now_ns) {
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
            assert!(hold.keeps(now_ns));
            assert_eq!(hold.release(now_ns), None);
        }
        assert_eq!(hold.release(10_099), None);
        assert_eq!(hold.release(10_100), Some(Release::Late), "10 us after the first");
        assert_eq!(hold.release(10_100), None);
        for now_ns in [20_000, 20_001, 20_002] {
            assert_eq!(hold.release(now_ns), None);
            assert!(hold.keeps(now_ns));
        }
        assert_eq!(hold.release(20_002), Some(Release::Full));
    }

    #[test]
    fn a_fixed_hold_ends_with_a_full_batch_and_begins_with_a_small_one() {
        let mut hold = Hold::new(HoldRule::Fixed, 2, 10_000.0);
        assert_eq!(hold.hold_ns(), 10_000);
        (0..5).for_each(|now_ns| assert!(hold.keeps(now_ns)));
        assert_eq!((hold.release(5), hold.hold_ns()), (Some(Release::Full), 0));
        for passed in [2, 7, 0] {
            assert!(!hold.keeps(6));
            hold.passed(passed);
        }
        hold.passed(1);
        assert!(hold.keeps(7));
        assert_eq!((hold.release(20_000), hold.hold_ns()), (Some(Release::Late), 10_000), "a late batch was too small");
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

    /// The adaptive hold, unlike the fixed one, finds the time that a full batch takes, from either side.
    #[test]
    fn an_adaptive_hold_finds_the_time_of_a_batch() {
        for initial_ns in [500.0, 100_000.0] {
            let mut hold = Hold::new(HoldRule::Adaptive, 8, initial_ns);
            batches(&mut hold, 1_000, 200);
            // Eight that come every microsecond: seven gaps from the first to the last.
            assert!((6_000..=8_000).contains(&hold.hold_ns()), "{}", hold.hold_ns());
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
            assert!(hold.keeps(now_ns));
            hold.release(0);
        }
        assert!((500..=100_000).contains(&hold.hold_ns()));
        let mut alone = Hold::new(HoldRule::Adaptive, 0, f64::MAX);
        assert_eq!(alone.hold_ns(), 100_000);
        assert!(alone.keeps(0) && alone.release(0) == Some(Release::Full));
    }
}
