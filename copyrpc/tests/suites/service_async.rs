//! Servers and clients whose calls are futures: in tokio and in an executor of the test, with many
//! tasks, calls that are given up or late, and calls without a server.

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use copyrpc::methods::MethodError;
use copyrpc::parts::Reassembler;
use copyrpc::{
    AsyncCall, AsyncClient, AsyncServer, Client, ClientError, ClientOptions, Ending,
    EndpointConfig, Events, Peer, RecordError, Refusal, Secret, ServerOptions, ServerRequest,
    SetupError, StopHandle,
};
use copyrpc_testing::executor::block_on;
use copyrpc_testing::limits::{self, any_port};
use copyrpc_testing::methods::{self, Sums, numbers};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::local::{Net, WATCHDOG};

/// Clients, servers and requests can be sent to other threads.
const _: () = {
    const fn is_portable<T: Send + Sync + 'static>() {}
    const fn is_sent<T: Send + 'static>() {}
    is_portable::<AsyncClient>();
    is_portable::<AsyncServer>();
    is_portable::<ServerRequest>();
    is_sent::<AsyncCall>();
};

async fn start(net: &Net, address: &str) -> AsyncServer {
    AsyncServer::with_options(address.to_owned(), &net.server_options())
        .await
        .unwrap()
}

async fn connect(net: &Net, address: SocketAddr) -> AsyncClient {
    AsyncClient::with_options(address, &net.client_options())
        .await
        .unwrap()
}

fn start_call(client: &AsyncClient, request: &[u8]) -> Pin<Box<AsyncCall>> {
    let mut call = Box::pin(client.call(request));
    block_on(std::future::poll_fn(|task| {
        assert!(call.as_mut().poll(task).is_pending());
        Poll::Ready(())
    }));
    call
}

fn reversed(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().rev().copied().collect()
}

#[test]
fn tasks_of_a_runtime_share_a_connection_and_get_each_their_own_replies() {
    const TASKS: u32 = 200;
    let net = Net::new();
    Runtime::new().unwrap().block_on(async {
        let server = start(&net, &any_port()).await;
        let (address, stop) = (server.local_addr(), server.stop_handle());
        let serving = tokio::spawn(async move {
            let mut answers = JoinSet::new();
            while let Some(request) = server.recv().await.unwrap() {
                assert!(server.stats().calls == 0 && server.clients() <= 2);
                answers.spawn(async move {
                    // Requests are not answered in the order of their arrival.
                    for _ in 0..request.data().len() % 7 {
                        tokio::task::yield_now().await;
                    }
                    let reply = reversed(request.data());
                    request.reply(reply);
                });
            }
            answers.join_all().await.len()
        });
        let clients = [connect(&net, address).await, connect(&net, address).await];
        let mut calls = JoinSet::new();
        for task in 0..TASKS {
            let client = clients[task as usize % 2].clone();
            calls.spawn(async move {
                for call in 0..20u32 {
                    // Together, the requests have more bytes than a ring.
                    let request: Vec<u8> = (0..(task * 131 + call * 37) % 2_000)
                        .map(|i| (task ^ call ^ i) as u8)
                        .collect();
                    assert_eq!(client.call(&*request).await.unwrap(), reversed(&request));
                }
            });
        }
        while let Some(ended) = calls.join_next().await {
            ended.unwrap();
        }
        // The counters are updated at the latest when the threads sleep.
        while clients
            .iter()
            .map(|client| client.stats().calls)
            .sum::<u64>()
            < u64::from(TASKS) * 20
        {
            tokio::task::yield_now().await;
        }
        stop.stop();
        assert_eq!(serving.await.unwrap(), TASKS as usize * 20);
    });
}

/// Bursts of calls of all sizes, after pauses in which the threads of client and server fall
/// asleep.
#[test]
fn bursts_of_calls_after_pauses_get_each_their_own_replies() {
    const TASKS: usize = 60;
    let net = Net::new();
    Runtime::new().unwrap().block_on(async {
        let server = start(&net, &any_port()).await;
        let (address, stop) = (server.local_addr(), server.stop_handle());
        let serving = tokio::spawn(async move {
            while let Some(request) = server.recv().await.unwrap() {
                let reply = reversed(request.data());
                request.reply(reply);
            }
        });
        let clients = [
            connect(&net, address).await,
            connect(&net, address).await,
            connect(&net, address).await,
        ];
        for round in 0..20 * limits::scale_of("COPYRPC_TEST_SCALE") as usize {
            thread::sleep(Duration::from_millis(3));
            let used = &clients[..1 + 2 * (round % 2)];
            let mut calls = JoinSet::new();
            for task in 0..TASKS {
                let client = used[task % used.len()].clone();
                calls.spawn(async move {
                    for call in 0..3 {
                        let len = (round * 131 + task * 577 + call * 61)
                            % (client.max_reply().min(client.max_request()) + 1);
                        let request: Vec<u8> = (0..len)
                            .map(|nth| (nth ^ task ^ call ^ round) as u8)
                            .collect();
                        assert_eq!(client.call(&*request).await.unwrap(), reversed(&request));
                    }
                });
            }
            while let Some(ended) = calls.join_next().await {
                ended.unwrap();
            }
        }
        stop.stop();
        serving.await.unwrap();
    });
}

#[test]
fn a_plain_loop_that_sleeps_is_woken_for_every_request_and_reply() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let (address, stop) = (server.local_addr(), server.stop_handle());
    let serving = thread::spawn(move || {
        while let Some(request) = block_on(server.recv()).unwrap() {
            let reply = request.data().to_ascii_uppercase();
            request.reply(reply);
        }
    });
    let client = block_on(connect(&net, address));
    for round in 0..300u64 {
        if round % 16 == 0 {
            // Both threads sleep after this time.
            thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(block_on(client.call(b"ping")).unwrap(), b"PING");
    }
    stop.stop();
    serving.join().unwrap();
}

#[test]
fn every_way_in_which_a_call_ends_is_told_apart() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let client = block_on(connect(&net, server.local_addr()));
    let end = |client: &AsyncClient, act: fn(ServerRequest)| {
        let call = start_call(client, b"x");
        act(block_on(server.recv()).unwrap().unwrap());
        block_on(call)
    };
    assert_eq!(end(&client, |request| request.reply(*b"y")).unwrap(), b"y");
    assert!(matches!(end(&client, drop), Err(ClientError::Dropped)));
    assert!(matches!(
        end(&client, ServerRequest::refuse),
        Err(ClientError::Refused)
    ));
    let too_long = end(&client, |request| request.reply(vec![0; 1 << 20])).unwrap_err();
    assert!(
        matches!(too_long, ClientError::ReplyTooLong { len: Some(len) } if len == 1 << 20),
        "{too_long}"
    );
    let long = vec![0; client.max_request() + 1];
    assert!(
        matches!(block_on(client.call(long)), Err(ClientError::TooLarge { len, max }) if len == max + 1)
    );
    assert!(matches!(
        block_on(client.call_within(b"x", Duration::ZERO)),
        Err(ClientError::NotSent)
    ));
    loop {
        let late = block_on(client.call_within(b"late", Duration::from_millis(20))).unwrap_err();
        assert!(
            matches!(late, ClientError::TimedOut | ClientError::NotSent),
            "{late}"
        );
        let next = start_call(&client, b"next");
        let mut received = block_on(server.recv()).unwrap().unwrap();
        // The call was not sent if the client's thread did not run before the timeout.
        let is_late = received.data() == b"late";
        assert!(
            !is_late || matches!(late, ClientError::TimedOut),
            "it was sent: {late}"
        );
        if is_late {
            received.reply(*b"nobody gets it");
            received = block_on(server.recv()).unwrap().unwrap();
        }
        received.reply(*b"y");
        assert_eq!(block_on(next).unwrap(), b"y");
        if is_late {
            break;
        }
    }
}

#[test]
fn a_call_that_is_answered_late_stops_no_other_of_its_client() {
    const SIZE: usize = 1_000;
    let net = Net::new();
    let (server, client) = block_on(async {
        let server = start(&net, &any_port()).await;
        let client = connect(&net, server.local_addr()).await;
        (server, client)
    });
    let mut late = start_call(&client, b"late");
    let held = block_on(server.recv()).unwrap().unwrap();
    // The requests have several times the bytes of the ring.
    for _ in 0..4 * EndpointConfig::default().ring_size / SIZE as u64 {
        let call = start_call(&client, &[7; SIZE]);
        block_on(server.recv()).unwrap().unwrap().reply(*b"soon");
        assert_eq!(block_on(call).unwrap(), b"soon");
    }
    assert_eq!(held.data(), b"late");
    held.reply(*b"at last");
    assert_eq!(block_on(&mut late).unwrap(), b"at last");
}

#[test]
fn by_default_63_calls_of_a_client_are_under_way_at_once() {
    let net = Net::new();
    let (server_options, client_options) = (net.server_options(), net.client_options());
    block_on(async {
        let options = ServerOptions {
            endpoint: EndpointConfig::default(),
            ..server_options
        };
        let server = AsyncServer::with_options(any_port(), &options)
            .await
            .unwrap();
        let options = ClientOptions {
            endpoint: EndpointConfig::default(),
            ..client_options
        };
        let client = AsyncClient::with_options(server.local_addr(), &options)
            .await
            .unwrap();
        assert_eq!(client.max_reply(), 4096);
        let calls: Vec<_> = (0..63).map(|_| start_call(&client, b"")).collect();
        let mut held = Vec::new();
        while held.len() < calls.len() {
            held.push(server.recv().await.unwrap().unwrap());
        }
        held.into_iter()
            .for_each(|request| request.reply([7; 4096]));
        for call in calls {
            assert_eq!(call.await.unwrap(), [7; 4096]);
        }
    });
}

#[test]
fn a_server_that_goes_drops_the_request_in_hand_and_the_one_that_nobody_received_waits_for_another_server()
 {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let options = ClientOptions {
        connect_timeout: Duration::from_millis(400),
        ..net.client_options()
    };
    let client = block_on(AsyncClient::with_options(server.local_addr(), &options)).unwrap();
    let [first, second] =
        [&b"held"[..], b"not received"].map(|request| start_call(&client, request));
    let held = block_on(server.recv()).unwrap().unwrap();
    drop(server);
    let first = block_on(first).unwrap_err();
    assert!(
        matches!(first, ClientError::Dropped) && first.may_have_executed(),
        "{first:?}"
    );
    let second = block_on(second).unwrap_err();
    assert!(
        matches!(
            second,
            ClientError::Connect(SetupError::Unreachable { .. }) | ClientError::Connect(_)
        ) && second.is_retryable(),
        "{second:?}"
    );
    held.reply(*b"too late");
}

#[test]
fn a_server_that_drains_waits_for_the_answers_of_its_tasks_as_long_as_it_may() {
    let net = Net::new();
    for (limit, unanswered) in [(WATCHDOG, 0), (Duration::ZERO, 1)] {
        let server = block_on(start(&net, &any_port()));
        let client = block_on(connect(&net, server.local_addr()));
        let call = start_call(&client, b"held");
        let request = block_on(server.recv()).unwrap().unwrap();
        let mut drain = Box::pin(server.drain(limit));
        if unanswered == 0 {
            assert!(block_on(std::future::poll_fn(|task| Poll::Ready(
                drain.as_mut().poll(task).is_pending()
            ))));
            request.reply(*b"at last");
            assert_eq!(block_on(drain), 0);
            assert_eq!(server.stats().replies, 1);
            assert_eq!(block_on(call).unwrap(), b"at last");
        } else {
            assert_eq!(block_on(drain), 1);
            assert!(matches!(block_on(call), Err(ClientError::Dropped)));
            request.reply(*b"too late");
        }
        assert!(block_on(server.recv()).unwrap().is_none());
        assert_eq!(block_on(server.drain(limit)), 0, "it has ended");
    }
}

/// The callers of two requests give up: the first by its timeout, the second by the drop of its
/// client. The credit of the first call is returned.
#[test]
fn a_handler_whose_caller_gave_up_is_dropped() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let options = ClientOptions {
        max_reply: Some(12_000),
        ..net.client_options()
    };
    let client = block_on(AsyncClient::with_options(server.local_addr(), &options)).unwrap();
    let methods = numbers::AsyncClient {
        caller: client.clone(),
        timeout: Some(Duration::from_millis(50)),
    };
    // The client has credit for only one such reply.
    for _ in 0..3 {
        thread::scope(|scope| {
            scope.spawn(|| {
                let late = loop {
                    let late = block_on(methods.double(1)).unwrap_err();
                    if !late.is_retryable() {
                        break late;
                    }
                };
                // A client that was suspended finds the server's answer first.
                assert!(
                    matches!(
                        late,
                        MethodError::Call(ClientError::TimedOut | ClientError::Dropped)
                    ),
                    "{late:?}"
                );
                assert!(late.may_have_executed());
            });
            let request = block_on(server.recv()).unwrap().unwrap();
            assert!(
                request.is_wanted()
                    && request.deadline().unwrap() <= Instant::now() + Duration::from_millis(50)
            );
            assert!(
                block_on(request.while_wanted(request.deadline(), std::future::pending::<()>()))
                    .is_none()
            );
            assert!(request.deadline().unwrap() <= Instant::now());
        });
    }
    let call = start_call(&client, b"no method");
    let request = block_on(server.recv()).unwrap().unwrap();
    assert_eq!(block_on(request.while_wanted(None, async { 7 })), Some(7));
    drop((call, methods, client));
    assert!(block_on(request.while_wanted(None, std::future::pending::<()>())).is_none());
    assert!(!request.is_wanted());
    request.reply(*b"to nobody");
}

/// The server has dropped the connection of the request before the handler answers.
#[test]
fn an_answer_to_a_client_that_has_gone_reaches_no_other() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let gone = block_on(connect(&net, server.local_addr()));
    let call = start_call(&gone, b"gone");
    let late = block_on(server.recv()).unwrap().unwrap();
    drop((call, gone));
    assert!(block_on(late.while_wanted(None, std::future::pending::<()>())).is_none());
    let client = block_on(connect(&net, server.local_addr()));
    let call = start_call(&client, b"here");
    let request = block_on(server.recv()).unwrap().unwrap();
    late.reply(*b"late");
    request.reply(*b"answer");
    assert_eq!(block_on(call).unwrap(), b"answer");
}

/// The client of the request disconnects before any task receives the request.
#[test]
fn a_request_that_nobody_received_goes_with_its_client() {
    let net = Net::new();
    let options = ServerOptions {
        max_buffered: 0,
        ..net.server_options()
    };
    let server = block_on(AsyncServer::with_options(any_port(), &options)).unwrap();
    let gone = block_on(connect(&net, server.local_addr()));
    let call = start_call(&gone, b"gone");
    thread::sleep(Duration::from_millis(50));
    drop((call, gone));
    while server.clients() > 0 {
        thread::sleep(Duration::from_millis(1));
    }
    let client = block_on(connect(&net, server.local_addr()));
    let call = start_call(&client, b"here");
    let request = block_on(server.recv()).unwrap().unwrap();
    assert_eq!(request.data(), b"here");
    request.reply(*b"answer");
    assert_eq!(block_on(call).unwrap(), b"answer");
}

/// The first server of the list stops while a task has a request, and while others wait to be
/// received.
#[test]
fn a_stopped_server_sends_its_clients_on_and_answers_what_its_tasks_have() {
    const WAITING: usize = 10;
    let net = Net::new();
    let first = block_on(start(&net, &any_port()));
    let second = block_on(start(&net, &any_port()));
    let addresses = [first.local_addr(), second.local_addr()];
    let options = ClientOptions {
        max_reply: Some(64),
        ..net.client_options()
    };
    let client = block_on(AsyncClient::with_options(ListOf(addresses), &options)).unwrap();
    let mut held = start_call(&client, b"held");
    let request = block_on(first.recv()).unwrap().unwrap();
    let waiting: Vec<_> = (0..WAITING).map(|_| start_call(&client, b"?")).collect();
    // The calls have arrived when this call has, as they were sent before it.
    let mut sync = Client::with_options(addresses[0], &net.client_options()).unwrap();
    assert!(matches!(
        sync.call_within(b"?", Duration::from_millis(200)),
        Err(ClientError::TimedOut | ClientError::NotSent)
    ));
    first.stop_handle().stop();
    assert!(block_on(first.recv()).unwrap().is_none());
    let serving = serve_at(second);
    for call in waiting {
        assert_eq!(block_on(call).unwrap(), b"here");
    }
    assert_eq!(block_on(client.call(b"later")).unwrap(), b"here");
    // The server no longer listens, so another server may take its address.
    let third = block_on(start(&net, &addresses[0].to_string()));
    assert!(block_on(std::future::poll_fn(|task| Poll::Ready(
        held.as_mut().poll(task).is_pending()
    ))));
    request.reply(*b"at last");
    assert_eq!(block_on(held).unwrap(), b"at last");
    drop((first, third, client));
    serving.0.stop();
    serving.1.join().unwrap();
}

/// The server says goodbye, and there is no other server. Two of the client's calls are in flight:
/// one times out, the other is answered.
#[test]
fn calls_under_way_end_while_the_client_looks_for_the_next_server() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let client = block_on(connect(&net, server.local_addr()));
    let answered = start_call(&client, b"answered");
    let request = block_on(server.recv()).unwrap().unwrap();
    let late = {
        let client = client.clone();
        thread::spawn(move || block_on(client.call_within(b"late", Duration::from_millis(300))))
    };
    let _held = block_on(server.recv()).unwrap().unwrap();
    server.stop_handle().stop();
    let mut next = Box::pin(client.call_within(b"next", WATCHDOG / 3));
    let mut is_pending = || {
        block_on(std::future::poll_fn(|task| {
            Poll::Ready(next.as_mut().poll(task).is_pending())
        }))
    };
    assert!(is_pending());
    thread::sleep(Duration::from_millis(50));
    request.reply(*b"at once");
    assert_eq!(block_on(answered).unwrap(), b"at once");
    assert!(matches!(late.join().unwrap(), Err(ClientError::TimedOut)));
    assert!(is_pending(), "it has looked for a server all the time");
}

/// The server has stopped and there is no other, so a further call makes the client try to connect again and again.
#[test]
fn a_call_that_is_dropped_while_its_client_looks_for_a_server_is_given_up_at_the_old_one() {
    limits::watchdog(WATCHDOG);
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let options = ClientOptions {
        connect_timeout: 2 * WATCHDOG,
        ..net.client_options()
    };
    let client = block_on(AsyncClient::with_options(server.local_addr(), &options)).unwrap();
    let call = start_call(&client, b"dropped");
    let request = block_on(server.recv()).unwrap().unwrap();
    server.stop_handle().stop();
    let mut next = start_call(&client, b"next");
    let mut is_pending = || {
        block_on(std::future::poll_fn(|task| {
            Poll::Ready(next.as_mut().poll(task).is_pending())
        }))
    };
    thread::sleep(Duration::from_millis(50));
    drop(call);
    assert!(block_on(request.while_wanted(None, std::future::pending::<()>())).is_none());
    assert!(!request.is_wanted() && is_pending());
}

/// Addresses that are tried in this order.
#[derive(Clone, Debug)]
struct ListOf([SocketAddr; 2]);

impl std::net::ToSocketAddrs for ListOf {
    type Iter = std::array::IntoIter<SocketAddr, 2>;

    fn to_socket_addrs(&self) -> std::io::Result<Self::Iter> {
        Ok(self.0.into_iter())
    }
}

fn serve_at(server: AsyncServer) -> (StopHandle, thread::JoinHandle<()>) {
    (server.stop_handle(), serve(server))
}

/// The events name the client that requests name, with the reason of its end; a stranger and a
/// client without the secret are refused by name.
#[test]
fn a_server_tells_who_calls_who_leaves_and_who_is_refused_why() {
    let net = Net::new();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = Arc::clone(&heard);
    let events = Events::new(move |event| hears.lock().unwrap().push(event.to_string()));
    let until = |count: usize| {
        let start = Instant::now();
        while heard.lock().unwrap().len() < count {
            assert!(start.elapsed() < WATCHDOG, "{:?}", heard.lock().unwrap());
            thread::sleep(Duration::from_millis(1));
        }
        heard.lock().unwrap()[count - 1].clone()
    };
    block_on(async {
        let secret = Some(Secret::from(*b"shared"));
        let options = ServerOptions {
            events,
            secret: secret.clone(),
            ..net.server_options()
        };
        let server = AsyncServer::with_options(any_port(), &options)
            .await
            .unwrap();
        let address = server.local_addr();
        let peer_of = async |client: &AsyncClient| -> Peer {
            let call = start_call(client, b"who");
            let request = server.recv().await.unwrap().unwrap();
            let peer = request.peer();
            request.reply([]);
            call.await.unwrap();
            peer
        };
        let with = |secret: Option<Secret>| ClientOptions {
            secret,
            ..net.client_options()
        };
        let client = AsyncClient::with_options(address, &with(secret.clone()))
            .await
            .unwrap();
        let peer = peer_of(&client).await;
        assert_eq!(
            (until(1), peer_of(&client).await),
            (format!("{peer} has connected"), peer)
        );
        assert!(peer.address.ip().is_loopback() && peer.address != address);
        let second = AsyncClient::with_options(address, &with(secret))
            .await
            .unwrap();
        assert_ne!(peer_of(&second).await.number, peer.number);
        until(2);
        for (secret, refusal) in [
            (None, Refusal::Secret),
            (Some(Secret::from(*b"other")), Refusal::WrongSecret),
        ] {
            let refused = AsyncClient::with_options(address, &with(secret))
                .await
                .unwrap_err();
            let ClientError::Connect(SetupError::Record(RecordError::Refused(told))) = refused
            else {
                panic!("{refused}")
            };
            assert_eq!(told, refusal);
            assert!(until(3).ends_with(&format!("was refused: {refusal}")));
            heard.lock().unwrap().truncate(2);
        }
        drop(client);
        let left = until(3);
        assert!(
            left.starts_with(&format!("{peer} is disconnected: ")),
            "{left}"
        );
        drop(server);
        assert_eq!(heard.lock().unwrap().len(), 4, "the second is told of too");
        drop(second);
    });
    let without = net.serve(&any_port(), |server| server.serve(|_| []).unwrap());
    let options = ClientOptions {
        secret: Some(Secret::from(*b"shared")),
        ..net.client_options()
    };
    let refused = Client::with_options(without.address, &options).unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!("refused: {}", Refusal::NoSecret)
    );
    without.end();
}

#[test]
fn requests_that_nobody_receives_fill_their_rings_and_not_the_memory_of_the_server() {
    const CALLS: usize = 100;
    const SIZE: usize = 1_900;
    let net = Net::new();
    let options = ServerOptions {
        max_buffered: 5 * SIZE,
        ..net.server_options()
    };
    let server = block_on(AsyncServer::with_options(any_port(), &options)).unwrap();
    // Credit for more calls than these.
    let options = ClientOptions {
        max_reply: Some(0),
        ..net.client_options()
    };
    let client = block_on(AsyncClient::with_options(server.local_addr(), &options)).unwrap();
    for _ in 0..2 {
        let calls: Vec<_> = (0..CALLS)
            .map(|_| start_call(&client, &[7; SIZE]))
            .collect();
        let late = block_on(client.call_within(b"no room", Duration::from_millis(300)));
        assert!(matches!(late, Err(ClientError::NotSent)), "{late:?}");
        for _ in 0..CALLS {
            let request = block_on(server.recv()).unwrap().unwrap();
            assert_eq!(request.data(), [7; SIZE]);
            request.reply(*b"");
        }
        for call in calls {
            assert_eq!(block_on(call).unwrap(), b"");
        }
    }
}

/// A call that is under way on the connection without credit ends there.
#[test]
fn clients_whose_credit_is_kept_by_calls_that_were_given_up_connect_again() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let client = block_on(connect(&net, server.local_addr()));
    let live = start_call(&client, b"live");
    let live_request = block_on(server.recv()).unwrap().unwrap();
    let mut held = Vec::new();
    let error = loop {
        match block_on(client.call_within(b"stuck", Duration::from_millis(50))) {
            Err(ClientError::TimedOut) => held.push(block_on(server.recv()).unwrap().unwrap()),
            // The client's thread did not run before the call's timeout.
            Err(ClientError::NotSent) => {}
            other => break other.unwrap_err(),
        }
    };
    assert!(
        matches!(error, ClientError::NoCredit { given_up } if given_up == held.len()),
        "{error}, {}",
        held.len()
    );
    let next = start_call(&client, b"next");
    let request = block_on(server.recv()).unwrap().unwrap();
    assert_eq!(request.data(), b"next");
    request.reply(*b"at once");
    assert_eq!(block_on(next).unwrap(), b"at once");
    live_request.reply(*b"still");
    assert_eq!(block_on(live).unwrap(), b"still");
}

/// Fills the credit of a client's connection with calls that are held. Returns them, and their
/// requests.
fn use_up_credit(
    server: &AsyncServer,
    client: &AsyncClient,
) -> Vec<(Pin<Box<AsyncCall>>, ServerRequest)> {
    let mut held = Vec::new();
    loop {
        let call = start_call(client, b"held");
        let mut request = Box::pin(server.recv());
        let start = Instant::now();
        let received = block_on(std::future::poll_fn(|task| {
            loop {
                match request.as_mut().poll(task) {
                    Poll::Ready(request) => return Poll::Ready(request.unwrap()),
                    // A second is far longer than a call takes.
                    Poll::Pending if start.elapsed() > Duration::from_secs(1) => {
                        return Poll::Ready(None);
                    }
                    Poll::Pending => thread::sleep(Duration::from_millis(1)),
                }
            }
        }));
        match received {
            Some(request) => held.push((call, request)),
            None => return held,
        }
    }
}

/// The credit is held by many long polls. If one of them is given up, a further call waits, because
/// the other long polls may be answered. Once most are given up, a further call fails, and the call
/// after it is made on another connection.
#[test]
fn a_call_without_credit_fails_once_and_only_if_most_calls_that_keep_it_were_given_up() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let connect_timeout = Duration::from_millis(400);
    let options = ClientOptions {
        connect_timeout,
        ..net.client_options()
    };
    let client = block_on(AsyncClient::with_options(server.local_addr(), &options)).unwrap();
    let mut held = use_up_credit(&server, &client);
    assert!(held.len() >= 4, "{}", held.len());
    let (given_up, mut late) = held.pop().unwrap();
    drop(given_up);
    let mut waiting = start_call(&client, b"waiting");
    thread::sleep(4 * connect_timeout);
    assert!(block_on(std::future::poll_fn(|task| Poll::Ready(
        waiting.as_mut().poll(task).is_pending()
    ))));
    late.reply(*b"late");
    let request = block_on(server.recv()).unwrap().unwrap();
    assert_eq!(request.data(), b"waiting");
    let (live, live_request) = held.pop().unwrap();
    held.push((waiting, request));
    let requests: Vec<_> = held
        .into_iter()
        .map(|(_given_up, request)| request)
        .collect();
    let error = block_on(client.call(b"?")).unwrap_err();
    assert!(
        matches!(error, ClientError::NoCredit { given_up } if given_up == requests.len()),
        "{error}"
    );
    for _ in 0..3 {
        let next = start_call(&client, b"next");
        late = block_on(server.recv()).unwrap().unwrap();
        assert_eq!(late.data(), b"next");
        late.reply(*b"at once");
        assert_eq!(block_on(next).unwrap(), b"at once");
    }
    live_request.reply(*b"still");
    assert_eq!(block_on(live).unwrap(), b"still");
}

#[test]
fn a_client_that_its_server_calls_refuses_each_call_at_once() {
    const PUSHES: usize = 1_000;
    let net = Net::new();
    let (ask, asked) = std::sync::mpsc::channel();
    let served = net.serve(&any_port(), move |server| {
        let mut pushed = 0;
        let request = loop {
            server.step().unwrap();
            if let Some(request) = server.recv() {
                break request;
            }
        };
        let endpoint = request.endpoint();
        while pushed < PUSHES || endpoint.outstanding_calls() > 0 {
            if pushed < PUSHES && endpoint.call(&[1; 1_000], (), 8).is_ok() {
                pushed += 1;
            }
            server.step().unwrap();
        }
        request.reply(b"answer").unwrap();
        ask.send(()).unwrap();
        server.serve(|_| b"").unwrap();
    });
    let client = block_on(connect(&net, served.address));
    assert_eq!(block_on(client.call(b"hello")).unwrap(), b"answer");
    asked.recv().unwrap();
    served.end();
}

#[test]
fn a_call_that_is_given_up_leaves_room_for_others() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let client = block_on(connect(&net, server.local_addr()));
    // More requests than the ring and its credit permit: some are under way, others wait.
    let request = vec![7; 4 << 10];
    for _ in 0..3 {
        let mut calls: Vec<_> = (0..40).map(|_| Box::pin(client.call(&*request))).collect();
        block_on(std::future::poll_fn(|task| {
            assert!(
                calls
                    .iter_mut()
                    .all(|call| call.as_mut().poll(task).is_pending())
            );
            Poll::Ready(())
        }));
        let first = block_on(server.recv()).unwrap().unwrap();
        drop(calls);
        // The requests that arrived are answered; their callers are gone.
        first.reply(*b"late");
        let call = client.call(b"last");
        let answering = thread::scope(|scope| {
            let call = scope.spawn(move || block_on(call));
            loop {
                let request = block_on(server.recv()).unwrap().unwrap();
                let is_last = request.data() == b"last";
                request.reply(*b"answer");
                if is_last {
                    return call.join().unwrap();
                }
            }
        });
        assert_eq!(answering.unwrap(), b"answer");
    }
}

#[test]
fn a_call_ends_at_its_time_behind_others_that_the_ring_has_no_room_for() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let client = block_on(connect(&net, server.local_addr()));
    // The server does not answer, and the requests have more bytes than the ring.
    let mut patient: Vec<_> = (0..100)
        .map(|_| Box::pin(client.call_within(vec![0; 1_900], WATCHDOG * 2)))
        .collect();
    block_on(std::future::poll_fn(|task| {
        assert!(
            patient
                .iter_mut()
                .all(|call| call.as_mut().poll(task).is_pending())
        );
        Poll::Ready(())
    }));
    assert!(matches!(
        block_on(client.call_within(b"?", Duration::from_millis(20))),
        Err(ClientError::NotSent)
    ));
}

/// Calls until the client has detected the end of its server. A call in flight at this time may end
/// in any way.
fn until_gone(client: &AsyncClient) {
    while !matches!(
        block_on(client.call_within(b"?", Duration::from_millis(1))),
        Err(ClientError::NotSent)
    ) {}
}

/// Answers "here", in a thread of its own, until the server is stopped.
fn serve(server: AsyncServer) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        while let Some(request) = block_on(server.recv()).unwrap() {
            request.reply(*b"here");
        }
    })
}

#[test]
fn a_server_that_comes_back_is_connected_to_again() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let address = server.local_addr();
    let client = block_on(connect(&net, address));
    let (mut stop, mut serving) = (server.stop_handle(), serve(server));
    for _ in 0..3 {
        assert_eq!(block_on(client.call(b"?")).unwrap(), b"here");
        stop.stop();
        serving.join().unwrap();
        // The client may not have received the closing message of the server yet. A call without a
        // server waits.
        let call = {
            let client = client.clone();
            thread::spawn(move || block_on(client.call(b"?")))
        };
        thread::sleep(Duration::from_millis(5));
        let server = block_on(start(&net, &address.to_string()));
        (stop, serving) = (server.stop_handle(), serve(server));
        assert_eq!(call.join().unwrap().unwrap(), b"here");
    }
    stop.stop();
    serving.join().unwrap();
    // There is no server any more, and no call waits for one.
    let call = client.call_within(b"?", Duration::from_millis(10));
    drop(client);
    drop(call);
}

/// The client's options let it try to connect again for hours. A call that is made meanwhile, and a
/// call without a timeout, end correctly, too.
#[test]
fn calls_end_in_their_time_also_while_their_connection_is_made_again() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let address = server.local_addr();
    let client = block_on(connect(&net, address));
    let (stop, serving) = (server.stop_handle(), serve(server));
    assert_eq!(block_on(client.call(b"?")).unwrap(), b"here");
    stop.stop();
    serving.join().unwrap();
    until_gone(&client);
    let call = |time: Option<u64>| {
        let client = client.clone();
        thread::spawn(move || match time {
            Some(ms) => block_on(client.call_within(b"?", Duration::from_millis(ms))),
            None => block_on(client.call(b"?")),
        })
    };
    let patient = call(None);
    let first = call(Some(100));
    thread::sleep(Duration::from_millis(30));
    let meanwhile = call(Some(50));
    let first = first.join().unwrap();
    assert!(matches!(first, Err(ClientError::NotSent)), "{first:?}");
    assert!(matches!(
        meanwhile.join().unwrap(),
        Err(ClientError::NotSent)
    ));
    assert!(matches!(
        block_on(client.call_within(b"?", Duration::from_millis(20))),
        Err(ClientError::NotSent)
    ));
    let server = block_on(start(&net, &address.to_string()));
    let (stop, serving) = (server.stop_handle(), serve(server));
    assert_eq!(patient.join().unwrap().unwrap(), b"here");
    stop.stop();
    serving.join().unwrap();
}

#[test]
fn a_connection_that_nobody_waits_for_is_given_up() {
    let net = Net::new();
    let address = TcpListener::bind(any_port()).unwrap().local_addr().unwrap();
    let options = net.client_options();
    let mut connecting = Box::pin(AsyncClient::with_options(address, &options));
    block_on(std::future::poll_fn(|task| {
        assert!(connecting.as_mut().poll(task).is_pending());
        Poll::Ready(())
    }));
    drop(connecting);
    let none = ClientOptions {
        connect_timeout: Duration::from_millis(50),
        ..net.client_options()
    };
    assert!(matches!(
        block_on(AsyncClient::with_options(address, &none)),
        Err(ClientError::Connect(SetupError::Unreachable { .. }))
    ));
    let bound = TcpListener::bind(any_port()).unwrap();
    let taken = block_on(AsyncServer::bind(bound.local_addr().unwrap()));
    assert!(taken.unwrap_err().to_string().contains("listening"));
}

/// A process of the test below: a server and a client with nothing to do.
#[test]
#[ignore = "a process of another test, started by it"]
fn idle_process() {
    if std::env::var_os("COPYRPC_TEST_IDLE").is_none() {
        return;
    }
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let client = block_on(connect(&net, server.local_addr()));
    let answering = thread::spawn(move || {
        while let Some(request) = block_on(server.recv()).unwrap() {
            request.reply(*b"pong");
        }
    });
    block_on(client.call(b"ping")).unwrap();
    // Another server holds back a request, which no task waits for.
    let options = ServerOptions {
        max_buffered: 0,
        ..net.server_options()
    };
    let full = block_on(AsyncServer::with_options(any_port(), &options)).unwrap();
    let waiting = block_on(connect(&net, full.local_addr()));
    let _calls = [(); 2].map(|()| start_call(&waiting, b"not received"));
    // A third server drains while a task holds a request. The requests after this request were not
    // received.
    let draining = block_on(AsyncServer::with_options(any_port(), &options)).unwrap();
    let leaving = block_on(connect(&net, draining.local_addr()));
    let held = start_call(&leaving, b"held");
    let _request = block_on(draining.recv()).unwrap().unwrap();
    let _refused = [(); 3].map(|()| start_call(&leaving, b"not received"));
    thread::sleep(Duration::from_millis(50));
    let mut drain = Box::pin(draining.drain(WATCHDOG));
    assert!(block_on(std::future::poll_fn(|task| Poll::Ready(
        drain.as_mut().poll(task).is_pending()
    ))));
    // The credit of this client is held by a call that was given up. Its next call was given up
    // while it waited for the credit.
    let options = ClientOptions {
        max_reply: Some(12_000),
        connect_timeout: Duration::from_millis(400),
        ..net.client_options()
    };
    let silent = block_on(start(&net, &any_port()));
    let starving = block_on(AsyncClient::with_options(silent.local_addr(), &options)).unwrap();
    let given_up = start_call(&starving, b"given up");
    let _held = block_on(silent.recv()).unwrap().unwrap();
    drop(given_up);
    let given_up = start_call(&starving, b"no credit");
    thread::sleep(Duration::from_millis(20));
    drop(given_up);
    thread::sleep(Duration::from_millis(100));
    let (before, since) = (processor_time(), Instant::now());
    let mut call = Box::pin(client.call_within(b"", Duration::from_secs(9)));
    while since.elapsed() < Duration::from_secs(1) {
        thread::sleep(Duration::from_millis(100));
    }
    println!(
        "\nbusy for {} of {} us",
        (processor_time() - before).as_micros(),
        since.elapsed().as_micros()
    );
    block_on(call.as_mut()).unwrap();
    drop((call, client, answering, held));
    std::process::exit(0);
}

fn processor_time() -> Duration {
    // SAFETY: a plain structure of numbers, which the call fills.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        assert_eq!(
            libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time),
            0
        );
        time
    };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn who_has_nothing_to_do_keeps_no_core_busy() {
    limits::watchdog(WATCHDOG);
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "service_async::idle_process",
        ])
        .env("COPYRPC_TEST_IDLE", "1")
        .stderr(std::process::Stdio::inherit());
    let output = String::from_utf8(child.output().unwrap().stdout).unwrap();
    let line = output
        .lines()
        .find_map(|line| line.strip_prefix("busy for "))
        .expect(&output);
    let numbers: Vec<u64> = line
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    assert!(numbers[0] * 5 < numbers[1], "{line}");
}

#[test]
fn methods_that_are_futures_end_as_blocking_ones_do() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let (address, stop) = (server.local_addr(), server.stop_handle());
    let serving = thread::spawn(move || {
        while let Some(request) = block_on(server.recv()).unwrap() {
            let reply = block_on(numbers::answer_async(&Sums, &request));
            request.reply(reply);
        }
    });
    block_on(methods::check_async(
        block_on(connect(&net, address)),
        |error| matches!(error, ClientError::NotSent),
    ));
    stop.stop();
    serving.join().unwrap();
}

#[test]
fn payloads_above_a_message_are_one_future() {
    let net = Net::new();
    let server = block_on(start(&net, &any_port()));
    let (address, stop) = (server.local_addr(), server.stop_handle());
    let serving = thread::spawn(move || {
        let mut parts = Reassembler::new(server.stop_handle(), 4 << 20, 8 << 20);
        while let Some(request) = block_on(server.recv()).unwrap() {
            let reply = match parts.receive(request.data()) {
                Err(reply) => reply,
                Ok((whole, bytes)) => {
                    parts.reply(whole, block_on(numbers::answer_async(&Sums, &bytes)))
                }
            };
            request.reply(reply);
        }
        assert_eq!(parts.held(), 0);
    });
    let client = block_on(connect(&net, address));
    let (max_request, max_reply) = (client.max_request(), client.max_reply());
    block_on(methods::check_async_in_parts(
        client,
        max_request,
        max_reply,
    ));
    stop.stop();
    serving.join().unwrap();
}
