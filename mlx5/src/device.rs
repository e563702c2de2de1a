//! Devices and protection domains: where everything starts.

use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use shm::sleep::{Sleeper, Watch};

use crate::control::{Control, CreateError};
use crate::cq::{Cq, CqConfig};
use crate::mmio::RegisterKind;
use crate::mono_cq::MonoCq;
use crate::mr::{Access, Mr, RegisterError};
use crate::qp::{Qp, QpConfig, QpParents, ReceiveSource};
use crate::rc_qp::{Connected, RcQp};
use crate::soft::{Clock, Faults, Hca, LocalFabric, NullDevice, Timing, Violation};
use crate::srq::Srq;
use crate::ud_qp::{Datagram, UdQp};
use crate::verbs::{Context, VerbsError, VerbsOptions};

/// Where a software HCA meets its peers.
#[derive(Clone, Debug)]
pub enum FabricSpec {
    /// All processes of this user on this host, through small control files in a shared-memory directory (`None`: the default one).
    Shared {
        /// The directory.
        dir: Option<PathBuf>,
    },
    /// Devices of this process only, for tests and simulation. No file is made.
    Local(LocalFabric),
}

/// Options of a software HCA.
#[derive(Clone, Debug)]
pub struct SoftOptions {
    /// Where its peers are.
    pub fabric: FabricSpec,
    /// Address space for registered memory, in bytes; memory is taken from the system only as regions are made. Default 64 GiB.
    pub arena_bytes: usize,
    /// After this long without an answer from a peer proven dead, its operations fail, in ns. Default 10 ms.
    pub dead_peer_timeout_ns: u64,
    /// Where [`Device::now_ns`] and retry times come from.
    pub clock: Clock,
    /// When operations are executed.
    pub timing: Timing,
    /// Check what hardware would punish silently: every rule of [`Rule`](crate::Rule). A driver that breaks one gets its queue pair into the
    /// error state, where that is possible, and [`Device::violations`] says what it did. Costs about three times the instructions.
    pub strict: bool,
    /// Faults to make.
    pub faults: Faults,
    /// Keep a hash over everything the device does, for [`Device::trace_hash`].
    pub trace: bool,
}

impl Default for SoftOptions {
    fn default() -> Self {
        Self {
            fabric: FabricSpec::Shared { dir: None },
            arena_bytes: 64 << 30,
            dead_peer_timeout_ns: 10_000_000,
            clock: Clock::System,
            timing: Timing::Immediate,
            strict: false,
            faults: Faults::default(),
            trace: false,
        }
    }
}

/// Which device to open. Plain data: it can be sent to the thread that will own the device.
///
/// ```
/// fn send<T: Send + Sync>() {}
/// send::<mlx5::DeviceSpec>();
/// ```
#[derive(Clone, Debug)]
pub enum DeviceSpec {
    /// The software HCA.
    Soft(SoftOptions),
    /// Hardware: an mlx5 device that libibverbs finds. Peers are queue pairs of such devices, wherever they are.
    Verbs(VerbsOptions),
    /// A device that executes nothing: queues, records and registers are there, and nobody reads them. For measuring the driver alone, and
    /// for tests that play the device through [`Device::null`]. Its queue pairs connect to anything.
    Null(NullOptions),
}

/// Options of a [`DeviceSpec::Null`] device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NullOptions {
    /// How doorbells write its registers, which are memory that nobody reads. Default [`RegisterKind::Ordinary`].
    pub register: RegisterKind,
}

impl Default for DeviceSpec {
    fn default() -> Self {
        Self::Soft(SoftOptions::default())
    }
}

fn null_options() -> SoftOptions {
    SoftOptions { fabric: FabricSpec::Local(LocalFabric::new()), arena_bytes: 1 << 30, ..SoftOptions::default() }
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The shared-memory directory cannot be used.
    #[error("the fabric's directory: {0}")]
    Directory(#[from] shm::dir::DirError),
    /// The control file could not be made.
    #[error("the device's control file: {0}")]
    ControlFile(#[from] shm::region::CreateError),
    /// Memory for the device could not be had.
    #[error("memory for {what}: {source}")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// Every LID is taken.
    #[error("all {0} LIDs of the fabric are in use by living devices")]
    NoFreeLid(u16),
    /// A device behind libibverbs cannot be used; says what to do.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}

/// What a device is and can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name for people, for example `soft:lid=3`.
    pub name: String,
    /// How peers are reached.
    pub transport: String,
    /// Largest send queue, WQEBBs.
    pub max_send_wr: u32,
    /// Largest receive queue of a queue pair, receives.
    pub max_recv_wr: u32,
    /// Most buffers of a receive.
    pub max_recv_sge: u32,
    /// Most inline bytes of an operation.
    pub max_inline_data: u32,
    /// Largest completion queue, CQEs.
    pub max_cqe: u32,
    /// Largest shared receive queue, receives.
    pub max_srq_wr: u32,
    /// Most queue pairs.
    pub max_qp: u32,
    /// Most memory regions.
    pub max_mr: u32,
    /// Whether it has [`CompareSwap`](crate::CompareSwap) and [`FetchAdd`](crate::FetchAdd). A device without them posts none and takes no
    /// region for them.
    pub has_atomics: bool,
    /// The NUMA node a NIC is plugged into, where the system says so; queues and buffers are best there. `None` for the software HCA, whose
    /// memory is where its thread is.
    pub numa_node: Option<u32>,
    /// When it executes, by which clock, whether it is strict, and which faults it makes: what results were obtained under.
    pub modes: String,
    /// How long operations towards a dead peer are retried before they fail, in ns. Hardware cannot tell a dead peer from a slow one: there it is
    /// [`ConnectOptions::transport_timeout_ns`](crate::ConnectOptions::transport_timeout_ns), of the default options.
    pub dead_peer_timeout_ns: u64,
    /// Queue pair places and memory regions that were not given back so far, because a peer was stopped in the middle of using them.
    pub quarantined: u64,
    /// Rules broken since [`Device::violations`], which names them, was last asked; in strict mode.
    pub violations: u64,
    /// Times that an operation of this device found no receive posted at its target (RNR NAK) and was put off, or failed. Hardware counts per
    /// port, for all programs (`rnr_nak_retry_err` of its counters in sysfs): `None` there.
    pub rnr_naks: Option<u64>,
}

/// An open device. It belongs to the thread that opened it, as does everything made from it; each thread opens its own. Clones are the same
/// device, which closes with the last of them and of what was made from it.
///
/// It is neither `Send` nor `Sync`:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::Device>();
/// ```
/// ```compile_fail,E0277
/// fn sync<T: Sync>() {}
/// sync::<mlx5::Device>();
/// ```
#[derive(Clone)]
pub struct Device {
    control: Control,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("info", &self.info()).finish()
    }
}

/// To sleep on the device and on other things at once: see [`shm::sleep::wait`]. First the device makes progress, so look behind it whether a CQ
/// holds something ([`Cq::has_completion`](crate::Cq::has_completion)). What ends the sleep is whatever a poll would take in, armed or not. Hardware
/// cannot wake such a sleep: it ends after [`POLL_SLICE`](shm::sleep::POLL_SLICE).
impl Sleeper for &Device {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.control.with_watch(then);
    }
}

impl Device {
    /// Opens a device.
    ///
    /// # Errors
    /// See [`OpenError`]; nothing is left behind.
    pub fn open(spec: &DeviceSpec) -> Result<Self, OpenError> {
        let control = match spec {
            DeviceSpec::Soft(options) => Control::Soft(Rc::new(Hca::open(options, None)?)),
            DeviceSpec::Verbs(options) => Control::Verbs(Rc::new(Context::open(options)?)),
            DeviceSpec::Null(options) => Control::Soft(Rc::new(Hca::open(&null_options(), Some(options))?)),
        };
        Ok(Self { control })
    }

    pub(crate) fn control(&self) -> &Control {
        &self.control
    }

    /// The device's side of a [`DeviceSpec::Null`] device; `None` for one that works by itself.
    #[must_use]
    pub fn null(&self) -> Option<NullDevice> {
        self.control.soft().filter(|hca| hca.hook().is_none()).map(|hca| NullDevice::new(Rc::clone(hca)))
    }

    /// Name, transport and capabilities.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        self.control.info()
    }

    /// What the driver, or whoever wrote to its queues, did wrong so far; empty unless [`SoftOptions::strict`]. Takes the list.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.control.take_violations()
    }

    /// The hash over everything this device did: effects and completions of its sends, arrivals and flushes of its receives, each with time, queue
    /// pair, WQE and status. Two runs with the same hash were the same.
    /// `None` unless [`SoftOptions::trace`].
    #[must_use]
    pub fn trace_hash(&self) -> Option<u64> {
        self.control.trace_hash()
    }

    /// The time on the device's clock, in ns since an arbitrary moment: what its retries and delays are measured by. A program whose own
    /// deadlines are measured by it runs in virtual time as it is. Hardware has the system's monotonic clock.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.control.now_ns()
    }

    /// As [`now_ns`](Self::now_ns) for a fifth of its cost where that is the system's clock, which is then behind by up to a tick of the
    /// kernel, 10 ms at most (`CLOCK_MONOTONIC_COARSE`); never ahead of it. A virtual clock has one time only.
    #[must_use]
    pub fn coarse_now_ns(&self) -> u64 {
        self.control.coarse_now_ns()
    }

    /// When, on its clock, the device has something to do by itself: a retry, a delayed operation. For steppers of virtual time.
    #[must_use]
    pub fn next_event_ns(&self) -> Option<u64> {
        self.control.next_event_ns()
    }

    /// Makes the device do what is due and take in what has arrived, as a poll of an empty CQ does. Returns whether there may be new CQEs.
    pub fn progress(&self) -> bool {
        self.control.progress()
    }

    /// Sleeps until a CQ that was armed with [`Cq::arm`](crate::Cq::arm) has a completion, at most `timeout` (`None`: for ever); meanwhile the
    /// device makes progress. Returns whether there is one; hardware says so also of one that was polled since its CQ was armed. The CQs that
    /// have one are disarmed: poll them, then arm them again.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.control.wait(timeout.map(|t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// A protection domain.
    ///
    /// # Errors
    /// The device has none left. The software HCA always has.
    pub fn alloc_pd(&self) -> Result<Pd, CreateError> {
        Ok(Pd { object: PdObject::new(&self.control)? })
    }

    /// A completion queue. A number is enough: entries of 64 bytes, not compressed.
    ///
    /// # Errors
    /// A size outside the device's limits (see [`CqConfig`]), or no memory.
    pub fn create_cq(&self, config: impl Into<CqConfig>) -> Result<Cq, CreateError> {
        Cq::create(&self.control, &config.into())
    }

    /// A completion queue for queue pairs of one kind.
    ///
    /// # Errors
    /// As [`create_cq`](Self::create_cq).
    pub fn create_mono_cq<Q>(&self, config: impl Into<CqConfig>) -> Result<MonoCq<Q>, CreateError> {
        MonoCq::create(&self.control, &config.into())
    }
}

/// The domain's number, kept alive by everything in the domain.
pub(crate) struct PdObject {
    pub(crate) pdn: u32,
    pub(crate) control: Control,
}

impl PdObject {
    pub(crate) fn new(control: &Control) -> Result<Rc<Self>, CreateError> {
        Ok(Rc::new(Self { pdn: control.alloc_pd()?, control: control.clone() }))
    }
}

impl Drop for PdObject {
    fn drop(&mut self) {
        self.control.dealloc_pd(self.pdn);
    }
}

/// A protection domain: queue pairs use memory regions of their own domain only, at their own end as at the other.
///
/// It stays in its thread:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::Pd>();
/// ```
#[derive(Clone)]
pub struct Pd {
    object: Rc<PdObject>,
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pd").field("pdn", &self.object.pdn).finish()
    }
}

/// A completion queue a queue pair can be attached to: [`Cq`] or [`MonoCq`].
pub trait CompletionQueue {
    #[doc(hidden)]
    fn object(&self) -> CqRef<'_>;
}

/// An opaque reference to a CQ's device object.
#[doc(hidden)]
pub struct CqRef<'a>(pub(crate) &'a Rc<crate::cq_object::CqObject>);

impl fmt::Debug for CqRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CqRef").field(&self.0.cqn).finish()
    }
}

impl CompletionQueue for Cq {
    fn object(&self) -> CqRef<'_> {
        CqRef(Cq::object(self))
    }
}

impl<Q> CompletionQueue for MonoCq<Q> {
    fn object(&self) -> CqRef<'_> {
        CqRef(MonoCq::object(self))
    }
}

impl Pd {
    /// `bytes` of zeroed, page-aligned memory that peers can reach at the speed of memory, registered with `access`.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn alloc(&self, bytes: usize, access: Access) -> Result<Mr, RegisterError> {
        self.alloc_in(bytes, access, false)
    }

    /// As [`alloc`](Self::alloc), on pages of 2 MiB, so that large regions cost the CPU, and a NIC, fewer translations. Whole pages are taken.
    /// Where the system has none to give the memory is on ordinary pages, and [`Mr::pages`] says why.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn alloc_huge(&self, bytes: usize, access: Access) -> Result<Mr, RegisterError> {
        self.alloc_in(bytes, access, true)
    }

    fn alloc_in(&self, bytes: usize, access: Access, huge: bool) -> Result<Mr, RegisterError> {
        let control = &self.object.control;
        let parts = control.alloc_registered(self.object.pdn, bytes, access, huge)?;
        Ok(Mr::new(parts, control.clone(), Rc::clone(&self.object)))
    }

    /// Registers memory of another allocator. To a NIC it is as any other; peers of a software HCA reach it through the kernel's cross-process
    /// copy, which is about 400 times slower for small messages than memory of [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// See [`RegisterError`].
    ///
    /// # Safety
    /// `addr..addr + len` stays allocated until [`Mr::deregister`] returned `Ok`: a peer that is stopped in the middle of a copy writes when it
    /// resumes, also after the region was merely dropped. And it is accessed only as shared with the device: no Rust reference to it is held
    /// across an operation that may write it.
    pub unsafe fn register(&self, addr: core::ptr::NonNull<u8>, len: usize, access: Access) -> Result<Mr, RegisterError> {
        let control = &self.object.control;
        let parts = control.register_foreign(self.object.pdn, addr, len, access)?;
        Ok(Mr::new(parts, control.clone(), Rc::clone(&self.object)))
    }

    /// A shared receive queue of at least `depth` receives with up to `max_sge` buffers each.
    ///
    /// # Errors
    /// A size outside the device's limits, or no memory.
    pub fn create_srq(&self, depth: u32, max_sge: usize) -> Result<Srq, CreateError> {
        Srq::create(&self.object, depth, max_sge)
    }

    /// A reliable-connected queue pair. Send completions go to `send_cq`; receives come from `receives` (an `&Srq`, or a queue of its own) and
    /// complete on `recv_cq`.
    ///
    /// # Errors
    /// A size outside the device's limits, or no memory.
    pub fn create_qp<'a>(
        &self,
        send_cq: &impl CompletionQueue,
        recv_cq: &impl CompletionQueue,
        receives: impl Into<ReceiveSource<'a>>,
        config: &QpConfig,
    ) -> Result<RcQp, CreateError> {
        Qp::create(&self.parents(send_cq, recv_cq, receives.into()), config, Connected)
    }

    /// An unreliable-datagram queue pair; the rest as [`create_qp`](Self::create_qp).
    ///
    /// # Errors
    /// A size outside the device's limits, or no memory.
    pub fn create_ud_qp<'a>(
        &self,
        send_cq: &impl CompletionQueue,
        recv_cq: &impl CompletionQueue,
        receives: impl Into<ReceiveSource<'a>>,
        config: &QpConfig,
    ) -> Result<UdQp, CreateError> {
        Qp::create(&self.parents(send_cq, recv_cq, receives.into()), config, Datagram::new())
    }

    fn parents<'a>(
        &'a self,
        send_cq: &'a impl CompletionQueue,
        recv_cq: &'a impl CompletionQueue,
        receives: ReceiveSource<'a>,
    ) -> QpParents<'a> {
        let (control, pd) = (&self.object.control, &self.object);
        QpParents { control, pd, send_cq: send_cq.object().0, recv_cq: recv_cq.object().0, receives }
    }
}
