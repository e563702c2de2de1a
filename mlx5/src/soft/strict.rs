//! Strict mode: what a driver must not do, and what a NIC would punish by doing nothing, or the wrong thing, without a word.
//!
//! A doorbell's hook says only that *a* register was written; what, and whether the record and the WQEs fit it, is read here. Then the
//! register is poisoned, so that the next store to it is seen for what it is. What nobody announces is found at the next progress.
//! A missing barrier cannot be found here: the stores of a thread are seen by itself in order.

use std::fmt;

use super::queues::{REGISTER_BYTES, SoftQp};
use super::receive::RqSlot;
use super::{Hca, State, execute};
use crate::doorbell::BF_BYTES;
use crate::wire::{
    AtomicSegment, CtrlSegment, CtrlWords, DataSegment, DatagramSegment, InlineHeader, Opcode, RaddrSegment, SEGMENT, WQEBB,
};

/// A rule of the interface between driver and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u8)]
#[non_exhaustive]
pub enum Rule {
    /// PRM "Posting a Work Request": first the record, then the register.
    #[error("the doorbell record does not cover the WQE that the register announces: it was not written, or written late")]
    RecordBehindRegister = 1,
    /// The record alone starts nothing.
    #[error("the doorbell record moved and no register was written")]
    RegisterNotWritten,
    /// The device may take the WQE from the register instead of the queue.
    #[error("the register does not hold what the send queue holds")]
    RegisterBytes,
    /// The two halves of a BlueFlame register are used by turns.
    #[error("the same half of the BlueFlame register was written twice in a row")]
    RegisterHalf,
    /// A register names its queue pair.
    #[error("the register names another queue pair than the one it belongs to")]
    RegisterQueue,
    /// The device has not told that those WQEs are done.
    #[error("the doorbell record is further ahead than there are free WQEBBs: WQEs were overwritten")]
    RecordBeyondRoom,
    /// Nobody will ever be told that the queue has room again.
    #[error("a whole send queue of WQEs without the completion bit")]
    NoCompletion,
    /// The WQE was not written for this place: it is stale.
    #[error("the index in the WQE is not its place in the queue: a stale or unposted WQE")]
    WqeIndex,
    /// A WQE names its queue pair.
    #[error("the WQE names another queue pair")]
    WqeQueue,
    /// `ds` counts 16-byte segments.
    #[error("the WQE's length is wrong: none, more than was posted, or not that of its segments")]
    WqeLength,
    /// No such verb.
    #[error("unknown opcode")]
    WqeOpcode,
    /// Reserved bits of the control segment.
    #[error("reserved bits of the control segment are set")]
    WqeReserved,
    /// A length of 0 means 2^31 bytes.
    #[error("a data segment of length 0, which means 2^31 bytes")]
    ZeroLength,
    /// Inline data longer than the WQE.
    #[error("inline data reaches beyond the WQE")]
    InlineLength,
    /// The list of a shared receive queue.
    #[error("the links of the receive queue lead to a WQE that is still posted, or outside")]
    ReceiveLink,
    /// Receives overwritten.
    #[error("the receive record is further ahead than the queue has WQEs")]
    ReceiveBeyondRoom,
    /// A length of 0 means 2^31 bytes; the list ends with lkey 0x100.
    #[error("a receive with a data segment of length 0 that does not end the list")]
    ReceiveZeroLength,
    /// A gathered buffer is the device's until a completion at or after its WQE is visible. Not found in immediate time, nor behind a fence.
    #[error("the source buffer changed between the doorbell and the completion")]
    SourceChanged,
    /// CQEs that were not written cannot have been consumed.
    #[error("the consumer record is ahead of the CQEs written")]
    ConsumerAhead,
}

/// Which queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The send queue of this QPN.
    Send(u32),
    /// This receive queue.
    Receive(u32),
    /// This completion queue.
    Completion(u32),
}

/// A rule broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Where.
    pub queue: Queue,
    /// Counter or index of the entry.
    pub index: u32,
    /// What was found there: the start of the WQE or of the register, or the record.
    pub bytes: [u8; SEGMENT],
    /// What was wrong.
    pub rule: Rule,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.queue {
            Queue::Send(qpn) => write!(f, "send queue of QPN {qpn:#x}"),
            Queue::Receive(rqn) => write!(f, "receive queue {rqn:#x}"),
            Queue::Completion(cqn) => write!(f, "completion queue {cqn:#x}"),
        }?;
        write!(f, ", index {}: {}; found", self.index, self.rule)?;
        self.bytes.iter().try_for_each(|byte| write!(f, " {byte:02x}"))
    }
}

/// What a register half holds that was looked at.
const POISON: u8 = 0xdb;
/// Vendor syndromes of WQEs that failed by a rule: this plus the rule.
pub(crate) const VENDOR: u8 = 0x40;

/// What strict mode remembers of a queue pair.
#[derive(Default)]
pub(crate) struct QpWatch {
    /// The record at the last doorbell.
    notified: u16,
    /// Counter behind the last WQE that gave a CQE.
    pub(crate) reported: u16,
    half: Option<usize>,
    /// A rule was broken: the next WQE fails by it.
    pub(crate) broken: Option<Rule>,
}

/// What strict mode remembers of a receive queue.
#[derive(Default)]
pub(crate) struct RqWatch {
    /// The record when last looked at.
    checked: u16,
    /// The next WQE to be posted.
    next: u16,
    /// By WQE, plus 1: number of its last posting.
    posted: Vec<u64>,
    count: u64,
    broken: bool,
}

/// Poisons a new register.
pub(crate) fn poison_register(qp: &SoftQp) {
    // SAFETY: the queue pair's own memory; the register is its first bytes.
    unsafe { qp.memory.at::<[u8; REGISTER_BYTES]>(0).write([POISON; REGISTER_BYTES]) };
}

/// The register of queue pair `index` was written at `offset`. Whether everything is as it must be; else the queue pair's next WQE fails.
#[cold]
pub(crate) fn doorbell(hca: &Hca, state: &mut State, index: usize, offset: usize) -> bool {
    let State { qps, violations, .. } = state;
    let Some(Some(qp)) = qps.get_mut(index) else { return false };
    let half = offset / BF_BYTES * BF_BYTES;
    // SAFETY: half a register, which only the storing thread (this one) accesses.
    let register = unsafe {
        let at = qp.memory.at::<[u8; BF_BYTES]>(half);
        let bytes = at.read();
        at.write([POISON; BF_BYTES]);
        bytes
    };
    let producer = qp.sq_producer();
    let result = check_register(qp, half, &register, producer).and_then(|()| check_wqes(qp, producer));
    qp.watch.half = Some(half);
    qp.watch.notified = producer;
    let Err(violation) = result else { return true };
    break_rule(hca, qp, violations, violation);
    execute::announce_all(hca, state, index);
    false
}

fn break_rule(hca: &Hca, qp: &mut SoftQp, violations: &mut Vec<Violation>, violation: Violation) {
    violations.push(violation);
    qp.watch.broken = Some(violation.rule);
    qp.is_odd = true;
    if qp.sq_producer() == qp.sq_limit {
        // Nothing is posted that could fail.
        qp.fail(hca);
    }
}

pub(crate) fn head(bytes: &[u8]) -> [u8; SEGMENT] {
    bytes.first_chunk().copied().unwrap_or([0; SEGMENT])
}

fn check_register(qp: &SoftQp, half: usize, register: &[u8; BF_BYTES], producer: u16) -> Result<(), Violation> {
    let ctrl = CtrlWords::parse(&head(register));
    let broken = |rule| Violation { queue: Queue::Send(qp.qpn), index: ctrl.wqe_index().into(), bytes: head(register), rule };
    if register[..8] == [POISON; 8] {
        return Err(broken(Rule::RegisterNotWritten));
    }
    if ctrl.qpn() != qp.qpn {
        return Err(broken(Rule::RegisterQueue));
    }
    if qp.watch.half == Some(half) {
        return Err(broken(Rule::RegisterHalf));
    }
    let end = ctrl.wqe_index().wrapping_add(execute::blocks(ctrl));
    if producer == qp.watch.notified || producer != end {
        return Err(broken(Rule::RecordBehindRegister));
    }
    // 8 bytes, or the whole WQE: then nothing of it is poison.
    let whole = usize::from(ctrl.ds()) * SEGMENT;
    let is_whole = register[8..SEGMENT] != [POISON; 8];
    let compared = if is_whole && whole <= BF_BYTES { whole } else { 8 };
    let queue = bytes_of(qp, ctrl.wqe_index(), compared);
    if register[..compared] != queue[..compared] {
        return Err(broken(Rule::RegisterBytes));
    }
    Ok(())
}

/// The first `len` bytes of the WQE at `counter`, 1,024 at most; it may wrap.
pub(crate) fn bytes_of(qp: &SoftQp, counter: u16, len: usize) -> [u8; 16 * WQEBB] {
    let mut bytes = [0; 16 * WQEBB];
    for (block, out) in bytes.chunks_mut(WQEBB).take(len.div_ceil(WQEBB)).enumerate() {
        // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and the completion.
        out.copy_from_slice(&unsafe { qp.wqebb(counter.wrapping_add(block as u16)).cast::<[u8; WQEBB]>().read() });
    }
    bytes
}

fn check_wqes(qp: &SoftQp, producer: u16) -> Result<(), Violation> {
    let mut counter = qp.watch.notified;
    let capacity = u32::from(qp.sq_mask) + 1;
    if u32::from(producer.wrapping_sub(qp.watch.reported)) > capacity {
        let is_silent = u32::from(qp.sq_consumer.wrapping_sub(qp.watch.reported)) >= capacity / 2;
        let rule = if is_silent { Rule::NoCompletion } else { Rule::RecordBeyondRoom };
        return Err(Violation { queue: Queue::Send(qp.qpn), index: producer.into(), bytes: head(&bytes_of(qp, counter, SEGMENT)), rule });
    }
    while counter != producer {
        let bytes = bytes_of(qp, counter, 16 * WQEBB);
        let ctrl = CtrlWords::parse(&head(&bytes));
        let blocks = execute::blocks(ctrl);
        check_wqe(qp, counter, producer.wrapping_sub(counter), ctrl, &bytes).map_err(|rule| Violation {
            queue: Queue::Send(qp.qpn),
            index: counter.into(),
            bytes: head(&bytes),
            rule,
        })?;
        counter = counter.wrapping_add(blocks);
    }
    Ok(())
}

fn check_wqe(qp: &SoftQp, counter: u16, outstanding: u16, ctrl: CtrlWords, bytes: &[u8; 16 * WQEBB]) -> Result<(), Rule> {
    if ctrl.wqe_index() != counter {
        return Err(Rule::WqeIndex);
    }
    if ctrl.qpn() != qp.qpn {
        return Err(Rule::WqeQueue);
    }
    let len = usize::from(ctrl.ds()) * SEGMENT;
    if ctrl.ds() == 0 || execute::blocks(ctrl) > outstanding || len > bytes.len() {
        return Err(Rule::WqeLength);
    }
    // Signature and DCI stream are not used; of byte 11, bit 0 and bit 4 mean nothing.
    if bytes[8..11] != [0; 3] || bytes[11] & 0b0001_0001 != 0 || bytes[7] & 0b1100_0000 != 0 {
        return Err(Rule::WqeReserved);
    }
    let header = CtrlSegment::LEN
        + match Opcode::from_wire(ctrl.opcode()).ok_or(Rule::WqeOpcode)? {
            // A NOP may have any length, and what is behind its control segment means nothing.
            Opcode::Nop => return Ok(()),
            Opcode::Send | Opcode::SendImm if qp.is_datagram() => DatagramSegment::LEN,
            Opcode::Send | Opcode::SendImm => 0,
            Opcode::RdmaWrite | Opcode::RdmaWriteImm | Opcode::RdmaRead => RaddrSegment::LEN,
            Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd => RaddrSegment::LEN + AtomicSegment::LEN,
        };
    let mut data = bytes[..len].get(header..).ok_or(Rule::WqeLength)?;
    while let Some((segment, behind)) = data.split_first_chunk::<SEGMENT>() {
        data = match InlineHeader::parse(&[segment[0], segment[1], segment[2], segment[3]]) {
            Some(inline) => data.get(InlineHeader::segments(inline.byte_count as usize) * SEGMENT..).ok_or(Rule::InlineLength)?,
            None if DataSegment::parse(segment).byte_count == 0 => return Err(Rule::ZeroLength),
            None => behind,
        };
    }
    Ok(())
}

/// What nobody announced: looked for at every progress.
#[cold]
pub(crate) fn progress(hca: &Hca, state: &mut State) {
    let State { qps, cqs, rqs, violations, .. } = state;
    for qp in qps.iter_mut().flatten() {
        if let Some(violation) = unannounced(qp) {
            qp.watch.notified = qp.sq_producer();
            break_rule(hca, qp, violations, violation);
        }
    }
    for (cqn, cq) in (0..).zip(cqs.iter_mut()) {
        if let Some(consumed) = cq.as_mut().and_then(|cq| cq.check_consumer()) {
            let mut bytes = [0; SEGMENT];
            bytes[..4].copy_from_slice(&consumed.to_be_bytes());
            violations.push(Violation { queue: Queue::Completion(cqn), index: consumed, bytes, rule: Rule::ConsumerAhead });
        }
    }
    for (rqn, rq) in (0..).zip(rqs.iter_mut()) {
        let Some(rq) = rq else { continue };
        if let Err(violation) = check_receives(rqn, rq) {
            rq.watch.broken = true;
            violations.push(violation);
        }
    }
}

fn unannounced(qp: &SoftQp) -> Option<Violation> {
    let (notified, producer) = (qp.watch.notified, qp.sq_producer());
    let bytes = head(&bytes_of(qp, notified, SEGMENT));
    let violation = Violation { queue: Queue::Send(qp.qpn), index: notified.into(), bytes, rule: Rule::RegisterNotWritten };
    (producer != notified).then_some(violation)
}

/// A queue pair goes away.
pub(crate) fn destroyed(violations: &mut Vec<Violation>, qp: &SoftQp) {
    violations.extend(unannounced(qp));
}

fn check_receives(rqn: u32, rq: &mut RqSlot) -> Result<(), Violation> {
    let RqSlot { watch, taken, receives, .. } = rq;
    let posted = receives.posted();
    if watch.broken || posted == watch.checked {
        return Ok(());
    }
    let found = |index: u16, rule| {
        let bytes = receives.first_bytes(index);
        Err(Violation { queue: Queue::Receive(rqn), index: index.into(), bytes, rule })
    };
    watch.posted.resize(taken.wqes(), 0);
    let new = posted.wrapping_sub(watch.checked);
    if usize::from(new) > taken.wqes() || receives.available() > receives.capacity() {
        return found(watch.next, Rule::ReceiveBeyondRoom);
    }
    for _ in 0..new {
        let index = watch.next;
        let Some(number) = watch.posted.get_mut(usize::from(index)) else { return found(index, Rule::ReceiveLink) };
        // Posted before, and not yet taken.
        if *number > 0 && !taken.is_accounted(index, (*number - 1) as u32) {
            return found(index, Rule::ReceiveLink);
        }
        watch.count += 1;
        *number = watch.count;
        if receives.segments(index).any(|segment| segment.byte_count == 0) {
            return found(index, Rule::ReceiveZeroLength);
        }
        watch.next = receives.successor(index);
    }
    watch.checked = posted;
    Ok(())
}

impl Hca {
    /// Takes the list of rules broken.
    pub(crate) fn take_violations(&self) -> Vec<Violation> {
        let state = &mut *self.state.borrow_mut();
        if self.strict && self.null.is_none() {
            progress(self, state);
        }
        core::mem::take(&mut state.violations)
    }
}
