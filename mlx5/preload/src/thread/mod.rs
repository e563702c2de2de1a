//! The thread that owns the HCA of an open device.

pub(crate) mod poller;
pub(crate) mod session;
