#![doc = include_str!("../README.md")]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("mlx5 needs 64-bit Linux: its devices, memfds and membarrier(2) exist nowhere else");

// For what the unit tests share with the others.
#[cfg(test)]
extern crate self as mlx5;

mod address;
mod batch;
mod control;
mod cq;
mod cq_object;
mod cq_ring;
mod device;
mod doorbell;
mod fast_map;
pub mod hca;
mod mmio;
mod mono_cq;
mod mr;
mod ops;
mod qp;
mod rc_qp;
mod rq;
mod simulation;
mod soft;
mod sq;
mod srq;
mod ud_qp;
pub mod verbs;
pub mod wire;

pub use address::{DeviceKind, QpAddress};
pub use batch::BlueflameBatch;
pub use control::CreateError;
pub use cq::{CompletionError, Cq, CqConfig, Cqe};
pub use device::{CompletionQueue, CqRef, Device, DeviceInfo, DeviceSpec, FabricSpec, NullOptions, OpenError, Pd, SoftOptions};
pub use fast_map::FastMap;
pub use mmio::RegisterKind;
pub use mono_cq::MonoCq;
pub use mr::{Access, Busy, Mr, NoHugePages, OutOfBounds, Pages, RegisterError};
pub use ops::{
    ATOMIC_BYTES, CompareSwap, Destination, FetchAdd, Inline, MAX_MESSAGE_BYTES, Operation, Payload, RcOperation, Read, Segments, Send,
    SendImm, Sge, UdOperation, UdSend, UdSendImm, Write, WriteImm,
};
pub use qp::{ConnectError, ConnectOptions, Qp, QpConfig, QpState, ReceiveSource, Transport};
pub use rc_qp::{Connected, RcQp};
pub use rq::PostReceiveError;
pub use simulation::{Actor, Did, ForeignDevice, Simulation};
pub use soft::{Clock, ContextUses, Faults, LocalFabric, NicModel, NicParameters, NullDevice, Queue, Rule, Timing, Violation};
pub use sq::{Flags, PostError, Signal};
pub use srq::Srq;
pub use ud_qp::{Datagram, GRH_BYTES, MAX_DATAGRAM_BYTES, UdQp};
pub use wire::{AddressVector, CqeOpcode, Syndrome};

#[cfg(test)]
mod tests;
