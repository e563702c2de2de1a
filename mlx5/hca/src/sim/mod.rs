//! A network of software HCAs and the programs that drive them, in one thread and in virtual time.
//!
//! [`Simulation`] owns the clock and advances it from event to event. Its devices ask [`NicModel`],
//! a [`Network`], when each WQE has its effect. The devices are ordinary [`Hca`](crate::Hca)s.
//!
//! ```
//! use std::rc::Rc;
//!
//! use mlx5_hca::Hca;
//! use mlx5_hca::sim::{Did, NicParameters, Simulation};
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
//! [`Network`]: crate::network::Network

// The modules:
// - `simulation`: the network. `due`: the order of its events.
// - `actor`: the programs, and the bell that wakes them.
// - `nic`: the costs of a NIC. `contexts`: its cache of queue pair contexts.

mod actor;
mod contexts;
mod due;
mod nic;
mod simulation;

pub use actor::{Actor, ActorId, Bell, Did};
pub use nic::{ContextUses, NicModel, NicParameters};
pub use simulation::{ForeignDevice, Simulated, Simulation};
