//! The distributed key-value benchmark of the copyrpc stack.
//!
//! The binary is thin; this library half lets tests, and other drivers of the same code, link it. In data-flow order:
//!
//! - [`cli`], [`options`]: the command line, checked once into values that can be run.
//! - [`launcher`]: who started the ranks, and where; [`agreement`]: that they all run the same.
//! - [`workload`], [`zipf`]: the accesses of every client, generated before the run.
//! - [`message`]: the bytes of a request and its response.
//! - [`client`]: the loop that issues them, closed or after the schedule of [`pace`]; [`verify`] judges what comes back.
//! - [`backend`]: the seam to the transports: what a topology provides.
//! - [`ucx`]: the library of one of them.
//! - [`store`]: the shard that a daemon serves.
//! - [`policy`]: what daemons leave for later, so that batches become larger.
//! - [`control`], [`orchestrate`]: the threads of one rank and the order of a run; [`drain`]: when its clients give up at the end.
//! - [`progress`]: what a terminal shows of it meanwhile.
//! - [`activity`]: how the threads spent their time.
//! - [`trace`]: what a daemon was doing, over time.
//! - [`memory`]: what a job will take of it.
//! - [`doctor`]: what this machine lacks, instead of a job.
//! - [`result`]: what all ranks measured, as a table, as JSON and flat; [`output`]: the flat form as CSV and Parquet; [`report`]: a page with plots out of many.

pub mod activity;
pub mod agreement;
pub mod backend;
pub mod cli;
pub mod client;
pub mod control;
pub mod doctor;
pub mod drain;
pub mod launcher;
pub mod memory;
pub mod message;
pub mod options;
pub mod orchestrate;
pub mod output;
pub mod pace;
pub mod policy;
pub mod port;
pub mod progress;
pub mod report;
pub mod result;
pub mod store;
pub mod trace;
pub mod ucx;
pub mod verify;
pub mod workload;
pub mod zipf;
