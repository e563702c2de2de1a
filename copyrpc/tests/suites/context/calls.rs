//! Calls are answered, whatever their size, number and direction.

use copyrpc::EndpointConfig;

use crate::support::{Pair, payload, small, step_a_while, step_until};

/// Payloads of all sizes, so that batches are sent inline (up to 220 B), or partly inline and
/// partly gathered, from every offset in the ring.
#[test]
fn every_payload_size_comes_back_unchanged() {
    let pair = Pair::small();
    assert_eq!(
        (
            pair.to_server.max_payload(),
            pair.to_server.max_response_allowance()
        ),
        (500, 724)
    );
    for round in 0..3 {
        for len in 0..=500 {
            let serial = round * 1000 + len as u64;
            let sent = payload(serial, len);
            pair.to_server.call(&sent, serial, len).unwrap();
            assert_eq!(pair.finish(1), [(serial, Ok(sent))]);
        }
    }
    assert!(pair.client.stats().wraps > 10);
}

/// A connection with work to do and its context refer to each other, and the output must still end.
#[test]
fn an_endpoint_can_be_printed_at_any_time() {
    let pair = Pair::small();
    pair.to_server.call(b"x", 1, 0).unwrap();
    let text = format!("{:?} {:?}", pair.to_server, *pair.client);
    assert!(text.contains("calls: 1"), "{text}");
    assert_eq!(pair.finish(1).len(), 1);
}

#[test]
fn nothing_leaves_before_a_flush_and_then_all_in_one_write() {
    let pair = Pair::small();
    for serial in 0..8 {
        pair.to_server.call(b"x", serial, 0).unwrap();
    }
    step_a_while(|| {
        pair.client
            .drain(|_, _| panic!("no call can have ended"))
            .unwrap();
        pair.server.poll_quietly();
        assert!(pair.server.recv().is_none());
    });
    assert_eq!(pair.client.stats().batches_sent, 0);
    pair.client.flush_endpoints().unwrap();
    assert_eq!(
        (
            pair.client.stats().batches_sent,
            pair.client.stats().messages_sent
        ),
        (1, 8)
    );
    assert_eq!(pair.receive(8).len(), 8);
    assert_eq!(pair.server.stats().batches_received, 1);
}

#[test]
fn far_more_calls_than_receives_and_send_entries_lose_nothing() {
    let config = EndpointConfig {
        batches_in_flight: 2,
        max_send_wr: Some(8),
        ..small()
    };
    let pair = Pair::new(|builder| builder.srq_size(3), &config);
    let (mut next, mut ended) = (0, Vec::new());
    while ended.len() < 5_000 {
        while next < 5_000 {
            match pair
                .to_server
                .call(&payload(next, next as usize % 300), next, 300)
            {
                Ok(_) => next += 1,
                Err(error) if error.is_retryable() => break,
                Err(error) => panic!("{error}; at the peer {:?}", pair.to_client.closed()),
            }
        }
        ended.append(&mut pair.finish(1));
    }
    for (at, (serial, outcome)) in ended.iter().enumerate() {
        assert_eq!(
            (*serial, outcome),
            (at as u64, &Ok(payload(*serial, at % 300)))
        );
    }
    assert_eq!(ended.len(), 5_000);
    let stats = pair.client.stats();
    assert!(
        stats.reads > 0 && stats.wraps > 0 && stats.ring_full + stats.insufficient_credit > 0,
        "{stats:?}"
    );
}

/// WQEs and receives have counters of 16 bits.
#[test]
fn calls_one_by_one_go_round_the_counters_of_every_queue() {
    let pair = Pair::small();
    for serial in 0..=1 << 16 {
        let sent = payload(serial, 8);
        pair.to_server.call(&sent, serial, 8).unwrap();
        assert_eq!(pair.finish(1), [(serial, Ok(sent))]);
    }
}

#[test]
fn calls_of_both_sides_at_once_all_end() {
    let pair = Pair::small();
    for round in 0..500 {
        pair.to_server
            .call(&payload(round, 100), round, 100)
            .unwrap();
        pair.to_client
            .call(&payload(round, 50), 1_000 + round, 60)
            .unwrap();
        let step = || {
            pair.poll();
            pair.server.echo_all();
            while let Some(request) = pair.client.recv() {
                request.reply(&[1; 60]).unwrap();
            }
        };
        step_until(|| pair.ended.borrow().len() == 2, step);
        let mut ended = pair.ended.take();
        ended.sort_by_key(|(serial, _)| *serial);
        assert_eq!(
            ended,
            [
                (round, Ok(payload(round, 100))),
                (1_000 + round, Ok(vec![1; 60]))
            ]
        );
    }
}
