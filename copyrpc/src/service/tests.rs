//! Devices that break down under servers and clients. Tests outside this crate cannot access these
//! devices.

use std::future::Future;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use copyrpc_calls::OptionError;
use copyrpc_calls::futures::Worker;
use copyrpc_calls::{Dial, Ending, StopHandle};
use copyrpc_testing::executor::block_on;
use copyrpc_testing::limits;
use mlx5::{AsyncEvent, Device, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use mlx5_rendezvous::{Event, Events, LIFELINE_INTERVAL};

use super::*;
use crate::config::EndpointConfig;
use crate::connect::{EXCHANGE_RECORD_SIZE, RecordError, Refusal};
use crate::context::ContextBuilder;
use crate::error::{CallError, CallFailure, CloseReason, ProtocolError, SetupError};

const WATCHDOG: Duration = Duration::from_secs(60);

fn device(fabric: &LocalFabric) -> DeviceSpec {
    DeviceSpec::Soft(SoftOptions {
        fabric: FabricSpec::Local(fabric.clone()),
        ..SoftOptions::default()
    })
}

fn client_options(fabric: &LocalFabric) -> ClientOptions {
    ClientOptions {
        device: device(fabric),
        ..ClientOptions::default()
    }
}

fn break_down(device: &Device) {
    device.soft().unwrap().break_down();
}

fn caller(address: SocketAddr, options: &ClientOptions) -> Caller {
    Caller::dial(address, options, true, &|| true).unwrap()
}

/// Starts a server, which serves until it is stopped, or until the request "die" has broken its
/// device. Returns the address of the server, its stop handle and its thread.
fn serve(fabric: &LocalFabric) -> (SocketAddr, StopHandle, JoinHandle<Result<(), SetupError>>) {
    serve_at(
        SocketAddr::from(([127, 0, 0, 1], 0)),
        ServerOptions {
            device: device(fabric),
            ..ServerOptions::default()
        },
    )
}

fn serve_at(
    address: SocketAddr,
    options: ServerOptions,
) -> (SocketAddr, StopHandle, JoinHandle<Result<(), SetupError>>) {
    let (tell, told) = std::sync::mpsc::channel();
    let serving = thread::spawn(move || {
        let mut server = Server::with_options(address, &options).unwrap();
        tell.send((server.local_addr().unwrap(), server.stop_handle()))
            .unwrap();
        let device = server.context.device().clone();
        server.serve(|request| {
            if request.to_vec() == b"die" {
                break_down(&device);
            }
            *b"alive"
        })
    });
    let (address, stop) = told.recv().unwrap();
    (address, stop, serving)
}

#[test]
fn a_server_whose_device_breaks_down_ends_and_says_why() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let (address, _, serving) = serve(&fabric);
    let mut client = Client::with_options(address, &client_options(&fabric)).unwrap();
    assert_eq!(client.call(b"?").unwrap(), b"alive");
    let error = client.call_within(b"die", WATCHDOG).unwrap_err();
    assert!(
        matches!(error, ClientError::Closed(_)) && error.may_have_executed(),
        "{error}"
    );
    let error = serving.join().unwrap().unwrap_err();
    assert!(
        matches!(error, SetupError::Broken(AsyncEvent::DeviceFatal)),
        "{error}"
    );
}

#[test]
fn a_client_whose_device_breaks_down_opens_it_again() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let (address, stop, serving) = serve(&fabric);
    let mut client = Client::with_options(address, &client_options(&fabric)).unwrap();
    for round in 1..4 {
        assert_eq!(client.call(b"?").unwrap(), b"alive");
        break_down(client.connection().context.device());
        // The device reports the breakdown within 10 ms.
        let broken = client.call(b"?");
        assert!(
            matches!(
                broken,
                Ok(_)
                    | Err(ClientError::Closed(CloseReason::Device(
                        AsyncEvent::DeviceFatal
                    )))
            ),
            "{broken:?}"
        );
        assert_eq!(client.call(b"?").unwrap(), b"alive");
        assert!(
            client.stats().calls > 2 * round,
            "also those of the devices before"
        );
    }
    stop.stop();
    serving.join().unwrap().unwrap();
}

#[test]
fn an_async_client_whose_device_breaks_down_opens_it_again_and_is_woken_there() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let (address, stop, serving) = serve(&fabric);
    let options = ClientOptions {
        endpoint: crate::EndpointConfig {
            idle_keepalive: None,
            ..Default::default()
        },
        ..client_options(&fabric)
    };
    let (mut worker, client) = Worker::new(caller(address, &options));
    let call = |worker: &mut Worker<Caller>| {
        let mut call = client.call(b"?");
        loop {
            if let Poll::Ready(reply) =
                Pin::new(&mut call).poll(&mut TaskContext::from_waker(Waker::noop()))
            {
                break reply;
            }
            worker.turn();
        }
    };
    for _ in 0..3 {
        assert_eq!(call(&mut worker).unwrap(), b"alive");
        break_down(worker.connection.context.device());
        let broken = call(&mut worker);
        assert!(
            matches!(
                broken,
                Ok(_)
                    | Err(ClientError::Closed(CloseReason::Device(
                        AsyncEvent::DeviceFatal
                    )))
            ),
            "{broken:?}"
        );
        assert_eq!(call(&mut worker).unwrap(), b"alive");
    }
    // The call is the only event.
    let sleeper = thread::spawn({
        let mut call = client.call(b"?");
        move || {
            thread::sleep(Duration::from_millis(50));
            assert!(
                Pin::new(&mut call)
                    .poll(&mut TaskContext::from_waker(Waker::noop()))
                    .is_pending()
            );
            call
        }
    });
    let start = Instant::now();
    worker.connection.context.wait(Some(WATCHDOG / 2)).unwrap();
    assert!(start.elapsed() < WATCHDOG / 2, "the call woke it");
    drop((sleeper.join().unwrap(), worker));
    stop.stop();
    serving.join().unwrap().unwrap();
}

/// Checks every variant with the results of `is_retryable` and `may_have_executed`.
#[test]
fn an_error_says_whether_the_call_may_be_made_again() {
    let io = || std::io::Error::other("test");
    let later = (true, false);
    let never = (false, false);
    let made = (false, true);
    let event = AsyncEvent::DeviceFatal;
    let reasons = [
        CloseReason::Disconnected,
        CloseReason::Transport {
            syndrome: 1,
            vendor: 2,
        },
        CloseReason::Device(event),
        CloseReason::Protocol(ProtocolError::ReservedNotZero),
        CloseReason::PeerStalled,
        CloseReason::IdleTimeout,
        CloseReason::ClosedHere,
        CloseReason::ClosedByPeer,
    ];
    for reason in reasons {
        let expected = if reason == CloseReason::ClosedByPeer {
            later
        } else {
            made
        };
        let failure = CallFailure::from(reason);
        assert_eq!(
            (failure.is_retryable(), failure.may_have_executed()),
            expected,
            "{failure}"
        );
        let error: ClientError = failure.of_client();
        assert_eq!(
            (error.is_retryable(), error.may_have_executed()),
            expected,
            "{error}"
        );
    }
    for failure in [
        CallFailure::Dropped,
        CallFailure::Refused,
        CallFailure::ReplyTooLong { len: Some(1) },
        CallFailure::TimedOut,
    ] {
        assert_eq!(
            (failure.is_retryable(), failure.may_have_executed()),
            made,
            "{failure}"
        );
    }
    assert_eq!(
        [
            CallFailure::TimedOut.to_string(),
            ClientError::TimedOut.to_string()
        ],
        ["no reply in time"; 2]
    );
    let errors = [
        (CallError::RingFull(()), true),
        (CallError::InsufficientCredit(()), true),
        (
            CallError::PayloadTooLarge {
                user_data: (),
                len: 2,
                max: 1,
            },
            false,
        ),
        (
            CallError::AllowanceTooLarge {
                user_data: (),
                len: 2,
                max: 1,
            },
            false,
        ),
        (
            CallError::Closed {
                user_data: (),
                reason: CloseReason::ClosedHere,
            },
            false,
        ),
    ];
    for (error, is_retryable) in errors {
        assert_eq!(
            (error.is_retryable(), error.may_have_executed()),
            (is_retryable, false),
            "{error}"
        );
    }
    let errors = [
        (
            ClientError::Connect(SetupError::Full(OptionError::new(
                "cq_size",
                1,
                "at least 2",
            ))),
            later,
        ),
        (
            ClientError::Connect(SetupError::Unreachable {
                address: String::new(),
                source: io(),
            }),
            later,
        ),
        (
            ClientError::Connect(OptionError::new("max_reply", 2, "at most 1").into()),
            never,
        ),
        (ClientError::Connect(SetupError::Thread(io())), never),
        (ClientError::Connect(SetupError::Channel(io())), later),
        (
            ClientError::Connect(SetupError::Record(RecordError::Refused(Refusal::Full))),
            later,
        ),
        (
            ClientError::Connect(SetupError::Record(RecordError::Refused(
                Refusal::WrongSecret,
            ))),
            never,
        ),
        (
            ClientError::Connect(SetupError::Record(RecordError::Version {
                name: "",
                version: 2,
                known: 1,
            })),
            never,
        ),
        (
            ClientError::Connect(SetupError::Connect(mlx5::ConnectError::NoGid)),
            never,
        ),
        (ClientError::TooLarge { len: 2, max: 1 }, never),
        (ClientError::NotSent, later),
        (ClientError::NoCredit { given_up: 1 }, later),
        (ClientError::TimedOut, made),
        (ClientError::Refused, made),
        (ClientError::ReplyTooLong { len: Some(2) }, made),
        (ClientError::Dropped, made),
    ];
    for (error, expected) in errors {
        let ending: &dyn Ending = &error;
        assert_eq!(
            (ending.is_retryable(), ending.may_have_executed()),
            expected,
            "{ending}"
        );
    }
}

/// Peers that send a valid record and nothing more take the places of a server. They lose a place
/// as soon as a client needs it, not after 5 s.
#[test]
fn peers_that_stop_after_their_record_keep_no_client_out() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let options = ServerOptions {
        device: device(&fabric),
        max_clients: 2,
        ..ServerOptions::default()
    };
    let mut server = Server::with_options("127.0.0.1:0", &options).unwrap();
    let (address, stop) = (server.local_addr().unwrap(), server.stop_handle());
    let client = thread::spawn(move || {
        let context = ContextBuilder::new(device(&fabric)).build::<()>().unwrap();
        let silent = [(); 2].map(|()| {
            let endpoint = context.create_endpoint(&EndpointConfig::default()).unwrap();
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&endpoint.local_info().encode()).unwrap();
            // The answer shows that the peer has a place.
            stream.read_exact(&mut [0; EXCHANGE_RECORD_SIZE]).unwrap();
            (endpoint, stream)
        });
        let options = ClientOptions {
            connect_timeout: Duration::from_secs(4),
            ..client_options(&fabric)
        };
        let connected = Client::with_options(address, &options)
            .map(|mut client| client.call(b"x").unwrap().to_vec());
        stop.stop();
        drop(silent);
        connected.unwrap()
    });
    server.serve(|request| request.to_vec()).unwrap();
    assert_eq!(client.join().unwrap(), b"x");
}

/// The drop of a server waits until its close has arrived. If a client ended its queue pair before
/// the close arrives, the server would wait for the retries of the transport, which take 17 s in
/// this test.
#[test]
fn a_client_that_has_seen_the_close_lets_the_server_end() {
    limits::watchdog(WATCHDOG);
    for pause in [Duration::ZERO, 2 * LIFELINE_INTERVAL] {
        let fabric = LocalFabric::new();
        let mut options = ServerOptions {
            device: device(&fabric),
            stop_timeout: WATCHDOG,
            ..ServerOptions::default()
        };
        options.endpoint.connect.timeout = 19;
        let mut server = Server::with_options("127.0.0.1:0", &options).unwrap();
        let (address, stop) = (server.local_addr().unwrap(), server.stop_handle());
        let (tell_closed, closed) = std::sync::mpsc::channel();
        let (tell_called, called) = std::sync::mpsc::channel();
        let calling = thread::spawn(move || {
            let mut client = Client::with_options(address, &client_options(&fabric)).unwrap();
            client.call(b"?").unwrap();
            stop.stop();
            let () = closed.recv().unwrap();
            thread::sleep(pause);
            let late = client.call_within(b"?", LIFELINE_INTERVAL);
            assert!(late.unwrap_err().is_retryable());
            tell_called.send(()).unwrap();
            // The client lives, and does nothing, until the server has ended.
            let () = closed.recv().unwrap();
        });
        server.serve(|request| request.to_vec()).unwrap();
        tell_closed.send(()).unwrap();
        let () = called.recv().unwrap();
        let start = Instant::now();
        drop(server);
        assert!(start.elapsed() < Duration::from_secs(10));
        tell_closed.send(()).unwrap();
        calling.join().unwrap();
    }
}

/// The next server has another secret: every waiting call, not only the first, ends with the
/// refusal.
#[test]
fn every_call_that_waits_for_a_server_hears_why_it_is_refused() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let (address, stop, serving) = serve(&fabric);
    let caller = caller(address, &client_options(&fabric));
    stop.stop();
    serving.join().unwrap().unwrap();
    let options = ServerOptions {
        device: device(&fabric),
        secret: Some((*b"new").into()),
        ..ServerOptions::default()
    };
    let (_, stop, serving) = serve_at(address, options);
    let (mut worker, calls) = Worker::new(caller);
    let poll =
        |call: &mut AsyncCall| Pin::new(call).poll(&mut TaskContext::from_waker(Waker::noop()));
    let mut waiting = [(); 3].map(|()| calls.call([1]));
    waiting
        .iter_mut()
        .for_each(|call| assert!(poll(call).is_pending()));
    for call in &mut waiting {
        let ended = loop {
            worker.turn();
            if let Poll::Ready(ended) = poll(call) {
                break ended;
            }
        };
        let Err(
            error @ ClientError::Connect(SetupError::Record(RecordError::Refused(Refusal::Secret))),
        ) = ended
        else {
            panic!("{ended:?}")
        };
        assert!(!error.is_retryable());
    }
    stop.stop();
    serving.join().unwrap().unwrap();
}

/// The event of a client's end panics in the server's thread, whose drop has a further event.
#[test]
fn the_panic_of_a_function_for_events_is_the_error_of_its_server() {
    limits::watchdog(Duration::from_secs(60));
    let options = ServerOptions {
        device: device(&LocalFabric::new()),
        events: Events::new(|event| assert!(matches!(event, Event::Connected(_)), "{event}")),
        ..ServerOptions::default()
    };
    let server = block_on(AsyncServer::with_options(limits::any_port(), &options)).unwrap();
    let client_options = ClientOptions {
        device: options.device.clone(),
        ..ClientOptions::default()
    };
    let [first, _second] = [(); 2].map(|()| caller(server.local_addr(), &client_options));
    drop(first);
    let error = block_on(server.recv()).unwrap_err();
    assert_eq!(error.to_string(), "a thread of this end: it panicked");
    drop(server);
}

/// An attempt to connect again takes an hour, because no server listens any more.
#[test]
fn the_calls_of_a_connection_that_has_ended_end_before_another_one_is_made() {
    limits::watchdog(Duration::from_secs(60));
    let device = device(&LocalFabric::new());
    let options = ServerOptions {
        device: device.clone(),
        ..ServerOptions::default()
    };
    let server = block_on(AsyncServer::with_options(limits::any_port(), &options)).unwrap();
    let options = ClientOptions {
        device,
        connect_timeout: Duration::from_secs(3600),
        ..ClientOptions::default()
    };
    let caller = caller(server.local_addr(), &options);
    let (mut worker, calls) = Worker::new(caller);
    let poll =
        |call: &mut AsyncCall| Pin::new(call).poll(&mut TaskContext::from_waker(Waker::noop()));
    let (mut first, mut second) = (calls.call([1]), calls.call([2]));
    assert!(poll(&mut first).is_pending());
    assert_eq!(worker.turn(), Some(true));
    drop(server);
    // Does the same as a flush that has detected the end of the server.
    worker.connection.endpoint.abort();
    assert!(poll(&mut second).is_pending());
    let caller = thread::spawn(move || {
        assert!(matches!(block_on(first), Err(ClientError::Closed(_))));
        assert!(poll(&mut second).is_pending(), "it waits for a connection");
    });
    while !caller.is_finished() {
        worker.turn();
    }
    caller.join().unwrap();
}
