//! Devices and protection domains: where everything starts.

use std::fmt;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

#[cfg(feature = "soft")]
use mlx5_hca::{Hca, Simulated, Simulation, SoftOptions};
use shm::sleep::{Sleeper, Watch};

#[cfg(feature = "soft")]
use crate::config::NullOptions;
use crate::config::{CqConfig, DeviceInfo, QpConfig};
use crate::control::Control;
use crate::cq::Cq;
use crate::cq_object::CqObject;
use crate::error::{CreateError, OpenError, RegisterError};
use crate::mono_cq::MonoCq;
use crate::mr::Mr;
#[cfg(feature = "soft")]
use crate::null::{Null, NullDevice};
use crate::pd::PdObject;
use crate::qp::{Connected, Datagram, Qp, QpParents, ReceiveSource};
use crate::rc_qp::RcQp;
#[cfg(feature = "soft")]
use crate::soft::Soft;
use crate::srq::Srq;
use crate::ud_qp::UdQp;
use crate::verbs::{Context, VerbsOptions};
use crate::wire::{Access, AsyncEvent};

/// Which device to open. Plain data: it can be sent to the thread that will own the device.
///
/// ```
/// fn send<T: Send + Sync>() {}
/// send::<mlx5::DeviceSpec>();
/// ```
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "one for each device")]
pub enum DeviceSpec {
    /// The software HCA.
    #[cfg(feature = "soft")]
    Soft(SoftOptions),
    /// Hardware: an mlx5 device that libibverbs finds. Peers are queue pairs of such devices, wherever they are.
    Verbs(VerbsOptions),
    /// A device that executes nothing: queues, records and registers are there, and nobody reads them. For measuring the driver alone, and
    /// for tests that play the device through [`Device::null`]. Its queue pairs connect to anything.
    #[cfg(feature = "soft")]
    Null(NullOptions),
}

impl From<&DeviceSpec> for DeviceSpec {
    fn from(spec: &DeviceSpec) -> Self {
        spec.clone()
    }
}

/// `soft` and `null` with their defaults; else the name of a device that libibverbs finds, with its port behind a colon if that is not the first
/// active one: `mlx5_0`, `mlx5_0:2`.
impl From<&str> for DeviceSpec {
    fn from(name: &str) -> Self {
        #[cfg(feature = "soft")]
        match name {
            "soft" => return Self::Soft(SoftOptions::default()),
            "null" => return Self::Null(NullOptions::default()),
            _ => {}
        }
        let with_port = name.rsplit_once(':').and_then(|(device, port)| Some((device, Some(port.parse().ok()?))));
        let (device, port) = with_port.unwrap_or((name, None));
        Self::Verbs(VerbsOptions { device: Some(device.to_owned()), port, ..VerbsOptions::default() })
    }
}

#[cfg(feature = "soft")]
impl Default for DeviceSpec {
    fn default() -> Self {
        Self::Soft(SoftOptions::default())
    }
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
    #[cfg(feature = "soft")]
    null: Option<Rc<Null>>,
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

#[cfg(feature = "soft")]
impl Simulated for Device {
    fn hca(&self) -> Option<&Rc<Hca>> {
        self.soft()
    }
}

impl Device {
    /// Opens a device: by a name ([`DeviceSpec`]'s `From<&str>`), or with all options.
    ///
    /// # Errors
    /// See [`OpenError`]; nothing is left behind.
    pub fn open(spec: impl Into<DeviceSpec>) -> Result<Self, OpenError> {
        match &spec.into() {
            #[cfg(feature = "soft")]
            DeviceSpec::Soft(options) => {
                let soft = Soft::open(options)?;
                let hook = Rc::clone(soft.hca());
                Ok(Self { control: Control::new(Rc::new(soft), Some(hook)), null: None })
            }
            #[cfg(feature = "soft")]
            DeviceSpec::Null(options) => {
                let null = Rc::new(Null::new(*options));
                Ok(Self { control: Control::new(Rc::clone(&null) as _, None), null: Some(null) })
            }
            DeviceSpec::Verbs(options) => Ok(Self {
                control: Control::new(Rc::new(Context::open(options)?), None),
                #[cfg(feature = "soft")]
                null: None,
            }),
        }
    }

    /// Opens a device of a simulation, with its options, and makes it known there.
    ///
    /// # Errors
    /// See [`OpenError`].
    #[cfg(feature = "soft")]
    pub fn simulated(simulation: &mut Simulation<'_>) -> Result<Self, OpenError> {
        let device = Self::open(DeviceSpec::Soft(simulation.options()))?;
        // Opened with its options, it is of its network.
        let _ = simulation.add(&device);
        Ok(device)
    }

    /// The device's side of a [`DeviceSpec::Null`] device; `None` for one that works by itself.
    #[cfg(feature = "soft")]
    #[must_use]
    pub fn null(&self) -> Option<NullDevice> {
        self.null.as_ref().map(|null| NullDevice::new(Rc::clone(null)))
    }

    /// The software HCA below it; `None` on hardware and on a null device. What it alone can be asked is asked there: which rules were broken,
    /// the hash of its trace, when it has something to do next.
    #[cfg(feature = "soft")]
    #[must_use]
    pub fn soft(&self) -> Option<&Rc<Hca>> {
        self.control.hook()
    }

    /// Name, transport and capabilities.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        self.control.info()
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

    /// Makes the device do what is due and take in what has arrived, as a poll of an empty CQ does. Returns whether there may be new CQEs.
    pub fn progress(&self) -> bool {
        self.control.progress()
    }

    /// Sleeps until a CQ that was armed with [`Cq::arm`](crate::Cq::arm) has a completion, at most `timeout` (`None`: for ever); meanwhile the
    /// device makes progress. Returns whether there is one, so not if its [`waker`](Self::waker) ended it; hardware says so also of one that was polled since its CQ was armed. The CQs that
    /// have one are disarmed: poll them, then arm them again.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.control.wait(timeout.map(|t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Ends a [`wait`](Self::wait) of this device from any thread: the one under way, or, if there is none, the next, which returns at once. Several
    /// uses before that are one. What was stored before [`Waker::wake_by_ref`] can be seen behind the wait. It may outlive the device.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.control.waker()
    }

    /// The oldest asynchronous event that was not taken yet; never waits. A queue that had no room for a completion, and a queue pair that broke
    /// down, say so in no other way, so look now and then where you wait for completions with no end: on hardware it costs a system call. Events
    /// of a queue or queue pair that was dropped are gone with it. [`Device::wait`] does not end at one.
    #[must_use]
    pub fn take_async_event(&self) -> Option<AsyncEvent> {
        self.control.take_async_event()
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
pub struct CqRef<'a>(pub(crate) &'a Rc<CqObject>);

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
        // SAFETY: the caller's.
        let parts = unsafe { control.register(self.object.pdn, addr, len, access) }?;
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
        Qp::create(&self.parents(send_cq, recv_cq, receives.into()), config, Datagram { qkey: 0 })
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
