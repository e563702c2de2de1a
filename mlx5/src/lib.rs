//! A userspace driver for NVIDIA/Mellanox mlx5 devices that writes its own work queue elements,
//! rings its own doorbells and polls its own completion queues; and a **software HCA** that
//! executes the same bytes, so that everything above it runs on any Linux machine.
//!
//! ```rust
//! use mlx5::{Access, ConnectOptions, Device, Inline, QpConfig, Signal, WriteImm};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open("soft")?; // one per thread
//! let pd = device.alloc_pd()?;
//! let mut send_cq = device.create_cq(64)?;
//! let mut recv_cq = device.create_mono_cq(64)?;
//! let mut srq = pd.create_srq(32, 0)?;
//! let mut qp = pd.create_qp(&send_cq, &recv_cq, &srq, &QpConfig::default())?;
//! recv_cq.register(qp.qpn(), "the value that comes with each completion of this queue pair");
//! let mr = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//!
//! // A queue pair may be its own peer; two processes exchange `qp.address()` and the region's address and rkey.
//! qp.connect(&qp.address(), &ConnectOptions::default())?;
//! srq.post(&[], 0)?;
//! srq.ring();
//! qp.post(&WriteImm { addr: mr.addr(), rkey: mr.rkey(), imm: 42, payload: Inline(b"hello") }, Signal::Always, 0)?;
//! qp.ring();
//!
//! let mut arrived = None;
//! recv_cq.poll(1, |_, cqe| arrived = Some((cqe.imm(), cqe.byte_count())));
//! assert_eq!(arrived, Some((42, 5)));
//! send_cq.poll(1, |cqe| assert!(cqe.result().is_ok() && qp.complete(&cqe).is_some()));
//! # Ok(())
//! # }
//! ```
//!
//! ## A tour, in the order data flows
//!
//! | module | what |
//! |---|---|
//! | `device` | opening a device; protection domains |
//! | `mr` | registered memory: never a `&[u8]`, because the device may write it |
//! | `ops` | operations as values: a verb over a payload |
//! | `queues` | queue pairs, their send and receive queues, shared receive queues: one path from an operation to a WQE, and the doorbell |
//! | `mmio` | the stores and barriers of a doorbell; no other module writes a register |
//! | `completions` | completion queues, plain or compressed; completions that come with the value registered for their queue pair |
//! | `control` | the handle by which every object holds its device, and the hook that calls a device that makes no progress by itself |
//! | `provider` | the control path: creates objects on the software HCA (`soft`); a null device (`null`) has the same objects and executes nothing |
//! | [`verbs`] | the control path on hardware, through libibverbs and libmlx5 |
//! | [`hca`] | the software HCA, package `mlx5-hca` |
//! | [`wire`] | the device's byte formats, package `mlx5-wire` |
//!
//! The example programs are short, and need no NIC:
//! `cargo run --release -p mlx5 --example NAME [DEVICE]`. The last two examples run on the software
//! HCA only. The others also run on a NIC, given its name.
//!
//! | example | shows |
//! |---|---|
//! | `one_sided` | WRITE, WRITE with immediate and READ towards a process that stays stopped |
//! | `send` | SEND and SEND with immediate, into a receive queue and a shared one, gathered and scattered |
//! | `atomics` | a counter and a lock in the memory of a third thread, shared by two threads |
//! | `datagrams` | one queue pair that talks to many, and the datagrams that are lost |
//! | `completions` | one completion for many operations, sleeping until a completion arrives, a compressed session |
//! | `doorbells` | each way to ring, on a device that executes nothing and on a device that checks |
//! | `pingpong` | a message exchange between two processes |
//! | `strict` | three mistakes, and the rules that strict mode reports for them |
//! | `simulation` | a server and its clients in virtual time |
//!
//! [`contract`] has the rules: threads and forks, limits, doorbells, the ordering contract, errors,
//! progress, and what differs from a NIC.
//!
//! Source of the formats: NVIDIA, *Adapters Programmer's Reference Manual*; `infiniband/mlx5dv.h`
//! of rdma-core.

// The README's code compiles and runs as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("mlx5 needs 64-bit Linux: its devices, memfds and membarrier(2) exist nowhere else");

// Lets the unit tests share code with the integration tests.
#[cfg(test)]
extern crate self as mlx5;

mod address;
mod completions;
mod config;
mod control;
mod device;
mod error;
mod mmio;
mod mr;
mod ops;
mod pd;
mod provider;
mod queues;
pub mod verbs;

#[doc = include_str!("contract.md")]
pub mod contract {}

pub use address::{DeviceKind, QpAddress};
pub use completions::cq::Cq;
pub use completions::cqe::{CompletionError, Cqe};
pub use completions::fast_map::FastMap;
pub use completions::mono_cq::{Found, MonoCq};
pub use config::{CqConfig, NullOptions, QpConfig, QpState};
#[doc(no_inline)]
pub use copyrpc_shm::memfd::NoHugePages;
pub use device::{Device, DeviceSpec, Pd};
pub use error::{ConnectError, CreateError, OpenError, RegisterError};
pub use mlx5_hca as hca;
#[doc(no_inline)]
pub use mlx5_hca::sim::{
    Actor, ActorId, Bell, ContextUses, Did, ForeignDevice, NicModel, NicParameters, Simulated,
    Simulation,
};
#[doc(no_inline)]
pub use mlx5_hca::{
    BadNetwork, Clock, DeviceInfo, Engine, FabricSpec, Faults, LocalFabric, PacketCounters, Pages,
    Queue, RoceOptions, Rule, SoftOptions, Timing, Violation,
};
pub use mlx5_wire as wire;
pub use mmio::RegisterKind;
pub use mr::{Busy, Mr, OutOfBounds};
pub use ops::{
    CompareSwap, Destination, FetchAdd, Inline, Operation, Payload, PostError, RcOperation, Read,
    Segments, Send, SendImm, Sge, UdOperation, UdSend, UdSendImm, Write, WriteImm,
};
pub use provider::null::NullDevice;
pub use queues::batch::BlueflameBatch;
pub use queues::qp::{Connected, Datagram, Qp, ReceiveSource, Transport};
pub use queues::rc_qp::RcQp;
pub use queues::rq::PostReceiveError;
pub use queues::sq::{Flags, Signal};
pub use queues::srq::Srq;
pub use queues::ud_qp::UdQp;
#[doc(no_inline)]
pub use wire::{
    ATOMIC_BYTES, Access, AddressVector, AsyncEvent, ConnectOptions, CqeOpcode, GRH_BYTES,
    MAX_DATAGRAM_BYTES, MAX_MESSAGE_BYTES, Syndrome,
};

#[cfg(test)]
mod tests;

/// Every error can cross threads, and `?` converts it to `Box<dyn Error + Send + Sync>`.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::CompletionError>();
        check::<crate::ConnectError>();
        check::<crate::CreateError>();
        check::<crate::OpenError>();
        check::<crate::PostError>();
        check::<crate::PostReceiveError>();
        check::<crate::RegisterError>();
        check::<crate::verbs::VerbsError>();
    }
}
