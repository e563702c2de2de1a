//! Quiescing: before an object is reused, every peer that was executing a doorbell has finished it,
//! or is remembered as stuck.

use std::rc::Rc;

use copyrpc_shm::sync::{heavy_barrier, spin_loop, yield_now};

use crate::shared::peer::Peer;
use crate::{Clock, Hca};

/// Time in ns for which `quiesce` waits after the barrier, if a peer may be in another process. The
/// barrier rarely omits a processor that runs another process ([`heavy_barrier`]); after this time,
/// the stores of such a processor count as visible. No architecture guarantees a maximum; a store
/// waits for one cache line at a time, which takes a hundredth of this time.
const SETTLE_NS: u64 = 10_000;

/// Maximum time for which deregistering and destroying wait for a peer in the middle of a copy. It
/// is real time, whatever the device's clock is, because the wait is for another process.
const QUIESCE_NS: u64 = 50_000_000;

impl Hca {
    /// Waits, for a bounded time, until no peer executes a doorbell that began before now (H3 of
    /// `shared::layout`). Returns whether all these doorbells have ended.
    ///
    /// A peer that does not finish is remembered as stuck: its doorbell may touch any object of
    /// this device that was valid when the doorbell began. So the caller must not reuse an object
    /// that this peer could touch. Until a stuck peer has finished that doorbell or is dead, later
    /// calls for it return `false` without a wait.
    pub(crate) fn quiesce<'a>(
        &self,
        stuck: &mut Vec<Stuck>,
        peers: impl Iterator<Item = &'a Rc<Peer>>,
    ) -> bool {
        stuck.retain(Stuck::is_stuck);
        let living: Vec<_> = peers.filter(|peer| !peer.is_gone()).collect();
        if living.is_empty() {
            return true;
        }
        if stuck
            .iter()
            .any(|known| living.iter().any(|peer| Rc::ptr_eq(peer, &known.peer)))
        {
            return false;
        }
        // `heavy_barrier` is a full fence even if it returns `false`. A fence is enough if all
        // peers execute fences too.
        if !heavy_barrier() && !living.iter().all(|peer| peer.has_fences()) {
            return false;
        }
        if living.iter().any(|peer| peer.may_be_of_another_process()) {
            let end_ns = Clock::System.now_ns() + SETTLE_NS;
            while Clock::System.now_ns() < end_ns {
                spin_loop();
            }
        }
        let busy = living.into_iter().map(|peer| Stuck {
            peer: Rc::clone(peer),
            executing: peer.executing(),
        });
        let mut busy: Vec<_> = busy.filter(|busy| busy.executing % 2 == 1).collect();
        let end_ns = Clock::System.now_ns() + QUIESCE_NS;
        while !busy.is_empty() && Clock::System.now_ns() < end_ns {
            yield_now();
            busy.retain(Stuck::is_stuck);
        }
        let is_quiet = busy.is_empty();
        stuck.append(&mut busy);
        is_quiet
    }
}

/// A peer, and the doorbell in which it may still use an object that is to be reused.
pub(crate) struct Stuck {
    peer: Rc<Peer>,
    /// Value of the peer's `executing` word during that doorbell.
    executing: u64,
}

impl Stuck {
    fn is_stuck(&self) -> bool {
        self.peer.executing() == self.executing && !self.peer.is_gone()
    }
}
