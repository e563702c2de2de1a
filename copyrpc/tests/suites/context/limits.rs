//! Impossible requests are refused, with the legal range and advice, and change nothing.

use std::time::Duration;

use copyrpc::{
    CallError, CallFailure, ContextBuilder, DEFAULT_ENDPOINTS, EXCHANGE_RECORD_SIZE,
    EndpointConfig, ExchangeRecord, OptionError, RecordError, SetupError, Window,
};

use mlx5::DeviceKind;

use crate::support::{Net, Pair, connect, small, step_until};

#[test]
fn endpoints_beyond_the_queues_are_refused_with_the_size_needed() {
    let net = Net::new();
    let context = net.build(|builder| builder.srq_size(100));
    let config = EndpointConfig {
        batches_in_flight: 50,
        ..small()
    };
    let first = context.create_endpoint(&config).unwrap();
    match context.create_endpoint(&config) {
        Err(SetupError::Full(OptionError {
            option: "srq_size",
            value: 100..150,
            legal,
        })) => {
            assert_eq!(
                legal,
                "at least 150, or ContextBuilder::endpoints of more than 1"
            );
        }
        other => panic!("{other:?}"),
    }
    drop(first);
    let _again = context.create_endpoint(&config).unwrap();
    let none = EndpointConfig {
        batches_in_flight: 0,
        ..small()
    };
    assert!(matches!(
        context.create_endpoint(&none),
        Err(SetupError::Option(OptionError {
            option: "batches_in_flight",
            value: 0,
            ..
        }))
    ));
    // An endpoint takes one completion per batch in flight and 8 more, but at most as many as its
    // send queue has entries.
    let few = net.build(|builder| builder.srq_size(63).cq_size(64));
    let config = EndpointConfig {
        batches_in_flight: 14,
        ..small()
    };
    let (first, _second) = (
        few.create_endpoint(&config).unwrap(),
        few.create_endpoint(&config).unwrap(),
    );
    assert!(matches!(
        few.create_endpoint(&config),
        Err(SetupError::Full(OptionError {
            option: "cq_size",
            value: 64,
            legal
        })) if legal == "at least 66, or ContextBuilder::endpoints of more than 2"
    ));
    let _shallow = few
        .create_endpoint(&EndpointConfig {
            max_send_wr: Some(16),
            ..config.clone()
        })
        .unwrap();
    drop(first);
    let _again = few.create_endpoint(&config).unwrap();
    let error = ContextBuilder::new(net.spec())
        .srq_size(100)
        .cq_size(8)
        .build::<u64>()
        .unwrap_err();
    assert!(error.to_string().contains("leave cq_size out"), "{error}");
}

/// The number of endpoints sizes all queues; so do the default and the size of the SRQ alone.
#[test]
fn a_context_has_room_for_the_endpoints_it_was_built_for() {
    let net = Net::new();
    let config = EndpointConfig {
        raw_operations: EndpointConfig::default().raw_operations,
        ..small()
    };
    let wide = EndpointConfig {
        batches_in_flight: 96,
        window: Window::Completion {
            batches: 3,
            exempt_bytes: 1024,
        },
        ..config.clone()
    };
    let contexts = [
        (net.build(|builder| builder), DEFAULT_ENDPOINTS, &config),
        (net.build(|builder| builder.endpoints(1)), 1, &config),
        (net.build(|builder| builder.endpoints(300)), 300, &config),
        (
            net.build(|builder| builder.endpoints_with(40, &wide)),
            40,
            &wide,
        ),
        (net.build(|builder| builder.srq_size(9_600)), 200, &config),
    ];
    for (context, count, config) in contexts {
        let endpoints: Vec<_> = (0..count)
            .map(|_| context.create_endpoint(config).unwrap())
            .collect();
        assert_eq!(endpoints.len(), count as usize);
    }
}

#[test]
fn illegal_configurations_are_refused() {
    let net = Net::new();
    let context = net.context();
    for ring_size in [0, 2048, 5000, 1 << 40] {
        let config = EndpointConfig {
            ring_size,
            ..small()
        };
        let error = context.create_endpoint(&config).unwrap_err();
        assert!(matches!(&error, SetupError::Option(error) if error.value == config.ring_size));
        assert!(error.to_string().contains("4096 to 268435456"), "{error}");
    }
}

#[test]
fn calls_that_no_ring_of_their_size_can_take_are_refused_for_good() {
    let pair = Pair::small();
    let (payload, allowance) = (
        pair.to_server.max_payload(),
        pair.to_server.max_response_allowance(),
    );
    for (len, allowed) in [
        (payload + 1, 0),
        (1 << 20, 0),
        (0, allowance + 1),
        (0, usize::MAX),
    ] {
        let error = pair.to_server.call(&vec![0; len], 7, allowed).unwrap_err();
        assert!(!error.is_retryable());
        let (what, limit) = if len > payload {
            (format!("payload of {len}"), payload)
        } else {
            (format!("allowance of {allowed}"), allowance)
        };
        let text = error.to_string();
        assert!(
            text.contains(&what)
                && text.contains(&format!("limit is {limit}"))
                && text.contains("use a larger ring"),
            "{text}"
        );
        assert_eq!(error.into_user_data(), 7);
    }
    assert_eq!(
        (
            pair.client.stats().calls,
            pair.to_server.outstanding_calls()
        ),
        (0, 0)
    );
    pair.to_server
        .call(&vec![1; payload], 8, allowance)
        .unwrap();
    assert_eq!(pair.finish(1), [(8, Ok(vec![1; payload]))]);
}

/// The count explains to the caller why it has no credit.
#[test]
fn calls_that_were_given_up_are_counted_until_the_peer_answers_them() {
    let pair = Pair::small();
    let allowance = pair.to_server.max_response_allowance();
    let cancelled = pair.to_server.call(b"", 1, allowance).unwrap();
    assert_eq!(pair.to_server.given_up_calls(), 0);
    assert_eq!(pair.to_server.cancel(cancelled), Some(1));
    pair.to_server
        .call_within(b"", 2, 0, Duration::ZERO)
        .unwrap();
    let held = pair.receive(2);
    step_until(|| !pair.ended.borrow().is_empty(), || pair.poll());
    assert_eq!(pair.ended.take(), [(2, Err(CallFailure::TimedOut))]);
    assert_eq!(
        pair.to_server.call(b"", 3, allowance),
        Err(CallError::InsufficientCredit(3))
    );
    assert_eq!(
        (
            pair.to_server.given_up_calls(),
            pair.to_server.outstanding_calls()
        ),
        (2, 0)
    );
    drop(held);
    step_until(|| pair.to_server.given_up_calls() == 0, || pair.poll());
    step_until(
        || pair.to_server.call(b"", 4, allowance).is_ok(),
        || pair.poll(),
    );
}

#[test]
fn a_call_on_a_closed_endpoint_says_why_it_is_closed() {
    let mut pair = Pair::small();
    pair.server = pair.net.context();
    pair.to_server.call(b"", 1, 0).unwrap();
    step_until(|| pair.to_server.closed().is_some(), || pair.poll());
    let reason = pair.to_server.closed().unwrap();
    // The call was made after the goodbye of the dropped context, so no handler executed it (G5),
    // whatever the reason for the end of the connection.
    assert_eq!(pair.ended.take(), [(1, Err(CallFailure::NotSent))]);
    let error = pair.to_server.call(b"", 2, 0).unwrap_err();
    assert_eq!(
        error,
        CallError::Closed {
            user_data: 2,
            reason
        }
    );
    assert!(
        !error.is_retryable() && error.to_string().contains("connect again"),
        "{error}"
    );
}

#[test]
fn endpoints_that_cannot_talk_refuse_each_other_and_leave_nothing_behind() {
    let net = Net::new();
    let context = net.build(|builder| builder.endpoints_with(2, &small()));
    let endpoint = || context.create_endpoint(&small()).unwrap();
    let large = context
        .create_endpoint(&EndpointConfig {
            ring_size: 8192,
            ..small()
        })
        .unwrap()
        .local_info();
    let error = endpoint().connect(&large).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ring_size is 4096: legal is 8192, the peer's value"
    );
    let mut overflowing = endpoint().local_info();
    overflowing.recv_ring_addr = u64::MAX - 1024;
    let error = endpoint().connect(&overflowing).unwrap_err();
    assert!(
        matches!(
            error,
            SetupError::Record(RecordError::Field {
                field: "receive ring address",
                ..
            })
        ),
        "{error}"
    );
    let mut other_device = endpoint().local_info();
    other_device.address.kind = other(other_device.address.kind);
    let error = endpoint().connect(&other_device).unwrap_err();
    let remedy = "open both as soft on one host, or each as a NIC or as soft:roce=ADDRESS";
    assert!(error.to_string().ends_with(remedy), "{error}");
    // There is room for two endpoints, and both are free.
    let (a, _b) = connect(endpoint(), endpoint());
    a.call(b"still usable", 1, 20).unwrap();
    let mut answers = 0;
    let step = || {
        context
            .poll(|_, outcome| answers += usize::from(outcome.is_ok()))
            .unwrap();
        context.echo_all();
    };
    step_until(|| a.outstanding_calls() == 0, step);
    assert_eq!(answers, 1);
    drop((a, _b));
    let context = net.context();
    let orphan = context.create_endpoint(&small()).unwrap();
    let record = orphan.local_info();
    drop(context);
    assert!(matches!(
        orphan.connect(&record),
        Err(SetupError::Misuse(_))
    ));
}

#[test]
fn a_queue_pair_that_does_not_exist_is_not_connected_to() {
    let net = Net::new();
    let context = net.context();
    let endpoint = || context.create_endpoint(&small()).unwrap();
    let mut nowhere = endpoint().local_info();
    nowhere.address.qpn = 0xff_ffff;
    let error = endpoint().connect(&nowhere).unwrap_err();
    assert!(matches!(error, SetupError::Connect(_)), "{error}");
}

const fn other(kind: DeviceKind) -> DeviceKind {
    match kind {
        DeviceKind::Soft => DeviceKind::Hardware,
        DeviceKind::Hardware => DeviceKind::Soft,
    }
}

#[test]
fn ends_of_unequal_mtus_use_the_smaller_one() {
    let net = Net::new();
    let context = net.context();
    let (a, b) = (
        context.create_endpoint(&small()).unwrap(),
        context.create_endpoint(&small()).unwrap(),
    );
    let (record_a, mut record_b) = (a.local_info(), b.local_info());
    let mtu = record_b.address.mtu;
    record_b.address.mtu = mtu / 2;
    let (a, b) = (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap());
    assert_eq!((a.path_mtu(), b.path_mtu()), (mtu / 2, mtu));
}

/// Records that an older or newer release would send, or that were damaged in transport.
#[test]
fn records_that_are_damaged_or_of_another_version_are_refused() {
    let net = Net::new();
    let context = net.context();
    let bytes = context
        .create_endpoint(&small())
        .unwrap()
        .local_info()
        .encode();
    let damaged = |at: usize| {
        let mut other = bytes;
        other[at] ^= 0x81;
        ExchangeRecord::decode(&other).unwrap_err().to_string()
    };
    assert_eq!(
        damaged(8),
        "copyrpc exchange record version 133, this end speaks 4: use equal releases"
    );
    let magic = r#"not a copyrpc exchange record, but "\xe2opyrpc\x00": another program is at this address"#;
    assert_eq!(damaged(0), magic);
    assert_eq!(
        damaged(16),
        "the peer's record has no valid address of a queue pair"
    );
    assert_eq!(
        damaged(74),
        "ring size is 8458240 in the record, legal is a power of two, 4096..=268435456"
    );
    assert!(ExchangeRecord::decode(&[0; EXCHANGE_RECORD_SIZE]).is_err());
}
