//! The program whose instructions `scripts/instructions` counts: the nodes of a network in one thread, calls and replies of 32 bytes.
//!
//! Bounds are about a fiftieth above what was counted.
#![allow(missing_docs, clippy::unwrap_used, reason = "a program for measuring")]

use std::hint::black_box;
use std::process::ExitCode;

use flux::{Config, Node, Token, network};
use harness::counted::{self, Operation};

type Payload = [u64; 4];

const DEPTH: usize = 64;
/// Many laps of every lane, and multiples of the depth.
const COUNTS: (u64, u64) = (4096, 20_480);

const fn operation(name: &'static str, bound: u32, collect: &'static str, what: &'static str, run: fn(u64)) -> Operation {
    Operation { name, bound: Some(bound), counts: COUNTS, collect, what, run }
}

const OPERATIONS: &[Operation] = &[
    operation("flux_rpc_depth1", 424, "all", "flux: one call and its reply, both sides, one at a time", |calls| {
        Pair::new(2).calls(calls, 1)
    }),
    operation("flux_rpc_depth64", 259, "all", "flux: the same, 64 at a time", |calls| Pair::new(2).calls(calls, DEPTH)),
    operation("flux_rpc_depth64_of_8", 259, "all", "flux: as flux_rpc_depth64, among 6 idle nodes", |calls| {
        Pair::new(8).calls(calls, DEPTH)
    }),
    operation("flux_serve_depth1", 341, "all", "flux: as flux_rpc_depth1, answered by Node::step", |calls| Pair::new(2).served(calls, 1)),
    operation("flux_serve_depth64", 184, "all", "flux: as flux_rpc_depth64, answered by Node::step", |calls| {
        Pair::new(2).served(calls, DEPTH)
    }),
    operation("flux_call", 56, "in part_call", "flux, of flux_rpc_depth1: Node::call", parts),
    operation("flux_poll_call", 141, "in part_poll_call", "flux, of flux_rpc_depth1: Node::poll that finds a call", parts),
    operation("flux_recv", 33, "in part_recv", "flux, of flux_rpc_depth1: Node::try_recv_raw", parts),
    operation("flux_reply", 50, "in part_reply", "flux, of flux_rpc_depth1: Node::reply", parts),
    operation("flux_poll_reply", 158, "in part_poll_reply", "flux, of flux_rpc_depth1: Node::poll that finds a reply", parts),
    operation("flux_poll_empty", 32, "all", "flux: Node::poll that finds nothing, two nodes", |polls| Pair::new(2).empty_polls(polls)),
    operation("flux_poll_empty_of_8", 34, "all", "flux: the same with 8 nodes", |polls| Pair::new(8).empty_polls(polls)),
];

/// Two nodes of which one calls, and idle ones.
struct Pair {
    caller: Node<Payload, u32>,
    answerer: Node<Payload, u32>,
    _idle: Vec<Node<Payload, u32>>,
}

impl Pair {
    fn new(nodes: usize) -> Self {
        let mut nodes = network(nodes, Config::default()).unwrap();
        let (answerer, caller) = (nodes.remove(1), nodes.remove(0));
        Self { caller, answerer, _idle: nodes }
    }

    fn calls(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for round in 1..=calls / depth as u64 {
            for slot in 0..depth as u32 {
                self.caller.call(1, black_box([0x5a; 4]), slot).unwrap();
            }
            let mut answered = 0;
            while answered < depth {
                self.answerer.poll(|_, _| ());
                while let Some((_, token, request)) = self.answerer.try_recv_raw() {
                    self.answerer.reply(token, black_box(request)).unwrap();
                    answered += 1;
                }
            }
            while ended < round * depth as u64 {
                self.caller.poll(|slot, reply| ended += u64::from(black_box((slot, reply)).1.is_ok()));
            }
        }
    }

    fn served(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for round in 1..=calls / depth as u64 {
            for slot in 0..depth as u32 {
                self.caller.call(1, black_box([0x5a; 4]), slot).unwrap();
            }
            let mut answered = 0;
            while answered < depth {
                answered += self.answerer.step(|_, _| (), |_, request| *black_box(request));
            }
            while ended < round * depth as u64 {
                self.caller.poll(|slot, reply| ended += u64::from(black_box((slot, reply)).1.is_ok()));
            }
        }
    }

    fn empty_polls(&mut self, polls: u64) {
        (0..polls).for_each(|_| assert_eq!(self.answerer.poll(|_, _| ()), 0));
    }
}

/// The calls of `flux_rpc_depth1`, each function in a frame of its own.
fn parts(calls: u64) {
    let Pair { mut caller, mut answerer, _idle } = Pair::new(2);
    for _ in 0..calls {
        part_call(&mut caller, black_box([0x5a; 4]));
        assert_eq!(part_poll_call(&mut answerer), 1);
        let (token, request) = part_recv(&mut answerer).unwrap();
        part_reply(&mut answerer, token, black_box(request));
        assert_eq!(part_poll_reply(&mut caller), 1);
    }
}

#[inline(never)]
fn part_call(node: &mut Node<Payload, u32>, request: Payload) {
    node.call(1, request, 0).unwrap();
}

#[inline(never)]
fn part_poll_call(node: &mut Node<Payload, u32>) -> usize {
    node.poll(|_, _| ())
}

#[inline(never)]
fn part_recv(node: &mut Node<Payload, u32>) -> Option<(Token, Payload)> {
    node.try_recv_raw().map(|(_, token, request)| (token, request))
}

#[inline(never)]
fn part_reply(node: &mut Node<Payload, u32>, token: Token, reply: Payload) {
    node.reply(token, reply).unwrap();
}

#[inline(never)]
fn part_poll_reply(node: &mut Node<Payload, u32>) -> usize {
    node.poll(|slot, reply| {
        black_box((slot, reply.unwrap()));
    })
}

fn main() -> ExitCode {
    counted::main(OPERATIONS)
}
