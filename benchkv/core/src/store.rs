//! The key-value store of one rank, split into shards; each shard belongs to one daemon thread.

use crate::message::{Op, Outcome, Request, Response};

/// The daemon that owns `key` when a rank has `shards` of them. Keys of a store are below 2^32, and divide in half the time; any other key is
/// refused by whoever it is sent to.
#[must_use]
#[inline]
pub const fn owner_of(key: u64, shards: usize) -> usize {
    (key as u32 % shards as u32) as usize
}

/// The keys `k` with `k % shards == shard`, in a table indexed by `k / shards`: 16 bytes per key, all of it allocated at the start.
#[derive(Debug)]
pub struct Shard {
    shard: usize,
    shards: usize,
    keys: u64,
    values: Vec<Option<u64>>,
}

impl Shard {
    /// Bytes the table takes per key.
    pub const BYTES_PER_KEY: usize = size_of::<Option<u64>>();

    /// An empty shard of a store with keys `0..keys`; `shard` is below `shards`, which is not 0.
    #[must_use]
    pub fn new(shard: usize, shards: usize, keys: u64) -> Self {
        let mine = (keys as usize).saturating_sub(shard).div_ceil(shards);
        Self { shard, shards, keys, values: vec![None; mine] }
    }

    /// Executes a request. One for a key that is not of this shard, or that is no request at all, is refused.
    #[inline]
    pub fn apply(&mut self, request: &Request) -> Response {
        Response::new(self.outcome(request))
    }

    fn outcome(&mut self, request: &Request) -> Outcome {
        let Some(op) = request.op() else {
            return Outcome::Refused;
        };
        let (Op::Put { key, .. } | Op::Get { key }) = op;
        let is_mine = key < self.keys && owner_of(key, self.shards) == self.shard;
        let slot = if is_mine { self.values.get_mut((key as u32 / self.shards as u32) as usize) } else { None };
        match (op, slot) {
            (_, None) => Outcome::Refused,
            (Op::Put { value, .. }, Some(slot)) => {
                *slot = Some(value);
                Outcome::PutOk
            }
            (Op::Get { .. }, Some(slot)) => slot.map_or(Outcome::NotFound, |value| Outcome::GetOk { value }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_one_owner_that_remembers_it() {
        for (keys, shards) in [(10, 1), (10, 3), (2, 3), (1, 4)] {
            let mut store: Vec<Shard> = (0..shards).map(|shard| Shard::new(shard, shards, keys)).collect();
            for key in 0..keys {
                for (shard, table) in store.iter_mut().enumerate() {
                    let expected = if shard == owner_of(key, shards) { Outcome::PutOk } else { Outcome::Refused };
                    assert_eq!(table.apply(&Request::put(0, key, key + 100)).outcome(), Some(expected));
                }
            }
            for key in 0..keys {
                let found = store[owner_of(key, shards)].apply(&Request::get(0, key));
                assert_eq!(found.outcome(), Some(Outcome::GetOk { value: key + 100 }));
            }
        }
    }

    #[test]
    fn a_key_never_written_is_not_found() {
        assert_eq!(Shard::new(0, 2, 10).apply(&Request::get(0, 4)).outcome(), Some(Outcome::NotFound));
    }

    #[test]
    fn keys_outside_the_store_are_refused() {
        let mut shard = Shard::new(0, 1, 10);
        for key in [10, u64::MAX] {
            assert_eq!(shard.apply(&Request::put(0, key, 1)).outcome(), Some(Outcome::Refused));
            assert_eq!(shard.apply(&Request::get(0, key)).outcome(), Some(Outcome::Refused));
        }
    }
}
