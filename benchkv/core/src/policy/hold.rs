//! Batch hold: answers of other ranks are held and delivered to their callers together, so that the
//! callers' next requests arrive together and fill batches.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use benchkv_harness::units;

/// Minimum and maximum time that answers are held, in ns.
const HOLD_NS: RangeInclusive<f64> = 500.0..=100_000.0;
/// First length of an adaptive hold, in us, if none is given.
const DEFAULT_HOLD_US: f64 = 10.0;
/// Weight of the newest sample in the smoothed rate of answers.
const RATE_ALPHA: f64 = 0.125;

/// The choices of `--hold`; times in us.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HoldChoice {
    /// No answer is held.
    Off,
    /// Answers are held for this time, in us.
    Fixed(f64),
    /// Answers are held for a time that follows their rate; at first for this time, in us.
    Adaptive(Option<f64>),
}

impl fmt::Display for HoldChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Fixed(us) => write!(f, "{us}us"),
            Self::Adaptive(None) => f.write_str("adaptive"),
            Self::Adaptive(Some(us)) => write!(f, "adaptive:{us}us"),
        }
    }
}

impl FromStr for HoldChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = "use off, a time from 0.5us to 100us, adaptive, or adaptive:TIME";
        let us = |time: &str| {
            // Without a unit the number would be a time in seconds, so it is refused.
            let seconds = units::seconds(time).ok().filter(|_| time.ends_with('s'));
            let us = seconds.map(|seconds| seconds * 1e6);
            us.filter(|us| HOLD_NS.contains(&(us * 1000.0)))
                .ok_or(known)
        };
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            None if text == "adaptive" => Ok(Self::Adaptive(None)),
            None => us(text).map(Self::Fixed),
            Some(("adaptive", time)) => us(time).map(|us| Self::Adaptive(Some(us))),
            Some(_) => Err(known),
        }
    }
}

/// The state of a hold. It counts the held answers; the daemon stores them.
#[derive(Debug)]
pub(super) struct Hold {
    /// Number of answers that ends a hold: the number of ranks of the job.
    target: usize,
    hold_ns: f64,
    /// Smoothed rate of answers, in answers per ns, from which an adaptive hold computes the time
    /// in which `target` answers arrive. `None`: the time is fixed. A hold with a fixed time is on
    /// only while batches are too small: a batch that reaches the target turns the hold off, and a
    /// smaller batch turns it on again.
    rate: Option<f64>,
    is_on: bool,
    count: usize,
    /// Time at which the oldest held answer arrived, in ns.
    since_ns: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    Full,
    /// The oldest answer has been held for the maximum time.
    Late,
}

impl Hold {
    /// Makes a hold that ends with as many answers as there are `ranks`; `None` if the choice is to
    /// hold nothing.
    pub(super) fn new(choice: HoldChoice, ranks: usize) -> Option<Self> {
        let (is_adaptive, us) = match choice {
            HoldChoice::Off => return None,
            HoldChoice::Fixed(us) => (false, us),
            HoldChoice::Adaptive(us) => (true, us.unwrap_or(DEFAULT_HOLD_US)),
        };
        let target = ranks.max(1);
        let hold_ns = (us * 1000.0).clamp(*HOLD_NS.start(), *HOLD_NS.end());
        Some(Self {
            target,
            hold_ns,
            rate: is_adaptive.then_some(target as f64 / hold_ns),
            is_on: true,
            count: 0,
            since_ns: 0,
        })
    }

    pub(super) const fn most_held(&self) -> usize {
        if self.is_on { self.target - 1 } else { 0 }
    }

    /// Notes that `held` answers are held now, and that a round delivered `passed` answers at once.
    /// Returns the number of answers by which the hold has grown since the last call.
    pub(super) fn note(&mut self, held: usize, passed: usize, now_ns: u64) -> u64 {
        if !self.is_on {
            self.is_on = passed > 0 && passed < self.target;
            return 0;
        }
        if self.count == 0 {
            self.since_ns = now_ns;
        }
        // While the hold is on, answers are delivered at once only if they make it full or exceed
        // it. So they count with the held answers.
        let count = held + passed;
        count.saturating_sub(std::mem::replace(&mut self.count, count)) as u64
    }

    /// Returns the reason to deliver the held answers now, and counts them as delivered; `None` if
    /// no answer is held, or if the held answers wait longer.
    pub(super) fn release(&mut self, now_ns: u64) -> Option<Release> {
        let held_ns = now_ns.saturating_sub(self.since_ns);
        let release = match self.count {
            0 => return None,
            count if count >= self.target => Release::Full,
            _ if held_ns as f64 >= self.hold_ns => Release::Late,
            _ => return None,
        };
        match &mut self.rate {
            None => self.is_on = release == Release::Late,
            // The rate stays positive, because it begins positive and each sample is positive.
            Some(rate) => {
                *rate += RATE_ALPHA * (self.count as f64 / held_ns.max(1) as f64 - *rate);
                let hold_ns = self.target as f64 / *rate;
                self.hold_ns = hold_ns.clamp(*HOLD_NS.start(), *HOLD_NS.end());
            }
        }
        self.count = 0;
        Some(release)
    }

    /// Returns the maximum time for which an answer that arrives now is held, in ns; 0 while the
    /// hold is off.
    pub(super) const fn hold_ns(&self) -> u64 {
        if self.is_on { self.hold_ns as u64 } else { 0 }
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
            "rtt:2",
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

    fn fixed(target: usize, ns: f64) -> Hold {
        Hold::new(HoldChoice::Fixed(ns / 1000.0), target).unwrap()
    }

    fn adaptive(target: usize, ns: f64) -> Hold {
        Hold::new(HoldChoice::Adaptive(Some(ns / 1000.0)), target).unwrap()
    }

    /// Lets an answer arrive. Returns whether it is held.
    fn keeps(hold: &mut Hold, now_ns: u64) -> bool {
        if hold.is_on {
            hold.note(hold.count + 1, 0, now_ns);
        }
        hold.is_on
    }

    /// Delivers an answer every `gap_ns` until `count` batches were released. Returns the time for
    /// which the last batch was held.
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
                hold.note(0, 1, 0);
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
        let mut hold = fixed(3, 10_000.0);
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
        let mut hold = fixed(2, 10_000.0);
        assert_eq!(hold.hold_ns(), 10_000);
        (0..5).for_each(|now_ns| assert!(keeps(&mut hold, now_ns)));
        assert_eq!((hold.release(5), hold.hold_ns()), (Some(Release::Full), 0));
        for passed in [2, 7, 0] {
            assert!(!keeps(&mut hold, 6));
            hold.note(0, passed, 0);
        }
        hold.note(0, 1, 0);
        assert!(keeps(&mut hold, 7));
        assert_eq!(
            (hold.release(20_000), hold.hold_ns()),
            (Some(Release::Late), 10_000),
            "a late batch was too small"
        );
    }

    #[test]
    fn fast_arrivals_make_an_adaptive_hold_about_nothing() {
        // Answers at a rate of forty million per second, and answers that all arrive at the same
        // reading of the clock.
        for gap_ns in [25, 0] {
            let mut hold = adaptive(8, 10_000.0);
            batches(&mut hold, gap_ns, 40);
            assert_eq!(hold.hold_ns(), 500, "the shortest there is");
        }
    }

    #[test]
    fn slow_arrivals_make_an_adaptive_hold_grow_to_its_clamp() {
        let mut hold = adaptive(8, 1_000.0);
        let mut last = 0;
        for _ in 0..8 {
            batches(&mut hold, 50_000, 5);
            assert!(hold.hold_ns() >= last, "it only grows");
            last = hold.hold_ns();
        }
        assert_eq!(last, 100_000);
    }

    /// An adaptive hold, unlike a fixed hold, finds the time in which a full batch arrives, whether
    /// it starts with a longer or with a shorter time.
    #[test]
    fn an_adaptive_hold_finds_the_time_of_a_batch() {
        for initial_ns in [500.0, 100_000.0] {
            let mut hold = adaptive(8, initial_ns);
            batches(&mut hold, 1_000, 200);
            // Eight answers arrive at intervals of a microsecond: there are seven gaps from the
            // first to the last.
            assert!(
                (6_000..=8_000).contains(&hold.hold_ns()),
                "{}",
                hold.hold_ns()
            );
        }
    }

    #[test]
    fn time_that_stands_still_or_goes_back_spoils_nothing() {
        let mut hold = adaptive(2, 10_000.0);
        for now_ns in [1_000, 1_000, 500, 2_000] {
            assert!(keeps(&mut hold, now_ns));
            hold.release(0);
        }
        assert!((500..=100_000).contains(&hold.hold_ns()));
        let mut alone = adaptive(0, f64::MAX);
        assert_eq!(alone.hold_ns(), 100_000);
        assert!(keeps(&mut alone, 0) && alone.release(0) == Some(Release::Full));
    }
}
