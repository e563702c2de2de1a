//! Nodes of a network that are dropped at random moments by their threads. Each call of the other
//! nodes ends once, whether its caller gives it up, its time is over, or it is never answered.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use copyrpc_testing::helpers::{PATIENCE, limited, scale};
use flux::{CallError, CallFailure, CallToken, Config, Node, SessionEnd, Token, network};

const NODES: usize = 5;
const IN_FLIGHT: usize = 8;
const ROUNDS: u32 = 100;
/// Maximum number of turns before a node is dropped, if it is to be dropped early.
const TURNS: u64 = 3000;

/// Numbers of calls by their end: answered, rejected, timed out, given up, and ended because the
/// other node was gone.
type Tally = [u64; 5];

struct Member<'a> {
    node: Node<u64, u64>,
    random: fastrand::Rng,
    made: u64,
    /// The calls that have not ended, each with its token, and its deadline if it has one.
    waiting: BTreeMap<u64, (CallToken, Option<Instant>)>,
    held: Vec<(Token, u64)>,
    /// Number of calls out of four that have a deadline.
    hasty: u8,
    /// The number of the last call, by node.
    last: [Option<u64>; NODES],
    ended: Tally,
    /// Number of nodes that have made all their calls or were dropped.
    through: &'a AtomicUsize,
}

impl Member<'_> {
    /// Makes a call to a random node, in some cases with a deadline.
    fn call_any(&mut self) -> bool {
        let to = (self.node.index() + self.random.usize(1..NODES)) % NODES;
        let timeout = Duration::from_micros(self.random.u64(..200));
        let is_hasty = self.random.u8(..4) < self.hasty;
        self.call(to, is_hasty.then_some(timeout))
    }

    /// Returns whether the call was made, or cannot be made any more.
    fn call(&mut self, to: usize, timeout: Option<Duration>) -> bool {
        let number = (self.node.index() as u64) << 32 | self.made;
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let called = match timeout {
            Some(timeout) => self.node.call_within(to, number, number, timeout),
            None => self.node.call(to, number, number),
        };
        match called {
            Ok(call) => {
                self.made += 1;
                self.waiting.insert(number, (call, deadline)).is_none()
            }
            Err(CallError::Full { .. }) => false,
            Err(CallError::Closed { .. } | CallError::NoSuchNode { .. }) => true,
            Err(error @ CallError::TooLarge { .. }) => panic!("{error}"),
        }
    }

    fn give_up(&mut self) {
        if let Some((number, (call, _))) = self.waiting.pop_first() {
            assert_eq!(
                [self.node.cancel(call), self.node.cancel(call)],
                [Some(number), None]
            );
            self.ended[3] += 1;
        }
    }

    fn poll(&mut self) -> usize {
        let Self {
            node,
            waiting,
            ended,
            ..
        } = self;
        node.poll(|number, outcome| {
            let (_, deadline) = waiting
                .remove(&number)
                .unwrap_or_else(|| panic!("call {number:#x} ends twice"));
            let how = match outcome {
                Ok(answer) => {
                    assert_eq!(
                        answer, !number,
                        "the answer to another call than {number:#x}"
                    );
                    0
                }
                Err(CallFailure::Dropped) => 1,
                Err(CallFailure::TimedOut) => {
                    assert!(
                        deadline.is_some_and(|at| at <= Instant::now()),
                        "call {number:#x} ends before its time"
                    );
                    2
                }
                Err(CallFailure::Closed(SessionEnd::PeerGone)) => 4,
                Err(other) => panic!("{other}"),
            };
            ended[how] += 1;
        })
    }

    fn answer(&mut self) {
        while let Some((from, token, number)) = self.node.recv() {
            assert!(
                number >> 32 == from as u64 && self.last[from].replace(number) < Some(number),
                "{number:#x} is out of order"
            );
            self.held.push((token, number));
        }
        for _ in 0..self.random.usize(..=self.held.len()) {
            let (token, number) = self.held.swap_remove(self.random.usize(..self.held.len()));
            match self.random.u8(..64) {
                0 => drop(token),
                // Another thread drops the token.
                1 => drop(std::thread::spawn(move || drop(token))),
                _ => self.node.reply(token, !number).unwrap(),
            }
        }
    }

    /// Runs the node until its end, which may be at any time. A node that lives longer calls each
    /// other node once more when its places are free again, and then serves until the other nodes
    /// have done the same.
    fn run(mut self) -> Tally {
        let life = if self.random.bool() {
            self.random.u64(..TURNS)
        } else {
            u64::MAX
        };
        let mut turns = 0;
        let mut last_to = 0;
        let mut is_through = false;
        let mut progress = Instant::now();
        while turns < life && self.through.load(Ordering::Acquire) < NODES {
            turns += 1;
            let has_called = if turns <= TURNS {
                self.call_any()
            } else {
                last_to < NODES && self.call(last_to, None)
            };
            if turns <= TURNS && self.random.u8(..16) == 0 {
                self.give_up();
            }
            last_to += usize::from(turns > TURNS && has_called);
            let taken = self.poll();
            self.answer();
            if taken > 0 || has_called || is_through {
                progress = Instant::now();
            }
            assert!(
                progress.elapsed() < PATIENCE,
                "{} calls hang",
                self.waiting.len()
            );
            if last_to == NODES && self.waiting.is_empty() && !is_through {
                is_through = true;
                self.through.fetch_add(1, Ordering::Release);
            }
            match self.random.u8(..8) {
                0 if taken == 0 => drop(self.node.wait(Some(Duration::from_micros(100)))),
                1 => std::thread::yield_now(),
                // The node neither answers nor takes anything.
                2 if self.random.u8(..64) == 0 => {
                    std::thread::sleep(Duration::from_micros(self.random.u64(..2000)))
                }
                _ => {}
            }
        }
        // The unanswered calls of a node end with the node, without a callback.
        let forgotten = self.waiting.len() as u64;
        assert_eq!(
            self.ended.iter().sum::<u64>() + forgotten,
            self.made,
            "every call ends once"
        );
        drop(self.node);
        if !is_through {
            self.through.fetch_add(1, Ordering::Release);
        }
        // Tokens outlive their node.
        drop(self.held);
        self.ended
    }
}

#[test]
fn nodes_dropped_at_random_moments_disturb_nobody() {
    limited(|| {
        let mut sum = [0; 5];
        for round in 0..ROUNDS * scale() {
            let through = AtomicUsize::new(0);
            let nodes = network::<u64, u64>(
                NODES,
                Config {
                    capacity: 32,
                    in_flight: IN_FLIGHT,
                },
            )
            .unwrap();
            let member = |node: Node<u64, u64>| {
                let mut random =
                    fastrand::Rng::with_seed(u64::from(round) << 8 | node.index() as u64);
                let hasty = random.u8(..=4);
                Member {
                    node,
                    random,
                    made: 0,
                    waiting: BTreeMap::new(),
                    held: vec![],
                    hasty,
                    last: [None; NODES],
                    ended: [0; 5],
                    through: &through,
                }
            };
            std::thread::scope(|scope| {
                let threads: Vec<_> = nodes
                    .into_iter()
                    .map(member)
                    .map(|member| scope.spawn(|| member.run()))
                    .collect();
                for ended in threads.into_iter().map(|thread| thread.join().unwrap()) {
                    sum.iter_mut()
                        .zip(ended)
                        .for_each(|(sum, ended)| *sum += ended);
                }
            });
        }
        let [answered, rejected, late, given_up, gone] = sum;
        println!(
            "{answered} calls answered, {rejected} rejected, {late} late, {given_up} given up, {gone} of nodes gone, 0 lost, 0 repeated"
        );
        assert!(!sum.contains(&0));
    });
}
