//! [`MonoCq`]: a completion queue whose completions go straight to the queue pair they belong to.

use std::fmt;
use std::rc::Rc;

use crate::config::CqConfig;
use crate::control::Control;
use crate::cq_object::CqObject;
use crate::cq_ring::CqRing;
use crate::cqe::Cqe;
use crate::error::CreateError;
use crate::fast_map::FastMap;

/// A CQ for queue pairs of one kind, with a value of type `Q` per QPN.
///
/// Polling costs one byte of the CQ however many queue pairs there are: the device has already put their events in one line. There is
/// no lock, no copy to a work-completion struct, no dynamic call; the callback is a closure of the poll call and is inlined into it.
/// Order is as in a [`Cq`](crate::Cq).
///
/// It stays in its thread:
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

    /// Entries the device really gave, a power of two.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        self.ring.object()
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

    /// Names the value for completions of `qpn`, a number that [`RcQp::qpn`](crate::RcQp::qpn) gave. Returns the value it replaces.
    pub fn register(&mut self, qpn: u32, queue: Q) -> Option<Q> {
        // A device's QPN has 24 bits, so this cannot fail for a number that came from one.
        self.queues.insert(qpn, queue).unwrap_or(None)
    }

    /// Forgets `qpn`.
    pub fn unregister(&mut self, qpn: u32) -> Option<Q> {
        self.queues.remove(qpn)
    }

    /// The registered values.
    #[must_use]
    pub fn queues(&self) -> &FastMap<Q> {
        &self.queues
    }

    /// Whether a poll would hand out a completion now. Unlike a poll that finds nothing, it gives a software device no time.
    #[must_use]
    #[inline(always)]
    pub fn has_completion(&self) -> bool {
        self.ring.has_any()
    }

    /// Whether there is a completion, after a software device had its time if there was none: the first half of a [`poll`](Self::poll).
    #[must_use]
    #[inline(always)]
    pub fn progress(&mut self) -> bool {
        self.ring.progress()
    }

    /// Hands up to `max` completions to `f` with the value of their queue pair, in the order the device wrote them. Returns how many
    /// there were. `None` stands for a queue pair that is not registered (any more): its receive still has to go back to the queue it
    /// was taken from.
    #[inline(always)]
    pub fn poll(&mut self, max: usize, f: impl FnMut(Option<&Q>, Cqe<'_>)) -> usize {
        let queues = &self.queues;
        self.ring.poll(max, |qpn| queues.get(qpn), f)
    }

    /// The second half of a [`poll`](Self::poll), of the completions that are there.
    #[inline(always)]
    pub fn take(&mut self, max: usize, mut f: impl FnMut(Option<&Q>, Cqe<'_>)) -> usize {
        let queues = &self.queues;
        self.ring.take(max, &|qpn| queues.get(qpn), &mut f)
    }
}
