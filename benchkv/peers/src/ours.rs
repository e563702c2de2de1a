//! The crates of this repository: the ends that their own benchmarks use.

#[path = "../../../delegationrpc/benches/ends/mod.rs"]
pub(crate) mod delegation;
#[path = "../../../flux/benches/ends/mod.rs"]
pub(crate) mod flux;
#[path = "../../../ipc/benches/ends/mod.rs"]
pub(crate) mod ipc;
