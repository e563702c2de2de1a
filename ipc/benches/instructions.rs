//! The program whose instructions `scripts/instructions` counts: a server and its clients in one
//! thread, requests and replies of 32 bytes.
//!
//! Bounds are about 2 % above the number that was counted.
#![allow(missing_docs, clippy::unwrap_used, reason = "a program for measuring")]

mod pair;

use std::borrow::Cow;
use std::convert::Infallible;
use std::hint::black_box;
use std::pin::pin;
use std::process::ExitCode;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use benchkv_harness::counted::{self, Operation};
use copyrpc_calls::futures::Worker;
use copyrpc_calls::{Connection, Ended, ErrorOf, Facts, GoesOn, Refusal, SessionEnd};
use ipc::methods::Caller;
use ipc::{ClientError, Dir, ReadyWords, service};
use pair::{DEPTH, WITHOUT_LOOKS, parts};

type Pair = pair::Pair<ReadyWords>;

/// Numbers of calls that are counted: many laps of every lane, and multiples of the depth.
const COUNTS: (u64, u64) = (4096, 20_480);

const fn operation(
    name: &'static str,
    bound: u32,
    collect: &'static str,
    what: &'static str,
    run: fn(u64),
) -> Operation {
    Operation {
        name,
        bound: Some(bound),
        counts: COUNTS,
        collect,
        what,
        run,
    }
}

const OPERATIONS: &[Operation] = &[
    operation(
        "ipc_rpc_depth1",
        322,
        WITHOUT_LOOKS,
        "ipc: one call and its reply, both sides, one at a time",
        |calls| Pair::new(1).calls(calls, 1),
    ),
    operation(
        "ipc_rpc_depth32",
        213,
        WITHOUT_LOOKS,
        "ipc: the same, 32 at a time",
        |calls| Pair::new(1).calls(calls, DEPTH),
    ),
    operation(
        "ipc_serve_depth1",
        240,
        WITHOUT_LOOKS,
        "ipc: as ipc_rpc_depth1, answered by Server::step",
        |calls| Pair::new(1).served(calls, 1),
    ),
    operation(
        "ipc_serve_depth32",
        157,
        WITHOUT_LOOKS,
        "ipc: as ipc_rpc_depth32, answered by Server::step",
        |calls| {
            Pair::new(1).served(calls, DEPTH);
        },
    ),
    operation(
        "ipc_rpc_depth1_of_1024",
        322,
        WITHOUT_LOOKS,
        "ipc: as ipc_rpc_depth1, among 1,023 idle clients",
        |calls| {
            Pair::new(1024).calls(calls, 1);
        },
    ),
    operation(
        "ipc_call",
        53,
        "in part_call",
        "ipc, of ipc_rpc_depth1: Client::call",
        parts::<ReadyWords>,
    ),
    operation(
        "ipc_server_poll",
        106,
        "in part_server_poll",
        "ipc, of ipc_rpc_depth1: Server::poll that finds a request",
        parts::<ReadyWords>,
    ),
    operation(
        "ipc_recv",
        77,
        "in part_recv",
        "ipc, of ipc_rpc_depth1: Server::recv",
        parts::<ReadyWords>,
    ),
    operation(
        "ipc_reply",
        53,
        "in part_reply",
        "ipc, of ipc_rpc_depth1: Server::reply",
        parts::<ReadyWords>,
    ),
    operation(
        "ipc_client_poll",
        82,
        "in part_client_poll",
        "ipc, of ipc_rpc_depth1: Client::poll that finds a reply",
        parts::<ReadyWords>,
    ),
    operation(
        "ipc_client_poll_empty",
        58,
        WITHOUT_LOOKS,
        "ipc: Client::poll that finds nothing, a call in flight",
        |polls| {
            let mut pair = Pair::new(1);
            pair.client.call([1; 4], 0).unwrap();
            (0..polls).for_each(|_| assert_eq!(pair.client.poll(|_, _| ()), Ok(0)));
        },
    ),
    operation(
        "ipc_server_poll_empty",
        31,
        WITHOUT_LOOKS,
        "ipc: Server::poll that finds nothing, one client",
        |polls| Pair::new(1).empty_polls(polls),
    ),
    operation(
        "ipc_server_poll_empty_of_1024",
        31,
        WITHOUT_LOOKS,
        "ipc: the same with 1,024 clients",
        |polls| Pair::new(1024).empty_polls(polls),
    ),
    operation(
        "ipc_bytes_call",
        880,
        WITHOUT_LOOKS,
        "ipc: one call of 24 bytes and its reply of 9, both sides, as Vec",
        |calls| {
            let mut ends = Ends::new();
            (0..calls)
                .for_each(|_| assert_eq!(ends.call(black_box(&[7; 24]), None).unwrap().len(), 9));
        },
    ),
    operation(
        "ipc_service_call",
        990,
        WITHOUT_LOOKS,
        "ipc: the same, as a method of two numbers that returns one",
        |calls| {
            let mut client = sums::Client::new(Ends::new());
            (0..calls).for_each(|number| {
                assert_eq!(client.sum(black_box(number), 1).unwrap(), number + 1)
            });
        },
    ),
    operation(
        "futures_call",
        2040,
        "all",
        "ipc, copyrpc, scalerpc: what a call as a future adds to that of its connection, thread included",
        |calls| {
            let (mut worker, handle) = Worker::new(Echo::default());
            let mut task = Context::from_waker(Waker::noop());
            for _ in 0..calls {
                let mut call = pin!(handle.call(black_box(vec![7; 24])));
                assert!(call.as_mut().poll(&mut task).is_pending());
                assert_eq!((worker.turn(), worker.turn()), (Some(true), Some(true)));
                assert!(
                    matches!(call.poll(&mut task), Poll::Ready(Ok(reply)) if reply.len() == 24)
                );
            }
        },
    ),
    looks(
        "ipc_looks_of_64",
        16_000,
        "ipc: eight of the server's looks for dead clients, 64 clients",
        |times| rest_and_look(Pair::new(64), times),
    ),
    looks(
        "ipc_looks_of_1024",
        20_000,
        "ipc: the same with 1,024 clients",
        |times| rest_and_look(Pair::new(1024), times),
    ),
];

service! {
    mod sums {
        fn sum(left: u64, right: u64) -> Result<u64, u32> = 1;
    }
}

struct Sums;

impl sums::Service for Sums {
    fn sum(&mut self, left: u64, right: u64) -> Result<u64, u32> {
        Ok(left + right)
    }
}

/// Both ends of a service, in one thread. A request that does not begin with the number of the
/// method is a raw call.
struct Ends(ipc::bytes::Client<()>, ipc::bytes::Server);

impl Ends {
    fn new() -> Self {
        let (dir, name) = (
            Dir::open(None).unwrap(),
            format!("instructions-service-{}", std::process::id()),
        );
        let max = ipc::bytes::MessageBytes {
            request: 48,
            response: 48,
        };
        let server = ipc::bytes::Server::with_options(
            &name,
            &ipc::bytes::ServerOptions {
                dir: Some(dir.clone()),
                max_clients: 1,
                depth: DEPTH,
                message_bytes: max,
                type_tag: 0,
                ..ipc::bytes::ServerOptions::default()
            },
        )
        .unwrap();
        Self(
            ipc::bytes::Client::connect_in(&dir, &name, 0).unwrap(),
            server,
        )
    }
}

impl Caller for Ends {
    type Error = ClientError;

    fn timeout(&self) -> Option<Duration> {
        None
    }

    fn call(&mut self, request: &[u8], _: Option<Duration>) -> Result<Cow<'_, [u8]>, ClientError> {
        self.0.call(request, ())?;
        self.1.step(|request| {
            if request[0] == 1 {
                sums::answer(&mut Sums, request)
            } else {
                request[..9].to_vec()
            }
        });
        let mut reply = Vec::new();
        self.0
            .poll(|(), outcome| reply = outcome.unwrap().to_vec())
            .unwrap();
        Ok(reply.into())
    }
}

/// A connection that answers each call in the poll after it, with its request.
#[derive(Default)]
struct Echo(Ended<Self>);

impl Connection for Echo {
    type Kind = ();
    type Request = [u8];
    type Reply = Vec<u8>;
    type Arrival<'a> = Vec<u8>;
    type ConnectError = Infallible;
    type EndReason = SessionEnd;
    type Call = ();
    type Stats = ();
    type Device = ();

    fn call(
        &mut self,
        number: u64,
        (): (),
        request: &[u8],
        _: Option<Duration>,
    ) -> Result<(), Refusal<ErrorOf<Self>>> {
        self.0.push((number, Ok(request.to_vec())));
        Ok(())
    }

    fn end_within(&mut self, (): (), _: Duration) {}

    fn flush(&mut self) {}

    fn poll(&mut self, mut on_end: impl FnMut(u64, Result<Vec<u8>, ErrorOf<Self>>)) -> bool {
        let moved = !self.0.is_empty();
        for (number, reply) in self.0.drain(..) {
            on_end(number, reply);
        }
        moved
    }

    fn late(&mut self) -> ErrorOf<Self> {
        ErrorOf::<Self>::NotSent
    }

    fn cancel(&mut self, (): ()) {}

    fn sleep(&mut self, _: Option<Duration>) {}

    fn waker(&self) -> Waker {
        Waker::noop().clone()
    }

    fn reconnect(&mut self, _: Duration, _: &mut GoesOn<'_, Self>) -> Result<(), ErrorOf<Self>> {
        Ok(())
    }

    fn has_ended(&mut self) -> bool {
        false
    }

    fn facts(&self) -> Facts<()> {
        Facts {
            connections: 1,
            connect_timeout: Duration::ZERO,
            timeout: None,
            max_request: 24,
            max_reply: 24,
            stats: (),
        }
    }

    fn device(&self) {}
}

/// Makes an operation that counts the searches of a server for dead clients, after a pause in which
/// at least eight searches became due, the maximum that a server catches up with at once.
const fn looks(name: &'static str, bound: u32, what: &'static str, run: fn(u64)) -> Operation {
    Operation {
        name,
        bound: Some(bound),
        counts: (2, 10),
        collect: "in reap_clients",
        what,
        run,
    }
}

/// Lets eight searches for dead clients become due, `times` times.
fn rest_and_look(mut pair: Pair, times: u64) {
    for _ in 0..times {
        std::thread::sleep(Duration::from_millis(10));
        pair.empty_polls(256);
    }
}

fn main() -> ExitCode {
    counted::main(OPERATIONS)
}
