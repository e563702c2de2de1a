//! The ordinary completion queue, [`Cq`].

use std::fmt;
use std::rc::Rc;

use crate::config::CqConfig;
use crate::control::Control;
use crate::cq_object::CqObject;
use crate::cq_ring::CqRing;
use crate::cqe::Cqe;
use crate::error::CreateError;

/// A completion queue for any mix of queues. Completions of one queue pair's sends come in posting order; those of different queue pairs, and of
/// sends against receives, in any.
///
/// It stays in its thread:
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

    /// Entries the device really gave, a power of two.
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

    /// Completion queue number, 24 bits.
    #[must_use]
    pub fn cqn(&self) -> u32 {
        self.object().cqn
    }

    /// Arms the queue: [`Device::wait`](crate::Device::wait) returns once it holds a completion that was not polled, or one that is solicited or
    /// an error if `solicited_only`. To sleep without losing one: poll until it is empty, arm, wait; a completion in between ends the wait at
    /// once.
    pub fn arm(&mut self, solicited_only: bool) {
        self.ring.arm(solicited_only);
    }

    /// Whether a poll would hand out a completion now. Unlike a poll that finds nothing, it gives a software device no time: a loop must
    /// poll some queue of the device.
    #[must_use]
    #[inline(always)]
    pub fn has_completion(&self) -> bool {
        self.ring.has_any()
    }

    /// Hands up to `max` completions to `f` in the order the device wrote them, and returns how many. Their entries are free again when
    /// this returns: what `f` posts must find room for its completions beside them.
    #[inline(always)]
    pub fn poll(&mut self, max: usize, mut f: impl FnMut(Cqe<'_>)) -> usize {
        self.ring.poll(max, |_| (), |(), cqe| f(cqe))
    }
}
