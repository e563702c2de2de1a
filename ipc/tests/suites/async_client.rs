//! Clients whose calls are futures: from many threads, late, given up, and without a server.

use std::fs;
use std::sync::mpsc;
use std::task::Waker;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use copyrpc_testing::executor::{Begun, block_on};
use copyrpc_testing::helpers::{Scratch, alone, wait_for};
use copyrpc_testing::limits::watchdog;
use copyrpc_testing::methods::{self, Sums, numbers};
use ipc::bytes::{AsyncClient, MessageBytes, Server, ServerOptions};
use ipc::parts::Reassembler;
use ipc::{ClientError, ClientOptions, Dir, Misfit, SetupError, StopHandle, Token};

const LONG: Duration = Duration::from_secs(60);
const DEPTH: usize = 4;

/// All types can be sent to other threads.
const _: () = {
    const fn is_portable<T: Send + Sync + 'static>() {}
    const fn is_sent<T: Send + 'static>() {}
    is_portable::<AsyncClient>();
    is_portable::<ipc::AsyncClient<ipc::Client<u64, u64, u64>>>();
    is_sent::<ipc::AsyncCall<ipc::bytes::Client<u64>>>();
};

/// A server in a thread of its own.
struct Running {
    stop: StopHandle,
    thread: JoinHandle<()>,
}

impl Running {
    fn start(dir: &Dir, reply: impl FnMut(&[u8]) -> Vec<u8> + Send + 'static) -> Self {
        let (dir, (tell, told)) = (dir.clone(), mpsc::channel());
        let thread = thread::spawn(move || {
            let mut server = Server::with_options(
                "s",
                &ServerOptions {
                    dir: Some(dir.clone()),
                    max_clients: 4,
                    depth: DEPTH,
                    message_bytes: MessageBytes {
                        request: 4096,
                        response: 4096,
                    },
                    type_tag: 0,
                    ..ServerOptions::default()
                },
            )
            .unwrap();
            tell.send(server.stop_handle()).unwrap();
            server.serve(reply).unwrap();
        });
        Self {
            stop: told.recv().unwrap(),
            thread,
        }
    }

    fn end(self) {
        self.stop.stop();
        self.thread.join().unwrap();
    }
}

fn connect_within(dir: &Dir, timeout: Duration) -> Result<AsyncClient, SetupError> {
    let options = ClientOptions {
        dir: Some(dir.clone()),
        connect_timeout: timeout,
        ..ClientOptions::default()
    };
    block_on(AsyncClient::with_options("s", &options))
}

fn connect(dir: &Dir) -> AsyncClient {
    connect_within(dir, LONG).unwrap()
}

#[test]
fn many_threads_share_a_client_and_get_each_their_own_replies() {
    watchdog(LONG);
    let scratch = Scratch::new("async-many");
    let server = Running::start(&scratch.dir(), <[u8]>::to_ascii_uppercase);
    let client = connect(&scratch.dir());
    assert_eq!((client.max_request(), client.max_reply()), (4096, 4096));
    thread::scope(|scope| {
        for thread in 0..3_u8 {
            let client = client.clone();
            scope.spawn(move || {
                for round in 0..200 {
                    // More calls than the depth, with short and long requests.
                    let requests: Vec<_> = (0..2 * DEPTH)
                        .map(|call| vec![b'a' + thread + call as u8; 1 + 9 * call + round])
                        .collect();
                    let calls: Vec<_> = requests
                        .iter()
                        .map(|request| Begun::new(client.call(&request[..])))
                        .collect();
                    for (call, request) in calls.into_iter().zip(requests).rev() {
                        assert_eq!(call.end().unwrap(), request.to_ascii_uppercase());
                    }
                }
            });
        }
    });
    assert_eq!(
        block_on(client.call(vec![0; 4097])),
        Err(ClientError::TooLarge {
            len: 4097,
            max: 4096
        })
    );
    server.end();
}

/// Returns `count` or more requests, unanswered.
fn take(server: &mut Server, count: usize) -> Vec<(Token, Vec<u8>)> {
    let mut taken = Vec::new();
    wait_for("requests do not come", || {
        server.poll();
        while let Some((token, request)) = server.recv() {
            taken.push((token, request.to_vec()));
        }
        taken.len() >= count
    });
    taken
}

#[test]
fn a_dropped_call_gives_its_slot_back_with_its_late_reply_and_a_waiting_one_is_sent_never() {
    watchdog(LONG);
    let scratch = Scratch::new("async-drop");
    let max = MessageBytes {
        request: 64,
        response: 64,
    };
    let mut server = Server::with_options(
        "s",
        &ServerOptions {
            dir: Some(scratch.dir()),
            max_clients: 1,
            depth: DEPTH,
            message_bytes: max,
            type_tag: 0,
            ..ServerOptions::default()
        },
    )
    .unwrap();
    let client = connect(&scratch.dir());
    for round in 0..3_u8 {
        let calls: Vec<_> = (0..2 * DEPTH as u8)
            .map(|call| Begun::new(client.call([round, call].to_vec())))
            .collect();
        let taken = take(&mut server, DEPTH);
        // A call whose timeout is 0, and a call whose timeout passes while it waits for a slot.
        for timeout in [Duration::ZERO, Duration::from_millis(5)] {
            assert_eq!(
                block_on(client.call_within(b"late", timeout)),
                Err(ClientError::NotSent)
            );
        }
        drop(calls);
        let next = Begun::new(client.call(b"next"));
        taken
            .into_iter()
            .for_each(|(token, _)| server.reply(token, b"for nobody").unwrap());
        let [(token, request)] = <[_; 1]>::try_from(take(&mut server, 1)).ok().unwrap();
        assert_eq!(
            request, b"next",
            "the others were given up before they were sent"
        );
        server.reply(token, b"reply").unwrap();
        assert_eq!(next.end().unwrap(), b"reply");
    }
    let call = Begun::new(client.call_within(b"slow", Duration::from_millis(50)));
    let _slow = take(&mut server, 1);
    assert_eq!(call.end(), Err(ClientError::TimedOut));
}

#[test]
fn calls_go_on_at_the_next_server_and_those_that_no_handler_got_are_made_again_there() {
    watchdog(LONG);
    let scratch = Scratch::new("async-next");
    let max = MessageBytes {
        request: 64,
        response: 64,
    };
    let mut server = Server::with_options(
        "s",
        &ServerOptions {
            dir: Some(scratch.dir()),
            max_clients: 1,
            depth: DEPTH,
            message_bytes: max,
            type_tag: 0,
            ..ServerOptions::default()
        },
    )
    .unwrap();
    let client = connect(&scratch.dir());
    let call = Begun::new(client.call(b"for the next"));
    wait_for("the call is not sent", || server.poll() > 0);
    drop(server);
    let next = Running::start(&scratch.dir(), <[u8]>::to_ascii_uppercase);
    assert_eq!(call.end().unwrap(), b"FOR THE NEXT");
    assert_eq!(client.max_request(), 4096);
    next.end();
    // The client's thread detects the end of a server both without a call and by a call.
    let call = Begun::new(client.call(b"and the third"));
    let third = Running::start(&scratch.dir(), <[u8]>::to_ascii_lowercase);
    assert_eq!(call.end().unwrap(), b"and the third");
    third.end();
    let once = connect_within(&scratch.dir(), Duration::ZERO);
    assert!(matches!(once, Err(SetupError::Region(_))), "{once:?}");
    assert_eq!(
        block_on(client.call_within(b"none", Duration::from_millis(5))),
        Err(ClientError::NotSent)
    );
}

#[test]
fn a_client_that_tries_once_says_that_there_is_no_server() {
    watchdog(LONG);
    let scratch = Scratch::new("async-none");
    let server = Running::start(&scratch.dir(), <[u8]>::to_vec);
    let client = connect_within(&scratch.dir(), Duration::ZERO).unwrap();
    assert_eq!(block_on(client.call(b"a")).unwrap(), b"a");
    server.end();
    let end = block_on(client.call(b"b")).unwrap_err();
    assert!(matches!(end, ClientError::Connect(Misfit::Absent)));
    assert!(end.is_retryable() && !end.may_have_executed());
    let server = Running::start(&scratch.dir(), <[u8]>::to_vec);
    assert_eq!(block_on(client.call(b"c")).unwrap(), b"c");
    server.end();
}

/// Returns the number of times that the client thread of this process gave up its core.
fn switches() -> u64 {
    let of_task = |task: fs::DirEntry| {
        let is_client = fs::read_to_string(task.path().join("comm"))
            .is_ok_and(|name| name.trim() == "ipc-client");
        let status = is_client.then(|| fs::read_to_string(task.path().join("status")).unwrap())?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))
            .map(|count| count.trim().parse::<u64>().unwrap())
    };
    fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| of_task(task.unwrap()))
        .sum()
}

/// The test runs in a process of its own, because it counts switches of client threads, which other
/// tests have too.
#[test]
fn the_thread_sleeps_while_there_is_nothing_to_do() {
    let name = "async_client::the_thread_sleeps_while_there_is_nothing_to_do";
    alone(name, 1, idle);
}

fn idle() {
    let scratch = Scratch::new("async-idle");
    let server = Running::start(&scratch.dir(), <[u8]>::to_vec);
    let client = connect(&scratch.dir());
    let sleeps = |what: &str| {
        let mut before = switches();
        wait_for(what, || {
            thread::sleep(Duration::from_millis(120));
            std::mem::replace(&mut before, switches()) == before
        });
    };
    for _ in 0..2 {
        assert_eq!(block_on(client.call(b"a")).unwrap(), b"a");
        sleeps("the thread goes on while there is nothing to do");
    }
    server.end();
    sleeps("the thread goes on without a server");
    drop(client);
    assert_eq!(switches(), 0, "the drop waits for the thread");
}

#[test]
fn the_sleeping_thread_is_woken_by_each_call() {
    watchdog(LONG);
    let scratch = Scratch::new("async-wake");
    let server = Running::start(&scratch.dir(), <[u8]>::to_vec);
    let client = connect(&scratch.dir());
    // Each call begins at about the time at which the thread falls asleep. A call that does not
    // wake the thread hangs.
    for round in 0..3_000 {
        (0..round % 40).for_each(|_| thread::yield_now());
        assert_eq!(block_on(client.call(b"a")).unwrap(), b"a");
    }
    server.end();
}

/// Runs a server, and `calls` with a client of it.
fn with_server(
    name: &str,
    reply: impl FnMut(&[u8]) -> Vec<u8> + Send + 'static,
    calls: impl AsyncFnOnce(AsyncClient),
) {
    watchdog(LONG);
    let scratch = Scratch::new(name);
    let server = Running::start(&scratch.dir(), reply);
    block_on(calls(connect(&scratch.dir())));
    server.end();
}

#[test]
fn methods_end_with_their_result_or_their_own_error_and_those_of_another_version_have_ends_of_their_own()
 {
    let reply = |request: &[u8]| numbers::answer(&mut Sums, request);
    with_server("async-methods", reply, async |client| {
        methods::check_async(client, |error| *error == ClientError::NotSent).await
    });
}

#[test]
fn payloads_above_a_message_are_one_call() {
    let stop = StopHandle::new(Waker::noop().clone(), Duration::ZERO);
    let mut parts = Reassembler::new(stop, 4 << 20, 8 << 20);
    let reply = move |part: &[u8]| parts.answer(part, |whole| numbers::answer(&mut Sums, &whole));
    with_server("async-parts", reply, async |client| {
        methods::check_async_in_parts(client, 4096, 4096).await
    });
}

#[test]
fn a_client_of_values_has_futures_too() {
    watchdog(LONG);
    let name = format!("async-values-{}", std::process::id());
    let mut server = ipc::Server::<u64, u64>::bind(&name).unwrap();
    let stop = server.stop_handle();
    let serving = thread::spawn(move || server.serve(|number| number * number));
    let client = block_on(ipc::AsyncClient::<ipc::Client<u64, u64, u64>>::connect(
        name,
    ))
    .unwrap();
    let calls: Vec<_> = (0..100_u64)
        .map(|number| Begun::new(client.call(number)))
        .collect();
    for (number, call) in (0..).zip(calls) {
        assert_eq!(call.end(), Ok(number * number));
    }
    stop.stop();
    serving.join().unwrap();
}
