//! Devices and protection domains, from which all other objects are created.

use std::fmt;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use copyrpc_shm::sleep::{Sleeper, Watch};
use mlx5_hca::sim::{Simulated, Simulation};
use mlx5_hca::{DeviceInfo, Hca, RoceOptions, SoftOptions};

use crate::completions::cq::Cq;
use crate::completions::mono_cq::MonoCq;
use crate::config::{CqConfig, NullOptions, QpConfig, RqSize};
use crate::control::{Control, Hook};
use crate::error::{CreateError, OpenError, RegisterError};
use crate::mr::Mr;
use crate::pd::PdObject;
use crate::provider::null::NullDevice;
use crate::provider::soft::Soft;
use crate::queues::qp::{Connected, Datagram, Qp, ReceiveSource};
use crate::queues::rc_qp::RcQp;
use crate::queues::srq::Srq;
use crate::queues::ud_qp::UdQp;
use crate::verbs::{Context, Relay, VerbsError, VerbsOptions};
use crate::wire::{Access, AsyncEvent};

/// The device to open. Plain data: it can be sent to the thread that will own the device.
///
/// ```
/// fn send<T: Send + Sync>() {}
/// send::<mlx5::DeviceSpec>();
/// ```
#[derive(Clone, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a program has one for each of its devices"
)]
pub enum DeviceSpec {
    /// The software HCA.
    Soft(SoftOptions),
    /// Hardware: a device that libibverbs finds, of mlx5 or of another vendor. A device of another
    /// vendor is driven by a relay, which translates WQEs to calls of libibverbs. Peers are queue
    /// pairs of hardware, or of software HCAs with a port for packets, on any machine.
    Verbs(VerbsOptions),
    /// A device that executes nothing: its queues, records and registers exist, but no device reads
    /// them. It serves to measure the driver alone, and to test with a program that plays the
    /// device through [`Device::null`]. Its queue pairs connect to any address.
    Null(NullOptions),
}

impl From<&DeviceSpec> for DeviceSpec {
    fn from(spec: &DeviceSpec) -> Self {
        spec.clone()
    }
}

/// Parses the options in the name of a software HCA with a port for packets. Returns `None` for a
/// name without options.
fn roce_options(name: &str) -> Option<Result<RoceOptions, String>> {
    let options = name.strip_prefix("soft:")?;
    Some(options.strip_prefix("roce=").map_or_else(
        || {
            Err(format!(
                "{name:?} has no address: use soft alone, or the address first and options behind it, such as soft:roce=127.0.0.1,loss=10"
            ))
        },
        str::parse,
    ))
}

/// Converts a name: `soft` and `null` with their defaults; `soft:roce=ADDRESS,..` with
/// [`RoceOptions`]; otherwise the name of a device that libibverbs finds, such as `mlx5_0`, or
/// `verbs:NAME`. `relay:NAME` selects the relay for such a device. A port follows after a colon,
/// `mlx5_0:2`; the default is the first active one.
impl From<&str> for DeviceSpec {
    fn from(name: &str) -> Self {
        match name {
            "soft" => return Self::default(),
            "null" => return Self::Null(NullOptions::default()),
            _ => {}
        }
        let verbs = |name: &str, port, relay| {
            Self::Verbs(VerbsOptions {
                device: Some(name.to_owned()),
                port,
                relay,
                ..VerbsOptions::default()
            })
        };
        match roce_options(name) {
            Some(Ok(roce)) => {
                return Self::Soft(SoftOptions {
                    roce: Some(roce),
                    ..SoftOptions::default()
                });
            }
            // The illegal name is kept as a device name, and `Device::open` reports the error.
            Some(Err(_)) => return verbs(name, None, false),
            None => {}
        }
        let (relay, name) = match name.split_once(':') {
            Some(("relay", name)) => (true, name),
            Some(("verbs", name)) => (false, name),
            _ => (false, name),
        };
        let with_port = name
            .rsplit_once(':')
            .and_then(|(device, port)| Some((device, Some(port.parse().ok()?))));
        let (device, port) = with_port.unwrap_or((name, None));
        verbs(device, port, relay)
    }
}

impl Default for DeviceSpec {
    fn default() -> Self {
        Self::Soft(SoftOptions::default())
    }
}

/// An open device. It belongs to the thread that opened it, as does every object made from it; each
/// thread opens its own device. Clones refer to the same device, which closes when the last clone
/// and the last object made from it are dropped.
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
    null: Option<Rc<Soft>>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("info", &self.info())
            .finish()
    }
}

/// Lets a thread sleep on the device and on other sources at once: see
/// [`copyrpc_shm::sleep::wait`]. The device makes progress before the sleep, so check after that
/// whether a CQ holds a completion ([`Cq::has_completion`](crate::Cq::has_completion)). Every
/// arrival that a poll would take ends the sleep, whether a CQ is armed or not. On hardware the
/// first such sleep starts a thread that ends sleeps when the device has events, and each sleep
/// arms all CQs of the device. Without that thread, a sleep ends after
/// [`POLL_SLICE`](copyrpc_shm::sleep::POLL_SLICE).
impl Sleeper for &Device {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.control.with_watch(then);
    }
}

impl Simulated for Device {
    fn hca(&self) -> Option<&Rc<Hca>> {
        self.soft()
    }
}

impl Device {
    /// Opens a device by its name ([`DeviceSpec`]'s `From<&str>`), or with all options.
    ///
    /// # Errors
    /// See [`OpenError`]; nothing stays allocated.
    pub fn open(spec: impl Into<DeviceSpec>) -> Result<Self, OpenError> {
        let mut null = None;
        let control = match &spec.into() {
            DeviceSpec::Soft(options) => {
                let soft = Soft::open(options)?;
                let hook = Hook::Soft(Rc::clone(soft.hca()));
                Control::new(Rc::new(soft), hook)
            }
            DeviceSpec::Null(options) => {
                let soft = Rc::new(Soft::null(*options)?);
                null = Some(Rc::clone(&soft));
                Control::new(soft, Hook::Nothing)
            }
            DeviceSpec::Verbs(options) => {
                if let Some(Err(reason)) = options.device.as_deref().and_then(roce_options) {
                    return Err(OpenError::Roce { reason });
                }
                let context =
                    Context::open(options).map_err(|error| match (&options.device, &error) {
                        (
                            Some(name),
                            VerbsError::NotInstalled { .. } | VerbsError::NoDevice { .. },
                        ) => OpenError::NoVerbs(name.clone(), error),
                        _ => error.into(),
                    })?;
                if context.is_direct {
                    Control::new(Rc::new(context), Hook::Nothing)
                } else {
                    Control::of_relay(Rc::new(Relay::new(context)))
                }
            }
        };
        Ok(Self { control, null })
    }

    /// Opens a device with the options of a simulation, and adds it to the simulation.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn simulated(simulation: &mut Simulation<'_>) -> Result<Self, OpenError> {
        let device = Self::open(DeviceSpec::Soft(simulation.options()))?;
        // The device was opened with the simulation's options, so the device belongs to the
        // simulation's network and `add` cannot fail.
        let _ = simulation.add(&device);
        Ok(device)
    }

    /// Returns the device's side of a [`DeviceSpec::Null`] device, and `None` for all other
    /// devices.
    #[must_use]
    pub fn null(&self) -> Option<NullDevice> {
        self.null
            .as_ref()
            .map(|null| NullDevice::new(Rc::clone(null)))
    }

    /// Returns the software HCA of this device, which has information that no hardware has: the
    /// broken rules, the hash of its trace, the time of its next event. Returns `None` on hardware
    /// and on a null device.
    #[must_use]
    pub fn soft(&self) -> Option<&Rc<Hca>> {
        self.control.soft()
    }

    /// Returns name, transport and capabilities.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        self.control.info()
    }

    /// Returns the time on the device's clock, in ns since an arbitrary moment. The device measures
    /// its retries and delays on this clock. A program that uses this clock for its own deadlines
    /// also runs in virtual time, without a change. Hardware has the system's monotonic clock.
    #[must_use]
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.control.now_ns()
    }

    /// Returns the same time as [`now_ns`](Self::now_ns), less exact. On the system's clock the
    /// call costs a fifth of `now_ns`, and the result is late by up to a tick of the kernel, at
    /// most 10 ms (`CLOCK_MONOTONIC_COARSE`); it is never early. On a virtual clock both calls
    /// return the same.
    #[must_use]
    pub fn coarse_now_ns(&self) -> u64 {
        self.control.coarse_now_ns()
    }

    /// Makes the device do due work and take arrived messages, as a poll of an empty CQ does.
    /// Returns whether there may be new CQEs.
    pub fn progress(&self) -> bool {
        self.control.hook().empty_poll()
    }

    /// Sleeps until a CQ that was armed with [`Cq::arm`](crate::Cq::arm) has a completion, for at
    /// most `timeout` (`None`: without limit). Meanwhile the device makes progress. Returns whether
    /// there is a completion; `false` also if the [`waker`](Self::waker) ended the sleep. Hardware
    /// returns `true` also for a completion that was polled after its CQ was armed. CQs with a
    /// completion are disarmed: poll them, then arm them again.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.control
            .wait(timeout.map(|t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns a waker that ends a [`wait`](Self::wait) of this device from any thread: the current
    /// wait, or else the next, which then returns at once. Several wakes before the next wait count
    /// as one. Stores before [`Waker::wake_by_ref`] are visible after the wait. The waker may
    /// outlive the device.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.control.waker()
    }

    /// Takes the oldest asynchronous event; never blocks. The overrun of a completion queue and the
    /// failure of a queue pair may be reported only by such an event. So call this function from
    /// time to time while you wait for completions without a limit; on hardware each call costs a
    /// system call. Dropping a queue or queue pair discards its events. An event does not end
    /// [`Device::wait`].
    #[must_use]
    pub fn take_async_event(&self) -> Option<AsyncEvent> {
        self.control.take_async_event()
    }

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// The device has no domain left. The software HCA always has one.
    pub fn alloc_pd(&self) -> Result<Pd, CreateError> {
        Ok(Pd {
            object: PdObject::new(&self.control)?,
        })
    }

    /// Creates a completion queue. A plain number is enough: entries of 64 bytes, not compressed.
    ///
    /// # Errors
    /// A size is outside the device's limits (see [`CqConfig`]), or there is no memory.
    pub fn create_cq(&self, config: impl Into<CqConfig>) -> Result<Cq, CreateError> {
        Cq::create(&self.control, &config.into())
    }

    /// Creates a completion queue that reports each completion with the value of type `Q` that was
    /// registered with the number of its queue pair ([`MonoCq::register`]).
    ///
    /// # Errors
    /// The same as for [`create_cq`](Self::create_cq).
    pub fn create_mono_cq<Q>(&self, config: impl Into<CqConfig>) -> Result<MonoCq<Q>, CreateError> {
        Ok(MonoCq::new(self.create_cq(config)?))
    }
}

/// A protection domain. A queue pair uses memory regions of its own domain only, for local and for
/// remote access.
///
/// It is not `Send`:
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

impl Pd {
    /// Allocates `bytes` of zeroed, page-aligned memory that peers access at memory speed, and
    /// registers it with `access`.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn alloc(&self, bytes: usize, access: Access) -> Result<Mr, RegisterError> {
        self.alloc_in(bytes, access, false)
    }

    /// Allocates memory like [`alloc`](Self::alloc), on pages of 2 MiB, so that large regions cost
    /// the CPU, and a NIC, fewer translations. The size is rounded up to whole pages. If the system
    /// has no huge pages left, the memory is on ordinary pages, and [`Mr::pages`] gives the reason.
    ///
    /// # Errors
    /// See [`RegisterError`].
    pub fn alloc_huge(&self, bytes: usize, access: Access) -> Result<Mr, RegisterError> {
        self.alloc_in(bytes, access, true)
    }

    fn alloc_in(&self, bytes: usize, access: Access, huge: bool) -> Result<Mr, RegisterError> {
        let control = &self.object.control;
        let parts = control.alloc_registered(self.object.pdn, bytes, access, huge)?;
        Ok(Mr::new(parts, Rc::clone(&self.object)))
    }

    /// Registers memory that the caller has allocated. A NIC treats it like any other memory. Peers
    /// of a software HCA access it through the kernel's cross-process copy. For small messages,
    /// this is about 400 times slower than access to memory of [`alloc`](Self::alloc).
    ///
    /// # Errors
    /// See [`RegisterError`].
    ///
    /// # Safety
    /// `addr..addr + len` stays allocated until [`Mr::deregister`] returned `Ok`: a peer that is
    /// stopped in the middle of a copy completes the copy when it resumes, even if the region was
    /// dropped meanwhile. The memory is accessed only as memory shared with the device: no Rust
    /// reference to it is held across an operation that may write it.
    pub unsafe fn register(
        &self,
        addr: core::ptr::NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<Mr, RegisterError> {
        let control = &self.object.control;
        // SAFETY: guaranteed by the caller.
        let parts = unsafe { control.register(self.object.pdn, addr, len, access) }?;
        Ok(Mr::new(parts, Rc::clone(&self.object)))
    }

    /// Creates a shared receive queue of at least `depth` receives with up to `max_sge` buffers
    /// each.
    ///
    /// # Errors
    /// A size is outside the device's limits, or there is no memory.
    pub fn create_srq(&self, depth: u32, max_sge: usize) -> Result<Srq, CreateError> {
        Srq::create(&self.object, RqSize { depth, max_sge })
    }

    /// Creates a reliable-connected queue pair. Its sends complete on `send_cq`. Its receives come
    /// from `receives` (an `&Srq`, or a queue of its own) and complete on `recv_cq`.
    ///
    /// # Errors
    /// A size is outside the device's limits, or there is no memory.
    pub fn create_qp<'a>(
        &self,
        send_cq: &Cq,
        recv_cq: &Cq,
        receives: impl Into<ReceiveSource<'a>>,
        config: &QpConfig,
    ) -> Result<RcQp, CreateError> {
        let cqs = [send_cq, recv_cq].map(Cq::object);
        Qp::create(&self.object, cqs, receives.into(), config, Connected)
    }

    /// Creates an unreliable-datagram queue pair; the arguments are the same as for
    /// [`create_qp`](Self::create_qp).
    ///
    /// # Errors
    /// A size is outside the device's limits, or there is no memory.
    pub fn create_ud_qp<'a>(
        &self,
        send_cq: &Cq,
        recv_cq: &Cq,
        receives: impl Into<ReceiveSource<'a>>,
        config: &QpConfig,
    ) -> Result<UdQp, CreateError> {
        let (cqs, kind) = ([send_cq, recv_cq].map(Cq::object), Datagram { qkey: 0 });
        Qp::create(&self.object, cqs, receives.into(), config, kind)
    }
}
