//! The handle by which the objects of a device hold it.

use core::ops::Deref;
use std::rc::Rc;

use copyrpc_shm::clock;
use copyrpc_shm::sleep::Watch;
use mlx5_hca::Hca;

use crate::provider::Provider;
use crate::verbs::Relay;

/// The software HCA, which is called directly when a doorbell was rung or a completion queue was
/// found empty. Hardware sees the stores itself, and needs no calls.
pub(crate) type Hook = Rc<Hca>;

/// The provider and the hook of an object's device. Clones refer to the same device, which closes
/// with the last of them.
#[derive(Clone)]
pub(crate) struct Control {
    provider: Rc<dyn Provider>,
    /// `None` on hardware, on a null device and on a relay.
    hook: Option<Hook>,
    /// The relay, which gets the same calls. The software HCA is checked first, because its
    /// instructions are counted.
    relay: Option<Rc<Relay>>,
}

impl Deref for Control {
    type Target = dyn Provider;

    fn deref(&self) -> &(dyn Provider + 'static) {
        &*self.provider
    }
}

impl Control {
    pub(crate) fn new(provider: Rc<dyn Provider>, hook: Option<Hook>) -> Self {
        Self {
            provider,
            hook,
            relay: None,
        }
    }

    /// Returns the hook that doorbells and empty polls call.
    pub(crate) fn hook(&self) -> Option<&Hook> {
        self.hook.as_ref()
    }

    /// Makes the control of a relay.
    pub(crate) fn of_relay(relay: Rc<Relay>) -> Self {
        Self {
            provider: Rc::clone(&relay) as _,
            hook: None,
            relay: Some(relay),
        }
    }

    /// Returns the relay, if this is one.
    pub(crate) fn relay(&self) -> Option<&Rc<Relay>> {
        self.relay.as_ref()
    }

    /// Returns the time on the device's clock.
    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        self.hook
            .as_ref()
            .map_or_else(clock::monotonic_ns, |hca| hca.now_ns())
    }

    /// Returns the same time as [`now_ns`](Self::now_ns), at a lower cost and less recent.
    pub(crate) fn coarse_now_ns(&self) -> u64 {
        self.hook
            .as_ref()
            .map_or_else(clock::coarse_ns, |hca| hca.coarse_now_ns())
    }

    /// Lets the device make the progress that it cannot make by itself. Returns whether there may
    /// be new CQEs.
    pub(crate) fn progress(&self) -> bool {
        match &self.hook {
            Some(hook) => hook.empty_poll(),
            None => self.relay.as_ref().is_some_and(|relay| relay.empty_poll()),
        }
    }

    /// Tells a relay that the record of a receive queue was stored. Every other device reads the
    /// record when a message needs a receive.
    #[inline(always)]
    pub(crate) fn receives_posted(&self) {
        if let Some(relay) = &self.relay {
            relay.receives_posted();
        }
    }

    /// Calls `then` with the watch that ends a sleep on the device, alone or beside other watches.
    pub(crate) fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        match &self.hook {
            Some(hook) => hook.with_watch(then),
            None => self.provider.with_watch(then),
        }
    }
}
