//! The rivals of the crates of this repository.

pub(crate) mod array_queue;
pub(crate) mod channel;
pub(crate) mod iceoryx;
pub(crate) mod rings;
