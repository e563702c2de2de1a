//! A sleeper without a time limit is woken. A sleeper whose wake-up is lost wakes by its own time
//! limit.

use std::sync::mpsc;
use std::time::Duration;

use copyrpc_shm::sleep::{self, Due, Sleeper};

use super::hand::{Hand, SEND};
use crate::hca::POLLS_PER_CHECK;
use crate::shared::memory::ready_words;
use crate::sleep::Idle;
use crate::testing::sleep_without_end;

/// Watchdog, far above the duration of the test.
const WATCHDOG: Duration = Duration::from_secs(120);

#[test]
fn what_is_sent_between_the_last_look_and_the_sleep_ends_it() {
    sleep_without_end();
    let (done_tx, done_rx) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        for is_datagram in [false, true] {
            let mut hand = Hand::new(false, false, is_datagram);
            for warm in [false, true] {
                hand.post_receives();
                // Warm: the lane is polled. Cold: a sender sets a ready bit, and sees no sleeper.
                for _ in 0..if warm { 3 } else { 1 } {
                    let to = if is_datagram {
                        vec![hand.datagram(7)]
                    } else {
                        vec![]
                    };
                    let wqe = hand.wqe(SEND, true, &to);
                    hand.post(&wqe);
                    // Sent as if right after the last poll.
                    sleep::sleep_once(&mut Idle(&hand.hca), Duration::MAX);
                    assert_eq!(hand.reap(), (1, 1));
                }
            }
        }
        done_tx.send(()).unwrap();
    });
    done_rx.recv_timeout(WATCHDOG).expect("it slept");
    thread.join().unwrap();
}

/// R4: the announcement of a message is lost, as it could be if the barrier did not cover the
/// sender's processor.
#[test]
fn a_message_that_was_not_announced_is_found() {
    type Find = fn(&Hand);
    let finds: [Find; 3] = [
        |hand| (0..=POLLS_PER_CHECK).for_each(|_| _ = hand.hca.empty_poll()),
        |hand| _ = sleep::wait([&mut Idle(&hand.hca) as &mut dyn Sleeper], Some(WATCHDOG)),
        |hand| _ = hand.hca.wait(Some(5_000_000), &mut Due(Duration::MAX)),
    ];
    for find in finds {
        let mut hand = Hand::new(false, false, false);
        hand.post_receives();
        let wqe = hand.wqe(SEND, true, &[]);
        hand.post(&wqe);
        ready_words(&hand.hca.memory).drain(|_| ());
        assert_eq!(hand.recv_cq.poll().len(), 0);
        find(&hand);
        assert_eq!(hand.reap(), (1, 1));
    }
}
