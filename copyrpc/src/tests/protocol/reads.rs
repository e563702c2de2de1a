//! READs of an end that waits for news that its peer does not send (L5): their frequency. `defects`
//! and `window` show the causes of a READ.

use crate::link::{LinkConfig, Window};

use super::defects::{config, pair};
use super::sim::{End, execute};

const POLLS: usize = 1_000;
/// Number of polls of the longest pause, plus the poll that posts the READ after the pause.
const LONGEST: usize = 65;

/// The reason why side 0 waits for its peer's words.
#[derive(Clone, Copy, PartialEq)]
enum Wait {
    RefusedCall,
    BatchLimit,
    Window,
}

fn waiting_pair(wait: Wait) -> [End; 2] {
    let config = LinkConfig {
        keepalive_ns: u64::MAX,
        ..config()
    };
    let mut ends = pair(&match wait {
        Wait::RefusedCall => LinkConfig {
            peer_credit: 64,
            ..config
        },
        Wait::BatchLimit => LinkConfig {
            peer_batches: 1,
            ..config
        },
        Wait::Window => LinkConfig {
            window: Window::Consumption {
                batches: 1,
                exempt_bytes: 4096,
            },
            ..config
        },
    });
    for _ in 0..2 {
        if wait != Wait::RefusedCall {
            ends[0].link.call(&[], 0, 0).unwrap();
        }
        assert!(ends[0].flush(|| true).is_ok());
    }
    ends
}

/// Lets side 0 poll while its peer does nothing. Returns the numbers of the polls that posted a
/// READ; each READ is executed at once.
fn polls_with_read(ends: &mut [End; 2], wait: Wait, polls: usize) -> Vec<usize> {
    let step = |_: &usize| {
        if wait == Wait::RefusedCall {
            while ends[0].link.call(&[], 0, 212).is_ok() {}
        }
        ends[0].poll(usize::MAX, 1, |_, _| ());
        assert!(ends[0].flush(|| true).is_ok());
        let has_read = ends[0].read_if_wanted(0);
        assert!(
            has_read || wait != Wait::BatchLimit || !ends[0].link.is_quiet(),
            "the next flush has to look again"
        );
        while execute(ends, 0) {}
        ends[0].take_send_completions();
        has_read
    };
    (0..polls).filter(step).collect()
}

#[test]
fn reads_that_bring_nothing_become_rare_and_never_end() {
    for wait in [Wait::RefusedCall, Wait::BatchLimit, Wait::Window] {
        let mut ends = waiting_pair(wait);
        let reads = polls_with_read(&mut ends, wait, POLLS);
        let pauses: Vec<_> = reads.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
        assert_eq!(reads[0], 0);
        assert_eq!(pauses[..7], [1, 2, 4, 8, 16, 32, 64]);
        assert!(
            pauses[7..].iter().all(|pause| *pause == LONGEST - 1)
                && pauses.len() >= POLLS / LONGEST,
            "{pauses:?}"
        );
        assert_eq!(ends[0].link.stats().reads, reads.len() as u64);
    }
}

#[test]
fn a_read_with_news_ends_the_pauses() {
    for wait in [Wait::RefusedCall, Wait::BatchLimit, Wait::Window] {
        let mut ends = waiting_pair(wait);
        polls_with_read(&mut ends, wait, POLLS);
        // The next READ finds only a new heartbeat, which makes no room.
        ends[1].link.call(&[], 1, 0).unwrap();
        ends[1].sweep();
        let reads = polls_with_read(&mut ends, wait, 3 * LONGEST);
        assert!(
            reads.len() > 1 && reads.windows(2).all(|pair| pair[1] - pair[0] == LONGEST),
            "{reads:?}"
        );
        // The next READ finds only credit that is not enough.
        ends[1].tell_more_credit();
        let reads = polls_with_read(&mut ends, wait, LONGEST + 4);
        let news = reads[0];
        assert!(news < LONGEST);
        assert_eq!(reads[1..3], [news + 1, news + 3]);
    }
}

#[test]
fn a_batch_ends_the_pauses() {
    let wait = Wait::RefusedCall;
    let mut ends = waiting_pair(wait);
    polls_with_read(&mut ends, wait, POLLS);
    assert!(polls_with_read(&mut ends, wait, 2).is_empty());
    ends[1].link.call(&[], 1, 0).unwrap();
    assert!(ends[1].flush(|| true).is_ok());
    while execute(&mut ends, 1) {}
    ends[0].poll(usize::MAX, 1, |_, _| ());
    // Once the words have arrived, no READ is wanted until the next refusal.
    assert!(!ends[0].read_if_wanted(0));
    assert_eq!(polls_with_read(&mut ends, wait, 6), [0, 2, 5]);
}

/// If a refusal ended the pause, a caller that tries again and again would READ in every poll.
#[test]
fn a_refusal_does_not_end_a_pause_and_has_its_read_after_it() {
    let wait = Wait::RefusedCall;
    let mut ends = waiting_pair(wait);
    assert_eq!(polls_with_read(&mut ends, wait, 8), [0, 2, 5]);
    // The last refusal leads to a READ without a further refusal.
    let mut without_refusal = (0..POLLS).filter(|_| {
        let has_read = ends[0].read_if_wanted(0);
        while execute(&mut ends, 0) {}
        ends[0].take_send_completions();
        has_read
    });
    assert_eq!(
        (without_refusal.next(), without_refusal.next()),
        (Some(2), None)
    );
    assert_eq!(polls_with_read(&mut ends, wait, LONGEST)[..2], [8, 25]);
}

#[test]
fn a_probe_waits_for_no_pause() {
    let mut ends = pair(&LinkConfig {
        peer_credit: 64,
        ..config()
    });
    ends[0].link.call(&[], 0, 0).unwrap();
    assert!(ends[0].flush(|| true).is_ok());
    polls_with_read(&mut ends, Wait::RefusedCall, 800);
    assert!(polls_with_read(&mut ends, Wait::RefusedCall, 1).is_empty());
    assert!(ends[0].link.call(&[], 0, 212).is_err());
    assert!(
        !ends[0].read_if_wanted(1_000_000),
        "the READs showed that the peer lives"
    );
    assert!(ends[0].read_if_wanted(1_001_000));
}
