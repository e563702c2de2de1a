//! What ours is put beside.

pub(crate) mod array_queue;
pub(crate) mod channel;
pub(crate) mod iceoryx;
pub(crate) mod rings;
