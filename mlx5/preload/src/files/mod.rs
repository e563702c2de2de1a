//! The descriptors that this library opens for the program: the device, and channels of events.

pub(crate) mod channel;
pub(crate) mod fds;
