//! The accesses of a client, generated before the run: the measured loop draws no random number and
//! allocates nothing.

use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use benchkv_harness::range::{RangeError, decimal, range, whole};
use benchkv_harness::units;
use clap::Args;
use fastrand::Rng;
use serde::{Deserialize, Serialize};

use crate::store::Shard;
use crate::values::{HEAD_BYTES, VALUE_BYTES};
use crate::zipf::Zipf;

/// Number of accesses of one pattern in a real-time job, 1 MiB of memory. After the last access a
/// client starts again at the first. The accesses are read in order, so the prefetcher hides the
/// time of reading them.
pub const PATTERN_LEN: usize = 1 << 16;

/// Number of keys of each client that only this client ever accesses.
pub const PRIVATE_KEYS: usize = 16;

/// Minimum share of all keys that a job should access. If clients access fewer keys, the caches
/// hold a much larger part of these keys than they would hold of all keys.
const TOUCHED: f64 = 0.25;

/// Maximum share of accesses to private keys, when results are verified.
const PRIVATE_SHARE: f64 = 1.0 / 16.0;

/// The distribution of keys.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum Distribution {
    /// All keys with equal probability.
    Uniform,
    /// The key with number `k` in a shuffled order, the same in every job, with probability
    /// proportional to `(k + 1)^-theta`. There is one order of all keys of the job; if a remote
    /// ratio determines how often each rank is chosen, each rank has an order of its own keys.
    Zipfian {
        /// Skew: 0.99 is the customary value.
        theta: f64,
    },
}

impl FromStr for Distribution {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let theta = match text.split_once(':') {
            None if text == "uniform" => return Ok(Self::Uniform),
            None if text == "zipfian" => Some(0.99),
            Some(("zipfian", theta)) => theta
                .parse()
                .ok()
                .filter(|theta| *theta > 0.0 && *theta <= 10.0),
            _ => None,
        };
        theta.map(|theta| Self::Zipfian { theta }).ok_or_else(|| {
            format!("{text:?} is not a distribution; use uniform, zipfian, or zipfian:THETA with THETA above 0 and at most 10")
        })
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Zipfian { theta } => write!(f, "zipfian:{theta}"),
        }
    }
}

/// Legal numbers of keys of a rank's store: at most 1 GiB of [`Shard`] tables.
const KEYS: RangeInclusive<u64> = 1..=1 << 26;

/// Legal shares of operations.
pub const SHARE: RangeInclusive<f64> = 0.0..=1.0;

/// The parameters that all clients of a job share, as typed and as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Args, Serialize, Deserialize)]
#[group(skip)]
pub struct Workload {
    /// Number of ranks, from the job's topology.
    #[arg(skip)]
    #[serde(skip)]
    pub ranks: usize,
    /// Number of clients of a rank, from the job's topology.
    #[arg(skip)]
    #[serde(skip)]
    pub clients: usize,

    /// Shared keys in the store of each rank, 1 to 67108864.
    #[arg(help_heading = "Data", long, hide_short_help = true, value_name = "N", value_parser = whole(KEYS), default_value_t = 100_000)]
    pub key_range: u64,

    /// Bytes of a value, 8 to 16M. The rings between ranks are sized for it.
    #[arg(help_heading = "Data", long = "value-size", hide_short_help = true, value_name = "BYTES", value_parser = value_size, default_value = "8")]
    #[serde(rename = "value_size")]
    pub value_bytes: usize,

    /// Start with empty stores: a get of a key that no put has reached finds no value, which is
    /// cheaper than finding one. By default every shared key has a value before clients start.
    #[arg(help_heading = "Data", long, hide_short_help = true)]
    pub empty: bool,

    /// Share of operations that read, 0 to 1
    #[arg(help_heading = "Load", long, value_name = "RATIO", value_parser = decimal(SHARE), default_value_t = 0.5)]
    pub read_ratio: f64,

    /// Share of accesses that go to another rank; 0 in a job of one rank. By default each rank gets
    /// the same share.
    #[arg(skip)]
    pub remote_ratio: f64,

    /// Distribution of keys: uniform, zipfian, zipfian:THETA.
    #[arg(help_heading = "Data", long, hide_short_help = true, value_name = "NAME", default_value_t = Distribution::Uniform)]
    pub distribution: Distribution,

    /// Whether part of the accesses goes to private keys and is read back.
    #[arg(skip)]
    pub verify: bool,

    /// Seed of the access patterns, 0 to 18446744073709551615.
    #[arg(help_heading = "Data", long, hide_short_help = true, value_name = "N", value_parser = whole(0..=u64::MAX), default_value_t = 1)]
    #[serde(skip)]
    pub seed: u64,

    /// Accesses of a client's pattern, at least 16 for each private key.
    #[arg(skip = PATTERN_LEN)]
    #[serde(skip)]
    pub accesses: usize,
}

fn value_size(text: &str) -> Result<usize, String> {
    let bytes = units::bytes(text)? as usize;
    let outside = || format!("use {} to {} bytes", VALUE_BYTES.start(), VALUE_BYTES.end());
    if VALUE_BYTES.contains(&bytes) {
        Ok(bytes)
    } else {
        Err(outside())
    }
}

/// The kind of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    /// Gets a shared key.
    Read,
    /// Puts a shared key.
    Write,
    /// Puts and gets alternately a key that only this client uses.
    Private,
}

/// An access; 16 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    /// The key.
    pub key: u64,
    /// [`AccessKind::Read`]: number of the key among the keys that this pattern reads, if results
    /// are verified. [`AccessKind::Private`]: number of the private key. Otherwise 0.
    pub slot: u16,
    /// The rank whose store is accessed.
    pub rank: u16,
    /// The hash of rank and key, by which values are verified.
    pub hash: u16,
    /// The kind of the access.
    pub kind: AccessKind,
}

const _: () = assert!(size_of::<Access>() == 16 && PATTERN_LEN <= 1 << 16);

impl Access {
    /// Makes an access.
    pub const fn new(kind: AccessKind, rank: u16, key: u64, slot: u16) -> Self {
        let hash = hash16(rank, key);
        Self {
            key,
            slot,
            rank,
            hash,
            kind,
        }
    }
}

/// Returns 16 bits of a mix (the finaliser of MurmurHash3) of rank and key.
pub(crate) const fn hash16(rank: u16, key: u64) -> u16 {
    let mut mix = key ^ (rank as u64) << 40;
    mix = (mix ^ mix >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mix = (mix ^ mix >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (mix ^ mix >> 33) as u16
}

/// The accesses of one client.
#[derive(Debug)]
pub struct Pattern {
    /// The accesses. Their number is [`Workload::accesses`].
    pub accesses: Vec<Access>,
    /// Number of different keys read, if results are verified. Then every slot of an
    /// [`AccessKind::Read`] is below this number.
    pub read_keys: usize,
}

impl Pattern {
    /// Returns a digest of the accesses in their order (FNV-1a): the same on every machine and in
    /// every version.
    pub fn digest(&self) -> u64 {
        let words = self
            .accesses
            .iter()
            .flat_map(|access| [access.key, u64::from(access.rank), access.kind as u64]);
        words.fold(0xcbf2_9ce4_8422_2325, |digest, word| {
            (digest ^ word).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}

impl Workload {
    /// Checks whether a job can have this workload.
    ///
    /// # Errors
    /// The first option that cannot be honoured.
    pub fn check(&self) -> Result<(), RangeError> {
        if self.remote_ratio > 0.0 && self.ranks == 1 {
            let why = "one rank has no other to talk to";
            let legal = "0, or --ranks of 2 and more".to_owned();
            return Err(range("--remote-ratio", self.remote_ratio, why, legal));
        }
        Ok(())
    }

    /// Returns the remote ratio at which each rank gets the same share of a client's accesses.
    pub fn even_ratio(ranks: usize) -> f64 {
        (ranks - 1) as f64 / ranks as f64
    }

    /// Returns the share of accesses to private keys. Half of these accesses are writes and half
    /// are reads, so the share is at most twice the smaller one of the job's shares of reads and of
    /// writes.
    pub fn private_share(&self) -> f64 {
        let writes = 1.0 - self.read_ratio;
        let most = PRIVATE_SHARE.min(2.0 * self.read_ratio).min(2.0 * writes);
        if self.verify { most } else { 0.0 }
    }

    /// Returns the number of keys of each rank's store, including private keys.
    pub const fn store_keys(&self) -> u64 {
        let private = self.ranks * self.clients * PRIVATE_KEYS * self.verify as usize;
        self.key_range + private as u64
    }

    /// Returns the maximum share of the shared keys of all ranks that clients access; `None` if it
    /// is at least a quarter. The share is limited because each client repeats its
    /// [`accesses`](Self::accesses).
    pub fn touched_at_most(&self) -> Option<f64> {
        let share = (self.clients * self.accesses) as f64 / self.key_range as f64;
        (share < TOUCHED).then_some(share)
    }

    /// Returns the size of a rank's store, in bytes.
    pub const fn store_bytes(&self) -> u64 {
        self.store_keys() * (Shard::BYTES_PER_KEY + self.value_bytes - HEAD_BYTES) as u64
    }

    /// Generates the accesses of client `client` of rank `rank`.
    pub fn pattern(&self, rank: usize, client: usize) -> Pattern {
        let number = (rank * self.clients + client) as u64;
        // The number is multiplied by an odd constant, so that clients of neighbouring jobs
        // (seed + 1) do not share their streams.
        let stream = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut rng = Rng::with_seed(self.seed.wrapping_add(stream));
        // If the remote ratio gives each rank the same share, one Zipfian distribution spans the
        // keys of all ranks. With any other ratio, first the rank is chosen, and then a key of this
        // rank.
        let ranks = if self.remote_ratio == Self::even_ratio(self.ranks) {
            self.ranks as u64
        } else {
            1
        };
        let keys = self.key_range * ranks;
        let zipf = match self.distribution {
            Distribution::Uniform => None,
            Distribution::Zipfian { theta } => Some(Zipf::new(keys, theta)),
        };
        // Half of the private accesses are reads, so the other accesses have this share of reads to
        // reach the ratio of the job.
        let private = self.private_share();
        let read_ratio = (self.read_ratio - private / 2.0) / (1.0 - private);
        let mut slots = HashMap::new();
        let accesses = (0..self.accesses)
            .map(|at| {
                let private_before = share_of(at, private);
                if share_of(at + 1, private) > private_before {
                    return self.private_access(rank, number, private_before % PRIVATE_KEYS);
                }
                let (key, owner) = match &zipf {
                    Some(zipf) => {
                        let item = shuffled(zipf.sample(&mut rng), keys);
                        (item / ranks, (ranks > 1).then_some((item % ranks) as u16))
                    }
                    None => (rng.u64(0..self.key_range), None),
                };
                let target = owner.unwrap_or_else(|| {
                    let is_remote = rng.f64() < self.remote_ratio;
                    let choice = is_remote.then(|| rng.usize(..));
                    choice.map_or(rank as u16, |choice| self.another_rank(rank, choice))
                });
                let (kind, slot) = if rng.f64() >= read_ratio {
                    (AccessKind::Write, 0)
                } else {
                    let next = slots.len() as u16;
                    // Only the verification needs the slot.
                    let slot = self
                        .verify
                        .then(|| *slots.entry((target, key)).or_insert(next));
                    (AccessKind::Read, slot.unwrap_or(0))
                };
                Access::new(kind, target, key, slot)
            })
            .collect();
        Pattern {
            accesses,
            read_keys: slots.len(),
        }
    }

    /// Returns a private access. A private key always belongs to the same rank. The client's
    /// private keys are spread over its own rank and other ranks by the remote ratio of the job.
    fn private_access(&self, rank: usize, client_number: u64, slot: usize) -> Access {
        let is_remote = share_of(slot + 1, self.remote_ratio) > share_of(slot, self.remote_ratio);
        let target = if is_remote {
            self.another_rank(rank, slot)
        } else {
            rank as u16
        };
        let key = self.key_range + client_number * PRIVATE_KEYS as u64 + slot as u64;
        Access::new(AccessKind::Private, target, key, slot as u16)
    }

    fn another_rank(&self, rank: usize, choice: usize) -> u16 {
        ((rank + 1 + choice % (self.ranks - 1).max(1)) % self.ranks) as u16
    }
}

/// Returns how many of the first `count` items belong to a `share` that is spread evenly over all
/// items.
fn share_of(count: usize, share: f64) -> usize {
    (count as f64 * share).ceil() as usize
}

/// Returns the place of `item` in a fixed order of the numbers below `count`, in which neighbours
/// are far apart. The order is a permutation of the numbers below the next power of two, applied
/// repeatedly until the place is below `count`.
fn shuffled(item: u64, count: u64) -> u64 {
    let bits = u64::BITS - (count - 1).leading_zeros();
    let mask = (1 << bits) - 1;
    let mut place = item;
    loop {
        for odd in [0x9e37_79b9_7f4a_7c15_u64, 0xbf58_476d_1ce4_e5b9] {
            place = place.wrapping_add(odd).wrapping_mul(odd) & mask;
            place ^= place >> (bits / 2 + 1);
        }
        if place < count {
            return place;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Workload = Workload {
        value_bytes: 8,
        empty: true,
        ranks: 4,
        clients: 2,
        key_range: 1000,
        read_ratio: 0.8,
        remote_ratio: 0.5,
        distribution: Distribution::Uniform,
        verify: true,
        seed: 1,
        accesses: PATTERN_LEN,
    };

    fn share(pattern: &Pattern, of: impl Fn(&Access) -> bool) -> f64 {
        pattern.accesses.iter().filter(|access| of(access)).count() as f64 / PATTERN_LEN as f64
    }

    #[test]
    fn ratios_are_those_asked_for() {
        let plain = Workload {
            verify: false,
            ..BASE
        };
        for (rank, client) in [(0, 0), (3, 1)] {
            let pattern = plain.pattern(rank, client);
            assert!((share(&pattern, |access| access.kind == AccessKind::Read) - 0.8).abs() < 0.01);
            assert!(
                (share(&pattern, |access| usize::from(access.rank) != rank) - 0.5).abs() < 0.01
            );
            for other in (0..4).filter(|other| *other != rank) {
                assert!(
                    (share(&pattern, |access| usize::from(access.rank) == other) - 0.5 / 3.0).abs()
                        < 0.01
                );
            }
        }
        for verify in [true, false] {
            let extreme = Workload {
                read_ratio: 1.0,
                remote_ratio: 1.0,
                verify,
                ..BASE
            }
            .pattern(0, 0);
            assert!(
                extreme
                    .accesses
                    .iter()
                    .all(|access| access.kind == AccessKind::Read && access.rank != 0)
            );
            let opposite = Workload {
                read_ratio: 0.0,
                remote_ratio: 0.0,
                verify,
                ..BASE
            }
            .pattern(2, 0);
            assert!(
                opposite
                    .accesses
                    .iter()
                    .all(|access| access.kind == AccessKind::Write && access.rank == 2)
            );
        }
    }

    #[test]
    fn private_accesses_do_not_change_the_share_of_reads() {
        for read_ratio in [0.001, 0.02, 0.3, 0.5, 0.95, 0.99, 0.999] {
            let pattern = Workload { read_ratio, ..BASE }.pattern(1, 1);
            let private = share(&pattern, |access| access.kind == AccessKind::Private);
            let reads = share(&pattern, |access| access.kind == AccessKind::Read) + private / 2.0;
            assert!(
                (reads - read_ratio).abs() < 0.005 && private > 0.0,
                "{reads} of {read_ratio}"
            );
        }
    }

    #[test]
    fn one_rank_has_no_remote_access() {
        let pattern = Workload {
            ranks: 1,
            remote_ratio: 0.0,
            ..BASE
        }
        .pattern(0, 1);
        assert!(pattern.accesses.iter().all(|access| access.rank == 0));
    }

    #[test]
    fn the_seed_decides_and_clients_differ() {
        let keys = |workload: &Workload, client| {
            workload
                .pattern(0, client)
                .accesses
                .iter()
                .map(|access| access.key)
                .collect::<Vec<_>>()
        };
        let plain = Workload {
            verify: false,
            ..BASE
        };
        assert_eq!(keys(&plain, 0), keys(&plain, 0));
        assert_ne!(keys(&plain, 0), keys(&plain, 1));
        assert_ne!(keys(&plain, 0), keys(&Workload { seed: 2, ..plain }, 0));
        let mut pattern = BASE.pattern(0, 0);
        let digest = pattern.digest();
        assert_eq!(digest, BASE.pattern(0, 0).digest());
        for other in [
            Workload { seed: 2, ..BASE },
            Workload {
                read_ratio: 0.7,
                ..BASE
            },
            Workload {
                remote_ratio: 0.4,
                ..BASE
            },
        ] {
            assert_ne!(digest, other.pattern(0, 0).digest(), "{other:?}");
        }
        pattern.accesses.swap(1, 2);
        assert_ne!(digest, pattern.digest(), "the order counts");
    }

    #[test]
    fn private_keys_belong_to_one_client_and_one_rank() {
        let mut owners = HashMap::new();
        for (rank, client) in (0..4).flat_map(|rank| [(rank, 0), (rank, 1)]) {
            let pattern = BASE.pattern(rank, client);
            let private: Vec<_> = pattern
                .accesses
                .iter()
                .filter(|access| access.kind == AccessKind::Private)
                .collect();
            assert_eq!(private.len(), PATTERN_LEN / 16);
            assert!(
                private
                    .iter()
                    .any(|access| usize::from(access.rank) == rank)
            );
            assert!(
                private
                    .iter()
                    .any(|access| usize::from(access.rank) != rank)
            );
            for access in private {
                assert!(access.key >= BASE.key_range && access.key < BASE.store_keys());
                let owner = (rank, client, access.rank);
                assert_eq!(*owners.entry(access.key).or_insert(owner), owner);
            }
        }
    }

    #[test]
    fn read_slots_number_the_keys_read() {
        let pattern = BASE.pattern(1, 0);
        let mut keys = vec![None; pattern.read_keys];
        for access in pattern
            .accesses
            .iter()
            .filter(|access| access.kind == AccessKind::Read)
        {
            let key = keys[usize::from(access.slot)].get_or_insert((access.rank, access.key));
            assert_eq!(*key, (access.rank, access.key));
        }
        assert!(keys.iter().all(Option::is_some));
    }

    #[test]
    fn the_hottest_key_of_a_job_has_its_share_of_all_accesses_and_hot_keys_are_no_neighbours() {
        let skewed = Workload {
            distribution: Distribution::Zipfian { theta: 0.99 },
            remote_ratio: 0.75,
            verify: false,
            ..BASE
        };
        let hottest = |pattern: &Pattern| {
            let mut counts = HashMap::<_, u64>::new();
            pattern
                .accesses
                .iter()
                .for_each(|access| *counts.entry((access.rank, access.key)).or_default() += 1);
            let mut keys: Vec<_> = counts
                .into_iter()
                .map(|(key, count)| (count, key))
                .collect();
            keys.sort_unstable_by(|one, other| other.cmp(one));
            keys
        };
        let share_among = |keys: u64| {
            1.0 / (1..=keys)
                .map(|number| (number as f64).powf(-0.99))
                .sum::<f64>()
        };
        let all =
            [(0, 0), (2, 1), (3, 0)].map(|(rank, client)| hottest(&skewed.pattern(rank, client)));
        for keys in &all {
            let (count, key) = keys[0];
            assert_eq!(key, all[0][0].1, "the same for all clients");
            assert!(
                (count as f64 / PATTERN_LEN as f64 - share_among(4 * BASE.key_range)).abs() < 0.01,
                "{count}"
            );
            let near = |(_, (rank, key)): &&(u64, (u16, u64))| {
                keys[..8]
                    .iter()
                    .any(|(_, other)| other.0 == *rank && other.1.abs_diff(*key) == 1)
            };
            assert!(
                keys[..8].iter().filter(near).count() <= 2,
                "{:?}",
                &keys[..8]
            );
            assert!(
                (0..4).all(|rank| keys[..32].iter().any(|(_, key)| key.0 == rank)),
                "{:?}",
                &keys[..32]
            );
        }
        // With a given ratio, the ratio decides the rank.
        let given = Workload {
            remote_ratio: 0.2,
            ..skewed
        }
        .pattern(1, 0);
        assert!((share(&given, |access| access.rank != 1) - 0.2).abs() < 0.01);
        let (count, (rank, _)) = hottest(&given)[0];
        assert!(
            rank == 1
                && (count as f64 / PATTERN_LEN as f64 - 0.8 * share_among(BASE.key_range)).abs()
                    < 0.01,
            "{count}"
        );
    }

    #[test]
    fn a_shuffled_order_has_each_number_once() {
        for count in [1, 2, 3, 7, 8, 100, 1000, 1 << 12] {
            let mut places: Vec<u64> = (0..count).map(|item| shuffled(item, count)).collect();
            places.sort_unstable();
            assert!(places.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn distribution_text_round_trips_or_says_what_is_legal() {
        for text in ["uniform", "zipfian:0.99", "zipfian:1.5"] {
            assert_eq!(text.parse::<Distribution>().unwrap().to_string(), text);
        }
        assert_eq!("zipfian".parse(), Ok(Distribution::Zipfian { theta: 0.99 }));
        for text in [
            "",
            "zipf",
            "zipfian:",
            "zipfian:0",
            "zipfian:-1",
            "zipfian:nan",
            "zipfian:11",
            "uniform:1",
        ] {
            assert!(
                text.parse::<Distribution>()
                    .unwrap_err()
                    .to_string()
                    .contains("at most 10"),
                "{text:?}"
            );
        }
    }
}
