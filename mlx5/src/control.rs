//! The handle through which the objects of a device hold the device.

use core::ops::Deref;
use std::rc::Rc;

use copyrpc_shm::clock;
use copyrpc_shm::sleep::Watch;
use mlx5_hca::Hca;

use crate::provider::{Provider, Queues};
use crate::verbs::Relay;

/// The device that must be called to make progress: after the stores of a doorbell, and when a poll
/// finds a completion queue empty. Hardware sees the stores itself, and needs no calls.
#[derive(Clone)]
pub(crate) enum Hook {
    Soft(Rc<Hca>),
    Relay(Rc<Relay>),
    /// Hardware, or a null device.
    Nothing,
}

impl Hook {
    /// Calls the software HCA after a doorbell's stores to register `index`. Does nothing for a
    /// relay (a translator of WQEs to calls of libibverbs): the doorbell's own stores include the
    /// relay's call, [`ring_relay`](Self::ring_relay), so that no check for a relay lengthens this
    /// path.
    #[inline(always)]
    pub(crate) fn ring(&self, index: usize) {
        if let Self::Soft(hca) = self {
            hca.ring(index);
        }
    }

    pub(crate) fn ring_relay(&self, index: usize) {
        if let Self::Relay(relay) = self {
            relay.ring(index);
        }
    }

    /// Lets the device make the progress that it cannot make by itself. Returns whether there may
    /// be new CQEs.
    #[inline(always)]
    pub(crate) fn empty_poll(&self) -> bool {
        match self {
            Self::Soft(hca) => hca.empty_poll(),
            _ => self.poll_relay(),
        }
    }

    #[cold]
    #[inline(never)]
    fn poll_relay(&self) -> bool {
        match self {
            Self::Relay(relay) => relay.empty_poll(),
            _ => false,
        }
    }
}

/// The providers and the hook of an object's device. Clones refer to the same device, which closes
/// when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct Control {
    provider: Rc<dyn Provider>,
    queues: Rc<dyn Queues>,
    hook: Hook,
}

impl Deref for Control {
    type Target = dyn Provider;

    fn deref(&self) -> &(dyn Provider + 'static) {
        &*self.provider
    }
}

impl Control {
    pub(crate) fn new<P: Provider + Queues + 'static>(provider: Rc<P>, hook: Hook) -> Self {
        Self {
            provider: Rc::clone(&provider) as _,
            queues: provider,
            hook,
        }
    }

    pub(crate) fn of_relay(relay: Rc<Relay>) -> Self {
        Self {
            provider: Rc::clone(relay.base()) as _,
            queues: Rc::clone(&relay) as _,
            hook: Hook::Relay(relay),
        }
    }

    pub(crate) fn queues(&self) -> &dyn Queues {
        &*self.queues
    }

    pub(crate) fn hook(&self) -> &Hook {
        &self.hook
    }

    /// Returns the software HCA; `None` on hardware and on a null device.
    pub(crate) fn soft(&self) -> Option<&Rc<Hca>> {
        match &self.hook {
            Hook::Soft(hca) => Some(hca),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        self.soft()
            .map_or_else(clock::monotonic_ns, |hca| hca.now_ns())
    }

    /// Returns the time of [`now_ns`](Self::now_ns) at a lower cost; the result may be older.
    pub(crate) fn coarse_now_ns(&self) -> u64 {
        self.soft()
            .map_or_else(clock::coarse_ns, |hca| hca.coarse_now_ns())
    }

    /// Informs a relay that a receive queue's record has a new value. Every other device reads the
    /// record when a message needs a receive.
    #[inline(always)]
    pub(crate) fn receives_posted(&self) {
        if let Hook::Relay(relay) = &self.hook {
            relay.receives_posted();
        }
    }

    pub(crate) fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        match &self.hook {
            Hook::Soft(hca) => hca.with_watch(then),
            Hook::Relay(relay) => relay.with_watch(then),
            Hook::Nothing => self.provider.with_watch(then),
        }
    }
}
