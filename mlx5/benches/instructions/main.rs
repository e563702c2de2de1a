//! The program whose instructions `scripts/instructions` counts: one thread that does one kind of
//! operation many times.
//!
//! Arguments: the kind and the number of operations. The script runs the program twice with
//! different numbers under callgrind and divides the difference of the instructions by the
//! difference of the numbers, so set-up does not count. For the kinds that measure the software
//! HCA, callgrind collects only inside its two entry points.
//!
//! - `--list` prints one line per kind for the script: name, bound in instructions (`-` if there is
//!   none), the numbers of the two runs, the collected functions (`all`, `hca`, `relay FUNCTION`),
//!   and a description.
//! - `--list-vs` prints one line per kind that libmlx5 supports too: name, the name of the
//!   counterpart in `loops.c`, the functions that the counterpart uses, the numbers of the two
//!   runs, a description.
//! - `--libmlx5 NAME FUNCTIONS THREADS COUNT` does that kind through libmlx5, with queues that
//!   belong to one thread if `THREADS` is `one`.
//! - `--copy-routine` prints the name of the routine that copies a WQE to a write-combining
//!   BlueFlame register on this machine.
//!
//! Posts run on a null device with a write-combining register, in steady state: every 1,024 WQEBBs
//! the device writes one completion, which is polled and passed to `complete`. So the count of a
//! post contains its share of this completion, and of this program's loop.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a program for measuring"
)]

#[path = "../../tests/support/libmlx5/mod.rs"]
mod driver;
mod hca;
mod libmlx5;
#[path = "../../tests/support/null.rs"]
mod null;
mod polls;
mod posts;
mod relay;

use hca::{poll_empty_beside_a_failed_one, write_imm};
use libmlx5::VERSUS;
use mlx5::RegisterKind;
use polls::{poll_compressed, poll_empty, poll_mono, poll_receive_rq, poll_receive_srq, poll_send};
use posts::{
    Bell, post_inline, post_receive_rq, post_receive_srq, post_send_inline28, post_sge,
    post4_inline28,
};
use relay::write_relayed;

struct Kind {
    name: &'static str,
    bound: Option<u32>,
    /// Numbers of operations in the two runs.
    counts: (usize, usize),
    collect: &'static str,
    what: &'static str,
    run: fn(usize),
}

/// Makes `KINDS` from rows: name, bound, number of operations of the first run (the second run does
/// three times this number), the collected functions, a description, and the function that runs.
macro_rules! kinds {
    ($($name:literal $bound:expr, $count:literal $collect:literal, $what:literal: $run:expr;)*) => {
        const KINDS: &[Kind] = &[
            $(Kind { name: $name, bound: $bound, counts: ($count, 3 * $count), collect: $collect, what: $what, run: $run },)*
        ];
    };
}

kinds! {
    "post_inline28" Some(107), 10_240 "all", "post one WRITE+IMM of 28 B inline, unsignaled, and ring":
        |n| post_inline::<28>(n, 1, true);
    "post_batch8_inline28" Some(60), 10_240 "all", "the same, 8 WQEs to a doorbell; per WQE":
        |n| post_inline::<28>(n, 8, true);
    "post4_inline28_doorbell" None, 10_240 "all", "the same, 4 WQEs to a doorbell of 8 bytes; per WQE":
        |n| post4_inline28(n, Bell::EightBytes);
    "post4_inline28_blueflame" None, 10_240 "all", "the same, the last of 4 WQEs through BlueFlame":
        |n| post4_inline28(n, Bell::BlueFlame);
    "post4_inline28_batch" None, 10_240 "all", "the same, all 4 WQEs through BlueFlame":
        |n| post4_inline28(n, Bell::Batch);
    "post_inline220" Some(140), 10_240 "all", "post one WRITE+IMM of 220 B inline, unsignaled, and ring":
        |n| post_inline::<220>(n, 1, true);
    "post_sge1024" Some(97), 10_240 "all", "post one WRITE+IMM of a 1,024 B SGE, unsignaled, and ring":
        post_sge;
    "post_inline28_any" None, 10_240 "all", "as post_inline28, of a length that the compiler does not know":
        |n| post_inline::<28>(n, 1, false);
    "post_batch8_inline28_any" None, 10_240 "all", "as post_batch8_inline28, of a length that the compiler does not know":
        |n| post_inline::<28>(n, 8, false);
    "post_inline220_any" None, 10_240 "all", "as post_inline220, of a length that the compiler does not know":
        |n| post_inline::<220>(n, 1, false);
    "poll_mono" Some(39), 4_096 "all", "one SRQ receive from MonoCq::poll(16), look-up and callback included":
        |n| poll_mono(n, false);
    "poll_mono_srq" None, 4_096 "all", "the same, and Srq::complete_receive in the callback":
        |n| poll_mono(n, true);
    "poll_compressed" Some(20), 4_096 "all", "one SRQ receive of a compressed session of 16 from MonoCq::poll(16), look-up and callback included":
        poll_compressed;
    "post_send_inline28" None, 10_240 "all", "post one SEND of 28 B inline, unsignaled, and ring":
        post_send_inline28;
    "post_receive_rq" None, 4_096 "all", "post one receive of one buffer to a queue pair's own queue, and ring":
        |n| post_receive_rq(n, 1);
    "post_receive8_rq" None, 4_096 "all", "the same, 8 to a doorbell; each":
        |n| post_receive_rq(n, 8);
    "post_receive_srq" None, 4_096 "all", "post one receive of one buffer to a shared queue, and ring":
        |n| post_receive_srq(n, 1);
    "post_receive8_srq" None, 4_096 "all", "the same, 8 to a doorbell; each":
        |n| post_receive_srq(n, 8);
    "poll_send" None, 4_096 "all", "one send of Cq::poll(16), its result, and its operation finished":
        poll_send;
    "poll_receive_rq" None, 4_096 "all", "one receive of Cq::poll(16), its result, and the receive given back to its queue pair":
        poll_receive_rq;
    "poll_receive_srq" None, 4_096 "all", "one receive of MonoCq::poll(16), its result, its queue pair's value, and the receive given back to its shared queue":
        poll_receive_srq;
    "poll_empty" None, 4_096 "all", "one poll of a queue that is empty":
        poll_empty;
    "hca_write_imm64" Some(242), 8_192 "hca", "software HCA: one WRITE+IMM of a 64 B SGE, 8 to a doorbell, and its CQE at the owner":
        |n| write_imm(n, 8);
    "hca_write_imm64_single" Some(387), 8_192 "hca", "the same, 1 to a doorbell":
        |n| write_imm(n, 1);
    "hca_poll_empty_failed" Some(400), 4_096 "hca", "software HCA: one poll of a queue that is empty, of 1,000 queue pairs, one of which failed and flushes a receive queue of its own":
        poll_empty_beside_a_failed_one;
    "relay_post" Some(116), 512 "relay ring", "relay to libibverbs, without its libraries: one WRITE of a 64 B SGE and its doorbell":
        write_relayed;
    "relay_poll" Some(70), 512 "relay empty_poll", "the same: the completion of each":
        write_relayed;
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => {
            for k in KINDS {
                let bound = k.bound.map_or("-".to_owned(), |b| b.to_string());
                println!(
                    "{}|{bound}|{}|{}|{}|{}",
                    k.name, k.counts.0, k.counts.1, k.collect, k.what
                );
            }
        }
        ["--list-vs"] => {
            for versus in VERSUS {
                let kind = KINDS.iter().find(|k| k.name == versus.ours).unwrap();
                println!(
                    "{}|{}|{}|{}|{}|{}",
                    kind.name, versus.theirs, versus.apis, kind.counts.0, kind.counts.1, kind.what
                );
            }
        }
        ["--libmlx5", name, api, threads, ref counts @ ..] => {
            libmlx5::run(
                name,
                api,
                threads == "one",
                counts.iter().map(|count| count.parse().unwrap()),
            );
        }
        ["--copy-routine"] => println!("{}", RegisterKind::WriteCombining.copy_routine()),
        // `cargo bench` starts every benchmark with this argument.
        [] | [.., "--bench"] => println!("instructions: counted by scripts/instructions"),
        [name, count] => {
            let kind = KINDS
                .iter()
                .find(|k| k.name == name)
                .unwrap_or_else(|| panic!("no such operation: {name}"));
            (kind.run)(count.parse().unwrap());
        }
        _ => panic!(
            "usage: instructions OPERATION COUNT | --libmlx5 OPERATION FUNCTIONS THREADS COUNT... | --list | --list-vs | --copy-routine"
        ),
    }
}
