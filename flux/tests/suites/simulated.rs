//! Many nodes in one thread, in virtual time.

use std::collections::BTreeMap;
use std::time::Duration;

use copyrpc_testing::one_thread::{Run, Turn, World};
use flux::{CallError, CallFailure, CallToken, Config, Node, Token, network_by};

const NODES: usize = 64;
const CALLS: u64 = 60;

/// A node, its unanswered calls, and the requests that it has to answer.
struct Member {
    node: Node<u64, u64>,
    made: u64,
    /// The unanswered calls, each with its deadline.
    deadlines: BTreeMap<u64, (u64, CallToken)>,
    /// The requests that the node answers later, by the time of the answer.
    held: BTreeMap<(u64, u64), Token>,
}

#[derive(Default)]
struct Members {
    members: Vec<Member>,
    /// Numbers of answers, rejections, timeouts, refusals, and calls given up.
    seen: [usize; 5],
    left: u64,
}

impl Members {
    fn turn(&mut self, world: &mut World, number: usize) -> Turn {
        let member = &mut self.members[number];
        let mut ended = vec![];
        let mut did = member
            .node
            .poll(|user_data, outcome| ended.push((user_data, outcome)))
            > 0;
        for (call, outcome) in ended {
            let (deadline, _) = member
                .deadlines
                .remove(&call)
                .expect("a call ended that had ended");
            self.left -= 1;
            let (kind, is_in_time) = match outcome {
                Ok(answer) => (
                    if answer == !call {
                        0
                    } else {
                        panic!("{answer}")
                    },
                    world.now_ns() <= deadline + 2_500,
                ),
                Err(CallFailure::Dropped) => (1, world.now_ns() <= deadline + 2_500),
                Err(CallFailure::TimedOut) => (2, deadline <= world.now_ns()),
                Err(other) => panic!("{other}"),
            };
            assert!(is_in_time);
            self.seen[kind] += 1;
            world.note(call << 2 | kind as u64);
        }
        let given_up = if world.random.u8(..8) == 0 {
            member.deadlines.pop_first()
        } else {
            None
        };
        if let Some((call, (_, token))) = given_up {
            // An answer may be on its way, or may have arrived.
            assert_eq!(
                [member.node.cancel(token), member.node.cancel(token)],
                [Some(call), None]
            );
            self.left -= 1;
            self.seen[4] += 1;
            did = true;
        }
        while let Some((_, token, payload)) = member.node.recv() {
            match world.random.u8(..10) {
                0 => drop(token),
                1..4 => drop(member.held.insert(
                    (world.now_ns() + world.random.u64(..400_000), payload),
                    token,
                )),
                _ => member.node.reply(token, !payload).unwrap(),
            }
        }
        while let Some(entry) = member
            .held
            .first_entry()
            .filter(|entry| entry.key().0 <= world.now_ns())
        {
            let ((_, payload), token) = entry.remove_entry();
            member.node.reply(token, !payload).unwrap();
            did = true;
        }
        while member.made < CALLS && world.random.u8(..4) > 0 {
            // Half of the calls go to one node.
            let to = if world.random.bool() {
                (number < NODES / 2) as usize
            } else {
                world.random.usize(..NODES)
            };
            let (timeout, call) = (
                world.random.u64(20_000..200_000),
                (number as u64) << 32 | member.made,
            );
            match member
                .node
                .call_within(to, call, call, Duration::from_nanos(timeout))
            {
                Ok(token) => {
                    member
                        .deadlines
                        .insert(call, (world.now_ns() + timeout, token));
                    member.made += 1;
                    did = true;
                }
                Err(CallError::Full { .. }) => {
                    self.seen[3] += 1;
                    break;
                }
                Err(CallError::NoSuchNode { .. }) if to == number => {}
                Err(other) => panic!("{other:?}"),
            }
        }
        if self.left == 0 {
            return Turn::Done;
        }
        let next = member
            .held
            .first_key_value()
            .map_or(Duration::MAX, |((at, _), _)| {
                Duration::from_nanos(at - world.now_ns())
            });
        let to_call = if member.made < CALLS {
            Duration::from_micros(300)
        } else {
            Duration::MAX
        };
        if did {
            Turn::Did
        } else {
            Turn::Idle(next.min(to_call))
        }
    }
}

fn run(seed: u64) -> Run {
    let mut world = World::new(seed);
    let nodes = network_by(
        &world.clock(),
        NODES,
        Config {
            capacity: 8,
            in_flight: 3,
        },
    )
    .unwrap();
    let member = |node| Member {
        node,
        made: 0,
        deadlines: BTreeMap::new(),
        held: BTreeMap::new(),
    };
    let mut all = Members {
        members: nodes.into_iter().map(member).collect(),
        left: NODES as u64 * CALLS,
        ..Members::default()
    };
    world.run(
        NODES,
        &mut all,
        |world, all, number| all.turn(world, number),
        |all, number, rest| rest(&mut all.members[number].node),
    );
    assert!(all.members.iter().all(|member| member.deadlines.is_empty()));
    (world.trace, all.seen.to_vec(), world.turns)
}

#[test]
fn nodes_run_in_one_thread_by_a_seed_and_without_files() {
    // The test runs in a process of its own, because it counts descriptors.
    copyrpc_testing::helpers::alone(
        "simulated::nodes_run_in_one_thread_by_a_seed_and_without_files",
        1,
        || copyrpc_testing::one_thread::check(run),
    );
}
