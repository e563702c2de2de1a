//! A pool of equal places: allocated and freed in O(1), without a scan. A place that a peer may still write into is quarantined.

use thiserror::Error;

/// The state of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotState {
    /// Not in use.
    Free,
    /// Allocated.
    Reserved,
    /// Its use has ended at this end, but a peer may still write into it.
    Quarantined,
}

/// A change that the state of the place does not permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("place {index} is {state:?}")]
pub struct WrongState {
    /// The place.
    pub index: u32,
    /// Its state; `Free` also for a place that does not exist.
    pub state: SlotState,
}

/// Places 0..n. The one freed last is allocated first: its bytes are in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[doc(alias = "SlotHandle")]
pub struct MessagePool {
    states: Vec<SlotState>,
    free: Vec<u32>,
    quarantined: u32,
}

impl MessagePool {
    /// Makes a pool of `places` free places. Later calls allocate no memory.
    #[must_use]
    pub fn new(places: u32) -> Self {
        Self { states: vec![SlotState::Free; places as usize], free: (0..places).rev().collect(), quarantined: 0 }
    }

    /// Allocates a place, which is then `Reserved`. Returns `None` if none is free.
    #[inline]
    pub fn allocate(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        self.states[index as usize] = SlotState::Reserved;
        Some(index)
    }

    /// Frees a place, from any use or from quarantine.
    ///
    /// # Errors
    /// [`WrongState`]: the place is free already. Freed twice, it would be allocated twice.
    #[inline]
    pub fn release(&mut self, index: u32) -> Result<(), WrongState> {
        let state = self.state(index);
        match state {
            SlotState::Free => return Err(WrongState { index, state }),
            SlotState::Quarantined => self.quarantined -= 1,
            SlotState::Reserved => {}
        }
        self.states[index as usize] = SlotState::Free;
        self.free.push(index);
        Ok(())
    }

    /// Ends the use of a place without freeing it.
    ///
    /// # Errors
    /// [`WrongState`]: the place is free, or in quarantine already.
    pub fn quarantine(&mut self, index: u32) -> Result<(), WrongState> {
        match self.state(index) {
            SlotState::Reserved => {
                self.states[index as usize] = SlotState::Quarantined;
                self.quarantined += 1;
                Ok(())
            }
            state => Err(WrongState { index, state }),
        }
    }

    /// Returns the state of a place; `Free` if no place has that number.
    #[must_use]
    #[inline]
    pub fn state(&self, index: u32) -> SlotState {
        self.states.get(index as usize).copied().unwrap_or(SlotState::Free)
    }

    /// Returns the number of places that can be allocated.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of places in quarantine.
    #[must_use]
    pub const fn quarantined(&self) -> u32 {
        self.quarantined
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_given_out_once_until_it_is_freed() {
        let mut pool = MessagePool::new(3);
        let all: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(all, [0, 1, 2]);
        pool.release(1).unwrap();
        assert_eq!(pool.release(1), Err(WrongState { index: 1, state: SlotState::Free }));
        assert_eq!((pool.allocate(), pool.allocate()), (Some(1), None));
        assert_eq!(pool.release(7), Err(WrongState { index: 7, state: SlotState::Free }));
    }

    #[test]
    fn a_quarantined_place_is_not_given_out() {
        let mut pool = MessagePool::new(1);
        let place = pool.allocate().unwrap();
        pool.quarantine(place).unwrap();
        assert_eq!((pool.allocate(), pool.quarantined()), (None, 1));
        assert!(pool.quarantine(place).is_err());
        pool.release(place).unwrap();
        assert_eq!((pool.allocate(), pool.quarantined()), (Some(place), 0));
    }

    /// Compares with an oracle: the set of the places in use.
    #[test]
    fn many_random_operations_never_give_a_place_to_two() {
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut pool, mut used) = (MessagePool::new(5), Vec::new());
        for _ in 0..10_000 {
            if rng.bool() {
                match pool.allocate() {
                    Some(place) => {
                        assert!(!used.contains(&place));
                        used.push(place);
                    }
                    None => assert_eq!(used.len(), 5),
                }
            } else if !used.is_empty() {
                let place = used.swap_remove(rng.usize(..used.len()));
                if rng.bool() {
                    pool.quarantine(place).unwrap();
                }
                pool.release(place).unwrap();
            }
            assert_eq!(pool.free() + used.len(), 5);
        }
    }
}
