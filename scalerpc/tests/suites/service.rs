//! Servers and clients that connect through an address: strangers, silent peers, servers that start
//! late, stop and return, clients that vanish, handlers that answer later.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use copyrpc_testing::executor::block_on;
use copyrpc_testing::limits::{self, Moved, any_port};
use copyrpc_testing::methods::{self, Sums, numbers};
use copyrpc_testing::strangers;
use scalerpc::methods::Request as _;
use scalerpc::mlx5::{AsyncEvent, Clock, ConnectOptions, DeviceSpec, SoftOptions};
use scalerpc::rdma::exchange::{Accept, Admission, Hello, Offer, RecordError, Refusal};
use scalerpc::rdma::{PendingClient, RdmaOptions};
use scalerpc::{
    AsyncClient, Client, ClientError, ClientOptions, CloseReason, DEFAULT_TYPE, Events, Handlers,
    HeldRequest, RdmaClient, Secret, Server, ServerConfig, ServerOptions, ServerStats, SetupError,
    State, StopHandle,
};

use crate::support::caller::call_sync;

const WATCHDOG: Duration = Duration::from_secs(60);

/// A server in a thread of its own, which reverses the bytes of each request.
struct Running {
    address: SocketAddr,
    stop: StopHandle,
    thread: JoinHandle<(usize, ServerStats)>,
}

fn options(max_clients: u32) -> ServerOptions {
    let config = ServerConfig {
        max_clients,
        group_size: 8,
        slot_bytes: 256,
        ..ServerConfig::default()
    };
    ServerOptions {
        config,
        ..ServerOptions::default()
    }
}

fn start(address: &str, options: ServerOptions) -> Running {
    start_with(address, options, |server| {
        server
            .serve(|request| request.iter().rev().copied().collect::<Vec<u8>>())
            .unwrap()
    })
}

/// Starts a server that does `serve`. It reports its number of clients and its counters in the end.
fn start_with(
    address: &str,
    options: ServerOptions,
    serve: impl FnOnce(&mut Server) + Send + 'static,
) -> Running {
    let (tell, told) = mpsc::channel();
    let address = address.to_owned();
    let thread = thread::spawn(move || {
        let mut server = Server::with_options(address, &options).unwrap();
        tell.send((server.local_addr().unwrap(), server.stop_handle()))
            .unwrap();
        serve(&mut server);
        (server.clients(), server.stats())
    });
    let (address, stop) = told.recv_timeout(WATCHDOG).unwrap();
    Running {
        address,
        stop,
        thread,
    }
}

impl Running {
    fn stop(self) -> (usize, ServerStats) {
        self.stop.stop();
        let start = Instant::now();
        while !self.thread.is_finished() {
            assert!(start.elapsed() < WATCHDOG, "the server does not end");
            thread::sleep(Duration::from_millis(1));
        }
        self.thread.join().unwrap()
    }
}

/// A client keeps its zone between calls until another client needs one.
#[test]
fn more_clients_than_zones_pause_for_longer_than_a_client_may_drain_and_their_next_calls_work() {
    const CLIENTS: u8 = 12;
    let drain = Duration::from_millis(20);
    let base = options(u32::from(CLIENTS));
    let config = ServerConfig {
        group_size: 2,
        spare_zones: 0,
        drain_ns: drain.as_nanos() as u64,
        ..base.config
    };
    assert!(usize::from(CLIENTS) > 2 * config.layout().unwrap().zones);
    let server = start(&any_port(), ServerOptions { config, ..base });
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|_| Client::connect(server.address).unwrap())
        .collect();
    for round in 0..4 {
        for (client, name) in clients.iter_mut().zip(0..) {
            assert_eq!(client.call(&[name, round, 1]).unwrap(), [1, round, name]);
        }
        thread::sleep(3 * drain);
    }
    let (_, stats) = server.stop();
    assert_eq!(
        (stats.accepted, stats.evictions, stats.garbage),
        (4 * u64::from(CLIENTS), 0, 0),
        "{stats:?}"
    );
}

#[test]
fn many_clients_get_their_own_responses() {
    let server = start(&any_port(), options(32));
    let address = server.address;
    let client = |name: u8| {
        let mut client = Client::connect(address).unwrap();
        for call in 0..200_u8 {
            assert_eq!(client.call(&[name, call, 1]).unwrap(), [1, call, name]);
        }
        assert_eq!(client.call(&[]).unwrap(), []);
        let most = client.max_request();
        assert_eq!(client.call(&vec![name; most]).unwrap(), vec![name; most]);
        let too_long = client.call(&vec![0; most + 1]).unwrap_err();
        assert!(
            too_long.to_string().contains(&format!("{}", most + 1)),
            "{too_long}"
        );
        assert!(matches!(
            client.call_type(7, &[1]),
            Err(ClientError::UnknownType)
        ));
    };
    thread::scope(|scope| (0..12).for_each(|name| drop(scope.spawn(move || client(name)))));
    let (_, stats) = server.stop();
    assert_eq!((stats.accepted, stats.garbage), (12 * 203, 0));
}

#[test]
fn a_server_that_comes_late_is_waited_for_and_one_that_never_comes_is_named() {
    let address = TcpListener::bind(any_port()).unwrap().local_addr().unwrap();
    let client = thread::spawn(move || {
        Client::connect(address)
            .unwrap()
            .call(&[1, 2, 3])
            .unwrap()
            .to_vec()
    });
    thread::sleep(Duration::from_millis(200));
    let server = start(&address.to_string(), options(4));
    assert_eq!(client.join().unwrap(), [3, 2, 1]);
    server.stop();

    let impatient = ClientOptions {
        connect_timeout: Duration::from_millis(100),
        ..ClientOptions::default()
    };
    let error = Client::with_options(address, &impatient).unwrap_err();
    assert!(
        matches!(error, ClientError::Connect(SetupError::Unreachable { .. }))
            && error.to_string().contains(&address.to_string()),
        "{error}"
    );
    let error = Client::with_options("127.0.0.1:1", &impatient).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("connecting to the server at 127.0.0.1:1: "),
        "{error}"
    );
    let error = Server::bind("no address").unwrap_err();
    assert!(
        error.to_string().starts_with("listening at no address: "),
        "{error}"
    );
    let silent = TcpListener::bind(any_port()).unwrap();
    let address_of_other = silent.local_addr().unwrap();
    let error = Client::with_options(address_of_other, &impatient).unwrap_err();
    assert_eq!(error.to_string(), "exchanging records: timed out");
    // The peer sends less than a record, and then nothing.
    let other = thread::spawn(move || {
        // The client that has given up, and the next client.
        for _ in 0..2 {
            let (mut stream, _) = silent.accept().unwrap();
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    let patient = ClientOptions {
        connect_timeout: WATCHDOG,
        ..ClientOptions::default()
    };
    let error = Client::with_options(address_of_other, &patient).unwrap_err();
    assert_eq!(
        error.to_string(),
        "not a scalerpc offer record, but \"HTTP/1.1\": another program is at this address"
    );
    other.join().unwrap();
}

/// The call that was under way may fail. The first call after the end is known connects again.
#[test]
fn a_client_goes_on_with_the_next_server_at_the_address() {
    let server = start(&any_port(), options(4));
    let address = server.address.to_string();
    let mut client = Client::connect(address.clone()).unwrap();
    assert_eq!(client.call(&[1, 9]).unwrap(), [9, 1]);
    server.stop();
    for round in 0..3_u8 {
        let server = start(&address, options(4));
        let start = Instant::now();
        let answer = loop {
            match client.call_within(&[round, 5], Duration::from_secs(2)) {
                Ok(answer) => break answer,
                Err(ClientError::Closed(_) | ClientError::TimedOut) => {}
                Err(ClientError::NotSent) => {}
                Err(error) => panic!("{error}"),
            }
            assert!(start.elapsed() < WATCHDOG);
        };
        assert_eq!(answer, [5, round]);
        server.stop();
    }
}

/// The panic goes through the function that serves, and the server ends with its thread.
#[test]
fn the_call_whose_handler_panics_ends_as_dropped_although_the_server_ends_too() {
    limits::watchdog(WATCHDOG);
    let answered = start_with(&any_port(), options(4), |server| {
        server
            .serve(|request| {
                assert_ne!(request, b"panic");
                request.to_vec()
            })
            .unwrap()
    });
    let held = start_with(&any_port(), options(4), |server| {
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert_held(DEFAULT_TYPE, |request| {
            assert_ne!(request.payload(), b"panic");
            request.reply(b"fine").unwrap();
        });
        server.serve_types(&mut handlers).unwrap();
    });
    for server in [answered, held] {
        let mut client = Client::connect(server.address).unwrap();
        assert_eq!(client.call(b"fine").unwrap(), b"fine");
        let end = client.call(b"panic").unwrap_err();
        assert!(matches!(end, ClientError::Dropped), "{end}");
        assert!(server.thread.join().is_err());
    }
}

#[test]
fn a_client_finds_a_server_that_has_moved_by_its_name() {
    limits::watchdog(WATCHDOG);
    let server = start(&any_port(), options(4));
    let next = start("127.0.0.1:0", options(4));
    let mut client = Client::connect(Moved {
        first: server.address,
        name: format!("localhost:{}", next.address.port()),
    })
    .unwrap();
    assert_eq!(client.call(&[1, 2]).unwrap(), [2, 1]);
    server.stop();
    // The client may notice the end by this call, or before it.
    let _ended = client.call(&[3, 4]);
    assert_eq!(client.call(&[3, 4]).unwrap(), [4, 3]);
    next.stop();
}

/// The server does not answer. The next call does not get the late response of this call.
#[test]
fn a_call_ends_when_its_time_is_over_and_a_late_response_is_nobody_elses() {
    let (tell, held) = mpsc::channel::<HeldRequest>();
    let server = start_with(&any_port(), options(4), move |server| {
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert_held(DEFAULT_TYPE, |request| tell.send(request).unwrap());
        handlers.insert(1, |request: &[u8], response: &mut [u8]| {
            response[..request.len()].copy_from_slice(request);
            Ok(request.len())
        });
        server.serve_types(&mut handlers).unwrap();
    });
    let mut client = Client::connect(server.address).unwrap();
    let timed_out = client
        .call_within(&[1], Duration::from_millis(50))
        .unwrap_err();
    assert!(matches!(timed_out, ClientError::TimedOut), "{timed_out}");
    assert_eq!(client.call_type(1, &[2]).unwrap(), [2]);
    let request = held.recv_timeout(WATCHDOG).unwrap();
    assert_eq!(request.payload(), [1]);
    let (context, peer) = (request.context(), request.peer().unwrap());
    assert_eq!(context.client(), Some(peer.number));
    assert_eq!(context.address(), Some(peer.address));
    assert_eq!(context.is_wanted(), request.is_wanted());
    request.reply([99]).unwrap();
    for call in 0..50 {
        assert_eq!(client.call_type(1, &[call]).unwrap(), [call]);
    }
    let dropped = thread::spawn(move || drop(held.recv_timeout(WATCHDOG).unwrap()));
    let failed = client.call(&[3]).unwrap_err();
    assert!(matches!(failed, ClientError::Dropped), "{failed}");
    dropped.join().unwrap();
    server.stop();
}

/// A client whose call ran out of time cannot rest: the server that needs its zone evicts it. Its
/// next call detects the eviction before the server could see the call.
#[test]
fn a_call_of_a_client_that_was_evicted_meanwhile_connects_again_by_itself() {
    let base = options(8);
    let config = ServerConfig {
        group_size: 1,
        spare_zones: 0,
        drain_ns: 50_000_000,
        ..base.config
    };
    let (tell, evicted) = mpsc::channel();
    let server = start_with(
        &any_port(),
        ServerOptions { config, ..base },
        move |server| {
            let kept = RefCell::new(Vec::new());
            let mut handlers = Handlers::new(server.max_payload());
            handlers.insert_held(1, |request| kept.borrow_mut().push(request));
            handlers.insert(DEFAULT_TYPE, |_: &[u8], _: &mut [u8]| Ok(0));
            let start = Instant::now();
            while server.stats().evictions == 0 {
                server.step(&mut handlers).unwrap();
                assert!(start.elapsed() < WATCHDOG, "{:?}", server.stats());
            }
            tell.send(()).unwrap();
            server.serve_types(&mut handlers).unwrap();
        },
    );
    let hasty = ClientOptions {
        timeout: Some(Duration::from_millis(30)),
        ..ClientOptions::default()
    };
    let mut client = Client::with_options(server.address, &hasty).unwrap();
    let mut others = [(); 3].map(|()| Client::connect(server.address).unwrap());
    client.call_type(1, b"kept").unwrap_err();
    while evicted.try_recv().is_err() {
        others
            .iter_mut()
            .for_each(|other| _ = other.call(b"in turn").unwrap());
    }
    assert_eq!(client.call_within(b"again", WATCHDOG).unwrap(), b"");
    server.stop();
}

/// The server answers none of the requests that hold the slots.
#[test]
fn calls_that_were_given_up_hold_a_client_up_for_one_call_at_most() {
    let base = options(8);
    let config = ServerConfig {
        depth: 2,
        ..base.config
    };
    let server = start_with(&any_port(), ServerOptions { config, ..base }, |server| {
        let kept = RefCell::new(Vec::new());
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert_held(1, |request| kept.borrow_mut().push(request));
        handlers.insert(DEFAULT_TYPE, |_: &[u8], _: &mut [u8]| Ok(0));
        server.serve_types(&mut handlers).unwrap();
        assert!(kept.borrow().len() >= 6);
    });
    let hasty = ClientOptions {
        timeout: Some(Duration::from_millis(50)),
        ..ClientOptions::default()
    };
    let mut client = Client::with_options(server.address, &hasty).unwrap();
    for _ in 0..3 {
        while client.connection().rdma().given_up_calls() < 2 {
            // On a busy machine, the call may end before the server gets the request.
            let late = client.call_type(1, b"kept").unwrap_err();
            assert!(
                matches!(late, ClientError::TimedOut | ClientError::NotSent),
                "{late}"
            );
        }
        let stuck = client.call(b"no slot").unwrap_err();
        assert!(
            matches!(stuck, ClientError::NoCredit { given_up: 2 }),
            "{stuck}"
        );
        assert_eq!(
            client.call_within(b"a new connection", WATCHDOG).unwrap(),
            b""
        );
    }
    server.stop();
}

/// The handler takes longer than slices, drains and the intervals of probes, and the server does
/// nothing else meanwhile. A client whose thread the system suspends for longer than a drain is
/// evicted, and rightly so.
#[test]
fn a_handler_that_takes_longer_than_every_limit_costs_no_client_its_connection() {
    const LONG: Duration = Duration::from_millis(1_500);
    const CLIENTS: u8 = 6;
    const CALLS: u8 = 20;
    let base = options(16);
    let config = ServerConfig {
        group_size: 2,
        spare_zones: 0,
        drain_ns: 500_000_000,
        ..base.config
    };
    let server = start_with(&any_port(), ServerOptions { config, ..base }, |server| {
        let handler = |request: &[u8]| {
            if request[1] == CALLS / 2 && request[0] == 0 {
                thread::sleep(LONG);
            }
            request.to_vec()
        };
        server.serve(handler).unwrap();
    });
    let (address, all) = (server.address, &Barrier::new(CLIENTS.into()));
    let client = |name: u8| {
        let options = ClientOptions {
            timeout: Some(WATCHDOG),
            ..ClientOptions::default()
        };
        let mut client = Client::with_options(address, &options).unwrap();
        let replies = (0..CALLS)
            .map(|call| client.call(&[name, call]).map(<[u8]>::to_vec))
            .collect::<Result<Vec<_>, _>>();
        // All clients wait here, also for a client that failed: a client that disconnected during
        // the long handler would count as evicted.
        all.wait();
        assert_eq!(
            replies.unwrap(),
            (0..CALLS).map(|call| [name, call]).collect::<Vec<_>>()
        );
    };
    thread::scope(|scope| (0..CLIENTS).for_each(|name| drop(scope.spawn(move || client(name)))));
    let (_, stats) = server.stop();
    assert_eq!(
        (stats.accepted, stats.evictions, stats.garbage),
        (u64::from(CLIENTS * CALLS), 0, 0),
        "{stats:?}"
    );
}

/// The failure is not reported by a completion.
#[test]
fn a_server_whose_device_breaks_down_ends_with_an_error_and_its_clients_find_the_next_one() {
    let server = start_with(&any_port(), options(4), |server| {
        let device = server.rdma().device().clone();
        let broken = server.serve(|request| {
            device.soft().unwrap().break_down();
            request.to_vec()
        });
        assert!(
            matches!(broken, Err(SetupError::Broken(AsyncEvent::DeviceFatal))),
            "{broken:?}"
        );
        assert!(
            matches!(
                server.step(&mut Handlers::new(8)),
                Err(SetupError::Broken(_))
            ),
            "for good"
        );
    });
    let address = server.address;
    let mut client = Client::connect(address).unwrap();
    let closed = client.call_within(b"x", WATCHDOG).unwrap_err();
    assert!(matches!(closed, ClientError::Closed(_)), "{closed}");
    server.thread.join().unwrap();
    let server = start(&address.to_string(), options(4));
    assert_eq!(client.call(&[1, 2]).unwrap(), [2, 1]);

    // The client's own device breaks down, too.
    client
        .connection()
        .rdma()
        .device()
        .soft()
        .unwrap()
        .break_down();
    let closed = client.call_within(&[3, 4], WATCHDOG).unwrap_err();
    assert!(
        matches!(closed, ClientError::Closed(CloseReason::Device)),
        "{closed}"
    );
    assert_eq!(client.call(&[5, 6]).unwrap(), [6, 5]);
    server.stop();
}

/// The server has the request, and vanishes silently.
#[test]
fn a_client_that_waits_notices_that_its_server_is_gone() {
    let server = start_with(&any_port(), options(4), |server| {
        let held = RefCell::new(Vec::new());
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert_held(DEFAULT_TYPE, |request| held.borrow_mut().push(request));
        let start = Instant::now();
        while held.borrow().is_empty() {
            server.step(&mut handlers).unwrap();
            assert!(start.elapsed() < WATCHDOG);
        }
    });
    let mut client = Client::connect(server.address).unwrap();
    let closed = client.call_within(&[1], WATCHDOG).unwrap_err();
    assert!(matches!(closed, ClientError::Closed(_)), "{closed}");
    server.stop();
}

/// Workers answer in any order, while groups take turns.
#[test]
fn workers_answer_all_requests_of_all_groups() {
    let server = start_with(&any_port(), options(32), |server| {
        let (queue, requests) = mpsc::channel::<HeldRequest>();
        let worker = thread::spawn(move || {
            let mut rng = fastrand::Rng::with_seed(1);
            let mut kept: Vec<HeldRequest> = Vec::new();
            loop {
                match requests.recv_timeout(Duration::from_millis(1)) {
                    Ok(request) => kept.push(request),
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) => {}
                }
                while !kept.is_empty() && (rng.bool() || kept.len() > 4) {
                    let request = kept.swap_remove(rng.usize(..kept.len()));
                    let response: Vec<u8> = request.payload().iter().rev().copied().collect();
                    request.reply(response).unwrap();
                }
            }
        });
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert_held(DEFAULT_TYPE, move |request| queue.send(request).unwrap());
        server.serve_types(&mut handlers).unwrap();
        assert_eq!(handlers.held(), 0);
        drop(handlers);
        worker.join().unwrap();
    });
    let address = server.address;
    let client = |name: u8| {
        let mut client = Client::connect(address).unwrap();
        for call in 0..100_u8 {
            assert_eq!(client.call(&[name, call, 1]).unwrap(), [1, call, name]);
        }
    };
    thread::scope(|scope| (0..20).for_each(|name| drop(scope.spawn(move || client(name)))));
    let (_, stats) = server.stop();
    assert_eq!(stats.accepted, 20 * 100);
    assert!(stats.slices > 1, "{stats:?}");
}

#[test]
fn methods_end_with_their_result_or_their_own_error_and_those_of_another_version_have_ends_of_their_own()
 {
    let server = start_with(&any_port(), options(4), |server| {
        server
            .serve(|request| numbers::answer(&mut Sums, request))
            .unwrap()
    });
    let is_late =
        |error: &ClientError| matches!(error, ClientError::TimedOut | ClientError::NotSent);
    methods::check(Client::connect(server.address).unwrap(), is_late);
    block_on(methods::check_async(
        block_on(AsyncClient::connect(server.address)).unwrap(),
        is_late,
    ));
    server.stop();
}

/// The only client of the server calls from within the handler, so there is a request at every step
/// of the server: without a bound it would step forever.
#[test]
fn a_server_that_is_stopped_ends_although_each_of_its_steps_has_a_request() {
    // Many times the number of calls that fit into the time of a stopping server.
    const MOST: u64 = 300_000;
    let mut server = Server::with_options(any_port(), &options(1)).unwrap();
    let stop = server.stop_handle();
    let device = server.rdma().device().clone();
    let offered = server.rdma().offer().unwrap();
    let pending = PendingClient::on(&device, offered.record(), &RdmaOptions::default()).unwrap();
    let admission = server.rdma().admit(offered, &pending.record()).unwrap();
    let client = RefCell::new(pending.admitted(&admission));
    let (calls, calls_at_stop) = (Cell::new(0), Cell::new(None));
    let call = || {
        let mut client = client.borrow_mut();
        client.poll();
        while client.poll_completion(&mut []).is_some() {}
        calls.set(calls.get() + u64::from(client.call(DEFAULT_TYPE, &[1]).is_ok()));
        client.poll();
    };
    let mut handlers = Handlers::new(server.max_payload());
    handlers.insert(DEFAULT_TYPE, |_: &[u8], _: &mut [u8]| {
        match calls_at_stop.get() {
            // The first call is made while the server fetches, the others straight into its pool.
            None if calls.get() == 100 => {
                stop.stop();
                calls_at_stop.set(Some(calls.get()));
            }
            Some(at) if calls.get() - at >= MOST => return Ok(0),
            _ => {}
        }
        if matches!(client.borrow().state(), State::Process { .. }) {
            call();
        }
        Ok(0)
    });
    call();
    while calls.get() == 1 {
        server.step(&mut handlers).unwrap();
        if client.borrow().core().is_busy() {
            client.borrow_mut().poll();
            while client.borrow_mut().poll_completion(&mut []).is_some() {}
        } else {
            call();
        }
    }
    server.serve_types(&mut handlers).unwrap();
    let after = calls.get() - calls_at_stop.get().unwrap();
    assert!(0 < after && after < MOST, "{after} calls after the stop");
}

/// Servers follow one another at an address. Each call gets the response of its only run.
#[test]
fn no_call_fails_or_runs_twice_while_servers_stop_and_start() {
    const CALLS: u32 = 400;
    let runs = Arc::new(Mutex::new(HashMap::<Vec<u8>, u32>::new()));
    let serve = || {
        let runs = Arc::clone(&runs);
        move |server: &mut Server| {
            let run = |request: &[u8]| {
                *runs.lock().unwrap().entry(request.to_vec()).or_default() += 1;
                request.to_vec()
            };
            server.serve(run).unwrap();
        }
    };
    let mut server = start_with(&any_port(), options(16), serve());
    let address = server.address;
    let patient = ClientOptions {
        timeout: Some(WATCHDOG),
        connect_timeout: WATCHDOG,
        ..ClientOptions::default()
    };
    let is_done = AtomicU64::new(0);
    thread::scope(|scope| {
        for name in 0..6_u32 {
            let (patient, is_done) = (&patient, &is_done);
            scope.spawn(move || {
                let request = |call: u32| [name.to_le_bytes(), call.to_le_bytes()].concat();
                if name < 4 {
                    let mut client = Client::with_options(address, patient).unwrap();
                    (0..CALLS).for_each(|call| {
                        assert_eq!(client.call(&request(call)).unwrap(), request(call))
                    });
                } else {
                    let client = block_on(AsyncClient::with_options(address, patient)).unwrap();
                    for first in (0..CALLS).step_by(8) {
                        let calls: Vec<_> = (first..first + 8)
                            .map(|call| (call, client.call(request(call))))
                            .collect();
                        calls.into_iter().for_each(|(call, made)| {
                            assert_eq!(block_on(made).unwrap(), request(call))
                        });
                    }
                }
                is_done.fetch_add(1, Ordering::Relaxed);
            });
        }
        for stops in 0.. {
            thread::sleep(Duration::from_millis(5));
            let is_last = is_done.load(Ordering::Relaxed) == 6;
            server.stop();
            if is_last {
                assert!(stops > 1, "{stops} servers stopped");
                break;
            }
            server = start_with(&address.to_string(), options(16), serve());
        }
    });
    let runs = runs.lock().unwrap();
    assert_eq!(
        (runs.len() as u32, runs.values().copied().max()),
        (6 * CALLS, Some(1))
    );
}

/// A server that stops while a worker has a request: the other client is dismissed at once, and the
/// worker has `stop_timeout`.
#[test]
fn a_stopped_server_waits_for_held_requests_as_long_as_its_options_say_and_tells_the_others_at_once()
 {
    for answers in [true, false] {
        let (keep, kept) = mpsc::channel::<HeldRequest>();
        let stop_timeout = if answers {
            WATCHDOG
        } else {
            Duration::from_millis(200)
        };
        let server = start_with(
            &any_port(),
            ServerOptions {
                stop_timeout,
                ..options(4)
            },
            |server| {
                let mut handlers = Handlers::new(server.max_payload());
                handlers.insert_held(DEFAULT_TYPE, move |request| keep.send(request).unwrap());
                server.serve_types(&mut handlers).unwrap();
            },
        );
        let (address, stop) = (server.address, server.stop.clone());
        let mut other = Client::connect(address).unwrap();
        assert!(matches!(
            other.call_type(9, &[]),
            Err(ClientError::UnknownType)
        ));
        let waiting = thread::spawn(move || {
            Client::connect(address)
                .unwrap()
                .call_within(b"hold", WATCHDOG)
                .map(<[u8]>::to_vec)
        });
        let request = kept.recv_timeout(WATCHDOG).unwrap();
        assert!(request.is_wanted());
        stop.stop();
        // The client's call finds that the server stops, and finds no other server.
        let start = Instant::now();
        while !matches!(
            other.connection().rdma().state(),
            State::Closed(CloseReason::ServerStopped)
        ) {
            other.connection().rdma().poll();
            assert!(start.elapsed() < WATCHDOG, "it is not told");
        }
        let refused = other
            .call_within(&[1], Duration::from_millis(50))
            .unwrap_err();
        assert!(
            refused.is_retryable() && !refused.may_have_executed(),
            "{refused}"
        );
        let ended = if answers {
            assert!(!server.thread.is_finished());
            request.reply(*b"held").unwrap();
            waiting.join().unwrap()
        } else {
            let ended = waiting.join().unwrap();
            // The answer comes after the end of the call.
            request.reply(*b"late").unwrap();
            ended
        };
        match ended {
            Ok(reply) => assert!(answers && reply == b"held"),
            Err(ClientError::Dropped) => {
                assert!(!answers)
            }
            Err(error) => panic!("{error}"),
        }
        server.stop();
    }
}

/// A worker can read when the caller's time ends, and whether the client has disconnected.
#[test]
fn a_held_request_knows_the_deadline_of_its_method_and_the_end_of_its_client() {
    let (keep, kept) = mpsc::channel::<HeldRequest>();
    let server = start_with(&any_port(), options(4), |server| {
        let mut handlers = Handlers::new(server.max_payload());
        handlers.insert_held(DEFAULT_TYPE, move |request| keep.send(request).unwrap());
        server.serve_types(&mut handlers).unwrap();
    });
    let mut client = Client::connect(server.address).unwrap();
    let timeout = Duration::from_millis(300);
    // The request has the header of a call of method 1 with 300 ms left.
    let began = Instant::now();
    let request = [&1_u32.to_le_bytes()[..], &300_u32.to_le_bytes()].concat();
    scalerpc::methods::Caller::call(&mut client, &request, Some(timeout)).unwrap_err();
    let held = kept.recv_timeout(WATCHDOG).unwrap();
    let deadline = held.deadline().unwrap();
    assert!(deadline >= began + timeout && deadline <= Instant::now() + timeout);
    assert!(held.is_wanted(), "its client is there");
    client
        .call_within(&[9], Duration::from_millis(10))
        .unwrap_err();
    assert_eq!(
        kept.recv_timeout(WATCHDOG).unwrap().deadline(),
        None,
        "no method"
    );
    drop(client);
    let start = Instant::now();
    while held.is_wanted() {
        assert!(start.elapsed() < WATCHDOG);
        thread::sleep(Duration::from_millis(1));
    }
    held.reply([]).unwrap();
    server.stop();
}

/// The events name the client that held requests name, with the reason of its end; a client without
/// the secret is refused by name.
#[test]
fn a_server_tells_who_calls_who_leaves_and_who_is_refused_why() {
    let (hear, heard) = mpsc::channel();
    let hear = Mutex::new(hear);
    let events = Events::new(move |event| hear.lock().unwrap().send(event.to_string()).unwrap());
    let next = || heard.recv_timeout(WATCHDOG).unwrap();
    let secret = Some(Secret::from(*b"shared"));
    let (keep, kept) = mpsc::channel::<HeldRequest>();
    let server = start_with(
        &any_port(),
        ServerOptions {
            events,
            secret: secret.clone(),
            ..options(4)
        },
        |server| {
            let mut handlers = Handlers::new(server.max_payload());
            handlers.insert_held(DEFAULT_TYPE, move |request| keep.send(request).unwrap());
            server.serve_types(&mut handlers).unwrap();
        },
    );
    let address = server.address;
    let with = |secret: Option<Secret>| {
        Client::with_options(
            address,
            &ClientOptions {
                secret,
                ..ClientOptions::default()
            },
        )
    };
    let (tell, told) = mpsc::channel();
    let worker = thread::spawn(move || {
        for request in kept {
            tell.send(request.peer().unwrap()).unwrap();
            request.reply([]).unwrap();
        }
    });
    let call = |client: &mut Client| {
        client.call(b"who").unwrap();
        told.recv_timeout(WATCHDOG).unwrap()
    };
    let mut client = with(secret.clone()).unwrap();
    let peer = call(&mut client);
    assert_eq!(
        (next(), call(&mut client)),
        (format!("{peer} has connected"), peer)
    );
    for (secret, refusal) in [
        (None, Refusal::Secret),
        (Some(Secret::from(*b"other")), Refusal::WrongSecret),
    ] {
        let refused = with(secret).unwrap_err();
        let ClientError::Connect(SetupError::Record(RecordError::Refused(told))) = refused else {
            panic!("{refused}")
        };
        assert_eq!(told, refusal);
        let heard = next();
        assert!(
            heard.ends_with(&format!("was refused: {refusal}")),
            "{heard}"
        );
    }
    drop(client);
    assert_eq!(
        next(),
        format!("{peer} is disconnected: it is gone, or its device does not answer")
    );
    let mut client = with(secret).unwrap();
    let peer = call(&mut client);
    assert_eq!(next(), format!("{peer} has connected"));
    server.stop();
    assert_eq!(
        next(),
        format!("{peer} is disconnected: the server stopped")
    );
    worker.join().unwrap();
}

/// Three servers, each in a thread: every client belongs to one server, no server has all clients,
/// and one handle ends the servers.
#[test]
fn servers_that_share_an_address_share_the_clients() {
    const CLIENTS: u8 = 24;
    let (tell, told) = mpsc::channel();
    let (is_ready, ready) = mpsc::channel();
    let server = start_with(&any_port(), options(32), move |server| {
        (0..2).for_each(|_| tell.send(server.share().unwrap()).unwrap());
        server.serve(|request| [request, &[0]].concat()).unwrap();
    });
    let others: Vec<_> = (1..3_u8)
        .map(|name| {
            let (shared, is_ready) = (told.recv_timeout(WATCHDOG).unwrap(), is_ready.clone());
            thread::spawn(move || {
                let mut server = Server::beside(shared).unwrap();
                is_ready.send(()).unwrap();
                server.serve(|request| [request, &[name]].concat()).unwrap();
                server.stats().accepted
            })
        })
        .collect();
    (0..2).for_each(|_| ready.recv_timeout(WATCHDOG).unwrap());
    let address = server.address;
    // All clients are connected before the first client disconnects.
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|_| Client::connect(address).unwrap())
        .collect();
    let mut by_server = [0; 3];
    for (name, client) in (0..).zip(&mut clients) {
        let first = client.call(&[name, 7]).unwrap().to_vec();
        assert_eq!(first[..2], [name, 7]);
        by_server[usize::from(first[2])] += 1;
        assert_eq!(
            client.call(&[name, 7]).unwrap(),
            first,
            "by the same server"
        );
    }
    assert_eq!(by_server.iter().sum::<u8>(), CLIENTS);
    assert!(
        by_server.iter().all(|clients| *clients < CLIENTS),
        "{by_server:?}"
    );
    let (_, stats) = server.stop();
    let accepted: u64 = others.into_iter().map(|other| other.join().unwrap()).sum();
    assert_eq!(stats.accepted + accepted, 2 * u64::from(CLIENTS));
}

fn read_offer(stream: &mut TcpStream) -> Result<Offer, SetupError> {
    let mut bytes = [0; Offer::BYTES];
    stream.read_exact(&mut bytes)?;
    Offer::decode(&bytes)
}

/// Returns the number of descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Strangers send nothing, garbage, or half of a record, or have another version; some accept an
/// offer and go no further.
#[test]
fn strangers_keep_no_client_waiting_and_leave_nothing_behind() {
    let server = start(&any_port(), options(64));
    let address = server.address;
    let mut client = Client::connect(address).unwrap();
    let before = descriptors();
    let connect = |said: &[u8]| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        stream.write_all(said).unwrap();
        stream
    };
    let hello = Hello.encode();
    let mut of_another_version = hello;
    of_another_version[8] = 77;
    let mut strangers = Vec::new();
    for stranger in 0..400 {
        let said: &[u8] = match stranger % 4 {
            0 => &[],
            1 => &[0xa5; 64],
            2 => &hello[..7],
            _ => &hello,
        };
        strangers.push(connect(said));
        if stranger % 20 == 0 {
            assert_eq!(client.call(&[1, 2]).unwrap(), [2, 1]);
            assert_eq!(
                Client::connect(address).unwrap().call(&[3, 4]).unwrap(),
                [4, 3]
            );
        }
    }
    let refused = read_offer(&mut connect(&of_another_version)).unwrap_err();
    assert!(
        matches!(
            refused,
            SetupError::Record(RecordError::Refused(Refusal::Failed))
        ),
        "{refused}"
    );
    let mut half_way = connect(&hello);
    read_offer(&mut half_way).unwrap();
    half_way.write_all(&[0xa5; Accept::BYTES]).unwrap();
    let mut refusal = [0; Admission::BYTES];
    half_way.read_exact(&mut refusal).unwrap();
    assert_eq!(refusal[12], 2, "it is told");
    drop(half_way);
    drop(strangers);
    let start = Instant::now();
    // The descriptors of both ends of the strangers are closed. The clients above have disconnected
    // too, which the server notices within a second or two.
    while descriptors() > before {
        assert!(
            start.elapsed() < WATCHDOG,
            "{} descriptors, {before} before",
            descriptors()
        );
        assert_eq!(client.call(&[1, 2]).unwrap(), [2, 1]);
    }
    server.stop();
}

#[test]
fn strangers_that_stream_drip_and_stop_delay_no_call() {
    limits::watchdog(WATCHDOG);
    for secret in [None, Some(Secret::from(*b"shared"))] {
        let of_server = ServerOptions {
            secret: secret.clone(),
            ..options(64)
        };
        let server = start(&any_port(), of_server);
        let address = server.address;
        let options = ClientOptions {
            connect_timeout: WATCHDOG,
            timeout: Some(WATCHDOG),
            secret,
            ..ClientOptions::default()
        };
        strangers::attack(address, || {
            let mut client = Client::with_options(address, &options).unwrap();
            move || assert_eq!(client.call(&[1, 2]).unwrap(), [2, 1])
        });
        server.stop();
    }
}

/// Time for which a client tries to connect if it is expected to be refused.
const SHORT: Duration = Duration::from_millis(200);

fn is_full(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Connect(SetupError::Record(RecordError::Refused(Refusal::Full)))
    )
}

/// Returns options of a server with room for one client, and the server's clock in ns. The clock
/// hardly advances, so the server makes no probe by itself, which it does once a second (S20). The
/// server's device gives a dead peer up within a millisecond.
fn timeless() -> (ServerOptions, Arc<AtomicU64>) {
    let now_ns = Arc::new(AtomicU64::new(0));
    let device = DeviceSpec::Soft(SoftOptions {
        clock: Clock::Manual(Arc::clone(&now_ns)),
        ..SoftOptions::default()
    });
    let connect = ConnectOptions {
        timeout: 1,
        ..ConnectOptions::default()
    };
    (
        ServerOptions {
            device,
            rdma: RdmaOptions {
                connect,
                ..RdmaOptions::default()
            },
            ..options(1)
        },
        now_ns,
    )
}

/// Connects a client, which waits for the place of another client. The server's time passes slowly
/// meanwhile.
fn find_place(address: SocketAddr, now_ns: &AtomicU64) -> Client {
    let patient = ClientOptions {
        connect_timeout: WATCHDOG,
        ..ClientOptions::default()
    };
    let is_over = AtomicBool::new(false);
    let connected = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                now_ns.fetch_add(1_000_000, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(20));
            }
        });
        let connected = Client::with_options(address, &patient);
        is_over.store(true, Ordering::Relaxed);
        connected
    });
    assert!(
        now_ns.load(Ordering::Relaxed) < 1_000_000_000,
        "only the probe of each second has found the place"
    );
    connected.unwrap()
}

#[test]
fn a_full_server_says_so_and_a_client_waits_until_another_one_has_left() {
    let (options, now_ns) = timeless();
    let server = start(&any_port(), options);
    let address = server.address;
    let ((tell, told), (quit, over)) = (mpsc::channel(), mpsc::channel::<()>());
    let leaver = thread::spawn(move || {
        let first = Client::connect(address).unwrap();
        tell.send(()).unwrap();
        over.recv().unwrap();
        thread::sleep(SHORT);
        drop(first);
    });
    told.recv_timeout(WATCHDOG).unwrap();
    let start = Instant::now();
    let hasty = ClientOptions {
        connect_timeout: SHORT,
        ..ClientOptions::default()
    };
    let full = Client::with_options(address, &hasty).unwrap_err();
    assert!(is_full(&full) && start.elapsed() >= SHORT, "{full}");
    quit.send(()).unwrap();
    for call in 0..5 {
        assert_eq!(
            find_place(address, &now_ns).call(&[call, 0]).unwrap(),
            [0, call]
        );
    }
    leaver.join().unwrap();
    server.stop();
}

#[test]
fn a_client_whose_socket_is_cut_stays_connected_and_is_looked_for_when_another_one_needs_its_place()
{
    let (options, now_ns) = timeless();
    let server = start(&any_port(), options);
    let mut stream = TcpStream::connect(server.address).unwrap();
    let mut client = RdmaClient::connect_over(&DeviceSpec::default(), &mut stream).unwrap();
    drop(stream);
    let hasty = ClientOptions {
        connect_timeout: SHORT,
        ..ClientOptions::default()
    };
    for call in 0..3 {
        let ended = call_sync(
            &mut client,
            DEFAULT_TYPE,
            &[call],
            &mut [0; 8],
            thread::yield_now,
        );
        assert_eq!(ended, Ok(Ok(1)));
        // An attempt that the system delays ends for another reason.
        assert!(
            (0..50).any(|_| is_full(&Client::with_options(server.address, &hasty).unwrap_err()))
        );
    }
    // The end of the client closes no socket.
    drop(client);
    assert_eq!(
        find_place(server.address, &now_ns).call(&[1, 2]).unwrap(),
        [2, 1]
    );
    server.stop();
}

/// Clients vanish in the middle of calls, too.
#[test]
fn clients_that_connect_call_and_vanish_leave_the_server_as_it_was() {
    const THREADS: u64 = 6;
    let gone = Arc::new(AtomicU64::new(0));
    let server = start_with(&any_port(), options(16), {
        let gone = Arc::clone(&gone);
        move |server| {
            let mut handlers = Handlers::new(server.max_payload());
            handlers.insert(DEFAULT_TYPE, |_: &[u8], _: &mut [u8]| Ok(0));
            let (stop, start) = (server.stop_handle(), Instant::now());
            while server.clients() > 0 || gone.load(Ordering::Relaxed) < THREADS {
                server.step(&mut handlers).unwrap();
                assert!(
                    start.elapsed() < WATCHDOG,
                    "{} clients, {:?}",
                    server.clients(),
                    server.stats()
                );
            }
            stop.stop();
            assert!(server.stats().accepted >= 300, "{:?}", server.stats());
            server.serve_types(&mut handlers).unwrap();
        }
    });
    let address = server.address;
    let vanish = |seed: u64| {
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..10 {
            let mut client = loop {
                match Client::connect(address) {
                    Ok(client) => break client,
                    Err(ClientError::Connect(SetupError::Record(RecordError::Refused(
                        Refusal::Full,
                    )))) => {
                        thread::sleep(Duration::from_millis(5));
                    }
                    Err(ClientError::Connect(SetupError::Connect(_))) => {}
                    Err(error) => panic!("{error}"),
                }
            };
            for call in 0..5_u8 {
                client.call(&[call]).unwrap();
            }
            for call in 0..rng.u8(..4) {
                client
                    .connection()
                    .rdma()
                    .call(DEFAULT_TYPE, &[call])
                    .unwrap();
            }
            if rng.bool() {
                client.connection().rdma().poll();
            }
        }
        gone.fetch_add(1, Ordering::Relaxed);
    };
    thread::scope(|scope| (0..THREADS).for_each(|seed| drop(scope.spawn(move || vanish(seed)))));
    assert_eq!(server.stop().0, 0);
}
