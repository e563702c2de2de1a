//! Arrivals: batches, READs of the peer's record, and silence. A *mark* is the flag of a batch by
//! which an end reports that it makes no more calls (G1 of docs/copyrpc-protocol.md).

use super::held::HeldRequest;
use super::rx::Received;
use super::watch::Verdict;
use super::{Event, Held, Hold, Link, Message, Request};
use crate::error::{CallFailure, CloseReason, ProtocolError};
use crate::ring::Payload;
use crate::wire::{
    ALIGNMENT, CallId, FLOW_METADATA_SIZE, FlowWords, GIVEN_UP, Header, PublishedRecord,
    RESPONSE_FLAG, Status, response_capacity,
};

impl<U> Link<U> {
    /// Returns whether to READ the peer's published record now: for flow control (L5 of
    /// docs/copyrpc-protocol.md), because requests wait while the peer is silent (K1), or to check
    /// an idle connection (K4). After READs without new words, a READ for flow control is delayed
    /// by at most 64 calls. If the peer did nothing for too long (K2), the READ reads another word:
    /// see [`Link::asks_activity`]. After posting the READ, call [`Link::read_posted`].
    #[inline(always)]
    pub(crate) fn poll_read(&mut self, now_ns: u64) -> bool {
        // The first check at a time judges the peer's silence, so later checks at the same time
        // skip it.
        let is_new_time = self.watch.is_new_time(now_ns) && self.is_watching();
        if is_new_time || self.idle.probe_is_due || self.wants_read() {
            self.decide_read(now_ns)
        } else {
            false
        }
    }

    #[inline(never)]
    fn decide_read(&mut self, now_ns: u64) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let verdict = if self.is_watching() {
            self.watch.check(now_ns)
        } else {
            Verdict::Wait
        };
        if self.read_in_flight {
            // A starved caller may have a READ in flight at every check, so the verdict is kept for
            // the next check without a READ in flight.
            self.is_suspicious |= verdict == Verdict::Stalled;
            return false;
        }
        // K7: before the peer is given up, a READ checks whether the peer runs a handler.
        self.asks_activity = std::mem::take(&mut self.is_suspicious) || verdict == Verdict::Stalled;
        self.asks_activity
            || verdict == Verdict::Probe
            || self.idle.probe_is_due
            || (self.wants_read()
                && self
                    .backoff
                    .ends_at_this_poll(self.rx.batches_received(), now_ns))
    }

    /// Returns whether the READ that is wanted or in flight reads the activity word of the peer's
    /// context, and not the published record.
    pub(crate) const fn asks_activity(&self) -> bool {
        self.asks_activity
    }

    /// Notes that the READ was posted; the next READ waits for its completion.
    pub(crate) fn read_posted(&mut self) {
        self.stats.reads += 1;
        if self.asks_activity {
            self.stats.probes += 1;
            self.read_in_flight = true;
            return;
        }
        self.read_is_probe = !self.wants_read();
        self.stats.probes += u64::from(self.read_is_probe);
        self.idle.probe_is_due = false;
        self.read_in_flight = true;
        self.note_last_read_posted();
        self.starved = false;
    }

    /// Takes the completed READ of the activity of the peer's context. Ends the connection if the
    /// peer is still silent, runs no handler, and ran none since the last such READ (K7).
    pub(crate) fn on_activity_read(&mut self, activity: u64) {
        self.read_in_flight = false;
        let is_same = std::mem::replace(&mut self.heard_activity, activity) == activity;
        if activity % 2 == 1 {
            self.watch.news();
        } else if !is_same {
            self.watch.doubt();
        } else if self.watch.is_silent() {
            self.close(CloseReason::PeerStalled);
        }
    }

    /// Takes the completed READ of the peer's published record. Returns whether a word of it changed
    /// or counts only now.
    pub(crate) fn on_read_done(&mut self, record: &[u8; FLOW_METADATA_SIZE]) -> bool {
        self.read_in_flight = false;
        if self.closed.is_some() {
            return false;
        }
        let PublishedRecord {
            words,
            heartbeat,
            batches_taken,
        } = PublishedRecord::decode(record);
        let last_read = std::mem::replace(&mut self.last_read, words);
        let (told, floor) = if self.reads_whole_words {
            (words, self.heard_by_read)
        } else {
            (words.min(last_read), FlowWords::default())
        };
        let has_words = words != last_read || told != self.heard_by_read;
        let mut is_news = has_words || heartbeat != self.heard_heartbeat;
        self.heard_heartbeat = heartbeat;
        match self.hear(told, floor) {
            Ok(()) => {
                self.heard_by_read = told;
                is_news |= self.tx.note_taken(batches_taken);
            }
            Err(error) => self.close(error.into()),
        }
        if is_news {
            self.watch.news();
        } else {
            self.watch.idle_probe();
        }
        // A new heartbeat makes no room, so it does not end the pause.
        if has_words {
            self.backoff.news();
        } else if !self.read_is_probe {
            self.backoff.idle_read();
        }
        if self.ending.is_some() {
            self.note_read_done();
        }
        has_words
    }

    /// Takes the completion of the WRITE of a batch with [`Emit::signal`](super::Emit::signal);
    /// these completions arrive in posting order. Returns whether messages wait that a flush may
    /// post now.
    pub(crate) fn on_write_done(&mut self) -> bool {
        self.window.completed()
    }

    /// Takes a receive completion with this immediate. [`Link::next_event`] returns the messages of
    /// the batch.
    #[inline(always)]
    pub(crate) fn on_imm(&mut self, imm: u32) {
        if self.closed.is_some() {
            return;
        }
        self.watch.news();
        self.starved = false;
        let begun = match self.rx.announce(imm) {
            Ok(span) if self.rx.is_parsed_but(span) => self.begin(span),
            Ok(span) => {
                self.rx.put_off(span);
                Ok(())
            }
            Err(error) => Err(error),
        };
        if let Err(error) = begun {
            self.close(error.into());
        }
    }

    /// Returns the next arrived message, if it is of a common kind. With `takes_requests`, requests
    /// are returned here one by one, and not queued for [`Link::take_request`], unless older
    /// requests wait in that queue. The caller must answer each returned request, or hold it with
    /// [`Link::hold`], before the next message is taken.
    #[inline(always)]
    pub(crate) fn next_message(&mut self, takes_requests: bool) -> Message<U> {
        // A connection that has ended is between batches, too, so its end is checked.
        if self.rx.is_between_batches() {
            return if self.closed.is_none() && self.rx.is_done() {
                Message::Done
            } else {
                Message::Other
            };
        }
        let Ok(Received {
            header,
            position,
            message,
            payload_at,
        }) = self.rx.next_message()
        else {
            return Message::Other;
        };
        let payload = Payload::of_message(position, header.len);
        if header.call_id & RESPONSE_FLAG != 0 {
            if header.piggyback == Status::Ok.to_wire() {
                if let Some(user_data) = self
                    .calls
                    .complete_waiting(CallId::from_wire(header.call_id), header.len)
                {
                    self.rx.advance(message);
                    return Message::Reply {
                        user_data,
                        payload,
                        payload_at,
                    };
                }
            }
            return Message::Other;
        }
        let is_other =
            !takes_requests || self.rx.requests.has_untaken() || message > self.limits.message;
        if is_other
            || self
                .reservation
                .claim(
                    u64::from(header.piggyback) * ALIGNMENT,
                    self.limits.internal_allowance,
                )
                .is_err()
        {
            return Message::Other;
        }
        self.rx.advance(message);
        let request = Request {
            hold: Hold::InPlace,
            payload,
            internal_allowance: header.piggyback * ALIGNMENT as u32,
            call_id: header.call_id,
        };
        Message::Request {
            request,
            payload_at,
        }
    }

    /// Returns the next event, arrived requests or an ended call; `None` when all arrivals are
    /// parsed. Ends the pending calls of a closed connection, and the calls that the peer's mark
    /// refuses, one by one.
    pub(crate) fn next_event(&mut self) -> Option<Event<U>> {
        let mut requests = 0;
        loop {
            if self.rx.is_between_batches() || self.closed.is_some() {
                if requests > 0 {
                    return Some(Event::Requests(requests));
                }
                if self.rx.is_done() || !self.begin_next() {
                    return self.end_any();
                }
                continue;
            }
            let Received {
                header,
                position,
                message,
                ..
            } = match self.rx.next_message() {
                Ok(next) => next,
                Err(error) => {
                    self.close(error.into());
                    continue;
                }
            };
            if header.call_id & RESPONSE_FLAG != 0 {
                if requests > 0 {
                    return Some(Event::Requests(requests));
                }
                self.rx.advance(message);
                match self.take_response(&header, position) {
                    Some(event) => return Some(event),
                    None => continue,
                }
            }
            if header.piggyback == GIVEN_UP && header.len == 0 {
                self.rx.advance(message);
                self.rx.requests.give_up(header.call_id);
                continue;
            }
            if let Err(error) = self.claim(&header, message) {
                self.close(error.into());
                continue;
            }
            self.rx.advance(message);
            // The product is the internal allowance in bytes: at most 3/16 of the largest ring, so
            // it fits 32 bits.
            let call_id = header.call_id;
            self.rx.requests.push(HeldRequest {
                position,
                call_id,
                len: header.len,
                internal_allowance: header.piggyback * ALIGNMENT as u32,
            });
            requests += 1;
        }
    }

    #[inline(always)]
    fn begin(&mut self, span: u64) -> Result<(), ProtocolError> {
        let metadata = self.rx.begin(span)?;
        let words = metadata.words;
        if !self.tx.acknowledge_all(words)
            || !self.credit.raise_further(self.tx.size(), words.credit)
        {
            self.hear_by_batch(words.consumer_pos, words.credit, words.batches_received)?;
        }
        self.heard_by_batch = words;
        if metadata.is_closing {
            self.rx.note_closing();
            self.hear_closing(metadata.words.batches_received);
        }
        Ok(())
    }

    /// Begins the next postponed batch. Returns `false` if no batch is postponed, or the connection
    /// has ended.
    #[inline(never)]
    fn begin_next(&mut self) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let begun = match self.rx.next_put_off() {
            Ok(None) => return false,
            Ok(Some(span)) => self.begin(span),
            Err(error) => Err(error),
        };
        if let Err(error) = begun {
            self.close(error.into());
        }
        true
    }

    /// Ends a call that the peer's mark refuses, or a call of a closed connection. Returns `None`
    /// if there is no such call.
    fn end_any(&mut self) -> Option<Event<U>> {
        let refused = self
            .end_refused()
            .map(|user_data| (user_data, CloseReason::ClosedByPeer));
        let (user_data, reason) = refused.or_else(|| {
            self.closed
                .and_then(|reason| Some((self.calls.take_any()?, reason)))
        })?;
        Some(Event::Ended {
            user_data,
            outcome: Err(reason.into()),
        })
    }

    /// Takes the words of a batch in the uncommon cases. The words are separate parameters, so that
    /// the common case does not write them to memory.
    #[inline(never)]
    fn hear_by_batch(
        &mut self,
        consumer_pos: u64,
        credit: u64,
        batches_received: u64,
    ) -> Result<(), ProtocolError> {
        self.hear(
            FlowWords {
                consumer_pos,
                credit,
                batches_received,
            },
            self.heard_by_batch,
        )
    }

    /// Checks and takes the peer's words. No word may be below the word in `floor`, which has the
    /// earlier words of the same channel (T5).
    fn hear(&mut self, words: FlowWords, floor: FlowWords) -> Result<(), ProtocolError> {
        self.tx.acknowledge(words, floor)?;
        self.credit
            .raise(self.tx.size(), words.credit, floor.credit)
    }

    fn claim(&mut self, header: &Header, message: u64) -> Result<(), ProtocolError> {
        let (ring, padded) = (self.rx.size(), message);
        if padded > ring.max_message() {
            return Err(ProtocolError::RequestTooLarge {
                padded,
                max: ring.max_message(),
            });
        }
        self.reservation.claim(
            u64::from(header.piggyback) * ALIGNMENT,
            ring.max_internal_allowance(),
        )
    }

    /// Returns whether [`take_request`](Self::take_request) has a request for the application.
    /// After this end's mark, the requests that arrived are refused instead.
    pub(crate) fn has_request(&self) -> bool {
        self.closed.is_none() && !self.has_marked() && self.rx.requests.has_untaken()
    }

    /// Takes the next request that arrived, in the order of the calls. There are as many requests
    /// as [`Event::Requests`] reported, and none once the mark is posted (G5).
    #[inline]
    pub(crate) fn take_request(&mut self) -> Option<Held> {
        if self.has_marked() {
            None
        } else {
            self.take_any_request()
        }
    }

    #[inline]
    pub(super) fn take_any_request(&mut self) -> Option<Held> {
        self.rx.requests.take().map(Held::WithBytes)
    }

    /// Takes a response. Returns `None` if it matches no waiting call, or if its status is unknown,
    /// which closes the connection.
    fn take_response(&mut self, header: &Header, position: u64) -> Option<Event<U>> {
        let Some(status) = Status::from_wire(header.piggyback) else {
            self.close(ProtocolError::UnknownStatus(header.piggyback).into());
            return None;
        };
        let Some(answered) = self.calls.complete(CallId::from_wire(header.call_id)) else {
            self.stats.stale_responses += 1;
            return None;
        };
        let (len, max) = (header.len, response_capacity(answered.internal_allowance));
        let error = ProtocolError::ResponseTooLarge { len, max };
        let is_too_large = u64::from(len) > max;
        if is_too_large {
            // T7: the call ends with the connection.
            self.close(error.into());
        }
        let Some(user_data) = answered.user_data else {
            self.stats.late_responses += 1;
            return None;
        };
        let outcome = match status {
            _ if is_too_large => Err(CallFailure::Closed(error.into())),
            Status::Ok => Ok(Payload::of_message(position, len)),
            Status::Dropped => Err(CallFailure::Dropped),
            Status::Refused => Err(CallFailure::Refused),
            Status::Closing => Err(CallFailure::NotSent),
            Status::TooLong(len) => Err(CallFailure::ReplyTooLong {
                len: Some(len as usize),
            }),
        };
        Some(Event::Ended { user_data, outcome })
    }
}
