//! Each test is named after a defect that an earlier design of this protocol had, or after a rule
//! that prevents a defect. The drivers are minimal: a READ or a batch is sent only if the test
//! sends it.

use crate::error::{CallError, CallFailure, ReplyError};
use crate::link::{Emit, Link, LinkConfig, Window};
use crate::ring::RingSize;

use super::sim::{End, Ended, execute};

pub(crate) const C: u64 = 2048;

pub(crate) fn size() -> RingSize {
    RingSize::new(C).unwrap()
}

pub(crate) fn config() -> LinkConfig {
    LinkConfig {
        local_credit: C / 4,
        peer_credit: C / 4,
        local_batches: 64,
        peer_batches: 64,
        send_start: 0,
        recv_start: 0,
        keepalive_ns: 1_000,
        stall_ns: u64::MAX,
        idle_keepalive_ns: u64::MAX,
        idle_timeout_ns: u64::MAX,
        reads_whole_words: true,
        window: Window::Off,
    }
}

pub(crate) fn pair(first: &LinkConfig) -> [End; 2] {
    pair_of(size(), first)
}

/// Makes two connected ends. The parameters of the second end follow from those of the first.
pub(crate) fn pair_of(size: RingSize, first: &LinkConfig) -> [End; 2] {
    let second = LinkConfig {
        local_credit: first.peer_credit,
        peer_credit: first.local_credit,
        local_batches: first.peer_batches,
        peer_batches: first.local_batches,
        send_start: first.recv_start,
        recv_start: first.send_start,
        keepalive_ns: first.keepalive_ns,
        stall_ns: first.stall_ns,
        idle_keepalive_ns: first.idle_keepalive_ns,
        idle_timeout_ns: first.idle_timeout_ns,
        reads_whole_words: first.reads_whole_words,
        window: first.window,
    };
    [End::new(size, first), End::new(size, &second)]
}

/// Lets both sides poll, flush and publish, without READs, in `rounds` rounds. Returns the ended
/// calls of each side.
pub(crate) fn rounds_without_read(ends: &mut [End; 2], rounds: usize) -> [Vec<(u64, Ended)>; 2] {
    let mut ended = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for side in [0, 1] {
            ends[side].poll(usize::MAX, 1, |serial, outcome| {
                ended[side].push((serial, outcome));
            });
            assert!(ends[side].flush(|| true).is_ok());
            ends[side].publish();
            while execute(ends, side) {}
        }
    }
    ended
}

/// Answers all requests of a side with the largest reply. Returns the number of requests.
pub(crate) fn answer_all(end: &mut End) -> usize {
    let mut answered = 0;
    while let Some(request) = end.inbox.pop_front() {
        let reply = vec![7; request.max_reply()];
        end.link.reply(request, &reply).unwrap();
        answered += 1;
    }
    answered
}

fn emits<U>(link: &mut Link<U>) -> Vec<Emit> {
    let mut emits = Vec::new();
    let flushed: Result<(), ()> = link.flush(|emit: Emit| {
        emits.push(emit);
        Ok(())
    });
    assert_eq!(flushed, Ok(()));
    emits
}

#[test]
fn what_can_never_fit_is_refused_for_good_and_what_is_legal_always_fits_an_idle_link() {
    for start in (0..C).step_by(32) {
        let mut ends = pair(&LinkConfig {
            send_start: start,
            ..config()
        });
        let link = &mut ends[0].link;
        let (max, max_allowance) = (size().max_payload() as usize, 340);
        assert_eq!(size().max_response_allowance(), max_allowance as u64);
        let too_large = CallError::PayloadTooLarge {
            user_data: 1,
            len: max + 1,
            max,
        };
        assert_eq!(link.call(&vec![0; max + 1], 1, 0), Err(too_large));
        // In an earlier design, a request of 276 B in a ring of 1 KiB overran the peer by 64 B.
        // This request, too, is just above C/4.
        let error = link.call(&vec![0; C as usize / 4 + 20], 1, 0).unwrap_err();
        assert!(!error.is_retryable());
        let too_large = CallError::AllowanceTooLarge {
            user_data: 1,
            len: max_allowance + 1,
            max: max_allowance,
        };
        assert_eq!(link.call(&[], 1, max_allowance + 1), Err(too_large));
        assert_eq!(
            link.call(&[], 1, usize::MAX).unwrap_err().into_user_data(),
            1
        );
        assert!(
            link.call(&vec![0; max], 1, max_allowance).is_ok(),
            "{start}"
        );
    }
}

/// Overrun: a side that filled its ring with calls must still have room for every reply it owes, at
/// every offset, with the wraps these replies cause. The fabric checks for overwritten bytes.
#[test]
fn replies_behind_a_full_ring_overrun_nothing_at_any_offset() {
    for start in (0..C).step_by(32) {
        for (len, allowance) in [(0, 0), (20, 100), (200, 340), (244, 52)] {
            let mut ends = pair(&LinkConfig {
                send_start: start,
                ..config()
            });
            // Side 1 uses all the credit it has; side 0 holds the requests and fills its own ring.
            while ends[1].link.call(&[1; 8], 1, allowance).is_ok() {}
            rounds_without_read(&mut ends, 2);
            let mut filled = 0;
            while ends[0].link.call(&vec![2; len], 2, 0).is_ok() {
                filled += 1;
            }
            assert!(filled > 0);
            assert!(answer_all(&mut ends[0]) > 0);
            let [_, ended] = rounds_without_read(&mut ends, 4);
            assert!(!ended.is_empty() && ended.iter().all(|(_, outcome)| outcome.is_ok()));
        }
    }
}

/// Credit deadlock of an earlier design, in which only batches with messages carried grants: both
/// sides are idle, and one needs 256 bytes of credit and has 224.
#[test]
fn an_idle_peer_tells_new_credit_without_data_and_without_a_read() {
    let mut ends = pair(&LinkConfig {
        peer_credit: 224,
        ..config()
    });
    let allowance = 256 - 44;
    let refused = ends[0].link.call(&[], 9, allowance);
    assert_eq!(refused, Err(CallError::InsufficientCredit(9)));
    rounds_without_read(&mut ends, 2);
    assert!(ends[0].link.call(&[], 9, allowance).is_ok());
    assert_eq!(ends[1].link.stats().metadata_only, 1);
}

/// The peer posts no batch: the READ alone brings the credit.
#[test]
fn a_refused_call_makes_a_read_that_brings_new_credit() {
    let mut ends = pair(&LinkConfig {
        peer_credit: 224,
        ..config()
    });
    assert!(ends[1].flush(|| false).is_err());
    ends[1].publish();
    assert!(!ends[0].read_if_wanted(0), "nothing was refused yet");
    assert!(ends[0].link.call(&[], 9, 212).is_err());
    assert!(ends[0].read_if_wanted(0));
    assert!(ends[0].link.call(&[], 9, 212).is_err());
    assert!(!ends[0].read_if_wanted(0), "one READ in flight at most");
    execute(&mut ends, 0);
    ends[0].take_send_completions();
    assert!(ends[0].link.call(&[], 9, 212).is_ok());
}

/// Ring-full deadlock of an earlier design: an idle link counted 544 B as in flight when 32 B were.
#[test]
fn an_idle_link_takes_the_largest_call_however_much_it_was_not_told() {
    for rounds in 0..24 {
        for start in (0..C).step_by(32) {
            let mut ends = pair(&LinkConfig {
                send_start: start,
                ..config()
            });
            // Replies fill the ring of side 0; side 1 sends only small calls and metadata.
            for _ in 0..rounds {
                ends[1].link.call(&[], 1, 20).unwrap();
                rounds_without_read(&mut ends, 2);
                assert_eq!(answer_all(&mut ends[0]), 1);
                rounds_without_read(&mut ends, 2);
            }
            let largest = vec![3; size().max_payload() as usize];
            let in_flight = ends[0].link.in_flight();
            assert!(ends[0].link.call(&largest, 1, 340).is_ok(), "{in_flight}");
        }
    }
}

#[test]
fn a_metadata_only_batch_waits_until_the_last_one_was_received() {
    let mut ends = pair(&config());
    let step = |ends: &mut [End; 2], side: usize, run: bool| {
        assert!(ends[side].flush(|| true).is_ok());
        while run && execute(ends, side) {}
        ends[1 - side].poll(usize::MAX, 1, |_, _| ());
    };
    for serial in 0..2 {
        ends[0].link.call(&[], serial, 212).unwrap();
    }
    step(&mut ends, 0, true);
    // Each response with its metadata is 1/8 ring, so it is news for the responder.
    for _ in 0..2 {
        let request = ends[1].inbox.pop_front().unwrap();
        ends[1].link.reply(request, &[0; 212]).unwrap();
        step(&mut ends, 1, true);
        step(&mut ends, 0, false);
        assert_eq!(ends[0].link.stats().metadata_only, 1);
    }
    step(&mut ends, 0, true);
    ends[1].link.call(&[], 0, 0).unwrap();
    step(&mut ends, 1, true);
    step(&mut ends, 0, false);
    assert_eq!(
        ends[0].link.stats().metadata_only,
        2,
        "the first was received"
    );
}

#[test]
fn a_batch_that_leaves_little_space_makes_a_read() {
    let mut ends = pair(&LinkConfig {
        local_credit: 0,
        ..config()
    });
    for serial in 0..7 {
        assert!(!ends[0].read_if_wanted(0));
        ends[0].link.call(&[0; 244], serial, 0).unwrap();
    }
    assert!(ends[0].flush(|| true).is_ok());
    assert!(ends[0].read_if_wanted(0));
}

/// L3: a side whose calls always fill its ring still grants its peer credit up to the maximum.
#[test]
fn a_saturated_side_does_not_starve_its_peer_of_credit() {
    for (start, len) in (0..C)
        .step_by(32)
        .flat_map(|start| [116, 148, 180, 244].map(|len| (start, len)))
    {
        let mut ends = pair(&LinkConfig {
            local_credit: 0,
            send_start: start,
            ..config()
        });
        let mut rounds = 0;
        while ends[1].link.call(&[], 0, 340).is_err() {
            while ends[0].link.call(&vec![0; len], 0, 0).is_ok() {}
            if let Some(request) = ends[1].inbox.pop_front() {
                ends[1].link.reply(request, &[]).unwrap();
            }
            rounds_without_read(&mut ends, 1);
            rounds += 1;
            assert!(
                rounds < 500,
                "starved with {} B of {} B granted",
                ends[1].link.credit_balance(),
                C / 4
            );
        }
    }
}

/// L3: calls leave 128 bytes and grants 64. The space between these limits can be granted, so calls
/// alone never keep a peer without credit.
#[test]
fn calls_leave_room_that_grants_take() {
    let mut ends = pair(&LinkConfig {
        local_credit: 0,
        ..config()
    });
    for _ in 0..7 {
        ends[0].link.call(&[0; 244], 0, 0).unwrap();
    }
    let too_much = ends[0].link.call(&[0; 116], 9, 0);
    assert_eq!(too_much, Err(CallError::RingFull(9)));
    ends[0].link.call(&[0; 84], 0, 0).unwrap();
    assert_eq!(ends[0].link.in_flight(), C - 128);
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(ends[0].link.reserved(), 32);
}

/// L3: calls and grants took all space that they may take, and the oldest request is held, so its
/// space is not returned. This end can still report what it consumed.
#[test]
fn metadata_alone_has_room_after_calls_and_grants() {
    let mut ends = pair(&LinkConfig {
        local_credit: 0,
        ..config()
    });
    for len in [244, 244, 244, 244, 244, 244, 244, 52] {
        ends[0].link.call(&vec![0; len], 0, 20).unwrap();
    }
    let full = ends[0].link.call(&[0; 84], 0, 0);
    assert!(full.is_err());
    rounds_without_read(&mut ends, 1);
    // The oldest request is held to the end of the test.
    let _oldest = ends[1].inbox.pop_front();
    assert_eq!(answer_all(&mut ends[1]), 7);
    // The responses fill an eighth of the ring, which is enough news for a batch without messages
    // (L4).
    rounds_without_read(&mut ends, 2);
    assert_eq!(ends[0].link.stats().metadata_only, 1);
}

/// A batch that would end exactly at the ring's end wraps, and the marker before it is a WRITE of
/// 32 bytes, never of 0.
#[test]
fn a_batch_never_ends_at_the_ring_end() {
    let near_end = |left: u64| {
        let config = LinkConfig {
            send_start: 3 * C - left,
            ..config()
        };
        let mut end = End::new(size(), &config);
        end.link.call(&[0; 20], 1, 0).unwrap();
        emits(&mut end.link)
    };
    let data = |offset| Emit {
        offset,
        bytes: 64,
        imm: 2,
        is_last: true,
        signal: false,
    };
    assert_eq!(near_end(96), [data(C - 96)]);
    for left in [64, 32] {
        let marker = Emit {
            offset: C - left,
            bytes: 32,
            imm: left as u32 / 32,
            is_last: false,
            signal: false,
        };
        assert_eq!(near_end(left), [marker, data(0)]);
    }
}

#[test]
fn an_open_batch_is_closed_before_the_marker_and_all_three_batches_go() {
    let mut end = End::new(
        size(),
        &LinkConfig {
            send_start: C - 128,
            ..config()
        },
    );
    end.link.call(&[0; 20], 1, 0).unwrap();
    end.link.call(&[0; 40], 2, 0).unwrap();
    let emit = |offset, bytes, imm, is_last| Emit {
        offset,
        bytes,
        imm,
        is_last,
        signal: false,
    };
    let expected = [
        emit(C - 128, 64, 2, false),
        emit(C - 64, 32, 2, false),
        emit(0, 96, 3, true),
    ];
    assert_eq!(emits(&mut end.link), expected);
}

#[test]
fn metadata_alone_in_the_last_32_bytes_goes_as_a_marker() {
    let mut ends = pair(&LinkConfig {
        local_credit: 0,
        send_start: C - 32,
        ..config()
    });
    rounds_without_read(&mut ends, 1);
    assert_eq!(ends[0].link.stats().wraps, 1);
    assert_eq!(ends[1].link.credit_balance(), C / 4);
    assert_eq!(ends[1].link.closed(), None);
}

#[test]
fn a_message_after_a_marker_that_waits_opens_its_own_batch() {
    let mut ends = pair(&LinkConfig {
        local_credit: 0,
        send_start: C - 32,
        ..config()
    });
    assert!(ends[0].flush(|| false).is_err());
    ends[0].link.call(&[8; 8], 1, 0).unwrap();
    rounds_without_read(&mut ends, 1);
    let request = ends[1].inbox.pop_front().unwrap();
    assert_eq!(ends[1].payload(&request).to_vec(), [8; 8]);
    assert_eq!(ends[0].link.stats().wraps, 1);
}

/// A wrap while the batch limit permits no post: replies are still written behind it.
#[test]
fn replies_are_written_across_a_wrap_while_no_batch_may_go() {
    let mut ends = pair(&LinkConfig {
        send_start: C - 96,
        peer_batches: 1,
        ..config()
    });
    for serial in 0..3 {
        ends[1].link.call(&[], serial, 20).unwrap();
    }
    rounds_without_read(&mut ends, 2);
    ends[0].link.call(&[], 9, 0).unwrap();
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(answer_all(&mut ends[0]), 3);
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(ends[0].link.stats().batches_sent, 1);
    assert_eq!(ends[0].link.stats().batch_stalls, 1);
    let mut ended = 0;
    for _ in 0..4 {
        ended += rounds_without_read(&mut ends, 1)[1].len();
        ends[0].read_if_wanted(0);
        execute(&mut ends, 0);
        ends[0].take_send_completions();
    }
    assert_eq!(ended, 3);
}

#[test]
fn a_deferred_post_loses_neither_messages_nor_grants() {
    let mut ends = pair(&LinkConfig {
        peer_credit: 0,
        ..config()
    });
    for _ in 0..5 {
        assert!(ends[1].flush(|| false).is_err());
    }
    ends[1].link.call(&[5; 5], 1, 0).unwrap();
    assert!(ends[1].flush(|| false).is_err());
    assert!(!ends[1].link.is_quiet());
    rounds_without_read(&mut ends, 2);
    assert_eq!(ends[0].link.credit_balance(), C / 4);
    let request = ends[0].inbox.pop_front().unwrap();
    assert_eq!(ends[0].payload(&request).to_vec(), [5; 5]);
    assert!(ends[0].inbox.pop_front().is_none());
}

#[test]
fn a_reply_above_the_allowance_gives_the_request_back() {
    let mut ends = pair(&config());
    ends[0].link.call(&[], 4, 10).unwrap();
    rounds_without_read(&mut ends, 1);
    let request = ends[1].inbox.pop_front().unwrap();
    assert_eq!(request.max_reply(), 20, "10 rounds up to a 32-byte block");
    let request = match ends[1].link.reply(request, &[0; 21]) {
        Err(ReplyError::TooLarge {
            request,
            len: 21,
            max: 20,
        }) => request,
        other => panic!("{other:?}"),
    };
    ends[1].link.reply(request, &[6; 20]).unwrap();
    let [ended, _] = rounds_without_read(&mut ends, 2);
    assert_eq!(ended, [(4, Ok(vec![6; 20]))]);
}

#[test]
fn a_dropped_request_and_a_refused_one_end_their_calls_with_their_status() {
    let mut ends = pair(&config());
    for serial in 0..2 {
        ends[0].link.call(&[], serial, 0).unwrap();
    }
    rounds_without_read(&mut ends, 1);
    let first = ends[1].inbox.pop_front().unwrap();
    let second = ends[1].inbox.pop_front().unwrap();
    ends[1].link.refuse(second).unwrap();
    ends[1].link.abandon(first).unwrap();
    let [ended, _] = rounds_without_read(&mut ends, 2);
    let expected = [
        (1, Err(CallFailure::Refused)),
        (0, Err(CallFailure::Dropped)),
    ];
    assert_eq!(ended, expected);
}

#[test]
fn silence_is_broken_by_a_read_only_while_calls_wait() {
    let mut ends = pair(&config());
    assert!(!ends[0].read_if_wanted(0));
    assert!(!ends[0].read_if_wanted(1_000_000), "no call waits");
    ends[0].link.call(&[], 4, 10).unwrap();
    assert!(!ends[0].read_if_wanted(2_000_000), "silence begins here");
    assert!(!ends[0].read_if_wanted(2_000_999));
    assert!(ends[0].read_if_wanted(2_001_000));
    assert!(!ends[0].read_if_wanted(3_000_000), "one READ at a time");
    execute(&mut ends, 0);
    ends[0].take_send_completions();
    assert!(!ends[0].read_if_wanted(3_000_100), "the peer lives");
    assert!(ends[0].read_if_wanted(3_001_100));
}

#[test]
fn a_response_is_delivered_before_its_bytes_can_be_published_as_free() {
    let mut ends = pair(&config());
    ends[0].link.call(&[], 4, 100).unwrap();
    rounds_without_read(&mut ends, 1);
    answer_all(&mut ends[1]);
    assert!(ends[1].flush(|| true).is_ok());
    while execute(&mut ends, 1) {}
    let before = ends[0].link.publish().map_or(0, |words| words.consumer_pos);
    ends[0].link.on_imm(5);
    assert!(ends[0].link.next_event().is_some());
    let during = ends[0].link.publish().unwrap().consumer_pos;
    assert_eq!(during, before + 32, "metadata only");
    assert!(ends[0].link.next_event().is_none());
    let after = ends[0].link.publish().unwrap().consumer_pos;
    assert_eq!(after, before + 160);
}

#[test]
fn numbers_that_the_proof_does_not_cover_are_told_from_those_that_it_does() {
    let larger = RingSize::new(2 * C).unwrap();
    assert!(config().is_covered(size(), size()) && !config().is_covered(size(), larger));
    for other in [
        LinkConfig {
            peer_credit: 544,
            ..config()
        },
        LinkConfig {
            local_credit: 40,
            ..config()
        },
        LinkConfig {
            local_batches: 0,
            ..config()
        },
        LinkConfig {
            window: Window::Completion {
                batches: 0,
                exempt_bytes: 1,
            },
            ..config()
        },
        LinkConfig {
            recv_start: 16,
            ..config()
        },
    ] {
        assert!(!other.is_covered(size(), size()), "{other:?}");
    }
}
