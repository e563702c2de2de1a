//! The crates of this repository.

pub(crate) mod delegation;
pub(crate) mod flux;
pub(crate) mod ipc;
