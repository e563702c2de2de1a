//! The program whose instructions `scripts/instructions` counts: one thread that does one kind of operation so many times.
//!
//! Arguments: what to do, and how often. The script runs it twice with different counts under callgrind and divides the difference, so
//! set-up does not count; for the software HCA's share callgrind collects inside its two entry points only. `--list` prints one line per kind
//! for the script: name, bound in instructions (`-` if there is none), the counts of the two runs, what to collect (`all`, `hca`), and what
//! an operation is. `--list-vs` prints one line per kind that libmlx5 can do too: name, its name in `loops.c`, the functions it is done
//! through, the counts of the two runs, what it is; `--libmlx5 NAME FUNCTIONS THREADS COUNT` does that, with queues that belong to one thread
//! if `THREADS` is `one`. `--copy-routine` prints which routine fills a write-combining BlueFlame register here.
//!
//! Posts run on a null device with a write-combining register, in steady state: every 1,024 WQEBBs the device writes one completion, which
//! is polled and given to `complete`. So a post's count contains its share of that, and of this program's loop.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a program for measuring")]

#[path = "../../tests/support/libmlx5/mod.rs"]
mod driver;
mod hca;
mod libmlx5;
mod polls;
mod posts;

use hca::{poll_empty_beside_a_failed_one, write_imm};
use libmlx5::VERSUS;
use mlx5::RegisterKind;
use polls::{poll_compressed, poll_empty, poll_mono, poll_receive_rq, poll_receive_srq, poll_send};
use posts::{Bell, post_inline, post_receive_rq, post_receive_srq, post_send_inline28, post_sge, post4_inline28};

/// An operation that can be counted.
struct Kind {
    name: &'static str,
    bound: Option<u32>,
    /// Operations of the two runs.
    counts: (usize, usize),
    collect: &'static str,
    what: &'static str,
    run: fn(usize),
}

const KINDS: &[Kind] = &[
    Kind {
        name: "post_inline28",
        bound: Some(107),
        counts: (10_240, 30_720),
        collect: "all",
        what: "post one WRITE+IMM of 28 B inline, unsignaled, and ring",
        run: |n| post_inline::<28>(n, 1, true),
    },
    Kind {
        name: "post_batch8_inline28",
        bound: Some(60),
        counts: (10_240, 30_720),
        collect: "all",
        what: "the same, 8 WQEs to a doorbell; per WQE",
        run: |n| post_inline::<28>(n, 8, true),
    },
    Kind {
        name: "post4_inline28_doorbell",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "the same, 4 WQEs to a doorbell of 8 bytes; per WQE",
        run: |n| post4_inline28(n, Bell::EightBytes),
    },
    Kind {
        name: "post4_inline28_blueflame",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "the same, the last of 4 WQEs through BlueFlame",
        run: |n| post4_inline28(n, Bell::BlueFlame),
    },
    Kind {
        name: "post4_inline28_batch",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "the same, all 4 WQEs through BlueFlame",
        run: |n| post4_inline28(n, Bell::Batch),
    },
    Kind {
        name: "post_inline220",
        bound: Some(140),
        counts: (10_240, 30_720),
        collect: "all",
        what: "post one WRITE+IMM of 220 B inline, unsignaled, and ring",
        run: |n| post_inline::<220>(n, 1, true),
    },
    Kind {
        name: "post_sge1024",
        bound: Some(97),
        counts: (10_240, 30_720),
        collect: "all",
        what: "post one WRITE+IMM of a 1,024 B SGE, unsignaled, and ring",
        run: post_sge,
    },
    Kind {
        name: "post_inline28_any",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "as post_inline28, of a length that the compiler does not know",
        run: |n| post_inline::<28>(n, 1, false),
    },
    Kind {
        name: "post_batch8_inline28_any",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "as post_batch8_inline28, of a length that the compiler does not know",
        run: |n| post_inline::<28>(n, 8, false),
    },
    Kind {
        name: "post_inline220_any",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "as post_inline220, of a length that the compiler does not know",
        run: |n| post_inline::<220>(n, 1, false),
    },
    Kind {
        name: "poll_mono",
        bound: Some(40),
        counts: (4_096, 12_288),
        collect: "all",
        what: "one SRQ receive from MonoCq::poll(16), look-up and callback included",
        run: |n| poll_mono(n, false),
    },
    Kind {
        name: "poll_mono_srq",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "the same, and Srq::complete_receive in the callback",
        run: |n| poll_mono(n, true),
    },
    Kind {
        name: "poll_compressed",
        bound: Some(20),
        counts: (4_096, 12_288),
        collect: "all",
        what: "one SRQ receive of a compressed session of 16 from MonoCq::poll(16), look-up and callback included",
        run: poll_compressed,
    },
    Kind {
        name: "post_send_inline28",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "post one SEND of 28 B inline, unsignaled, and ring",
        run: post_send_inline28,
    },
    Kind {
        name: "post_receive_rq",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "post one receive of one buffer to a queue pair's own queue, and ring",
        run: |n| post_receive_rq(n, 1),
    },
    Kind {
        name: "post_receive8_rq",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "the same, 8 to a doorbell; each",
        run: |n| post_receive_rq(n, 8),
    },
    Kind {
        name: "post_receive_srq",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "post one receive of one buffer to a shared queue, and ring",
        run: |n| post_receive_srq(n, 1),
    },
    Kind {
        name: "post_receive8_srq",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "the same, 8 to a doorbell; each",
        run: |n| post_receive_srq(n, 8),
    },
    Kind {
        name: "poll_send",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "one send of Cq::poll(16), its result, and its operation finished",
        run: poll_send,
    },
    Kind {
        name: "poll_receive_rq",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "one receive of Cq::poll(16), its result, and the receive given back to its queue pair",
        run: poll_receive_rq,
    },
    Kind {
        name: "poll_receive_srq",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "one receive of MonoCq::poll(16), its result, its queue pair's value, and the receive given back to its shared queue",
        run: poll_receive_srq,
    },
    Kind {
        name: "poll_empty",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "one poll of a queue that is empty",
        run: poll_empty,
    },
    Kind {
        name: "hca_write_imm64",
        bound: Some(250),
        counts: (8_192, 24_576),
        collect: "hca",
        what: "software HCA: one WRITE+IMM of a 64 B SGE, 8 to a doorbell, and its CQE at the owner",
        run: |n| write_imm(n, 8),
    },
    Kind {
        name: "hca_write_imm64_single",
        bound: Some(404),
        counts: (8_192, 24_576),
        collect: "hca",
        what: "the same, 1 to a doorbell",
        run: |n| write_imm(n, 1),
    },
    Kind {
        name: "hca_poll_empty_failed",
        bound: Some(400),
        counts: (4_096, 12_288),
        collect: "hca",
        what: "software HCA: one poll of a queue that is empty, of 1,000 queue pairs, one of which failed and flushes a receive queue of its own",
        run: poll_empty_beside_a_failed_one,
    },
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => {
            for k in KINDS {
                let bound = k.bound.map_or("-".to_owned(), |b| b.to_string());
                println!("{}|{bound}|{}|{}|{}|{}", k.name, k.counts.0, k.counts.1, k.collect, k.what);
            }
        }
        ["--list-vs"] => {
            for versus in VERSUS {
                let kind = KINDS.iter().find(|k| k.name == versus.ours).unwrap();
                println!("{}|{}|{}|{}|{}|{}", kind.name, versus.theirs, versus.apis, kind.counts.0, kind.counts.1, kind.what);
            }
        }
        ["--libmlx5", name, api, threads, ref counts @ ..] => {
            libmlx5::run(name, api, threads == "one", counts.iter().map(|count| count.parse().unwrap()));
        }
        ["--copy-routine"] => println!("{}", RegisterKind::WriteCombining.copy_routine()),
        // `cargo bench` starts every benchmark like this.
        [] | [.., "--bench"] => println!("instructions: counted by scripts/instructions"),
        [name, count] => {
            let kind = KINDS.iter().find(|k| k.name == name).unwrap_or_else(|| panic!("no such operation: {name}"));
            (kind.run)(count.parse().unwrap());
        }
        _ => panic!(
            "usage: instructions OPERATION COUNT | --libmlx5 OPERATION FUNCTIONS THREADS COUNT... | --list | --list-vs | --copy-routine"
        ),
    }
}
