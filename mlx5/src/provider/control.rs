//! A device, as its objects hold it.

use core::ops::Deref;
use std::rc::Rc;

use mlx5_hca::Hca;
use shm::clock;
use shm::sleep::Watch;

use crate::provider::Provider;
use crate::verbs::Relay;

/// The direct calls to a device without hardware: a doorbell was rung, a completion queue was found empty. Hardware sees the stores itself,
/// and needs no calls.
#[derive(Clone)]
pub(crate) enum Hook {
    /// The software HCA.
    Soft(Rc<Hca>),
    /// A device of libibverbs that knows no formats of mlx5.
    Relay(Rc<Relay>),
}

impl Hook {
    /// A store to the device's register `index` just happened.
    #[inline(always)]
    pub(crate) fn ring(&self, index: usize) {
        match self {
            Self::Soft(hca) => hca.ring(index),
            Self::Relay(relay) => relay.ring(index),
        }
    }

    /// A completion queue was found empty. Returns whether there may be new CQEs.
    #[inline(always)]
    pub(crate) fn empty_poll(&self) -> bool {
        match self {
            Self::Soft(hca) => hca.empty_poll(),
            Self::Relay(relay) => relay.empty_poll(),
        }
    }
}

/// The provider and the hook of an object's device. Clones refer to the same device, which closes with the last of them.
#[derive(Clone)]
pub(crate) struct Control {
    provider: Rc<dyn Provider>,
    /// `None` on hardware and on a null device.
    hook: Option<Hook>,
}

impl Deref for Control {
    type Target = dyn Provider;

    fn deref(&self) -> &(dyn Provider + 'static) {
        &*self.provider
    }
}

impl Control {
    pub(crate) fn new(provider: Rc<dyn Provider>, hook: Option<Hook>) -> Self {
        Self { provider, hook }
    }

    /// Returns the hook that doorbells and empty polls call.
    pub(crate) fn hook(&self) -> Option<&Hook> {
        self.hook.as_ref()
    }

    /// Returns the software HCA, if this is one.
    #[inline(always)]
    pub(crate) fn soft(&self) -> Option<&Rc<Hca>> {
        match &self.hook {
            Some(Hook::Soft(hca)) => Some(hca),
            _ => None,
        }
    }

    /// Returns the time on the device's clock.
    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        self.soft().map_or_else(clock::monotonic_ns, |hca| hca.now_ns())
    }

    /// Returns the same time as [`now_ns`](Self::now_ns), at a lower cost and less recent.
    pub(crate) fn coarse_now_ns(&self) -> u64 {
        self.soft().map_or_else(clock::coarse_ns, |hca| hca.coarse_now_ns())
    }

    /// Lets the device make the progress that it cannot make by itself. Returns whether there may be new CQEs.
    pub(crate) fn progress(&self) -> bool {
        self.hook.as_ref().is_some_and(|hook| hook.empty_poll())
    }

    /// Tells a relay that the record of a receive queue was stored: every other device reads it when a message needs a receive.
    #[inline(always)]
    pub(crate) fn receives_posted(&self) {
        if let Some(Hook::Relay(relay)) = &self.hook {
            relay.receives_posted();
        }
    }

    /// Calls `then` with the watch that ends a sleep on the device, alone or beside other watches.
    pub(crate) fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        match self.soft() {
            Some(hca) => hca.with_watch(then),
            None => self.provider.with_watch(then),
        }
    }
}
