//! A server and all its clients in one thread, by a seed and a clock that is set by hand.

use std::collections::BTreeMap;
use std::time::Duration;

use copyrpc_calls::{CallFailure, Tag as CallToken};
use copyrpc_shm::dir::Dir;

use copyrpc_testing::helpers::Scratch;
use copyrpc_testing::one_thread::{self, Run, Turn, World, files};

use crate::rpc::{Refused, Rpc};
use crate::start;

const CLIENTS: usize = 64;
const CALLS: u64 = 60;
const DEPTH: usize = 4;
/// The server has the number after the clients'.
const SERVER: usize = CLIENTS;

struct Caller<C> {
    client: C,
    made: u64,
    /// The unanswered calls, each with its deadline.
    deadlines: BTreeMap<u64, (u64, CallToken)>,
}

struct Peers<R: Rpc> {
    server: R::Server,
    callers: Vec<Caller<R::Client>>,
    /// The requests that the server answers later, by the time of the answer.
    held: BTreeMap<(u64, u64), R::Held>,
    /// Numbers of answers, rejections, timeouts, refusals, and calls given up.
    seen: [usize; 5],
    left: u64,
}

impl<R: Rpc> Peers<R> {
    fn call(&mut self, world: &mut World, number: usize) -> Turn {
        let caller = &mut self.callers[number];
        let mut ended = vec![];
        R::poll(&mut caller.client, |user_data, outcome| {
            ended.push((user_data, outcome))
        })
        .unwrap();
        let mut did = !ended.is_empty();
        for (call, outcome) in ended {
            let (deadline, _) = caller
                .deadlines
                .remove(&call)
                .expect("a call ended that had ended");
            self.left -= 1;
            let (kind, is_late) = match outcome {
                Ok(answer) => {
                    assert_eq!(answer, !call);
                    (0, false)
                }
                Err(CallFailure::Dropped) => (1, false),
                Err(CallFailure::TimedOut) => (2, true),
                Err(other) => panic!("{other}"),
            };
            // A call ends as timed out after its deadline and not before. An answered call may end
            // up to 2,500 ns after its deadline, because its answer may arrive in the same turn.
            assert!(if is_late {
                deadline <= world.now_ns()
            } else {
                world.now_ns() <= deadline + 2_500
            });
            self.seen[kind] += 1;
            world.note(call << 2 | kind as u64);
        }
        let given_up = if world.random.u8(..8) == 0 {
            caller.deadlines.pop_first()
        } else {
            None
        };
        if let Some((call, (_, token))) = given_up {
            // An answer may be on its way, or may have arrived.
            assert_eq!(
                [
                    R::cancel(&mut caller.client, token),
                    R::cancel(&mut caller.client, token)
                ],
                [Some(call), None]
            );
            self.left -= 1;
            self.seen[4] += 1;
            did = true;
        }
        while caller.made < CALLS && world.random.u8(..4) > 0 {
            let timeout = world.random.u64(20_000..200_000);
            let call = (number as u64) << 32 | caller.made;
            match R::call_within(
                &mut caller.client,
                call,
                call,
                Duration::from_nanos(timeout),
            ) {
                Ok(token) => {
                    caller
                        .deadlines
                        .insert(call, (world.now_ns() + timeout, token));
                    caller.made += 1;
                    did = true;
                }
                Err(Refused::Full(..)) => {
                    self.seen[3] += 1;
                    break;
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        if self.left == 0 {
            return Turn::Done;
        }
        if did {
            Turn::Did
        } else {
            Turn::Idle(Duration::from_micros(if caller.made < CALLS {
                300
            } else {
                u64::MAX / 1_000
            }))
        }
    }

    fn serve(&mut self, world: &mut World) -> Turn {
        let mut did = R::serve_poll(&mut self.server) > 0;
        while let Some((held, request)) = R::recv(&mut self.server) {
            match world.random.u8(..10) {
                0 => drop(held),
                1..4 => drop(self.held.insert(
                    (world.now_ns() + world.random.u64(..400_000), request),
                    held,
                )),
                _ => assert!(R::reply(&mut self.server, held, !request)),
            }
        }
        while let Some(entry) = self
            .held
            .first_entry()
            .filter(|entry| entry.key().0 <= world.now_ns())
        {
            let ((_, request), held) = entry.remove_entry();
            assert!(R::reply(&mut self.server, held, !request));
            did = true;
        }
        let next = self
            .held
            .first_key_value()
            .map(|((at, _), _)| Duration::from_nanos(at - world.now_ns()));
        if did {
            Turn::Did
        } else {
            Turn::Idle(next.unwrap_or(Duration::MAX))
        }
    }
}

/// The process of the test below.
pub(crate) fn helper<R: Rpc>() {
    one_thread::check(run::<R>);
}

fn run<R: Rpc>(seed: u64) -> Run {
    let before = files();
    let mut world = World::new(seed);
    let dir = Dir::in_memory(world.clock());
    let server = R::create(&dir, CLIENTS, DEPTH);
    assert!(
        R::try_create(&dir, CLIENTS, DEPTH).is_none(),
        "a name was given twice"
    );
    let caller = |_| Caller {
        client: R::connect(&dir).unwrap(),
        made: 0,
        deadlines: BTreeMap::new(),
    };
    let callers = (0..CLIENTS).map(caller).collect();
    assert!(R::connect(&dir).is_none(), "there was an entry too many");
    let mut peers = Peers::<R> {
        server,
        callers,
        held: BTreeMap::new(),
        seen: [0; 5],
        left: CLIENTS as u64 * CALLS,
    };
    world.run(
        CLIENTS + 1,
        &mut peers,
        |world, peers, actor| {
            if actor == SERVER {
                peers.serve(world)
            } else {
                peers.call(world, actor)
            }
        },
        |peers, actor, rest| {
            if actor == SERVER {
                rest(&mut peers.server)
            } else {
                rest(&mut peers.callers[actor].client)
            }
        },
    );
    assert!(
        peers
            .callers
            .iter()
            .all(|caller| caller.deadlines.is_empty())
    );
    // An entry is free again when the server has found that its client disconnected, and a name
    // when its server has ended.
    peers.callers.truncate(CLIENTS / 2);
    assert_eq!(R::serve_poll(&mut peers.server), 0);
    peers.callers.push(Caller {
        client: R::connect(&dir).unwrap(),
        made: 0,
        deadlines: BTreeMap::new(),
    });
    assert_eq!(files(), before);
    drop(peers.server);
    assert!(
        R::poll(&mut peers.callers[0].client, |_, _| ()).is_err(),
        "the server has ended"
    );
    drop((R::create(&dir, CLIENTS, DEPTH), peers.callers));
    (world.trace, peers.seen.to_vec(), world.turns)
}

/// The test runs in a process of its own, because it counts descriptors.
pub(crate) fn a_server_and_its_clients_run_in_one_thread_by_a_seed_and_without_files<R: Rpc>(
    name: &str,
) {
    start::<R>("simulated: all", &Scratch::new(name)).wait();
}

suite! {
    ipc delegation: {
        a_server_and_its_clients_run_in_one_thread_by_a_seed_and_without_files
    }
}
