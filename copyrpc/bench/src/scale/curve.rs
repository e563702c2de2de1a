//! The points to measure: the curve over the number of clients, and its summary.

use benchkv_harness::Failure;
use scalerpc::Grouping;
use serde::Serialize;

use super::point::{self, Measured};
use super::setting::Setting;

/// Share of the peak throughput from which on the server counts as busy. Up to the first point that
/// reaches it, the clients limit the throughput.
const ENOUGH: f64 = 0.95;

/// The results of the same clients, grouping off and on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Pair {
    pub(crate) clients: u32,
    pub(crate) off: Measured,
    pub(crate) on: Measured,
}

impl Pair {
    pub(crate) fn measure(setting: Setting, clients: u32) -> Result<Self, Failure> {
        let measure = |grouping| point::measure(&setting, clients, grouping);
        Ok(Self {
            clients,
            off: measure(Grouping::Off)?,
            on: measure(Grouping::On)?,
        })
    }

    pub(crate) fn on_over_off(&self) -> f64 {
        self.on.responses_per_s / self.off.responses_per_s
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Verdict {
    /// Smallest number of clients on the curve at which the throughput, grouping off, reaches 95 %
    /// of its peak. Fewer clients do not keep the server busy.
    pub(crate) enough_clients: u32,
    /// Maximum relative drop, 0 to 1, of the throughput after its peak, grouping off.
    pub(crate) grouping_off_drop: f64,
    /// Minimum throughput as a share of its peak, 0 to 1, grouping on, among the points from
    /// `enough_clients` on.
    pub(crate) grouping_on_worst: f64,
}

impl Verdict {
    /// Summarizes a curve whose points are in order of clients. Returns `None` for no points.
    pub(crate) fn of(curve: &[Pair]) -> Option<Self> {
        let off = |pair: &Pair| pair.off.responses_per_s;
        let on = |pair: &Pair| pair.on.responses_per_s;
        let most = |of: fn(&Pair) -> f64| curve.iter().map(of).fold(0.0, f64::max);
        let (off_peak, on_peak) = (most(off), most(on));
        let peak_at = curve.iter().position(|pair| off(pair) >= off_peak)?;
        let enough_at = curve
            .iter()
            .position(|pair| off(pair) >= ENOUGH * off_peak)?;
        let least = |pairs: &[Pair], of: fn(&Pair) -> f64| {
            pairs.iter().map(of).fold(f64::INFINITY, f64::min)
        };
        Some(Self {
            enough_clients: curve[enough_at].clients,
            grouping_off_drop: 1.0 - least(&curve[peak_at..], off) / off_peak,
            grouping_on_worst: least(&curve[enough_at..], on) / on_peak,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(clients: u32, off: f64, on: f64) -> Pair {
        let of = |responses_per_s| Measured {
            responses: 0,
            responses_per_s,
            send_miss_share: 0.0,
            arrival_miss_share: 0.0,
            sends_per_response: 1.0,
            slices: 0,
            slice_ns: 0,
            fewest_of_a_client: 0,
            most_of_a_client: 0,
        };
        Pair {
            clients,
            off: of(off),
            on: of(on),
        }
    }

    #[test]
    fn a_verdict_counts_from_enough_load_on_and_off_from_its_peak_on() {
        let curve = [
            pair(1, 10.0, 10.0),
            pair(10, 96.0, 96.0),
            pair(50, 100.0, 90.0),
            pair(100, 30.0, 80.0),
            pair(200, 40.0, 95.0),
        ];
        let verdict = Verdict::of(&curve).unwrap();
        assert_eq!(verdict.enough_clients, 10);
        assert!((verdict.grouping_off_drop - 0.7).abs() < 1e-9);
        assert!((verdict.grouping_on_worst - 80.0 / 96.0).abs() < 1e-9);
        assert_eq!(Verdict::of(&[]), None);
    }
}
