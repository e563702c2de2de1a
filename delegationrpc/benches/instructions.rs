//! The program whose instructions `scripts/instructions` counts: a server and its clients in one
//! thread, requests and replies of 32 bytes.
//!
//! Bounds are about 2 % above the number that was counted.
#![allow(missing_docs, clippy::unwrap_used, reason = "a program for measuring")]

#[path = "../../ipc/benches/pair/mod.rs"]
mod pair;

use std::process::ExitCode;

use benchkv_harness::counted::{self, Operation};
use delegationrpc::Ring;
use pair::{DEPTH, WITHOUT_LOOKS, parts};

type Pair = pair::Pair<Ring>;

/// Numbers of calls that are counted: many laps of the lanes, and multiples of the depth.
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
        "delegation_rpc_depth1",
        327,
        WITHOUT_LOOKS,
        "delegationrpc: one call and its reply, both sides, one at a time",
        |calls| Pair::new(1).calls(calls, 1),
    ),
    operation(
        "delegation_rpc_depth32",
        213,
        WITHOUT_LOOKS,
        "delegationrpc: the same, 32 at a time",
        |calls| Pair::new(1).calls(calls, DEPTH),
    ),
    operation(
        "delegation_serve_depth1",
        246,
        WITHOUT_LOOKS,
        "delegationrpc: as delegation_rpc_depth1, answered by Server::step",
        |calls| Pair::new(1).served(calls, 1),
    ),
    operation(
        "delegation_serve_depth32",
        157,
        WITHOUT_LOOKS,
        "delegationrpc: as delegation_rpc_depth32, answered by Server::step",
        |calls| Pair::new(1).served(calls, DEPTH),
    ),
    operation(
        "delegation_rpc_depth1_of_1024",
        327,
        WITHOUT_LOOKS,
        "delegationrpc: as delegation_rpc_depth1, among 1,023 idle clients",
        |calls| {
            Pair::new(1024).calls(calls, 1);
        },
    ),
    operation(
        "delegation_call",
        53,
        "in part_call",
        "delegationrpc, of delegation_rpc_depth1: Client::call",
        parts::<Ring>,
    ),
    operation(
        "delegation_server_poll",
        112,
        "in part_server_poll",
        "delegationrpc, of delegation_rpc_depth1: Server::poll that finds a request",
        parts::<Ring>,
    ),
    operation(
        "delegation_recv",
        77,
        "in part_recv",
        "delegationrpc, of delegation_rpc_depth1: Server::recv",
        parts::<Ring>,
    ),
    operation(
        "delegation_reply",
        53,
        "in part_reply",
        "delegationrpc, of delegation_rpc_depth1: Server::reply",
        parts::<Ring>,
    ),
    operation(
        "delegation_client_poll",
        82,
        "in part_client_poll",
        "delegationrpc, of delegation_rpc_depth1: Client::poll that finds a reply",
        parts::<Ring>,
    ),
    operation(
        "delegation_client_poll_empty",
        58,
        WITHOUT_LOOKS,
        "delegationrpc: Client::poll that finds nothing, a call in flight",
        |polls| {
            let mut pair = Pair::new(1);
            pair.client.call([1; 4], 0).unwrap();
            (0..polls).for_each(|_| assert_eq!(pair.client.poll(|_, _| ()), Ok(0)));
        },
    ),
    operation(
        "delegation_server_poll_empty",
        36,
        WITHOUT_LOOKS,
        "delegationrpc: Server::poll that finds nothing, one client",
        |polls| Pair::new(1).empty_polls(polls),
    ),
    operation(
        "delegation_server_poll_empty_of_1024",
        36,
        WITHOUT_LOOKS,
        "delegationrpc: the same with 1,024 clients",
        |polls| Pair::new(1024).empty_polls(polls),
    ),
];

fn main() -> ExitCode {
    counted::main(OPERATIONS)
}
