//! The library that every benchmark binary of the workspace shares. It is not published.
//!
//! In the order a run uses the files:
//!
//! - [`role`]: the role of this process: the launcher, one rank, a rank's helper, or the other side of a baseline.
//! - [`helper`]: a process that does part of another's work.
//! - [`launcher`]: starts the ranks as its direct children, relays their exchange, names the one that died.
//! - [`exchange`]: the communication of ranks outside the measured path: all-gather, barrier, a sleep that wakes when a rank dies.
//! - [`hosts`]: the hosts of the ranks, and the cores that the ranks of a host share.
//! - [`units`]: times and sizes as people write them; [`range`]: legal ranges; [`as_text`]: values recorded as typed.
//! - [`affinity`]: the usable cores and the placement of threads.
//! - [`device`]: the RDMA device, as named on a command line; [`window`]: copyrpc's window of batches.
//! - [`clock`]: a cheap nanosecond clock that tells its source.
//! - [`hist`]: latency histograms that merge across threads and ranks.
//! - [`echo`]: the Unix-socket echo, the baseline of every result.
//! - [`pingpong`]: the cache line that two cores exchange, the lower bound of a round trip between two cores.
//! - [`load`]: callers and answerers under load, and [`counted`]: single operations in sequence, for anything that carries calls.
//! - [`pattern`]: the content of requests and replies, by which a wrong one is noticed.
//! - [`environment`]: machine, kernel and commit, for the result; [`counters`]: the counters of the NIC.
//! - [`machine`]: libraries, limits and programs, for a diagnosis; [`cgroup`]: the memory limit of control groups; [`held`]: the memory
//!   of the program.
//! - [`report`]: the table for people and the JSON document for programs; [`mod@file`]: the files of both; [`chart`]: the figures of a
//!   page or a file.
//!
//! Waits in this crate are for other processes, outside any measured window; only [`load`] starts a thread.

#[cfg(not(target_os = "linux"))]
compile_error!("the benchmark harness needs Linux: pidfd, signalfd and PR_SET_PDEATHSIG tie the life of ranks to their launcher");

pub mod affinity;
pub mod as_text;
pub mod cgroup;
pub mod chart;
pub mod clock;
pub mod counted;
pub mod counters;
pub mod device;
pub mod echo;
pub mod environment;
pub mod exchange;
pub mod file;
pub mod held;
pub mod helper;
pub mod hist;
pub mod hosts;
pub mod launcher;
pub mod load;
pub mod machine;
pub mod pattern;
pub mod pingpong;
pub mod range;
pub mod report;
pub mod role;
mod role_text;
pub mod units;
pub mod window;

mod child;
mod sys;
