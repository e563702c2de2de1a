//! The batch window through the driver, both ends in one thread. The rules are tested in
//! `protocol`.

use copyrpc::{Context, ContextBuilder, Endpoint, EndpointConfig, OptionError, SetupError, Window};
use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

fn builder(fabric: &LocalFabric) -> ContextBuilder {
    ContextBuilder::new(DeviceSpec::Soft(SoftOptions {
        fabric: FabricSpec::Local(fabric.clone()),
        ..SoftOptions::default()
    }))
}

fn with(window: Window) -> EndpointConfig {
    EndpointConfig {
        ring_size: 16 << 10,
        window,
        ..EndpointConfig::default()
    }
}

/// Returns client, server, and the endpoints of both.
fn pair(window: Window) -> (Context<u64>, Context<u64>, Endpoint<u64>, Endpoint<u64>) {
    let fabric = LocalFabric::new();
    let (client, server): (Context<u64>, Context<u64>) = (
        builder(&fabric).build().unwrap(),
        builder(&fabric).build().unwrap(),
    );
    let (a, b) = (
        client.create_endpoint(&with(window)).unwrap(),
        server.create_endpoint(&with(window)).unwrap(),
    );
    let (record_a, record_b) = (a.local_info(), b.local_info());
    let (endpoint, peer) = (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap());
    (client, server, endpoint, peer)
}

const EXEMPT: u64 = Window::DEFAULT_EXEMPT_BYTES;

/// The device executes the WRITE at once, but the window opens only when a drain takes the
/// completion.
#[test]
fn a_flush_posts_again_when_a_drain_took_the_completion() {
    let (client, _server, endpoint, _peer) = pair(Window::Completion {
        batches: 1,
        exempt_bytes: EXEMPT,
    });
    for serial in 0..4 {
        endpoint.call(b"", serial, 0).unwrap();
        client.flush_endpoints().unwrap();
    }
    assert_eq!(
        (
            client.stats().batches_sent,
            client.stats().messages_sent,
            client.stats().window_stalls
        ),
        (1, 1, 3)
    );
    client.drain(|_, _| ()).unwrap();
    client.flush_endpoints().unwrap();
    assert_eq!(
        (client.stats().batches_sent, client.stats().messages_sent),
        (2, 4)
    );
}

#[test]
fn a_flush_posts_again_when_the_peer_has_polled() {
    let (client, server, endpoint, _peer) = pair(Window::Consumption {
        batches: 1,
        exempt_bytes: EXEMPT,
    });
    for serial in 0..4 {
        endpoint.call(b"", serial, 0).unwrap();
        client.poll(|_, _| ()).unwrap();
    }
    assert_eq!(client.stats().messages_sent, 1);
    // The server answers nothing: a READ fetches the news. The server publishes the news with the
    // flush after the flush that could have sent an answer.
    server.poll(|_, _| ()).unwrap();
    server.poll(|_, _| ()).unwrap();
    for _ in 0..1_000 {
        client.poll(|_, _| ()).unwrap();
    }
    assert_eq!(
        (client.stats().batches_sent, client.stats().messages_sent),
        (2, 4)
    );
}

#[test]
fn every_call_is_answered_through_every_window() {
    let exempt = [0, 64, EXEMPT, u64::MAX];
    let completion = |exempt_bytes| {
        [1, 2].map(|batches| Window::Completion {
            batches,
            exempt_bytes,
        })
    };
    let consumption = |exempt_bytes| {
        [1, 2].map(|batches| Window::Consumption {
            batches,
            exempt_bytes,
        })
    };
    for window in exempt
        .into_iter()
        .flat_map(|exempt| [completion(exempt), consumption(exempt)])
        .flatten()
    {
        let (client, server, endpoint, _peer) = pair(window);
        let (mut issued, mut ended) = (0, 0);
        for _ in 0..100_000 {
            while issued < 500 && endpoint.call(&[issued as u8; 200], issued, 200).is_ok() {
                issued += 1;
            }
            let on_response = |serial: u64, outcome: copyrpc::Outcome<'_>| {
                assert_eq!(outcome.unwrap().to_vec(), [serial as u8; 200]);
                ended += 1;
            };
            client.poll(on_response).unwrap();
            if ended == 500 {
                break;
            }
            server.poll(|_, _| ()).unwrap();
            while let Some(request) = server.recv() {
                let data = request.data().to_vec();
                request.reply(&data).unwrap();
                // Each reply is a batch of its own.
                server.flush_endpoints().unwrap();
            }
        }
        assert_eq!(ended, 500, "{window:?}: {:?}", client.stats());
        let has_stalled = client.stats().window_stalls + server.stats().window_stalls > 0;
        assert_eq!(
            has_stalled,
            exempt
                .iter()
                .position(|exempt| *exempt == exempt_of(window))
                > Some(1),
            "{window:?}"
        );
    }
}

fn exempt_of(window: Window) -> u64 {
    match window {
        Window::Off => 0,
        Window::Completion { exempt_bytes, .. } | Window::Consumption { exempt_bytes, .. } => {
            exempt_bytes
        }
    }
}

/// B2: the completions of batches that arrived are outstanding together with the completions of
/// batches that did not.
#[test]
fn a_completion_window_takes_its_share_of_the_completion_queue() {
    let context: Context<u64> = builder(&LocalFabric::new())
        .srq_size(63)
        .cq_size(64)
        .build()
        .unwrap();
    let config = |window| EndpointConfig {
        batches_in_flight: 14,
        raw_operations: 0,
        ..with(window)
    };
    let windowed = config(Window::Completion {
        batches: 5,
        exempt_bytes: EXEMPT,
    });
    let _first = context.create_endpoint(&windowed).unwrap();
    let _second = context.create_endpoint(&windowed).unwrap();
    assert!(matches!(
        context.create_endpoint(&windowed),
        Err(SetupError::Full(OptionError {
            option: "cq_size",
            value: 64,
            legal
        })) if legal.starts_with("at least 81,")
    ));
    let consumption = config(Window::Consumption {
        batches: 5,
        exempt_bytes: EXEMPT,
    });
    assert!(matches!(
        context.create_endpoint(&consumption),
        Err(SetupError::Full(error)) if error.legal.starts_with("at least 76,")
    ));
}

#[test]
fn a_window_without_a_batch_is_refused() {
    let context: Context<u64> = builder(&LocalFabric::new()).build().unwrap();
    for window in [
        Window::Completion {
            batches: 0,
            exempt_bytes: 1,
        },
        Window::Consumption {
            batches: 0,
            exempt_bytes: 1,
        },
    ] {
        assert!(matches!(
            context.create_endpoint(&with(window)),
            Err(SetupError::Option(OptionError {
                option: "window",
                ..
            }))
        ));
    }
}
