//! Latency histograms: recorded per thread without allocation, serialised, merged over ranks.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use std::fmt;

use hdrhistogram::Histogram;
use hdrhistogram::serialization::{Deserializer, Serializer, V2DeflateSerializer};
use serde::{Deserialize, Serialize};

use crate::Failure;

/// Maximum latency, in ns. A longer latency counts as the maximum.
pub const MAX_NS: u64 = 60_000_000_000;

/// A histogram of times from 1 ns to [`MAX_NS`], to three significant digits. It takes about 220
/// KiB, which [`new`](Self::new) allocates; only a histogram that [grows](Self::growing) allocates
/// later.
#[derive(Clone, PartialEq)]
pub struct LatencyHistogram(Histogram<u64>);

/// Formats the summary: there are tens of thousands of buckets.
impl fmt::Debug for LatencyHistogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LatencyHistogram")
            .field(&self.summary())
            .finish()
    }
}

/// The figures of a histogram in a result, in nanoseconds. All are 0 if `count` is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// Number of recorded values.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Smallest value.
    pub min: u64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// 99.99th percentile.
    pub p9999: u64,
    /// Largest value.
    pub max: u64,
}

impl LatencyHistogram {
    /// Makes an empty histogram.
    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, MAX_NS, 3);
        // The bounds are constants in the range that the crate documents, so this does not fail.
        Self(histogram.unwrap_or_else(|_| unreachable!("constant histogram bounds are valid")))
    }

    /// Makes an empty histogram that allocates room in [`record`](Self::record): 16 KiB, and 8 KiB
    /// more for each doubling of the maximum above 2 us. It is for processes that have many
    /// histograms, and do not measure the time of `record`.
    pub fn growing() -> Self {
        let histogram = Histogram::new(3);
        Self(histogram.unwrap_or_else(|_| unreachable!("3 digits are valid")))
    }

    /// Counts one latency. Zero counts as 1 ns, and more than [`MAX_NS`] as `MAX_NS`.
    #[inline]
    pub fn record(&mut self, latency_ns: u64) {
        self.record_many(latency_ns, 1);
    }

    /// Counts `count` latencies of the same length.
    #[inline]
    pub fn record_many(&mut self, latency_ns: u64, count: u64) {
        let in_range = self.0.record_n(latency_ns.clamp(1, MAX_NS), count);
        debug_assert!(in_range.is_ok(), "the range is that of all histograms");
    }

    /// Returns the sum of all latencies in ns, to the precision of the histogram.
    pub fn sum_ns(&self) -> f64 {
        self.0.mean() * self.0.len() as f64
    }

    /// Returns the number of recorded values.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Adds all values of `other`.
    ///
    /// # Errors
    /// `other` was decoded from bytes with a larger range.
    pub fn merge(&mut self, other: &Self) -> Result<(), Failure> {
        self.0.add(&other.0).map_err(|_| {
            format!("the other histogram covers a range this one does not (1 ns to {MAX_NS} ns)")
                .into()
        })
    }

    /// Returns the figures of the histogram.
    pub fn summary(&self) -> LatencySummary {
        if self.0.is_empty() {
            return LatencySummary::default();
        }
        LatencySummary {
            count: self.0.len(),
            mean: self.0.mean(),
            min: self.0.min(),
            p50: self.0.value_at_quantile(0.5),
            p90: self.0.value_at_quantile(0.9),
            p99: self.0.value_at_quantile(0.99),
            p999: self.0.value_at_quantile(0.999),
            p9999: self.0.value_at_quantile(0.9999),
            max: self.0.max(),
        }
    }

    /// Returns the smallest latency, to the precision of the histogram, for which at least the
    /// share `quantile` (0 to 1) of all values is equal or smaller; 0 if there are no values.
    pub fn value_at(&self, quantile: f64) -> u64 {
        self.0.value_at_quantile(quantile)
    }

    /// Returns the compressed HdrHistogram V2 encoding, which the tools of other languages read.
    ///
    /// # Errors
    /// The encoder's reason.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        V2DeflateSerializer::new().serialize(&self.0, &mut bytes)?;
        Ok(bytes)
    }

    /// Decodes the bytes of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// The bytes are not such an encoding.
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Self, Failure> {
        let decoded = Deserializer::new().deserialize(&mut bytes);
        decoded
            .map(Self)
            .map_err(|why| format!("the bytes are not a V2 HdrHistogram: {why}").into())
    }
}

/// Encodes a histogram as text: [`to_bytes`](LatencyHistogram::to_bytes) in base64, the form of
/// HdrHistogram's own logs (`HISTF...`).
impl Serialize for LatencyHistogram {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = self.to_bytes().map_err(serde::ser::Error::custom)?;
        serializer.serialize_str(&BASE64.encode(bytes))
    }
}

impl<'de> Deserialize<'de> for LatencyHistogram {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = BASE64.decode(text).map_err(serde::de::Error::custom)?;
        Self::from_bytes(&bytes).map_err(serde::de::Error::custom)
    }
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_of_a_length_count_as_if_recorded_one_by_one() {
        let (mut one_by_one, mut at_once) = (LatencyHistogram::new(), LatencyHistogram::new());
        for (latency_ns, count) in [(0, 3), (1234, 32), (u64::MAX, 2), (77, 0)] {
            (0..count).for_each(|_| one_by_one.record(latency_ns));
            at_once.record_many(latency_ns, count);
        }
        assert_eq!(
            (at_once.summary(), at_once.count()),
            (one_by_one.summary(), 37)
        );
    }

    #[test]
    fn percentiles_are_those_of_the_values() {
        let mut histogram = LatencyHistogram::new();
        (1..=1000).for_each(|value| histogram.record(value));
        let summary = histogram.summary();
        assert_eq!(
            (
                summary.count,
                summary.min,
                summary.p50,
                summary.p90,
                summary.p99,
                summary.p999,
                summary.p9999,
                summary.max
            ),
            (1000, 1, 500, 900, 990, 999, 1000, 1000)
        );
        assert!((summary.mean - 500.5).abs() < 0.01);
    }

    #[test]
    fn empty_histogram_summarises_to_zeros() {
        assert_eq!(LatencyHistogram::new().summary(), LatencySummary::default());
    }

    #[test]
    fn out_of_range_values_are_counted_not_lost() {
        let mut histogram = LatencyHistogram::new();
        histogram.record(0);
        histogram.record(u64::MAX);
        let summary = histogram.summary();
        assert_eq!(summary.count, 2);
        assert!(summary.max >= MAX_NS && summary.max < MAX_NS + MAX_NS / 500);
    }

    #[test]
    fn merging_serialised_halves_equals_the_whole() {
        let mut whole = LatencyHistogram::new();
        let mut even = LatencyHistogram::new();
        let mut odd = LatencyHistogram::new();
        for value in (1..200_000).step_by(37) {
            whole.record(value);
            if value % 2 == 0 {
                even.record(value)
            } else {
                odd.record(value)
            }
        }
        let mut merged = LatencyHistogram::new();
        for half in [&even, &odd] {
            let text = serde_json::to_string(half).unwrap();
            merged.merge(&serde_json::from_str(&text).unwrap()).unwrap();
        }
        assert_eq!(merged.summary(), whole.summary());
    }

    /// The bytes were written by the Python package hdrhistogram 0.10.8 with the same bounds.
    #[test]
    fn histograms_of_other_tools_are_read() {
        let theirs = "\"HISTFAAAACx4nJNpmSzMwMDAwwABzFCaEYh5f7hHMNh/gAowneZneV/H9H0OExMAmFcIEQ==\"";
        let mut ours = LatencyHistogram::new();
        [1, 1000, 1000, 250_000, 59_000_000_000]
            .into_iter()
            .for_each(|value| ours.record(value));
        assert_eq!(
            serde_json::from_str::<LatencyHistogram>(theirs).unwrap(),
            ours
        );
        assert!(serde_json::to_string(&ours).unwrap().starts_with("\"HISTF"));
        assert_eq!(
            [0.2, 0.6, 0.61].map(|quantile| ours.value_at(quantile)),
            [1, 1000, 250_111]
        );
    }

    #[test]
    fn garbage_is_not_a_histogram() {
        let good = LatencyHistogram::new().to_bytes().unwrap();
        assert!(LatencyHistogram::from_bytes(&[]).is_err());
        assert!(LatencyHistogram::from_bytes(&[0xa5; 64]).is_err());
        assert!(LatencyHistogram::from_bytes(&good[..good.len() / 2]).is_err());
        assert!(serde_json::from_str::<LatencyHistogram>("\"HISTF\"").is_err());
    }
}
