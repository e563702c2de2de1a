//! The requester: go-back-N over the messages that are posted and not complete.

use std::collections::VecDeque;

use mlx5_wire::roce::{Aeth, Headers, Nak, Opcode, Psn, Syndrome};
use mlx5_wire::{Syndrome as Status, rnr_timer_ns};

use super::congestion::Congestion;
use super::message::{GONE, Message, Options, Outgoing, Request, Room, packets};
use super::timer::{Due, Timer};

/// Maximum number of PSNs from the oldest packet that is not acknowledged to the end of the
/// messages that have begun: half of all PSNs.
const MAX_SPAN: u32 = 1 << 23;
/// The retry count that means "forever".
const WITHOUT_END: u8 = 7;

/// The result of taking a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The payload of the response, if it has a payload, is discarded.
    Nothing,
    /// The payload of the response is data of a READ, from this offset on.
    Place { message: u64, offset: u32 },
    /// The value before an atomic operation.
    Original { message: u64, value: u64 },
}

/// The failure of a message. All later messages were flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
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
    /// Number of READs and atomics among the messages that have begun.
    unanswered: usize,
    /// Place in `messages` of the message with the PSN `next`, or an earlier place.
    cursor: usize,
    /// Number of the oldest message that is not complete.
    oldest: u64,
    /// PSN after the messages that have begun.
    end: Psn,
    /// PSN of the next packet to be sent.
    next: Psn,
    /// PSN after the last packet that was sent at least once.
    sent: Psn,
    /// PSN of the oldest packet that is not acknowledged.
    acknowledged: Psn,
    retries: u8,
    rnr_retries: u8,
    /// Whether responses showed that the oldest packet is lost, and it was sent again. Further
    /// responses of this kind then show nothing new.
    is_known_lost: bool,
    timer: Timer,
    /// A packet that was sent once, and the time at which it was sent, in ns.
    timed: Option<(Psn, u64)>,
    congestion: Congestion,
    failure: Option<Failure>,
    /// The failure of a message whose bytes cannot be sent. It fails when the messages before it
    /// are complete, and nothing of it is sent.
    refused: Option<Failure>,
    /// Number of sent packets that were put back to be sent again, including packets that were
    /// answered before they were sent again.
    retransmitted: u64,
}

impl Requester {
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
            is_known_lost: false,
            timer: Timer::new(options.timeout_ns),
            timed: None,
            congestion: Congestion::new(options.window(), first),
            failure: None,
            refused: None,
            retransmitted: 0,
        }
    }

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

    pub(crate) const fn completed(&self) -> u64 {
        self.oldest
    }

    pub(crate) const fn failure(&self) -> Option<Failure> {
        self.failure
    }

    /// Returns the time at which [`Requester::on_time`] has something to do.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        if self.failure.is_some() {
            None
        } else {
            self.timer.due_ns()
        }
    }

    /// Returns the next packet, if it may be sent now.
    pub(crate) fn next_packet(&mut self, now_ns: u64) -> Option<Outgoing> {
        let (in_flight, window) = (self.in_flight(), self.window());
        let may_send = self.failure.is_none() && !self.timer.is_paused() && in_flight < window;
        if !may_send || self.next == self.end && !self.begin() {
            return None;
        }
        let nth = self.place(self.next, self.cursor)?;
        let number = self.oldest + nth as u64;
        if self
            .refused
            .is_some_and(|refused| refused.message <= number)
        {
            return None;
        }
        let message = self.messages[nth];
        // The next part of a READ is requested when the previous part has arrived.
        let is_read = matches!(message.request, Request::Read(_));
        if is_read && self.next != message.first && self.next != self.acknowledged {
            return None;
        }
        self.cursor = nth;
        let again = self.sent.since(self.next);
        let room = Room {
            is_repeat: again > 0,
            is_last: in_flight + 1 == window,
            // A duplicate READ asks for nothing that the peer has not sent before.
            responses: if again > 0 {
                window.min(again as u32)
            } else {
                window
            },
        };
        let packet = message.packet(number, self.next, room, &self.options);
        if self.timed.is_none() && !room.is_repeat {
            self.timed = Some((self.next, now_ns));
        }
        // A READ takes the PSNs of its responses.
        self.next = self.next.after(if is_read {
            packets(packet.headers.reth.len, self.options.mtu)
        } else {
            1
        });
        if self.next.since(self.sent) > 0 {
            self.sent = self.next;
        }
        self.congestion.on_send(self.in_flight());
        if !self.timer.is_running() && !self.options.is_unreliable {
            self.timer.wait(now_ns);
        }
        Some(packet)
    }

    /// Notes that the packet of [`next_packet`](Self::next_packet) was sent. On an unreliable
    /// connection the packet is then complete (P7 of `packets`).
    pub(crate) fn on_sent(&mut self, now_ns: u64) {
        if self.options.is_unreliable {
            self.acknowledge(self.next, now_ns);
        }
    }

    /// Returns the number of PSNs that are under way.
    fn in_flight(&self) -> u32 {
        self.next.since(self.acknowledged) as u32
    }

    /// Returns the maximum number of PSNs under way after which a packet may be sent.
    fn window(&self) -> u32 {
        if self.options.is_unreliable {
            self.options.window()
        } else {
            self.congestion.window()
        }
    }

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

    /// Returns the place of the message with this PSN, at `from` or later, among the messages that
    /// have begun and are not complete.
    fn place(&self, psn: Psn, from: usize) -> Option<usize> {
        (from..self.begun).find(|&nth| psn.since(self.messages[nth].end()) < 0)
    }

    /// Takes a response of the peer, with `len` payload bytes. The caller writes the result to
    /// memory, and then calls [`placed`](Self::placed).
    pub(crate) fn on_response(&mut self, headers: &Headers, len: usize, now_ns: u64) -> Taken {
        let psn = headers.bth.psn;
        // A response to a packet that was not sent, or that is acknowledged already, is old or not
        // from the peer.
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
                    || self.timer.is_paused()
                {
                    return;
                }
                if self.options.rnr_retry < WITHOUT_END
                    && self.rnr_retries >= self.options.rnr_retry
                {
                    return self.fail(Status::RnrRetryExceeded);
                }
                self.rnr_retries = self.rnr_retries.saturating_add(1);
                self.go_back();
                self.timer.pause(now_ns.saturating_add(rnr_timer_ns(timer)));
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

    /// Notes that the result in the response with this PSN is in the program's memory.
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

    /// Completes the messages before `until`. Returns `false` if one of them has no response yet.
    /// The response is lost in that case (P2).
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
        let packets = until.since(self.acknowledged);
        if packets <= 0 {
            return;
        }
        self.acknowledged = until;
        if self.next.since(until) < 0 {
            self.next = until;
            self.congestion.on_needless_repeat();
        }
        self.congestion
            .on_progress(until, packets as u32, self.next);
        self.timer.progress();
        if let Some((_, sent_ns)) = self.timed.take_if(|(psn, _)| until.since(*psn) > 0) {
            self.timer.measured(now_ns.saturating_sub(sent_ns));
        }
        (self.retries, self.rnr_retries, self.is_known_lost) = (0, 0, false);
        if self.next.since(until) > 0 {
            self.timer.wait(now_ns);
        }
    }

    /// Goes back to the oldest packet that is not acknowledged: from there, all is sent again.
    fn go_back(&mut self) {
        (self.next, self.cursor, self.timed) = (self.acknowledged, 0, None);
        self.retransmitted += self.sent.since(self.acknowledged) as u64;
    }

    /// Retries: the oldest packet that is not acknowledged, or its response, is known to be lost.
    fn on_loss(&mut self, now_ns: u64) {
        if !self.is_known_lost {
            self.congestion.on_loss(self.sent);
            self.retry(now_ns);
            self.is_known_lost = true;
        }
    }

    fn retry(&mut self, now_ns: u64) {
        if self.retries < self.options.retry_count {
            self.retries += 1;
            self.go_back();
            self.timer.wait(now_ns);
        } else {
            self.fail(Status::TransportRetryExceeded);
        }
    }

    pub(crate) fn fail(&mut self, status: Status) {
        self.failure = Some(Failure {
            message: self.oldest,
            status,
        });
    }

    /// Fails a message after all messages before it: at once if it is the oldest.
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
        if self.failure.is_some() {
            return;
        }
        let due = self.timer.on_time(now_ns);
        if due.is_some() {
            self.congestion.on_repeat(self.sent);
        }
        match due {
            Some(Due::Repeat) => self.go_back(),
            Some(Due::Retry) => self.retry(now_ns),
            None => {}
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
