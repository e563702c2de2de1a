//! The requester: takes WQEs off a send queue, in order, executes them on the peer's memory, and
//! completes them.
//!
//! - `execute`: the doorbell, and WQEs that are due. `take`: the loop over WQEs. `wqe`: the WQE at
//!   the head, if it is not executed. `timing`: the time at which a WQE is executed.
//! - `plain`: the fast path: WRITEs, with immediate or not, that use the checks of earlier WQEs.
//! - `operations`: each verb on shared memory. `connection`: WQEs of connections by packets.
//!   `datagrams`: unreliable datagrams.
//! - `complete`: writes CQEs to the send CQ. `traffic`: counts the traffic of ports. `buffers`:
//!   checks that buffers in flight are not touched.

pub(crate) mod buffers;
pub(crate) mod complete;
pub(crate) mod connection;
pub(crate) mod datagrams;
pub(crate) mod execute;
pub(crate) mod operations;
pub(crate) mod plain;
pub(crate) mod take;
pub(crate) mod timing;
pub(crate) mod traffic;
pub(crate) mod wqe;
