//! [`MonoCq`]: a completion queue that hands out each completion with the value of its queue pair.

use core::borrow::Borrow;
use core::ops::{Deref, DerefMut};

use crate::completions::cq::Cq;
use crate::completions::cqe::Cqe;
use crate::completions::fast_map::FastMap;

/// A [`Cq`] for queue pairs of one kind, with a value of type `Q` per QPN.
///
/// An empty poll reads one byte of the CQ, whatever the number of queue pairs, because the device
/// puts the completions of all of them into one queue. A poll takes no lock, copies to no
/// work-completion struct and makes no dynamic call. The callback is a closure that is inlined into
/// the poll.
///
/// It is not `Send`:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::MonoCq<()>>();
/// ```
#[derive(Debug)]
pub struct MonoCq<Q> {
    cq: Cq,
    queues: FastMap<Q>,
}

impl<Q> Deref for MonoCq<Q> {
    type Target = Cq;

    #[inline(always)]
    fn deref(&self) -> &Cq {
        &self.cq
    }
}

impl<Q> DerefMut for MonoCq<Q> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Cq {
        &mut self.cq
    }
}

impl<Q> Borrow<Cq> for MonoCq<Q> {
    fn borrow(&self) -> &Cq {
        self
    }
}

impl<Q> MonoCq<Q> {
    pub(crate) fn new(cq: Cq) -> Self {
        Self {
            cq,
            queues: FastMap::new(),
        }
    }

    /// Registers the value for completions of `qpn`, a number that [`RcQp::qpn`](crate::RcQp::qpn)
    /// returned. Returns the value it replaces.
    pub fn register(&mut self, qpn: u32, queue: Q) -> Option<Q> {
        // The insertion fails only for numbers of more than 24 bits, which no device assigns.
        self.queues.insert(qpn, queue).unwrap_or(None)
    }

    /// Removes the value of `qpn`, and returns it.
    pub fn unregister(&mut self, qpn: u32) -> Option<Q> {
        self.queues.remove(qpn)
    }

    /// Returns the registered values, by QPN.
    #[must_use]
    pub fn queues(&self) -> &FastMap<Q> {
        &self.queues
    }

    /// Gives a software device time to run if the queue is empty, and returns the queue if there is
    /// a completion: the first half of a [`poll`](Self::poll).
    #[inline(always)]
    pub fn progress(&mut self) -> Option<Found<'_, Q>> {
        if self.cq.progress() {
            Some(Found { cq: self })
        } else {
            None
        }
    }

    /// Hands up to `max` completions to `f` with the value of their queue pair, in the order in
    /// which the device wrote them. Returns their number. The value is `None` if the queue pair is
    /// not registered, or no longer registered. Even then the receive of a completion must be
    /// returned to the queue from which it was taken.
    #[inline(always)]
    pub fn poll(&mut self, max: usize, f: impl FnMut(Option<&Q>, Cqe<'_>)) -> usize {
        let queues = &self.queues;
        self.cq.poll_each(max, |qpn| queues.get(qpn), f)
    }
}

/// A queue with a completion, which [`MonoCq::progress`] found.
#[derive(Debug)]
pub struct Found<'a, Q> {
    cq: &'a mut MonoCq<Q>,
}

impl<Q> Found<'_, Q> {
    /// Hands out up to `max` completions: the second half of a [`poll`](MonoCq::poll). The two
    /// halves cost less than `poll` for one completion, and a little more for several.
    #[inline(always)]
    pub fn take(self, max: usize, mut f: impl FnMut(Option<&Q>, Cqe<'_>)) -> usize {
        let MonoCq { cq, queues } = self.cq;
        cq.take_known(max, &|qpn| queues.get(qpn), &mut f)
    }
}
