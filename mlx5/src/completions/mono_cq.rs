//! [`MonoCq`]: a completion queue that hands each completion straight to its queue pair.

use std::fmt;
use std::rc::Rc;

use crate::completions::cq_object::CqObject;
use crate::completions::cq_ring::CqRing;
use crate::completions::cqe::Cqe;
use crate::completions::fast_map::FastMap;
use crate::config::CqConfig;
use crate::error::CreateError;
use crate::provider::control::Control;

/// A CQ for queue pairs of one kind, with a value of type `Q` per QPN.
///
/// Polling touches one byte of the CQ, independent of the number of queue pairs: the device has already put their events in one line. It
/// takes no lock, copies to no work-completion struct and makes no dynamic call; the callback is a closure that is inlined into the poll.
/// Completions are ordered as in a [`Cq`](crate::Cq).
///
/// It is not `Send`:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::MonoCq<()>>();
/// ```
pub struct MonoCq<Q> {
    ring: CqRing,
    queues: FastMap<Q>,
}

impl<Q> fmt::Debug for MonoCq<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MonoCq").field("entries", &self.ring.entries()).field("queues", &self.queues.len()).finish()
    }
}

impl<Q> MonoCq<Q> {
    pub(crate) fn create(control: &Control, config: &CqConfig) -> Result<Self, CreateError> {
        Ok(Self { ring: CqRing::create(control, config)?, queues: FastMap::new() })
    }

    /// Returns the number of entries that the device created, a power of two.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        self.ring.object()
    }

    /// Returns the completion queue number, 24 bits.
    #[must_use]
    pub fn cqn(&self) -> u32 {
        self.object().cqn
    }

    /// Arms the queue: [`Device::wait`](crate::Device::wait) returns once the queue holds a completion that was not polled; with
    /// `solicited_only`, once it holds a solicited completion or an error. To sleep without losing a completion, poll until the queue is
    /// empty, arm, then wait; a completion that arrives in between ends the wait at once.
    pub fn arm(&mut self, solicited_only: bool) {
        self.ring.arm(solicited_only);
    }

    /// Registers the value for completions of `qpn`, a number that [`RcQp::qpn`](crate::RcQp::qpn) returned. Returns the value it replaces.
    pub fn register(&mut self, qpn: u32, queue: Q) -> Option<Q> {
        // A device's QPN has 24 bits, so this cannot fail for a number that a device gave.
        self.queues.insert(qpn, queue).unwrap_or(None)
    }

    /// Removes the value of `qpn`, and returns it.
    pub fn unregister(&mut self, qpn: u32) -> Option<Q> {
        self.queues.remove(qpn)
    }

    /// Returns the registered values.
    #[must_use]
    pub fn queues(&self) -> &FastMap<Q> {
        &self.queues
    }

    /// Returns whether a poll would hand out a completion now. Unlike a poll that finds nothing, this call gives a software device no time
    /// to run.
    #[must_use]
    #[inline(always)]
    pub fn has_completion(&self) -> bool {
        self.ring.has_any()
    }

    /// Gives a software device time to run if the queue is empty, and returns the queue if there is a completion: the first half of a
    /// [`poll`](Self::poll).
    #[inline(always)]
    pub fn progress(&mut self) -> Option<Found<'_, Q>> {
        if self.ring.progress() { Some(Found { cq: self }) } else { None }
    }

    /// Hands up to `max` completions to `f` with the value of their queue pair, in the order in which the device wrote them. Returns their
    /// number. `None` stands for a queue pair that is not registered, or not any more: its receive still has to go back to the queue it was
    /// taken from.
    #[inline(always)]
    pub fn poll(&mut self, max: usize, f: impl FnMut(Option<&Q>, Cqe<'_>)) -> usize {
        let queues = &self.queues;
        self.ring.poll(max, |qpn| queues.get(qpn), f)
    }
}

/// A queue with a completion, which [`MonoCq::progress`] found.
#[derive(Debug)]
pub struct Found<'a, Q> {
    cq: &'a mut MonoCq<Q>,
}

impl<Q> Found<'_, Q> {
    /// Hands out up to `max` completions: the second half of a [`poll`](MonoCq::poll). Costs less than that if there is one, and a little
    /// more if there are several.
    #[inline(always)]
    pub fn take(self, max: usize, mut f: impl FnMut(Option<&Q>, Cqe<'_>)) -> usize {
        let MonoCq { ring, queues } = self.cq;
        ring.take_known(max, &|qpn| queues.get(qpn), &mut f)
    }
}
