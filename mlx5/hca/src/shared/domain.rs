//! Domains: numbers of processes. Two processes with the same number can map each other's memory,
//! and both conclude that from the two numbers.

use std::fs;
use std::os::unix::fs::MetadataExt;

use copyrpc_shm::memfd::pid_namespace;

use crate::hash::hash_of;

/// The domain of a process that shares memory with no other process.
pub(crate) const NONE: u64 = 0;

/// The domain of all devices of a local fabric that share memory.
pub(crate) const OF_THIS_PROCESS: u64 = 1;

/// Returns a number that represents all properties by which the kernel decides whether one process
/// may open another's memfds (ptrace(2), "Ptrace access mode checking"): user, group, capabilities,
/// namespaces, and the label of a security module. The decisions for two processes can differ only
/// if these properties differ; so devices share memory if their numbers are the same. Returns
/// [`NONE`] for a process that no other process may inspect.
pub(crate) fn of_this_process() -> u64 {
    if !rustix::process::dumpable_behavior()
        .is_ok_and(|dumpable| dumpable == rustix::process::DumpableBehavior::Dumpable)
    {
        return NONE;
    }
    let user_namespace = fs::metadata("/proc/self/ns/user").map_or(0, |namespace| namespace.ino());
    let label = fs::read("/proc/self/attr/current").unwrap_or_default();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let rights = status.lines().filter(|line| {
        ["Uid:", "Gid:", "CapPrm:"]
            .iter()
            .any(|key| line.starts_with(key))
    });
    let bytes = rights.flat_map(str::bytes).chain(label).map(u64::from);
    hash_of([pid_namespace(), user_namespace].into_iter().chain(bytes)).max(OF_THIS_PROCESS + 1)
}
