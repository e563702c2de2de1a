//! A peer that lies: every lie ends the connection with an error of its own, nothing panics, and
//! every pending call ends exactly once. The batches are written by hand.

use crate::error::{CallFailure, CloseReason, ProtocolError};
use crate::link::{CallKey, Emit, Event, Link, LinkConfig, Request, Window};
use crate::ring::{RingSize, RingView};
use crate::wire::{CallId, FlowMetadata, FlowWords, Header, PublishedRecord};

use super::sim::Memory;

const C: u64 = 2048;
const BATCHES: u32 = 4;

/// An honest end with two calls outstanding (allowance 20 and 200), whose receive ring the test
/// writes.
struct Victim {
    link: Link<u32>,
    /// The call with allowance 20.
    first: CallKey,
    inbox: Vec<Request>,
    recv_view: RingView,
    recv: Memory,
    _send: Memory,
    /// Position of the next batch.
    at: u64,
    /// Words that a correct peer would send.
    words: FlowWords,
    sent: u64,
}

impl Victim {
    fn new() -> Self {
        Self::at(64, true)
    }

    /// Returns a victim whose send ring starts at this position.
    fn at(send_start: u64, reads_whole_words: bool) -> Self {
        let size = RingSize::new(C).unwrap();
        let (send, recv) = (Memory::new(C), Memory::new(C));
        let recv_view = recv.view(size);
        let config = LinkConfig {
            local_credit: C / 4,
            peer_credit: C / 4,
            local_batches: BATCHES,
            peer_batches: BATCHES,
            send_start,
            recv_start: 0,
            keepalive_ns: 0,
            stall_ns: u64::MAX,
            idle_keepalive_ns: u64::MAX,
            idle_timeout_ns: u64::MAX,
            reads_whole_words,
            window: Window::Off,
        };
        let mut link = Link::new(send.view(size), recv_view, &config);
        let first = link.call(&[1; 20], 0, 20).unwrap();
        link.call(&[2; 50], 1, 200).unwrap();
        let mut sent = 0;
        let flushed: Result<(), ()> = link.flush(|emit: Emit| {
            sent += emit.bytes;
            Ok(())
        });
        assert_eq!(flushed, Ok(()));
        let words = FlowWords {
            consumer_pos: send_start,
            credit: C / 4,
            batches_received: 0,
        };
        Self {
            link,
            first,
            inbox: Vec::new(),
            recv_view,
            recv,
            _send: send,
            at: 0,
            words,
            sent,
        }
    }

    /// Puts a batch into the ring and announces `span` bytes. Returns the calls that ended.
    fn deliver(&mut self, batch: &[u8], span: u64) -> Vec<(u32, Result<Vec<u8>, CallFailure>)> {
        self.recv.write(self.at % C, batch);
        self.at += span;
        self.link.on_imm((span / 32) as u32);
        self.take_ended()
    }

    fn take_ended(&mut self) -> Vec<(u32, Result<Vec<u8>, CallFailure>)> {
        let mut ended = Vec::new();
        while let Some(event) = self.link.next_event() {
            match event {
                Event::Requests(count) => self
                    .inbox
                    .extend((0..count).map(|_| self.link.next_request().unwrap())),
                Event::Ended { user_data, outcome } => {
                    assert!(ended.len() < 2, "more calls ended than were made");
                    ended.push((
                        user_data,
                        outcome.map(|payload| self.recv_view.bytes(payload).to_vec()),
                    ));
                }
            }
        }
        ended
    }

    /// Returns a batch with true words and these messages.
    fn batch(&self, messages: &[(Header, &[u8])]) -> Vec<u8> {
        batch(self.words, messages.len() as u32, messages)
    }
}

fn batch(words: FlowWords, message_count: u32, messages: &[(Header, &[u8])]) -> Vec<u8> {
    let metadata = FlowMetadata {
        words,
        message_count,
        is_closing: false,
    };
    let mut bytes = metadata.encode().to_vec();
    for (header, payload) in messages {
        bytes.extend(header.encode());
        bytes.extend(*payload);
        bytes.resize(bytes.len().next_multiple_of(32), 0);
    }
    bytes
}

fn response(index: u32, generation: u32, status: u32, len: u32) -> Header {
    Header {
        call_id: CallId::new(index, generation).to_response(),
        piggyback: status,
        len,
    }
}

fn request(blocks: u32, len: u32) -> Header {
    Header {
        call_id: 77,
        piggyback: blocks,
        len,
    }
}

/// Delivers the batch that `prepare` returns. Asserts that both calls ended once with the error of
/// the connection, and returns the error.
fn punished(prepare: impl FnOnce(&Victim) -> (Vec<u8>, u64)) -> ProtocolError {
    let mut victim = Victim::new();
    let (bytes, span) = prepare(&victim);
    let ended = victim.deliver(&bytes, span);
    let Some(CloseReason::Protocol(error)) = victim.link.closed() else {
        panic!("the lie was believed: {:?}", victim.link.closed());
    };
    assert_eq!(ended.len(), 2);
    let failure = Err(CallFailure::Closed(error.into()));
    assert!(ended.iter().all(|(_, outcome)| *outcome == failure));
    assert!(victim.link.next_event().is_none());
    assert!(victim.link.call(&[], 9, 0).is_err());
    assert!(victim.link.publish().is_none());
    error
}

fn whole(bytes: Vec<u8>) -> (Vec<u8>, u64) {
    let span = bytes.len() as u64;
    (bytes, span)
}

#[test]
fn an_honest_batch_is_believed() {
    let mut victim = Victim::new();
    let payload = [9; 40];
    let messages: [(Header, &[u8]); 3] = [
        (response(1, 0, 0, 40), &payload),
        (request(2, 5), b"hello"),
        (response(0, 0, 1, 0), b""),
    ];
    let bytes = victim.batch(&messages);
    let ended = victim.deliver(&bytes, bytes.len() as u64);
    let expected = [(1, Ok(vec![9; 40])), (0, Err(CallFailure::Dropped))];
    assert_eq!(ended, expected);
    let request = victim.inbox.pop().unwrap();
    let payload = victim.recv_view.bytes(request.payload()).to_vec();
    assert_eq!(payload, b"hello");
    assert_eq!(victim.link.closed(), None);
}

#[test]
fn late_duplicate_and_forged_responses_reach_no_call_and_are_counted() {
    let mut victim = Victim::new();
    let messages: [(Header, &[u8]); 6] = [
        (response(0, 0, 0, 0), b""),
        (response(0, 0, 0, 0), b""),
        (response(1, 1, 0, 0), b""),
        (response(2, 0, 0, 0), b""),
        (response(CallId::MAX_CALLS - 1, 0, 0, 0), b""),
        (response(1, 2_047, 0, 3), b"lie"),
    ];
    let bytes = victim.batch(&messages);
    let ended = victim.deliver(&bytes, bytes.len() as u64);
    assert_eq!(ended, [(0, Ok(vec![]))]);
    assert_eq!(victim.link.stats().stale_responses, 5);
    assert_eq!(victim.link.closed(), None);
    // The slot is used again: the old response does not reach the new call.
    victim.link.call(&[], 2, 0).unwrap();
    let bytes = victim.batch(&[(response(0, 0, 0, 0), b"")]);
    assert!(victim.deliver(&bytes, 64).is_empty());
    let bytes = victim.batch(&[(response(0, 1, 0, 0), b"")]);
    assert_eq!(victim.deliver(&bytes, 64), [(2, Ok(vec![]))]);
}

#[test]
fn a_wrong_immediate_is_refused() {
    for span in [0, C + 32, 137_438_953_440] {
        let error = punished(|victim| (victim.batch(&[]), span));
        assert_eq!(error, ProtocolError::Overrun { span, free: C });
    }
}

#[test]
fn more_batches_than_granted_are_refused() {
    let mut victim = Victim::new();
    for _ in 0..BATCHES {
        let bytes = victim.batch(&[]);
        victim.deliver(&bytes, 32);
        assert_eq!(victim.link.closed(), None);
    }
    let bytes = victim.batch(&[]);
    victim.deliver(&bytes, 32);
    let expected = ProtocolError::TooManyBatches { granted: BATCHES };
    assert_eq!(victim.link.closed(), Some(expected.into()));
}

#[test]
fn bytes_beyond_what_was_published_as_free_are_refused() {
    let mut victim = Victim::new();
    let bytes = victim.batch(&[]);
    victim.deliver(&bytes, 32);
    victim.link.on_imm((C / 32) as u32);
    let expected = ProtocolError::Overrun {
        span: C,
        free: C - 32,
    };
    assert_eq!(victim.link.closed(), Some(expected.into()));
}

#[test]
fn misplaced_batches_and_markers_are_refused() {
    let marker = |victim: &Victim| batch(victim.words, u32::MAX, &[]);
    let error = punished(|victim| (marker(victim), C - 32));
    let expected = ProtocolError::Misplaced {
        offset: 0,
        span: C - 32,
    };
    assert_eq!(error, expected, "a marker short of the ring end");
    let error = punished(|victim| (victim.batch(&[]), C));
    let expected = ProtocolError::Misplaced { offset: 0, span: C };
    assert_eq!(error, expected, "data that touches the ring end");
    let mut victim = Victim::new();
    let bytes = marker(&victim);
    victim.deliver(&bytes, C);
    assert_eq!(victim.link.closed(), None, "a marker in its place");
}

#[test]
fn counts_and_lengths_beyond_the_announced_bytes_are_refused() {
    let error = punished(|victim| whole(batch(victim.words, 1, &[])));
    assert_eq!(error, ProtocolError::MessageCount { count: 1, span: 32 });
    let error = punished(|victim| whole(batch(victim.words, u32::MAX - 1, &[])));
    assert!(matches!(error, ProtocolError::MessageCount { .. }));
    let error = punished(|victim| whole(victim.batch(&[(request(2, 21), b"")])));
    assert_eq!(error, ProtocolError::MessageTooLong { len: 21, left: 32 });
    let error = punished(|victim| whole(victim.batch(&[(request(2, u32::MAX), b"")])));
    assert!(matches!(error, ProtocolError::MessageTooLong { .. }));
    // Two messages of which the first takes the room of both.
    let long = (request(2, 21), &[0; 21][..]);
    let error = punished(|victim| whole(batch(victim.words, 2, &[long])));
    assert_eq!(error, ProtocolError::MessageTooLong { len: 0, left: 0 });
    let error = punished(|victim| whole(batch(victim.words, 1, &[long, long])));
    assert_eq!(error, ProtocolError::TrailingBytes { left: 64 });
    let error = punished(|victim| (victim.batch(&[]), 64));
    assert_eq!(error, ProtocolError::TrailingBytes { left: 32 });
    let error = punished(|victim| {
        let mut bytes = victim.batch(&[]);
        bytes[22] = 1;
        whole(bytes)
    });
    assert_eq!(error, ProtocolError::ReservedNotZero);
}

/// Returns words that cannot be true, in a batch or by a READ.
fn impossible_words() -> Vec<FlowWords> {
    let victim = Victim::new();
    let (truth, sent) = (victim.words, victim.sent);
    let mut lies = Vec::new();
    for consumer_pos in [0, 32, 65, 64 + sent + 32, !31] {
        lies.push(FlowWords {
            consumer_pos,
            ..truth
        });
    }
    // Spent 64 + 256: the balance may be at most a quarter ring.
    for credit in [0, C / 4 - 32, C / 4 + 1, C / 4 + 320 + 32, !31] {
        lies.push(FlowWords { credit, ..truth });
    }
    for batches_received in [2, u64::MAX] {
        lies.push(FlowWords {
            batches_received,
            ..truth
        });
    }
    lies
}

#[test]
fn positions_credit_and_counts_that_cannot_be_true_are_refused_in_batches() {
    for lie in impossible_words() {
        let error = punished(|_| whole(batch(lie, 0, &[])));
        let matches = match error {
            ProtocolError::ConsumerPosition { told, .. } => told == lie.consumer_pos,
            ProtocolError::Credit { told, .. } => told == lie.credit,
            ProtocolError::BatchesReceived { told, .. } => told == lie.batches_received,
            _ => false,
        };
        assert!(matches, "{lie:?}: {error}");
    }
}

#[test]
fn positions_credit_and_counts_that_cannot_be_true_are_refused_in_reads() {
    for words in impossible_words() {
        let record = PublishedRecord {
            words,
            heartbeat: 7,
            batches_taken: 0,
        }
        .encode();
        let mut victim = Victim::new();
        victim.link.read_posted();
        victim.link.on_read_done(&record);
        assert!(victim.link.closed().is_some(), "{record:?}");
        assert_eq!(victim.take_ended().len(), 2);
    }
}

#[test]
fn words_that_go_backwards_are_refused_but_a_batch_older_than_a_read_is_not() {
    let mut victim = Victim::new();
    let newer = FlowWords {
        consumer_pos: 96,
        credit: C / 4 + 32,
        batches_received: 1,
    };
    let older = victim.words;
    let record = PublishedRecord {
        words: newer,
        heartbeat: 0,
        batches_taken: 1,
    };
    victim.link.read_posted();
    victim.link.on_read_done(&record.encode());
    victim.deliver(&batch(older, 0, &[]), 32);
    victim.deliver(&batch(newer, 0, &[]), 32);
    assert_eq!(victim.link.closed(), None, "the READ was faster");
    victim.deliver(&batch(older, 0, &[]), 32);
    assert!(victim.link.closed().is_some(), "batches are in order");
}

/// READs of the Linux driver `rxe` returned both mixed positions: the driver copied the low byte
/// before the store and the other bytes after it.
#[test]
fn a_read_that_mixes_bytes_of_two_positions_tells_neither_too_much_nor_ends_the_connection() {
    for (before, after, mixed) in [
        (0x5794e0, 0x579500, 0x5795e0),
        (0x504ce0, 0x504d00, 0x504de0),
    ] {
        let mut victim = Victim::at(after - 128, false);
        assert_eq!(victim.sent, 128);
        let mut read = |consumer_pos| {
            let words = FlowWords {
                consumer_pos,
                ..victim.words
            };
            victim.link.read_posted();
            victim.link.on_read_done(
                &PublishedRecord {
                    words,
                    heartbeat: 0,
                    batches_taken: 0,
                }
                .encode(),
            );
            assert_eq!(victim.link.closed(), None);
            victim.link.in_flight()
        };
        assert_eq!(
            [before, mixed, after, after].map(&mut read),
            [128, 32, 0, 0]
        );
        // The other way round: low bytes of the new position, and the others of the old one.
        assert_eq!(
            [after & 0xff | before & !0xff, after].map(&mut read),
            [0, 0],
            "what was known stays known"
        );
    }
}

#[test]
fn what_cannot_be_true_is_refused_where_reads_mix_bytes_too() {
    for words in impossible_words() {
        let mut victim = Victim::at(64, false);
        for _ in 0..2 {
            victim.link.read_posted();
            victim.link.on_read_done(
                &PublishedRecord {
                    words,
                    heartbeat: 7,
                    batches_taken: 0,
                }
                .encode(),
            );
        }
        let went_back = words.consumer_pos < 64 || words.credit < C / 4;
        assert_eq!(victim.link.closed().is_none(), went_back, "{words:?}");
    }
}

#[test]
fn requests_beyond_their_limits_are_refused() {
    let limit = C / 4 - C / 16;
    for (blocks, available) in [(1, limit), (13, limit), (u32::MAX, limit)] {
        let error = punished(|victim| whole(victim.batch(&[(request(blocks, 0), b"")])));
        let wanted = u64::from(blocks) * 32;
        assert_eq!(error, ProtocolError::Allowance { wanted, available });
    }
    // Twice the largest allowance is more than was granted.
    let pair = [(request(12, 0), &b""[..]), (request(12, 0), b"")];
    let error = punished(|victim| whole(victim.batch(&pair)));
    let overdraft = ProtocolError::Allowance {
        wanted: 384,
        available: 128,
    };
    assert_eq!(error, overdraft);
    // A notice that a call was given up (C5) has no payload.
    let error = punished(|victim| whole(victim.batch(&[(request(0, 1), b"x")])));
    let notice = ProtocolError::Allowance {
        wanted: 0,
        available: limit,
    };
    assert_eq!(error, notice);
    let payload = [0; 245];
    let error = punished(|victim| whole(victim.batch(&[(request(2, 245), &payload)])));
    let too_large = ProtocolError::RequestTooLarge {
        padded: 288,
        max: 256,
    };
    assert_eq!(error, too_large);
}

#[test]
fn responses_beyond_their_limits_are_refused() {
    let payload = [0; 21];
    let error = punished(|victim| whole(victim.batch(&[(response(0, 0, 0, 21), &payload)])));
    assert_eq!(error, ProtocolError::ResponseTooLarge { len: 21, max: 20 });
    let error = punished(|victim| whole(victim.batch(&[(response(0, 0, 4, 0), b"")])));
    assert_eq!(error, ProtocolError::UnknownStatus(4));
}

/// T7 holds for a call whose caller does not wait any more.
#[test]
fn a_late_response_beyond_its_limit_is_refused() {
    let mut victim = Victim::new();
    assert_eq!(victim.link.cancel(victim.first), Some(0));
    let bytes = victim.batch(&[(response(0, 0, 0, 21), &[0; 21])]);
    let ended = victim.deliver(&bytes, 96);
    let error = ProtocolError::ResponseTooLarge { len: 21, max: 20 };
    assert_eq!(victim.link.closed(), Some(error.into()));
    assert_eq!(ended, [(1, Err(CallFailure::Closed(error.into())))]);
}
