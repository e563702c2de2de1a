//! The accesses of a client, generated before the run: the measured loop draws no random number and allocates nothing.

use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::Args;
use fastrand::Rng;
use harness::range::{RangeError, amount, decimal, range, whole, within};
use harness::units;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::store::Shard;
use crate::values::{HEAD_BYTES, VALUE_BYTES};
use crate::zipf::Zipf;

/// Accesses of one pattern in a real-time job, 1 MiB of them. After the last access a client starts again at the first. They are read in
/// order, so the prefetcher hides the reads.
pub const PATTERN_LEN: usize = 1 << 16;

/// Keys that only one client ever touches, per client.
pub const PRIVATE_KEYS: usize = 16;

/// One access in this many goes to a private key when results are verified.
const PRIVATE_EVERY: usize = 16;

/// The distribution of keys.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum Distribution {
    /// All keys with equal probability.
    Uniform,
    /// Key `k` with probability proportional to `(k + 1)^-theta`.
    Zipfian {
        /// Skew: 0.99 is the customary value.
        theta: f64,
    },
}

/// The text is not a distribution.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{given:?} is not a distribution; use uniform, zipfian, or zipfian:THETA with THETA above 0 and at most 10")]
pub struct DistributionSyntaxError {
    given: String,
}

impl FromStr for Distribution {
    type Err = DistributionSyntaxError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let theta = match text.split_once(':') {
            None if text == "uniform" => return Ok(Self::Uniform),
            None if text == "zipfian" => Some(0.99),
            Some(("zipfian", theta)) => theta.parse().ok().filter(|theta| *theta > 0.0 && *theta <= 10.0),
            _ => None,
        };
        theta.map(|theta| Self::Zipfian { theta }).ok_or_else(|| DistributionSyntaxError { given: text.to_owned() })
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

/// Keys of a rank's store: at most 1 GiB of [`Shard`] tables.
const KEYS: RangeInclusive<u64> = 1..=1 << 26;

/// A share of operations.
pub const SHARE: RangeInclusive<f64> = 0.0..=1.0;

/// The parameters that all clients of a job share, as typed and as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Args, Serialize, Deserialize)]
#[group(skip)]
pub struct Workload {
    // These follow from the job's topology.
    #[arg(skip)]
    #[serde(skip)]
    #[allow(missing_docs, reason = "clap would show it as help of all options")]
    pub ranks: usize,
    #[arg(skip)]
    #[serde(skip)]
    #[allow(missing_docs, reason = "likewise")]
    pub clients: usize,

    /// Shared keys in the store of each rank, 1 to 67108864.
    #[arg(long, value_name = "N", value_parser = whole(KEYS), default_value_t = 100_000)]
    pub key_range: u64,

    /// Bytes of a value, 8 to 64K. The rings between ranks are sized for it.
    #[arg(long = "value-size", value_name = "BYTES", value_parser = |text: &str| units::bytes(text).map(|bytes| bytes as usize), default_value = "8")]
    #[serde(rename = "value_size", default = "eight")]
    pub value_bytes: usize,

    /// Give every shared key a value before clients start. Otherwise gets find no value before the first put, which is cheaper.
    #[arg(long)]
    #[serde(default)]
    pub preload: bool,

    /// Share of operations that read, 0 to 1.
    #[arg(long, value_name = "RATIO", value_parser = decimal(SHARE), default_value_t = 0.5)]
    pub read_ratio: f64,

    // Share of accesses that go to another rank; 0 if there is none. By default all ranks are alike.
    #[arg(skip)]
    #[allow(missing_docs, reason = "likewise")]
    pub remote_ratio: f64,

    /// Distribution of keys: uniform, zipfian, zipfian:THETA.
    #[arg(long, value_name = "NAME", default_value_t = Distribution::Uniform)]
    pub distribution: Distribution,

    // Whether part of the accesses goes to private keys and is read back.
    #[arg(skip)]
    #[allow(missing_docs, reason = "likewise")]
    pub verify: bool,

    /// Seed of the access patterns, 0 to 18446744073709551615.
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = whole(0..=u64::MAX), default_value_t = 1)]
    #[serde(skip)]
    pub seed: u64,

    // Accesses of a client's pattern, at least [`PRIVATE_KEYS`] times 16.
    #[arg(skip = PATTERN_LEN)]
    #[serde(skip)]
    #[allow(missing_docs, reason = "likewise")]
    pub accesses: usize,
}

/// Returns the value size of results that do not record it.
const fn eight() -> usize {
    HEAD_BYTES
}

/// The kind of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    /// Gets a shared key.
    Read,
    /// Puts a shared key.
    Write,
    /// Puts or gets, in turn, a key that only this client uses.
    Private,
}

/// One access; 16 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    /// The key.
    pub key: u64,
    /// [`AccessKind::Read`]: number of the key among those that this pattern reads, if results are verified. [`AccessKind::Private`]:
    /// number of the private key. Otherwise 0.
    pub slot: u32,
    /// The rank whose store is accessed.
    pub rank: u16,
    /// The kind of the access.
    pub kind: AccessKind,
}

const _: () = assert!(size_of::<Access>() == 16);

/// The accesses of one client.
#[derive(Debug)]
pub struct Pattern {
    /// As many accesses as in [`Workload::accesses`].
    pub accesses: Vec<Access>,
    /// Number of different keys read, if results are verified; every [`AccessKind::Read`] slot is below it then.
    pub read_keys: usize,
}

impl Pattern {
    /// Returns a digest of the accesses in their order (FNV-1a): the same on every machine and in every version.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let words = self.accesses.iter().flat_map(|access| [access.key, u64::from(access.rank), access.kind as u64]);
        words.fold(0xcbf2_9ce4_8422_2325, |digest, word| (digest ^ word).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

impl Workload {
    /// Checks whether a job can have this workload.
    ///
    /// # Errors
    /// The first option that cannot be honoured.
    pub fn check(&self) -> Result<(), RangeError> {
        let why_short = "too small for its writer, sequence and hash";
        amount("--key-range", self.key_range, KEYS, "a store needs a key", "")?;
        amount("--value-size", self.value_bytes, VALUE_BYTES, why_short, " bytes")?;
        let why = "a share lies between none and all";
        within("--read-ratio", self.read_ratio, SHARE, why, "")?;
        within("--remote-ratio", self.remote_ratio, SHARE, why, "")?;
        if self.remote_ratio > 0.0 && self.ranks == 1 {
            let (why, legal) = ("one rank has no other to talk to", "0, or --ranks of 2 and more".to_owned());
            return Err(range("--remote-ratio", self.remote_ratio, why, legal));
        }
        Ok(())
    }

    /// Returns the number of keys of each rank's store, private ones included.
    #[must_use]
    pub const fn store_keys(&self) -> u64 {
        let private = if self.verify { self.ranks * self.clients * PRIVATE_KEYS } else { 0 };
        self.key_range + private as u64
    }

    /// Returns the bytes of a rank's store.
    #[must_use]
    pub const fn store_bytes(&self) -> u64 {
        self.store_keys() * (Shard::BYTES_PER_KEY + self.value_bytes - HEAD_BYTES) as u64
    }

    /// Generates the accesses of client `client` of rank `rank`.
    #[must_use]
    pub fn pattern(&self, rank: usize, client: usize) -> Pattern {
        let number = (rank * self.clients + client) as u64;
        // The number is multiplied by an odd constant, so that clients of neighbouring jobs (seed + 1) do not share their streams.
        let mut rng = Rng::with_seed(self.seed.wrapping_add((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let zipf = match self.distribution {
            Distribution::Uniform => None,
            Distribution::Zipfian { theta } => Some(Zipf::new(self.key_range, theta)),
        };
        let mut slots = HashMap::new();
        let accesses = (0..self.accesses)
            .map(|at| {
                if self.verify && at % PRIVATE_EVERY == 0 {
                    return self.private_access(rank, number, (at / PRIVATE_EVERY) % PRIVATE_KEYS);
                }
                let key = match &zipf {
                    Some(zipf) => zipf.sample(&mut rng),
                    None => rng.u64(0..self.key_range),
                };
                let target = if rng.f64() < self.remote_ratio { self.another_rank(rank, rng.usize(..)) } else { rank as u16 };
                if rng.f64() >= self.read_ratio {
                    return Access { key, slot: 0, rank: target, kind: AccessKind::Write };
                }
                let next = slots.len() as u32;
                // Only the verification needs the slot.
                let slot = if self.verify { *slots.entry((target, key)).or_insert(next) } else { 0 };
                Access { key, slot, rank: target, kind: AccessKind::Read }
            })
            .collect();
        Pattern { accesses, read_keys: slots.len() }
    }

    /// Returns a private access. A private key always has the same rank; the remote ones are spread evenly over the client's keys in the
    /// job's ratio.
    fn private_access(&self, rank: usize, client_number: u64, slot: usize) -> Access {
        let remote_before = |slots: usize| (slots as f64 * self.remote_ratio).ceil() as usize;
        let is_remote = remote_before(slot + 1) > remote_before(slot);
        let target = if is_remote { self.another_rank(rank, slot) } else { rank as u16 };
        let key = self.key_range + client_number * PRIVATE_KEYS as u64 + slot as u64;
        Access { key, slot: slot as u32, rank: target, kind: AccessKind::Private }
    }

    fn another_rank(&self, rank: usize, choice: usize) -> u16 {
        ((rank + 1 + choice % (self.ranks - 1).max(1)) % self.ranks) as u16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Workload = Workload {
        value_bytes: 8,
        preload: false,
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
        let plain = Workload { verify: false, ..BASE };
        for (rank, client) in [(0, 0), (3, 1)] {
            let pattern = plain.pattern(rank, client);
            assert!((share(&pattern, |access| access.kind == AccessKind::Read) - 0.8).abs() < 0.01);
            assert!((share(&pattern, |access| usize::from(access.rank) != rank) - 0.5).abs() < 0.01);
            for other in (0..4).filter(|other| *other != rank) {
                assert!((share(&pattern, |access| usize::from(access.rank) == other) - 0.5 / 3.0).abs() < 0.01);
            }
        }
        let extreme = Workload { read_ratio: 1.0, remote_ratio: 1.0, ..plain }.pattern(0, 0);
        assert!(extreme.accesses.iter().all(|access| access.kind == AccessKind::Read && access.rank != 0));
        let opposite = Workload { read_ratio: 0.0, remote_ratio: 0.0, ..plain }.pattern(2, 0);
        assert!(opposite.accesses.iter().all(|access| access.kind == AccessKind::Write && access.rank == 2));
    }

    #[test]
    fn one_rank_has_no_remote_access() {
        let pattern = Workload { ranks: 1, remote_ratio: 0.0, ..BASE }.pattern(0, 1);
        assert!(pattern.accesses.iter().all(|access| access.rank == 0));
    }

    #[test]
    fn the_seed_decides_and_clients_differ() {
        let keys = |workload: &Workload, client| workload.pattern(0, client).accesses.iter().map(|access| access.key).collect::<Vec<_>>();
        let plain = Workload { verify: false, ..BASE };
        assert_eq!(keys(&plain, 0), keys(&plain, 0));
        assert_ne!(keys(&plain, 0), keys(&plain, 1));
        assert_ne!(keys(&plain, 0), keys(&Workload { seed: 2, ..plain }, 0));
        let mut pattern = BASE.pattern(0, 0);
        let digest = pattern.digest();
        assert_eq!(digest, BASE.pattern(0, 0).digest());
        for other in [Workload { seed: 2, ..BASE }, Workload { read_ratio: 0.7, ..BASE }, Workload { remote_ratio: 0.4, ..BASE }] {
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
            let private: Vec<_> = pattern.accesses.iter().filter(|access| access.kind == AccessKind::Private).collect();
            assert_eq!(private.len(), PATTERN_LEN / PRIVATE_EVERY);
            assert!(private.iter().any(|access| usize::from(access.rank) == rank));
            assert!(private.iter().any(|access| usize::from(access.rank) != rank));
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
        for access in pattern.accesses.iter().filter(|access| access.kind == AccessKind::Read) {
            let key = keys[access.slot as usize].get_or_insert((access.rank, access.key));
            assert_eq!(*key, (access.rank, access.key));
        }
        assert!(keys.iter().all(Option::is_some));
    }

    #[test]
    fn zipf_prefers_the_first_keys() {
        let skewed = Workload { distribution: Distribution::Zipfian { theta: 0.99 }, verify: false, ..BASE }.pattern(0, 0);
        assert!(share(&skewed, |access| access.key == 0) > 0.1);
        assert!(skewed.accesses.iter().all(|access| access.key < BASE.key_range));
    }

    #[test]
    fn distribution_text_round_trips_or_says_what_is_legal() {
        for text in ["uniform", "zipfian:0.99", "zipfian:1.5"] {
            assert_eq!(text.parse::<Distribution>().unwrap().to_string(), text);
        }
        assert_eq!("zipfian".parse(), Ok(Distribution::Zipfian { theta: 0.99 }));
        for text in ["", "zipf", "zipfian:", "zipfian:0", "zipfian:-1", "zipfian:nan", "zipfian:11", "uniform:1"] {
            assert!(text.parse::<Distribution>().unwrap_err().to_string().contains("at most 10"), "{text:?}");
        }
    }
}
