//! How calls end other than by their reply: cancelled, out of time, or given up because the peer
//! does nothing.

use crate::error::{CallError, CallFailure, CloseReason};
use crate::link::past::{Past, Traffic};
use crate::link::{CallKey, LinkConfig, Request};
use crate::ring::RingSize;

use super::defects::{C, answer_all, config, pair, pair_of, rounds_without_read, size};
use super::sim::{End, execute};

fn call(end: &mut End, serial: u64) -> CallKey {
    end.link.call(&[], serial, 0).unwrap()
}

/// C3: the generation in a call id has 11 bits, and the slot freed last is used next. If the slot
/// of a cancelled call were free, the 2,048th call after it would have the same id, while the
/// server still holds the request.
#[test]
fn a_late_response_reaches_no_call_after_any_number_of_others() {
    let size = RingSize::new(1 << 20).unwrap();
    let quarter = size.max_reservation();
    let mut ends = pair_of(
        size,
        &LinkConfig {
            local_credit: quarter,
            peer_credit: quarter,
            ..config()
        },
    );
    let cancelled = call(&mut ends[0], u64::MAX);
    assert_eq!(ends[0].link.cancel(cancelled), Some(u64::MAX));
    rounds_without_read(&mut ends, 1);
    let held = ends[1].inbox.pop_front().unwrap();
    for serial in 0..2_047 {
        call(&mut ends[0], serial);
        rounds_without_read(&mut ends, 1);
        assert_eq!(answer_all(&mut ends[1]), 1, "{serial}");
        let [ended, _] = rounds_without_read(&mut ends, 2);
        assert_eq!(ended.len(), 1);
    }
    // This call has the generation of the cancelled call, and differs from it only by its slot. The
    // call waits while the late response arrives.
    call(&mut ends[0], 2_047);
    rounds_without_read(&mut ends, 1);
    ends[1].link.reply(held, &[1]).unwrap();
    let [ended, _] = rounds_without_read(&mut ends, 2);
    assert_eq!(ended, []);
    assert_eq!(
        (
            ends[0].link.stats().late_responses,
            ends[0].link.stats().stale_responses
        ),
        (1, 0)
    );
    assert_eq!(answer_all(&mut ends[1]), 1);
    let [ended, _] = rounds_without_read(&mut ends, 2);
    assert!(matches!(ended[..], [(2_047, Ok(_))]));
}

#[test]
fn a_cancelled_call_gives_its_data_back_once_and_its_credit_when_it_is_answered() {
    let mut ends = pair(&config());
    let mut calls = Vec::new();
    while let Ok(key) = ends[0].link.call(&[], calls.len() as u64, 212) {
        calls.push(key);
    }
    assert_eq!(ends[0].link.cancel(calls[1]), Some(1));
    assert_eq!(ends[0].link.cancel(calls[1]), None);
    assert_eq!(
        (
            ends[0].link.outstanding_calls(),
            ends[0].link.unanswered_requests()
        ),
        (calls.len() - 1, calls.len())
    );
    assert!(matches!(
        ends[0].link.call(&[], 9, 212),
        Err(CallError::InsufficientCredit(9))
    ));
    rounds_without_read(&mut ends, 1);
    assert_eq!(answer_all(&mut ends[1]), calls.len());
    let [ended, _] = rounds_without_read(&mut ends, 2);
    assert_eq!(
        ended.iter().map(|(serial, _)| *serial).collect::<Vec<_>>(),
        [0]
    );
    assert_eq!(ends[0].link.unanswered_requests(), 0);
    assert_eq!(ends[0].link.credit_balance(), C / 4, "granted again");
    assert_eq!(ends[0].link.cancel(calls[0]), None, "it was answered");
    let stats = ends[0].link.stats();
    assert_eq!(
        (stats.cancelled, stats.late_responses, stats.stale_responses),
        (1, 1, 0)
    );
}

/// C5, for requests whose bytes are in the ring, requests whose bytes were released, and requests
/// that the application has not received.
#[test]
fn the_peer_learns_which_calls_were_given_up() {
    let mut ends = pair(&config());
    let keys: Vec<_> = (0..5).map(|serial| call(&mut ends[0], serial)).collect();
    rounds_without_read(&mut ends, 1);
    let mut requests: Vec<_> = ends[1].inbox.drain(..).collect();
    requests[3] = ends[1].link.without_bytes(requests[3]);
    requests[4] = ends[1].link.without_bytes(requests[4]);
    let given_up = |ends: &[End; 2], requests: &[Request]| {
        let link = &ends[1].link;
        let held = |request: &Request| link.held(request.name()).is_given_up();
        requests.iter().map(held).collect::<Vec<_>>()
    };
    for key in [1, 4, 2] {
        ends[0].link.cancel(keys[key]);
    }
    assert_eq!(given_up(&ends, &requests), [false; 5]);
    // The answer to the last call passes the notice on its way, and the notice has no effect.
    ends[1].link.reply(requests[2], &[]).unwrap();
    rounds_without_read(&mut ends, 2);
    let expected = [false, true, false, false, true];
    assert_eq!(given_up(&ends, &requests)[..2], expected[..2]);
    assert_eq!(given_up(&ends, &requests)[3..], expected[3..]);
    let balance = ends[0].link.credit_balance();
    for nth in [0, 1, 3, 4] {
        ends[1].link.reply(requests[nth], &[]).unwrap();
    }
    let [ended, _] = rounds_without_read(&mut ends, 2);
    assert_eq!(ended.len(), 2, "the calls that wait");
    assert!(ends[0].link.credit_balance() > balance);
    let stats = ends[0].link.stats();
    assert_eq!((stats.notices, stats.late_responses), (3, 3));
    assert_eq!(stats.messages_sent, ends[1].link.stats().messages_received);
    // The places of the requests are used again, without their marks.
    call(&mut ends[0], 5);
    rounds_without_read(&mut ends, 1);
    let request = ends[1].inbox.pop_front().unwrap();
    let request = ends[1].link.without_bytes(request);
    assert_eq!(given_up(&ends, &[request]), [false]);
}

/// C5: a notice waits until the ring has room, and is then sent without another call.
#[test]
fn a_notice_that_finds_no_room_is_sent_when_there_is() {
    let mut ends = pair(&config());
    let mut keys = Vec::new();
    while let Ok(key) = ends[0].link.call(&[7; 100], keys.len() as u64, 0) {
        keys.push(key);
        rounds_without_read(&mut ends, 1);
    }
    let held: Vec<_> = ends[1].inbox.drain(..).collect();
    for key in &keys {
        ends[0].link.cancel(*key);
    }
    rounds_without_read(&mut ends, 2);
    let told = |ends: &[End; 2]| {
        let link = &ends[1].link;
        let is_told = |request: &&Request| link.held(request.name()).is_given_up();
        held.iter().filter(is_told).count()
    };
    let before = told(&ends);
    assert!(before < held.len(), "the ring is full");
    // The bytes of the first half become free.
    let (first, rest) = held.split_at(held.len() / 2);
    first
        .iter()
        .for_each(|request| ends[1].link.reply(*request, &[]).unwrap());
    for _ in 0..70 {
        rounds_without_read(&mut ends, 1);
        ends[0].read_if_wanted(0);
        while execute(&mut ends, 0) {}
        ends[0].take_send_completions();
    }
    let link = &ends[1].link;
    assert!(
        rest.iter()
            .all(|request| link.held(request.name()).is_given_up())
    );
}

#[test]
fn a_deadline_ends_its_call_once_and_the_response_reaches_nobody() {
    let mut ends = pair(&config());
    for (serial, deadline_ns) in [(0, 300), (1, 100), (2, u64::MAX), (3, 200)] {
        ends[0]
            .link
            .call_until(&[], serial, 0, deadline_ns)
            .unwrap();
    }
    rounds_without_read(&mut ends, 1);
    let link = &mut ends[0].link;
    assert_eq!((link.next_deadline(), link.expire(100)), (Some(100), None));
    assert_eq!(
        (link.expire(250), link.expire(250), link.expire(250)),
        (Some(1), Some(3), None)
    );
    assert_eq!(link.next_deadline(), Some(300));
    answer_all(&mut ends[1]);
    let [ended, _] = rounds_without_read(&mut ends, 2);
    assert_eq!(
        ended.iter().map(|(serial, _)| *serial).collect::<Vec<_>>(),
        [0, 2]
    );
    let link = &mut ends[0].link;
    assert_eq!((link.next_deadline(), link.expire(u64::MAX)), (None, None));
    let stats = link.stats();
    assert_eq!((stats.deadlines_exceeded, stats.late_responses), (2, 2));
}

#[test]
fn a_closed_connection_ends_each_call_that_waits_and_no_other() {
    let mut ends = pair(&config());
    let keys: Vec<_> = (0..4)
        .map(|serial| ends[0].link.call_until(&[], serial, 0, 100).unwrap())
        .collect();
    ends[0].link.cancel(keys[2]);
    ends[0].link.close(CloseReason::Disconnected);
    assert_eq!(
        (ends[0].link.expire(u64::MAX), ends[0].link.next_deadline()),
        (None, None)
    );
    assert_eq!(
        ends[0].link.cancel(keys[0]),
        Some(0),
        "before it was handed out"
    );
    let mut ended = Vec::new();
    while let Some(crate::link::Event::Ended { user_data, outcome }) = ends[0].link.next_event() {
        assert_eq!(outcome, Err(CallFailure::Closed(CloseReason::Disconnected)));
        ended.push(user_data);
    }
    ended.sort_unstable();
    assert_eq!(ended, [1, 3]);
}

const STALL_NS: u64 = 100_000;

/// Side 0 reads the clock every 100 ns, its READs are executed at once. Returns the time at which
/// it gave its peer up, if within ten times the timeout.
fn gives_up_after(ends: &mut [End; 2], mut peer: impl FnMut(&mut End, u64)) -> Option<u64> {
    for now_ns in (0..10 * STALL_NS).step_by(100) {
        peer(&mut ends[1], now_ns);
        ends[0].poll(usize::MAX, 1, |_, _| ());
        ends[0].take_send_completions();
        assert!(ends[0].flush(|| true).is_ok());
        ends[0].read_if_wanted(now_ns);
        while execute(ends, 0) {}
        if let Some(reason) = ends[0].link.closed() {
            assert_eq!(reason, CloseReason::PeerStalled);
            return Some(now_ns);
        }
    }
    None
}

fn watchful_pair() -> [End; 2] {
    let mut ends = pair(&LinkConfig {
        stall_ns: STALL_NS,
        ..config()
    });
    call(&mut ends[0], 5);
    ends
}

#[test]
fn a_peer_that_answers_reads_and_does_nothing_else_is_given_up() {
    let mut ends = watchful_pair();
    let at_ns = gives_up_after(&mut ends, |_, _| ()).unwrap();
    assert!((STALL_NS..STALL_NS + 5_000).contains(&at_ns), "{at_ns}");
    let ended = ends[0].link.next_event();
    let Some(crate::link::Event::Ended {
        user_data: 5,
        outcome: Err(CallFailure::Closed(CloseReason::PeerStalled)),
    }) = ended
    else {
        panic!("{ended:?}")
    };
    assert!(ends[0].link.stats().probes >= 50);
}

/// If only waiting callers counted, a caller whose calls all have deadlines would call a stopped
/// peer forever.
#[test]
fn a_stalled_peer_is_given_up_also_when_no_caller_waits_any_more() {
    let mut ends = pair(&LinkConfig {
        stall_ns: STALL_NS,
        ..config()
    });
    let key = call(&mut ends[0], 5);
    ends[0].link.cancel(key);
    assert!(gives_up_after(&mut ends, |_, _| ()).is_some());
}

#[test]
fn a_peer_that_holds_a_request_for_long_is_alive_and_one_that_stops_then_is_not() {
    let mut ends = watchful_pair();
    assert_eq!(gives_up_after(&mut ends, receive_and_sweep), None);
    let mut ends = watchful_pair();
    let stop = |end: &mut End, now_ns| {
        if now_ns < 3 * STALL_NS {
            receive_and_sweep(end, now_ns);
        }
    };
    let at_ns = gives_up_after(&mut ends, stop).unwrap();
    assert!(
        (4 * STALL_NS - 1_000..4 * STALL_NS + 5_000).contains(&at_ns),
        "{at_ns}"
    );
}

fn receive_and_sweep(end: &mut End, now_ns: u64) {
    end.poll(usize::MAX, 1, |_, _| ());
    // A sweep is done at every tenth reading of the clock.
    if now_ns % 1_000 == 0 {
        end.sweep();
    }
}

#[test]
fn an_end_that_owes_nothing_has_no_heartbeat() {
    let mut ends = pair(&config());
    assert_eq!(ends[1].link.beat(), None);
    call(&mut ends[0], 1);
    assert!(ends[0].link.beat().is_some(), "a batch to post");
    rounds_without_read(&mut ends, 1);
    assert_eq!(ends[0].link.beat(), None, "it only waits");
    assert_ne!(ends[1].link.beat(), ends[1].link.beat());
    answer_all(&mut ends[1]);
    rounds_without_read(&mut ends, 2);
    assert_eq!(ends[1].link.beat(), None);
}

#[test]
fn a_ring_without_calls_is_never_watched() {
    let mut ends = pair(&LinkConfig {
        stall_ns: STALL_NS,
        ..config()
    });
    assert_eq!(gives_up_after(&mut ends, |_, _| ()), None);
    assert_eq!(ends[0].link.stats().reads, 0);
}

/// Makes a pair of which side 0 has answered a call of side 1 and waits for nothing, except that
/// side 1 takes the reply.
fn pair_with_a_reply() -> [End; 2] {
    let mut ends = pair(&LinkConfig {
        stall_ns: STALL_NS,
        ..config()
    });
    call(&mut ends[1], 5);
    assert!(ends[1].flush(|| true).is_ok());
    while execute(&mut ends, 1) {}
    ends[0].poll(usize::MAX, 1, |_, _| ());
    assert_eq!(answer_all(&mut ends[0]), 1);
    ends
}

#[test]
fn a_peer_that_does_not_take_its_replies_is_given_up() {
    let at_ns = gives_up_after(&mut pair_with_a_reply(), |_, _| ()).unwrap();
    assert!((STALL_NS..STALL_NS + 5_000).contains(&at_ns), "{at_ns}");
}

/// K6: the peer gave its only call up, and does not poll between calls.
#[test]
fn a_peer_that_gave_its_call_up_need_not_take_the_reply() {
    // The credit that the peer has spent: also values just below the wrap of the number that the
    // peer reports.
    for credit in [0, (1 << 36) - 64, (1 << 36) - 128] {
        let sent = Traffic {
            credit,
            ..Traffic::default()
        };
        let config = LinkConfig {
            stall_ns: STALL_NS,
            ..config()
        };
        let pasts = [
            Past {
                received: sent,
                ..Past::default()
            },
            Past {
                sent,
                ..Past::default()
            },
        ];
        give_up_and_rest(pasts.map(|past| End::with_past(size(), &config, &past)));
    }
}

fn give_up_and_rest(mut ends: [End; 2]) {
    let key = call(&mut ends[1], 5);
    deliver(&mut ends);
    ends[1].link.cancel(key);
    ends[1].publish_rest();
    assert_eq!(answer_all(&mut ends[0]), 1);
    assert_eq!(gives_up_after(&mut ends, |_, _| ()), None);
    // A call that was answered meanwhile changes nothing.
    let held = call(&mut ends[1], 6);
    call(&mut ends[1], 7);
    deliver(&mut ends);
    let late = ends[0].inbox.pop_front().unwrap();
    assert_eq!(answer_all(&mut ends[0]), 1);
    ends[1].link.cancel(held);
    ends[1].publish_rest();
    assert!(ends[0].flush(|| true).is_ok());
    while execute(&mut ends, 0) {}
    let mut answers = Vec::new();
    ends[1].poll(usize::MAX, 1, |serial, _| answers.push(serial));
    ends[1].publish_rest();
    assert_eq!(answers, [7]);
    ends[0].link.reply(late, &[]).unwrap();
    assert_eq!(gives_up_after(&mut ends, |_, _| ()), None);
    // A call that waits makes the peer owe the taking of the reply.
    call(&mut ends[1], 8);
    deliver(&mut ends);
    assert_eq!(answer_all(&mut ends[0]), 1);
    assert!(gives_up_after(&mut ends, |_, _| ()).is_some());
}

/// Delivers the requests of side 1 to side 0.
fn deliver(ends: &mut [End; 2]) {
    assert!(ends[1].flush(|| true).is_ok());
    while execute(ends, 1) {}
    ends[0].poll(usize::MAX, 1, |_, _| ());
}

/// K7: the thread that polls also runs the handlers, so an end does not poll while a handler runs.
#[test]
fn a_peer_in_a_handler_is_kept_for_any_time_and_one_that_stops_after_it_is_not() {
    let mut ends = watchful_pair();
    assert_eq!(gives_up_after(&mut ends, |end, _| end.activity = 1), None);
    let mut ends = watchful_pair();
    let at_ns = gives_up_after(&mut ends, |end, now_ns| {
        end.activity = if now_ns < 3 * STALL_NS { 1 } else { 2 }
    })
    .unwrap();
    assert!((3 * STALL_NS..5 * STALL_NS).contains(&at_ns), "{at_ns}");
    let mut ends = watchful_pair();
    let at_ns = gives_up_after(&mut ends, |end, _| end.activity = 2).unwrap();
    assert!(
        (STALL_NS / 4 * 5..STALL_NS / 4 * 5 + 5_000).contains(&at_ns),
        "{at_ns}"
    );
    let mut ends = watchful_pair();
    let between = |end: &mut End, now_ns| end.activity = now_ns / (STALL_NS / 5) * 2;
    assert_eq!(
        gives_up_after(&mut ends, between),
        None,
        "each time between two handlers"
    );
}

/// While a batch without messages waits to be posted, messages join it.
#[test]
fn a_peer_that_does_not_take_messages_of_a_batch_begun_without_any_is_given_up() {
    let mut ends = pair(&LinkConfig {
        stall_ns: STALL_NS,
        ..config()
    });
    while ends[0].link.call(&[], 5, 212).is_ok() {}
    rounds_without_read(&mut ends, 1);
    assert!(answer_all(&mut ends[1]) > 0);
    rounds_without_read(&mut ends, 1);
    call(&mut ends[1], 6);
    deliver(&mut ends);
    assert!(
        ends[0].flush(|| false).is_err(),
        "the replies are to be confirmed, with a batch without messages"
    );
    assert_eq!(
        (answer_all(&mut ends[0]), ends[0].link.stats().metadata_only),
        (1, 1)
    );
    assert!(gives_up_after(&mut ends, |_, _| ()).is_some());
}

/// The peer polls once and never again: then its record does not change any more.
#[test]
fn a_peer_that_took_its_replies_is_kept_though_it_does_nothing_more() {
    let mut ends = pair_with_a_reply();
    let take_once = |end: &mut End, now_ns| {
        if now_ns == STALL_NS / 2 {
            assert_eq!(end.poll(usize::MAX, 1, |_, _| ()), 1);
        }
    };
    assert_eq!(gives_up_after(&mut ends, take_once), None);
    let probes = ends[0].link.stats().probes;
    assert!(
        (1..=STALL_NS / 2_000 + 2).contains(&probes),
        "nothing to watch since: {probes} probes"
    );
}

/// The application of the peer does other work, and owes this end nothing.
#[test]
fn a_peer_may_leave_a_batch_without_messages_where_it_is() {
    let mut ends = pair(&LinkConfig {
        stall_ns: STALL_NS,
        ..config()
    });
    while ends[0].link.call(&[], 5, 212).is_ok() {}
    rounds_without_read(&mut ends, 1);
    assert!(answer_all(&mut ends[1]) > 0);
    rounds_without_read(&mut ends, 1);
    // The replies are taken, and a batch without messages reports their consumption (L4).
    ends[0].poll(usize::MAX, 1, |_, _| ());
    assert!(ends[0].flush(|| true).is_ok());
    while execute(&mut ends, 0) {}
    assert_eq!(
        (
            ends[0].link.unanswered_requests(),
            ends[0].link.stats().metadata_only
        ),
        (0, 1)
    );
    assert_eq!(gives_up_after(&mut ends, |_, _| ()), None);
}

const IDLE_NS: u64 = 10_000;

/// Checks an idle end at the times that it asks for, until `end_ns`. Returns the times of its
/// READs, and the time at which it closed.
fn check_idle_until(ends: &mut [End; 2], end_ns: u64) -> (Vec<u64>, Option<u64>) {
    let (mut reads, mut now_ns) = (Vec::new(), 0);
    loop {
        ends[0].link.check_idle(now_ns);
        if ends[0].read_if_wanted(now_ns) {
            reads.push(now_ns);
            while execute(ends, 0) {}
            ends[0].take_send_completions();
        }
        if ends[0].link.is_closing() {
            return (reads, Some(now_ns));
        }
        match ends[0].link.next_idle_check(now_ns) {
            Some(next_ns) if next_ns < end_ns => now_ns = next_ns,
            _ => return (reads, None),
        }
    }
}

#[test]
fn an_idle_peer_is_read_once_per_interval_if_it_is_known_to_be_there() {
    let idle = LinkConfig {
        idle_keepalive_ns: IDLE_NS,
        ..config()
    };
    let mut ends = pair(&idle);
    assert_eq!(
        check_idle_until(&mut ends, 5 * IDLE_NS),
        (Vec::new(), None),
        "it may not be connected"
    );
    let mut ends = pair(&idle);
    ends[0].link.note_peer_connected();
    let every = |from: u64| {
        (from..5)
            .map(|interval| interval * IDLE_NS)
            .collect::<Vec<_>>()
    };
    assert_eq!(check_idle_until(&mut ends, 5 * IDLE_NS), (every(1), None));
    let mut ends = pair(&config());
    ends[0].link.note_peer_connected();
    assert_eq!(ends[0].link.next_idle_check(0), None, "switched off");
}

#[test]
fn an_end_is_closed_when_nothing_happened_for_the_idle_timeout_and_not_while_something_is_outstanding()
 {
    let idle = LinkConfig {
        idle_timeout_ns: 7 * IDLE_NS,
        ..config()
    };
    for idle_keepalive_ns in [IDLE_NS, u64::MAX] {
        let mut ends = pair(&LinkConfig {
            idle_keepalive_ns,
            ..idle
        });
        assert_eq!(
            check_idle_until(&mut ends, 100 * IDLE_NS).1,
            Some(7 * IDLE_NS)
        );
        let mut ends = pair(&LinkConfig {
            idle_keepalive_ns,
            ..idle
        });
        call(&mut ends[1], 5);
        rounds_without_read(&mut ends, 2);
        assert_eq!(
            check_idle_until(&mut ends, 100 * IDLE_NS).1,
            None,
            "a request is held"
        );
    }
}
