//! The length of slices: as configured, and longer where that gets more requests done.
//!
//! Each slice has a cost that does not depend on its length: the NIC fetches the contexts of the
//! slice's clients, and events, announcements and READs are sent. A server does not know that cost,
//! nor whether it matters: a NIC with spare time loses nothing by it. So the server tries lengths.
//! It measures the rate of requests in a window, a number of whole rotations, with slices of twice
//! or half the length, and keeps that length if the rate is good enough. Between such trials the
//! length does not change.

/// Minimum gain of slices of twice the length, in percent of the rate.
const GAIN_PERCENT: u64 = 3;
/// Maximum loss of slices of half the length, in percent of the rate.
const LOSS_PERCENT: u64 = 2;
/// Minimum number of requests of a window: fewer give no reliable rate.
const WINDOW_REQUESTS: u64 = 2_000;
/// Maximum length of a window, in ns, unless four of the longest rotations take more time. A longer
/// window is not used to compare lengths of slices.
const STALE_NS: u64 = 1_000_000_000;
/// Minimum number of windows between a trial that did not pay and the next trial. The number
/// doubles with each such trial, up to [`MAX_PAUSE`].
const MIN_PAUSE: u32 = 4;
const MAX_PAUSE: u32 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trial {
    Longer,
    Shorter,
}

/// The length of the slices of a group of factor 1 (`slice_per_mille` 1000): the configured length,
/// doubled a number of times.
#[derive(Clone, Debug)]
pub(crate) struct SliceLength {
    base_ns: u64,
    max_rotation_ns: u64,
    doublings: u32,
    /// The trial that is measured, if any; and the next trial.
    trial: Option<Trial>,
    next: Trial,
    /// Requests per second with the length that is kept.
    rate: u64,
    /// Windows until the next trial, and windows to wait after the next failed trial.
    left: u32,
    pause: u32,
    /// Start of the window, and number of requests before the window.
    since_ns: u64,
    before: u64,
}

impl SliceLength {
    /// Makes a length of `base_ns`. Slices become longer as long as one slice of each group takes
    /// at most `max_rotation_ns`.
    pub(crate) const fn new(base_ns: u64, max_rotation_ns: u64) -> Self {
        Self {
            base_ns,
            max_rotation_ns,
            doublings: 0,
            trial: None,
            next: Trial::Longer,
            rate: 0,
            left: 0,
            pause: MIN_PAUSE,
            since_ns: 0,
            before: 0,
        }
    }

    /// Returns the length of the slices that begin now, in ns.
    pub(crate) const fn ns(&self) -> u64 {
        let doublings = match self.trial {
            None => self.doublings,
            Some(Trial::Longer) => self.doublings + 1,
            Some(Trial::Shorter) => self.doublings - 1,
        };
        self.doubled(doublings)
    }

    /// Handles the end of a rotation over `groups` groups. `requests` is the number of requests
    /// accepted since the server was made. The length of a slice may change.
    pub(crate) fn on_rotation(&mut self, now_ns: u64, requests: u64, groups: usize) {
        let max = self.max_doublings(groups);
        let ns = now_ns.saturating_sub(self.since_ns);
        let done = requests.saturating_sub(self.before);
        if self.doublings > max || self.trial == Some(Trial::Longer) && self.doublings == max {
            // The number of groups has grown, so the maximum length is smaller than before.
            self.keep(self.doublings.min(max));
        } else if ns > STALE_NS.max(self.max_rotation_ns.saturating_mul(4)) {
            // There were few requests, which need no long slices, or no client waited for a slice.
            self.keep(0);
        } else if done < WINDOW_REQUESTS {
            return;
        } else {
            let rate = u64::try_from(u128::from(done) * 1_000_000_000 / u128::from(ns.max(1)))
                .unwrap_or(u64::MAX);
            self.judge(rate, max);
        }
        (self.since_ns, self.before) = (now_ns, requests);
    }

    /// Decides after a window with `rate` accepted requests per second whether the trial was good,
    /// and begins the next trial when it is due.
    fn judge(&mut self, rate: u64, max: u32) {
        let percent_of = |rate: u64, percent: u64| u128::from(rate) * u128::from(percent);
        let does_pay = match self.trial {
            None => {
                self.rate = rate;
                self.left = self.left.saturating_sub(1);
                return self.try_next(max);
            }
            Some(Trial::Longer) => {
                percent_of(rate, 100) >= percent_of(self.rate, 100 + GAIN_PERCENT)
            }
            Some(Trial::Shorter) => {
                percent_of(rate, 100) >= percent_of(self.rate, 100 - LOSS_PERCENT)
            }
        };
        match self.trial.take() {
            Some(Trial::Longer) if does_pay => self.doublings += 1,
            Some(Trial::Shorter) if does_pay => self.doublings -= 1,
            _ => {
                self.next = if self.next == Trial::Longer {
                    Trial::Shorter
                } else {
                    Trial::Longer
                };
                self.left = self.pause;
                self.pause = (2 * self.pause).min(MAX_PAUSE);
                return;
            }
        }
        // Try the same direction again at once.
        (self.rate, self.left, self.pause) = (rate, 0, MIN_PAUSE);
        self.try_next(max);
    }

    fn try_next(&mut self, max: u32) {
        if self.left > 0 || max == 0 && self.doublings == 0 {
            return;
        }
        // The length can change in at least one direction, as `max` or `doublings` is not 0.
        self.next = match self.next {
            Trial::Longer if self.doublings >= max => Trial::Shorter,
            Trial::Shorter if self.doublings == 0 => Trial::Longer,
            next => next,
        };
        self.trial = Some(self.next);
    }

    /// Ends a trial, and keeps the length with this number of doublings for at least one window, to
    /// measure its rate.
    const fn keep(&mut self, doublings: u32) {
        self.doublings = doublings;
        self.trial = None;
        self.left = 1;
    }

    const fn doubled(&self, doublings: u32) -> u64 {
        self.base_ns.saturating_mul(1 << doublings)
    }

    /// Returns the number of times that the length may be doubled with `groups` groups.
    const fn max_doublings(&self, groups: usize) -> u32 {
        let mut max = 0;
        while max < 20
            && self.doubled(max + 1).saturating_mul(groups as u64) <= self.max_rotation_ns
        {
            max += 1;
        }
        max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE_NS: u64 = 100_000;
    const LONGEST_NS: u64 = 20_000_000;

    /// A server in virtual time. A slice costs `price_ns` of its length, and serves `rate` requests
    /// per second in the rest, but no more than the demand.
    struct World {
        slices: SliceLength,
        price_ns: u64,
        rate: u64,
        demand: u64,
        groups: usize,
        now_ns: u64,
        requests: u64,
        rng: fastrand::Rng,
    }

    impl World {
        fn new(price_ns: u64, groups: usize) -> Self {
            let slices = SliceLength::new(BASE_NS, LONGEST_NS);
            let rng = fastrand::Rng::with_seed(price_ns);
            Self {
                slices,
                price_ns,
                rate: 10_000_000,
                demand: u64::MAX,
                groups,
                now_ns: 0,
                requests: 0,
                rng,
            }
        }

        /// Runs for `ns`. Returns the served requests as a share of the maximum.
        fn run(&mut self, ns: u64) -> f64 {
            let end = self.now_ns + ns;
            let before = self.requests;
            let start = self.now_ns;
            while self.now_ns < end {
                for _ in 0..self.groups {
                    let length = self.slices.ns();
                    let served = length.saturating_sub(self.price_ns) * self.rate / 1_000_000_000;
                    let asked =
                        (u128::from(length) * u128::from(self.demand) / 1_000_000_000) as u64;
                    // Up to one per cent of noise.
                    self.requests += served.min(asked) * self.rng.u64(990..=1010) / 1000;
                    self.now_ns += length;
                }
                self.slices
                    .on_rotation(self.now_ns, self.requests, self.groups);
                assert!(
                    self.slices.ns() * self.groups as u64
                        <= LONGEST_NS.max(BASE_NS * self.groups as u64),
                    "{:?}",
                    self.slices
                );
            }
            (self.requests - before) as f64 * 1e9 / (self.now_ns - start) as f64 / self.rate as f64
        }
    }

    #[test]
    fn slices_whose_price_is_a_small_part_stay_as_they_are() {
        for groups in [2, 25, 100] {
            let mut world = World::new(1_000, groups);
            world.run(1_000_000_000);
            assert_eq!(world.slices.doublings, 0, "{groups} groups");
            assert!(world.run(1_000_000_000) > 0.98);
        }
    }

    /// Prices of 35 us and 61 us leave 0.65 and 0.39 of the peak with slices of 100 us.
    #[test]
    fn slices_become_longer_until_their_price_is_a_small_part_or_a_rotation_too_long() {
        for (price_ns, groups, at_least, length_ns) in [
            (35_000, 25, 0.9, 400_000),
            (35_000, 2, 0.9, 400_000),
            (61_000, 25, 0.9, 800_000),
        ] {
            let mut world = World::new(price_ns, groups);
            world.run(200_000_000);
            assert!(
                world.slices.doubled(world.slices.doublings) >= length_ns,
                "{price_ns} ns of {groups} groups: {:?}",
                world.slices
            );
            let part = world.run(1_000_000_000);
            assert!(part >= at_least, "{price_ns} ns of {groups} groups: {part}");
        }
        let mut world = World::new(61_000, 100);
        world.run(1_000_000_000);
        assert_eq!(world.slices.doublings, 1, "100 groups of 200 us take 20 ms");
    }

    #[test]
    fn slices_become_short_again_when_there_is_less_to_do_or_more_groups_are_there() {
        let mut world = World::new(35_000, 25);
        world.run(500_000_000);
        assert!(world.slices.doublings >= 2);
        world.demand = 1_000_000;
        world.run(5_000_000_000);
        assert_eq!(
            world.slices.doublings, 0,
            "a tenth of what it can do: {:?}",
            world.slices
        );
        world.demand = u64::MAX;
        world.run(1_000_000_000);
        assert!(world.slices.doublings >= 2, "and again: {:?}", world.slices);
        world.groups = 200;
        world.run(1);
        assert_eq!(
            world.slices.ns(),
            BASE_NS,
            "a rotation of 200 groups takes 20 ms as it is"
        );
        world.groups = 25;
        world.run(500_000_000);
        world.demand = 1_000;
        world.run(5_000_000_000);
        assert_eq!(
            world.slices.ns(),
            BASE_NS,
            "hardly anything: {:?}",
            world.slices
        );
    }

    #[test]
    fn without_room_nothing_is_tried() {
        let mut world = World::new(60_000, 25);
        world.slices = SliceLength::new(BASE_NS, 0);
        for _ in 0..1000 {
            world.slices.on_rotation(world.now_ns, world.requests, 25);
            (world.now_ns, world.requests) = (world.now_ns + 2_500_000, world.requests + 10_000);
            assert_eq!(world.slices.ns(), BASE_NS);
        }
    }
}
