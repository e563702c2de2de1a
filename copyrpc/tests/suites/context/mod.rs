//! Contexts and endpoints, all in one thread, with any kind of time and on any device: see
//! `support`. The protocol itself is tested in `src/tests/protocol`, several processes in
//! `processes`.

mod callbacks;
mod calls;
mod closing;
mod deaths;
mod garbage;
mod lifetimes;
mod limits;
mod paths;
mod requests;
mod serving;
mod windows;
