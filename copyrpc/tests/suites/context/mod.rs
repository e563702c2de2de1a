//! The binding, all ends in one thread, in any time and on any device: see `support`. The protocol
//! itself is tested in `protocol`, processes in `processes`.

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
