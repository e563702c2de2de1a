//! The suites that all RPCs through shared memory pass: ipc with values and with messages of bytes,
//! and delegationrpc; and the suites of the servers and clients of `copyrpc`, `scalerpc` and `ipc`.
//!
//! In the order of reading: `rpc` (an RPC as the suites see it), `typed` and `bytes` (the RPCs),
//! `conformance` (the promises), `facade` (binding, connecting, serving and asking), `bad_input`
//! (refusals), `simulated` (a server and all its clients in virtual time), `caller` (a client whose
//! calls end once), `storm` (processes killed at random moments), `single_step` (at every
//! instruction), `async_server` (the server whose requests are futures), `bad_network` (calls over
//! networks that lose packets).
#![cfg(not(loom))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what failed by panicking"
)]
#![allow(clippy::print_stdout, reason = "a test says what it did")]

use std::process::Command;

use copyrpc_shm::dir::Dir;
use copyrpc_testing::helpers::{self, Helper, Scratch};
use copyrpc_testing::tracee;

use rpc::Rpc;

/// The type of an RPC by its name.
macro_rules! rpc {
    (ipc) => {
        $crate::typed::Ipc
    };
    (bytes) => {
        $crate::bytes::Bytes
    };
    (delegation) => {
        $crate::typed::Delegation
    };
}

/// Makes the tests of a suite, each a function of the present module over an RPC and a name, for
/// several RPCs.
macro_rules! suite {
    ($($rpc:ident)+: $tests:tt) => {
        $(mod $rpc { suite!(@ $rpc $tests); })+
    };
    (@ $rpc:ident { $($(#[$attribute:meta])* $test:ident)+ }) => {
        $(
            #[test]
            $(#[$attribute])*
            fn $test() {
                let name = concat!(stringify!($rpc), "-", stringify!($test));
                copyrpc_testing::helpers::limited(|| super::$test::<rpc!($rpc)>(name));
            }
        )+
    };
}

mod async_server;
mod bad_input;
mod bad_network;
mod bytes;
mod caller;
mod conformance;
mod facade;
mod rpc;
mod simulated;
#[cfg(target_arch = "x86_64")]
mod single_step;
mod storm;
mod typed;

/// Starts a helper process of a suite with an RPC, in a role.
fn start<R: Rpc>(role: &str, scratch: &Scratch) -> Helper {
    start_with::<R>(role, scratch, |_| ())
}

/// Starts a helper process with changes to its command.
fn start_with<R: Rpc>(role: &str, scratch: &Scratch, change: impl FnOnce(&mut Command)) -> Helper {
    Helper::start_with(&format!("{} {role}", R::NAME), scratch, change)
}

/// Plays the role of a helper process: the name of the RPC, and the rest.
fn play(role: &str, dir: &Dir) {
    let (rpc, role) = role.split_once(' ').unwrap();
    match rpc {
        "ipc" => play_with::<rpc!(ipc)>(role, dir),
        "bytes" => play_with::<rpc!(bytes)>(role, dir),
        "delegation" => play_with::<rpc!(delegation)>(role, dir),
        other => panic!("unknown RPC {other}"),
    }
}

fn play_with<R: Rpc>(role: &str, dir: &Dir) {
    match role.split_once(": ").unwrap() {
        ("conformance", role) => conformance::helper::<R>(role, dir),
        ("bad input", role) => bad_input::helper::<R>(role, dir),
        ("storm", role) => storm::helper::<R>(role, dir),
        ("simulated", _) => simulated::helper::<R>(),
        #[cfg(target_arch = "x86_64")]
        ("single step", role) => single_step::helper::<R>(role, dir),
        (other, _) => panic!("unknown suite {other}"),
    }
}

/// The other side of the tests. Without a role, this test checks nothing.
#[test]
fn helper_process() {
    if let Some((role, dir)) = helpers::role() {
        play(&role, &dir);
    }
}

/// The process that the tests of `single_step` stop and kill, which they start as a test of this
/// binary.
#[test]
#[ignore = "helper process of the other tests, started by them"]
fn stepped_process() {
    tracee::again_and_again(|| {
        let (role, dir) = helpers::role().expect("started by the tests");
        play(&role, &dir);
    });
}
