//! A network of devices and NICs in virtual time, in one thread.
//!
//! - `simulation`: the devices, the programs that drive them, and the order of events.
//! - `nic`: the costs of a NIC; `contexts`: its cache of queue pair contexts. `numbered`: maps by number.

pub(crate) mod contexts;
pub(crate) mod nic;
pub(crate) mod numbered;
pub(crate) mod simulation;
