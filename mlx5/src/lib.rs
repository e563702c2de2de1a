//! A userspace driver for NVIDIA/Mellanox mlx5 devices that writes its own work queue elements, rings its own doorbells and polls its
//! own completion queues; and a **software HCA** that executes the same bytes, so that everything above it runs on any Linux machine.
//!
//! ```rust
//! use mlx5::{Device, EndpointConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open("soft")?; // or "mlx5_0"
//! let mut here = device.endpoint(EndpointConfig::default())?;
//! let mut there = device.endpoint(EndpointConfig::default())?;
//! here.connect(&there.address())?; // `address().to_bytes()` goes to another process by any means
//! there.connect(&here.address())?;
//! here.send(b"hello")?;
//! assert_eq!(there.recv()?, b"hello");
//! here.write(0, b"straight into the other's memory")?;
//! assert_eq!(here.fetch_add(64, 1)?, 0);
//! # Ok(())
//! # }
//! ```
//!
//! An `Endpoint` is a reliable connection with the queues and memory that it needs. Its calls block. The objects below it are public too;
//! use them to keep many operations in flight, or to put many queue pairs on one completion queue:
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
//! | `endpoint` | a connection in one value, for programs that move bytes and need no control over queues |
//! | `device` | opening a device; protection domains |
//! | `mr` | registered memory: never a `&[u8]`, because the device may write it |
//! | `ops` | operations as values: a verb over a payload |
//! | `queues` | queue pairs, their send and receive queues, shared receive queues: one path from an operation to a WQE, and the doorbell |
//! | `mmio` | the stores and barriers of a doorbell; no other module writes a register |
//! | `completions` | completion queues, plain or compressed; completions that go straight to the queue pair they belong to |
//! | `provider` | the control path: creates objects on the software HCA (`soft`) or without a device (`null`). No module above it depends on the kind of device |
//! | [`verbs`] | the control path on hardware, through libibverbs and libmlx5 |
//! | [`hca`] | the software HCA, package `mlx5-hca` |
//! | [`wire`] | the device's byte formats, package `mlx5-wire` |
//!
//! Each has a short example program that needs no NIC: `cargo run --release -p mlx5 --example NAME [DEVICE]`. The last two examples run on
//! the software HCA only. The others also run on a NIC, given its name.
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
//! ## Threads and forks
//!
//! A device and all objects made from it belong to one thread. A program with an open device may fork: its connections keep working,
//! whatever the child does with its own memory. The child must neither use nor drop the device, and ends with `exec` or `_exit`. On
//! hardware the child does not have the memory of `Pd::alloc`. On a soft device the child shares the device's memory, and no peer waits for
//! the parent because of it. `tests/fork.rs` tests this; docs/hardware.md states the requirements of kernels before 5.12.
//!
//! ## Events without a completion
//!
//! `Device::take_async_event` reports that a completion queue overran, that a queue pair or the device failed, or that the port went down
//! or came up. The object that an event names has failed by then. Check for events where the program waits for a completion that may never
//! arrive.
//!
//! ## Operations of a queue pair
//!
//! A payload is `()` (nothing), `Inline` (bytes copied into the WQE), an `Sge` (registered memory that the device gathers) or `(Inline, Sge)`.
//! An operation that a queue pair does not support does not compile. `A` is the access that the *peer's* region must allow.
//!
//! | queue pair | verb | payload | consumes a receive | `A` | WQE after `mlx5_wqe_ctrl_seg` |
//! |---|---|---|---|---|---|
//! | `RcQp` | `Send`, `SendImm` | any | yes | - | data |
//! | `RcQp` | `Write` | any | no | `REMOTE_WRITE` | `mlx5_wqe_raddr_seg`, data |
//! | `RcQp` | `WriteImm` | any | yes, of any size | `REMOTE_WRITE` | `mlx5_wqe_raddr_seg`, data |
//! | `RcQp` | `Read` | `Sge` (target) | no | `REMOTE_READ` | `mlx5_wqe_raddr_seg`, `mlx5_wqe_data_seg` |
//! | `RcQp` | `CompareSwap`, `FetchAdd` | `Sge` of 8 bytes (result) | no | `REMOTE_ATOMIC` | `mlx5_wqe_raddr_seg`, `mlx5_wqe_atomic_seg`, `mlx5_wqe_data_seg` |
//! | `UdQp` | `UdSend`, `UdSendImm` | any | yes | - | `mlx5_wqe_datagram_seg` of 48 bytes (`MLX5_EXTENDED_UD_AV`), data |
//!
//! "Data" is a `mlx5_wqe_inl_data_seg`, a `mlx5_wqe_data_seg`, or the first followed by the second; a message of length 0 has none. Local
//! memory that the device writes (targets, results, receives) needs `LOCAL_WRITE`. The local region of an operation belongs to the
//! protection domain of the local queue pair, and the remote region to that of the remote queue pair.
//!
//! | limit | value | source |
//! |---|---|---|
//! | message | 2^30 bytes; 0 is legal | PRM, `log_max_msg`; refused when posted |
//! | datagram | 4,096 bytes (`MAX_DATAGRAM_BYTES`) | the largest MTU; a longer one is a local length error; a NIC with a smaller path MTU takes less |
//! | inline bytes of an operation | `QpConfig::max_inline_data`, maximum 220 | this crate: a WRITE with 220 bytes is a WQE of 256 bytes, the size of one half of a BlueFlame register. One block of 64 bytes holds 28 (WRITE) or 44 (SEND) |
//! | buffers of an operation | one `Sge`, with or without inline bytes before it | this crate |
//! | buffers of a receive | 0 to 15, fixed when the queue is created | this crate |
//! | length of a buffer | a length of 0 is left out | a data segment of length 0 means 2^31 bytes to the device |
//! | operand of an atomic | 8 bytes, at a multiple of 8 | InfiniBand specification; refused when posted |
//! | support for atomics | `DeviceInfo::has_atomics` | on a device without it, posting an atomic and registering `REMOTE_ATOMIC` are refused |
//! | send queue | 1 to 32,768 blocks of 64 bytes, rounded up to a power of two, minimum 16; a WQE never wraps | the WQE index has 16 bits; `max_send_wqebb` of libmlx5 |
//! | receive queue, shared or own | 1 to 32,767 receives, rounded up to a power of two (less one, if shared) | the counter has 16 bits |
//! | completion queue | 1 to 2^22 entries, rounded up to a power of two | the consumer counter has 24 bits |
//! | queue pairs, regions, receive queues, completion queues of a device | 16,384; 65,534; 32,768; 65,536 | limits of the software HCA; a NIC has its own |
//!
//! ## Doorbells
//!
//! 1. The WQEs are stored to the send queue;
//! 2. `udma_to_device_barrier`;
//! 3. the doorbell record gets the new producer counter;
//! 4. `mmio_wc_start`;
//! 5. the BlueFlame register gets a whole WQE, or the first 8 bytes of the last one, in the half that the last doorbell on this register
//!    did not use, whichever queue pair rang it;
//! 6. `mmio_flush_writes`.
//!
//! This is the order of rdma-core's mlx5 provider (`post_send_db`). The device reads the WQEs when it sees the record, and the record when
//! it sees the register. So the WQEs must be visible before the record (2), and the record before the register (4). Two doorbells must not
//! be combined into one (6). On x86-64 stores to ordinary memory stay in order, so the first barrier binds the compiler only. Stores to
//! write-combining memory may be reordered up to an `sfence`, so the other two barriers are an `sfence`. On AArch64 they are `dmb oshst`
//! and `dsb st`. A soft device's register is ordinary memory, read by the thread that stored it: there program order is enough.
//!
//! | call | value stored to the register |
//! |---|---|
//! | `ring` | the WQE if it is the only new one and has at most 256 bytes, else 8 bytes |
//! | `ring_doorbell` | 8 bytes; the device reads the WQEs from memory |
//! | `ring_doorbell_bf` | the last WQE, also if several are new; 8 bytes if it is longer than 256 |
//! | `blueflame_batch` | the WQEs of the batch, if they have at most 256 bytes together, else 8 bytes. No driver is known to do so, and it has not run on a NIC |
//!
//! Where hardware has no BlueFlame register left (`RegisterKind::DoorbellOnly`), every call stores 8 bytes, as `ring_doorbell`. A software
//! HCA that is not strict reads the record only: its registers are not stored to (`RegisterKind::Unread`). Receives have no register:
//! `ring_receives` and `Srq::ring` store the doorbell record after the WQEs.
//!
//! ## Ordering contract
//!
//! This contract holds on a NIC. The software HCA may give stronger guarantees; a program must not rely on them.
//!
//! | verb | when the local bytes may be reused | when the peer may read the bytes | guarantee of the completion |
//! |---|---|---|---|
//! | `Send`, `SendImm` | inline: when `post` returns; gathered: with the completion | with the completion of the receive it consumed | the peer's device has taken the message |
//! | `WriteImm` | the same | the same | the same |
//! | `Write` | the same | with the completion of a receive that a *later* operation of this queue pair consumed | the peer's device has taken the bytes; its CPU may not see them yet |
//! | `Read` | its target: with the completion | - | the bytes are in the target |
//! | `CompareSwap`, `FetchAdd` | its result: with the completion | the same as for `Write` | the change is made, and the old value is in the result |
//! | `UdSend`, `UdSendImm` | the same as for `Send` | the same as for `Send` | the datagram has left; it may be lost |
//!
//! "The completion" is the first CQE polled for this operation or for a later one on the same queue pair: an unsignaled operation gives no
//! CQE, and is complete with a later one. The device owns a receive's buffers from the moment the receive is posted until its completion.
//!
//! **On one queue pair** operations start, take effect at the peer, and complete in posting order. So when the CQE of a WRITE with
//! immediate is polled, the bytes of all WRITEs before it are in memory. Receives of a queue are consumed in posting order. Those of a
//! queue pair's own queue also complete in that order. Those of a shared queue may complete in another order, and are identified by the
//! value posted with them.
//!
//! **READs and atomics** wait for an answer, but the operations posted after them do not. The device may gather a later operation's bytes
//! before the READ's bytes arrive, and a READ may return bytes that a later WRITE wrote. `Signal::fence` delays an operation until all
//! READs and atomics before it are complete.
//!
//! **A READ behind a WRITE** takes its bytes when those of the WRITE are visible to the peer's CPU, since no read passes a write on the bus
//! (without `Access::RELAXED_ORDERING`). So if the peer stores a word, executes a full fence, and then loads what the WRITE brings, it finds
//! that, or the READ finds the word, or both.
//!
//! **Not ordered**, even where it seems so:
//!
//! - operations of different queue pairs, also between the same two processes or to the same memory. To order two, poll the completion of the first,
//!   then post the second;
//! - completions of different queue pairs, in one completion queue or in several;
//! - completions of a queue pair's sends against those of its receives: the answer may be polled before the completion of the request. The
//!   completion, not the answer, releases the request's buffer;
//! - the bytes of one message: a visible last byte does not imply that the others are visible;
//! - atomics against loads and stores of the peer's CPU: a NIC's atomics are atomic only among themselves (`IBV_ATOMIC_HCA`).
//!
//! ## Threads
//!
//! A device belongs to the thread that opened it, with everything made from it: `Device`, `Pd`, `Mr`, `Cq`, `MonoCq`, `Srq`, `RcQp` and
//! `UdQp` are neither `Send` (a `compile_fail` test at each says so) nor `Sync`. Each thread opens its own device. Descriptions may go to
//! any thread: `DeviceSpec`, `QpAddress`, `Destination`, `Sge`, an address and an rkey.
//!
//! ```rust
//! # use mlx5::{Device, DeviceSpec, OpenError};
//! # fn main() -> Result<(), OpenError> {
//! fn goes_anywhere<T: Send + Sync>() {}
//! goes_anywhere::<(mlx5::QpAddress, mlx5::Destination, mlx5::Sge)>();
//!
//! let spec = DeviceSpec::default();
//! let thread = std::thread::spawn(move || Device::open(spec).map(|device| device.info().name));
//! assert!(thread.join().is_ok_and(|name| name.is_ok()));
//! # Ok(())
//! # }
//! ```
//!
//! ## Completions
//!
//! - A poll hands out each CQE once, in the order in which the device wrote them. When the poll returns, the device may reuse their
//!   entries. `Cqe` reads its fields in place.
//! - Two features are off by default: compression (`CqConfig::compression`), whose sessions a poll hands out as ordinary CQEs; and short
//!   received data in the CQE instead of the buffer (`QpConfig::scatter_to_cqe`), which `Cqe::inline_data` returns.
//! - Pass the CQE of a send to `complete` of its queue pair, or to `complete_each`, which names every operation it finishes. Pass the CQE
//!   of a receive to `complete_receive` of its queue pair or of its shared queue. The WQE is not reused before that.
//! - `Signal::Always` asks for a CQE. With `Signal::Reclaim` a successful operation is silent, except at least once in a quarter of the
//!   queue, or in 8 WQEBBs if that is more, so that the queue never fills up with work that no completion will release. A failure is
//!   never silent.
//! - A completion queue that overruns is dead, and so are its queue pairs. It needs an entry for every completion that may arrive before
//!   the next poll. After an error these are all outstanding WQEs, including the NOPs before the ring's end: `send_capacity` of each send
//!   queue always suffices.
//! - Completions that are in a completion queue when their queue pair is dropped stay there, with the number `wire::NO_QPN`, because the
//!   next queue pair may get the old number. They complete nothing but receives of a shared queue, which go back there as usual.
//! - To sleep, poll until the queue is empty, call `arm`, then `Device::wait`. A completion that arrives in between ends the wait at once.
//!   Another thread ends it with `Device::waker`. To sleep on a device and on other sources together, such as an `ipc` server, use
//!   `shm::sleep::wait`.
//!
//! ## Errors
//!
//! The driver refuses every mistake that it can detect with a typed error, and writes nothing: `CreateError`, `RegisterError`,
//! `ConnectError`, `PostError`, `PostReceiveError`. A mistake that the device detects is a `CompletionError` with the `Syndrome`:
//!
//! | syndrome | at | cause |
//! |---|---|---|
//! | `LocalProtection` | requester, responder | key, range, access or domain of a local buffer |
//! | `LocalLength` | requester, responder | a datagram above the MTU; a message longer than its receive |
//! | `LocalQpOperation` | requester | a WQE that cannot be understood; strict mode: a rule was broken |
//! | `RemoteAccess` | requester | rkey, range, access or domain at the peer |
//! | `RemoteInvalidRequest` | requester | a SEND longer than the peer's receive |
//! | `RemoteOperation` | requester | the peer's receive names memory that its device may not write |
//! | `RnrRetryExceeded` | requester | no receive posted, `rnr_retry` times (7: no limit) |
//! | `TransportRetryExceeded` | requester | the peer is dead, closed, failed, or not connected to this queue pair |
//! | `WorkRequestFlushed` | both | the queue pair had already failed |
//!
//! The first error moves the queue pair to `QpState::Error`. Every operation posted after the failed one is flushed with an error
//! completion, and so is every receive of the queue pair's own queue. Receives of a shared queue stay there. Operations before the failed
//! one have succeeded. Recovery needs a new queue pair. On the software HCA `CompletionError::vendor_text` gives the cause. A libibverbs
//! call that the kernel refuses is a `CallError` with the call's name, its errno and a remedy. A device that cannot be opened is a
//! `VerbsError`.
//!
//! ## Progress and death
//!
//! Hardware needs no help from the program. The software HCA has no thread of its own: it runs inside doorbells, inside polls that find
//! their queue empty, and inside `Device::wait` and `Device::progress`. A program that calls none of these retries no operation and takes
//! in no message. Its peers can still write, read and send to its memory, as long as it has receives posted. A sender waits once 128
//! messages of a queue pair have not been taken in.
//!
//! A killed peer does not answer: operations towards it fail with `TransportRetryExceeded` about 10 ms later
//! (`SoftOptions::dead_peer_timeout_ns`), and no other operations fail. The memory of a stopped peer can still be written and read.
//! Dropping a region or a queue pair waits at most 50 ms for a peer that is using it. After that its memory is never reused, and is counted
//! (`DeviceInfo::quarantined`).
//!
//! ## Time, strict mode, faults
//!
//! These are options of `SoftOptions`, and `DeviceInfo::modes` names those in effect:
//!
//! - `timing`: operations are executed in the doorbell (`Immediate`), a number of ns later (`Delay`), or when a model of the NICs schedules
//!   them (`Model`). In all but the first, buffers are gathered late, so that a buffer reused too early sends the wrong bytes, as on a NIC.
//!   Use it in tests.
//! - `clock`: the system's, or a clock that a test advances. A `Simulation` runs programs in virtual time: the same seed gives the same run
//!   and the same `trace_hash`.
//! - `strict`: `Device::soft().take_violations()` reports the mistakes that a NIC would punish silently: each `Rule`, from a doorbell
//!   record that was not written to a source buffer that changed too early. It costs about three times the instructions, and cannot detect
//!   a missing barrier.
//! - `faults`: delays, missing receives, completions of different queue pairs swapped, an error at the nth operation, peers that stop
//!   answering; all from one seed.
//!
//! ## What differs from a NIC
//!
//! A device is `DeviceSpec::Soft`, the software HCA; `DeviceSpec::Verbs`, hardware that libibverbs finds; or `DeviceSpec::Null`, which
//! executes nothing and serves to measure and test the driver. `docs/hardware.md` of the repository states the requirements of hardware,
//! and its differences. The driver has run over the real libibverbs and libmlx5, with the software HCA under them, and not on a NIC. On the
//! software HCA:
//!
//! - in immediate time an operation that does not have to wait is complete when `ring` returns;
//! - atomics are atomic towards the peer's CPU too, and memory of other allocators cannot be their target;
//! - a remote access error fails the requester's queue pair only; a NIC fails both;
//! - the CQE of a receive is written during a poll by its owner;
//! - only completions of receives are compressed, and only received data is put into CQEs;
//! - datagrams have no GRH, and are lost if more than 32 wait from one device to another;
//! - `RELAXED_ORDERING` and packet sequence numbers have no effect.
//!
//! `docs/software-hca.md` of the repository describes how it works.
//!
//! Source of the formats: NVIDIA, *Adapters Programmer's Reference Manual*; `infiniband/mlx5dv.h` of rdma-core.

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
mod device;
mod endpoint;
mod error;
mod mmio;
mod mr;
mod ops;
mod pd;
mod provider;
mod queues;
pub mod verbs;

pub use address::{DeviceKind, QpAddress};
pub use completions::cq::Cq;
pub use completions::cqe::{CompletionError, Cqe};
pub use completions::fast_map::FastMap;
pub use completions::mono_cq::{Found, MonoCq};
pub use config::{CqConfig, NullOptions, QpConfig, QpState};
pub use device::{Device, DeviceSpec, Pd};
pub use endpoint::{Endpoint, EndpointAddress, EndpointConfig, EndpointError};
pub use error::{ConnectError, CreateError, OpenError, RegisterError};
pub use mlx5_hca as hca;
#[doc(no_inline)]
pub use mlx5_hca::{Clock, DeviceInfo, FabricSpec, Faults, LocalFabric, Pages, Queue, Rule, SoftOptions, Timing, Violation};
#[doc(no_inline)]
pub use mlx5_sim::{Actor, ActorId, Bell, ContextUses, Did, ForeignDevice, NicModel, NicParameters, Simulated, Simulation};
pub use mlx5_wire as wire;
pub use mmio::RegisterKind;
pub use mr::{Busy, Mr, OutOfBounds};
pub use ops::{
    CompareSwap, Destination, FetchAdd, Inline, Operation, Payload, PostError, RcOperation, Read, Segments, Send, SendImm, Sge,
    UdOperation, UdSend, UdSendImm, Write, WriteImm,
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
pub use shm::memfd::NoHugePages;
#[doc(no_inline)]
pub use wire::{
    ATOMIC_BYTES, Access, AddressVector, AsyncEvent, ConnectOptions, CqeOpcode, GRH_BYTES, MAX_DATAGRAM_BYTES, MAX_MESSAGE_BYTES, Syndrome,
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
        check::<crate::EndpointError>();
        check::<crate::OpenError>();
        check::<crate::PostError>();
        check::<crate::PostReceiveError>();
        check::<crate::RegisterError>();
        check::<crate::verbs::VerbsError>();
    }
}
