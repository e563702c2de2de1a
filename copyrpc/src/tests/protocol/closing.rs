//! The graceful end (G1..G4).

use std::collections::BTreeSet;

use crate::error::{CallError, CallFailure, CloseReason};
use crate::link::{Event, LinkConfig, Window};

use super::defects::{C, answer_all, config, pair, rounds_without_read};
use super::sim::{End, Ended, OnFailure, execute};

const HERE: Option<CloseReason> = Some(CloseReason::ClosedHere);
const BY_PEER: Option<CloseReason> = Some(CloseReason::ClosedByPeer);

/// Lets both sides poll, flush, publish and READ, in `rounds` rounds. Returns the ended calls of
/// each side.
fn rounds(ends: &mut [End; 2], rounds: usize) -> [Vec<(u64, Ended)>; 2] {
    let mut ended = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for side in [0, 1] {
            ends[side].poll(usize::MAX, 1, |serial, outcome| {
                ended[side].push((serial, outcome))
            });
            ends[side].take_send_completions();
            assert!(ends[side].flush(|| true).is_ok());
            ends[side].read_if_wanted(0);
            ends[side].publish();
            while execute(ends, side) {}
        }
    }
    ended
}

fn reasons(ends: &[End; 2]) -> [Option<CloseReason>; 2] {
    ends.each_ref().map(|end| end.link.closed())
}

#[test]
fn an_idle_connection_ends_on_both_sides_whoever_closes() {
    for start in (0..C).step_by(32) {
        for (first, second) in [(true, false), (false, true), (true, true)] {
            let mut ends = pair(&LinkConfig {
                send_start: start,
                ..config()
            });
            for (side, closes) in [first, second].into_iter().enumerate() {
                if closes {
                    ends[side].link.shut_down();
                }
            }
            rounds(&mut ends, 3);
            assert_eq!(
                reasons(&ends),
                [first, second].map(|closes| if closes { HERE } else { BY_PEER }),
                "{start}"
            );
        }
    }
}

#[test]
fn what_is_outstanding_ends_as_usual_and_what_comes_later_is_refused() {
    let mut ends = pair(&config());
    ends[0].link.call(&[], 1, 20).unwrap();
    ends[1].link.call(&[], 2, 20).unwrap();
    rounds_without_read(&mut ends, 2);
    // Requests that the application of side 0 does not receive.
    ends[0].is_receiving = false;
    ends[1].link.call(&[], 3, 20).unwrap();
    ends[0].link.shut_down();
    assert_eq!(
        ends[0].link.call(&[], 9, 0),
        Err(CallError::Closed {
            user_data: 9,
            reason: CloseReason::ClosedHere
        })
    );
    ends[1].link.call(&[], 4, 20).unwrap();
    let held = [0, 1].map(|side| ends[side].inbox.pop_front().unwrap());
    let mut ended = [Vec::new(), Vec::new()];
    for _ in 0..5 {
        for side in [0, 1] {
            ends[side].poll(usize::MAX, 1, |serial, outcome| {
                ended[side].push((serial, outcome))
            });
            ends[side].take_send_completions();
            assert!(ends[side].flush(|| true).is_ok());
            ends[side].read_if_wanted(0);
            while execute(&mut ends, side) {}
        }
    }
    assert_eq!(
        ends[1].link.call(&[], 9, 0),
        Err(CallError::Closed {
            user_data: 9,
            reason: CloseReason::ClosedByPeer
        })
    );
    let refused = |serial| (serial, Err(CallFailure::NotSent));
    assert_eq!(ended, [vec![], vec![refused(3), refused(4)]]);
    assert_eq!(reasons(&ends), [None, None]);
    for (side, request) in held.into_iter().enumerate() {
        ends[side].link.reply(request, &[side as u8]).unwrap();
    }
    assert_eq!(
        rounds(&mut ends, 3),
        [vec![(1, Ok(vec![1]))], vec![(2, Ok(vec![0]))]]
    );
    assert_eq!(reasons(&ends), [HERE, BY_PEER]);
}

/// The end that posts its mark last has not ended when the first end has: its mark has arrived, but
/// the READ that it posted after the mark fails.
#[test]
fn a_peer_that_parted_first_is_no_failure() {
    let mut ends = pair(&config());
    ends[0].link.shut_down();
    assert!(ends[0].flush(|| true).is_ok());
    while execute(&mut ends, 0) {}
    ends[1].poll(usize::MAX, 1, |_, _| ());
    assert!(ends[1].flush(|| true).is_ok());
    assert!(ends[1].read_if_wanted(0), "whether its mark arrived");
    assert!(execute(&mut ends, 1), "the mark, but not the READ");
    ends[0].poll(usize::MAX, 1, |_, _| ());
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(reasons(&ends), [HERE, None]);
    while execute(&mut ends, 1) {}
    ends[1].take_send_completions();
    assert_eq!(reasons(&ends), [HERE, BY_PEER]);
}

#[test]
fn a_peer_that_goes_before_all_is_done_is_a_failure() {
    let mut ends = pair(&config());
    ends[0].link.call(&[], 1, 0).unwrap();
    rounds_without_read(&mut ends, 1);
    ends[0].link.shut_down();
    ends[1].link.shut_down();
    rounds(&mut ends, 3);
    ends[0].link.close(CloseReason::Disconnected);
    assert_eq!(ends[0].link.closed(), Some(CloseReason::Disconnected));
    assert!(matches!(
        ends[0].link.next_event(),
        Some(Event::Ended {
            user_data: 1,
            outcome: Err(_)
        })
    ));
}

/// No call is unanswered, but the mark is.
#[test]
fn a_peer_that_does_not_answer_the_mark_is_stalled_and_one_that_cannot_yet_is_not() {
    for lives in [false, true] {
        let mut ends = pair(&LinkConfig {
            stall_ns: 100_000,
            ..config()
        });
        ends[0].link.shut_down();
        for now_ns in (0..1_000_000).step_by(100) {
            assert!(ends[0].flush(|| true).is_ok());
            ends[0].read_if_wanted(now_ns);
            while execute(&mut ends, 0) {}
            ends[0].take_send_completions();
            if lives {
                ends[1].poll(usize::MAX, 1, |_, _| ());
                ends[1].sweep();
            }
        }
        assert_eq!(
            ends[0].link.closed(),
            (!lives).then_some(CloseReason::PeerStalled)
        );
    }
}

#[test]
fn the_mark_goes_in_the_end_however_full_ring_and_batch_limit_are() {
    let mut ends = pair(&LinkConfig {
        peer_batches: 1,
        ..config()
    });
    while ends[0].link.call(&[0; 200], 0, 0).is_ok() {
        assert!(ends[0].flush(|| true).is_ok());
    }
    ends[0].link.shut_down();
    for _ in 0..20 {
        rounds(&mut ends, 1);
        answer_all(&mut ends[1]);
    }
    assert_eq!(reasons(&ends), [HERE, BY_PEER]);
}

/// Closes one side or both amid random operations. Each call ends once: with the answer that its
/// handler gave, or refused.
#[test]
fn every_call_ends_once_and_both_sides_close_from_any_state() {
    let mut refused = 0;
    for seed in 0..3_000 {
        let _on_failure = OnFailure(format!("seed {seed}"));
        let mut rng = fastrand::Rng::with_seed(seed);
        let window = match rng.u8(..3) {
            0 => Window::Off,
            1 => Window::Completion {
                batches: 1,
                exempt_bytes: 256,
            },
            _ => Window::Consumption {
                batches: 1,
                exempt_bytes: 256,
            },
        };
        let limit = [1, 2, 8][rng.usize(..3)];
        let mut ends = pair(&LinkConfig {
            send_start: rng.u64(..1 << 20) & !31,
            local_batches: limit,
            peer_batches: limit,
            local_credit: [0, C / 4][rng.usize(..2)],
            window,
            ..config()
        });
        let mut open = [BTreeSet::new(), BTreeSet::new()];
        let mut serial = 0;
        let mut closes = [false; 2];
        let mut received = [0; 2];
        let closing = [(true, false), (false, true), (true, true)][rng.usize(..3)];
        for step in 0..3_000 {
            let side = rng.usize(..2);
            // 300 random operations, then all operations in turn.
            let op = if step < 300 {
                rng.usize(..9)
            } else {
                2 + step % 7
            };
            let side = if step < 300 { side } else { step / 7 % 2 };
            match op {
                0 | 1 => {
                    serial += 1;
                    if ends[side]
                        .link
                        .call(&vec![0; rng.usize(..200)], serial, rng.usize(7..200))
                        .is_ok()
                    {
                        open[side].insert(serial);
                    }
                }
                2 => _ = ends[side].flush(|| step >= 300 || rng.bool()),
                3 => while execute(&mut ends, side) && rng.bool() {},
                4 | 7 => {
                    ends[side].poll(
                        if op == 4 { 3 } else { usize::MAX },
                        1,
                        |serial, outcome| {
                            assert!(open[side].remove(&serial), "a call ended twice");
                            match outcome {
                                Ok(answer) => assert_eq!(answer, [7; 7]),
                                Err(error) => {
                                    assert_eq!(error, CallFailure::NotSent);
                                    refused += 1;
                                }
                            }
                        },
                    );
                    if op == 7 {
                        ends[side].take_send_completions();
                    }
                }
                5 => {
                    if let Some(request) = ends[side].inbox.pop_front() {
                        let answer = [7; 7];
                        ends[side].link.reply(request, &answer).unwrap();
                        ends[side].forget_request(received[side]);
                        received[side] += 1;
                    }
                }
                6 => _ = ends[side].read_if_wanted(0),
                _ => ends[side].publish(),
            }
            if step == 200 {
                closes = [closing.0, closing.1];
                (0..2).filter(|side| closes[*side]).for_each(|side| {
                    ends[side].link.shut_down();
                    ends[side].is_receiving = false;
                });
            }
        }
        assert_eq!(
            reasons(&ends),
            closes.map(|closes| if closes { HERE } else { BY_PEER })
        );
        assert!(open.iter().all(BTreeSet::is_empty), "{open:?}");
    }
    assert!(refused > 100, "{refused}");
}
