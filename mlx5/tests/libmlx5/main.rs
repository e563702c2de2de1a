//! Compares the bytes that libmlx5 writes with this crate's, for the same operations, and the CQEs
//! as both read them. It runs under `mlx5-run`, so that libmlx5 has a device; this crate uses a
//! null device. No operation is executed, except in `executed`: libmlx5's queue pairs stay in a
//! state in which their device does not send, and the test writes the CQEs.
//!
//! `docs/libmlx5.md` lists every difference. A test fails if it finds a difference that is not
//! listed, or misses a listed one.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod cqes;
mod differences;
mod executed;
mod fields;
#[path = "../support/libmlx5/mod.rs"]
mod libmlx5;
#[path = "../support/null.rs"]
mod null;
mod operations;
#[path = "../support/random.rs"]
mod random;
mod receives;
mod wqes;

use std::sync::OnceLock;

use libmlx5::{Library, VerbsDevice};

/// A device of libmlx5 of its own, whose queue pairs have the user indices 0, 1, ... in the order
/// in which they are made.
fn open() -> VerbsDevice {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let library =
        LIBRARY.get_or_init(|| Library::load(libmlx5::DRIVER).unwrap_or_else(|e| panic!("{e}")));
    VerbsDevice::open(library, false).unwrap_or_else(|e| panic!("{e}"))
}

/// Makes the CQE of a send of the queue pair with this number and user index.
fn requester_cqe(
    qpn: u32,
    user_index: u32,
    wqe_opcode: u8,
    wqe_counter: u16,
) -> mlx5::wire::RequesterCqe {
    mlx5::wire::RequesterCqe {
        wqe_opcode,
        qpn,
        wqe_counter,
        byte_count: 0,
        user_index,
    }
}

/// Makes the CQE of a receive without data of the queue pair with this number and user index.
fn responder_cqe(qpn: u32, user_index: u32, wqe_counter: u16) -> mlx5::wire::ResponderCqe {
    mlx5::wire::ResponderCqe {
        qpn,
        srqn: user_index,
        wqe_counter,
        ..Default::default()
    }
}
