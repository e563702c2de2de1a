//! Options of the software HCA: faults, compressed sessions, data in the CQE, ports for packets.

mod compact;
mod endpoint;
mod faults;
mod packets;
