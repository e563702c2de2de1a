//! Verification: every value records its writer, its sequence number and its key, so that a read
//! can be judged.
//!
//! A value begins with `writer (16 bits) | sequence (32) | hash of rank and key (16)`; its other
//! bytes are a pattern of these 8 bytes. The checks:
//!
//! 1. a value carries the hash of the rank and key from which it was read: this finds requests on
//!    wrong paths, and corruption;
//! 2. its writer exists, and (after the run, over all ranks) had issued that sequence number;
//! 3. for one reader, key and writer, sequence numbers never decrease, and a key that was found
//!    once is found again. This holds because every path keeps the order of one client's requests
//!    for one key. A read is compared only with values recorded before it was issued, because
//!    replies may overtake each other;
//! 4. a client's private key reads back as the last acknowledged write;
//! 5. every byte after the first 8 is the byte of the pattern.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::message::Outcome;
use crate::workload::{Access, AccessKind, PRIVATE_KEYS, hash16};

/// Number of sequence numbers that a client remembers for check 3 of the module, per access of its
/// pattern: 8 MiB in a real-time job. The client needs one for each key that it reads and each
/// writer of the job. If it needs more, check 3 covers only the first keys.
const REMEMBERED: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    writer: u16,
    sequence: u32,
    hash: u16,
}

impl Stamp {
    const fn pack(self) -> u64 {
        (self.writer as u64) << 48 | (self.sequence as u64) << 16 | self.hash as u64
    }

    const fn unpack(value: u64) -> Self {
        Self {
            writer: (value >> 48) as u16,
            sequence: (value >> 16) as u32,
            hash: value as u16,
        }
    }
}

/// Returns the value of a key that no client has written: a value of writer 0 with sequence number
/// 0. The first write of a writer has number 1.
pub const fn first_value(rank: u16, key: u64) -> u64 {
    Stamp {
        writer: 0,
        sequence: 0,
        hash: hash16(rank, key),
    }
    .pack()
}

/// Returns the bytes of a value after the first 8, in words. Two words of one value differ, and so
/// do the words of two different values at the same place.
fn pattern(value: u64) -> impl Iterator<Item = [u8; 8]> {
    (1_u64..).map(move |number| {
        value
            .wrapping_add(number.wrapping_mul(0xd6e8_feb8_6659_fd93))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .to_le_bytes()
    })
}

/// Fills `tail` with the bytes of `value` after the first 8.
pub fn fill_tail(value: u64, tail: &mut [u8]) {
    for (place, word) in tail.chunks_mut(8).zip(pattern(value)) {
        place
            .iter_mut()
            .zip(word)
            .for_each(|(place, byte)| *place = byte);
    }
}

/// Returns the first wrong byte of a tail of `value`: its index, the byte found, and the byte
/// expected.
fn wrong_byte(value: u64, tail: &[u8]) -> Option<(usize, u8, u8)> {
    let wrong = tail
        .chunks(8)
        .zip(pattern(value))
        .enumerate()
        .find(|(_, (found, word))| **found != word[..found.len()]);
    let (number, (found, word)) = wrong?;
    let (at, (found, expected)) = found
        .iter()
        .zip(word)
        .enumerate()
        .find(|(_, (found, byte))| *found != byte)?;
    Some((8 * number + at, *found, expected))
}

/// The next step with a private key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrivateStep {
    /// Write this value.
    Put(u64),
    /// Read the value back.
    Get,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Private {
    /// No write has been acknowledged, so the content is unknown.
    Unknown,
    Writing(u64),
    /// This value was acknowledged, and has not been read back yet.
    Written(u64),
    Reading(u64),
}

/// The highest sequence number recorded for a reader, key and writer. `at` is the [`Verifier`]'s
/// `moment` when the number was recorded.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    sequence: u32,
    at: u32,
}

/// The judge of one client's results. It allocates only in [`new`](Self::new), and for the texts of
/// failures.
#[derive(Debug)]
pub struct Verifier {
    writer: u16,
    writers: usize,
    sequence: u32,
    /// Number of operations that this client has issued; wraps.
    moment: u32,
    /// The highest sequence numbers, indexed by key slot times `writers` plus writer.
    seen: Vec<Seen>,
    /// The moment at which a value of each key slot was first recorded.
    found_at: Vec<Option<u32>>,
    private: [Private; PRIVATE_KEYS],
    highest: Vec<u32>,
    failures: u64,
    first: Option<String>,
}

/// The findings of a [`Verifier`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Number of failed checks.
    pub failures: u64,
    /// The first failure, in words, with the rank and the key of that rank.
    pub first: Option<String>,
    /// Number of sequence numbers that this client issued: `1..=issued`.
    pub issued: u32,
    /// The highest sequence number that this client has read from each writer.
    pub highest: Vec<u32>,
}

impl Verifier {
    /// Makes the judge of client number `writer` of `writers` in the job, whose pattern of
    /// `accesses` reads `read_keys` different keys.
    pub fn new(writer: u16, writers: usize, accesses: usize, read_keys: usize) -> Self {
        let remembered = read_keys.min(REMEMBERED * accesses / writers.max(1));
        Self {
            writer,
            writers,
            sequence: 0,
            moment: 0,
            seen: vec![Seen::default(); remembered * writers],
            found_at: vec![None; read_keys],
            private: [Private::Unknown; PRIVATE_KEYS],
            highest: vec![0; writers],
            failures: 0,
            first: None,
        }
    }

    /// Makes every shared key count as found before, so that a get that finds no value is a
    /// failure.
    pub fn of_filled_stores(mut self) -> Self {
        self.found_at.fill(Some(self.moment));
        self
    }

    /// Returns the maximum bytes of the [`Verifier`] of a client in a job with `writers` clients
    /// and patterns of `accesses`.
    pub fn bytes(writers: usize, accesses: usize) -> u64 {
        let fewest = accesses * writers.min(REMEMBERED);
        (fewest * size_of::<Seen>()
            + accesses * size_of::<Option<u32>>()
            + writers * size_of::<u32>()) as u64
    }

    /// Returns a value that was never used before, for the key of an access.
    pub fn next_value(&mut self, access: &Access) -> u64 {
        self.sequence = self.sequence.wrapping_add(1);
        Stamp {
            writer: self.writer,
            sequence: self.sequence,
            hash: access.hash,
        }
        .pack()
    }

    /// Marks an operation as issued, and returns the moment of the issue. The operation's result is
    /// judged by values recorded before this moment.
    pub fn issue(&mut self) -> u32 {
        self.moment = self.moment.wrapping_add(1);
        self.moment
    }

    /// Judges the result of a read of a shared key that was issued at `moment`.
    pub fn judge_read(&mut self, access: &Access, moment: u32, found: Option<u64>) {
        let Some(value) = found else {
            return self.judge_absence(access, moment);
        };
        let Some(Stamp {
            writer, sequence, ..
        }) = self.judge_origin(access, value)
        else {
            return;
        };
        let slot = usize::from(access.slot);
        let now = self.moment;
        if let Some(found_at) = self.found_at.get_mut(slot) {
            found_at.get_or_insert(now);
        }
        let Some(seen) = self.seen.get_mut(slot * self.writers + usize::from(writer)) else {
            return;
        };
        if sequence > seen.sequence {
            *seen = Seen { sequence, at: now };
        } else if sequence < seen.sequence && is_before(seen.at, moment) {
            let newer = seen.sequence;
            self.fail(
                access,
                format_args!(
                    "write {sequence} of writer {writer} was read after its write {newer}"
                ),
            );
        }
    }

    /// Judges the bytes after the first 8 of a `value` that was read.
    pub fn judge_tail(&mut self, access: &Access, value: u64, tail: &[u8]) {
        if let Some((at, found, expected)) = wrong_byte(value, tail) {
            let at = 8 + at;
            self.fail(
                access,
                format_args!(
                    "byte {at} of value {value:#018x} is {found:#04x} and not {expected:#04x}"
                ),
            );
        }
    }

    /// Returns the next step with a private key; `None` while an operation on it is outstanding.
    pub fn begin_private(&mut self, access: &Access) -> Option<PrivateStep> {
        let slot = usize::from(access.slot);
        match self.private.get(slot)? {
            Private::Writing(_) | Private::Reading(_) => None,
            Private::Written(value) => {
                self.set_private(slot, Private::Reading(*value));
                Some(PrivateStep::Get)
            }
            Private::Unknown => {
                let value = self.next_value(access);
                self.set_private(slot, Private::Writing(value));
                Some(PrivateStep::Put(value))
            }
        }
    }

    /// Judges the end of an operation on a private key. `outcome` is `None` if there is no result.
    pub fn end_private(&mut self, access: &Access, outcome: Option<Outcome>) {
        let slot = usize::from(access.slot);
        let found = match outcome {
            Some(Outcome::GetOk { value }) => Some(value),
            _ => None,
        };
        let next = match (self.private.get(slot), outcome) {
            (Some(Private::Writing(value)), Some(Outcome::PutOk)) => Private::Written(*value),
            (
                Some(&Private::Reading(expected)),
                Some(Outcome::GetOk { .. } | Outcome::NotFound),
            ) => {
                if found != Some(expected) {
                    let found = found.map(|value| format!("{value:#018x}"));
                    let found = found.as_deref().unwrap_or("nothing");
                    let what = format_args!("{found} instead of the acknowledged {expected:#018x}");
                    self.fail(access, what);
                }
                Private::Unknown
            }
            _ => Private::Unknown,
        };
        self.set_private(slot, next);
    }

    /// Returns the findings of the whole run.
    pub fn verdict(self) -> Verdict {
        Verdict {
            failures: self.failures,
            first: self.first,
            issued: self.sequence,
            highest: self.highest,
        }
    }

    /// Does check 1 (hash of the key) and the first half of check 2 (the writer exists) of the
    /// module, and records the highest sequence number of the writer.
    fn judge_origin(&mut self, access: &Access, value: u64) -> Option<Stamp> {
        let stamp = Stamp::unpack(value);
        if stamp.hash != access.hash {
            self.fail(
                access,
                format_args!("value {value:#018x} was written for another key, or is corrupt"),
            );
            return None;
        }
        let Some(highest) = self.highest.get_mut(usize::from(stamp.writer)) else {
            let (writer, writers) = (stamp.writer, self.writers);
            self.fail(
                access,
                format_args!("value {value:#018x} names writer {writer}, but there are {writers}"),
            );
            return None;
        };
        *highest = stamp.sequence.max(*highest);
        Some(stamp)
    }

    fn judge_absence(&mut self, access: &Access, moment: u32) {
        if let Some(Some(found_at)) = self.found_at.get(usize::from(access.slot)) {
            if is_before(*found_at, moment) {
                self.fail(
                    access,
                    format_args!("not found, though it had been, or was written before the job"),
                );
            }
        }
    }

    fn set_private(&mut self, slot: usize, state: Private) {
        if let Some(private) = self.private.get_mut(slot) {
            *private = state;
        }
    }

    /// Records a failure, and the text of the first one.
    #[cold]
    fn fail(&mut self, access: &Access, what: fmt::Arguments<'_>) {
        self.failures += 1;
        let Access {
            rank, key, kind, ..
        } = access;
        let private = if *kind == AccessKind::Private {
            " private"
        } else {
            ""
        };
        self.first
            .get_or_insert_with(|| format!("rank {rank}{private} key {key}: {what}"));
    }
}

/// Returns whether moment `a` is before moment `b`, which is at most a queue depth before the
/// present. If `a` is more than 2^31 operations before `b`, it can appear to be later; then one
/// check is omitted.
const fn is_before(a: u32, b: u32) -> bool {
    (b.wrapping_sub(a) as i32) > 0
}

/// Does the second half of check 2 of the module, over all ranks. Each number in `highest` is the
/// highest sequence number that was read; the function returns a failure, in words, for each of
/// these numbers that was never issued. Both slices are indexed by writer.
pub fn never_issued(highest: &[u32], issued: &[u32]) -> impl Iterator<Item = String> {
    let pairs = highest.iter().zip(issued).enumerate();
    pairs
        .filter(|(_, (read, issued))| read > issued)
        .map(|(writer, (read, issued))| {
            format!("write {read} of writer {writer} was read, but it issued only {issued}")
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::AccessKind;

    const READ: Access = Access::new(AccessKind::Read, 1, 42, 3);
    const PRIVATE: Access = Access::new(AccessKind::Private, 1, 1000, 5);

    fn reader() -> Verifier {
        Verifier::new(0, 2, 1 << 16, 8)
    }

    fn value(writer: u16, sequence: u32) -> u64 {
        Stamp {
            writer,
            sequence,
            hash: hash16(READ.rank, READ.key),
        }
        .pack()
    }

    fn read(verifier: &mut Verifier, found: Option<u64>) {
        let moment = verifier.issue();
        verifier.judge_read(&READ, moment, found);
    }

    #[test]
    fn sound_reads_pass() {
        let mut verifier = reader();
        for found in [
            None,
            Some(value(0, 1)),
            Some(value(0, 1)),
            Some(value(1, 1)),
            Some(value(0, 2)),
            Some(value(1, 9)),
        ] {
            read(&mut verifier, found);
        }
        let verdict = verifier.verdict();
        assert_eq!((verdict.failures, verdict.first), (0, None));
        assert_eq!(verdict.highest, [2, 9]);
    }

    const VANISHED: &str =
        "rank 1 key 42: not found, though it had been, or was written before the job";

    #[test]
    fn any_flipped_bit_of_the_hash_is_caught() {
        for bit in 0..16 {
            let mut verifier = reader();
            read(&mut verifier, Some(value(1, 7) ^ 1 << bit));
            let found = value(1, 7) ^ 1 << bit;
            let expected = format!(
                "rank 1 key 42: value {found:#018x} was written for another key, or is corrupt"
            );
            assert_eq!(verifier.verdict().first, Some(expected), "bit {bit}");
        }
    }

    #[test]
    fn the_same_key_of_another_rank_is_another_key() {
        let mut verifier = reader();
        let moment = verifier.issue();
        let other = Access::new(READ.kind, 2, READ.key, READ.slot);
        verifier.judge_read(&other, moment, Some(value(0, 1)));
        assert_eq!(verifier.verdict().failures, 1);
    }

    #[test]
    fn a_writer_that_does_not_exist_is_caught() {
        let mut verifier = reader();
        read(&mut verifier, Some(value(2, 1)));
        let first = verifier.verdict().first.unwrap();
        assert!(
            first.ends_with(" names writer 2, but there are 2"),
            "{first}"
        );
    }

    #[test]
    fn an_older_write_after_a_newer_one_is_caught() {
        let mut verifier = reader();
        // Reads of values of the other writer between these reads must not hide the defect.
        for found in [value(1, 5), value(0, 8), value(1, 4)] {
            read(&mut verifier, Some(found));
        }
        assert_eq!(
            verifier.verdict().first.unwrap(),
            "rank 1 key 42: write 4 of writer 1 was read after its write 5"
        );
    }

    #[test]
    fn replies_that_overtake_each_other_are_no_failure() {
        let mut verifier = reader();
        let (first, second) = (verifier.issue(), verifier.issue());
        verifier.judge_read(&READ, second, Some(value(1, 5)));
        verifier.judge_read(&READ, first, Some(value(1, 4)));
        let third = verifier.issue();
        verifier.judge_read(&READ, third, Some(value(1, 5)));
        assert_eq!(verifier.verdict().failures, 0);
    }

    #[test]
    fn a_key_that_vanishes_is_caught() {
        let mut verifier = reader();
        read(&mut verifier, Some(value(1, 1)));
        read(&mut verifier, None);
        assert_eq!(verifier.verdict().first.unwrap(), VANISHED);
    }

    #[test]
    fn a_key_of_a_filled_store_has_its_first_value_or_a_later_one_and_never_none() {
        let first = first_value(READ.rank, READ.key);
        let mut verifier = reader().of_filled_stores();
        for found in [Some(first), Some(value(1, 1)), Some(value(0, 1))] {
            read(&mut verifier, found);
        }
        assert_eq!(verifier.failures, 0);
        read(&mut verifier, Some(first));
        assert_eq!(
            verifier.verdict().first.unwrap(),
            "rank 1 key 42: write 0 of writer 0 was read after its write 1"
        );
        let mut verifier = reader().of_filled_stores();
        read(&mut verifier, None);
        assert_eq!(verifier.verdict().first.unwrap(), VANISHED);
    }

    #[test]
    fn a_sequence_number_nobody_issued_is_caught_after_the_run() {
        assert_eq!(never_issued(&[3, 4], &[3, 4]).count(), 0);
        let found: Vec<_> = never_issued(&[3, 5], &[3, 4]).collect();
        assert_eq!(
            found,
            ["write 5 of writer 1 was read, but it issued only 4"]
        );
    }

    #[test]
    fn private_keys_alternate_and_must_read_back() {
        let mut verifier = reader();
        for round in 0..3 {
            let Some(PrivateStep::Put(value)) = verifier.begin_private(&PRIVATE) else {
                panic!("round {round}")
            };
            assert_eq!(
                verifier.begin_private(&PRIVATE),
                None,
                "one operation at a time"
            );
            verifier.end_private(&PRIVATE, Some(Outcome::PutOk));
            assert_eq!(verifier.begin_private(&PRIVATE), Some(PrivateStep::Get));
            verifier.end_private(&PRIVATE, Some(Outcome::GetOk { value }));
        }
        assert_eq!(verifier.verdict().failures, 0);
    }

    #[test]
    fn a_lost_acknowledged_write_is_caught() {
        for wrong in [Outcome::NotFound, Outcome::GetOk { value: 1 }] {
            let mut verifier = reader();
            verifier.begin_private(&PRIVATE);
            verifier.end_private(&PRIVATE, Some(Outcome::PutOk));
            verifier.begin_private(&PRIVATE);
            verifier.end_private(&PRIVATE, Some(wrong));
            let failure = verifier.verdict().first.unwrap();
            assert!(failure.starts_with("rank 1 private key "), "{failure}");
            let read = if wrong == Outcome::NotFound {
                "nothing"
            } else {
                "0x0000000000000001"
            };
            assert!(
                failure.contains(&format!(": {read} instead of the acknowledged 0x")),
                "{failure}"
            );
        }
    }

    #[test]
    fn a_write_that_ended_in_an_error_proves_nothing() {
        let mut verifier = reader();
        verifier.begin_private(&PRIVATE);
        verifier.end_private(&PRIVATE, None);
        assert!(matches!(
            verifier.begin_private(&PRIVATE),
            Some(PrivateStep::Put(_))
        ));
        assert_eq!(verifier.verdict().failures, 0);
    }

    #[test]
    fn every_byte_of_a_tail_is_judged() {
        let value = value(1, 7);
        for length in [0, 1, 7, 8, 9, 100] {
            let mut tail = vec![0; length];
            fill_tail(value, &mut tail);
            let judge = |tail: &[u8]| {
                let mut verifier = reader();
                verifier.judge_tail(&READ, value, tail);
                verifier.verdict().first
            };
            assert_eq!(judge(&tail), None);
            for at in 0..length {
                let mut other = tail.clone();
                other[at] ^= 0x10;
                let (found, expected) = (other[at], tail[at]);
                assert_eq!(
                    judge(&other),
                    Some(format!(
                        "rank 1 key 42: byte {} of value {value:#018x} is {found:#04x} and not {expected:#04x}",
                        8 + at
                    ))
                );
            }
        }
    }

    /// Words that are exchanged between two writes, or between two places, are detected.
    #[test]
    fn no_word_of_a_tail_is_like_another() {
        let values =
            (0..4).flat_map(|writer| (0..100).map(move |sequence| value(writer, sequence)));
        let words: Vec<[u8; 8]> = values.flat_map(|value| pattern(value).take(64)).collect();
        assert_eq!(
            words.iter().collect::<std::collections::HashSet<_>>().len(),
            words.len()
        );
    }

    #[test]
    fn old_moments_stay_old_across_the_wrap() {
        assert!(is_before(u32::MAX, 3) && !is_before(3, u32::MAX) && !is_before(7, 7));
    }
}
