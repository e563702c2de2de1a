//! The distributed key-value benchmark of the copyrpc stack.
//!
//! The binary is thin; this library half lets tests link it. What is measured is the `engine`; here is what is around it, in data-flow order:
//!
//! - [`cli`], [`options`]: the command line, checked once into values that can be run; [`pace`], [`policies`], [`port`], [`ucx`]: parts of it.
//! - [`launcher`]: who started the ranks, and where; [`agreement`]: that they all run the same.
//! - [`memory`]: what a job will take of it.
//! - [`control`], [`orchestrate`]: the threads of one rank and the order of a run; [`progress`]: what a terminal shows of it meanwhile.
//! - [`result`]: what all ranks measured, as a table, as JSON and flat; [`output`]: the flat form as CSV and Parquet; [`trace`]: the files of a
//!   daemon's time series; [`report`]: a page with plots out of many.
//! - [`sim`]: a job in virtual time. - [`doctor`]: what this machine lacks, instead of a job.

pub mod agreement;
pub mod cli;
pub mod control;
pub mod doctor;
pub mod launcher;
pub mod memory;
pub mod options;
pub mod orchestrate;
pub mod output;
pub mod pace;
pub mod policies;
pub mod port;
pub mod progress;
pub mod report;
pub mod result;
pub mod sim;
pub mod trace;
pub mod ucx;
