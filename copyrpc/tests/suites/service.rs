//! [`Server`](copyrpc::Server) and [`Client`](copyrpc::Client): many clients at once, and peers
//! that are late, slow, silent, killed or restarted.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use copyrpc::methods::{Caller, Request as _};
use copyrpc::parts::{self, Reassembler};
use copyrpc::{
    CallFailure, Client, ClientError, ClientOptions, CloseReason, ContextBuilder,
    EXCHANGE_RECORD_SIZE, EndpointConfig, ExchangeRecord, OptionError, Outcome, RecordError,
    Refusal, Secret, Server, ServerOptions, SetupError,
};

use copyrpc_testing::limits::{self, Moved, any_port};
use copyrpc_testing::methods::{self, Sums, numbers};
use copyrpc_testing::strangers;

use crate::local::{self, Net, WATCHDOG};

/// Errors can be sent to other threads, and live in boxes.
const _: () = {
    const fn is_portable<T: Send + Sync + 'static>() {}
    is_portable::<ClientError>();
    is_portable::<SetupError>();
};

fn upper_case(server: &mut Server) {
    server
        .serve(|request| request.to_vec().to_ascii_uppercase())
        .unwrap();
}

/// Two servers, each in a thread: every client belongs to one server, both get clients, and one
/// handle ends both.
#[test]
fn servers_that_share_an_address_share_the_clients() {
    let net = Net::new();
    let (tell, told) = std::sync::mpsc::channel();
    let served = net.serve(&any_port(), move |server| {
        tell.send(server.share().unwrap()).unwrap();
        server.serve(|_| [0]).unwrap();
    });
    let other = thread::spawn(move || {
        let mut server = Server::beside(told.recv().unwrap()).unwrap();
        server.serve(|_| [1]).unwrap();
    });
    let (mut clients, mut names) = (Vec::new(), Vec::new());
    // A server that has just accepted a client is awake, and often accepts the next one too.
    while !(names.contains(&0) && names.contains(&1)) {
        thread::sleep(Duration::from_millis(5 * names.len() as u64));
        let mut client = net.client(served.address);
        names.push(client.call(b"?").unwrap()[0]);
        clients.push(client);
    }
    for (client, name) in clients.iter_mut().zip(&names) {
        assert_eq!(client.call(b"?").unwrap(), [*name], "by the same server");
    }
    served.end();
    other.join().unwrap();
}

#[test]
fn clients_at_once_get_each_their_own_replies() {
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        server
            .serve(|request| request.to_vec().into_iter().rev().collect::<Vec<_>>())
            .unwrap();
        assert_eq!(server.stats().replies, 12 * 100);
    });
    let clients: Vec<_> = (0..12u8)
        .map(|number| {
            let (net, address) = (net.clone(), served.address);
            thread::spawn(move || {
                let mut client = net.client(address);
                for call in 0..100usize {
                    let request: Vec<u8> = (0..call * 37 % client.max_reply())
                        .map(|i| number ^ i as u8)
                        .collect();
                    let reply: Vec<u8> = request.iter().rev().copied().collect();
                    assert_eq!(client.call(&request).unwrap(), reply);
                }
            })
        })
        .collect();
    clients
        .into_iter()
        .for_each(|client| client.join().unwrap());
    served.end();
}

#[test]
fn a_server_that_is_not_there_is_waited_for_as_long_as_asked() {
    let net = Net::new();
    let address = TcpListener::bind(any_port()).unwrap().local_addr().unwrap();
    let options = ClientOptions {
        connect_timeout: Duration::from_millis(100),
        ..net.client_options()
    };
    let start = Instant::now();
    let error = Client::with_options(address, &options).unwrap_err();
    assert!(
        matches!(error, ClientError::Connect(SetupError::Unreachable { .. }))
            && error.to_string().contains(&address.to_string()),
        "{error}"
    );
    assert!(start.elapsed() >= options.connect_timeout);
    let client = thread::spawn({
        let net = net.clone();
        move || net.client(address).call(b"early").unwrap().to_vec()
    });
    thread::sleep(Duration::from_millis(200));
    let served = net.serve(&address.to_string(), upper_case);
    assert_eq!(client.join().unwrap(), b"EARLY");
    served.end();
    let error = Client::with_options("no port here", &options).unwrap_err();
    assert!(
        matches!(error, ClientError::Connect(SetupError::Unreachable { .. }))
            && error.to_string().contains("at no port here:"),
        "{error}"
    );
}

/// Another program listens at the address: it answers with fewer bytes than a record, and then
/// waits for more, or closes the stream.
#[test]
fn another_program_at_the_address_is_named_by_what_it_says() {
    const SAYS: &[u8] = b"HTTP/1.1 400 Bad Request\r\n\r\n";
    let net = Net::new();
    for hangs_up in [false, true] {
        let listener = TcpListener::bind(any_port()).unwrap();
        let address = listener.local_addr().unwrap();
        let other = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; EXCHANGE_RECORD_SIZE]).unwrap();
            stream.write_all(SAYS).unwrap();
            if !hangs_up {
                assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "the client goes");
            }
        });
        let error = Client::with_options(address, &net.client_options())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(r#"not a copyrpc exchange record, but "HTTP/1.1""#),
            "{error}"
        );
        other.join().unwrap();
    }
}

#[test]
fn an_address_that_is_taken_is_named() {
    let net = Net::new();
    let served = net.serve(&any_port(), upper_case);
    let address = served.address.to_string();
    let refused = Server::with_options(&address, &net.server_options()).unwrap_err();
    assert!(
        matches!(&refused, SetupError::Listen { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse),
        "{refused}"
    );
    assert!(
        refused
            .to_string()
            .starts_with(&format!("listening at {address}: ")),
        "{refused}"
    );
    served.end();
}

/// The client's options let it try to connect for hours, but the call has a timeout.
#[test]
fn a_call_ends_in_its_time_also_while_it_connects_again() {
    let net = Net::new();
    let served = net.serve(&any_port(), upper_case);
    let mut client = net.client(served.address);
    assert_eq!(client.call(b"here").unwrap(), b"HERE");
    let address = served.end();
    let (start, time) = (Instant::now(), Duration::from_millis(100));
    assert!(matches!(
        client.call_within(b"gone", time),
        Err(ClientError::NotSent)
    ));
    assert!(start.elapsed() >= time);
    let served = net.serve(&address.to_string(), upper_case);
    assert_eq!(client.call(b"back").unwrap(), b"BACK");
    served.end();
}

/// A server that is restarted closes the sockets of clients that it has not accepted yet.
#[test]
fn a_server_that_leaves_while_clients_wait_to_be_taken_is_waited_for() {
    let net = Net::new();
    let listener = TcpListener::bind(any_port()).unwrap();
    let address = listener.local_addr().unwrap();
    let client = {
        let net = net.clone();
        thread::spawn(move || net.client(address).call(b"there").unwrap().to_vec())
    };
    for round in 0..6 {
        let (mut stream, _) = listener.accept().unwrap();
        if round % 2 == 0 {
            // All bytes were read, so the close is no reset.
            stream.read_exact(&mut [0; EXCHANGE_RECORD_SIZE]).unwrap();
        }
    }
    drop(listener);
    let served = net.serve(&address.to_string(), upper_case);
    assert_eq!(client.join().unwrap(), b"THERE");
    served.end();
    // A program that closes every stream counts as no server.
    let listener = TcpListener::bind(any_port()).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || listener.incoming().for_each(drop));
    let options = ClientOptions {
        connect_timeout: Duration::from_millis(200),
        ..net.client_options()
    };
    assert!(matches!(
        Client::with_options(address, &options),
        Err(ClientError::Connect(SetupError::Channel(_)))
    ));
}

#[test]
fn a_client_of_a_server_that_went_connects_to_the_next_one() {
    let net = Net::new();
    let served = net.serve(&any_port(), upper_case);
    let mut client = net.client(served.address);
    for round in 0..3 {
        assert_eq!(client.call(b"here").unwrap(), b"HERE", "round {round}");
    }
    let address = served.end();
    let served = net.serve(&address.to_string(), upper_case);
    // The client may notice the end by this call, or before it.
    let first = client.call(b"again");
    assert!(
        matches!(&first, Ok(reply) if reply == b"AGAIN")
            || matches!(first, Err(ClientError::Closed(CloseReason::Disconnected))),
        "{first:?}"
    );
    assert_eq!(client.call(b"and again").unwrap(), b"AND AGAIN");
    let address = served.end();
    let options = ClientOptions {
        connect_timeout: Duration::from_millis(50),
        ..net.client_options()
    };
    let gone = Client::with_options(address, &options);
    assert!(
        matches!(
            gone,
            Err(ClientError::Connect(SetupError::Unreachable { .. }))
        ),
        "{gone:?}"
    );
}

#[test]
fn a_client_finds_a_server_that_has_moved_by_its_name() {
    let net = Net::new();
    let served = net.serve(&any_port(), upper_case);
    let next = net.serve("127.0.0.1:0", upper_case);
    let address = Moved {
        first: served.address,
        name: format!("localhost:{}", next.address.port()),
    };
    let mut client = Client::with_options(address, &net.client_options()).unwrap();
    assert_eq!(client.call(b"here").unwrap(), b"HERE");
    served.end();
    // The client may notice the end by this call, or before it.
    let _ended = client.call_within(b"there", WATCHDOG / 6);
    assert_eq!(
        client.call_within(b"there", WATCHDOG / 6).unwrap(),
        b"THERE"
    );
    next.end();
}

#[test]
fn a_call_ends_in_time_and_its_late_reply_is_not_the_next_ones() {
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        let mut held = VecDeque::new();
        let stop = server.stop_handle();
        let mut answered = 0;
        while answered < 2 {
            server.step().unwrap();
            held.extend(std::iter::from_fn(|| server.recv()));
            // The first request is answered when the second has arrived, and before the second.
            if held.len() == 2 || answered == 1 {
                while let Some(request) = held.pop_front() {
                    let reply = request.data().to_vec();
                    request.reply(&reply).unwrap();
                    answered += 1;
                }
            }
        }
        stop.stop();
        server.serve(|_| b"").unwrap();
    });
    let mut client = net.client(served.address);
    let start = Instant::now();
    let late = client.call_within(b"first", Duration::from_millis(50));
    assert!(matches!(late, Err(ClientError::TimedOut)), "{late:?}");
    assert!(start.elapsed() >= Duration::from_millis(50));
    assert_eq!(client.call(b"second").unwrap(), b"second");
    served.end();
}

/// Calls that ended without an answer still hold their credit.
#[test]
fn a_client_whose_credit_is_kept_by_calls_that_it_gave_up_says_so_and_connects_again() {
    let net = Net::new();
    let (is_released, taken) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(Mutex::new(Vec::new())),
    );
    let served = net.serve(&any_port(), {
        let (is_released, taken) = (Arc::clone(&is_released), Arc::clone(&taken));
        move |server| {
            let mut held = Vec::new();
            while !is_released.load(Ordering::Relaxed) {
                server.step().unwrap();
                while let Some(request) = server.recv() {
                    taken.lock().unwrap().push(request.data().to_vec());
                    if request.data().to_vec() == b"answered" {
                        request.reply(b"at once").unwrap();
                    } else {
                        held.push(request);
                    }
                }
            }
        }
    });
    let options = ClientOptions {
        connect_timeout: Duration::from_secs(20),
        ..net.client_options()
    };
    let mut client = Client::with_options(served.address, &options).unwrap();
    let mut sent = Vec::new();
    for _ in 0..3 {
        let mut given_up = 0;
        let error = loop {
            let request = sent.len().to_le_bytes().to_vec();
            match client.call_within(&request, Duration::from_millis(5)) {
                Err(ClientError::TimedOut) => sent.push(request),
                Err(error) => break error,
                outcome => panic!("{outcome:?} after {} calls", sent.len()),
            }
            given_up += 1;
        };
        assert!(
            matches!(error, ClientError::NoCredit { given_up: n } if n == given_up && n > 0),
            "{error:?}, {given_up}"
        );
        assert!(error.is_retryable() && !error.may_have_executed());
        sent.push(b"answered".to_vec());
        assert_eq!(client.call(b"answered").unwrap(), b"at once");
    }
    // A call without a timeout waits for credit at most as long as for a connection.
    drop(client);
    let options = ClientOptions {
        connect_timeout: SHORT,
        max_reply: Some(net.client(served.address).max_reply() * 4),
        ..options
    };
    let mut client = Client::with_options(served.address, &options).unwrap();
    assert!(matches!(
        client.call_within(b"held", SHORT),
        Err(ClientError::TimedOut)
    ));
    sent.push(b"held".to_vec());
    assert!(matches!(
        client.call(b"not sent"),
        Err(ClientError::NoCredit { given_up: 1 })
    ));
    is_released.store(true, Ordering::Relaxed);
    served.end();
    assert_eq!(*taken.lock().unwrap(), sent);
}

/// The server answers all requests except the first, whose bytes it keeps.
#[test]
fn a_client_whose_ring_is_kept_full_by_a_call_that_it_gave_up_says_so_and_connects_again() {
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        let (mut held, mut is_over) = (Vec::new(), false);
        while !is_over {
            server.step().unwrap();
            while let Some(request) = server.recv() {
                let request_is = |text: &[u8]| request.data().to_vec() == text;
                is_over |= request_is(b"the last");
                if request_is(b"held") {
                    held.push(request)
                } else {
                    request.reply(b"answered").unwrap()
                }
            }
        }
        server.stop_handle().stop();
        drop(held);
        server.serve(|_| b"").unwrap();
    });
    let mut client = net.client(served.address);
    let large = vec![0; client.max_request() / 4];
    for _ in 0..3 {
        assert!(matches!(
            client.call_within(b"held", SHORT),
            Err(ClientError::TimedOut)
        ));
        let mut answered = 0;
        let error = loop {
            match client.call_within(&large, Duration::from_millis(200)) {
                Ok(_) => answered += 1,
                Err(error) => break error,
            }
        };
        assert!(
            matches!(error, ClientError::NoCredit { given_up: 1 }),
            "{error:?}"
        );
        assert!(answered > 0, "there was room at first");
    }
    assert_eq!(client.call(b"the last").unwrap(), b"answered");
    served.end();
}

#[test]
fn a_client_that_its_server_calls_refuses_each_call_at_once_and_goes_on() {
    const PUSHES: usize = 1_000;
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        let stop = server.stop_handle();
        let mut pushed = 0;
        let mut answered = 0;
        while answered < 2 * PUSHES {
            server.step().unwrap();
            while let Some(request) = server.recv() {
                let endpoint = request.endpoint();
                while pushed < PUSHES && endpoint.call(&[1; 1_000], (), 8).is_ok() {
                    pushed += 1;
                }
                request.reply(b"answer").unwrap();
                answered += 1;
                assert!(
                    answered < 2 * PUSHES || (pushed, endpoint.outstanding_calls()) == (PUSHES, 0)
                );
            }
        }
        stop.stop();
        server.serve(|_| b"").unwrap();
    });
    let mut client = net.client(served.address);
    for _ in 0..2 * PUSHES {
        assert_eq!(client.call(b"hello").unwrap(), b"answer");
    }
    let stats = client.stats();
    assert!(
        stats.insufficient_credit == 0 && stats.replies as usize == PUSHES,
        "{stats:?}"
    );
    served.end();
}

#[test]
fn a_server_that_calls_without_end_keeps_no_call_from_its_timeout() {
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        let held = loop {
            server.step().unwrap();
            if let Some(request) = server.recv() {
                break request;
            }
        };
        let (context, peer) = (held.context(), held.peer().unwrap());
        assert_eq!(context.client(), Some(peer.number));
        assert_eq!(context.address(), Some(peer.address));
        assert!(context.is_wanted() && context.deadline().is_none());
        let endpoint = held.endpoint();
        while endpoint.closed().is_none() {
            while endpoint.call(&[1; 100], (), 8).is_ok() {}
            server.step().unwrap();
        }
    });
    let mut client = net.client(served.address);
    assert!(matches!(
        client.call_within(b"held", SHORT),
        Err(ClientError::TimedOut)
    ));
    assert!(client.stats().replies > 64, "it was called");
    drop(client);
    served.end();
}

/// A stream whose last byte, with which a client reports that it is connected, is sent later.
struct WithoutEnd<'a>(&'a TcpStream, usize);

impl Read for WithoutEnd<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for WithoutEnd<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.1 += bytes.len();
        if self.1 > EXCHANGE_RECORD_SIZE {
            Ok(bytes.len())
        } else {
            self.0.write(bytes)
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// When the server stops, the client knows that the server is connected, but the server does not
/// know that the client is. If the server dropped such a connection, it would be unknown whether
/// the client's calls were executed.
#[test]
fn a_stopped_server_waits_for_a_client_that_calls_while_it_connects() {
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        let stop = server.stop_handle();
        server
            .serve(|request| {
                stop.stop();
                request.to_vec()
            })
            .unwrap();
    });
    let endpoint = net.client_options().endpoint;
    let context = ContextBuilder::new(net.device())
        .endpoints_with(1, &endpoint)
        .build::<u32>()
        .unwrap();
    let mut stream = TcpStream::connect(served.address).unwrap();
    let client = context
        .connect_over(&endpoint, WithoutEnd(&stream, 0))
        .unwrap();
    let mut ends = Vec::new();
    let mut poll = || {
        context
            .poll(|number, outcome: Outcome<'_>| {
                ends.push((number, outcome.map(|bytes| bytes.to_vec())))
            })
            .unwrap()
    };
    client.call(b"first", 1, 8).unwrap();
    while client.outstanding_calls() > 0 {
        poll();
    }
    client.call(b"second", 2, 8).unwrap();
    poll();
    stream.write_all(&[1]).unwrap();
    served.end();
    while client.outstanding_calls() > 0 {
        poll();
    }
    let [(1, Ok(first)), (2, second)] = &ends[..] else {
        panic!("{ends:?}")
    };
    assert_eq!(first, b"first");
    // The server may have received the request before its end.
    assert!(
        matches!(second, Ok(reply) if reply == b"second")
            || matches!(second, Err(CallFailure::NotSent)),
        "{ends:?}"
    );
}

/// The server is not in `serve`, but in a loop of the application.
#[test]
fn a_closed_server_answers_the_request_that_it_has_and_its_clients_go_on_to_the_next_one() {
    let net = Net::new();
    let ((close, closed), (go, gone)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let served = net.serve(&any_port(), move |server| {
        let held = loop {
            server.step().unwrap();
            if let Some(request) = server.recv() {
                break request;
            }
        };
        server.close();
        server.step().unwrap();
        close.send(()).unwrap();
        while gone.try_recv().is_err() {
            server.step().unwrap();
            assert!(server.recv().is_none(), "no handler gets a later request");
        }
        assert!(held.is_wanted());
        held.reply(b"at last").unwrap();
    });
    let options = ClientOptions {
        connect_timeout: SHORT,
        ..net.client_options()
    };
    let mut later = Client::with_options(served.address, &options).unwrap();
    let client = thread::spawn({
        let (net, address) = (net.clone(), served.address);
        move || net.client(address).call(b"held").unwrap().to_vec()
    });
    closed.recv().unwrap();
    let refused = later.call(b"later").unwrap_err();
    assert!(
        refused.is_retryable() && !refused.may_have_executed(),
        "{refused:?}"
    );
    go.send(()).unwrap();
    assert_eq!(client.join().unwrap(), b"at last");
    let address = served.end();
    let served = net.serve(&address.to_string(), upper_case);
    assert_eq!(later.call(b"later").unwrap(), b"LATER");
    served.end();
}

/// Each request is a batch of its own, so the requests are more than the server takes in one step.
#[test]
fn a_stopped_server_answers_all_requests_that_had_arrived() {
    const CLIENTS: usize = 8;
    const CALLS: usize = 100;
    let net = Net::new();
    let endpoint = EndpointConfig {
        batches_in_flight: CALLS as u32 + 1,
        ring_size: 64 << 10,
        ..EndpointConfig::default()
    };
    let options = ServerOptions {
        max_clients: CLIENTS as u32,
        endpoint: endpoint.clone(),
        ..net.server_options()
    };
    let (arrive, arrived) = std::sync::mpsc::channel::<()>();
    let served = local::serve(&any_port(), options, move |server| {
        while server.clients() < CLIENTS {
            server.step().unwrap();
        }
        arrived.recv().unwrap();
        server.stop_handle().stop();
        server.serve(|request| request.to_vec()).unwrap();
    });
    let clients = [(); CLIENTS].map(|()| {
        let context = ContextBuilder::new(net.device())
            .endpoints_with(1, &endpoint)
            .build::<usize>()
            .unwrap();
        let client = context
            .connect_over(&endpoint, TcpStream::connect(served.address).unwrap())
            .unwrap();
        (client, context)
    });
    for (client, context) in &clients {
        for number in 0..CALLS {
            client.call(&number.to_le_bytes(), number, 8).unwrap();
            context.flush_endpoints().unwrap();
        }
        // After these polls, the device has sent all requests.
        (0..100).for_each(|_| {
            context
                .poll(|_, _| unreachable!("nobody answers yet"))
                .unwrap();
        });
        assert_eq!(client.stats().batches_sent as usize, CALLS);
    }
    arrive.send(()).unwrap();
    for (client, context) in &clients {
        while client.outstanding_calls() > 0 {
            let on_response = |number: usize, outcome: Outcome<'_>| {
                assert_eq!(
                    outcome.map(|bytes| bytes.to_vec()),
                    Ok(number.to_le_bytes().to_vec())
                );
            };
            context.poll(on_response).unwrap();
        }
    }
    served.end();
}

#[test]
fn strangers_that_say_nothing_or_anything_keep_nobody_waiting_and_take_no_place() {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};

    let net = Net::new();
    let options = ServerOptions {
        max_clients: 2,
        ..net.server_options()
    };
    let served = local::serve(&any_port(), options, upper_case);
    let address = served.address;
    let silent: Vec<_> = (0..50)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 128],
        &[0xff; 4096],
        b"x",
        b"",
    ] {
        let mut stranger = TcpStream::connect(address).unwrap();
        stranger
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        // The server closes the connection. If it has not read all bytes, the stranger gets a
        // reset, maybe before it has sent them all.
        let sent = stranger
            .write_all(bytes)
            .and_then(|()| stranger.shutdown(std::net::Shutdown::Write));
        match sent.and_then(|()| stranger.read_to_end(&mut Vec::new())) {
            Ok(said) => assert!(matches!(said, 0 | EXCHANGE_RECORD_SIZE), "{said}"),
            Err(error) => assert!(
                matches!(error.kind(), ConnectionReset | BrokenPipe | NotConnected),
                "{error}"
            ),
        }
    }
    let start = Instant::now();
    let mut clients = [(); 2].map(|()| net.client(address));
    for client in &mut clients {
        assert_eq!(client.call(b"somebody").unwrap(), b"SOMEBODY");
    }
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "nobody was waited for"
    );
    drop(silent);
    served.end();
}

#[test]
fn clients_above_the_limit_are_told_so_and_find_room_when_others_leave() {
    let net = Net::new();
    let options = ServerOptions {
        max_clients: 3,
        ..net.server_options()
    };
    let served = local::serve(&any_port(), options, upper_case);
    let address = served.address;
    let mut clients: Vec<_> = (0..3).map(|_| net.client(address)).collect();
    let start = Instant::now();
    let options = ClientOptions {
        connect_timeout: SHORT,
        ..net.client_options()
    };
    assert_eq!(
        Client::with_options(address, &options)
            .unwrap_err()
            .to_string(),
        full()
    );
    assert!(start.elapsed() >= SHORT, "a place may become free");
    // One client waits while another client disconnects.
    let waiting = {
        let net = net.clone();
        thread::spawn(move || net.client(address).call(b"room").unwrap().to_vec())
    };
    thread::sleep(SHORT);
    assert!(!waiting.is_finished());
    drop(clients.pop());
    assert_eq!(waiting.join().unwrap(), b"ROOM");
    served.end();
}

/// Time for which a client tries to connect if it is expected to be refused.
const SHORT: Duration = Duration::from_millis(200);

/// The server is stopped first, so that it does not answer the call. Only the end of its TCP
/// connection shows its death: no keep-alive interval passes in this test.
#[test]
fn a_server_process_that_is_killed_while_a_call_waits_ends_the_call() {
    limits::watchdog(WATCHDOG);
    let (mut server, address) = start_server(&any_port());
    let endpoint = EndpointConfig {
        keepalive: Duration::from_secs(3_600),
        ..lifelines_alone()
    };
    let mut client = Client::with_options(
        &*address,
        &ClientOptions {
            endpoint,
            ..ClientOptions::default()
        },
    )
    .unwrap();
    assert_eq!(client.call(b"ping").unwrap(), b"PING");
    let process = server.id() as libc::pid_t;
    // SAFETY: a child that was not waited for, and no status. The wait is over when it is stopped.
    unsafe {
        assert_eq!(libc::kill(process, libc::SIGSTOP), 0);
        assert_eq!(
            libc::waitpid(process, std::ptr::null_mut(), libc::WUNTRACED),
            process
        );
    }
    let killer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        server.kill().unwrap();
        server.wait().unwrap();
    });
    let error = client.call(b"ping").unwrap_err();
    assert!(
        matches!(error, ClientError::Closed(CloseReason::Disconnected)),
        "{error}"
    );
    killer.join().unwrap();
}

fn full() -> String {
    SetupError::Record(RecordError::Refused(Refusal::Full)).to_string()
}

/// Returns a configuration with which no keep-alive detects a death on an idle connection.
fn lifelines_alone() -> EndpointConfig {
    EndpointConfig {
        idle_keepalive: None,
        ..EndpointConfig::default()
    }
}

#[test]
fn clients_that_come_back_find_the_places_of_those_that_died_idle() {
    limits::watchdog(WATCHDOG);
    let options = ServerOptions {
        max_clients: LEAVING as u32,
        endpoint: lifelines_alone(),
        ..ServerOptions::default()
    };
    let served = local::serve(&any_port(), options, upper_case);
    for round in 0..3 {
        let mut leaving = Command::new(std::env::current_exe().unwrap());
        leaving
            .args(["--ignored", "--exact", "service::leaving_process"])
            .env("COPYRPC_TEST_ADDRESS", served.address.to_string());
        let status = leaving.stdout(Stdio::null()).status().unwrap();
        assert!(status.success(), "round {round}: {status}");
    }
    served.end();
}

#[test]
fn a_client_whose_socket_is_cut_stays_connected_and_is_looked_for_when_another_needs_its_place() {
    let net = Net::new();
    let options = ServerOptions {
        max_clients: 1,
        endpoint: lifelines_alone(),
        ..net.server_options()
    };
    let served = local::serve(&any_port(), options, upper_case);
    let context = ContextBuilder::new(net.device()).build::<()>().unwrap();
    let stream = TcpStream::connect(served.address).unwrap();
    let endpoint = context.connect_over(&lifelines_alone(), &stream).unwrap();
    drop(stream);
    let ask = || {
        let mut reply = None;
        endpoint.call(b"alive", (), 64).unwrap();
        while reply.is_none() {
            context
                .poll(|(), outcome| reply = Some(outcome.map(|bytes| bytes.to_vec())))
                .unwrap();
        }
        assert_eq!(reply.unwrap().unwrap(), b"ALIVE");
    };
    ask();
    let options = ClientOptions {
        connect_timeout: SHORT,
        endpoint: lifelines_alone(),
        ..net.client_options()
    };
    assert_eq!(
        Client::with_options(served.address, &options)
            .unwrap_err()
            .to_string(),
        full()
    );
    ask();
    // The death of the client closes no socket.
    endpoint.abort();
    context.poll(|(), _| ()).unwrap();
    let options = ClientOptions {
        connect_timeout: WATCHDOG,
        ..options
    };
    assert_eq!(
        Client::with_options(served.address, &options)
            .unwrap()
            .call(b"room")
            .unwrap(),
        b"ROOM"
    );
    served.end();
}

#[test]
fn a_server_for_more_clients_than_its_device_can_serve_is_refused_with_what_to_do() {
    let net = Net::new();
    let server = |clients, batches_in_flight| {
        let endpoint = EndpointConfig {
            batches_in_flight,
            ..EndpointConfig::default()
        };
        Server::with_options(
            any_port(),
            &ServerOptions {
                max_clients: clients,
                endpoint,
                ..net.server_options()
            },
        )
        .map(drop)
    };
    let said = server(1_100, 32).unwrap_err().to_string();
    assert!(
        said.starts_with(
            "endpoints is 1100: legal is at most 682 on this device, with 32 batches in flight each"
        ),
        "{said}"
    );
    assert!(said.contains("batches_in_flight"), "{said}");
    server(682, 32).unwrap();
    server(1_100, 16).unwrap();
}

#[test]
fn clients_that_connect_at_once_do_not_exceed_the_limit() {
    const CLIENTS: usize = 8;
    let net = Net::new();
    let options = ServerOptions {
        max_clients: 3,
        ..net.server_options()
    };
    let served = local::serve(&any_port(), options, upper_case);
    let (address, all) = (served.address, Barrier::new(CLIENTS));
    let options = ClientOptions {
        connect_timeout: SHORT,
        ..net.client_options()
    };
    let connect = || {
        let client = Client::with_options(address, &options);
        // No client disconnects before the last client has tried to connect.
        all.wait();
        client.map(drop).map_err(|error| error.to_string())
    };
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(connect)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let refused: Vec<_> = outcomes.into_iter().filter_map(Result::err).collect();
    assert_eq!(refused, vec![full(); CLIENTS - 3]);
    served.end();
}

#[test]
fn what_is_too_long_is_refused_and_the_connection_goes_on() {
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        server
            .serve(|request| {
                vec![7; u32::from_le_bytes(request.to_vec()[..4].try_into().unwrap()) as usize]
            })
            .unwrap();
    });
    let mut client = net.client(served.address);
    let longest = client.max_reply();
    let mut reply_of = |bytes: usize| {
        client
            .call(&(bytes as u32).to_le_bytes())
            .map(|reply| reply.len())
    };
    assert_eq!(reply_of(longest).unwrap(), longest);
    // The limit holds even if the credit, which is counted in blocks, has room for more bytes.
    for extra in (1..64).chain([100_000]) {
        let error = reply_of(longest + extra).unwrap_err();
        assert!(
            matches!(error, ClientError::ReplyTooLong { len: Some(len) } if len == longest + extra),
            "{error}"
        );
        assert!(
            error.may_have_executed() && !error.is_retryable(),
            "its handler ran"
        );
    }
    assert_eq!(reply_of(0).unwrap(), 0);
    let max = client.max_request();
    let refused = client.call(&vec![0; max + 1]);
    assert!(
        matches!(refused, Err(ClientError::TooLarge { len, max: limit }) if len == max + 1 && limit == max),
        "{refused:?}"
    );
    assert_eq!(client.call(&vec![0; max]).unwrap(), b"");
    let more = |max_reply| {
        Client::with_options(
            served.address,
            &ClientOptions {
                max_reply: Some(max_reply),
                ..net.client_options()
            },
        )
    };
    let refused = more(usize::MAX).err().unwrap();
    let ClientError::Connect(SetupError::Option(OptionError {
        option: "max_reply",
        value: u64::MAX,
        legal,
    })) = refused
    else {
        panic!("{refused:?}")
    };
    let max = legal
        .split([' ', ';'])
        .find_map(|word| word.parse().ok())
        .unwrap();
    assert_eq!(more(max).unwrap().max_reply(), max);
    assert!(matches!(
        more(max + 1),
        Err(ClientError::Connect(SetupError::Option(_)))
    ));
    served.end();
}

#[test]
fn methods_end_with_their_result_or_their_own_error_and_those_of_another_version_have_ends_of_their_own()
 {
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        server
            .serve(|request| numbers::answer(&mut Sums, &request))
            .unwrap()
    });
    methods::check(net.client(served.address), |error| {
        matches!(error, ClientError::TimedOut)
    });
    served.end();
}

/// The server is stopped while a client fetches a reply.
#[test]
fn a_server_that_stops_lets_its_client_fetch_a_long_reply() {
    const LEN: usize = 8 << 20;
    let net = Net::new();
    let (tell, told) = std::sync::mpsc::channel();
    let served = net.serve(&any_port(), move |server| {
        let stop = server.stop_handle();
        let mut parts = Reassembler::new(stop.clone(), 1 << 20, 2 * LEN);
        let handler = |_| {
            tell.send(stop.clone()).unwrap();
            vec![7; LEN]
        };
        server
            .serve(|part| parts.answer(&part.to_vec(), handler))
            .unwrap();
    });
    let client = net.client(served.address);
    let (max_request, max_reply) = (client.max_request(), client.max_reply());
    let mut client = parts::Client::new(client, max_request, max_reply);
    let stopping = thread::spawn(move || {
        told.recv().unwrap().stop();
    });
    assert_eq!(client.call(b"get", None).unwrap(), vec![7; LEN]);
    stopping.join().unwrap();
    served.end();
}

#[test]
fn payloads_above_a_message_are_one_call() {
    let net = Net::new();
    let served = net.serve(&any_port(), |server| {
        let mut parts = Reassembler::new(server.stop_handle(), 4 << 20, 8 << 20);
        server
            .serve(|part| parts.answer(&part.to_vec(), |whole| numbers::answer(&mut Sums, &whole)))
            .unwrap();
        assert_eq!(parts.held(), 0);
    });
    let client = net.client(served.address);
    let (max_request, max_reply) = (client.max_request(), client.max_reply());
    methods::check_in_parts(client, max_request, max_reply);
    served.end();
}

/// A process of the test below: a client that calls until it is killed.
#[test]
#[ignore = "a process of another test, started by it"]
fn client_process() {
    let Ok(address) = std::env::var("COPYRPC_TEST_ADDRESS") else {
        return;
    };
    limits::watchdog(WATCHDOG);
    let mut client = Client::connect(&*address).unwrap();
    for number in 0u64.. {
        let request = format!("call {number} of {}", std::process::id());
        assert_eq!(
            client.call(request.as_bytes()).unwrap(),
            request.to_ascii_uppercase().as_bytes()
        );
    }
}

fn descriptors_of(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd"))
        .unwrap()
        .count()
}

#[test]
fn clients_that_are_killed_and_stopped_at_random_leave_nothing_at_a_server_and_disturb_nobody() {
    let scale = limits::scale_of("COPYRPC_TEST_SCALE");
    limits::watchdog(WATCHDOG * (1 + scale));
    let (mut server, address) = start_server(&any_port());
    let before = descriptors_of(server.id());
    let start = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "service::client_process"])
            .env("COPYRPC_TEST_ADDRESS", &address);
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let mut clients: Vec<Child> = (0..4).map(|_| start()).collect();
    let mut bystander = Client::connect(&*address).unwrap();
    let mut seed = u64::from(std::process::id());
    for _ in 0..20 * scale {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        thread::sleep(Duration::from_millis(seed >> 33 & 63));
        let victim = (seed >> 40) as usize % clients.len();
        let signal = |signal| {
            assert_eq!(
                // SAFETY: a child that was not waited for.
                unsafe { libc::kill(clients[victim].id() as libc::pid_t, signal) },
                0
            );
        };
        if seed >> 50 & 1 == 0 {
            signal(libc::SIGSTOP);
            assert_eq!(bystander.call(b"meanwhile").unwrap(), b"MEANWHILE");
            thread::sleep(Duration::from_millis(20));
            signal(libc::SIGCONT);
        } else {
            signal(libc::SIGKILL);
            assert_eq!(bystander.call(b"still").unwrap(), b"STILL");
            clients[victim].wait().unwrap();
            clients[victim] = start();
        }
    }
    for client in &mut clients {
        assert!(
            client.try_wait().unwrap().is_none(),
            "a client that was not killed goes on"
        );
        client.kill().unwrap();
        client.wait().unwrap();
    }
    drop(bystander);
    given_back(server.id(), before);
    server.kill().unwrap();
    server.wait().unwrap();
}

/// A process of the test below: clients that connect, call, and end with their process.
#[test]
#[ignore = "a process of another test, started by it"]
fn leaving_process() {
    let Ok(address) = std::env::var("COPYRPC_TEST_ADDRESS") else {
        return;
    };
    limits::watchdog(WATCHDOG);
    let clients: Vec<_> = (0..LEAVING)
        .map(|_| thread_client(address.clone()))
        .collect();
    let clients: Vec<_> = clients
        .into_iter()
        .map(|client| client.join().unwrap())
        .collect();
    // No destructor runs.
    std::process::exit(i32::from(clients.len() != LEAVING));
}

/// Number of clients of a process that exits without destructors.
const LEAVING: usize = 20;

/// Makes a client in a thread of its own, which gets an answer and never drops the client.
fn thread_client(address: String) -> JoinHandle<()> {
    thread::spawn(move || {
        let options = ClientOptions {
            endpoint: EndpointConfig::default(),
            ..ClientOptions::default()
        };
        let mut client = Client::with_options(&*address, &options).unwrap();
        assert_eq!(client.call(b"once").unwrap(), b"ONCE");
        std::mem::forget(client);
    })
}

#[test]
fn a_server_has_what_it_had_when_clients_connected_called_and_vanished() {
    let scale = limits::scale_of("COPYRPC_TEST_SCALE");
    limits::watchdog(WATCHDOG * (1 + scale));
    let (mut server, address) = start_server(&any_port());
    let before = (descriptors_of(server.id()), memory_of(server.id()));
    for _ in 0..5 * scale {
        let mut leaving = Command::new(std::env::current_exe().unwrap());
        leaving
            .args(["--ignored", "--exact", "service::leaving_process"])
            .env("COPYRPC_TEST_ADDRESS", &address);
        let status = leaving.stdout(Stdio::null()).status().unwrap();
        assert!(status.success(), "{status}");
    }
    given_back(server.id(), before.0);
    // The server's allocator keeps pages that were used once, for the maximum number of clients at
    // a time.
    let (kib, room) = (memory_of(server.id()) - before.1, 3 * LEAVING * 2_048);
    assert!(kib < room, "{kib} KiB more than before, of {room}");
    assert_eq!(
        Client::connect(&*address).unwrap().call(b"still").unwrap(),
        b"STILL"
    );
    server.kill().unwrap();
    server.wait().unwrap();
}

/// Returns the resident memory of a process in KiB.
fn memory_of(process: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Waits until the process has at most `before` descriptors.
fn given_back(process: u32, before: usize) {
    let start = Instant::now();
    while descriptors_of(process) > before {
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{} descriptors, {before} before",
            descriptors_of(process)
        );
        thread::sleep(Duration::from_millis(50));
    }
}

/// The strangers send half a record, garbage, a record of another version, or nothing, and keep
/// their connections open.
#[test]
fn a_thousand_strangers_at_once_delay_nobody_and_leave_nothing() {
    const STRANGERS: usize = 1_000;
    const MAGIC: [u8; 8] = *b"copyrpc\0";
    limits::watchdog(WATCHDOG);
    // The server process inherits the limit of descriptors.
    limits::permit_descriptors();
    let (mut server, address) = start_server(&any_port());
    let before = descriptors_of(server.id());
    let mut strangers: Vec<_> = (0..STRANGERS)
        .map(|_| TcpStream::connect(&*address).unwrap())
        .collect();
    for (number, stranger) in strangers.iter_mut().enumerate() {
        let bytes = match number % 4 {
            0 => Vec::new(),
            1 => vec![number as u8; number % 128],
            2 => vec![number as u8; 128],
            _ => [&MAGIC[..], &[number as u8; 120]].concat(),
        };
        // The write fails if the server has already closed the connection.
        let _ = stranger.write_all(&bytes);
    }
    // Shorter than the time that one stranger may take.
    let options = ClientOptions {
        connect_timeout: Duration::from_secs(4),
        ..ClientOptions::default()
    };
    let mut client = Client::with_options(&*address, &options).unwrap();
    assert_eq!(client.call(b"meanwhile").unwrap(), b"MEANWHILE");
    let start = Instant::now();
    // A message that is no record, or a record of another version, is answered with a record that
    // has the version of this library and a refusal.
    for stranger in strangers.iter_mut().skip(2).step_by(4) {
        stranger
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut answer = [0; EXCHANGE_RECORD_SIZE];
        stranger
            .read_exact(&mut answer)
            .unwrap_or_else(|error| panic!("{error}: {:?} {}", start.elapsed(), answer[0]));
        assert!(matches!(
            ExchangeRecord::decode(&answer),
            Err(SetupError::Record(RecordError::Refused(_)))
        ));
    }
    // The client was connected before the strangers were gone.
    drop(client);
    given_back(server.id(), before);
    drop(strangers);
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn strangers_that_stream_drip_and_stop_delay_no_call() {
    for secret in [None, Some(Secret::from(*b"shared"))] {
        let net = Net::new();
        let options = ServerOptions {
            secret: secret.clone(),
            ..net.server_options()
        };
        let served = local::serve(&any_port(), options, upper_case);
        let options = ClientOptions {
            secret,
            ..net.client_options()
        };
        strangers::attack(served.address, || {
            let mut client = Client::with_options(served.address, &options).unwrap();
            move || assert_eq!(client.call(b"meanwhile").unwrap(), b"MEANWHILE")
        });
        served.end();
    }
}

/// A process of the test below: a server at the address in its environment.
#[test]
#[ignore = "a process of another test, started by it"]
fn server_process() {
    let Ok(address) = std::env::var("COPYRPC_TEST_ADDRESS") else {
        return;
    };
    limits::watchdog(WATCHDOG);
    let mut server = Server::bind(address).unwrap();
    println!("\nat {}", server.local_addr().unwrap());
    upper_case(&mut server);
}

fn start_server(address: &str) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "service::server_process",
        ])
        .env("COPYRPC_TEST_ADDRESS", address)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let address = lines
        .find_map(|line| line.unwrap().strip_prefix("at ").map(str::to_owned))
        .unwrap();
    (child, address)
}

#[test]
fn a_server_process_that_is_killed_ends_the_call_and_its_successor_takes_the_next() {
    limits::watchdog(WATCHDOG);
    let (mut server, address) = start_server(&any_port());
    let mut client = Client::connect(&*address).unwrap();
    for _ in 0..4 {
        assert_eq!(client.call(b"ping").unwrap(), b"PING");
        server.kill().unwrap();
        server.wait().unwrap();
        let error = client.call(b"ping").unwrap_err();
        let is_reason = matches!(
            error,
            ClientError::Closed(CloseReason::Disconnected | CloseReason::PeerStalled)
        );
        assert!(
            is_reason || matches!(error, ClientError::Connect(SetupError::Unreachable { .. })),
            "{error}"
        );
        (server, _) = start_server(&address);
    }
    assert_eq!(client.call(b"ping").unwrap(), b"PING");
    server.kill().unwrap();
    server.wait().unwrap();
}
