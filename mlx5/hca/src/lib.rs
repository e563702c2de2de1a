//! The software HCA: a model of an mlx5 device that executes a driver's WQEs and writes its CQEs,
//! in the driver's own threads.
//!
//! A driver places the queues in its own memory. This crate implements the firmware commands on
//! them (PRM "Commands": CREATE_CQ, CREATE_QP, ..) and executes the WQEs. The bytes in the queues
//! have the formats of [`wire`]. A driver uses this crate in one of two ways. It calls
//! [`Hca::ring`] after each of its doorbells, and [`Hca::empty_poll`] when it finds a completion
//! queue empty. Or its doorbells are plain stores, and its user calls [`Hca::poll`], which polls
//! the doorbell records. The devices of all processes of a user find each other in a directory.
//!
//! A device belongs to one thread. `docs/software-hca.md` explains the design.
//!
//! ```
//! use mlx5_hca::{Access, Hca, SoftOptions};
//!
//! // Memory that peers may write, and a queue of 16 receives of one buffer each, whose WQEs the driver writes.
//! let hca = Hca::open(&SoftOptions::default())?;
//! let pd = hca.alloc_pd();
//! let region = hca.alloc_registered(pd, 4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE, false)?;
//! let (_number, receives) = hca.create_rq(pd, 16, 1, false)?;
//! assert_eq!((region.len, receives.wqe_cnt, receives.stride), (4096, 16, 16));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// The modules, from the top to the base. A module imports only modules that are listed after it,
// and the device itself (`Hca` and its `State`):
// - `sim`: a network of devices and their programs, in virtual time.
// - `hca`: the device, its doorbell and its poll. `options`, `error`.
// - `objects`: the firmware commands: creating, connecting, resetting and destroying objects.
// - `arrivals`: packets that arrive. `flush`: flushes the WQEs of failed queue pairs. `sleep`:
//   sleeping until a poll has something to do.
// - `requester`: takes WQEs off a send queue. It executes them on the memory of the peer, or posts
//   them to a connection by packets.
// - `responder`: turns the messages of peers into CQEs, and returns receives that a dead requester
//   had popped.
// - `packets`: the protocol of connections by packets, and the port from which they are sent.
// - `debug`: strict mode, faults, traces. `testing`: hooks for tests. `network`: the interface to a
//   model of the network.
// - `queues`: the device's side of send, receive and completion queues.
// - `shared`: the memory that devices share. No other module touches the memory of a peer.
// - `types`: plain types. `clock`, `deferred`, `random`, `hash`: time, timers, random numbers,
//   hashes. `counters`: counters of ports.

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("mlx5-hca needs 64-bit Linux: its memfds and membarrier(2) exist nowhere else");

// Files of the integration tests are also compiled into the unit tests, and import this crate as
// `mlx5_hca`.
#[cfg(test)]
extern crate self as mlx5_hca;

mod arrivals;
mod clock;
mod counters;
mod debug;
mod deferred;
mod error;
mod flush;
mod hash;
mod hca;
pub mod network;
mod objects;
mod options;
mod packets;
mod queues;
mod random;
mod requester;
mod responder;
mod shared;
pub mod sim;
mod sleep;
#[doc(hidden)]
pub mod testing;
mod types;

pub use clock::Clock;
pub use counters::PortCounters;
pub use debug::faults::Faults;
pub use error::{ConnectError, CreateError, OpenError, RegisterError, check, check_region};
pub use hca::{COMP_VECTORS, Hca, MAX_LANE_SLOTS};
pub use mlx5_wire as wire;
pub use mlx5_wire::{Access, AsyncEvent, ConnectOptions, Service};
pub use objects::regions::MAX_REGIONS;
pub use options::SoftOptions;
pub use packets::interface::{address_of, gid_of};
pub use packets::mads::MadPort;
pub use packets::network::BadNetwork;
pub use packets::options::RoceOptions;
pub use packets::port::PacketCounters;
pub use queues::cq;
pub use requester::timing::Timing;
pub use shared::fabric::{FabricSpec, LocalFabric, MAX_VF};
pub use shared::ports::{Gid, GidKind, Port, PortAddress};
pub use types::info::{DeviceInfo, Engine};
pub use types::request::{
    Address, CqMemory, PacketAddress, Pages, QpMemory, Receives, Region, RqMemory, SqMemory,
};
pub use types::rule::{Queue, Rule, Violation};
pub use types::terms::{Difference, Term, Terms};
pub use types::vendor::text as vendor_text;

use self::hca::{Queues, State};
use self::shared::links::Links;

#[cfg(test)]
mod tests;

/// Asserts that errors can go to other threads, and into a `Box<dyn Error + Send + Sync>`.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::ConnectError>();
        check::<crate::CreateError>();
        check::<crate::OpenError>();
        check::<crate::RegisterError>();
    }
}
