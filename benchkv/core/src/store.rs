//! The key-value store of one rank, split into shards; each shard belongs to one daemon thread.

use crate::message::{Op, Outcome, Request, Response};
use crate::values::Tail;

/// Returns the daemon that owns `key` in a rank with `shards` daemons. A store's keys are below
/// 2^32, and a rank refuses requests for all other keys, so the function divides 32-bit numbers:
/// half the time of a 64-bit division.
#[inline]
pub const fn owner_of(key: u64, shards: usize) -> usize {
    (key as u32 % shards as u32) as usize
}

/// A shard of a store: the keys `k` with `k % shards == shard`, in a table indexed by `k / shards`.
/// It takes 16 bytes per key and the tail of its value, all allocated at the start.
#[derive(Debug)]
pub struct Shard {
    shard: usize,
    shards: usize,
    keys: u64,
    values: Vec<Option<u64>>,
    /// The tails of the values: the bytes of each value after the first 8, indexed by key.
    tails: Vec<u8>,
    tail_bytes: usize,
}

impl Shard {
    /// Bytes the table takes per key, without the tail.
    pub const BYTES_PER_KEY: usize = size_of::<Option<u64>>();

    /// Makes an empty shard of a store with the keys `0..keys` and with values of 8 bytes. `shards`
    /// must not be 0, and `shard` must be below `shards`.
    pub fn new(shard: usize, shards: usize, keys: u64) -> Self {
        Self::with_tails(shard, shards, keys, 0)
    }

    /// Makes a shard like [`new`](Self::new), for values of 8 + `tail_bytes` bytes.
    pub fn with_tails(shard: usize, shards: usize, keys: u64, tail_bytes: usize) -> Self {
        let mine = (keys as usize).saturating_sub(shard).div_ceil(shards);
        Self {
            shard,
            shards,
            keys,
            values: vec![None; mine],
            tails: vec![0; mine * tail_bytes],
            tail_bytes,
        }
    }

    /// Sets the value of every key of this shard below `keys` to the result of `value`, and fills
    /// in the tail of the value.
    pub fn fill(
        &mut self,
        keys: u64,
        value: impl Fn(u64) -> u64,
        fill_tail: impl Fn(u64, &mut [u8]),
    ) {
        for key in (self.shard as u64..keys.min(self.keys)).step_by(self.shards) {
            let value = value(key);
            if let Some(slot) = self
                .values
                .get_mut((key as u32 / self.shards as u32) as usize)
            {
                *slot = Some(value);
            }
            fill_tail(value, self.tail(key));
        }
    }

    /// Executes a request to a store whose values have no tails. Refuses a request for a key of
    /// another shard, and a malformed request.
    #[inline]
    pub fn apply(&mut self, request: &Request) -> Response {
        self.response(request)
    }

    /// Executes a request. If values have tails, reads the tail of a put's value from `tail`, or
    /// writes the tail of a found value to `tail`.
    #[inline]
    pub fn apply_with<'a>(
        &mut self,
        request: &Request,
        tail: impl FnOnce() -> Tail<'a>,
    ) -> Response {
        let response = self.response(request);
        if self.tail_bytes > 0 {
            self.move_tail(request.key(), response.outcome(), tail());
        }
        response
    }

    #[inline(never)]
    fn move_tail(&mut self, key: u64, outcome: Option<Outcome>, tail: Tail<'_>) {
        match outcome {
            Some(Outcome::PutOk) => tail.read(self.tail(key)),
            Some(Outcome::GetOk { .. }) => tail.write(self.tail(key)),
            _ => {}
        }
    }

    /// Returns whether `key` belongs to this shard, even if the store does not have the key.
    #[inline(always)]
    pub fn owns(&self, key: u64) -> bool {
        owner_of(key, self.shards) == self.shard
    }

    fn tail(&mut self, key: u64) -> &mut [u8] {
        let at = (key as u32 / self.shards as u32) as usize * self.tail_bytes;
        self.tails
            .get_mut(at..at + self.tail_bytes)
            .unwrap_or_default()
    }

    /// Executes a request without the tail. Each arm makes its response, so that no response is
    /// decoded to an outcome and encoded again.
    #[inline(always)]
    fn response(&mut self, request: &Request) -> Response {
        let key = request.key();
        let is_mine = key < self.keys && self.owns(key);
        let slot = if is_mine {
            self.values
                .get_mut((key as u32 / self.shards as u32) as usize)
        } else {
            None
        };
        let Some(slot) = slot else {
            return Response::new(Outcome::Refused);
        };
        match request.op() {
            Some(Op::Put { value, .. }) => {
                *slot = Some(value);
                Response::new(Outcome::PutOk)
            }
            Some(Op::Get { .. }) => match *slot {
                Some(value) => Response::new(Outcome::GetOk { value }),
                None => Response::new(Outcome::NotFound),
            },
            None => Response::new(Outcome::Refused),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_one_owner_that_remembers_it() {
        for (keys, shards) in [(10, 1), (10, 3), (2, 3), (1, 4)] {
            let mut store: Vec<Shard> = (0..shards)
                .map(|shard| Shard::new(shard, shards, keys))
                .collect();
            for key in 0..keys {
                for (shard, table) in store.iter_mut().enumerate() {
                    let expected = if shard == owner_of(key, shards) {
                        Outcome::PutOk
                    } else {
                        Outcome::Refused
                    };
                    assert_eq!(
                        table.apply(&Request::put(0, key, key + 100)).outcome(),
                        Some(expected)
                    );
                }
            }
            for key in 0..keys {
                let found = store[owner_of(key, shards)].apply(&Request::get(0, key));
                assert_eq!(found.outcome(), Some(Outcome::GetOk { value: key + 100 }));
            }
        }
    }

    #[test]
    fn every_key_keeps_the_tail_of_its_value() {
        let mut store: Vec<Shard> = (0..3)
            .map(|shard| Shard::with_tails(shard, 3, 10, 5))
            .collect();
        for key in 0..10 {
            let mut tail = [key as u8; 5];
            store[owner_of(key, 3)]
                .apply_with(&Request::put(0, key, key), || Tail::Bytes(&mut tail));
        }
        for key in 0..10 {
            let mut tail = [0xff; 5];
            let found = store[owner_of(key, 3)]
                .apply_with(&Request::get(0, key), || Tail::Bytes(&mut tail));
            assert_eq!(
                (found.outcome(), tail),
                (Some(Outcome::GetOk { value: key }), [key as u8; 5])
            );
        }
    }

    #[test]
    fn a_store_is_filled_up_to_a_key_and_no_further() {
        let mut store: Vec<Shard> = (0..3)
            .map(|shard| Shard::with_tails(shard, 3, 10, 1))
            .collect();
        store
            .iter_mut()
            .for_each(|shard| shard.fill(7, |key| 50 + key, |value, tail| tail.fill(value as u8)));
        for key in 0..10 {
            let mut tail = [0];
            let found = store[owner_of(key, 3)]
                .apply_with(&Request::get(0, key), || Tail::Bytes(&mut tail))
                .outcome();
            let expected = if key < 7 {
                (Outcome::GetOk { value: 50 + key }, [50 + key as u8])
            } else {
                (Outcome::NotFound, [0])
            };
            assert_eq!((found, tail), (Some(expected.0), expected.1), "{key}");
        }
    }

    #[test]
    fn a_key_never_written_is_not_found() {
        assert_eq!(
            Shard::new(0, 2, 10).apply(&Request::get(0, 4)).outcome(),
            Some(Outcome::NotFound)
        );
    }

    #[test]
    fn keys_outside_the_store_are_refused() {
        let mut shard = Shard::new(0, 1, 10);
        for key in [10, u64::MAX] {
            assert_eq!(
                shard.apply(&Request::put(0, key, 1)).outcome(),
                Some(Outcome::Refused)
            );
            assert_eq!(
                shard.apply(&Request::get(0, key)).outcome(),
                Some(Outcome::Refused)
            );
        }
    }
}
