//! The ordinary completion queue, [`Cq`].

use std::fmt;
use std::rc::Rc;

use crate::completions::cq_object::CqObject;
use crate::completions::cq_ring::CqRing;
use crate::completions::cqe::Cqe;
use crate::config::CqConfig;
use crate::error::CreateError;
use crate::provider::control::Control;

/// A completion queue for any mix of queues. Completions of one queue pair's sends arrive in posting order. Those of different queue pairs
/// arrive in any order, and so do those of sends relative to receives.
///
/// It is not `Send`:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::Cq>();
/// ```
pub struct Cq {
    ring: CqRing,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("entries", &self.ring.entries()).finish_non_exhaustive()
    }
}

impl Cq {
    pub(crate) fn create(control: &Control, config: &CqConfig) -> Result<Self, CreateError> {
        Ok(Self { ring: CqRing::create(control, config)? })
    }

    /// Returns the number of entries that the device created, a power of two.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        self.ring.object()
    }

    #[cfg(test)]
    pub(crate) fn ring(&mut self) -> &mut CqRing {
        &mut self.ring
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

    /// Returns whether a poll would hand out a completion now. Unlike a poll that finds nothing, this call gives a software device no time
    /// to run: a loop must poll some queue of the device.
    #[must_use]
    #[inline(always)]
    pub fn has_completion(&self) -> bool {
        self.ring.has_any()
    }

    /// Gives a software device time to run if the queue is empty, and returns whether there is a completion: the first half of a
    /// [`poll`](Self::poll).
    #[must_use]
    #[inline(always)]
    pub fn progress(&mut self) -> bool {
        self.ring.progress()
    }

    /// Hands up to `max` completions to `f` in the order in which the device wrote them, and returns their number. Their entries are free
    /// only when this returns: completions of operations that `f` posts need entries beside them.
    #[inline(always)]
    pub fn poll(&mut self, max: usize, mut f: impl FnMut(Cqe<'_>)) -> usize {
        self.ring.poll(max, |_| (), |(), cqe| f(cqe))
    }
}
