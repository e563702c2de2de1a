//! Strict mode: detects mistakes of a driver that a NIC would not report.
//!
//! [`Hca::ring`] gets only the index of a register. The register, the record and the WQEs are read
//! and compared here. Then the register is poisoned, so that the next store to it can be detected.
//! The next empty poll detects WQEs that no doorbell announced. A missing barrier cannot be
//! detected here, because a thread sees its own stores in order.

use mlx5_wire::{
    BLUEFLAME_BYTES, CtrlWords, Header, Piece, SEGMENT, WQEBB, WqeError, announced_bytes,
};

use crate::queues::cq::SoftCq;
use crate::queues::qp::{Mode, SoftQp, blocks, head};
use crate::queues::rqs::RqSlot;
use crate::types::rule::{Queue, Rule, Violation};
use crate::types::watch::QpWatch;
use crate::{Hca, State};

/// Byte that fills a register after it was read.
const POISON: u8 = 0xdb;
pub(crate) fn poison_register(qp: &SoftQp) {
    if let Some(register) = qp.sq.register {
        // SAFETY: `register` points to both halves of the register, which live as long as the queue
        // pair, and which only the storing thread (this thread) accesses.
        unsafe { register.cast().write([POISON; 2 * BLUEFLAME_BYTES]) };
    }
}

/// Checks the doorbell of queue pair `index`, whose register was just written. Returns whether it
/// obeys all rules. If not, the next WQE of the queue pair fails.
#[cold]
pub(crate) fn doorbell(hca: &Hca, state: &mut State, index: usize) -> bool {
    let Some(Some(qp)) = state.queues.qps.get_mut(index) else {
        return false;
    };
    let Some(register) = qp.sq.register else {
        return false;
    };
    // SAFETY: `register` points to both halves of the register, which live as long as the queue
    // pair, and which only the storing thread (this thread) accesses.
    let halves = unsafe {
        register
            .cast::<[[u8; BLUEFLAME_BYTES]; 2]>()
            .replace([[POISON; BLUEFLAME_BYTES]; 2])
    };
    let half = usize::from(halves[0][..8] == [POISON; 8]);
    let register = halves[half];
    let producer = qp.sq.producer();
    // In the error state every WQE is flushed, so none is checked.
    let result = if qp.has_failed() {
        Ok(())
    } else {
        // WQEs are checked first, so that a malformed WQE is not reported as a register mismatch.
        check_room(qp, producer)
            .and_then(|()| check_wqes(qp, producer))
            .and_then(|()| check_register(qp, half, &register, producer))
    };
    qp.watch.half = Some(half);
    qp.watch.notified = producer;
    let Err(violation) = result else { return true };
    break_rule(hca, qp, &mut state.violations, violation);
    false
}

fn break_rule(hca: &Hca, qp: &mut SoftQp, violations: &mut Vec<Violation>, violation: Violation) {
    violations.push(violation);
    qp.watch.broken = Some(violation.rule);
    qp.mode = qp.mode.max(Mode::Exceptional);
    if qp.sq.producer() == qp.sq_limit {
        // No posted WQE is left that could report the violation by its failure.
        qp.break_down(hca);
    }
}

fn check_register(
    qp: &SoftQp,
    half: usize,
    register: &[u8; BLUEFLAME_BYTES],
    producer: u16,
) -> Result<(), Violation> {
    let ctrl = CtrlWords::parse(&head(register));
    let broken = |rule| Violation {
        queue: Queue::Send(qp.qpn),
        index: ctrl.wqe_index().into(),
        bytes: head(register),
        rule,
    };
    if register[..8] == [POISON; 8] {
        return Err(broken(Rule::RegisterNotWritten));
    }
    if ctrl.qpn() != qp.qpn {
        return Err(broken(Rule::RegisterQueue));
    }
    if qp.watch.half == Some(half) {
        return Err(broken(Rule::RegisterHalf));
    }
    let end = ctrl.wqe_index().wrapping_add(blocks(ctrl.ds()).max(1));
    if producer == qp.watch.notified || (producer.wrapping_sub(end) as i16) < 0 {
        return Err(broken(Rule::RecordBehindRegister));
    }
    // The register holds the last WQE, or all new WQEs as a batch. A driver may store only the
    // first 8 bytes of a single WQE; the rest is poison then.
    let announced = announced_bytes(ctrl, producer);
    let compared = if producer == end {
        let is_whole = register[8..SEGMENT] != [POISON; 8];
        announced.filter(|_| is_whole).unwrap_or(8).max(8)
    } else {
        let all = announced.filter(|&all| {
            ctrl.wqe_index() == qp.watch.notified && register[all - WQEBB..][..8] != [POISON; 8]
        });
        all.ok_or_else(|| broken(Rule::RegisterNotLast))?
    };
    let segments = compared.div_ceil(SEGMENT) as u8;
    let is_in_queue = qp.sq.with_bytes(ctrl.wqe_index(), segments, |queue| {
        register[..compared] == queue[..compared]
    });
    if is_in_queue {
        Ok(())
    } else {
        Err(broken(Rule::RegisterBytes))
    }
}

/// Checks that the WQEs up to `producer` are in WQEBBs that the driver could know to be free.
fn check_room(qp: &SoftQp, producer: u16) -> Result<(), Violation> {
    let QpWatch {
        notified,
        reported,
        signaled,
        ..
    } = qp.watch;
    let capacity = qp.sq.capacity();
    if u32::from(producer.wrapping_sub(reported)) <= capacity {
        return Ok(());
    }
    // If no CQE is pending, the ring can never get room: the driver forgot to signal.
    let is_silent = signaled == reported && u32::from(producer.wrapping_sub(notified)) <= capacity;
    let rule = if is_silent {
        Rule::NoCompletion
    } else {
        Rule::RecordBeyondRoom
    };
    Err(of_send(qp, producer, notified, rule))
}

/// Describes a mistake at `index`, and shows the WQE at `counter`.
fn of_send(qp: &SoftQp, index: u16, counter: u16, rule: Rule) -> Violation {
    Violation {
        queue: Queue::Send(qp.qpn),
        index: index.into(),
        bytes: qp.sq.with_bytes(counter, 1, head),
        rule,
    }
}

fn check_wqes(qp: &mut SoftQp, producer: u16) -> Result<(), Violation> {
    let mut counter = qp.watch.notified;
    while counter != producer {
        let ctrl = qp.sq.ctrl(counter);
        let outstanding = producer.wrapping_sub(counter);
        check_wqe(qp, counter, outstanding, ctrl)
            .map_err(|rule| of_send(qp, counter, counter, rule))?;
        counter = counter.wrapping_add(blocks(ctrl.ds()).max(1));
        if ctrl.signaled() {
            qp.watch.signaled = counter;
        }
    }
    if u32::from(producer.wrapping_sub(qp.watch.signaled)) >= qp.sq.capacity() {
        let notified = qp.watch.notified;
        return Err(of_send(qp, producer, notified, Rule::NoCompletion));
    }
    Ok(())
}

fn check_wqe(qp: &SoftQp, counter: u16, outstanding: u16, ctrl: CtrlWords) -> Result<(), Rule> {
    if ctrl.wqe_index() != counter {
        return Err(Rule::WqeIndex);
    }
    if ctrl.qpn() != qp.qpn {
        return Err(Rule::WqeQueue);
    }
    if ctrl.ds() == 0 || blocks(ctrl.ds()) > outstanding {
        return Err(Rule::WqeLength);
    }
    // These bytes and bits must be 0: the modifier of the opcode (byte 0), which no supported
    // opcode has; signature and DCI stream (8..11), which are not used; and the reserved bits of
    // bytes 7 and 11.
    let bytes = qp.sq.with_bytes(counter, 1, head);
    if bytes[0] != 0
        || bytes[8..11] != [0; 3]
        || bytes[11] & 0b0001_0001 != 0
        || bytes[7] & 0b1100_0000 != 0
    {
        return Err(Rule::WqeReserved);
    }
    qp.with_wqe(counter, |wqe| {
        let wqe = wqe.map_err(|error| match error {
            WqeError::Opcode => Rule::WqeOpcode,
            WqeError::Header => Rule::WqeLength,
            WqeError::Inline => Rule::InlineLength,
        })?;
        // An atomic has one result buffer, so its WQE has 4 segments.
        if matches!(wqe.header, Header::Atomic(..)) && ctrl.ds() != 4 {
            return Err(Rule::WqeLength);
        }
        let is_zero = |piece| matches!(piece, Piece::Buffer { len, .. } if len == 1 << 31);
        if wqe.pieces().any(is_zero) {
            return Err(Rule::ZeroLength);
        }
        Ok(())
    })
}

/// Returns whether queue pair `index` has posted WQEs that no doorbell announced. If so, fails the
/// queue pair, so that no thread waits forever for these WQEs.
#[cold]
pub(crate) fn finds_unannounced(hca: &Hca, state: &mut State, index: usize) -> bool {
    let Some(Some(qp)) = state.queues.qps.get_mut(index) else {
        return false;
    };
    let Some(violation) = unannounced(qp) else {
        return false;
    };
    qp.watch.notified = qp.sq.producer();
    if !qp.has_failed() {
        break_rule(hca, qp, &mut state.violations, violation);
    }
    true
}

#[cold]
pub(crate) fn check_queues(state: &mut State) {
    let violations = &mut state.violations;
    for (cqn, cq) in (0..).zip(&mut state.queues.cqs) {
        if let Some((counter, rule)) = cq.as_mut().and_then(SoftCq::broken_rule) {
            let mut bytes = [0; SEGMENT];
            bytes[..4].copy_from_slice(&counter.to_be_bytes());
            violations.push(Violation {
                queue: Queue::Completion(cqn),
                index: counter,
                bytes,
                rule,
            });
        }
    }
    for (rqn, rq) in (0..).zip(&mut state.rqs) {
        let Some(rq) = rq else { continue };
        if let Err(violation) = check_receives(rqn, rq) {
            rq.watch.broken = true;
            violations.push(violation);
        }
    }
}

fn unannounced(qp: &SoftQp) -> Option<Violation> {
    let notified = qp.watch.notified;
    (qp.sq.producer() != notified)
        .then(|| of_send(qp, notified, notified, Rule::RegisterNotWritten))
}

/// Reports the WQEs that no doorbell announced, when a queue pair is destroyed.
pub(crate) fn destroyed(violations: &mut Vec<Violation>, qp: &SoftQp) {
    violations.extend(unannounced(qp).filter(|_| !qp.has_failed()));
}

fn check_receives(rqn: u32, rq: &mut RqSlot) -> Result<(), Violation> {
    let RqSlot {
        watch,
        taken,
        receives,
        ..
    } = rq;
    let posted = receives.posted();
    if watch.broken || posted == watch.checked {
        return Ok(());
    }
    let found = |index: u16, rule| {
        let bytes = receives.first_bytes(index);
        Err(Violation {
            queue: Queue::Receive(rqn),
            index: index.into(),
            bytes,
            rule,
        })
    };
    watch.posted.resize(taken.wqes(), 0);
    let new = posted.wrapping_sub(watch.checked);
    if usize::from(new) > taken.wqes() || receives.available() > receives.capacity() {
        return found(watch.next, Rule::ReceiveBeyondRoom);
    }
    for _ in 0..new {
        let index = watch.next;
        watch.count += 1;
        watch.posted[usize::from(index)] = watch.count;
        if receives
            .segments(index)
            .any(|segment| segment.byte_count() == 0)
        {
            return found(index, Rule::ReceiveZeroLength);
        }
        let next = receives.successor(index);
        // Whether the receive in WQE `next` is still posted: it was posted before (`number` is its
        // last posting, from 1), and no message has taken it.
        let is_posted =
            |number: &u64| *number > 0 && !taken.is_accounted(next, (*number - 1) as u32);
        if receives.is_linked
            && (next == index || watch.posted.get(usize::from(next)).is_none_or(is_posted))
        {
            return found(index, Rule::ReceiveLink);
        }
        watch.next = next;
    }
    watch.checked = posted;
    Ok(())
}
