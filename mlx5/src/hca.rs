//! The software HCA below another driver, for example the vendor's own: the queues are in that driver's memory, at addresses it gives,
//! and its doorbells are plain stores that nobody tells the HCA about. [`Hca::poll`] looks at the doorbell records instead.
//!
//! What is created here is what a driver's kernel half asks the firmware for (PRM "Commands": CREATE_CQ, CREATE_QP, …); the bytes in the
//! queues are those of [`wire`](crate::wire). The HCA is the one of [`Device`](crate::Device): one process of one user each, meeting in a
//! directory. In a fabric of these, all devices are one port with one LID: the upper 10 bits of a queue pair number are the
//! [`seat`](Hca::seat) of the device that has it, so the number alone says where it is.
//!
//! Receive queues are copied, WQE by WQE, into memory that peers reach, so a SEND needs nothing of the target but a receive that its
//! `poll` has seen; after that it completes also if the target is stopped. Payload goes straight to and from the programs' own memory by
//! the kernel's cross-process copy. Atomics are executed by the owner of the memory, in its `poll`.

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;

use crate::control::CreateError;
use crate::device::{FabricSpec, OpenError, SoftOptions};
use crate::mr::{Access, RegisterError};
use crate::qp::ConnectOptions;
use crate::soft::{self, Clock, Faults, Timing};
use crate::wire::AddressVector;

/// Largest seat: 10 bits of a QPN, all ones excepted.
pub const MAX_SEAT: u16 = (1 << 10) - 2;

/// The port that all devices of a fabric are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its LID; 0 on RoCE, where the GID alone names it.
    pub lid: u16,
    /// Its GID.
    pub gid: [u8; 16],
}

impl Port {
    /// Whether datagrams with this vector get here.
    pub(crate) fn is_at(&self, vector: &AddressVector) -> bool {
        if self.lid == 0 { vector.rgid == self.gid } else { vector.rlid == self.lid }
    }
}

/// Options of an [`Hca`].
#[derive(Clone, Debug)]
pub struct HcaOptions {
    /// Where its peers are; all of them are `Hca`s.
    pub fabric: FabricSpec,
    /// Their port.
    pub port: Port,
    /// After this long without an answer from a peer proven dead, its operations fail, in ns.
    pub dead_peer_timeout_ns: u64,
    /// When operations are executed.
    pub timing: Timing,
    /// Where retry times come from.
    pub clock: Clock,
    /// Faults to make.
    pub faults: Faults,
}

/// A completion queue's memory: `entries` (a power of two) CQEs of `cqe_bytes` (64 or 128), every `op_own` with the opcode 0xf, and the
/// two words of the doorbell record, consumer and arm.
#[derive(Clone, Copy, Debug)]
pub struct CqMemory {
    /// The first entry.
    pub buffer: NonNull<u8>,
    /// Entries.
    pub entries: u32,
    /// Bytes of each.
    pub cqe_bytes: u32,
    /// Whether CQEs may be compressed.
    pub compression: bool,
    /// The doorbell record, 8-aligned.
    pub record: NonNull<[AtomicU32; 2]>,
}

/// A receive queue's memory: `wqe_cnt` WQEs (a power of two) of `stride` bytes, and the word that counts what was posted. In a shared
/// receive queue every WQE starts with its next segment.
#[derive(Clone, Copy, Debug)]
pub struct RqMemory {
    /// The first WQE.
    pub buffer: NonNull<u8>,
    /// WQEs.
    pub wqe_cnt: u32,
    /// Bytes of each, a power of two of at least 16.
    pub stride: u32,
    /// The receive word of the doorbell record.
    pub record: NonNull<AtomicU32>,
}

/// A send queue's memory: `wqe_cnt` WQEBBs of 64 bytes (0, or a power of two), and the word that counts what was posted.
#[derive(Clone, Copy, Debug)]
pub struct SqMemory {
    /// The first WQEBB.
    pub buffer: NonNull<u8>,
    /// WQEBBs.
    pub wqe_cnt: u32,
    /// The send word of the doorbell record.
    pub record: NonNull<AtomicU32>,
}

/// Transport service of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Connected,
    /// Unreliable datagrams.
    Datagram,
}

/// Where a queue pair takes its receives.
#[derive(Clone, Copy, Debug)]
pub enum Receives {
    /// A shared receive queue.
    Shared(u32),
    /// A queue of its own.
    Own(RqMemory),
    /// Nowhere: messages that need one find the receiver not ready.
    None,
}

/// A queue pair to be made.
#[derive(Clone, Copy, Debug)]
pub struct QpMemory {
    /// Its service.
    pub service: Service,
    /// Protection domain.
    pub pd: u32,
    /// Completion queue of its sends.
    pub send_cq: u32,
    /// Completion queue of its receives.
    pub recv_cq: u32,
    /// Its receives.
    pub receives: Receives,
    /// Its send queue.
    pub sq: SqMemory,
    /// What its CQEs carry as `srqn_uidx`, 24 bits.
    pub user_index: u32,
    /// Short received data goes into the CQE.
    pub scatter_to_cqe: bool,
}

/// A software HCA whose queues are another driver's. It belongs to the thread that opened it, which has to [`poll`](Self::poll) it: that
/// thread must live as long as the HCA, for its end is what tells peers that the HCA is dead.
///
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::hca::Hca>();
/// ```
pub struct Hca {
    device: soft::Hca,
}

impl fmt::Debug for Hca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hca").field("seat", &self.seat()).finish_non_exhaustive()
    }
}

impl Hca {
    /// Joins the fabric.
    ///
    /// # Errors
    /// See [`OpenError`]; [`OpenError::NoFreeLid`] if all [`MAX_SEAT`] seats are taken.
    pub fn open(options: &HcaOptions) -> Result<Self, OpenError> {
        let HcaOptions { fabric, port, dead_peer_timeout_ns, timing, clock, faults } = options.clone();
        let options = SoftOptions { fabric, arena_bytes: 4096, dead_peer_timeout_ns, timing, clock, faults, ..SoftOptions::default() };
        Ok(Self { device: soft::Hca::join(&options, None, Some(port))? })
    }

    /// The device, for tests that spoil its memory.
    #[cfg(test)]
    pub(crate) fn device(&self) -> &soft::Hca {
        &self.device
    }

    /// Its number in the fabric, 1..=[`MAX_SEAT`].
    #[must_use]
    pub fn seat(&self) -> u16 {
        self.device.lid()
    }

    /// Executes what was posted since the last call, takes in what arrived, retries what is due. Returns whether anything was done, or is to
    /// be looked at again soon.
    pub fn poll(&self) -> bool {
        self.device.look()
    }

    /// A protection domain.
    #[must_use]
    pub fn alloc_pd(&self) -> u32 {
        self.device.alloc_pd()
    }

    /// Registers memory of this process, which the HCA and its peers reach by cross-process copy: the key, local and remote.
    ///
    /// # Errors
    /// See [`RegisterError`].
    ///
    /// # Safety
    /// `addr..addr + len` stays mapped until [`deregister`](Self::deregister) returned `true`.
    pub unsafe fn register(&self, pd: u32, addr: NonNull<u8>, len: usize, access: Access) -> Result<u32, RegisterError> {
        self.device.register_hosted(pd, addr, len, access)
    }

    /// Changes the protection domain and the access of the region of `key`, which stays as it is. `false` if a peer did not finish within 50 ms a
    /// copy that it may have begun before: call again.
    ///
    /// # Errors
    /// [`RegisterError::RemoteWithoutLocalWrite`].
    pub fn reregister(&self, key: u32, pd: u32, access: Access) -> Result<bool, RegisterError> {
        self.device.try_reregister(key, pd, access)
    }

    /// Invalidates a key. `false` if a peer did not finish a copy within 50 ms: call again.
    pub fn deregister(&self, key: u32) -> bool {
        self.device.try_deregister(key)
    }

    /// A completion queue: its number.
    ///
    /// # Errors
    /// A size outside the limits.
    ///
    /// # Safety
    /// The memory stays valid until [`destroy_cq`](Self::destroy_cq), and its driver accesses it as that of a device's queue.
    pub unsafe fn create_cq(&self, memory: &CqMemory) -> Result<u32, CreateError> {
        // SAFETY: the caller's.
        unsafe { self.device.create_cq_at(memory) }
    }

    /// Destroys a completion queue that no queue pair uses.
    pub fn destroy_cq(&self, cqn: u32) {
        self.device.destroy_cq(cqn);
    }

    /// Whether the queue had no room for a CQE: it gets no more, and the queue pairs on it fail.
    #[must_use]
    pub fn has_overrun(&self, cqn: u32) -> bool {
        self.device.has_overrun(cqn)
    }

    /// Whether the driver armed the queue and it has the completion that it was armed for; disarms it then. A completion gives one event: one
    /// that was there at the last event gives none when the driver arms the queue again before it polls.
    pub fn take_event(&self, cqn: u32) -> bool {
        self.device.take_cq_event(cqn)
    }

    /// A shared receive queue: its number.
    ///
    /// # Errors
    /// A size outside the limits, or no memory.
    ///
    /// # Safety
    /// As [`create_cq`](Self::create_cq).
    pub unsafe fn create_srq(&self, pd: u32, memory: &RqMemory) -> Result<u32, CreateError> {
        // SAFETY: the caller's.
        unsafe { self.device.create_srq_at(pd, memory) }
    }

    /// Destroys a shared receive queue that no queue pair uses.
    pub fn destroy_srq(&self, srqn: u32) {
        self.device.destroy_rq(srqn);
    }

    /// A queue pair, in the state RESET: its number.
    ///
    /// # Errors
    /// A size outside the limits, or no memory.
    ///
    /// # Safety
    /// As [`create_cq`](Self::create_cq).
    pub unsafe fn create_qp(&self, memory: &QpMemory) -> Result<u32, CreateError> {
        // SAFETY: the caller's.
        unsafe { self.device.create_qp_at(memory) }
    }

    /// RESET to INIT: its own receive queue is looked at from now on.
    pub fn initialize(&self, qpn: u32) {
        self.device.initialize(qpn);
    }

    /// INIT to RTR of a connected queue pair: it receives from queue pair `remote_qpn`, and lets it do what `access` says of WRITE, READ and atomics
    /// (the other flags mean nothing here). One that does not exist never answers.
    pub fn connect(&self, qpn: u32, remote_qpn: u32, access: Access) {
        self.device.connect_to(qpn, remote_qpn, access);
    }

    /// Changes what a connected queue pair in RTR or RTS lets its peer do: from the peer's next doorbell on. In other states nothing happens.
    pub fn allow(&self, qpn: u32, access: Access) {
        self.device.allow(qpn, access);
    }

    /// RTR to RTS, or new options in RTS: its send queue is looked at from now on. A `timeout` of 0 waits for ever. The RNR timer is that of
    /// this end, where a NIC's requester obeys that of the other.
    pub fn start_sending(&self, qpn: u32, options: &ConnectOptions) {
        self.device.start_sending(qpn, options);
    }

    /// INIT to RTR of a datagram queue pair: it receives what brings `qkey`.
    pub fn activate_datagrams(&self, qpn: u32, qkey: u32) {
        self.device.activate_datagrams(qpn, qkey);
    }

    /// To the error state: everything posted is flushed.
    pub fn fail_qp(&self, qpn: u32) {
        self.device.fail_hosted(qpn);
    }

    /// Whether the queue pair is in the error state.
    #[must_use]
    pub fn has_failed(&self, qpn: u32) -> bool {
        self.device.has_failed(qpn)
    }

    /// Back to RESET, as after [`create_qp`](Self::create_qp), under the same number: neither queue is looked at, so the driver may set its
    /// records to 0 and remove the queue pair's CQEs afterwards. `false` if the peer does not finish within 50 ms what it is doing there; the
    /// queue pair is in the error state then.
    pub fn reset_qp(&self, qpn: u32) -> bool {
        self.device.reset_qp(qpn)
    }

    /// Destroys a queue pair.
    pub fn destroy_qp(&self, qpn: u32) {
        self.device.destroy_qp(qpn);
    }
}
