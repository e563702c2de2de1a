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
//! An `Endpoint` is a reliable connection with all it needs, and its calls wait. What it is made of is there too, for many operations at once and
//! many queue pairs on one queue:
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
//! | `endpoint` | a connection in one value, for who wants to move bytes |
//! | `device` | opening a device; protection domains |
//! | `mr` | registered memory: never a `&[u8]`, because the device may write it |
//! | `ops` | operations as values: a verb over a payload |
//! | `sq` | the ring they become WQEs in: one push path |
//! | `doorbell`, `mmio` | the only place that tells the device, the order in which it learns, and the stores and barriers that make it |
//! | `batch` | several WQEs in one store to the register (unproven on a NIC, used by nothing else) |
//! | `rq`, `srq` | receives: the ring of one queue pair, the linked list that many share |
//! | `cq`, `cq_ring` | completions, plain or compressed |
//! | `mono_cq`, `fast_map` | completions that go straight to the queue pair they belong to |
//! | `qp`, `rc_qp`, `ud_qp` | queue pairs: what both kinds share, reliable connections, unreliable datagrams |
//! | `provider` | the control path; nothing above it knows which device it drives |
//! | [`verbs`] | hardware: devices behind libibverbs and libmlx5 |
//! | `soft` | the software HCA, package `mlx5-hca`: also its options, and devices with the programs that drive them in virtual time |
//! | `null` | queues and nothing below them, for measuring and testing |
//! | [`wire`] | the device's byte formats, package `mlx5-wire` |
//!
//! One short program for each, with nothing to install: `cargo run --release -p mlx5 --example NAME [DEVICE]`. The last two are about the software HCA alone;
//! the others run on a NIC as they are, with its name.
//!
//! | example | shows |
//! |---|---|
//! | `one_sided` | WRITE, WRITE with immediate and READ towards a process that is stopped all the while |
//! | `send` | SEND and SEND with immediate, into a receive queue and a shared one, gathered and scattered |
//! | `atomics` | a counter and a lock that two threads share in a third one's memory |
//! | `datagrams` | one queue pair talks to many; what is lost |
//! | `completions` | one completion for many operations, sleeping until one comes, a compressed session |
//! | `doorbells` | each way to ring, on a device that executes nothing and on one that checks |
//! | `pingpong` | two processes, messages back and forth |
//! | `strict` | three mistakes, made and named |
//! | `simulation` | a server and its clients in virtual time |
//!
//! ## Threads and forks
//!
//! A device and all that is made from it belong to one thread. A program that has one open may fork: its connections go on, whatever the child does with
//! memory of its own. The child must leave the device alone, also not drop it: it ends by `exec` or `_exit`. Memory of `Pd::alloc` on hardware is not in
//! it; what a soft device has is shared with it and keeps no peer waiting for its parent. (`tests/fork.rs`; docs/hardware.md says what kernels before
//! 5.12 need.)
//!
//! ## What no completion tells
//!
//! `Device::take_async_event` says that a completion queue had no room, that a queue pair or the device broke down, that the port went down or came up.
//! What an event concerns has ended already: look for one where you wait for a completion that may never come.
//!
//! ## What a queue pair takes
//!
//! A payload is `()` (nothing), `Inline` (bytes copied into the WQE), an `Sge` (registered memory that the device gathers) or `(Inline, Sge)`.
//! What a queue pair does not take does not compile. `A` is the access that the *peer's* region must allow.
//!
//! | queue pair | verb | payload | takes a receive | `A` | WQE behind `mlx5_wqe_ctrl_seg` |
//! |---|---|---|---|---|---|
//! | `RcQp` | `Send`, `SendImm` | any | yes | - | data |
//! | `RcQp` | `Write` | any | no | `REMOTE_WRITE` | `mlx5_wqe_raddr_seg`, data |
//! | `RcQp` | `WriteImm` | any | yes, of any size | `REMOTE_WRITE` | `mlx5_wqe_raddr_seg`, data |
//! | `RcQp` | `Read` | `Sge` (target) | no | `REMOTE_READ` | `mlx5_wqe_raddr_seg`, `mlx5_wqe_data_seg` |
//! | `RcQp` | `CompareSwap`, `FetchAdd` | `Sge` of 8 bytes (result) | no | `REMOTE_ATOMIC` | `mlx5_wqe_raddr_seg`, `mlx5_wqe_atomic_seg`, `mlx5_wqe_data_seg` |
//! | `UdQp` | `UdSend`, `UdSendImm` | any | yes | - | `mlx5_wqe_datagram_seg` of 48 bytes (`MLX5_EXTENDED_UD_AV`), data |
//!
//! "Data" is a `mlx5_wqe_inl_data_seg`, a `mlx5_wqe_data_seg`, or one behind the other; none for a message of length 0. Local memory that the
//! device writes (targets, results, receives) needs `LOCAL_WRITE`. Both regions of an operation are of the protection domain of the queue pair at
//! their end.
//!
//! | limit | value | whose |
//! |---|---|---|
//! | message | 2^30 bytes; 0 is legal | PRM, `log_max_msg`; refused when posted |
//! | datagram | 4,096 bytes (`MAX_DATAGRAM_BYTES`) | the largest MTU; a local length error, and less on a NIC whose path has a smaller one |
//! | inline bytes of an operation | `QpConfig::max_inline_data`, at most 220 | ours: with them a WRITE is 256 bytes long, which is what one half of a BlueFlame register takes. In one block of 64 bytes: 28 (WRITE), 44 (SEND) |
//! | buffers of an operation | one `Sge`, with inline bytes in front of it or not | ours |
//! | buffers of a receive | 0 to 15, fixed when the queue is made | ours |
//! | length of a buffer | a length of 0 is left out | a data segment of length 0 means 2^31 bytes to the device |
//! | operand of an atomic | 8 bytes, at a multiple of 8 | InfiniBand specification; refused when posted |
//! | atomics at all | `DeviceInfo::has_atomics` | without, posting one and registering `REMOTE_ATOMIC` are refused |
//! | send queue | 1 to 32,768 blocks of 64 bytes, rounded up to a power of two, 16 at least; a WQE never wraps | the WQE index has 16 bits; `max_send_wqebb` of libmlx5 |
//! | receive queue, shared or own | 1 to 32,767 receives, rounded up to a power of two (less one, if shared) | the counter has 16 bits |
//! | completion queue | 1 to 2^22 entries, rounded up to a power of two | the consumer counter has 24 bits |
//! | queue pairs, regions, receive queues, completion queues of a device | 16,384; 65,534; 32,768; 65,536 | the software HCA's; `Device::info` has the capabilities of the device at hand |
//!
//! ## Doorbells
//!
//! 1. The WQEs are stored to the send queue;
//! 2. `udma_to_device_barrier`;
//! 3. the doorbell record gets the new producer counter;
//! 4. `mmio_wc_start`;
//! 5. the BlueFlame register gets a whole WQE, or the first 8 bytes of the last one, in the half that was not used last time, by whichever of the
//!    queue pairs that share it;
//! 6. `mmio_flush_writes`.
//!
//! This is what rdma-core's mlx5 provider does (`post_send_db`). The argument: the device reads the WQEs when it sees the record, and the record
//! when it sees the register, so neither may become visible before what it announces (2, 4); and two doorbells must not be combined into one (6). On
//! x86-64 stores to ordinary memory stay in order, so the first barrier binds the compiler only, while stores to write-combining memory overtake
//! others up to an `sfence`, so the other two are that. On AArch64 they are `dmb oshst` and `dsb st`. A soft device's register is ordinary memory
//! read by the thread that stored it: there program order is enough.
//!
//! | call | the register gets |
//! |---|---|
//! | `ring` | the WQE if it is the only new one and has at most 256 bytes, else 8 bytes |
//! | `ring_doorbell` | 8 bytes; the device reads the WQEs from memory |
//! | `ring_doorbell_bf` | the last WQE, however many are new; 8 bytes if it is longer than 256 |
//! | `blueflame_batch` | the WQEs of the batch, if they have at most 256 bytes together, else 8 bytes. No driver is known to do so, and it has not run on a NIC |
//!
//! Where hardware has no BlueFlame register left (`RegisterKind::DoorbellOnly`) all of them are as `ring_doorbell`. A software HCA that is not strict
//! goes by the record: its registers get nothing (`RegisterKind::Unread`). Receives have no register: `ring_receives` and `Srq::ring` store the doorbell record, behind the WQEs.
//!
//! ## Ordering contract
//!
//! What holds on a NIC; the software HCA may do more, and code that relies on it is wrong.
//!
//! | verb | the local bytes are yours again | the peer may read what it brought | the completion proves |
//! |---|---|---|---|
//! | `Send`, `SendImm` | inline: when `post` returns; gathered: with the completion | with the completion of the receive it took | the peer's device has taken it |
//! | `WriteImm` | the same | the same | the same |
//! | `Write` | the same | with the completion of a receive that a *later* operation of this queue pair took | the peer's device has taken it; not that its CPU sees it |
//! | `Read` | its target: with the completion | - | the bytes are in the target |
//! | `CompareSwap`, `FetchAdd` | its result: with the completion | as of `Write` | the change is made, and the old value is in the result |
//! | `UdSend`, `UdSendImm` | as `Send` | as `Send` | it has left, and nothing more |
//!
//! "The completion" is the first CQE, polled, of this operation or of a later one on the same queue pair: an unsignaled operation gives none of its
//! own, and is complete with a later one. A receive's buffers are the device's from the moment it is posted until its completion.
//!
//! **On one queue pair** operations start, take effect at the peer, and complete in posting order. So when the CQE of a WRITE with immediate is
//! polled, the bytes of all WRITEs before it are there. Receives of a queue are taken in posting order; those of a queue pair's own queue complete in
//! that order too, those of a shared one may not, and are told apart by what was posted with them.
//!
//! **READs and atomics** wait for an answer, and what is posted behind them does not wait with them: it may be gathered before their bytes are
//! here, and a READ may bring what a WRITE behind it wrote. `Signal::fence` makes an operation start only when the READs and atomics before it are
//! complete.
//!
//! **Not ordered**, whatever it looks like:
//!
//! - operations of different queue pairs, also between the same two processes or to the same memory. To order two, poll the completion of the first,
//!   then post the second;
//! - completions of different queue pairs, in one completion queue or in several;
//! - completions of a queue pair's sends against those of its receives: the answer may be polled before the completion of the request. The answer
//!   does not give the request's buffer back, the completion does;
//! - the bytes of one message: seeing the last one says nothing of the others;
//! - atomics against loads and stores of the peer's CPU, which a NIC's are not atomic towards (`IBV_ATOMIC_HCA`).
//!
//! ## Threads
//!
//! A device belongs to the thread that opened it, with everything made from it: `Device`, `Pd`, `Mr`, `Cq`, `MonoCq`, `Srq`, `RcQp` and `UdQp` are not
//! `Send` (a `compile_fail` test at each says so), nor `Sync`. Each thread opens its own device. What describes things may go anywhere: `DeviceSpec`,
//! `QpAddress`, `Destination`, `Sge`, an address and an rkey.
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
//! - A poll hands out each CQE once, in the order the device wrote them; the entries are the device's again when it returns. What `Cqe` shows is
//!   read in place.
//! - Two things are off unless asked for: compression (`CqConfig::compression`), whose sessions come out of a poll as any other CQEs; and short
//!   received data in the CQE instead of the buffer (`QpConfig::scatter_to_cqe`), which `Cqe::inline_data` gives.
//! - The CQE of a send goes to `complete` of its queue pair, or to `complete_each`, which names every operation it finishes; that of a receive to
//!   `complete_receive` of its queue pair or of its shared queue. Until then the entry is not used again.
//! - `Signal::Always` asks for a CQE. With `Signal::Reclaim` success is silent except at least once in a quarter of the queue, so that it never
//!   fills up with work whose completion nobody announces. Failure is never silent.
//! - A completion queue that overruns is dead, and its queue pairs with it. It needs an entry for everything that may complete before the next poll; on
//!   an error that is every WQE outstanding, the NOPs in front of the ring's end included: `send_capacity` of each send queue always suffices.
//! - Completions of a queue pair that are in a queue when it is dropped stay there, with the number `wire::NO_QPN`: its own may be the next one's by
//!   then. They complete nothing but receives of a shared queue, which go back there as any others.
//! - To sleep: poll until it is empty, `arm`, `Device::wait`. A completion in between ends the wait at once, and so does another thread with
//!   `Device::waker`. On a device and on other things, such as an
//!   `ipc` server: `shm::sleep::wait`.
//!
//! ## Errors
//!
//! What the driver can know to be wrong is refused with a typed error, and nothing is written: `CreateError`, `RegisterError`, `ConnectError`,
//! `PostError`, `PostReceiveError`. What the device finds is a `CompletionError` with the `Syndrome`:
//!
//! | syndrome | at | cause |
//! |---|---|---|
//! | `LocalProtection` | requester, responder | key, range, access or domain of a local buffer |
//! | `LocalLength` | requester, responder | a datagram above the MTU; a message longer than its receive |
//! | `LocalQpOperation` | requester | a WQE that cannot be understood; strict mode: a rule was broken |
//! | `RemoteAccess` | requester | rkey, range, access or domain at the peer |
//! | `RemoteInvalidRequest` | requester | a SEND longer than the peer's receive |
//! | `RemoteOperation` | requester | the peer's receive names memory it may not write |
//! | `RnrRetryExceeded` | requester | no receive posted, `rnr_retry` times (7: without end) |
//! | `TransportRetryExceeded` | requester | the peer is dead, closed, failed, or not connected to this queue pair |
//! | `WorkRequestFlushed` | both | the queue pair failed before |
//!
//! The first error moves the queue pair to `QpState::Error`, and everything behind it is flushed, with an error completion each; its own receives too,
//! while those of a shared queue stay there. Operations before it have succeeded. There is no way back but a new queue pair.
//! `CompletionError::vendor_text` says more on the software HCA. A call of libibverbs that the kernel refuses is a `CallError` with the call's name, its
//! errno, and what to do; a device that cannot be opened is a `VerbsError`.
//!
//! ## Progress and death
//!
//! Hardware needs no help. The software HCA has no thread: it runs inside doorbells, inside polls that find their queue empty, inside `Device::wait` and `Device::progress`. A
//! program that does none of these makes no retries, and takes in no messages. It need not run to be written, read or sent to, as long as it has
//! receives posted; behind 128 messages of a queue pair that it has not looked at, the sender waits.
//!
//! A peer that was killed answers nothing: operations towards it fail with `TransportRetryExceeded` about 10 ms later
//! (`SoftOptions::dead_peer_timeout_ns`), and no others do. A peer that is merely stopped can still be written and read. Dropping a region or a queue
//! pair waits at most 50 ms for a peer in the middle of using it; then its memory is never used again, and counted (`DeviceInfo::quarantined`).
//!
//! ## Time, strict mode, faults
//!
//! All options of `SoftOptions`, and all in `DeviceInfo::modes`:
//!
//! - `timing`: operations are executed in the doorbell (`Immediate`), some ns later (`Delay`), or when a model of the NICs says (`Model`). In all but the
//!   first, buffers are gathered late, so that one reused too early is sent wrongly, as a NIC would; test with it.
//! - `clock`: the system's, or one that a test moves. A `Simulation` runs programs in virtual time: the same seed gives the same run, and the same
//!   `trace_hash`.
//! - `strict`: what a NIC would punish without a word is found and named by `Device::soft().take_violations()`: each `Rule`, from a doorbell record not written to a
//!   source buffer changed too early. It costs about three times the instructions, and cannot see a missing barrier.
//! - `faults`: delays, missing receives, completions of different queue pairs swapped, an error at the nth operation, peers that stop to answer; from
//!   one seed.
//!
//! ## What differs from a NIC
//!
//! A device is `DeviceSpec::Soft`, the software HCA; `DeviceSpec::Verbs`, hardware that libibverbs finds; or `DeviceSpec::Null`, which executes
//! nothing and serves to measure and test the driver. `docs/hardware.md` of the repository says what hardware needs, and what is different
//! there. It has run under the real libibverbs and libmlx5, with the software HCA below them, and not on a NIC. On the software HCA:
//!
//! - in immediate time an operation that need not wait is complete when `ring` returns;
//! - atomics are atomic towards the peer's CPU too, and memory of other allocators cannot be their target;
//! - a remote access error fails the requester's queue pair only; a NIC fails both;
//! - the CQE of a receive comes to be in a poll of its owner;
//! - only completions of receives are compressed, and only received data is put into CQEs;
//! - datagrams have no GRH, and are lost if more than 32 wait from one device to another;
//! - `RELAXED_ORDERING` and packet sequence numbers mean nothing.
//!
//! `docs/software-hca.md` of the repository says how it works.
//!
//! Source of the formats: NVIDIA, *Adapters Programmer's Reference Manual*; `infiniband/mlx5dv.h` of rdma-core.

// The code of the README compiles and runs, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

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

/// Errors go to other threads, and `?` makes a `Box<dyn Error + Send + Sync>` of each.
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
