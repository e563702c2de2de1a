//! The program whose instructions `scripts/instructions` counts: the nodes of a network in one
//! thread, calls and replies of 32 bytes.
//!
//! Bounds are about 2 % above the number that was counted.
#![allow(missing_docs, clippy::unwrap_used, reason = "a program for measuring")]

use std::hint::black_box;
use std::process::ExitCode;
use std::ptr::NonNull;

use benchkv_harness::counted::{self, Operation};
use copyrpc_calls::{Calls, Tag, Tagged};
use copyrpc_shm::lane::{Ahead, LaneRx, LaneTx, Slot};
use flux::{CallFailure, Config, Node, Token, network};

type Payload = [u64; 4];

const DEPTH: usize = 64;
/// Numbers of calls that are counted: several laps of every lane, and multiples of the depth.
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
        "flux_rpc_depth1",
        345,
        "all",
        "flux: one call and its reply, both sides, one at a time",
        |calls| Pair::new(2).calls(calls, 1),
    ),
    operation(
        "flux_rpc_depth64",
        216,
        "all",
        "flux: the same, 64 at a time",
        |calls| Pair::new(2).calls(calls, DEPTH),
    ),
    operation(
        "flux_rpc_depth64_of_8",
        216,
        "all",
        "flux: as flux_rpc_depth64, among 6 idle nodes",
        |calls| Pair::new(8).calls(calls, DEPTH),
    ),
    operation(
        "flux_serve_depth1",
        257,
        "all",
        "flux: as flux_rpc_depth1, answered by Node::step",
        |calls| Pair::new(2).served(calls, 1),
    ),
    operation(
        "flux_serve_depth64",
        137,
        "all",
        "flux: as flux_rpc_depth64, answered by Node::step",
        |calls| Pair::new(2).served(calls, DEPTH),
    ),
    operation(
        "flux_lanes_depth1",
        99,
        "all",
        "the lanes of flux_serve_depth1 alone: no table, flags or rotation",
        |calls| Bare::new().calls(calls, 1),
    ),
    operation(
        "flux_lanes_depth64",
        70,
        "all",
        "the lanes of flux_serve_depth64 alone",
        |calls| Bare::new().calls(calls, DEPTH),
    ),
    operation(
        "flux_table_depth1",
        132,
        "all",
        "those lanes, and the table of calls",
        |calls| Bare::new().named(calls, 1),
    ),
    operation(
        "flux_table_depth64",
        102,
        "all",
        "those lanes, and the table of calls",
        |calls| Bare::new().named(calls, DEPTH),
    ),
    operation(
        "flux_call",
        47,
        "in part_call",
        "flux, of flux_rpc_depth1: Node::call",
        parts,
    ),
    operation(
        "flux_poll_call",
        121,
        "in part_poll_call",
        "flux, of flux_rpc_depth1: Node::poll that finds a call",
        parts,
    ),
    operation(
        "flux_recv",
        33,
        "in part_recv",
        "flux, of flux_rpc_depth1: Node::recv",
        parts,
    ),
    operation(
        "flux_reply",
        48,
        "in part_reply",
        "flux, of flux_rpc_depth1: Node::reply",
        parts,
    ),
    operation(
        "flux_poll_reply",
        124,
        "in part_poll_reply",
        "flux, of flux_rpc_depth1: Node::poll that finds a reply",
        parts,
    ),
    operation(
        "flux_poll_empty",
        25,
        "all",
        "flux: Node::poll that finds nothing, two nodes",
        |polls| Pair::new(2).empty_polls(polls),
    ),
    operation(
        "flux_poll_empty_of_8",
        27,
        "all",
        "flux: the same with 8 nodes",
        |polls| Pair::new(8).empty_polls(polls),
    ),
];

/// Two nodes, of which one calls the other, and idle nodes.
struct Pair {
    caller: Node<Payload, u32>,
    answerer: Node<Payload, u32>,
    _idle: Vec<Node<Payload, u32>>,
}

impl Pair {
    fn new(nodes: usize) -> Self {
        let mut nodes = network(nodes, Config::default()).unwrap();
        let (answerer, caller) = (nodes.remove(1), nodes.remove(0));
        Self {
            caller,
            answerer,
            _idle: nodes,
        }
    }

    fn calls(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for _ in 0..calls / depth as u64 {
            for slot in 0..depth as u32 {
                self.caller.call(1, black_box([0x5a; 4]), slot).unwrap();
            }
            let mut answered = 0;
            while answered < depth {
                self.answerer.poll(|_, _| ());
                while let Some((_, token, request)) = self.answerer.recv() {
                    self.answerer.reply(token, black_box(request)).unwrap();
                    answered += 1;
                }
            }
            let mut missing = depth;
            while missing > 0 {
                missing -= self.caller.poll(|slot, reply| ended += taken(slot, reply));
            }
        }
        assert_eq!(ended, calls);
    }

    fn served(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for _ in 0..calls / depth as u64 {
            for slot in 0..depth as u32 {
                self.caller.call(1, black_box([0x5a; 4]), slot).unwrap();
            }
            let mut answered = 0;
            while answered < depth {
                answered += self
                    .answerer
                    .step(|_, _| (), |_, request| *black_box(request));
            }
            let mut missing = depth;
            while missing > 0 {
                missing -= self.caller.poll(|slot, reply| ended += taken(slot, reply));
            }
        }
        assert_eq!(ended, calls);
    }

    fn empty_polls(&mut self, polls: u64) {
        (0..polls).for_each(|_| assert_eq!(self.answerer.poll(|_, _| ()), 0));
    }
}

/// The minimum of a call of flux: a message in each direction, through the same lanes, lines,
/// stores and loads, and a table of the calls that wait for a reply. The rest of the crate's cost
/// is for its features: the choice of the node that is called, the checks whether that node lives,
/// sleeps or polls another lane, bounded passes over many nodes, rejections, deadlines, lines
/// fetched ahead.
struct Bare {
    there: (LaneTx<Tagged<Payload>>, LaneRx<Tagged<Payload>>),
    back: (LaneTx<Tagged<Payload>>, LaneRx<Tagged<Payload>>),
    table: Calls<u32>,
}

impl Bare {
    fn new() -> Self {
        let lane = || {
            let slots = NonNull::from(Box::leak(
                (0..1024)
                    .map(|_| Slot::<Tagged<Payload>>::empty())
                    .collect::<Box<[_]>>(),
            ))
            .cast();
            // SAFETY: the 1,024 slots are never freed and get only these two ends. Each call is
            // taken before the next round of calls, so there is room.
            unsafe { (LaneTx::new(slots, 1024, 0), LaneRx::new(slots, 1024, 0)) }
        };
        Self {
            there: lane(),
            back: lane(),
            table: Calls::new(DEPTH),
        }
    }

    #[inline(always)]
    fn answer(&mut self) {
        while let Some((tag, request)) = self.there.1.pop_tagged() {
            self.back
                .0
                .publish_tagged(tag, *black_box(&request.read()), Ahead::Nothing);
        }
    }

    fn calls(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for _ in 0..calls / depth as u64 {
            for slot in 0..depth as u32 {
                self.there
                    .0
                    .publish_tagged(slot.into(), black_box([0x5a; 4]), Ahead::Nothing);
            }
            self.answer();
            while let Some((slot, reply)) = self.back.1.pop_tagged() {
                ended += taken(slot as u32, Ok(reply.read()));
            }
        }
        assert_eq!(ended, calls);
    }

    fn named(&mut self, calls: u64, depth: usize) {
        let mut ended = 0;
        for _ in 0..calls / depth as u64 {
            for slot in 0..depth as u32 {
                let tag = self.table.insert(slot).unwrap();
                self.there
                    .0
                    .publish_tagged(tag.pack(0), black_box([0x5a; 4]), Ahead::Nothing);
            }
            self.answer();
            while let Some((tag, reply)) = self.back.1.pop_tagged() {
                if let Some(slot) = self.table.take(Tag::without_note(tag)) {
                    ended += taken(slot, Ok(reply.read()));
                }
            }
        }
        assert_eq!(ended, calls);
    }
}

/// Takes a reply as a caller does: checks that it is a payload, and copies the payload.
fn taken(slot: u32, reply: Result<Payload, CallFailure>) -> u64 {
    reply.map_or(0, |payload| {
        black_box(slot);
        black_box(&payload);
        1
    })
}

/// The calls of `flux_rpc_depth1`, each function in a frame of its own.
fn parts(calls: u64) {
    let Pair {
        mut caller,
        mut answerer,
        _idle,
    } = Pair::new(2);
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
    node.recv().map(|(_, token, request)| (token, request))
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
