//! The counters of rounds, clients, policies and connections.
//!
//! A counter is declared once: a field of a struct made by [`counters!`](crate::counters!), or a
//! line in a carrier's list (`COUNTERS` of `backend/remote`). Sums, differences, the result
//! document and the columns of the flat table are derived from that declaration.

use std::collections::BTreeMap;
use std::iter::Sum;
use std::ops::{AddAssign, Sub};

use mlx5::{Device, DeviceInfo};
use serde::{Deserialize, Serialize};

/// Makes a struct of counters. A word before each field selects how it is combined with the field
/// of another thread: `sum`, or `max`.
#[macro_export]
macro_rules! counters {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$doc:meta])* $merge:ident $field:ident),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct $name { $($(#[$doc])* pub $field: u64),+ }

        impl $name {
            /// Each counter with its name.
            pub const LIST: &'static [(&'static str, fn(&Self) -> u64)] = &[$((stringify!($field), |of| of.$field)),+];

            /// Combines the counters of another thread with these counters.
            pub fn add(&mut self, other: &Self) {
                $($crate::counters!(@$merge self.$field, other.$field);)+
            }
        }
    };
    (@sum $to:expr, $from:expr) => { $to += $from };
    (@max $to:expr, $from:expr) => { $to = $to.max($from) };
}

/// Figures by name: carriers have different figures. A figure that is null in a document is
/// skipped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    from = "BTreeMap<String, Option<T>>",
    bound(deserialize = "T: Deserialize<'de>")
)]
pub struct Figures<T>(BTreeMap<String, T>);

impl<T> From<BTreeMap<String, Option<T>>> for Figures<T> {
    fn from(all: BTreeMap<String, Option<T>>) -> Self {
        let counted = all.into_iter();
        Self(
            counted
                .filter_map(|(name, figure)| Some((name, figure?)))
                .collect(),
        )
    }
}

impl<T, const N: usize> From<[(&str, T); N]> for Figures<T> {
    fn from(all: [(&str, T); N]) -> Self {
        let all = all.into_iter();
        all.map(|(name, figure)| (name.to_owned(), figure))
            .collect()
    }
}

impl<T> FromIterator<(String, T)> for Figures<T> {
    fn from_iter<I: IntoIterator<Item = (String, T)>>(all: I) -> Self {
        Self(all.into_iter().collect())
    }
}

impl<T: Copy + Default + AddAssign + Sub<Output = T> + Sum> Figures<T> {
    /// Returns the figure of this name; `None` if it is not counted.
    pub fn get(&self, name: &str) -> Option<T> {
        self.0.get(name).copied()
    }

    /// Returns the figure of this name; 0 if it is not counted.
    pub fn of(&self, name: &str) -> T {
        self.get(name).unwrap_or_default()
    }

    /// Returns all figures.
    pub fn iter(&self) -> impl Iterator<Item = (&str, T)> {
        self.0.iter().map(|(name, figure)| (name.as_str(), *figure))
    }

    /// Returns the differences from `before`.
    pub fn since(&self, before: &Self) -> Self {
        let difference = |(name, figure): (&str, T)| (name.to_owned(), figure - before.of(name));
        self.iter().map(difference).collect()
    }

    /// Adds the figures of `other`.
    pub fn add(&mut self, other: &Self) {
        for (name, figure) in other.iter() {
            *self.0.entry(name.to_owned()).or_default() += figure;
        }
    }
}

/// The work of one round of a daemon.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Round {
    /// Number of messages that the round took, or sent after they had waited; 0: there was nothing
    /// to do.
    pub moved: usize,
    /// Number of completions that the round took.
    pub cqes: usize,
    /// Number of requests to other ranks that were not answered at the end of the round.
    pub outstanding: usize,
    /// Whether the round is not over: a policy adds polls to it, the polls have not found enough
    /// completions, and the next step is another poll of the same round. The step does not count as
    /// a round.
    pub is_part: bool,
}

/// The activity of a thread's connections to other ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportReport {
    /// The device that was opened, for example `soft:lid=3`.
    pub device: String,
    /// The conditions of that device: timing, clock and faults of the software device; driver,
    /// firmware and MTU of a NIC.
    pub modes: String,
    /// The path from the device to its peers.
    pub reached_by: String,
    /// Maximum number of requests that waited at the same time: for room or credit on a connection,
    /// or for room on the way to another daemon.
    pub backlog_peak: u64,
    /// The carrier's counters, all of which can be summed. Each carrier has `writes` (the number of
    /// WRITEs with immediate, SENDs or active messages) and `messages` (the number of messages in
    /// them).
    #[serde(flatten)]
    pub counted: Figures<u64>,
}

impl TransportReport {
    /// Makes the report of connections on a device, with the device's own properties only.
    pub fn on(device: &Device) -> Self {
        let DeviceInfo {
            name,
            modes,
            transport,
            rnr_naks,
            ..
        } = device.info();
        let counted = [
            ("rnr_naks", rnr_naks),
            ("compressed", device.soft().map(|hca| hca.compressed())),
        ];
        let named = |(name, count): (&str, Option<u64>)| Some((name.to_owned(), count?));
        let counted = counted.into_iter().filter_map(named).collect();
        Self {
            device: name,
            modes,
            reached_by: transport,
            counted,
            ..Self::default()
        }
    }

    /// Returns the activity since `before`, or since the start.
    pub fn since(&self, before: Option<&Self>) -> Self {
        let Some(before) = before else {
            return self.clone();
        };
        Self {
            counted: self.counted.since(&before.counted),
            ..self.clone()
        }
    }

    /// Adds the activity of other connections.
    pub fn add(&mut self, other: &Self) {
        if self.device.is_empty() {
            self.device.clone_from(&other.device);
            self.modes.clone_from(&other.modes);
            self.reached_by.clone_from(&other.reached_by);
        }
        self.counted.add(&other.counted);
        self.backlog_peak = self.backlog_peak.max(other.backlog_peak);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyReport;

    #[test]
    fn counters_of_connections_are_differences_and_sums() {
        let at = |count: u64| TransportReport {
            counted: [("credit_waits", count), ("rnr_naks", 3 * count)].into(),
            ..TransportReport::default()
        };
        let mut sum = at(10).since(Some(&at(4)));
        assert_eq!(sum, at(6));
        sum.add(&at(1));
        assert_eq!(sum, at(7));
        sum.add(&TransportReport::default());
        assert_eq!(sum, at(7), "a device that does not count adds nothing");
        assert_eq!(
            (
                sum.counted.get("rnr_naks"),
                sum.counted.get("reads"),
                sum.counted.of("reads")
            ),
            (Some(21), None, 0)
        );
    }

    #[test]
    fn a_struct_of_counters_adds_up_or_compares_each() {
        let mut report = PolicyReport {
            held: 1,
            hold_ns: 5,
            ..PolicyReport::default()
        };
        report.add(&PolicyReport {
            held: 2,
            hold_ns: 3,
            ..PolicyReport::default()
        });
        assert_eq!(
            report,
            PolicyReport {
                held: 3,
                hold_ns: 5,
                ..PolicyReport::default()
            }
        );
        assert_eq!(
            PolicyReport::LIST
                .iter()
                .find(|(name, _)| *name == "held")
                .map(|(_, get)| get(&report)),
            Some(3)
        );
    }
}
