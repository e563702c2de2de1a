#![doc = include_str!("../README.md")]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("mlx5 needs 64-bit Linux: its devices, memfds and membarrier(2) exist nowhere else");

mod batch;
mod control;
mod cq;
mod device;
mod doorbell;
mod fast_map;
mod mmio;
mod mono_cq;
mod mr;
mod ops;
mod qp;
mod soft;
mod sq;
mod srq;
pub mod wire;

pub use batch::BlueflameBatch;
pub use control::CreateError;
pub use cq::{CompletionError, Cq, Cqe};
pub use device::{CompletionQueue, CqRef, Device, DeviceInfo, DeviceSpec, FabricSpec, NullOptions, OpenError, Pd, SoftOptions};
pub use fast_map::FastMap;
pub use mmio::RegisterKind;
pub use mono_cq::MonoCq;
pub use mr::{Access, Busy, Mr, OutOfBounds, RegisterError};
pub use ops::{Inline, MAX_MESSAGE_BYTES, Operation, Payload, Read, Segments, Sge, Write, WriteImm};
pub use qp::{ConnectError, ConnectOptions, DeviceKind, QpAddress, QpConfig, QpState, RcQp};
pub use soft::{Clock, LocalFabric, NullDevice};
pub use sq::{PostError, Signal};
pub use srq::{PostReceiveError, Srq};
pub use wire::{CqeOpcode, Syndrome};

#[cfg(test)]
mod tests;
