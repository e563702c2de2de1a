//! The processes of a job of every benchmark binary of the workspace, and the devices they open.
//!
//! In the order in which a run uses the files:
//!
//! - [`role`]: the role of this process: the launcher or one rank.
//! - [`launcher`]: starts the ranks as its direct children, relays their exchange, and reports the
//!   rank that died.
//! - [`exchange`]: the communication of ranks outside the measured path: all-gather, barrier, a
//!   sleep that wakes when a rank dies.
//! - [`program`]: the common part of programs that measure two processes.
//! - [`hosts`]: the hosts of the ranks, and the cores that the ranks of a host share.
//! - [`device`]: the RDMA device, as named on a command line.
//!
//! All waits in this module are outside the measured path.

#[cfg(not(target_os = "linux"))]
compile_error!(
    "the launcher needs Linux: pidfd, signalfd and PR_SET_PDEATHSIG tie the life of ranks to their launcher"
);

pub mod device;
pub mod exchange;
pub mod hosts;
pub mod launcher;
pub mod program;
pub mod role;

mod child;
mod sys;
