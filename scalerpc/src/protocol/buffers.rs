//! The buffers of responses: the free buffers, and by client the buffers of WRITEs under way.
//!
//! Operations to a client are executed in order, so its buffers become free in the order of its
//! responses. Each client has a chain of buffers; any number of the oldest is freed at once.

use std::num::NonZeroU16;

/// The number of a buffer; the first buffer has number 1.
pub(crate) type Buffer = NonZeroU16;

#[inline]
const fn place(buffer: Buffer) -> usize {
    buffer.get() as usize - 1
}

/// The buffers of the responses under way to one client, in the order of the responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Chain {
    oldest: Option<Buffer>,
    /// Meaningless if `oldest` is `None`.
    newest: Buffer,
}

impl Chain {
    pub(crate) const EMPTY: Self = Self {
        oldest: None,
        newest: Buffer::MIN,
    };
}

/// The buffers of a server. Each is free, in one chain, or lent to a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Buffers {
    /// For each buffer, the next buffer in its list: the list of free buffers, or a chain.
    next: Vec<Option<Buffer>>,
    /// First free buffer. The buffer freed last is allocated first: its bytes are in the cache.
    free: Option<Buffer>,
}

impl Buffers {
    pub(crate) fn new(count: u16) -> Self {
        let next: Vec<_> = (1..=count)
            .map(|number| {
                if number < count {
                    Buffer::new(number + 1)
                } else {
                    None
                }
            })
            .collect();
        Self {
            next,
            free: Buffer::new(count.min(1)),
        }
    }

    #[inline]
    pub(crate) fn allocate(&mut self) -> Option<Buffer> {
        let buffer = self.free?;
        self.free = self.next[place(buffer)];
        Some(buffer)
    }

    /// Frees an allocated buffer that is in no chain.
    pub(crate) fn release(&mut self, buffer: Buffer) {
        self.next[place(buffer)] = self.free.replace(buffer);
    }

    #[inline]
    pub(crate) fn append(&mut self, chain: &mut Chain, buffer: Buffer) {
        match chain.oldest {
            Some(_) => self.next[place(chain.newest)] = Some(buffer),
            None => chain.oldest = Some(buffer),
        }
        chain.newest = buffer;
    }

    /// Frees the `count` oldest buffers of a chain, or all if it has fewer.
    pub(crate) fn release_oldest(&mut self, chain: &mut Chain, count: u16) {
        let (Some(oldest), 1..) = (chain.oldest, count) else {
            return;
        };
        let mut last = oldest;
        for _ in 1..count {
            match self.next[place(last)] {
                Some(next) if last != chain.newest => last = next,
                _ => break,
            }
        }
        let rest = std::mem::replace(&mut self.next[place(last)], self.free.replace(oldest));
        chain.oldest = rest.filter(|_| last != chain.newest);
    }

    pub(crate) fn free(&self) -> usize {
        std::iter::successors(self.free, |buffer| self.next[place(*buffer)]).count()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// Compares the chains with an oracle: one queue of buffers for each client.
    #[test]
    fn a_buffer_is_given_to_one_and_freed_once_in_the_order_of_the_responses() {
        let mut rng = fastrand::Rng::with_seed(1);
        for count in [0, 1, 2, 7, 60] {
            let mut buffers = Buffers::new(count);
            let mut chains = [Chain::EMPTY; 3];
            let mut under_way: [VecDeque<Buffer>; 3] = Default::default();
            let mut lent = Vec::new();
            for _ in 0..10_000 {
                let nth = rng.usize(..3);
                match rng.u8(..5) {
                    0 | 1 => match buffers.allocate() {
                        Some(buffer) => {
                            assert!(buffer.get() <= count && !lent.contains(&buffer));
                            assert!(under_way.iter().all(|buffers| !buffers.contains(&buffer)));
                            lent.push(buffer);
                        }
                        None => assert_eq!(buffers.free(), 0),
                    },
                    2 if !lent.is_empty() => {
                        let buffer = lent.swap_remove(rng.usize(..lent.len()));
                        buffers.append(&mut chains[nth], buffer);
                        under_way[nth].push_back(buffer);
                    }
                    3 if !lent.is_empty() => {
                        buffers.release(lent.swap_remove(rng.usize(..lent.len())))
                    }
                    4 => {
                        let released = rng.usize(..4);
                        buffers.release_oldest(&mut chains[nth], released as u16);
                        under_way[nth].drain(..released.min(under_way[nth].len()));
                    }
                    _ => {}
                }
                let used: usize = under_way.iter().map(VecDeque::len).sum();
                assert_eq!(buffers.free() + used + lent.len(), usize::from(count));
            }
            for chain in &mut chains {
                buffers.release_oldest(chain, u16::MAX);
                assert_eq!(chain.oldest, None);
            }
            assert_eq!(buffers.free() + lent.len(), usize::from(count));
        }
    }
}
