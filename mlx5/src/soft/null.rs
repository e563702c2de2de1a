//! The device's side of a null device, played by a test or a benchmark: what the driver wrote can be read, and CQEs can be written.

use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Hca;
use super::cq::SoftCq;
use super::objects::qp_index;
use super::queues::REGISTER_BYTES;
use crate::wire::{CQE_BYTES, CqeOpcode, MiniCqe, ResponderCqe, WQEBB};

/// The device's side of a [`DeviceSpec::Null`](crate::DeviceSpec::Null) device.
pub struct NullDevice {
    hca: Rc<Hca>,
}

impl Hca {
    /// As if `counter` CQEs had been written to completion queue `cqn` already.
    #[cfg(test)]
    pub(crate) fn start_cq_at(&self, cqn: u32, counter: u32) {
        if let Some(Some(cq)) = self.state.borrow_mut().cqs.get_mut(cqn as usize) {
            cq.start_at(counter);
        }
    }
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

    fn with_cq(&self, cqn: u32, f: impl FnOnce(&mut SoftCq) -> bool) -> bool {
        self.hca.state.borrow_mut().cqs.get_mut(cqn as usize).and_then(Option::as_mut).is_some_and(f)
    }

    /// Writes the next CQE of completion queue `cqn` as a device would, owner bit last. Of the op_own byte in `cqe` only the solicited bit
    /// counts. `false` if there is no such queue or no room: as on any device, that was the last CQE this queue gets.
    pub fn write_cqe(&self, cqn: u32, cqe: &[u8; CQE_BYTES], opcode: CqeOpcode) -> bool {
        self.with_cq(cqn, |cq| cq.write(*cqe, opcode).is_ok())
    }

    /// As [`write_cqe`](Self::write_cqe), with the received bytes in the CQE (scatter to CQE), as many as its byte count says. `false`, and
    /// nothing written, also if there are more or fewer, or more than an entry of this queue carries: 32, or 64 in one of 128 bytes.
    pub fn write_scattered(&self, cqn: u32, cqe: &[u8; CQE_BYTES], opcode: CqeOpcode, data: &[u8]) -> bool {
        let is_whole = ResponderCqe::parse(cqe).byte_count as usize == data.len();
        self.with_cq(cqn, |cq| is_whole && data.len() <= cq.scatter_room() && cq.write_scattered(*cqe, opcode, data).is_ok())
    }

    /// Writes the completions of `minis` as one compressed session whose common fields, and first WQE counter, are those of `title`.
    /// `false`, and nothing written, also if the queue was made without compression.
    pub fn write_compressed(&self, cqn: u32, title: &[u8; CQE_BYTES], opcode: CqeOpcode, minis: &[MiniCqe]) -> bool {
        self.with_cq(cqn, |cq| cq.compresses() && cq.write_session(*title, opcode, minis).is_ok())
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

    /// The BlueFlame register of queue pair `qpn`, whose bytes become `fill`: what differs from it the next time was stored meanwhile. `None`
    /// if there is no such queue pair.
    #[must_use]
    pub fn take_register(&self, qpn: u32, fill: u8) -> Option<[u8; REGISTER_BYTES]> {
        let state = self.hca.state.borrow();
        let qp = state.qps.get(qp_index(qpn))?.as_ref().filter(|qp| qp.qpn == qpn)?;
        let memory = qp.sq.memory.as_ref()?;
        // SAFETY: the register is the first of the queue pair's own memory; the driver is this thread and not writing now.
        Some(unsafe { memory.at::<[u8; REGISTER_BYTES]>(0).replace([fill; REGISTER_BYTES]) })
    }

    /// The counter in the doorbell record of the receive queue that queue pair `qpn` takes from, its own or a shared one, and the bytes of
    /// its WQE `index`. `None` if there is no such queue pair or WQE.
    #[must_use]
    pub fn receive_queue(&self, qpn: u32, index: u16) -> Option<(u16, Vec<u8>)> {
        let state = self.hca.state.borrow();
        let qp = state.qps.get(qp_index(qpn))?.as_ref().filter(|qp| qp.qpn == qpn)?;
        Some((qp.receives.posted(), qp.receives.wqe_bytes(index)?))
    }

    /// The two words of completion queue `cqn`'s doorbell record, as the driver wrote them. `None` if there is no such queue.
    #[must_use]
    pub fn cq_record(&self, cqn: u32) -> Option<[u32; 2]> {
        let state = self.hca.state.borrow();
        let record = state.cqs.get(cqn as usize)?.as_ref()?.record();
        // SAFETY: the record has two words and lives as long as the queue; the driver accesses them through the same atomic type.
        Some(unsafe { record.cast::<[AtomicU32; 2]>().as_ref() }.each_ref().map(|word| word.load(Ordering::Acquire)))
    }
}
