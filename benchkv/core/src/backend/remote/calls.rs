//! The calls of a link that wait for their answers, by the id that the answer returns.
//!
//! An id consists of the place of the call in a table (low 16 bits) and the number of the call
//! (high 16 bits). A second answer to a call finds no call, even when a later call has the same
//! place, unless 65536 calls later the numbers repeat. Ids are returned by a peer, and are
//! untrusted.

use slab::Slab;

/// Calls that have not been answered. `C` is the caller to answer.
pub(super) struct Calls<C> {
    /// Number and caller of each call, indexed by place.
    calls: Slab<(u16, C)>,
    window: usize,
    /// Number of the next call; wraps.
    next: u16,
}

impl<C> Calls<C> {
    /// Makes room for `window` calls, at most 65536.
    pub(super) fn new(window: usize) -> Self {
        let window = window.min(1 << 16);
        Self {
            calls: Slab::with_capacity(window),
            window,
            next: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Adds a call and returns its id.
    ///
    /// # Errors
    /// All places are in use; the error returns `whom`.
    #[inline]
    pub(super) fn insert(&mut self, whom: C) -> Result<u32, C> {
        if self.calls.len() == self.window {
            return Err(whom);
        }
        let number = self.next;
        self.next = number.wrapping_add(1);
        let place = self.calls.insert((number, whom));
        Ok(u32::from(number) << 16 | place as u32)
    }

    /// Ends the call with this id. Returns the call's caller; `None` if no such call waits.
    #[inline]
    pub(super) fn take(&mut self, id: u32) -> Option<C> {
        let place = usize::from(id as u16);
        let call = self.calls.get(place);
        call.filter(|(number, _)| u32::from(*number) == id >> 16)?;
        let (_, whom) = self.calls.try_remove(place)?;
        Some(whom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_ends_once_in_any_order_and_no_more_fit_than_the_window() {
        let mut calls = Calls::new(3);
        let ids: Vec<u32> = (0..3).map(|whom| calls.insert(whom).unwrap()).collect();
        assert_eq!(calls.insert(9), Err(9));
        assert_eq!(
            [1, 0, 2].map(|call: usize| calls.take(ids[call])),
            [Some(1), Some(0), Some(2)]
        );
        assert_eq!(calls.len(), 0);
        assert_eq!(
            ids.iter().filter_map(|id| calls.take(*id)).count(),
            0,
            "answered already"
        );
    }

    #[test]
    fn a_second_answer_does_not_end_the_call_that_has_the_place_now() {
        let mut calls = Calls::new(1);
        let first = calls.insert("first").unwrap();
        assert_eq!(calls.take(first), Some("first"));
        let second = calls.insert("second").unwrap();
        assert_eq!(calls.take(first), None);
        assert_eq!(calls.take(second), Some("second"));
    }

    #[test]
    fn ids_of_a_peer_may_be_anything() {
        let mut calls = Calls::new(2);
        let id = calls.insert(()).unwrap();
        for forged in [id + 1, id + 2, id | 1 << 16, id | 1 << 31, u32::MAX] {
            assert_eq!(calls.take(forged), None, "{forged:#x}");
        }
        assert!(calls.take(id).is_some());
    }
}
