//! The responder: turns the messages of peers, which have already written this device's memory,
//! into CQEs.
//!
//! - `arrive`: takes messages out of lanes. `deliver`: writes the CQE of a message. `compact`:
//!   compressed sessions and data inside CQEs.
//! - `target`: the receives and the memory on which packets and datagrams are executed. `datagrams`:
//!   takes datagrams out of the lanes of their senders.
//! - `repair`: returns receives that a dead requester had popped.

pub(crate) mod arrive;
pub(crate) mod compact;
pub(crate) mod datagrams;
pub(crate) mod deliver;
pub(crate) mod repair;
pub(crate) mod target;
