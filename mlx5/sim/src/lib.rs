//! A network of software HCAs and the programs that drive them, in one thread and in virtual time.
//!
//! [`Simulation`] owns the clock and advances it from event to event. [`NicModel`] says when each WQE has its effect: it is the [`Network`] that
//! the devices of a simulation ask. Everything else is the ordinary [`Hca`](mlx5_hca::Hca).
//!
//! ```
//! use std::rc::Rc;
//!
//! use mlx5_hca::Hca;
//! use mlx5_sim::{Did, NicParameters, Simulation};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut steps = 0;
//! let mut simulation = Simulation::new(NicParameters::default());
//! let device = Rc::new(Hca::open(&simulation.options())?);
//! simulation.spawn(&[&device], |now_ns| {
//!     steps += 1;
//!     if now_ns < 1_000 { Did::Cost(100) } else { Did::IdleUntil(None) }
//! })?;
//! simulation.run(u64::MAX);
//! assert_eq!(simulation.now_ns(), 1_000);
//! drop(simulation);
//! assert_eq!(steps, 11);
//! # Ok(())
//! # }
//! ```
//!
//! [`Network`]: mlx5_hca::network::Network

// From the inside outwards:
// - `nic`: the costs of a NIC. `contexts`: its cache of queue pair contexts.
// - `actor`: the programs, and the bell that wakes them. `due`: the order of events.
// - `simulation`: the network.

mod actor;
mod contexts;
mod due;
mod nic;
mod simulation;

pub use actor::{Actor, ActorId, Bell, Did};
pub use nic::{ContextUses, NicModel, NicParameters};
pub use simulation::{ForeignDevice, Simulated, Simulation};
