//! Batch hold: answers of other ranks are kept back and released to their callers together, so that the callers' next requests come together
//! and fill batches.

use super::ewma::Ewma;

/// Shortest and longest time that answers are held, in ns.
pub const HOLD_NS: std::ops::RangeInclusive<f64> = 500.0..=100_000.0;
/// Weight of the newest arrival rate.
const RATE_ALPHA: f64 = 0.125;

/// How long answers are held at most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HoldRule {
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
pub struct Hold {
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
}

/// Why answers were released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// There were enough of them.
    Full,
    /// Their time had come.
    Late,
}

impl Hold {
    /// Holds up to `target` answers, at first for `initial_ns`.
    #[must_use]
    pub fn new(rule: HoldRule, target: usize, initial_ns: f64) -> Self {
        let target = target.max(1);
        let hold_ns = initial_ns.clamp(*HOLD_NS.start(), *HOLD_NS.end());
        let rate = Ewma::starting_at(target as f64 / hold_ns, RATE_ALPHA);
        Self { rule, target, hold_ns, rate, is_on: true, count: 0, since_ns: 0 }
    }

    /// Whether an answer that comes now is to be kept; it counts as kept then.
    #[inline]
    pub fn keeps(&mut self, now_ns: u64) -> bool {
        if self.is_on {
            if self.count == 0 {
                self.since_ns = now_ns;
            }
            self.count += 1;
        }
        self.is_on
    }

    /// Whether what is held is to be released now; it counts as released then.
    pub fn release(&mut self, now_ns: u64) -> Option<Release> {
        let held_ns = now_ns.saturating_sub(self.since_ns);
        let release = match self.count {
            0 => return None,
            count if count >= self.target => Release::Full,
            _ if held_ns as f64 >= self.hold_ns => Release::Late,
            _ => return None,
        };
        self.note_batch(self.count, held_ns);
        self.count = 0;
        Some(release)
    }

    /// So many answers were passed on by one round without being held.
    pub fn passed(&mut self, answers: usize) {
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
    pub fn set_rtt(&mut self, rtt_ns: f64) {
        if let HoldRule::Rtt(multiplier) = self.rule {
            self.set_hold(rtt_ns * multiplier);
        }
    }

    fn set_hold(&mut self, hold_ns: f64) {
        self.hold_ns = hold_ns.clamp(*HOLD_NS.start(), *HOLD_NS.end());
    }

    /// How long an answer that comes now is held at most, in ns; 0 while nothing is held back.
    #[must_use]
    pub const fn hold_ns(&self) -> u64 {
        if self.is_on { self.hold_ns as u64 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// What the fixed one cannot do: it finds the time that a full batch takes, from either side.
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
