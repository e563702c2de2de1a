//! A peer that is not copyrpc.

use std::cell::RefCell;

use copyrpc::{CallFailure, CloseReason, Outcome};

use crate::support::{Pair, small, step_until};

/// The garbage of a peer ends its own connection; the other connection continues.
#[test]
fn a_peer_that_talks_garbage_ends_its_own_connection_only() {
    let pair = Pair::small();
    // The liar gets a record whose ring begins 1 KiB after the start of the victim's ring, so all
    // its batches are misplaced.
    let victim = pair.server.create_endpoint(&small()).unwrap();
    let liar = pair.client.create_endpoint(&small()).unwrap();
    let mut wrong_place = victim.local_info();
    wrong_place.published_addr = wrong_place.recv_ring_addr;
    wrong_place.published_rkey = wrong_place.recv_ring_rkey;
    let record = liar.local_info();
    let victim = victim.connect(&record).unwrap();
    let mut shifted = wrong_place;
    shifted.recv_ring_addr += 1024;
    let liar = liar.connect(&shifted).unwrap();
    victim.call(b"waiting", 77, 0).unwrap();
    // At the next position, the victim finds no batch but zero bytes: a batch without messages that
    // is not empty.
    liar.call(&[0xff; 100], 1, 0).unwrap();
    let failures = RefCell::new(Vec::new());
    let fail = |serial, outcome: Outcome<'_>| {
        failures
            .borrow_mut()
            .push((serial, outcome.map(|bytes| bytes.to_vec())))
    };
    let step = || {
        pair.client.poll_into(&pair.ended);
        pair.server.poll(fail).unwrap();
    };
    step_until(|| !failures.borrow().is_empty(), step);
    assert!(
        matches!(victim.closed(), Some(CloseReason::Protocol(_))),
        "{:?}",
        victim.closed()
    );
    let failures = failures.take();
    assert!(
        matches!(
            failures[..],
            [(77, Err(CallFailure::Closed(CloseReason::Protocol(_))))]
        ),
        "{failures:?}"
    );
    pair.to_server.call(b"unharmed", 5, 20).unwrap();
    step_until(
        || pair.ended.borrow().iter().any(|(serial, _)| *serial == 5),
        || {
            pair.poll();
            pair.server.echo_all();
        },
    );
    assert!(pair.ended.take().contains(&(5, Ok(b"unharmed".to_vec()))));
}
