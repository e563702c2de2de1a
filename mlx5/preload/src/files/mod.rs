//! The descriptors that this library opens for the program: the device, with the path of commands
//! to its thread, and channels of events. Also the paths of `/sys` that lead into the launcher's
//! tree, and the counters in the tree.

pub(crate) mod channel;
pub(crate) mod counters;
pub(crate) mod fds;
pub(crate) mod jobs;
pub(crate) mod tree;
