//! The memory that the devices of a fabric share.
//!
//! This module alone accesses the memory of peers. `packets` reaches the peers whose memory is not
//! mapped.
//!
//! - `layout`: the bytes that devices share, their writers, and the pairings H1 to H9.
//! - `memory`: the segments of a device, and the check of every access by key. `arena`: the
//!   allocator of their pages.
//! - `fabric`: finds and maps another device. `peer`: a device that is mapped, and the proof that
//!   it is gone. `links`: the devices that this device has mapped. `domain`: the devices that it
//!   can map. `ports`: the ports of a network.
//! - `remote`: the peer of a connected queue pair: its rights, its lane and its receives.
//!   `receives`: takes receives from a queue.
//! - `mr_cache`: the cached result of a region's check. `datagrams`: the lanes of datagrams.
//! - `atomics`: atomics, including atomics on memory that peers do not map.
//! - `quiesce`: waits until no peer uses an object that is to be destroyed.

pub(crate) mod arena;
pub(crate) mod atomics;
pub(crate) mod datagrams;
pub(crate) mod domain;
pub(crate) mod fabric;
pub(crate) mod layout;
pub(crate) mod links;
pub(crate) mod memory;
pub(crate) mod mr_cache;
pub(crate) mod peer;
pub(crate) mod ports;
pub(crate) mod quiesce;
pub(crate) mod receives;
pub(crate) mod remote;
