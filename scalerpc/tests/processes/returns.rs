//! A server that is killed while it has kept every slot of its clients, and the next server at its
//! address.

use std::time::{Duration, Instant};

use copyrpc_testing::executor::block_on;
use copyrpc_testing::helpers::{Helper, PATIENCE, Scratch, limited, say, wait_for};
use copyrpc_testing::limits::any_port;
use scalerpc::{AsyncClient, Client, ClientOptions, DEFAULT_TYPE, Handlers, Server, State};

/// Type of requests that are never answered. Those of type 0 are answered in upper case.
const KEPT: u16 = 1;
/// Timeout of calls that are never answered.
const SHORT: Duration = Duration::from_millis(50);
/// Number of slots of a client.
const SLOTS: usize = 8;

/// Runs in the helper: serves until it is killed.
pub(crate) fn run(address: &str) {
    let mut server = Server::bind(address).unwrap();
    say(server.local_addr().unwrap());
    let mut kept = Vec::new();
    let mut handlers = Handlers::new(server.max_payload());
    handlers.insert(DEFAULT_TYPE, |request: &[u8], response: &mut [u8]| {
        response[..request.len()].copy_from_slice(&request.to_ascii_uppercase());
        Ok(request.len())
    });
    handlers.insert_held(KEPT, |request| kept.push(request));
    server.serve_types(&mut handlers).unwrap();
}

fn start(address: &str, scratch: &Scratch) -> (Helper, String) {
    let mut server = Helper::start(&format!("serve {address}"), scratch);
    let address = server.hear();
    (server, address)
}

fn options() -> ClientOptions {
    ClientOptions {
        timeout: Some(SHORT),
        connect_timeout: PATIENCE,
        ..ClientOptions::default()
    }
}

/// S20: the client waits only for late responses, and has no free slot from which it could post a
/// request.
#[test]
fn a_client_all_of_whose_calls_ran_out_of_time_learns_that_its_server_was_killed() {
    limited(|| {
        let scratch = Scratch::new("returns");
        let (mut server, address) = start(&any_port(), &scratch);
        let mut client = Client::with_options(&*address, &options()).unwrap();
        let rdma = client.connection().rdma();
        rdma.set_timeout_ns(SHORT.as_nanos() as u64);
        while rdma.call(KEPT, b"kept").is_ok() {}
        let mut ended = 0;
        wait_for("the calls end", || {
            rdma.poll();
            ended += usize::from(rdma.poll_completion(&mut []).is_some());
            ended == SLOTS
        });
        server.kill();
        wait_for("the client learns of the death", || {
            rdma.poll();
            matches!(rdma.state(), State::Closed(_))
        });
        let (_server, _) = start(&address, &scratch);
        assert_eq!(client.call_within(b"again", PATIENCE).unwrap(), b"AGAIN");
    });
}

/// The client's thread sleeps while it waits.
#[test]
fn an_async_client_all_of_whose_calls_ran_out_of_time_goes_on_with_the_next_server() {
    limited(|| {
        let scratch = Scratch::new("async-returns");
        let (mut server, address) = start(&any_port(), &scratch);
        block_on(async {
            let client = AsyncClient::with_options(address.clone(), &options())
                .await
                .unwrap();
            for _ in 0..SLOTS {
                client.call_type(KEPT, b"kept").await.unwrap_err();
            }
            server.kill();
            let (_server, _) = start(&address, &scratch);
            let began = Instant::now();
            while client
                .call_within(b"again", Duration::from_millis(500))
                .await
                .is_err()
            {
                assert!(began.elapsed() < PATIENCE, "no call gets through");
            }
        });
    });
}
