//! What every benchmark binary of the workspace shares. It is not published.
//!
//! In the order a run uses the files:
//!
//! - [`role`]: what this process is: the launcher, one rank, a rank's helper, or the other side of a baseline.
//! - [`helper`]: a process that does part of another's work.
//! - [`launcher`]: starts the ranks as its direct children, relays their exchange, names the one that died.
//! - [`exchange`]: what ranks need from each other outside the measured path: all-gather, barrier, a sleep that wakes when a rank dies.
//! - [`hosts`]: where the ranks are, and the cores that those of a host share.
//! - [`units`]: times and sizes as people write them; [`range`]: what is legal; [`as_text`]: recorded as typed.
//! - [`affinity`]: the usable cores and which thread goes where.
//! - [`device`]: the RDMA device, as it is named on a command line; [`window`]: copyrpc's window of batches.
//! - [`clock`]: a cheap nanosecond clock that says what it reads.
//! - [`hist`]: latency histograms that merge across threads and ranks.
//! - [`echo`]: the Unix-socket echo every result is put beside.
//! - [`pingpong`]: the cache line that two cores exchange, below which no round trip between two cores can be.
//! - [`load`]: callers and answerers under load, and [`counted`]: operations one after the other, for whatever carries calls.
//! - [`pattern`]: what requests and replies contain, so that a wrong one is noticed.
//! - [`environment`]: machine, kernel and commit, for the result; [`counters`]: what the NIC counted meanwhile.
//! - [`machine`]: libraries, limits and programs, for those who ask what is missing; [`cgroup`]: memory that control groups allow; [`held`]:
//!   memory the program holds.
//! - [`report`]: the table a person reads and the JSON document a program reads; [`mod@file`]: where they are kept; [`chart`]: the
//!   figures of a page or a file.
//!
//! Waiting here is waiting for other processes, outside any measured window; only [`load`] starts a thread.

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
