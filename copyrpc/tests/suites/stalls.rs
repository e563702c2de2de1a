//! Peers that do not poll for longer than the stall timeout: only one that is stopped while it owes
//! something is given up.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use copyrpc::{ClientError, ClientOptions, CloseReason, EndpointConfig, ServerOptions};

use crate::local::{Net, serve};

const STALL: Duration = Duration::from_millis(400);
/// Duration of a handler, or of a pause between calls, that exceeds the stall timeout.
const LONG: Duration = Duration::from_millis(1_200);

fn options(net: &Net) -> (ServerOptions, ClientOptions) {
    let (server, client) = (net.server_options(), net.client_options());
    let endpoint = EndpointConfig {
        keepalive: STALL / 10,
        stall_timeout: STALL,
        ..client.endpoint.clone()
    };
    (
        ServerOptions {
            endpoint: endpoint.clone(),
            ..server
        },
        ClientOptions { endpoint, ..client },
    )
}

/// A client that calls whenever its user wants does not poll between calls. Meanwhile the late
/// reply stays in its ring.
#[test]
fn a_client_that_pauses_after_a_call_that_timed_out_keeps_its_connection() {
    let net = Net::new();
    let (server_options, options) = options(&net);
    let served = serve("127.0.0.1:0", server_options, |server| {
        server
            .serve(|request| {
                thread::sleep(Duration::from_millis(u64::from(request.to_vec()[0])));
                b""
            })
            .unwrap();
    });
    let mut client = copyrpc::Client::with_options(served.address, &options).unwrap();
    for _ in 0..2 {
        assert!(matches!(
            client.call_within(&[200], Duration::from_millis(50)),
            Err(ClientError::TimedOut)
        ));
        thread::sleep(LONG);
        client.call(&[0]).unwrap();
    }
    served.end();
}

/// The thread that runs the handlers is the one that polls.
#[test]
fn a_handler_longer_than_the_stall_timeout_cuts_off_no_client() {
    let net = Net::new();
    let (server_options, options) = options(&net);
    let served = serve("127.0.0.1:0", server_options, |server| {
        server
            .serve(|_| {
                thread::sleep(LONG);
                b""
            })
            .unwrap();
    });
    let address = served.address;
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut client = copyrpc::Client::with_options(address, &options).unwrap();
                client.call(b"").unwrap();
            });
        }
    });
    served.end();
}

/// The server has run a handler, and runs no handler when it stops polling. At its end,
/// `Server::serve` would send its clients a goodbye.
#[test]
fn a_server_that_stops_between_its_handlers_is_given_up() {
    let net = Net::new();
    let (server_options, options) = options(&net);
    let (go_on, wait) = mpsc::channel::<()>();
    let (freeze, frozen) = mpsc::channel();
    let served = serve("127.0.0.1:0", server_options, move |server| {
        while frozen.try_recv() != Ok(()) {
            server.step().unwrap();
            std::iter::from_fn(|| server.recv()).for_each(|request| request.reply(b"").unwrap());
        }
        // This thread does nothing, like a stopped process.
        assert!(wait.recv().is_err());
    });
    let mut client = copyrpc::Client::with_options(served.address, &options).unwrap();
    client.call(b"").unwrap();
    freeze.send(()).unwrap();
    // Requests that arrive before the server stops are answered.
    let error = std::iter::from_fn(|| Some(client.call(b"").map(<[u8]>::to_vec)))
        .find_map(Result::err)
        .unwrap();
    assert!(
        matches!(error, ClientError::Closed(CloseReason::PeerStalled)),
        "{error}"
    );
    drop(go_on);
    served.end();
}
