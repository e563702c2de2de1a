//! A server whose requests are futures is the same over every transport.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::{Duration, Instant};
use std::{future, thread};

use copyrpc_calls::methods::{Context, Request};
use copyrpc_calls::parts::{self, Reassembler};
use copyrpc_calls::{
    AsyncClient, AsyncServer, Bind, Client, ClientError, Connection, Dial, ErrorOf, Server,
};
use copyrpc_testing::executor::{Begun, block_on};
use copyrpc_testing::helpers::{Scratch, wait_for};
use copyrpc_testing::limits::{SharedCore, any_port, watchdog};
use ipc::Dir;
use tower::{ServiceBuilder, ServiceExt};

const LONG: Duration = Duration::from_secs(60);

/// The serving end of a transport.
trait Served: Bind<String, Error: std::fmt::Debug> + 'static {}

impl<S: Bind<String, Error: std::fmt::Debug> + 'static> Served for S {}

/// The calling end of a transport.
trait Calling:
    Dial<String, Error: std::fmt::Debug, Request = [u8], Reply = Vec<u8>>
    + Connection<ConnectError: Send>
    + 'static
{
}

impl<C> Calling for C where
    C: Dial<String, Error: std::fmt::Debug, Request = [u8], Reply = Vec<u8>>
        + Connection<ConnectError: Send>
        + 'static
{
}

/// Both ends of calls over a transport.
struct Ends<S: Bind<String>, C: Dial<String>> {
    address: String,
    server: S::Options,
    client: C::Options,
}

impl<S: Served, C: Calling> Ends<S, C> {
    fn server_at(&self, address: &str) -> AsyncServer<S> {
        let address = address.to_owned();
        block_on(AsyncServer::with_options(address, &self.server)).unwrap()
    }

    fn client_of(&self, server: &AsyncServer<S>) -> AsyncClient<C> {
        let address = server.local_addr().to_string();
        block_on(AsyncClient::with_options(address, &self.client)).unwrap()
    }

    fn pair(&self) -> (AsyncServer<S>, AsyncClient<C>) {
        let server = self.server_at(&self.address);
        let client = self.client_of(&server);
        (server, client)
    }
}

fn requests_are_answered_in_any_way_and_a_server_that_goes_keeps_only_those_it_gave_out<S, C>(
    ends: &Ends<S, C>,
) where
    S: Served,
    C: Calling,
{
    watchdog(2 * LONG);
    let (first, client) = ends.pair();
    let address = first.local_addr().to_string();
    let call = |bytes: &[u8]| Begun::new(client.call_within(bytes, LONG));
    let receive = |server: &AsyncServer<S>| block_on(server.recv()).unwrap().unwrap();

    // The answers are not in the order of the requests.
    let calls = [call(b"a"), call(b"bc")];
    let requests = [receive(&first), receive(&first)];
    for request in requests.into_iter().rev() {
        assert!(request.is_wanted());
        let reply = request.data().repeat(2);
        request.reply(reply);
    }
    assert_eq!(calls.map(|call| call.end().unwrap()), [&b"aa"[..], b"bcbc"]);
    wait_for("the client is counted", || first.clients() == 1);

    let refused = call(b"no");
    receive(&first).refuse();
    assert!(matches!(refused.end(), Err(ClientError::Refused)));
    let dropped = call(b"?");
    drop(receive(&first));
    assert!(matches!(dropped.end(), Err(ClientError::Dropped)));
    let long = call(b"long");
    receive(&first).reply(vec![0; client.max_reply() + 1]);
    assert!(matches!(long.end(), Err(ClientError::ReplyTooLong { .. })));
    let unwanted = call(b"late");
    let request = receive(&first);
    let deadline = Instant::now() + Duration::from_millis(5);
    let handled = block_on(request.while_wanted(Some(deadline), future::pending::<()>()));
    assert!(handled.is_none() && Instant::now() >= deadline);
    drop(request);
    assert!(matches!(unwanted.end(), Err(ClientError::Dropped)));

    let kept = call(b"kept");
    let request = receive(&first);
    let other = call(b"other");
    let drained = Begun::new(first.drain(LONG));
    assert!(block_on(first.recv()).unwrap().is_none());
    request.reply(*b"done");
    assert_eq!(kept.end().unwrap(), b"done");
    assert_eq!(drained.end(), 0);
    drop(first);
    let second = ends.server_at(&address);
    let request = receive(&second);
    assert_eq!(request.data(), b"other");
    request.reply(*b"second");
    assert_eq!(other.end().unwrap(), b"second");
    // A drop of the server answers the requests that tasks still have.
    let dropped = call(b"!");
    let request = receive(&second);
    drop(second);
    assert!(matches!(dropped.end(), Err(ClientError::Dropped)));
    request.reply(*b"too late");
}

/// A server and a client with one call at a time, and a call after the server has stopped.
fn one_source_serves_and_calls_over_every_transport<S, C>(ends: &Ends<S, C>)
where
    S: Served,
    for<'a> S::Request<'a>: Request,
    C: Calling,
{
    watchdog(2 * LONG);
    let (address, options) = (ends.address.clone(), ends.server.clone());
    let (tell, told) = mpsc::channel();
    let server = thread::spawn(move || {
        let mut server = Server::<S>::with_options(address, &options)?;
        let address = server.local_addr().unwrap().to_string();
        tell.send((address, server.stop_handle())).unwrap();
        server.serve(|request| request.data().repeat(2))
    });
    let (address, stop) = told.recv_timeout(LONG).unwrap();
    let mut client = Client::<C>::with_options(address, &ends.client).unwrap();
    assert_eq!(client.call_within(b"ab", LONG).unwrap(), b"abab");
    stop.stop();
    server.join().unwrap().unwrap();
    assert!(
        client
            .call_within(b"ab", Duration::from_millis(50))
            .unwrap_err()
            .is_retryable()
    );
}

/// The server is stopped when the handler of a call in parts has run.
fn a_server_that_stops_lets_its_client_fetch_a_long_reply<S, C>(ends: &Ends<S, C>)
where
    S: Served,
    C: Calling,
{
    let (server, client) = ends.pair();
    let client = parts::Client::new(client, 4056, 4056);
    let called = thread::spawn(move || block_on(client.call_async_with(b"get", None, |_| ())));
    let mut parts = Reassembler::new(server.stop_handle(), 1 << 20, 2 << 20);
    while let Some(request) = block_on(server.recv()).unwrap() {
        let reply = parts.answer(request.data(), |_| {
            server.stop_handle().stop();
            vec![7; 1 << 20]
        });
        request.reply(reply);
    }
    assert_eq!(block_on(server.drain(LONG)), 0);
    assert!(called.join().unwrap().unwrap() == vec![7; 1 << 20]);
}

/// Disconnects a client while it fetches a long reply; another client stays connected. The server
/// stops before the time is over that clients have to fetch their replies.
fn a_server_that_stops_waits_for_no_client_that_has_left<S, C>(ends: &Ends<S, C>)
where
    S: Served,
    C: Calling,
{
    watchdog(2 * LONG);
    let (server, leaving) = ends.pair();
    let staying = ends.client_of(&server);
    let client = parts::Client::new(leaving, 4056, 4056);
    let call = Begun::new(client.call_async_with(b"get", None, |_| ()));
    let mut parts = Reassembler::new(server.stop_handle(), 1 << 20, 2 << 20);
    let request = block_on(server.recv()).unwrap().unwrap();
    let reply = parts.answer(&request, |_| vec![7; 1 << 20]);
    request.reply(reply);
    server.stop_handle().stop();
    drop(call);
    drop(client);
    assert!(block_on(server.recv()).unwrap().is_none());
    drop(staying);
}

/// The layers of the crate `tower` at both ends: the server runs one handler at a time, each for
/// `work`. A client with a concurrency limit waits, and a client with a short timeout gives up.
fn layers_of_tower_work_at_both_ends<S, C>(ends: &Ends<S, C>)
where
    S: Served,
    C: Calling + Connection<ConnectError: Sync, EndReason: Sync>,
{
    let work = Duration::from_millis(20);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(async {
        let server = AsyncServer::<S>::with_options(ends.address.clone(), &ends.server);
        let server = server.await.unwrap();
        let address = server.local_addr().to_string();
        let stop = server.stop_handle();
        let running = Arc::new(AtomicUsize::new(0));
        let handler = tower::service_fn(move |request: Vec<u8>| {
            let running = Arc::clone(&running);
            async move {
                assert_eq!(running.fetch_add(1, Ordering::Relaxed), 0);
                tokio::time::sleep(work).await;
                running.fetch_sub(1, Ordering::Relaxed);
                if request.is_empty() {
                    Err("an empty request")
                } else {
                    Ok(request)
                }
            }
        });
        let handler = ServiceBuilder::new().concurrency_limit(1).service(handler);
        let spawn = |task| drop(tokio::spawn(task));
        let client = AsyncClient::<C>::with_options(address, &ends.client);
        let client = client.await.unwrap();
        let calls = async move {
            let limited = ServiceBuilder::new()
                .concurrency_limit(2)
                .timeout(LONG)
                .service(client.clone());
            let calls = (0..6_u8).map(|number| limited.clone().oneshot(vec![number]));
            for (number, call) in (0..).zip(calls.map(tokio::task::spawn_local).collect::<Vec<_>>())
            {
                assert_eq!(call.await.unwrap().unwrap(), [number]);
            }
            let refused = limited.oneshot(Vec::new()).await.unwrap_err();
            let refused = refused.downcast::<ErrorOf<C>>().unwrap();
            assert!(matches!(*refused, ClientError::Refused));
            let hasty = ServiceBuilder::new()
                .timeout(work / 10)
                .service(client)
                .oneshot(vec![1])
                .await;
            assert!(hasty.unwrap_err().is::<tower::timeout::error::Elapsed>());
            stop.stop();
        };
        let both = async {
            let calls = tokio::task::spawn_local(calls);
            server.serve_by(handler, spawn).await.unwrap();
            calls.await.unwrap();
        };
        tokio::task::LocalSet::new().run_until(both).await;
    });
}

/// A handler is informed when the future of its call is dropped, or when the time of its call is
/// over, and the end of the handler frees the room of the call. The test makes more of these calls
/// than a client of any transport has room for.
fn a_call_that_is_given_up_ends_its_handler<S, C>(ends: &Ends<S, C>)
where
    S: Served,
    C: Calling,
{
    watchdog(2 * LONG);
    let (server, client) = ends.pair();
    let receive = || block_on(server.recv()).unwrap().unwrap();
    let kept = Begun::new(client.call_within(*b"kept", LONG));
    let kept_request = receive();
    for round in 0..70 {
        let limit = if round % 20 == 0 {
            Duration::from_millis(300)
        } else {
            LONG
        };
        let given_up = Begun::new(client.call_within(*b"given up", limit));
        let request = receive();
        if limit < LONG {
            assert!(matches!(given_up.end(), Err(ClientError::TimedOut)));
        } else {
            drop(given_up);
        }
        assert!(block_on(request.while_wanted(None, future::pending::<()>())).is_none());
        assert!(!request.is_wanted());
        if round % 2 == 0 {
            request.reply(*b"to nobody");
        }
    }
    assert!(kept_request.is_wanted());
    kept_request.reply(*b"done");
    assert_eq!(kept.end().unwrap(), b"done");
    // A call that was given up before a task received its request reaches no task.
    drop(Begun::new(client.call_within(*b"unreceived", LONG)));
    let next = Begun::new(client.call_within(*b"next", LONG));
    wait_for("the request is dropped", || {
        let request = receive();
        let is_next = request.data() == b"next";
        if is_next {
            request.reply(*b"");
        }
        is_next
    });
    next.end().unwrap();
}

/// The handler of one request waits when the server ends, that of the other one begins later.
fn a_handler_is_dropped_when_its_server_has_ended<S, C>(ends: &Ends<S, C>)
where
    S: Served,
    C: Calling,
{
    watchdog(2 * LONG);
    let (server, client) = ends.pair();
    let calls = [(), ()].map(|()| Begun::new(client.call_within(*b"poll", LONG)));
    let [waits, begins] = [(), ()].map(|()| block_on(server.recv()).unwrap().unwrap());
    let (tell, told) = mpsc::channel();
    let handler = future::poll_fn(move |_| {
        tell.send(()).unwrap();
        Poll::<()>::Pending
    });
    thread::scope(|scope| {
        let waiting = scope.spawn(|| block_on(waits.while_wanted(None, handler)));
        told.recv_timeout(LONG).unwrap();
        assert_eq!(block_on(server.drain(Duration::ZERO)), 2);
        assert!(waiting.join().unwrap().is_none());
    });
    for call in calls {
        assert!(matches!(call.end(), Err(ClientError::Dropped)));
    }
    assert!(!waits.is_wanted() && !begins.is_wanted());
    assert!(block_on(begins.while_wanted(None, future::pending::<()>())).is_none());
}

/// Leaves the thread on one core, so a test calls this last. Each yield of a thread takes a time
/// slice on a core that another thread needs. The thread of a server that first polls and yields
/// 1,024 times, as scalerpc's would, notices after half a second and more that a call is given up.
fn a_server_whose_core_others_need_notices_at_once_that_a_call_is_given_up<S, C>(ends: &Ends<S, C>)
where
    S: Served,
    C: Calling,
{
    watchdog(2 * LONG);
    let _shared = SharedCore::enter();
    let (server, client) = ends.pair();
    let times = [(); 3].map(|()| {
        let given_up = Begun::new(client.call_within(*b"given up", Duration::from_millis(5)));
        let request = block_on(server.recv()).unwrap().unwrap();
        let start = Instant::now();
        let handled = block_on(request.while_wanted(None, future::pending::<()>()));
        let time = start.elapsed();
        assert!(handled.is_none());
        drop(request);
        assert!(given_up.end().is_err());
        time
    });
    // Other tests may delay one of them.
    assert!(
        times.iter().any(|time| *time < Duration::from_millis(250)),
        "{times:?}"
    );
}

copyrpc_calls::service! {
    mod calls {
        fn describe(&context, name: String) -> Result<(u64, Option<SocketAddr>, Option<Duration>), ()> = 1;
        fn wait(&context) -> Result<(), ()> = 2;
    }
}

/// A service whose method returns a description of its call, or waits until its caller gives up.
/// The flag shows whether a method waits.
#[derive(Default)]
struct Described(AtomicBool);

impl calls::AsyncService for Described {
    async fn describe(
        &self,
        context: Context<'_>,
        name: String,
    ) -> Result<(u64, Option<SocketAddr>, Option<Duration>), ()> {
        assert!(name == "a name" && context.is_wanted());
        let left = context.deadline().map(|deadline| deadline - Instant::now());
        Ok((context.client().ok_or(())?, context.address(), left))
    }

    async fn wait(&self, context: Context<'_>) -> Result<(), ()> {
        self.0.store(true, Ordering::Relaxed);
        wait_for("the caller is gone", || !context.is_wanted());
        Ok(())
    }
}

/// Each method gets the number and the address of its client, its deadline, and the news that its
/// caller gave up.
fn a_method_knows_its_call<S, C>(ends: &Ends<S, C>, has_address: bool)
where
    S: Served,
    C: Calling,
{
    watchdog(2 * LONG);
    let server = ends.server_at(&ends.address);
    let [mut first, second] = [(); 2].map(|()| calls::AsyncClient::new(ends.client_of(&server)));
    let service = Described::default();
    let answer = || {
        let request = block_on(server.recv()).unwrap().unwrap();
        let reply = block_on(calls::answer_async(&service, &request));
        request.reply(reply);
    };
    let describe = |client: &calls::AsyncClient<_>| {
        let call = Begun::new(client.describe("a name".to_owned()));
        answer();
        call.end().unwrap()
    };
    let (number, address, _) = describe(&first);
    assert_eq!(address.is_some(), has_address);
    let (same, same_address, _) = describe(&first);
    assert_eq!((same, same_address), (number, address));
    let (other, other_address, _) = describe(&second);
    assert_ne!(other, number);
    assert!(!has_address || other_address != address);
    first.timeout = Some(LONG);
    let left = describe(&first).2.unwrap();
    assert!(left > LONG / 2 && left <= LONG, "{left:?}");
    let given_up = Begun::new(second.wait());
    thread::scope(|scope| {
        let answering = scope.spawn(answer);
        wait_for("the method waits", || service.0.load(Ordering::Relaxed));
        drop(given_up);
        answering.join().unwrap();
    });
}

/// A client has more long polls at the server than its connection has room for, and then makes the
/// call that ends all of them. The server is informed of a poll that is given up, over any
/// connection.
fn long_polls_do_not_keep_back_the_call_that_ends_them<S, C>(ends: &Ends<S, C>)
where
    S: Served,
    C: Calling,
{
    const POLLS: usize = 64;
    watchdog(2 * LONG);
    let (server, client) = ends.pair();
    let call = |request: &[u8]| Begun::new(client.call_within(request, LONG));
    let mut polls: Vec<_> = (0..POLLS).map(|_| call(b"wait")).collect();
    let held: Vec<_> = (0..POLLS)
        .map(|_| block_on(server.recv()).unwrap().unwrap())
        .collect();
    let given_up = [polls.pop().unwrap(), polls.remove(0)];
    drop(given_up);
    wait_for("two are not wanted", || {
        held.iter().filter(|request| !request.is_wanted()).count() == 2
    });
    let publish = call(b"publish");
    let request = block_on(server.recv()).unwrap().unwrap();
    assert_eq!(request.data(), b"publish");
    held.into_iter().for_each(|request| request.reply(*b"news"));
    request.reply(*b"");
    publish.end().unwrap();
    for poll in polls {
        assert_eq!(poll.end().unwrap(), b"news");
    }
}

fn test_all<S, C>(ends: &Ends<S, C>, has_address: bool)
where
    S: Served,
    for<'a> S::Request<'a>: Request,
    C: Calling + Connection<ConnectError: Sync, EndReason: Sync>,
{
    one_source_serves_and_calls_over_every_transport(ends);
    requests_are_answered_in_any_way_and_a_server_that_goes_keeps_only_those_it_gave_out(ends);
    a_server_that_stops_lets_its_client_fetch_a_long_reply(ends);
    a_server_that_stops_waits_for_no_client_that_has_left(ends);
    layers_of_tower_work_at_both_ends(ends);
    a_call_that_is_given_up_ends_its_handler(ends);
    a_handler_is_dropped_when_its_server_has_ended(ends);
    long_polls_do_not_keep_back_the_call_that_ends_them(ends);
    a_method_knows_its_call(ends, has_address);
    a_server_whose_core_others_need_notices_at_once_that_a_call_is_given_up(ends);
}

#[test]
fn of_copyrpc() {
    let ends = Ends::<copyrpc::Host, copyrpc::Caller> {
        address: any_port(),
        server: copyrpc::ServerOptions {
            stop_timeout: 10 * LONG,
            ..copyrpc::ServerOptions::default()
        },
        client: copyrpc::ClientOptions {
            connect_timeout: LONG,
            ..copyrpc::ClientOptions::default()
        },
    };
    test_all(&ends, true);
}

#[test]
fn of_scalerpc() {
    let ends = Ends::<scalerpc::Host, scalerpc::Caller> {
        address: any_port(),
        server: scalerpc::ServerOptions {
            stop_timeout: 10 * LONG,
            ..scalerpc::ServerOptions::default()
        },
        client: scalerpc::ClientOptions {
            connect_timeout: LONG,
            connections: 9,
            ..scalerpc::ClientOptions::default()
        },
    };
    test_all(&ends, true);
}

#[test]
fn of_ipc() {
    let scratch = Scratch::new("async-server");
    let dir = Dir::open(Some(scratch.path())).unwrap();
    let ends = Ends::<ipc::bytes::Host, ipc::bytes::Caller> {
        address: "s".to_owned(),
        server: ipc::bytes::ServerOptions {
            dir: Some(dir.clone()),
            stop_timeout: 10 * LONG,
            ..ipc::bytes::ServerOptions::default()
        },
        client: ipc::ClientOptions {
            dir: Some(dir),
            connect_timeout: LONG,
            ..ipc::ClientOptions::default()
        },
    };
    test_all(&ends, false);
}
