//! [`NullDevice`], the device's side of the queues of a null device. A test or benchmark plays that
//! side: it reads the bytes that the driver wrote, and writes CQEs (`tests/support/null.rs`).

use std::fmt;
use std::rc::Rc;

use mlx5_hca::cq::SoftCq;
use mlx5_hca::{CqMemory, RqMemory, SqMemory};

use crate::provider::soft::Soft;

/// The device's side of a [`DeviceSpec::Null`](crate::DeviceSpec::Null) device. The memory of a
/// queue lives as long as the queue.
#[doc(hidden)]
pub struct NullDevice {
    soft: Rc<Soft>,
}

impl fmt::Debug for NullDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullDevice").finish_non_exhaustive()
    }
}

impl NullDevice {
    pub(crate) fn new(soft: Rc<Soft>) -> Self {
        Self { soft }
    }

    /// Calls `f` with completion queue `cqn`. Returns `None` if there is no such queue.
    pub fn with_cq<R>(&self, cqn: u32, f: impl FnOnce(&mut SoftCq) -> R) -> Option<R> {
        self.soft.hca().with_cq(cqn, f)
    }

    /// Returns the memory of completion queue `cqn`.
    #[must_use]
    pub fn cq(&self, cqn: u32) -> Option<CqMemory> {
        Some(self.soft.cqs.borrow().get(&cqn)?.cq)
    }

    /// Returns the memory of the send queue of queue pair `qpn`.
    #[must_use]
    pub fn sq(&self, qpn: u32) -> Option<SqMemory> {
        Some(self.soft.sqs.borrow().get(&qpn)?.0.sq)
    }

    /// Returns the memory of the receive queue of queue pair `qpn`, its own or a shared queue.
    #[must_use]
    pub fn rq(&self, qpn: u32) -> Option<RqMemory> {
        let rqn = self.soft.sqs.borrow().get(&qpn)?.1;
        self.soft.rqs.borrow().get(&rqn).copied()
    }
}
