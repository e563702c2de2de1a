//! Limits of a server's parameters.

use std::time::Duration;

/// Maximum number of clients of one server: delegationrpc has 12 bits for the number of a client.
pub const CLIENTS_MAX: usize = 4096;
/// Maximum number of unanswered calls of one client.
pub const DEPTH_MAX: usize = 1 << 15;
/// Maximum length of a message of bytes: 1 MiB.
pub const MESSAGE_MAX: usize = 1 << 20;
/// Length of a cache line in bytes, and the alignment of the parts of a region.
pub(crate) const LINE: usize = 64;
/// Maximum time for which a stopped server lets clients fetch replies in parts.
pub(crate) const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Default number of clients of a server.
pub(crate) const CLIENTS: usize = 64;
/// Default number of unanswered calls of a client.
pub(crate) const DEPTH: usize = 32;
