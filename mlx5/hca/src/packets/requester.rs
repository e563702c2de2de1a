//! The requester: go-back-N over the messages that are posted and not complete.

use std::collections::VecDeque;

use mlx5_wire::roce::{
    Aeth, AtomicEth, Headers, Nak, Opcode, PacketOpcode, Psn, Reth, Syndrome, Transport,
};
use mlx5_wire::{Syndrome as Status, rnr_timer_ns};

use super::message::{ACK_DELAY_NS, GONE, packets};

/// Maximum packets that are sent and not acknowledged. Each window asks for ACKs at its quarters.
const MAX_WINDOW: u32 = 64;
/// Maximum payload of these packets, in bytes: what the default socket buffer of a Linux receiver
/// holds, with its overhead.
const WINDOW_BYTES: u32 = 128 << 10;
/// Maximum PSNs from the oldest packet that is not acknowledged to the end of the messages that
/// have begun: half of all.
const MAX_SPAN: u32 = 1 << 23;
/// Time without an answer before packets are sent again for the first time, in ns, or twice the
/// longest recent one if that is more: far below the time-outs that programs set. Each time doubles
/// it, up to the time-out, which alone counts as a retry.
const FIRST_REPEAT_NS: u64 = 2_000_000;
/// The retry count that means "forever".
const WITHOUT_END: u8 = 7;

/// The properties of a connection that its requester needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// QPN of the peer.
    pub(crate) qpn: u32,
    /// Maximum payload bytes of a packet: 256 to 4096.
    pub(crate) mtu: u32,
    /// Time without an answer before a retry, in ns.
    pub(crate) timeout_ns: u64,
    /// Retries without progress.
    pub(crate) retry_count: u8,
    /// Retries after RNR NAKs; 7: no limit.
    pub(crate) rnr_retry: u8,
    /// Maximum READs and atomics that are not answered: 1 to
    /// [`MAX_RD_ATOMIC`](super::message::MAX_RD_ATOMIC), and no more than the peer keeps.
    pub(crate) rd_atomic: u8,
    /// Unreliable connection: a message is complete when it was sent.
    pub(crate) is_unreliable: bool,
    /// Whether the peer is a software HCA, whose [`GONE`] counts, and which acknowledges what does
    /// not ask for it.
    pub(crate) is_polled: bool,
}

impl Options {
    /// Returns the maximum number of packets that are not acknowledged.
    fn window(&self) -> u32 {
        (WINDOW_BYTES / self.mtu).clamp(8, MAX_WINDOW)
    }

    /// Returns whether the ACK of a message whose completion nobody awaits may come with that of a
    /// later message.
    const fn may_share_acks(&self) -> bool {
        self.is_polled && self.timeout_ns > 2 * ACK_DELAY_NS
    }

    /// Returns the transport service of the packets.
    pub(crate) const fn transport(&self) -> Transport {
        if self.is_unreliable {
            Transport::Uc
        } else {
            Transport::Rc
        }
    }
}

/// A message to be executed by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Send {
        len: u32,
        imm: Option<u32>,
        is_solicited: bool,
    },
    Write {
        to: Reth,
        imm: Option<u32>,
        is_solicited: bool,
    },
    Read(Reth),
    CompareSwap(AtomicEth),
    FetchAdd(AtomicEth),
}

impl Request {
    /// Returns the number of PSNs that it takes.
    const fn packets(&self, mtu: u32) -> u32 {
        match self {
            Self::Send { len, .. } => packets(*len, mtu),
            Self::Write { to, .. } | Self::Read(to) => packets(to.len, mtu),
            Self::CompareSwap(_) | Self::FetchAdd(_) => 1,
        }
    }

    /// Returns whether it is complete with a response of its own, and not with an ACK.
    const fn has_response(&self) -> bool {
        matches!(
            self,
            Self::Read(_) | Self::CompareSwap(_) | Self::FetchAdd(_)
        )
    }
}

/// A posted message.
#[derive(Clone, Copy, Debug)]
struct Message {
    request: Request,
    /// The program gets a completion of it.
    is_signaled: bool,
    /// Its first PSN, once it has begun.
    first: Psn,
    packets: u32,
    /// Number of its READ responses that arrived.
    answered: u32,
}

impl Message {
    fn end(&self) -> Psn {
        self.first.after(self.packets)
    }
}

/// A packet to be sent. Its payload is `len` bytes of the message from `offset` on, and as many pad
/// bytes as its BTH says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outgoing {
    pub(crate) headers: Headers,
    /// Number of the message, in the order of posting, from 0.
    pub(crate) message: u64,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// The result of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Its payload, if it has one, is of no use.
    Nothing,
    /// Its payload is that of a READ from this offset on.
    Place { message: u64, offset: u32 },
    /// The value before an atomic operation.
    Original { message: u64, value: u64 },
}

/// Why a message failed, and all behind it were flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Number of the message.
    pub(crate) message: u64,
    pub(crate) status: Status,
}

/// An end's requests on a connection.
#[derive(Debug)]
pub(crate) struct Requester {
    options: Options,
    messages: VecDeque<Message>,
    /// Number of messages of which a packet was sent.
    begun: usize,
    /// Number of READs and atomics among them.
    unanswered: usize,
    /// Place of the message with the PSN `next`, or a place before it.
    cursor: usize,
    /// Number of the oldest message that is not complete.
    oldest: u64,
    /// PSN behind the messages that have begun.
    end: Psn,
    /// PSN of the next packet to be sent.
    next: Psn,
    /// PSN behind the last packet that was sent at least once.
    sent: Psn,
    /// PSN of the oldest packet that is not acknowledged.
    acknowledged: Psn,
    retries: u8,
    rnr_retries: u8,
    /// Number of repeats since the last progress, before the time-out.
    repeats: u32,
    /// Number of times that the wait before the next repeat is doubled: the repeats since an answer
    /// that was to no repeat (RFC 6298, 5.7).
    backoff: u32,
    /// Longest recent time without progress that ended by itself, in ns.
    quiet_ns: u64,
    /// Time at which the present wait for an answer began.
    wait_ns: u64,
    /// Time at which the next repeat is due.
    repeat_ns: Option<u64>,
    /// Responses showed that the oldest packet is lost, and it was sent again: further ones show
    /// nothing new.
    is_known_lost: bool,
    /// Time at which a retry is due, while packets are under way.
    retry_ns: Option<u64>,
    /// Time until which nothing is sent, after an RNR NAK.
    pause_ns: Option<u64>,
    failure: Option<Failure>,
    /// A message whose bytes cannot be sent: it fails when those before it are complete, and
    /// nothing of it is sent.
    refused: Option<Failure>,
    /// Number of packets that were sent and are sent again, or were to be, when a later answer
    /// came.
    retransmitted: u64,
}

impl Requester {
    /// Makes a requester whose first packet has this PSN.
    pub(crate) fn new(options: Options, first: Psn) -> Self {
        Self {
            options,
            messages: VecDeque::new(),
            begun: 0,
            unanswered: 0,
            cursor: 0,
            oldest: 0,
            end: first,
            next: first,
            sent: first,
            acknowledged: first,
            retries: 0,
            rnr_retries: 0,
            repeats: 0,
            backoff: 0,
            quiet_ns: 0,
            wait_ns: 0,
            repeat_ns: None,
            is_known_lost: false,
            retry_ns: None,
            pause_ns: None,
            failure: None,
            refused: None,
            retransmitted: 0,
        }
    }

    /// Returns its options.
    pub(crate) const fn options(&self) -> Options {
        self.options
    }

    /// Takes the number of packets that were sent again since the last call.
    pub(crate) fn take_retransmitted(&mut self) -> u64 {
        core::mem::take(&mut self.retransmitted)
    }

    /// Returns whether a READ or an atomic is not answered or not even sent.
    pub(crate) fn awaits_response(&self) -> bool {
        self.messages
            .iter()
            .any(|message| message.request.has_response())
    }

    /// Posts a message. The program gets a completion of it if `is_signaled`.
    pub(crate) fn post(&mut self, request: Request, is_signaled: bool) {
        let packets = request.packets(self.options.mtu);
        self.messages.push_back(Message {
            request,
            is_signaled,
            first: self.end,
            packets,
            answered: 0,
        });
    }

    /// Returns the number of messages that are complete.
    pub(crate) const fn completed(&self) -> u64 {
        self.oldest
    }

    /// Returns the failure that ended the connection.
    pub(crate) const fn failure(&self) -> Option<Failure> {
        self.failure
    }

    /// Returns the time at which [`Requester::on_time`] has something to do.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        if self.failure.is_some() {
            None
        } else {
            self.pause_ns
                .or(self.repeat_ns.into_iter().chain(self.retry_ns).min())
        }
    }

    /// Returns the next packet to be sent, if there is one that may be sent.
    pub(crate) fn next_packet(&mut self, now_ns: u64) -> Option<Outgoing> {
        let in_flight = self.next.since(self.acknowledged) as u32;
        let may_send =
            self.failure.is_none() && self.pause_ns.is_none() && in_flight < self.options.window();
        if !may_send || self.next == self.end && !self.begin() {
            return None;
        }
        let nth = self.place(self.next, self.cursor)?;
        if self
            .refused
            .is_some_and(|refused| refused.message <= self.oldest + nth as u64)
        {
            return None;
        }
        let message = self.messages[nth];
        // The next part of a READ is asked for when the part before is here.
        let is_read = matches!(message.request, Request::Read(_));
        if is_read && self.next != message.first && self.next != self.acknowledged {
            return None;
        }
        self.cursor = nth;
        let packet = self.packet(&message, self.oldest + nth as u64);
        // A READ takes the PSNs of its responses.
        self.next = self.next.after(if is_read {
            packets(packet.headers.reth.len, self.options.mtu)
        } else {
            1
        });
        if self.next.since(self.sent) > 0 {
            self.sent = self.next;
        }
        if self.retry_ns.is_none() && !self.options.is_unreliable {
            self.wait(now_ns);
        }
        Some(packet)
    }

    /// Notes that the packet of [`next_packet`](Self::next_packet) was sent (P7).
    pub(crate) fn on_sent(&mut self, now_ns: u64) {
        if self.options.is_unreliable {
            self.acknowledge(self.next, now_ns);
        }
    }

    /// Begins the next message, if there is one that may begin.
    fn begin(&mut self) -> bool {
        let span = self.end.since(self.acknowledged) as u32;
        let Some(message) = self.messages.get_mut(self.begun) else {
            return false;
        };
        let has_response = message.request.has_response();
        if has_response && self.unanswered >= self.options.rd_atomic.into()
            || span + message.packets >= MAX_SPAN
        {
            return false;
        }
        self.unanswered += usize::from(has_response);
        message.first = self.end;
        self.end = message.end();
        self.begun += 1;
        true
    }

    /// Returns the place of the message with this PSN, at `from` or behind it, among those that
    /// have begun and are not complete.
    fn place(&self, psn: Psn, from: usize) -> Option<usize> {
        (from..self.begun).find(|&nth| psn.since(self.messages[nth].end()) < 0)
    }

    /// Makes the packet of a message with the PSN that is next.
    fn packet(&self, message: &Message, number: u64) -> Outgoing {
        let mtu = self.options.mtu;
        let nth = self.next.since(message.first) as u32;
        let (is_first, is_last) = (nth == 0, nth + 1 == message.packets);
        let offset = nth * mtu;
        let part = |is_write, imm: Option<u32>| {
            Opcode::of_message(is_write, is_first, is_last, imm.is_some())
        };
        let (opcode, end) = match message.request {
            Request::Send { len, imm, .. } => (part(false, imm), len),
            Request::Write { to, imm, .. } => (part(true, imm), to.len),
            Request::Read(_) => (Opcode::ReadRequest, offset),
            Request::CompareSwap(_) => (Opcode::CompareSwap, offset),
            Request::FetchAdd(_) => (Opcode::FetchAdd, offset),
        };
        let transport = self.options.transport();
        let opcode = PacketOpcode { transport, opcode };
        let mut headers = Headers::new(opcode, self.options.qpn, self.next);
        match message.request {
            Request::Send { .. } => {}
            Request::Write { to, .. } => headers.reth = to,
            Request::Read(from) => {
                // The rest of this part of it. A part has a window: more responses would be lost in
                // the socket's buffer, and hold up all others.
                let part = self.options.window() * mtu;
                headers.reth = Reth {
                    addr: from.addr.wrapping_add(offset.into()),
                    len: (from.len - offset).min(part - offset % part),
                    ..from
                };
            }
            Request::CompareSwap(atomic) | Request::FetchAdd(atomic) => headers.atomic = atomic,
        }
        if let Request::Send {
            imm, is_solicited, ..
        }
        | Request::Write {
            imm, is_solicited, ..
        } = message.request
        {
            headers.imm = imm.unwrap_or(0);
            headers.bth.is_solicited = is_solicited && is_last;
        }
        let len = (end - offset).min(mtu);
        headers.bth.pad = (len.wrapping_neg() & 3) as u8;
        let is_repeat = self.next.since(self.sent) < 0;
        let may_wait =
            is_first && !message.is_signaled && !is_repeat && self.options.may_share_acks();
        let is_quarter = self.next.get() % (self.options.window() / 4) == 0;
        let asks_ack = is_last && !may_wait || message.request.has_response() || is_quarter;
        headers.bth.asks_ack = asks_ack && !self.options.is_unreliable;
        Outgoing {
            headers,
            message: number,
            offset,
            len,
        }
    }

    /// Takes a response of the peer, with `len` payload bytes. A result is to be
    /// [`placed`](Self::placed).
    pub(crate) fn on_response(&mut self, headers: &Headers, len: usize, now_ns: u64) -> Taken {
        let psn = headers.bth.psn;
        // A response to what was not sent, or was acknowledged: old, or not of the peer.
        if self.failure.is_some() || psn.since(self.acknowledged) < 0 || psn.since(self.sent) >= 0 {
            return Taken::Nothing;
        }
        match headers.opcode.opcode {
            Opcode::Acknowledge => {
                self.on_ack(psn, headers.aeth, now_ns);
                Taken::Nothing
            }
            Opcode::AtomicAcknowledge => self.on_answer(psn, None, headers.original, now_ns),
            opcode if opcode.is_response() => self.on_answer(psn, Some(len), 0, now_ns),
            _ => Taken::Nothing,
        }
    }

    fn on_ack(&mut self, psn: Psn, aeth: Aeth, now_ns: u64) {
        match aeth.syndrome {
            Syndrome::Ack { .. } => {
                self.acknowledge(psn.after(1), now_ns);
            }
            Syndrome::RnrNak { timer } => {
                // A duplicate of the NAK, while the requester waits, changes nothing.
                if !self.acknowledge(psn, now_ns)
                    || psn != self.acknowledged
                    || self.pause_ns.is_some()
                {
                    return;
                }
                if self.options.rnr_retry < WITHOUT_END
                    && self.rnr_retries >= self.options.rnr_retry
                {
                    return self.fail(Status::RnrRetryExceeded);
                }
                self.rnr_retries = self.rnr_retries.saturating_add(1);
                self.go_back(now_ns);
                (self.pause_ns, self.retry_ns, self.repeat_ns) =
                    (Some(now_ns.saturating_add(rnr_timer_ns(timer))), None, None);
            }
            Syndrome::Nak(nak) => {
                if !self.acknowledge(psn, now_ns) || psn != self.acknowledged {
                    return;
                }
                match nak {
                    Nak::Sequence => self.on_loss(now_ns),
                    refusal => self.fail(refusal.into()),
                }
            }
            Syndrome::Reserved(GONE) if self.options.is_polled => {
                if self.acknowledge(psn, now_ns) && psn == self.acknowledged {
                    self.fail(Status::TransportRetryExceeded);
                }
            }
            Syndrome::Reserved(_) => {}
        }
    }

    /// Takes a READ response of this length, or the answer to an atomic.
    fn on_answer(&mut self, psn: Psn, len: Option<usize>, value: u64, now_ns: u64) -> Taken {
        let Some(nth) = self.place(psn, 0) else {
            return Taken::Nothing;
        };
        let (number, message) = (self.oldest + nth as u64, self.messages[nth]);
        if !self.acknowledge(message.first, now_ns) || self.oldest != number {
            return Taken::Nothing;
        }
        let at = psn.since(message.first) as u32;
        match (message.request, len) {
            (Request::Read(from), Some(len)) => {
                let offset = at * self.options.mtu;
                if at > message.answered {
                    self.on_loss(now_ns);
                    return Taken::Nothing;
                }
                if at < message.answered || len as u32 != (from.len - offset).min(self.options.mtu)
                {
                    return Taken::Nothing;
                }
                Taken::Place {
                    message: number,
                    offset,
                }
            }
            (Request::CompareSwap(_) | Request::FetchAdd(_), None) => Taken::Original {
                message: number,
                value,
            },
            _ => Taken::Nothing,
        }
    }

    /// Notes that the result that the response with this PSN brought is in the program's memory.
    pub(crate) fn placed(&mut self, psn: Psn, now_ns: u64) {
        self.progress(psn.after(1), now_ns);
        let Some(message) = self.messages.front_mut() else {
            return;
        };
        message.answered += 1;
        if message.answered == message.packets {
            self.complete();
        }
    }

    /// Completes the messages before `until`. Returns `false` if one of them has no response yet:
    /// the response is lost (P2).
    fn acknowledge(&mut self, until: Psn, now_ns: u64) -> bool {
        while let Some(message) = self.messages.front().filter(|_| self.begun > 0) {
            if message.first.since(until) >= 0 {
                return true;
            }
            if message.request.has_response() {
                self.on_loss(now_ns);
                return false;
            }
            let end = message.end();
            if end.since(until) > 0 {
                self.progress(until, now_ns);
                return true;
            }
            self.progress(end, now_ns);
            self.complete();
        }
        true
    }

    fn complete(&mut self) {
        let is_response = self
            .messages
            .pop_front()
            .is_some_and(|message| message.request.has_response());
        self.unanswered -= usize::from(is_response);
        self.begun -= 1;
        self.cursor = self.cursor.saturating_sub(1);
        self.oldest += 1;
        self.failure = self.failure.or(self
            .refused
            .filter(|refused| refused.message == self.oldest));
    }

    /// Notes that everything before `until` is acknowledged.
    fn progress(&mut self, until: Psn, now_ns: u64) {
        if until.since(self.acknowledged) <= 0 {
            return;
        }
        self.acknowledged = until;
        if self.next.since(until) < 0 {
            self.next = until;
        }
        if self.retry_ns.is_some() && self.repeats == 0 && self.retries == 0 {
            self.quiet_ns =
                (self.quiet_ns - self.quiet_ns / 8).max(now_ns.saturating_sub(self.wait_ns));
            self.backoff = 0;
        }
        (
            self.retries,
            self.rnr_retries,
            self.repeats,
            self.is_known_lost,
            self.pause_ns,
        ) = (0, 0, 0, false, None);
        (self.retry_ns, self.repeat_ns) = (None, None);
        if self.next.since(until) > 0 {
            self.wait(now_ns);
        }
    }

    /// Begins to wait for an answer.
    fn wait(&mut self, now_ns: u64) {
        self.wait_ns = now_ns;
        self.retry_ns = Some(now_ns.saturating_add(self.options.timeout_ns));
        let wait_ns = FIRST_REPEAT_NS
            .max(2 * self.quiet_ns)
            .saturating_mul(1 << self.backoff);
        self.repeat_ns = (wait_ns < self.options.timeout_ns).then(|| now_ns + wait_ns);
    }

    /// Goes back to the oldest packet that is not acknowledged: this one and those behind it are
    /// sent again.
    fn go_back(&mut self, now_ns: u64) {
        (self.next, self.cursor) = (self.acknowledged, 0);
        self.retransmitted += self.sent.since(self.acknowledged) as u64;
        self.wait(now_ns);
    }

    /// Retries, as a response shows that the oldest packet that is not acknowledged, or its
    /// response, is lost.
    fn on_loss(&mut self, now_ns: u64) {
        if !self.is_known_lost {
            self.retry(now_ns);
            self.is_known_lost = true;
        }
    }

    fn retry(&mut self, now_ns: u64) {
        if self.retries < self.options.retry_count {
            self.retries += 1;
            self.go_back(now_ns);
        } else {
            self.fail(Status::TransportRetryExceeded);
        }
    }

    /// Fails the oldest message.
    pub(crate) fn fail(&mut self, status: Status) {
        self.failure = Some(Failure {
            message: self.oldest,
            status,
        });
    }

    /// Fails a message when its turn comes: at once if it is the oldest.
    pub(crate) fn refuse(&mut self, message: u64, status: Status) {
        let refused = Failure { message, status };
        if message == self.oldest {
            self.failure = Some(refused)
        } else {
            self.refused = Some(refused)
        }
    }

    /// Ends a pause, or retries, if that is due at this time.
    pub(crate) fn on_time(&mut self, now_ns: u64) {
        if self.due_ns().is_none_or(|due_ns| due_ns > now_ns) {
            return;
        }
        if self.pause_ns.take().is_some() {
            return;
        }
        if let Some(retry_ns) = self.retry_ns.filter(|retry_ns| *retry_ns > now_ns) {
            self.repeats += 1;
            // As long as it grows the wait is below the time-out.
            self.backoff += 1;
            self.go_back(now_ns);
            // Of the same wait.
            self.retry_ns = Some(retry_ns);
        } else {
            self.retry(now_ns);
        }
    }
}

#[cfg(test)]
impl Requester {
    pub(super) const fn mtu(&self) -> u32 {
        self.options.mtu
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.messages.iter().map(|message| &message.request)
    }

    pub(super) fn set_rnr_retry(&mut self, rnr_retry: u8) {
        self.options.rnr_retry = rnr_retry;
    }
}
