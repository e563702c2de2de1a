//! The time that other ranks take to answer, as a daemon can measure it.

use super::ewma::Ewma;

/// The smoothed time from a flush with requests to the first completion after it. One time is
/// measured at once.
///
/// If requests were already in flight, the completion may answer one of them; the time is then a
/// lower bound of the round trip.
#[derive(Debug)]
pub struct RttProbe {
    flushed_ns: Option<u64>,
    smoothed: Ewma,
}

impl RttProbe {
    /// Makes a probe without a measurement. `alpha` is the weight of the newest time.
    #[must_use]
    pub const fn new(alpha: f64) -> Self {
        Self {
            flushed_ns: None,
            smoothed: Ewma::new(alpha),
        }
    }

    /// Notes a flush with requests.
    pub fn flushed(&mut self, now_ns: u64) {
        self.flushed_ns.get_or_insert(now_ns);
    }

    /// Notes a completion.
    pub fn completed(&mut self, now_ns: u64) {
        if let Some(flushed_ns) = self.flushed_ns.take() {
            self.smoothed.add(now_ns.saturating_sub(flushed_ns) as f64);
        }
    }

    /// Returns the smoothed time, in ns; `None` before the first.
    #[must_use]
    pub const fn rtt_ns(&self) -> Option<f64> {
        self.smoothed.mean()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_lasts_from_the_first_flush_to_the_first_completion() {
        let mut probe = RttProbe::new(0.5);
        probe.completed(5);
        assert_eq!(probe.rtt_ns(), None, "nothing was flushed");
        probe.flushed(100);
        probe.flushed(400);
        probe.completed(600);
        probe.completed(900);
        assert_eq!(probe.rtt_ns(), Some(500.0));
        probe.flushed(1000);
        probe.completed(2000);
        assert_eq!(probe.rtt_ns(), Some(750.0));
    }

    #[test]
    fn time_that_goes_back_is_no_time() {
        let mut probe = RttProbe::new(0.5);
        probe.flushed(100);
        probe.completed(90);
        assert_eq!(probe.rtt_ns(), Some(0.0));
    }
}
