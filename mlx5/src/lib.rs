#![doc = include_str!("../README.md")]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("mlx5 needs 64-bit Linux: its devices, memfds and membarrier(2) exist nowhere else");

// For what the unit tests share with the others.
#[cfg(test)]
extern crate self as mlx5;

mod address;
mod alarm;
mod batch;
mod config;
mod control;
mod cq;
mod cq_object;
mod cq_ring;
mod cqe;
mod device;
mod doorbell;
mod endpoint;
mod error;
mod fast_map;
mod hook;
mod mmio;
mod mono_cq;
mod mr;
#[cfg(feature = "soft")]
mod null;
mod ops;
mod parts;
mod pd;
#[cfg(feature = "soft")]
mod private;
mod provider;
mod qp;
mod rc_qp;
mod rq;
#[cfg(feature = "soft")]
mod soft;
mod sq;
mod srq;
mod ud_qp;
pub mod verbs;

pub use address::{DeviceKind, QpAddress};
pub use batch::BlueflameBatch;
pub use config::{CqConfig, DeviceInfo, NullOptions, Pages, QpConfig, QpState};
pub use cq::Cq;
pub use cqe::{CompletionError, Cqe};
pub use device::{CompletionQueue, CqRef, Device, DeviceSpec, Pd};
pub use endpoint::{Endpoint, EndpointAddress, EndpointConfig, EndpointError};
pub use error::{ConnectError, CreateError, OpenError, RegisterError};
pub use fast_map::FastMap;
#[cfg(feature = "soft")]
pub use mlx5_hca as hca;
#[cfg(feature = "soft")]
#[doc(no_inline)]
pub use mlx5_hca::{
    Actor, ActorId, Bell, Clock, ContextUses, Did, FabricSpec, Faults, ForeignDevice, LocalFabric, NicModel, NicParameters, Queue, Rule,
    Simulation, SoftOptions, Timing, Violation,
};
pub use mlx5_wire as wire;
pub use mmio::RegisterKind;
pub use mono_cq::MonoCq;
pub use mr::{Busy, Mr, OutOfBounds};
#[cfg(feature = "soft")]
pub use null::NullDevice;
pub use ops::{
    CompareSwap, Destination, FetchAdd, Inline, Operation, Payload, PostError, RcOperation, Read, Segments, Send, SendImm, Sge,
    UdOperation, UdSend, UdSendImm, Write, WriteImm,
};
pub use qp::{Connected, Datagram, Qp, ReceiveSource, Transport};
pub use rc_qp::RcQp;
pub use rq::PostReceiveError;
#[doc(no_inline)]
pub use shm::memfd::NoHugePages;
pub use sq::{Flags, Signal};
pub use srq::Srq;
pub use ud_qp::UdQp;
#[doc(no_inline)]
pub use wire::{
    ATOMIC_BYTES, Access, AddressVector, AsyncEvent, ConnectOptions, CqeOpcode, GRH_BYTES, MAX_DATAGRAM_BYTES, MAX_MESSAGE_BYTES, Syndrome,
};

#[cfg(test)]
mod tests;
