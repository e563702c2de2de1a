//! The device's side of a null device, played by a test or a benchmark: what the driver wrote can be read, and CQEs can be written.

use std::fmt;
use std::rc::Rc;

use super::Hca;
use super::objects::qp_index;
use crate::wire::{CQE_BYTES, CqeOpcode, WQEBB};

/// The device's side of a [`DeviceSpec::Null`](crate::DeviceSpec::Null) device.
pub struct NullDevice {
    hca: Rc<Hca>,
}

impl fmt::Debug for NullDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NullDevice").finish_non_exhaustive()
    }
}

impl NullDevice {
    pub(crate) fn new(hca: Rc<Hca>) -> Self {
        Self { hca }
    }

    /// Writes the next CQE of completion queue `cqn` as a device would, owner bit last. `false` if there is no such queue or no room.
    pub fn write_cqe(&self, cqn: u32, cqe: &[u8; CQE_BYTES], opcode: CqeOpcode) -> bool {
        match self.hca.state.borrow_mut().cqs.get_mut(cqn as usize) {
            Some(Some(cq)) => cq.write(*cqe, opcode).is_ok(),
            _ => false,
        }
    }

    /// The producer counter in the doorbell record of queue pair `qpn`, and the WQEBB at `counter` of its send queue. `None` if there is no
    /// such queue pair.
    #[must_use]
    pub fn send_queue(&self, qpn: u32, counter: u16) -> Option<(u16, [u8; WQEBB])> {
        let state = self.hca.state.borrow();
        let qp = state.qps.get(qp_index(qpn))?.as_ref().filter(|qp| qp.qpn == qpn)?;
        // SAFETY: a WQEBB inside the SQ; the driver is this thread and not writing now.
        Some((qp.sq_producer(), unsafe { qp.wqebb(counter).cast().read() }))
    }
}
