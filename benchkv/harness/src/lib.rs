//! The library that every benchmark of the workspace shares: one process, no RDMA. It is not published.
//!
//! In the order a run uses the files:
//!
//! - [`units`]: times and sizes as people write them; [`range`]: legal ranges; [`as_text`]: values recorded as typed.
//! - [`affinity`]: the usable cores and the placement of threads.
//! - `window`: copyrpc's window of batches, with the feature `copyrpc`.
//! - [`clock`]: a cheap nanosecond clock that tells its source.
//! - [`hist`]: latency histograms that merge across threads and ranks.
//! - [`environment`]: machine, kernel and commit, for the result; [`counters`]: the counters of the NIC.
//! - [`machine`]: libraries, limits and programs, for a diagnosis; [`cgroup`]: the memory limit of control groups.
//! - [`report`]: the table for people and the JSON document for programs; [`mod@file`]: the files of both; [`chart`]: the figures of a
//!   page or a file.

pub mod affinity;
pub mod as_text;
pub mod cgroup;
pub mod chart;
pub mod clock;
pub mod counters;
pub mod environment;
pub mod file;
pub mod hist;
pub mod machine;
pub mod range;
pub mod report;
pub mod units;
#[cfg(feature = "copyrpc")]
pub mod window;
