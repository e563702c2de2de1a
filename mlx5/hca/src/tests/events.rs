//! A sleeper that never looks by itself is woken.

use std::sync::mpsc;
use std::time::Duration;

use super::hand::{Hand, SEND};
use crate::testing::sleep_without_end;

/// Nothing here takes long.
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
                // Warm: the lane is being polled. Cold: a sender sets a ready bit, and sees nobody sleeping.
                for _ in 0..if warm { 3 } else { 1 } {
                    let to = if is_datagram { vec![hand.datagram(7)] } else { vec![] };
                    let wqe = hand.wqe(SEND, true, &to);
                    hand.push(&wqe);
                    hand.ring();
                    hand.hca.sleep_at_once();
                    assert_eq!(hand.reap(), (1, 1));
                }
            }
        }
        done_tx.send(()).unwrap();
    });
    done_rx.recv_timeout(WATCHDOG).expect("it slept");
    thread.join().unwrap();
}
