//! The distributed key-value benchmark of the copyrpc stack.
//!
//! The binary contains little code, and tests can link this library. The `engine` is the part that
//! is measured; the modules here prepare, start and report a job. In data-flow order:
//!
//! - [`cli`], [`options`]: the command line, checked once into values that can run; [`devices`],
//!   [`pace`], [`port`], [`ucx`]: parts of the command line.
//! - [`launcher`]: the launcher of the ranks, and their hosts; [`agreement`]: the check that all
//!   ranks run the same job.
//! - [`memory`]: the expected memory of a job.
//! - [`orchestrate`]: the threads of one rank and the order of a run; [`progress`]: the progress of
//!   a run on a terminal; [`interval`]: the lines of `--report-interval`.
//! - [`result`]: the measurements of all ranks, as a table, as JSON and flat; [`output`]: the file
//!   of the flat form; [`trace`]: the files of a daemon's time series; [`report`]: many
//!   results side by side.
//! - [`sim`]: a job in virtual time.
//! - [`doctor`]: a diagnosis of this machine, instead of a job.

pub mod agreement;
pub mod cli;
pub mod devices;
pub mod doctor;
pub mod interval;
pub mod launcher;
pub mod memory;
pub mod options;
pub mod orchestrate;
pub mod output;
pub mod pace;
pub mod port;
pub mod progress;
pub mod report;
pub mod result;
pub mod sim;
pub mod trace;
pub mod ucx;
