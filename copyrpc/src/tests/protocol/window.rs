//! The window of small batches (W1..W3). `oracle` shows that no window loses or blocks anything.

use crate::link::{LinkConfig, Window};

use super::defects::{C, answer_all, config, pair, rounds_without_read};
use super::sim::{End, execute};

const EXEMPT: u64 = 256;

fn completion(batches: u32) -> LinkConfig {
    LinkConfig {
        window: Window::Completion {
            batches,
            exempt_bytes: EXEMPT,
        },
        ..config()
    }
}

fn consumption(batches: u32) -> LinkConfig {
    LinkConfig {
        window: Window::Consumption {
            batches,
            exempt_bytes: EXEMPT,
        },
        ..config()
    }
}

/// Calls and flushes `count` times. Returns the numbers of batches and messages sent since the
/// beginning.
fn call_and_flush(end: &mut End, len: usize, count: usize) -> (u64, u64) {
    for _ in 0..count {
        end.link.call(&vec![0; len], 0, 0).unwrap();
        assert!(end.flush(|| true).is_ok());
    }
    (
        end.link.stats().batches_sent,
        end.link.stats().messages_sent,
    )
}

#[test]
fn without_a_window_each_flush_sends_and_with_one_the_messages_gather_until_a_write_completes() {
    for (config, batches) in [
        (config(), 5),
        (completion(1), 1),
        (completion(3), 3),
        (consumption(2), 2),
    ] {
        let mut ends = pair(&config);
        assert_eq!(call_and_flush(&mut ends[0], 0, 5), (batches, batches));
        assert_eq!(ends[0].link.stats().window_stalls, 5 - batches);
    }
    let mut ends = pair(&completion(2));
    assert_eq!(call_and_flush(&mut ends[0], 0, 6), (2, 2));
    assert!(
        ends[0].link.is_quiet(),
        "nothing is to do before a completion"
    );
    assert!(execute(&mut ends, 0));
    assert!(ends[0].link.on_write_done(), "something may be posted");
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(
        (
            ends[0].link.stats().batches_sent,
            ends[0].link.stats().messages_sent
        ),
        (3, 6)
    );
    // The window is full again: the new batch took the place of the batch that completed.
    assert_eq!(call_and_flush(&mut ends[0], 0, 1), (3, 6));
}

#[test]
fn a_window_that_is_suspended_holds_nothing_back_until_it_is_not() {
    for config in [completion(1), consumption(1), config()] {
        let is_held = config.window != Window::Off;
        let mut ends = pair(&config);
        ends[0].link.suspend_window(true);
        assert_eq!(call_and_flush(&mut ends[0], 0, 3), (3, 3));
        ends[0].link.suspend_window(false);
        assert_eq!(
            call_and_flush(&mut ends[0], 0, 3),
            if is_held { (4, 4) } else { (6, 6) }
        );
        ends[0].link.suspend_window(true);
        assert!(ends[0].flush(|| true).is_ok());
        assert_eq!(
            ends[0].link.stats().messages_sent,
            6,
            "what was held back goes with the next flush"
        );
    }
}

#[test]
fn a_completion_with_nothing_to_send_asks_for_no_flush() {
    let mut ends = pair(&completion(1));
    call_and_flush(&mut ends[0], 0, 1);
    assert!(!ends[0].link.on_write_done());
    assert_eq!(call_and_flush(&mut ends[0], 0, 1), (2, 2));
}

#[test]
fn what_waits_goes_at_once_when_it_is_large_and_takes_no_place() {
    let mut ends = pair(&completion(1));
    assert_eq!(call_and_flush(&mut ends[0], 20, 1), (1, 1));
    // The first two are 96 bytes with their metadata and wait, the third makes them 288.
    assert_eq!(call_and_flush(&mut ends[0], 20, 2), (1, 1));
    assert_eq!(call_and_flush(&mut ends[0], 180, 1), (2, 4));
    assert_eq!(ends[0].link.stats().window_stalls, 2);
    while execute(&mut ends, 0) {}
    // Only the small batch asked for its completion.
    ends[0].take_send_completions();
    assert_eq!(call_and_flush(&mut ends[0], 0, 2), (3, 5));
}

/// B1 limits every batch, whatever the window permits.
#[test]
fn the_batch_limit_holds_also_what_the_window_exempts() {
    let mut ends = pair(&LinkConfig {
        peer_batches: 1,
        ..completion(1)
    });
    assert_eq!(call_and_flush(&mut ends[0], 240, 2), (1, 1));
    assert_eq!(
        (
            ends[0].link.stats().batch_stalls,
            ends[0].link.stats().window_stalls
        ),
        (1, 0)
    );
}

#[test]
fn the_consumption_clock_runs_by_the_peers_word_and_not_by_completions() {
    // The peer's words arrive in a batch.
    let mut ends = pair(&consumption(1));
    assert_eq!(call_and_flush(&mut ends[0], 0, 3), (1, 1));
    while execute(&mut ends, 0) {}
    ends[0].take_send_completions();
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(ends[0].link.stats().messages_sent, 1);
    ends[1].poll(usize::MAX, 1, |_, _| ());
    answer_all(&mut ends[1]);
    assert!(ends[1].flush(|| true).is_ok());
    while execute(&mut ends, 1) {}
    ends[0].poll(usize::MAX, 1, |_, _| ());
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(
        (
            ends[0].link.stats().batches_sent,
            ends[0].link.stats().messages_sent
        ),
        (2, 3)
    );

    // The peer's words arrive by a READ, from a peer that sends nothing.
    let mut ends = pair(&consumption(1));
    assert_eq!(call_and_flush(&mut ends[0], 0, 3), (1, 1));
    while execute(&mut ends, 0) {}
    ends[1].poll(usize::MAX, 1, |_, _| ());
    ends[1].publish();
    assert!(!ends[0].link.is_quiet());
    for _ in 0..100 {
        if ends[0].read_if_wanted(0) {
            break;
        }
    }
    while execute(&mut ends, 0) {}
    ends[0].take_send_completions();
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(
        (
            ends[0].link.stats().batches_sent,
            ends[0].link.stats().messages_sent
        ),
        (2, 3)
    );
    assert_eq!(ends[0].link.stats().reads, 1);
}

/// At every offset: a batch that took two places, because a wrap divided it, would divide the
/// waiting messages from then on.
#[test]
fn what_a_wrap_cuts_takes_one_place() {
    for start in (0..C).step_by(32) {
        let mut ends = pair(&LinkConfig {
            send_start: start,
            ..completion(1)
        });
        for round in 1..=3 {
            ends[0].link.call(&[], 0, 0).unwrap();
            assert_eq!(call_and_flush(&mut ends[0], 0, 1).1, 2 * round);
            assert_eq!(call_and_flush(&mut ends[0], 0, 0).1, 2 * round);
            while execute(&mut ends, 0) {}
            ends[0].take_send_completions();
        }
    }
    let mut ends = pair(&LinkConfig {
        send_start: C - 96,
        ..completion(1)
    });
    ends[0].link.call(&[], 0, 0).unwrap();
    assert_eq!(call_and_flush(&mut ends[0], 0, 1), (3, 2));
    assert!(execute(&mut ends, 0) && execute(&mut ends, 0) && execute(&mut ends, 0));
    ends[0].take_send_completions();
    assert_eq!(
        call_and_flush(&mut ends[0], 0, 2),
        (4, 3),
        "one completion, one place"
    );
    // The second place of the window is free for another batch.
    let mut ends = pair(&LinkConfig {
        send_start: C - 96,
        ..completion(2)
    });
    ends[0].link.call(&[], 0, 0).unwrap();
    assert_eq!(call_and_flush(&mut ends[0], 0, 1), (3, 2));
    assert_eq!(call_and_flush(&mut ends[0], 0, 2), (4, 3));
}

/// L4: a batch without messages brings the peer the credit that it lacks, and takes a place in the
/// window like any other batch.
#[test]
fn metadata_alone_waits_for_the_window_and_goes_then() {
    let mut ends = pair(&LinkConfig {
        local_credit: 0,
        ..completion(1)
    });
    // The peer's call is refused for lack of credit, which only a batch without messages can bring.
    assert!(ends[1].link.call(&[], 1, 0).is_err());
    rounds_without_read(&mut ends, 1);
    assert_eq!(ends[0].link.stats().metadata_only, 1);
    assert!(ends[1].link.call(&[], 1, 0).is_ok());
    // The batch without messages is under way and fills the window, so the call waits.
    assert_eq!(call_and_flush(&mut ends[0], 0, 1), (1, 0));
    ends[0].take_send_completions();
    assert!(ends[0].flush(|| true).is_ok());
    assert_eq!(ends[0].link.stats().messages_sent, 1);
}
