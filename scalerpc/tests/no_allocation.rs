//! After warm-up a call allocates nothing, at either end. (Forming groups anew allocates, at most
//! once in a rotation.)
#![allow(
    clippy::unwrap_used,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

#[path = "../../mlx5/tests/support/counting.rs"]
mod counting;
mod support;

use scalerpc::mlx5::DeviceSpec;
use scalerpc::{Handlers, RdmaServer, ServerConfig};
use support::connect;

#[test]
fn calls_allocate_nothing() {
    let config = ServerConfig {
        max_clients: 2,
        group_size: 2,
        ..ServerConfig::default()
    };
    let mut server = RdmaServer::new(&DeviceSpec::default(), &config).unwrap();
    let mut handlers = Handlers::new(server.max_payload());
    handlers.insert(1, |request: &[u8], _: &mut [u8]| Ok(request.len()));
    let mut clients = [
        connect(&DeviceSpec::default(), &mut server),
        connect(&DeviceSpec::default(), &mut server),
    ];
    let mut round = |calls: u64| {
        let (mut called, mut ended) = ([0; 2], 0);
        while ended < 2 * calls {
            for (client, called) in clients.iter_mut().zip(&mut called) {
                while *called < calls && client.call(1, &[7; 100]).is_ok() {
                    *called += 1;
                }
                client.poll();
                while let Some(completion) = client.poll_completion(&mut []) {
                    assert!(completion.outcome.is_ok());
                    ended += 1;
                }
            }
            server.step(&mut handlers, 16);
        }
    };
    round(500);
    assert_eq!(
        counting::calls_of(|| round(500)),
        0,
        "allocations in 1,000 calls"
    );
}
