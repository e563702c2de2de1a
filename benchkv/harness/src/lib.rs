//! What every benchmark binary of the workspace shares. It is not published.
//!
//! In the order a run uses the files:
//!
//! - [`role`]: what this process is: the launcher, one rank, or the echo server of the baseline.
//! - [`launcher`]: starts the ranks as its direct children, relays their exchange, names the one that died.
//! - [`exchange`]: what ranks need from each other outside the measured path: all-gather, barrier, a sleep that wakes when a rank dies.
//! - [`affinity`]: the usable cores and which thread goes where.
//! - [`clock`]: a cheap nanosecond clock that says what it reads.
//! - [`hist`]: latency histograms that merge across threads and ranks.
//! - [`echo`]: the Unix-socket echo every result is put beside.
//! - [`environment`]: machine, kernel and commit, for the result.
//! - [`report`]: the table a person reads and the JSON document a program reads.
//!
//! Waiting here is waiting for other processes, outside any measured window; nothing in this crate starts a thread.

#[cfg(not(target_os = "linux"))]
compile_error!("the benchmark harness needs Linux: pidfd, signalfd and PR_SET_PDEATHSIG tie the life of ranks to their launcher");

pub mod affinity;
pub mod clock;
pub mod echo;
pub mod environment;
pub mod exchange;
pub mod hist;
pub mod launcher;
pub mod report;
pub mod role;

mod child;
mod sys;
