//! The calls that wait for an answer. A tag finds its call once.

use std::time::Duration;

use crate::deadlines::Deadlines;
use crate::tag::Tag;

/// Maximum number of calls in a [`Calls`]: a tag has 24 bits for the slot.
pub const CALLS_MAX: usize = 1 << 24;

/// `Entry::next` at the end of the list of free entries.
const NONE: u32 = u32::MAX;
/// `Entry::next` of an abandoned entry, which has no value and still waits for its answer.
const ABANDONED: u32 = u32::MAX - 1;
/// The first generation: with debug assertions and in models one step before the last, so that
/// every test passes the last generation.
const FIRST_GENERATION: u32 = if cfg!(any(debug_assertions, loom)) {
    u32::MAX - 2
} else {
    1
};

#[derive(Debug)]
struct Entry<T> {
    /// The tag of the current use, or of the next use if the entry is free. Its generation is odd,
    /// and so never 0.
    tag: Tag,
    next: u32,
    value: Option<T>,
}

/// The calls of one caller: a fixed number of entries with generations. A late, repeated or forged
/// tag finds no call. Only `new` and the first deadline allocate.
#[derive(Debug)]
pub struct Calls<T> {
    entries: Box<[Entry<T>]>,
    /// The first free entry: the one freed last, whose memory is in the cache.
    free: u32,
    used: u32,
    abandoned: u32,
    deadlines: Deadlines<Tag>,
}

impl<T> Calls<T> {
    /// Makes a table for `capacity` calls, at most [`CALLS_MAX`].
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.min(CALLS_MAX) as u32;
        let next = |slot: u32| if slot + 1 == capacity { NONE } else { slot + 1 };
        Self {
            entries: (0..capacity)
                .map(|slot| Entry {
                    tag: Tag::new(slot, FIRST_GENERATION),
                    next: next(slot),
                    value: None,
                })
                .collect(),
            free: if capacity == 0 { NONE } else { 0 },
            used: 0,
            abandoned: 0,
            deadlines: Deadlines::new(),
        }
    }

    /// Returns the same calls, each with the value that `f` returns for its value.
    #[must_use]
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Calls<U> {
        let Self {
            entries,
            free,
            used,
            abandoned,
            deadlines,
        } = self;
        let entries = entries.into_iter().map(|Entry { tag, next, value }| Entry {
            tag,
            next,
            value: value.map(&mut f),
        });
        Calls {
            entries: entries.collect(),
            free,
            used,
            abandoned,
            deadlines,
        }
    }

    /// Returns the number of entries in use.
    #[must_use]
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.used as usize
    }

    /// Returns the number of calls that wait and were not abandoned.
    #[must_use]
    #[inline(always)]
    pub fn waiting(&self) -> usize {
        (self.used - self.abandoned) as usize
    }

    /// Returns whether no entry is in use.
    #[must_use]
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Returns the number of entries.
    #[must_use]
    #[inline(always)]
    pub fn capacity(&self) -> usize {
        self.entries.len()
    }

    /// Keeps `value` until its tag is taken.
    ///
    /// # Errors
    /// Returns `value` if all entries are in use.
    #[inline(always)]
    pub fn insert(&mut self, value: T) -> Result<Tag, T> {
        let slot = self.free;
        let Some(entry) = self.entries.get_mut(slot as usize) else {
            return Err(value);
        };
        self.free = entry.next;
        entry.value = Some(value);
        self.used += 1;
        Ok(entry.tag)
    }

    /// Takes the value of the call `tag`. Returns `None` if there is no such call any more, or
    /// never was.
    #[inline(always)]
    pub fn take(&mut self, tag: Tag) -> Option<T> {
        let entry = self
            .entries
            .get_mut(tag.slot())
            .filter(|entry| entry.tag == tag)?;
        let value = entry.value.take();
        if value.is_none() {
            return self.reclaim(tag);
        }
        entry.next = self.free;
        self.free = tag.slot() as u32;
        self.used -= 1;
        entry.tag = tag.of_next_use();
        value
    }

    /// Frees an entry without a value if it was abandoned.
    #[cold]
    fn reclaim(&mut self, tag: Tag) -> Option<T> {
        let entry = self
            .entries
            .get_mut(tag.slot())
            .filter(|entry| entry.next == ABANDONED)?;
        entry.tag = tag.of_next_use();
        entry.next = self.free;
        self.free = tag.slot() as u32;
        self.used -= 1;
        self.abandoned -= 1;
        None
    }

    /// Sets the deadline of the call `tag` to `timeout` after `now_ns`. The first
    /// [`expire`](Self::expire) after the deadline [abandons](Self::abandon) the call.
    pub fn end_within(&mut self, tag: Tag, now_ns: u64, timeout: Duration) {
        let Self {
            entries, deadlines, ..
        } = self;
        let timeout_ns = u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX);
        // The first call of this function allocates the room for the deadlines of all entries.
        deadlines.reserve(2 * entries.len());
        deadlines.push(now_ns.saturating_add(timeout_ns), tag, |tag| {
            holds(entries, *tag)
        });
    }

    /// Takes the value of the call `tag`. The entry stays in use until the answer arrives: the
    /// memory of the call belongs to the peer until then.
    pub fn abandon(&mut self, tag: Tag) -> Option<T> {
        let entry = self
            .entries
            .get_mut(tag.slot())
            .filter(|entry| entry.tag == tag)?;
        let value = entry.value.take()?;
        entry.next = ABANDONED;
        self.abandoned += 1;
        Some(value)
    }

    /// Returns whether there may be calls to [`expire`](Self::expire).
    #[must_use]
    #[inline(always)]
    pub fn has_deadlines(&self) -> bool {
        !self.deadlines.is_empty()
    }

    /// Returns whether a waiting call has a deadline. Otherwise the clock need not be read.
    pub fn is_timed(&mut self) -> bool {
        self.deadlines
            .next(|tag| holds(&self.entries, *tag))
            .is_some()
    }

    /// [Abandons](Self::abandon) the calls whose deadline has passed at `now_ns`, and passes their
    /// tags and values to `f`. Returns their number.
    pub fn expire(&mut self, now_ns: u64, mut f: impl FnMut(Tag, T)) -> usize {
        let mut ended = 0;
        while let Some(tag) = self.deadlines.pop_before(now_ns.saturating_add(1)) {
            if let Some(value) = self.abandon(tag) {
                ended += 1;
                f(tag, value);
            }
        }
        ended
    }

    /// Returns the time until the earliest deadline, whose call may have ended; zero if it has
    /// passed. Calls `now_ns` only if there is a deadline.
    #[must_use]
    pub fn until_deadline(&self, now_ns: impl FnOnce() -> u64) -> Option<Duration> {
        self.deadlines
            .first_ns()
            .map(|at_ns| Duration::from_nanos(at_ns.saturating_sub(now_ns())))
    }

    /// Takes the values of all waiting calls, and passes them to `f`.
    pub fn take_all(&mut self, mut f: impl FnMut(T)) {
        for slot in 0..self.entries.len() as u32 {
            let Some(entry) = self.entries.get(slot as usize) else {
                return;
            };
            if entry.value.is_some() {
                let tag = entry.tag;
                self.take(tag).into_iter().for_each(&mut f);
            }
        }
    }
}

fn holds<T>(entries: &[Entry<T>], tag: Tag) -> bool {
    entries
        .get(tag.slot())
        .is_some_and(|entry| entry.value.is_some() && entry.tag == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_is_good_once_and_never_for_the_next_use_of_its_slot() {
        let mut calls = Calls::new(2);
        let a = calls.insert('a').unwrap();
        let b = calls.insert('b').unwrap();
        assert_eq!(
            (calls.insert('c'), calls.len()),
            (Err('c'), calls.capacity())
        );
        assert_eq!(calls.take(a), Some('a'));
        assert_eq!(calls.take(a), None);
        let d = calls.insert('d').unwrap();
        assert_eq!(d.slot(), a.slot());
        assert_eq!(
            calls.take(a),
            None,
            "an old tag reached the slot's next use"
        );
        assert_eq!(calls.take(Tag::unpack(d.pack(0) + 1).0), None);
        assert_eq!((calls.take(b), calls.take(d)), (Some('b'), Some('d')));
        assert!(calls.is_empty());
    }

    #[test]
    fn an_abandoned_entry_is_in_use_until_its_answer_is_here_and_gives_nothing_then() {
        let mut calls = Calls::new(2);
        let [a, b] = ['a', 'b'].map(|value| calls.insert(value).unwrap());
        assert!(holds(&calls.entries, a));
        assert_eq!((calls.abandon(a), calls.abandon(a)), (Some('a'), None));
        assert!(!holds(&calls.entries, a));
        assert_eq!(
            (calls.insert('c'), calls.len(), calls.waiting()),
            (Err('c'), 2, 1)
        );
        assert_eq!(calls.take(a), None, "the answer of nobody");
        assert_eq!((calls.len(), calls.waiting()), (1, 1));
        let c = calls.insert('c').unwrap();
        assert_eq!(c.slot(), a.slot());
        assert_eq!(
            (
                calls.take(a),
                calls.abandon(a),
                calls.take(c),
                calls.take(b)
            ),
            (None, None, Some('c'), Some('b'))
        );
        let mut taken = vec![];
        let d = calls.insert('d').unwrap();
        calls.abandon(d);
        calls.take_all(|value| taken.push(value));
        assert_eq!(taken, []);
    }

    #[test]
    fn note_travels_with_the_tag_and_is_no_part_of_it() {
        let mut calls = Calls::new(2);
        calls.insert(0).unwrap();
        let tag = calls.insert(1).unwrap();
        assert_eq!(Tag::unpack(tag.pack(0xa5)), (tag, 0xa5));
        assert_eq!(tag.slot(), 1);
    }

    #[test]
    fn made_up_tags_find_nothing() {
        let mut calls = Calls::new(3);
        let made = calls.insert(()).unwrap();
        for bits in [0, 1, 3, 1 << 32 | 3, u64::MAX, 2 << 32, made.pack(0) + 1] {
            assert_eq!(calls.take(Tag::unpack(bits).0), None, "{bits:#x}");
        }
        assert_eq!(calls.len(), 1);
    }

    #[test]
    fn generation_wraps_past_zero() {
        let mut calls = Calls::new(1);
        calls.entries[0].tag = Tag::new(0, u32::MAX);
        let last = calls.insert(1).unwrap();
        assert_eq!(calls.take(last), Some(1));
        assert_eq!(calls.insert(2).unwrap().pack(0), 1 << 32);
    }

    #[test]
    fn take_all_takes_all_that_waits() {
        let mut calls = Calls::new(4);
        let tags = [0, 1, 2, 3].map(|n| calls.insert(n).unwrap());
        assert_eq!(
            (calls.take(tags[1]), calls.abandon(tags[2])),
            (Some(1), Some(2))
        );
        let mut taken = vec![];
        calls.take_all(|n| taken.push(n));
        assert_eq!((taken, calls.len(), calls.waiting()), (vec![0, 3], 1, 0));
    }

    #[test]
    fn a_call_that_has_expired_is_not_ended_again_and_one_that_has_ended_does_not_expire() {
        let mut calls = Calls::new(3);
        let [a, b, c] = ['a', 'b', 'c'].map(|value| calls.insert(value).unwrap());
        for (tag, timeout) in [
            (a, Duration::from_nanos(5)),
            (b, Duration::from_nanos(7)),
            (c, Duration::MAX),
        ] {
            calls.end_within(tag, 100, timeout);
        }
        assert_eq!(calls.until_deadline(|| 101), Some(Duration::from_nanos(4)));
        calls.take(b);
        let mut ended = vec![];
        assert_eq!(
            (
                calls.expire(104, |_, value| ended.push(value)),
                calls.expire(110, |_, value| ended.push(value))
            ),
            (0, 1)
        );
        assert_eq!(
            (ended, calls.take(a), calls.is_timed()),
            (vec!['a'], None, true)
        );
        calls.take(c);
        assert!(!calls.is_timed() && !calls.has_deadlines());
    }

    /// Random operations against an oracle: every value that is inserted is taken once, by its own
    /// tag, or expires at its deadline.
    #[test]
    fn every_call_ends_once_whatever_the_order() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |below: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % below
        };
        let (mut calls, mut now) = (Calls::new(5), 0u64);
        // Tag, value, deadline; and the tags that were given up.
        let mut waiting: Vec<(Tag, u64, u64)> = vec![];
        let (mut given_up, mut old) = (vec![], vec![]);
        for value in 0..100_000u64 {
            now += random(3);
            match random(6) {
                0 | 1 => match calls.insert(value) {
                    Ok(tag) => {
                        assert!(!old.contains(&tag));
                        let timeout = if random(2) == 0 { random(20) } else { u64::MAX };
                        if timeout != u64::MAX {
                            calls.end_within(tag, now, Duration::from_nanos(timeout));
                        }
                        waiting.push((tag, value, now.saturating_add(timeout)));
                    }
                    Err(back) => assert_eq!((back, waiting.len() + given_up.len()), (value, 5)),
                },
                2 if !waiting.is_empty() => {
                    let (tag, value, _) =
                        waiting.swap_remove(random(waiting.len() as u64) as usize);
                    assert_eq!(calls.take(tag), Some(value));
                    old.push(tag);
                }
                3 if !waiting.is_empty() => {
                    let (tag, value, _) =
                        waiting.swap_remove(random(waiting.len() as u64) as usize);
                    assert_eq!(calls.abandon(tag), Some(value));
                    given_up.push(tag);
                }
                4 if !given_up.is_empty() => {
                    let tag = given_up.swap_remove(random(given_up.len() as u64) as usize);
                    assert_eq!(calls.take(tag), None);
                    old.push(tag);
                }
                _ => {
                    let mut ended = vec![];
                    calls.expire(now, |_, value| ended.push(value));
                    let (late, in_time): (Vec<_>, Vec<_>) =
                        waiting.drain(..).partition(|(_, _, at)| *at <= now);
                    waiting = in_time;
                    ended.sort_unstable();
                    let mut expected: Vec<u64> = late.iter().map(|(_, value, _)| *value).collect();
                    expected.sort_unstable();
                    assert_eq!(ended, expected);
                    given_up.extend(late.iter().map(|(tag, ..)| *tag));
                }
            }
            old.drain(..old.len().saturating_sub(20));
            for tag in &old {
                assert_eq!(calls.take(*tag), None);
            }
            assert_eq!(
                (calls.waiting(), calls.len()),
                (waiting.len(), waiting.len() + given_up.len())
            );
        }
    }
}
