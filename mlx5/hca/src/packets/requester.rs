//! The requester: sends the packets of the messages that are posted and not complete, and repeats
//! lost packets. To a software HCA, which holds the packets that follow a lost one, it repeats only
//! the lost packets; to other peers all packets from the first lost one on (go-back-N).

use std::collections::VecDeque;

use mlx5_wire::roce::{Aeth, Headers, Nak, Opcode, Psn, Syndrome};
use mlx5_wire::{Syndrome as Status, rnr_timer_ns};

use super::congestion::{Congestion, Part};
use super::flight::{Flight, State};
use super::message::{GONE, Message, Options, Outgoing, Request, Room, max_span};
use super::timer::{Due, Timer};

/// The number of PSNs from the oldest packet that is not acknowledged to the end of the messages
/// that have begun is below this number: half of all PSNs, since PSNs further apart have no order.
const MAX_SPAN: u32 = 1 << 23;
/// A requester gives up after this number of repeats in a row, if a report that packets cannot
/// arrive came before each of them. One report does not suffice: it may be forged, or concern a
/// packet of an earlier connection.
const MAX_UNREACHABLE: u8 = 3;
/// The retry count that means "forever".
const WITHOUT_END: u8 = 7;

/// The result of taking a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The payload of the response, if it has a payload, is discarded.
    Nothing,
    /// The payload of the response is data of a READ, to be placed at this offset of the message.
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

/// The requests of one end of a connection.
#[derive(Debug)]
pub(crate) struct Requester {
    options: Options,
    messages: VecDeque<Message>,
    /// Number of messages, from the oldest, that have begun: their PSNs are fixed.
    begun: usize,
    /// Number of READs and atomics among the messages that have begun.
    unanswered: usize,
    /// Number of the oldest message that is not complete.
    oldest: u64,
    /// PSN after the messages that have begun.
    end: Psn,
    flight: Flight,
    /// First PSN that the peer's last report of held packets covers: the packet for which the peer
    /// waits.
    missing: Psn,
    retries: u8,
    rnr_retries: u8,
    /// Whether responses showed that the oldest packet is lost, and it was sent again. Further
    /// responses of this kind then show nothing new.
    is_known_lost: bool,
    /// Whether packets were reported as undeliverable since the last repeat; and the number of
    /// repeats in a row that followed such a report.
    is_unreachable: bool,
    unreachable: u8,
    is_peer_gone: bool,
    timer: Timer,
    /// Whether the last response reports that the network marks packets.
    is_marked: bool,
    window: Part,
    /// Time before which no packet is sent because too many were sent at once.
    paced_ns: Option<u64>,
    failure: Option<Failure>,
    /// The failure of a message whose bytes cannot be sent. The message fails when the messages
    /// before it are complete, and nothing of it is sent.
    refused: Option<Failure>,
    /// Number of packets that counted as lost since the last
    /// [`take_retransmitted`](Self::take_retransmitted), including those that were answered before
    /// they were sent again.
    retransmitted: u64,
}

impl Requester {
    pub(crate) fn new(options: Options, first: Psn) -> Self {
        let (limit, queue) = (max_span(options.mtu), options.queue());
        // A window of more packets than a queue holds causes losses. These are expensive if the
        // peer discards all packets after a loss.
        let threshold = if options.is_polled { limit } else { queue };
        Self {
            options,
            messages: VecDeque::new(),
            begun: 0,
            unanswered: 0,
            oldest: 0,
            end: first,
            flight: Flight::new(first),
            missing: first,
            retries: 0,
            rnr_retries: 0,
            is_known_lost: false,
            is_unreachable: false,
            unreachable: 0,
            is_peer_gone: false,
            timer: Timer::new(options.timeout_ns),
            is_marked: false,
            window: Part::new(Congestion::new(limit, threshold, queue), first),
            paced_ns: None,
            failure: None,
            refused: None,
            retransmitted: 0,
        }
    }

    pub(crate) const fn options(&self) -> Options {
        self.options
    }

    /// Lets this requester, which has sent nothing, share the congestion window of another one to
    /// the same device, if both count the same packets. Returns whether they share it.
    pub(crate) fn share_window(&mut self, other: &Self) -> bool {
        let kind = |options: &Options| (options.mtu, options.is_polled, options.is_unreliable);
        let is_alike = kind(&self.options) == kind(&other.options);
        if is_alike {
            self.window.join(&other.window);
        }
        is_alike
    }

    /// Lets the shared window count the packets that this requester has under way.
    fn count(&mut self) {
        match self.failure {
            None => self.window.count(self.flight.counts()),
            Some(_) => self.window.leave(),
        }
    }

    /// Returns the number of packets that counted as lost since the last call.
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
        });
    }

    pub(crate) const fn completed(&self) -> u64 {
        self.oldest
    }

    pub(crate) const fn failure(&self) -> Option<Failure> {
        self.failure
    }

    /// Returns whether the peer answered that its queue pair has failed or was destroyed.
    pub(crate) const fn is_peer_gone(&self) -> bool {
        self.is_peer_gone
    }

    /// Takes a congestion notification.
    pub(crate) const fn on_congestion(&mut self) {
        self.is_marked = true;
    }

    /// Notes a report that packets to the peer cannot arrive.
    pub(crate) const fn on_unreachable(&mut self) {
        self.is_unreachable = true;
    }

    /// Returns whether [`Requester::on_time`] repeats packets at this time.
    pub(crate) fn is_late(&self, now_ns: u64) -> bool {
        let repeat_ns = self.timer.due_ns().filter(|_| !self.timer.is_paused());
        repeat_ns.is_some_and(|due_ns| due_ns <= now_ns)
    }

    /// Returns the time at which [`Requester::on_time`] has something to do.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        if self.failure.is_some() {
            return None;
        }
        let others = [self.flight.due_ns(), self.paced_ns];
        self.timer
            .due_ns()
            .into_iter()
            .chain(others.into_iter().flatten())
            .min()
    }

    /// Returns the next packet, if it may be sent now.
    pub(crate) fn next_packet(&mut self, now_ns: u64) -> Option<Outgoing> {
        self.paced_ns = None;
        let (flying, window) = (self.flight.flying(), self.window.size());
        if self.failure.is_some() || self.timer.is_paused() {
            return None;
        }
        let lost = self.flight.first_lost();
        // A peer that waits for the oldest packet executes and answers nothing else. So this packet
        // is sent again even if the window is full.
        if flying >= window && lost != Some(self.flight.first()) {
            return None;
        }
        let (psn, nth) = match lost {
            Some(psn) => (psn, self.place(psn)?),
            None if self.flight.len() >= max_span(self.options.mtu) => return None,
            None if self.flight.end() == self.end && !self.begin() => return None,
            None => (self.flight.end(), self.begun - 1),
        };
        let (number, message) = (self.oldest + nth as u64, self.messages[nth]);
        if self
            .refused
            .is_some_and(|refused| refused.message <= number)
        {
            return None;
        }
        // A READ takes the PSNs of its responses.
        let mut psns = 1;
        if matches!(message.request, Request::Read(_)) {
            let rest = message.end().since(psn) as u32;
            psns = rest.min(self.part(psn == message.first, lost.is_some())?);
        }
        let round_trip_ns = self.timer.round_trip_ns();
        self.paced_ns = self.window.too_early(psns, round_trip_ns, now_ns);
        if self.paced_ns.is_some() {
            return None;
        }
        let room = Room {
            is_repeat: lost.is_some(),
            asks_ack: [window / 2, window].contains(&(flying + 1)),
            responses: psns,
        };
        if room.is_repeat {
            psns = self.flight.send_again(psns, now_ns);
        } else {
            self.flight.send(psns, now_ns);
        }
        let room = Room {
            responses: psns,
            ..room
        };
        self.count();
        if self.flight.flying() >= window {
            self.window.shared().on_full();
        }
        if !self.timer.is_running() && !self.options.is_unreliable {
            self.timer.wait(now_ns);
        }
        Some(message.packet(number, psn, room, &self.options))
    }

    /// Returns the maximum number of READ responses that the next request may ask for. `None` if
    /// the request must wait.
    fn part(&mut self, is_first: bool, is_repeat: bool) -> Option<u32> {
        let (flying, window) = (self.flight.flying(), self.window.size());
        if !self.options.is_polled {
            // The next part of a READ is requested when the previous part has arrived.
            return (is_first || is_repeat || flying == 0).then_some(window);
        }
        // Small parts would mean many requests, and large parts make the peer send bursts.
        let most = (window / 32).clamp(16, 64);
        let least = if window < 2 * most { window / 4 } else { most };
        let room = if flying < window {
            window - flying
        } else {
            most
        };
        if room < least && !is_repeat {
            self.window.shared().on_full();
            return None;
        }
        Some(room.min(most))
    }

    /// Notes that the packet of [`next_packet`](Self::next_packet) was sent. On an unreliable
    /// connection the packet is then complete (P7 of `packets`).
    pub(crate) fn on_sent(&mut self, now_ns: u64) {
        if self.options.is_unreliable {
            self.acknowledge(self.flight.end(), now_ns);
        }
    }

    fn begin(&mut self) -> bool {
        let span = self.end.since(self.flight.first()) as u32;
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

    /// Returns the place of the message with this PSN among the messages that have begun and are
    /// not complete.
    fn place(&self, psn: Psn) -> Option<usize> {
        let (mut from, mut until) = (0, self.begun);
        while from < until {
            let middle = from.midpoint(until);
            if self.messages[middle].end().since(psn) > 0 {
                until = middle;
            } else {
                from = middle + 1;
            }
        }
        (from < self.begun).then_some(from)
    }

    /// Takes a response of the peer. Unless the result is [`Taken::Nothing`], the caller writes it to
    /// memory, and then calls [`placed`](Self::placed), or [`refuse`](Self::refuse) if it cannot.
    pub(crate) fn on_response(&mut self, headers: &Headers, payload: &[u8], now_ns: u64) -> Taken {
        let psn = headers.bth.psn;
        let opcode = headers.opcode.opcode;
        // A response to a packet that was not sent, or that is acknowledged already, is old or not
        // from the peer. An ACK of the last acknowledged packet is taken, because it may report
        // packets that the peer holds.
        let oldest = -i32::from(opcode == Opcode::Acknowledge);
        if self.failure.is_some()
            || psn.since(self.flight.first()) < oldest
            || psn.since(self.flight.end()) >= 0
        {
            return Taken::Nothing;
        }
        // FECN on a response with a payload, such as READ data, means congestion on the path of the
        // data. On any other response it concerns only the path of ACKs, and is ignored.
        self.is_marked |= headers.bth.has_becn || headers.bth.has_fecn && !payload.is_empty();
        match opcode {
            Opcode::Acknowledge => {
                self.on_ack(psn, headers.aeth, payload, now_ns);
                Taken::Nothing
            }
            Opcode::AtomicAcknowledge => self.on_answer(psn, None, headers.original, now_ns),
            opcode if opcode.is_response() => self.on_answer(psn, Some(payload.len()), 0, now_ns),
            _ => Taken::Nothing,
        }
    }

    fn on_ack(&mut self, psn: Psn, aeth: Aeth, report: &[u8], now_ns: u64) {
        if let Syndrome::Ack { .. } = aeth.syndrome {
            if self.options.is_polled {
                self.take_report(psn.after(1), report, now_ns);
            }
            return self.acknowledge(psn.after(1), now_ns);
        }
        self.acknowledge(psn, now_ns);
        if psn != self.flight.first() {
            return;
        }
        match aeth.syndrome {
            // A duplicate of the NAK, while the requester waits, changes nothing.
            Syndrome::RnrNak { .. } if self.timer.is_paused() => {}
            Syndrome::RnrNak { timer } => {
                if self.options.rnr_retry < WITHOUT_END
                    && self.rnr_retries >= self.options.rnr_retry
                {
                    return self.fail(Status::RnrRetryExceeded);
                }
                self.rnr_retries = self.rnr_retries.saturating_add(1);
                self.lose_all(false);
                self.timer.pause(now_ns.saturating_add(rnr_timer_ns(timer)));
            }
            Syndrome::Nak(Nak::Sequence) => self.on_loss(now_ns),
            Syndrome::Nak(refusal) => self.fail(refusal.into()),
            Syndrome::Reserved(GONE) if self.options.is_polled => {
                self.is_peer_gone = true;
                self.fail(Status::TransportRetryExceeded);
            }
            Syndrome::Ack { .. } | Syndrome::Reserved(_) => {}
        }
    }

    /// Takes a report of the peer: a bit for each packet from `first` on, which is set if the peer
    /// holds the packet.
    fn take_report(&mut self, first: Psn, report: &[u8], now_ns: u64) {
        if !report.is_empty() {
            self.missing = first;
        }
        let bits = report
            .iter()
            .flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1));
        for (nth, _) in bits.enumerate().filter(|(_, bit)| *bit == 1) {
            let psn = first.after(nth as u32);
            let (Some(State::Flying | State::Lost), Some(place)) =
                (self.flight.state(psn), self.place(psn))
            else {
                continue;
            };
            let message = self.messages[place];
            if message.request.has_response() {
                self.flight.hold_request(psn, message.end(), now_ns);
            } else {
                self.flight.arrive(psn, psn.after(1), State::Held, now_ns);
            }
        }
    }

    /// Takes a READ response of this length, or the answer to an atomic.
    fn on_answer(&mut self, psn: Psn, len: Option<usize>, value: u64, now_ns: u64) -> Taken {
        let Some(nth) = self.place(psn) else {
            return Taken::Nothing;
        };
        let (number, message) = (self.oldest + nth as u64, self.messages[nth]);
        self.acknowledge(message.first, now_ns);
        if !self.options.is_polled && psn.since(self.flight.first()) > 0 {
            self.on_loss(now_ns);
            return Taken::Nothing;
        }
        if matches!(self.flight.state(psn), None | Some(State::Done)) {
            return Taken::Nothing;
        }
        match (message.request, len) {
            (Request::Read(from), Some(len)) => {
                let offset = psn.since(message.first) as u32 * self.options.mtu;
                if len as u32 != (from.len - offset).min(self.options.mtu) {
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
        self.flight.arrive(psn, psn.after(1), State::Done, now_ns);
        self.settle(now_ns);
    }

    /// Notes that the peer has executed everything before `until`. Only their own responses
    /// acknowledge READs and atomics (P2).
    fn acknowledge(&mut self, until: Psn, now_ns: u64) {
        let mut awaits_response = false;
        let mut from = self.flight.first();
        for message in self.messages.range(..self.begun) {
            if message.first.since(until) >= 0 {
                break;
            }
            if message.request.has_response() && !self.options.is_unreliable {
                self.flight.arrive(from, message.first, State::Done, now_ns);
                awaits_response = true;
                from = message.end();
            }
        }
        self.flight.arrive(from, until, State::Done, now_ns);
        self.settle(now_ns);
        if awaits_response && !self.options.is_polled {
            self.on_loss(now_ns);
        }
    }

    /// Completes messages, and adapts the timer and the congestion window, according to the
    /// arrivals that `flight` has noted.
    fn settle(&mut self, now_ns: u64) {
        let before = self.flight.first();
        let arrived = self.flight.take_arrived();
        let first = self.flight.first();
        if arrived.packets > 0 || first != before {
            // While the requester pauses, the peer has refused what counts as lost.
            if arrived.needless > 0
                && !self.timer.is_paused()
                && self.window.on_needless_repeat(arrived.needless)
            {
                self.flight.lose_none();
            }
            if let Some((first_ns, _)) = arrived.sent_ns {
                self.timer.measured(now_ns.saturating_sub(first_ns));
            }
            if std::mem::take(&mut self.is_marked) {
                self.window.shared().on_marks(arrived.packets);
            }
            let round_trip_ns = arrived
                .sent_ns
                .map(|(_, last_ns)| now_ns.saturating_sub(last_ns));
            let counts = self.flight.counts();
            self.window
                .on_progress(counts, arrived.packets, round_trip_ns, now_ns);
            if first != before {
                (self.retries, self.rnr_retries, self.is_known_lost) = (0, 0, false);
                (self.is_unreachable, self.unreachable) = (false, 0);
            }
            if first != before || !self.timer.is_paused() {
                self.timer.progress();
                if self.flight.len() > 0 {
                    self.timer.wait(now_ns);
                }
            }
            while self.begun > 0 && self.messages[0].end().since(first) <= 0 {
                self.complete();
            }
        }
        if self.options.is_polled {
            let lost = self.flight.lose_late(now_ns);
            if lost > 0 {
                self.retransmitted += u64::from(lost);
                if !self.is_request_lost() {
                    self.window.shared().on_loss(lost);
                }
                self.timer.wait(now_ns);
            }
        }
        self.count();
    }

    /// Returns whether the peer waits for a READ or an atomic whose request counts as lost. The
    /// peer has then not sent the responses to it, so their absence is no reason to shrink the
    /// window.
    fn is_request_lost(&self) -> bool {
        let is_read = |place: usize| self.messages[place].request.has_response();
        self.flight.state(self.missing) == Some(State::Lost)
            && self.place(self.missing).is_some_and(is_read)
    }

    fn complete(&mut self) {
        let is_response = self
            .messages
            .pop_front()
            .is_some_and(|message| message.request.has_response());
        self.unanswered -= usize::from(is_response);
        self.begun -= 1;
        self.oldest += 1;
        self.failure = self.failure.or(self
            .refused
            .filter(|refused| refused.message == self.oldest));
    }

    /// Handles a loss that is known: the oldest packet that is not acknowledged, or its response,
    /// is lost, and the peer discards what follows it. Retries, unless the loss was noticed before.
    fn on_loss(&mut self, now_ns: u64) {
        if !self.is_known_lost {
            self.window.on_repeat(true);
            self.retry(now_ns);
            self.is_known_lost = true;
        }
    }

    /// Counts as lost what is not acknowledged. See [`Flight::lose_all`].
    fn lose_all(&mut self, drops_held: bool) {
        self.retransmitted += u64::from(self.flight.lose_all(drops_held));
        self.count();
    }

    fn retry(&mut self, now_ns: u64) {
        if self.retries < self.options.retry_count {
            self.retries += 1;
            self.lose_all(true);
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
        self.count();
    }

    /// Fails a message after all messages before it: at once if it is the oldest.
    pub(crate) fn refuse(&mut self, message: u64, status: Status) {
        let refused = Failure { message, status };
        if message == self.oldest {
            self.failure = Some(refused)
        } else {
            self.refused = Some(refused)
        }
        self.count();
    }

    /// Ends a pause, or sends again what is due at this time.
    pub(crate) fn on_time(&mut self, now_ns: u64) {
        if self.failure.is_some() {
            return;
        }
        if self.flight.due_ns().is_some_and(|due_ns| due_ns <= now_ns) {
            self.settle(now_ns);
        }
        let Some(due) = self.timer.on_time(now_ns) else {
            return;
        };
        self.unreachable = if std::mem::take(&mut self.is_unreachable) {
            self.unreachable + 1
        } else {
            0
        };
        if self.unreachable == MAX_UNREACHABLE {
            return self.fail(Status::TransportRetryExceeded);
        }
        self.window.on_repeat(false);
        match due {
            Due::Repeat => self.lose_all(false),
            Due::Retry => self.retry(now_ns),
        }
    }
}

#[cfg(test)]
impl Requester {
    pub(super) const fn mtu(&self) -> u32 {
        self.options.mtu
    }

    pub(super) fn window(&self) -> u32 {
        self.window.size()
    }

    pub(super) fn requests(&self) -> impl Iterator<Item = &Request> {
        self.messages.iter().map(|message| &message.request)
    }

    pub(super) fn set_rnr_retry(&mut self, rnr_retry: u8) {
        self.options.rnr_retry = rnr_retry;
    }
}
