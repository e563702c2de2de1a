//! Thousands of endpoints of one context. With `COPYRPC_TEST_SCALE=4` they are 10,000: as many as
//! its shared receive queue has room for, with 2 batches in flight each.

use std::time::{Duration, Instant};

use copyrpc::mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use copyrpc::{Context, ContextBuilder, EndpointConfig};
use copyrpc_testing::limits;

const WATCHDOG: Duration = Duration::from_secs(180);

#[test]
fn thousands_of_endpoints_of_one_context_call_and_are_given_back() {
    limits::watchdog(WATCHDOG);
    let count = 2_500 * limits::scale_of("COPYRPC_TEST_SCALE").min(4);
    let config = EndpointConfig {
        ring_size: 4096,
        raw_operations: 0,
        batches_in_flight: 2,
        ..EndpointConfig::default()
    };
    let fabric = LocalFabric::new();
    let build = || -> Context<u32> {
        let device = DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(fabric.clone()),
            ..SoftOptions::default()
        });
        ContextBuilder::new(device)
            .endpoints_with(count, &config)
            .build()
            .unwrap()
    };
    let (client, server) = (build(), build());
    for round in 0..2 {
        let connect = |_| {
            let [a, b] =
                [&client, &server].map(|context| context.create_endpoint(&config).unwrap());
            let records = (a.local_info(), b.local_info());
            (
                a.connect(&records.1).unwrap(),
                b.connect(&records.0).unwrap(),
            )
        };
        let endpoints: Vec<_> = (0..count).map(connect).collect();
        assert_eq!(
            (client.endpoints(), server.endpoints()),
            (count as usize, count as usize)
        );
        for (number, (endpoint, _)) in (0..).zip(&endpoints) {
            endpoint.call(&u32::to_le_bytes(number), number, 4).unwrap();
        }
        let (mut is_answered, mut answered) = (vec![false; count as usize], 0);
        let answer = |context: &Context<u32>| {
            context
                .serve(
                    |request, reply| reply.send(&request.to_vec()).unwrap(),
                    |_, _| panic!("the server calls nobody"),
                )
                .unwrap()
        };
        while answered < count {
            client
                .poll(|number, reply| {
                    assert_eq!(reply.unwrap().to_vec(), number.to_le_bytes());
                    assert!(
                        !std::mem::replace(&mut is_answered[number as usize], true),
                        "{number} twice"
                    );
                    answered += 1;
                })
                .unwrap();
            answer(&server);
        }
        drop(endpoints);
        let since = Instant::now();
        while client.endpoints() + server.endpoints() > 0 {
            assert!(
                since.elapsed() < WATCHDOG,
                "round {round}: {} and {} are left",
                client.endpoints(),
                server.endpoints()
            );
            client.poll(|_, _| ()).unwrap();
            answer(&server);
        }
    }
    assert_eq!(client.stats().calls, 2 * u64::from(count));
}
