//! The crates of this repository: the ends for the load, which the crates' benchmarks use too.

#[path = "../../../flux/benches/ends/mod.rs"]
pub(crate) mod flux;
#[path = "../../../ipc/benches/ends/mod.rs"]
mod rpc;

use delegationrpc::Ring;
use ipc::ReadyWords;
use rpc::{RpcClient, RpcServer};

pub(crate) type IpcServer = RpcServer<ReadyWords>;
pub(crate) type IpcClient = RpcClient<ReadyWords>;
pub(crate) type DelegationServer = RpcServer<Ring>;
pub(crate) type DelegationClient = RpcClient<Ring>;
