//! The rare paths of the protocol are taken, on real queues: a counter shows each path.

use copyrpc::ContextBuilder;

use crate::support::{Mode, Net, Pair, mode, payload, small, step_until};

/// The server answers nothing and sends nothing while the client fills its ring; only READs show
/// that the ring has room again.
#[test]
fn a_caller_whose_peer_sends_nothing_reads_how_far_it_is() {
    let config = copyrpc::EndpointConfig {
        batches_in_flight: 4,
        ..small()
    };
    let pair = Pair::new(|builder| builder, &config);
    let mut held = Vec::new();
    let mut next = 0;
    // Eight batches, where four may be in flight: the server's published record brings the
    // receipts.
    while held.len() < 8 {
        pair.to_server.call(&payload(next, 20), next, 0).unwrap();
        next += 1;
        pair.client.flush_endpoints().unwrap();
        held.append(&mut pair.receive(1));
    }
    let (client, server) = (pair.client.stats(), pair.server.stats());
    assert_eq!(
        (
            client.batches_sent,
            client.messages_sent,
            server.batches_sent
        ),
        (8, 8, 0)
    );
    assert!(client.reads > 0 && client.batch_stalls > 0, "{client:?}");
    drop(held);
    assert_eq!(pair.finish(8).len(), 8);
}

/// Without the limit, the fourth batch would find no receive posted: the connection would end, and
/// the sender's device would count an RNR NAK.
#[test]
fn more_batches_than_the_peer_has_receives_wait_at_the_sender() {
    let config = copyrpc::EndpointConfig {
        batches_in_flight: 2,
        ..small()
    };
    let pair = Pair::new(|builder| builder.srq_size(3), &config);
    for serial in 0..12 {
        pair.to_server.call(b"x", serial, 0).unwrap();
        pair.client.poll_into(&pair.ended);
    }
    let stats = pair.client.stats();
    assert!(
        stats.batches_sent == 2 && stats.batch_stalls >= 10,
        "{stats:?}"
    );
    assert_eq!(pair.finish(12).len(), 12);
    // `Checked` asserts this for all contexts; a NIC does not report it for a single context.
    let naks = pair.client.device_info().rnr_naks;
    assert!(naks == Some(0) || (naks.is_none() && mode() == Mode::Hardware));
}

/// Calls wrap at the client, and replies at the server, with every number of bytes left at the
/// ring's end.
#[test]
fn rings_wrap_in_both_directions_with_every_rest_at_their_end() {
    let pair = Pair::small();
    for serial in 0..2_000 {
        let sent = payload(serial, serial as usize * 53 % 400);
        pair.to_server.call(&sent, serial, sent.len()).unwrap();
        assert_eq!(pair.finish(1), [(serial, Ok(sent))]);
    }
    let (client, server) = (pair.client.stats(), pair.server.stats());
    assert!(
        client.wraps > 100 && server.wraps > 100,
        "{client:?}\n{server:?}"
    );
    // Each wrap is one batch of its own, without a message.
    assert_eq!(
        client.batches_sent,
        client.messages_sent + client.wraps + client.metadata_only
    );
}

/// The client consumes more than an eighth of its ring and has no message to send: the news is sent
/// in a batch without messages.
#[test]
fn news_without_data_travel_in_batches_of_their_own() {
    let pair = Pair::small();
    for serial in 0..6 {
        pair.to_server
            .call(&payload(serial, 100), serial, 100)
            .unwrap();
    }
    assert_eq!(pair.finish(6).len(), 6);
    step_until(|| pair.client.stats().metadata_only == 1, || pair.poll());
    assert_eq!(pair.client.stats().messages_sent, 6);
    step_until(
        || pair.server.stats().batches_received == pair.client.stats().batches_sent,
        || pair.poll(),
    );
}

/// Four batches of equal length arrive before the server polls.
#[test]
fn completions_are_compressed_if_asked_for_and_the_device_can() {
    for is_on in [false, true] {
        if let Err(error) = ContextBuilder::new(Net::new().spec())
            .cqe_compression(is_on)
            .build::<u64>()
        {
            assert!(is_on && mode() == Mode::Hardware, "{error}");
            assert_eq!(
                error.to_string(),
                "creating a queue: this device has no compression of CQEs of that size"
            );
            return;
        }
        let pair = Pair::new(|builder| builder.cqe_compression(is_on), &small());
        for serial in 0..4 {
            pair.to_server
                .call(&payload(serial, 20), serial, 20)
                .unwrap();
            pair.client.flush_endpoints().unwrap();
        }
        assert_eq!(
            pair.finish(4),
            [0, 1, 2, 3].map(|serial| (serial, Ok(payload(serial, 20))))
        );
        if mode() == Mode::Immediate {
            assert_eq!(
                pair.server.device().soft().unwrap().compressed(),
                if is_on { 4 } else { 0 }
            );
        }
    }
}

#[test]
fn what_a_flush_posts_is_announced_together_if_asked_for() {
    for is_on in [false, true] {
        let pair = Pair::new(|builder| builder.blueflame_batch(is_on), &small());
        for serial in 0..500 {
            let sent = payload(serial, serial as usize * 53 % 100);
            pair.to_server.call(&sent, serial, sent.len()).unwrap();
            assert_eq!(pair.finish(1), [(serial, Ok(sent))]);
        }
        for stats in [pair.client.stats(), pair.server.stats()] {
            assert_eq!(stats.blueflame_batches > 0, is_on, "{stats:?}");
        }
    }
}
