//! The responder: executes each packet once, in the order of their PSNs, and answers.

use std::collections::VecDeque;

use mlx5_wire::MAX_MESSAGE_BYTES;
use mlx5_wire::roce::{
    Aeth, AtomicEth, Headers, Nak, Opcode, PacketOpcode, Psn, Reth, Syndrome, Transport,
};

use super::held::Held;
use super::message::{ACK_DELAY_NS, MAX_RD_ATOMIC, max_span, packets};

/// Minimum number of answers waiting to be sent at which duplicates get no answer.
const MAX_REPLIES: usize = 16 * MAX_RD_ATOMIC;

/// Maximum number of READs and atomics whose answers wait to be sent, if the peer is a software
/// HCA, which requests a READ in parts.
const MAX_PARTS: usize = 8 * MAX_RD_ATOMIC;

/// Maximum distance, in PSNs, of a late packet of an unreliable connection behind the expected
/// packet (P7 of `packets`). A packet that is further behind counts as a packet of a new round of
/// PSNs.
const MAX_LATE: i32 = 1024;

/// The memory and the receives of an end, on which its responder executes messages.
pub(crate) trait Target {
    /// Takes a receive for the message that begins. Returns whether there was one.
    fn take_receive(&mut self) -> bool;
    /// Places bytes of the message into the receive.
    fn place(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Nak>;
    /// Checks that the peer may access this memory.
    fn check(&mut self, at: &Reth, is_read: bool) -> Result<(), Nak>;
    /// Writes bytes from `offset` of checked memory on.
    fn write(&mut self, at: &Reth, offset: u32, bytes: &[u8]) -> Result<(), Nak>;
    /// Executes an atomic. Returns the value before it.
    fn execute(&mut self, opcode: Opcode, atomic: &AtomicEth) -> Result<u64, Nak>;
    fn complete(&mut self, completion: Completion);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    pub(crate) len: u32,
    pub(crate) imm: Option<u32>,
    pub(crate) is_write: bool,
    pub(crate) is_solicited: bool,
}

/// A response to be sent. Its payload is the checked bytes of `from`, or else `report`, followed by
/// the pad bytes that its BTH announces.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) headers: Headers,
    pub(crate) from: Option<Reth>,
    /// Bits that show which packets this end holds until an earlier packet arrives. The lowest bit
    /// of the first byte is for the first packet that is not acknowledged. Only a software HCA gets
    /// a report, and only if a packet is held.
    pub(crate) report: Vec<u8>,
}

/// The message of which some packets have arrived, but not the last packet.
#[derive(Clone, Copy, Debug)]
enum Current {
    Send { len: u32 },
    Write { to: Reth, len: u32 },
}

/// An answer that waits to be sent, and the number of messages completed before it.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    psn: Psn,
    msn: u32,
    answer: Answer,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    /// An ACK or a NAK.
    Ack(Syndrome),
    /// READ responses that still have to be sent, and whether the next response is the first.
    Read(Reth, bool),
    /// The value before an atomic.
    Atomic(u64),
}

enum Refusal {
    NotReady,
    /// Too many answers wait to be sent, including answers to repeats of earlier requests. The
    /// packet is treated like a lost packet.
    Busy,
    Nak(Nak),
}

impl From<Nak> for Refusal {
    fn from(nak: Nak) -> Self {
        Self::Nak(nak)
    }
}

#[derive(Debug)]
pub(crate) struct Responder {
    /// QPN of the peer.
    qpn: u32,
    mtu: u32,
    /// Code of the time after which the peer repeats a request for which this end had no receive.
    rnr_timer: u8,
    /// Whether the peer is a software HCA, whose packets that arrive early are held and reported.
    is_polled: bool,
    /// The packets after `expected` that arrived early.
    held: Held,
    expected: Psn,
    msn: u32,
    current: Option<Current>,
    /// Whether the network has marked a packet since the last ACK.
    is_marked: bool,
    /// Whether a NAK or an RNR NAK has asked for the expected packet.
    is_asked_for: bool,
    /// The last atomics, with their PSNs and results.
    atomics: VecDeque<(Psn, u64)>,
    answers: VecDeque<Waiting>,
    /// Time of the ACK of messages that did not ask for one, if no other answer is sent before.
    ack_ns: Option<u64>,
    fatal: Option<Nak>,
}

impl Responder {
    pub(crate) fn new(qpn: u32, mtu: u32, rnr_timer: u8, first: Psn, is_polled: bool) -> Self {
        Self {
            qpn,
            mtu,
            rnr_timer,
            is_polled,
            held: Held::default(),
            expected: first,
            msn: 0,
            current: None,
            is_marked: false,
            is_asked_for: false,
            atomics: VecDeque::new(),
            answers: VecDeque::new(),
            ack_ns: None,
            fatal: None,
        }
    }

    /// Returns the NAK that ended the connection, if any.
    pub(crate) const fn fatal(&self) -> Option<Nak> {
        self.fatal
    }

    pub(crate) const fn expected(&self) -> Psn {
        self.expected
    }

    /// Takes a request on an unreliable connection (P7).
    pub(crate) fn on_unreliable(
        &mut self,
        headers: &Headers,
        payload: &[u8],
        target: &mut impl Target,
    ) {
        let psn = headers.bth.psn;
        let (ahead, begins) = (
            psn.since(self.expected),
            headers.opcode.opcode.begins_message(),
        );
        if (-MAX_LATE..0).contains(&ahead) {
            return;
        }
        if ahead != 0 || begins {
            self.current = None;
        }
        // A gap may have any length. After it, only a packet that begins a message can be used. So
        // a forged packet, which changes `expected`, makes at most `MAX_LATE` other packets
        // useless.
        if ahead != 0 && !begins {
            return;
        }
        self.expected = psn;
        if self.execute(headers, payload, target).is_err() {
            self.current = None;
        }
        self.expected = psn.after(1);
        self.answers.clear();
    }

    /// Returns the time at which [`next_reply`](Self::next_reply) answers even without a request.
    pub(crate) const fn due_ns(&self) -> Option<u64> {
        self.ack_ns
    }

    pub(crate) fn on_request(
        &mut self,
        headers: &Headers,
        payload: &[u8],
        target: &mut impl Target,
        now_ns: u64,
    ) {
        if self.fatal.is_some() {
            return;
        }
        self.is_marked |= headers.bth.has_fecn;
        let psn = headers.bth.psn;
        match psn.since(self.expected) {
            0 => self.on_expected(headers, payload, target, now_ns),
            ..0 => self.on_duplicate(headers, target),
            _ if self.is_asked_for => {}
            ahead if self.is_polled => {
                if ahead < max_span(self.mtu) as i32 && payload.len() <= self.mtu as usize {
                    self.held.hold(ahead as usize, headers, payload);
                    self.acknowledge();
                }
            }
            _ => {
                self.is_asked_for = true;
                self.answer(self.expected, Syndrome::Nak(Nak::Sequence));
            }
        }
    }

    /// Executes the expected packet, and then the held packets that follow it.
    fn on_expected(
        &mut self,
        headers: &Headers,
        payload: &[u8],
        target: &mut impl Target,
        now_ns: u64,
    ) {
        let (ends_gap, mut before) = (!self.held.is_empty(), self.expected);
        self.on_next(headers, payload, target, now_ns);
        if !ends_gap {
            return;
        }
        while let Some((headers, payload)) = self.held.next(self.expected.since(before) as usize) {
            before = self.expected;
            self.on_next(&headers, &payload, target, now_ns);
        }
        if !self.is_asked_for && self.fatal.is_none() {
            self.acknowledge();
        }
    }

    fn on_next(
        &mut self,
        headers: &Headers,
        payload: &[u8],
        target: &mut impl Target,
        now_ns: u64,
    ) {
        let psn = self.expected;
        self.is_asked_for = false;
        match self.execute(headers, payload, target) {
            // A READ or an atomic has an answer of its own.
            Ok(()) if headers.opcode.opcode as u8 > Opcode::WriteOnlyImm as u8 => {}
            Ok(()) if headers.bth.asks_ack => self.answer(psn, Aeth::ack(0).syndrome),
            Ok(()) if self.current.is_none() => {
                self.ack_ns = self.ack_ns.or(Some(now_ns + ACK_DELAY_NS))
            }
            Ok(()) => {}
            Err(Refusal::NotReady) => {
                // The packets behind this one get no NAK for a gap: after the RNR NAK the peer
                // repeats all of them.
                self.is_asked_for = true;
                self.answer(
                    psn,
                    Syndrome::RnrNak {
                        timer: self.rnr_timer,
                    },
                );
            }
            Err(Refusal::Busy) => {}
            Err(Refusal::Nak(nak)) => {
                self.fatal = Some(nak);
                self.held = Held::default();
                self.answer(psn, Syndrome::Nak(nak));
            }
        }
    }

    fn execute(
        &mut self,
        headers: &Headers,
        payload: &[u8],
        target: &mut impl Target,
    ) -> Result<(), Refusal> {
        let opcode = headers.opcode.opcode;
        match opcode {
            Opcode::ReadRequest => return self.read(headers, target),
            Opcode::CompareSwap | Opcode::FetchAdd => {
                self.may_answer()?;
                let original = target.execute(opcode, &headers.atomic)?;
                if self.atomics.len() == MAX_RD_ATOMIC {
                    self.atomics.pop_front();
                }
                self.atomics.push_back((self.expected, original));
                self.msn += 1;
                self.push(self.expected, Answer::Atomic(original));
                self.expected = self.expected.after(1);
                return Ok(());
            }
            _ => {}
        }
        let is_first = opcode.begins_message();
        let is_write = opcode as u8 >= Opcode::WriteFirst as u8;
        let is_last = match opcode {
            Opcode::SendFirst | Opcode::SendMiddle | Opcode::WriteFirst | Opcode::WriteMiddle => {
                false
            }
            _ if opcode as u8 <= Opcode::WriteOnlyImm as u8 => true,
            _ => return Err(Nak::InvalidRequest.into()),
        };
        let len = payload.len() as u32;
        let is_full = len == self.mtu;
        if !is_last && !is_full || len > self.mtu || is_last && !is_first && len == 0 {
            return Err(Nak::InvalidRequest.into());
        }
        let current = match (self.current, is_first) {
            (None, true) if is_write => {
                if headers.reth.len > 0 {
                    target.check(&headers.reth, false)?;
                }
                Current::Write {
                    to: headers.reth,
                    len: 0,
                }
            }
            (None, true) => Current::Send { len: 0 },
            (Some(current), false) if matches!(current, Current::Write { .. }) == is_write => {
                current
            }
            _ => return Err(Nak::InvalidRequest.into()),
        };
        let needs_receive = if is_write { opcode.has_imm() } else { is_first };
        let imm = opcode.has_imm().then_some(headers.imm);
        let (current, total) = match current {
            Current::Send { len: before } => {
                if needs_receive && !target.take_receive() {
                    return Err(Refusal::NotReady);
                }
                let total = before.checked_add(len).ok_or(Nak::InvalidRequest)?;
                target.place(before, payload)?;
                (Current::Send { len: total }, total)
            }
            Current::Write { to, len: before } => {
                let total = before
                    .checked_add(len)
                    .filter(|total| *total <= to.len)
                    .ok_or(Nak::InvalidRequest)?;
                if is_last && total != to.len {
                    return Err(Nak::InvalidRequest.into());
                }
                if needs_receive && !target.take_receive() {
                    return Err(Refusal::NotReady);
                }
                target.write(&to, before, payload)?;
                (Current::Write { to, len: total }, total)
            }
        };
        self.current = (!is_last).then_some(current);
        self.expected = self.expected.after(1);
        if is_last {
            self.msn += 1;
            if !is_write || imm.is_some() {
                target.complete(Completion {
                    len: total,
                    imm,
                    is_write,
                    is_solicited: headers.bth.is_solicited,
                });
            }
        }
        Ok(())
    }

    fn read(&mut self, headers: &Headers, target: &mut impl Target) -> Result<(), Refusal> {
        self.may_answer()?;
        let from = headers.reth;
        // A longer READ would take more PSNs than can be distinguished as earlier and later PSNs.
        if u64::from(from.len) > MAX_MESSAGE_BYTES {
            return Err(Nak::InvalidRequest.into());
        }
        if from.len > 0 {
            target.check(&from, true)?;
        }
        self.msn += 1;
        self.push(self.expected, Answer::Read(from, true));
        self.expected = self.expected.after(packets(from.len, self.mtu));
        Ok(())
    }

    /// Checks that a READ or an atomic may begin now, and that there is room for its answer.
    fn may_answer(&self) -> Result<(), Refusal> {
        if self.current.is_some() {
            return Err(Nak::InvalidRequest.into());
        }
        let waiting = self
            .answers
            .iter()
            .filter(|waiting| !matches!(waiting.answer, Answer::Ack(_)))
            .count();
        let most = if self.is_polled {
            MAX_PARTS
        } else {
            MAX_RD_ATOMIC
        };
        if waiting < most {
            Ok(())
        } else {
            Err(Refusal::Busy)
        }
    }

    /// Answers a request that was executed before (P5).
    fn on_duplicate(&mut self, headers: &Headers, target: &mut impl Target) {
        if self.answers.len() >= MAX_REPLIES {
            return;
        }
        let psn = headers.bth.psn;
        match headers.opcode.opcode {
            Opcode::ReadRequest => {
                let from = headers.reth;
                let end = psn.after(packets(from.len, self.mtu));
                let is_known = end.since(psn) > 0 && end.since(self.expected) <= 0;
                if is_known && (from.len == 0 || target.check(&from, true).is_ok()) {
                    // Answers to earlier attempts would delay the answer to this attempt.
                    let mtu = self.mtu;
                    self.answers.retain(|waiting| match waiting.answer {
                        Answer::Read(rest, _) => {
                            let rest = waiting.psn.after(packets(rest.len, mtu));
                            waiting.psn.since(psn) < 0 || rest.since(end) > 0
                        }
                        Answer::Ack(_) | Answer::Atomic(_) => true,
                    });
                    self.push(psn, Answer::Read(from, true));
                }
            }
            Opcode::CompareSwap | Opcode::FetchAdd => {
                let waits = self.answers.iter().any(|waiting| {
                    waiting.psn == psn && matches!(waiting.answer, Answer::Atomic(_))
                });
                if let Some(&(_, original)) = self
                    .atomics
                    .iter()
                    .rev()
                    .find(|(known, _)| *known == psn && !waits)
                {
                    self.push(psn, Answer::Atomic(original));
                }
            }
            _ => self.acknowledge(),
        }
    }

    fn acknowledge(&mut self) {
        self.answer(self.expected.after(u32::MAX), Aeth::ack(0).syndrome);
    }

    /// Appends an ACK or a NAK, which acknowledges everything before it. An ACK replaces an ACK
    /// that still waits directly before it.
    fn answer(&mut self, psn: Psn, syndrome: Syndrome) {
        self.ack_ns = None;
        let is_ack = |syndrome| matches!(syndrome, Syndrome::Ack { .. });
        let is_older =
            |last: &mut Waiting| matches!(last.answer, Answer::Ack(last) if is_ack(last));
        if is_ack(syndrome) && self.answers.back_mut().is_some_and(is_older) {
            self.answers.pop_back();
        }
        self.push(psn, Answer::Ack(syndrome));
    }

    fn push(&mut self, psn: Psn, answer: Answer) {
        let msn = self.msn;
        self.answers.push_back(Waiting { psn, msn, answer });
    }

    /// Answers with `nak` the READ whose response with this PSN cannot be sent. No later request is
    /// answered.
    pub(crate) fn refuse(&mut self, psn: Psn, nak: Nak) {
        self.answers.clear();
        self.fatal = Some(nak);
        self.answer(psn, Syndrome::Nak(nak));
    }

    /// Returns the next response to be sent.
    pub(crate) fn next_reply(&mut self, now_ns: u64) -> Option<Reply> {
        if self.ack_ns.is_some_and(|ack_ns| ack_ns <= now_ns) {
            self.acknowledge();
        }
        let Waiting { psn, msn, answer } = self.answers.front_mut()?;
        let transport = Transport::Rc;
        let with = |opcode, psn| Headers {
            aeth: Aeth::ack(*msn),
            ..Headers::new(PacketOpcode { transport, opcode }, self.qpn, psn)
        };
        let mut report = Vec::new();
        let (headers, from) = match answer {
            Answer::Ack(syndrome) => {
                let mut headers = with(Opcode::Acknowledge, *psn);
                headers.aeth.syndrome = *syndrome;
                headers.bth.has_becn = self.is_polled && core::mem::take(&mut self.is_marked);
                if psn.after(1) == self.expected {
                    report = self.held.report();
                    headers.bth.pad = (report.len().wrapping_neg() & 3) as u8;
                }
                (headers, None)
            }
            Answer::Atomic(original) => {
                let mut headers = with(Opcode::AtomicAcknowledge, *psn);
                headers.original = *original;
                (headers, None)
            }
            Answer::Read(from, is_first) => {
                let len = from.len.min(self.mtu);
                let is_last = len == from.len;
                let opcode = match (*is_first, is_last) {
                    (true, true) => Opcode::ReadResponseOnly,
                    (true, false) => Opcode::ReadResponseFirst,
                    (false, true) => Opcode::ReadResponseLast,
                    (false, false) => Opcode::ReadResponseMiddle,
                };
                let mut headers = with(opcode, *psn);
                headers.bth.pad = (len.wrapping_neg() & 3) as u8;
                let part = Some(Reth { len, ..*from });
                if !is_last {
                    (*psn, *is_first) = (psn.after(1), false);
                    *from = Reth {
                        addr: from.addr.wrapping_add(len.into()),
                        len: from.len - len,
                        ..*from
                    };
                    return Some(Reply {
                        headers,
                        from: part,
                        report,
                    });
                }
                (headers, part)
            }
        };
        self.answers.pop_front();
        Some(Reply {
            headers,
            from,
            report,
        })
    }
}

#[cfg(test)]
impl Responder {
    pub(super) fn set_expected(&mut self, expected: Psn) {
        self.expected = expected;
    }

    /// Returns the number of answers and results that the responder keeps.
    pub(super) fn kept(&self) -> usize {
        self.answers.len() + self.atomics.len()
    }
}
