//! The library that every benchmark of the workspace shares. It is not published.
//!
//! In the order in which a run uses the files:
//!
//! - [`units`]: times and sizes as people write them. [`range`]: legal ranges. [`as_text`]: values
//!   recorded in their text form.
//! - [`affinity`]: the usable cores and the placement of threads. [`cgroup`]: limits of control
//!   groups.
//! - `window`: copyrpc's window of batches, with the feature `copyrpc`.
//! - [`clock`]: a cheap nanosecond clock that reports its source.
//! - [`hist`]: latency histograms that merge across threads and ranks.
//! - [`pattern`]: the content of requests and replies, by which wrong content is detected.
//!   [`load`]: callers and answerers under load, over any transport between threads. [`counted`]:
//!   single operations in sequence, for callgrind. [`held`]: the memory of the program.
//! - [`environment`]: machine, kernel and commit, for the result. [`counters`]: the counters of the
//!   NIC.
//! - [`machine`]: libraries, limits and programs, for a diagnosis.
//! - [`report`]: the table for people and the JSON document for programs. [`mod@file`]: their
//!   files. [`chart`]: lines as SVG.
//! - `launch`, with the feature `launch`: the processes of a job, and their devices.

pub mod affinity;
pub mod as_text;
pub mod baseline;
pub mod cgroup;
pub mod chart;
pub mod clock;
pub mod counted;
pub mod counters;
pub mod environment;
pub mod file;
pub mod held;
pub mod hist;
#[cfg(feature = "launch")]
pub mod launch;
pub mod load;
pub mod machine;
pub mod pattern;
pub mod range;
pub mod report;
pub mod units;
#[cfg(feature = "copyrpc")]
pub mod window;

/// The reason why a program has no result: a sentence for its user, or a library's typed error.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;
