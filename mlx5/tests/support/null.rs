//! The device's side of a null device, which a test or a benchmark plays: it reads the bytes that
//! the driver wrote, and writes CQEs.

use core::sync::atomic::Ordering;

use mlx5::NullDevice;
use mlx5::hca::RqMemory;
use mlx5::wire::{
    BLUEFLAME_BYTES, CQE_BYTES, CqeOpcode, MiniCqe, ResponderCqe, WQEBB, queue_record_index,
};

/// Both halves of a BlueFlame register.
pub(crate) const REGISTER_BYTES: usize = 2 * BLUEFLAME_BYTES;

/// The work of a device.
#[allow(dead_code, reason = "no program needs all of it")]
pub(crate) trait Plays {
    /// Writes the next CQE of completion queue `cqn` as a device would, owner bit last. Only the
    /// solicited bit of the op_own byte in `cqe` is used. Returns `false` if there is no such
    /// queue, or it has no room: as on any device, a queue that has overrun gets no further CQE.
    fn write_cqe(&self, cqn: u32, cqe: &[u8; CQE_BYTES], opcode: CqeOpcode) -> bool;

    /// Like [`write_cqe`](Self::write_cqe), with the received bytes in the CQE (scatter to CQE).
    /// Also returns `false`, and writes nothing, if `data` is not as long as the CQE's byte count,
    /// or longer than an entry of this queue can carry: 32 bytes, or 64 in an entry of 128.
    fn write_scattered(
        &self,
        cqn: u32,
        cqe: &[u8; CQE_BYTES],
        opcode: CqeOpcode,
        data: &[u8],
    ) -> bool;

    /// Writes the completions of `minis` as one compressed session. `title` gives their common
    /// fields and the first WQE counter. Writes nothing and returns `false` also if the queue was
    /// created without compression.
    fn write_compressed(
        &self,
        cqn: u32,
        title: &[u8; CQE_BYTES],
        opcode: CqeOpcode,
        minis: &[MiniCqe],
    ) -> bool;

    /// Returns the producer counter in the doorbell record of queue pair `qpn`, and the WQEBB at
    /// `counter` of its send queue. Returns `None` if there is no such queue pair.
    fn send_queue(&self, qpn: u32, counter: u16) -> Option<(u16, [u8; WQEBB])>;

    /// Returns the bytes of the BlueFlame register of queue pair `qpn`, and fills the register with
    /// `fill`. At the next call, bytes that differ from `fill` were stored in between. Returns
    /// `None` if there is no such queue pair, or it has no register.
    fn take_register(&self, qpn: u32, fill: u8) -> Option<[u8; REGISTER_BYTES]>;

    /// Returns the counter in the doorbell record of the receive queue of queue pair `qpn`, its own
    /// or a shared one, and the bytes of WQE `index` of that queue. Returns `None` if there is no
    /// such queue pair or WQE.
    fn receive_queue(&self, qpn: u32, index: u16) -> Option<(u16, Vec<u8>)>;

    /// Returns the two words of completion queue `cqn`'s doorbell record, as the driver wrote them.
    /// Returns `None` if there is no such queue.
    fn cq_record(&self, cqn: u32) -> Option<[u32; 2]>;
}

impl Plays for NullDevice {
    fn write_cqe(&self, cqn: u32, cqe: &[u8; CQE_BYTES], opcode: CqeOpcode) -> bool {
        self.with_cq(cqn, |cq| cq.write(*cqe, opcode).is_ok()) == Some(true)
    }

    fn write_scattered(
        &self,
        cqn: u32,
        cqe: &[u8; CQE_BYTES],
        opcode: CqeOpcode,
        data: &[u8],
    ) -> bool {
        let is_whole = ResponderCqe::parse(cqe).byte_count as usize == data.len();
        self.with_cq(cqn, |cq| {
            is_whole
                && data.len() <= cq.scatter_room()
                && cq.write_scattered(*cqe, opcode, data).is_ok()
        }) == Some(true)
    }

    fn write_compressed(
        &self,
        cqn: u32,
        title: &[u8; CQE_BYTES],
        opcode: CqeOpcode,
        minis: &[MiniCqe],
    ) -> bool {
        self.with_cq(cqn, |cq| {
            cq.compresses() && cq.write_session(*title, opcode, minis).is_ok()
        }) == Some(true)
    }

    fn send_queue(&self, qpn: u32, counter: u16) -> Option<(u16, [u8; WQEBB])> {
        let sq = self.sq(qpn)?;
        let index = usize::from(counter) & (sq.wqe_cnt as usize - 1);
        // SAFETY: the queue's own memory: the record, which the driver accesses through the same
        // atomic type, and a WQEBB of the queue, which the driver, this thread, is not writing now.
        let (record, wqebb) = unsafe {
            (
                sq.record.as_ref(),
                sq.buffer.add(index * WQEBB).cast().read(),
            )
        };
        Some((queue_record_index(record.load(Ordering::Acquire)), wqebb))
    }

    fn take_register(&self, qpn: u32, fill: u8) -> Option<[u8; REGISTER_BYTES]> {
        let register = self.sq(qpn)?.register?;
        // SAFETY: the register, both halves, in the queue's own memory; the driver is this thread
        // and not writing now.
        Some(unsafe {
            register
                .cast::<[u8; REGISTER_BYTES]>()
                .replace([fill; REGISTER_BYTES])
        })
    }

    fn receive_queue(&self, qpn: u32, index: u16) -> Option<(u16, Vec<u8>)> {
        let RqMemory {
            buffer,
            wqe_cnt,
            stride,
            record,
        } = self.rq(qpn)?;
        let first = (u32::from(index) < wqe_cnt).then_some(index as usize * stride as usize)?;
        // SAFETY: a WQE inside the queue; the driver is this thread and not writing now.
        let wqe = (first..first + stride as usize)
            .map(|byte| unsafe { buffer.add(byte).read() })
            .collect();
        // SAFETY: the record lies in the queue's memory; the driver accesses it through the same
        // atomic type.
        let record = unsafe { record.as_ref() };
        Some((queue_record_index(record.load(Ordering::Acquire)), wqe))
    }

    fn cq_record(&self, cqn: u32) -> Option<[u32; 2]> {
        let record = self.cq(cqn)?.record;
        // SAFETY: the record has two words and lives as long as the queue; the driver accesses them
        // through the same atomic type.
        let words = unsafe { record.as_ref() };
        Some(words.each_ref().map(|word| word.load(Ordering::Acquire)))
    }
}
