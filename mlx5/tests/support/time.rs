//! Tests of several devices in one thread that hold in each mode of time:
//! `MLX5_TEST_TIME=immediate|delay|virtual|packets`. `MLX5_TEST_DEVICE=mlx5_0` runs them on this
//! device of libibverbs instead: each device of a test is this device, opened once more. With
//! several names, separated by spaces, the devices of a test are the named devices in turn; one of
//! them may be a software HCA with a port for packets. `scripts/verbs-tests` lists the tests that
//! are useful there.
//!
//! A test makes its devices through a [`Net`], posts, and then waits with [`Net::settle`] or
//! [`Net::collect`] for the results: at once in immediate time, later in the others. Software HCAs
//! are always strict, and the drop of a `Net` asserts that no rule was broken.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use mlx5::{
    Clock, Device, DeviceSpec, FabricSpec, LocalFabric, NicModel, NicParameters, RoceOptions, Rule,
    SoftOptions, Timing,
};

/// The time at which operations are executed in this run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Operations are executed in the doorbell. The clock changes only when a test moves it.
    Immediate,
    /// A few us later, on the system's clock.
    Delay,
    /// At the times of the NIC model, on a clock that polls advance.
    Virtual,
    /// Packets over the loopback interface, on the network that `MLX5_TEST_NETWORK` describes,
    /// such as `loss=1,delay_us=0..500`.
    Packets,
    /// A device of libibverbs, which acts at any time.
    Hardware,
}

thread_local! {
    /// Number of devices of the test.
    static OPENED: Cell<usize> = const { Cell::new(0) };
}

/// Returns the libibverbs device of this run; if there are several, the next of them.
fn hardware() -> Option<String> {
    let names = std::env::var("MLX5_TEST_DEVICE").ok()?;
    let nth = OPENED.replace(OPENED.get() + 1);
    let names = names.split(' ').collect::<Vec<_>>();
    Some(names[nth % names.len()].to_owned())
}

/// Returns the mode of this run.
pub(crate) fn mode() -> Mode {
    static MODE: OnceLock<Mode> = OnceLock::new();
    if std::env::var_os("MLX5_TEST_DEVICE").is_some() {
        return Mode::Hardware;
    }
    *MODE.get_or_init(|| match std::env::var("MLX5_TEST_TIME").as_deref() {
        Err(std::env::VarError::NotPresent) | Ok("immediate") => Mode::Immediate,
        Ok("delay") => Mode::Delay,
        Ok("virtual") => Mode::Virtual,
        Ok("packets") => Mode::Packets,
        other => {
            panic!("MLX5_TEST_TIME is {other:?}; legal is immediate, delay, virtual or packets")
        }
    })
}

/// Returns the vendor's detail of an error: `text` on the software HCA. The details of a NIC are
/// not public.
pub(crate) fn detail(text: &'static str) -> Option<&'static str> {
    (mode() != Mode::Hardware).then_some(text)
}

/// Returns the vendor's detail of an error that the peer reports. A packet has no place for it.
pub(crate) fn remote_detail(text: &'static str) -> Option<&'static str> {
    detail(text).filter(|_| mode() != Mode::Packets)
}

/// Returns whether a device finds its peer when it connects, and not only when it sends.
pub(crate) fn finds_peers() -> bool {
    !matches!(mode(), Mode::Hardware | Mode::Packets)
}

/// Delay mode: time from the doorbell to the effect.
const DELAY_NS: u64 = 3_000;
/// Virtual mode: time of a poll of an empty CQ.
const POLL_NS: u64 = 50;
/// Number of rounds after which an expected result is taken for missing. In delay mode this is some
/// seconds.
const ROUNDS: u64 = 20_000_000;
/// [`ROUNDS`] on hardware, where the thread sleeps between two rounds, because an emulated device
/// may need its core.
const HARDWARE_ROUNDS: u64 = 400_000;
/// [`ROUNDS`] with packets: a round is a system call for each device.
const PACKET_ROUNDS: u64 = 4_000_000;
const HARDWARE_PAUSE: Duration = Duration::from_micros(50);
/// Time after which, on hardware, every operation in flight that waits for no timer is complete.
const HARDWARE_QUIET: Duration = Duration::from_millis(20);

/// Time after which every packet has arrived and is answered.
const PACKETS_QUIET: Duration = Duration::from_millis(5);
/// [`PACKETS_QUIET`] on a bad network: several repeats of a packet may be lost, too.
const REPEATS_QUIET: Duration = Duration::from_millis(50);

/// Returns the description of the bad network of this run, if any.
fn bad_network() -> Option<String> {
    std::env::var("MLX5_TEST_NETWORK").ok()
}

/// Returns the port of a device whose peers all get packets.
fn packets() -> RoceOptions {
    let network = bad_network().map_or_else(String::new, |network| format!(",{network}"));
    format!("127.0.0.1,port=0,packets=all{network}")
        .parse()
        .unwrap()
}

/// Devices of one local fabric, with one clock and one network.
#[derive(Clone)]
pub(crate) struct Net {
    shared: std::rc::Rc<Shared>,
}

struct Shared {
    fabric: LocalFabric,
    now_ns: Arc<AtomicU64>,
    clock: Clock,
    timing: Timing,
    roce: Option<RoceOptions>,
    devices: RefCell<Vec<Device>>,
}

impl Net {
    /// Makes a network in the mode of this run.
    pub(crate) fn new() -> Self {
        Self::in_mode(mode())
    }

    /// Makes a network in a mode of its own, for tests about the modes.
    pub(crate) fn in_mode(mode: Mode) -> Self {
        let now_ns = Arc::<AtomicU64>::default();
        let (clock, timing) = match mode {
            Mode::Immediate => (Clock::Manual(Arc::clone(&now_ns)), Timing::Immediate),
            Mode::Hardware | Mode::Packets => (Clock::System, Timing::Immediate),
            Mode::Delay => (Clock::System, Timing::Delay { ns: DELAY_NS }),
            Mode::Virtual => (
                Clock::Stepping {
                    now_ns: Arc::clone(&now_ns),
                    poll_ns: POLL_NS,
                },
                Timing::Model(Arc::new(NicModel::new(NicParameters {
                    jitter_ns: 300,
                    ..NicParameters::default()
                }))),
            ),
        };
        OPENED.set(0);
        let roce = (mode == Mode::Packets).then(packets);
        let shared = Shared {
            fabric: LocalFabric::new(),
            now_ns,
            clock,
            timing,
            roce,
            devices: RefCell::default(),
        };
        Self {
            shared: std::rc::Rc::new(shared),
        }
    }

    /// Returns the options of a strict device of this network.
    pub(crate) fn options(&self) -> SoftOptions {
        SoftOptions {
            fabric: FabricSpec::Local(self.shared.fabric.clone()),
            arena_bytes: 1 << 30,
            clock: self.shared.clock.clone(),
            timing: self.shared.timing.clone(),
            roce: self.shared.roce.clone(),
            strict: true,
            ..SoftOptions::default()
        }
    }

    /// Opens a device of this network. The network holds it open until [`forget`](Self::forget), or
    /// its own end.
    pub(crate) fn device(&self) -> Device {
        self.open(&self.options())
    }

    /// Opens a device of this network with `options`, a changed copy of [`options`](Self::options).
    pub(crate) fn open(&self, options: &SoftOptions) -> Device {
        let device = Device::open(Self::spec(options)).unwrap();
        if device.soft().is_some() {
            self.shared.devices.borrow_mut().push(device.clone());
        }
        device
    }

    /// Returns a device with `options`, for another thread to open. Hardware has none of these
    /// options.
    pub(crate) fn spec(options: &SoftOptions) -> DeviceSpec {
        match hardware() {
            Some(name) => DeviceSpec::from(&*name),
            None => DeviceSpec::Soft(options.clone()),
        }
    }

    /// Stops holding `device` open: it closes with the test's last handle. Checks that it has
    /// broken no rule until now.
    pub(crate) fn forget(&self, device: &Device) {
        assert_eq!(
            device
                .soft()
                .map_or_else(Vec::new, |soft| soft.take_violations()),
            []
        );
        let name = device.info().name;
        self.shared
            .devices
            .borrow_mut()
            .retain(|d| d.info().name != name);
    }

    /// Lets every device make all possible progress. If none is left at this time, virtual time
    /// advances to the next event.
    pub(crate) fn progress(&self) {
        if mode() == Mode::Hardware {
            std::thread::sleep(HARDWARE_PAUSE);
        }
        let devices = self.shared.devices.borrow();
        // `count` calls every device; `any` would stop at the first that makes progress.
        let moved = devices.iter().filter(|device| device.progress()).count();
        if moved == 0 && matches!(self.shared.clock, Clock::Stepping { .. }) {
            if let Some(next_ns) = devices
                .iter()
                .filter_map(|device| device.soft()?.next_event_ns())
                .min()
            {
                self.shared.now_ns.fetch_max(next_ns, Ordering::Relaxed);
            }
        }
    }

    /// Makes progress until `done`.
    pub(crate) fn settle(&self, mut done: impl FnMut() -> bool) {
        let rounds = match mode() {
            Mode::Hardware => HARDWARE_ROUNDS,
            Mode::Packets => PACKET_ROUNDS,
            _ => ROUNDS,
        };
        for _ in 0..rounds {
            if done() {
                return;
            }
            self.progress();
        }
        panic!("what the test waits for has not come after {rounds} rounds");
    }

    /// Makes progress until `poll` has returned at least `n` values in all.
    pub(crate) fn collect<T>(&self, n: usize, mut poll: impl FnMut() -> Vec<T>) -> Vec<T> {
        let mut got = vec![];
        self.settle(|| {
            got.extend(poll());
            got.len() >= n
        });
        got
    }

    /// Makes progress until every operation in flight waits for a timer of its own: a few us in the
    /// modes that have them.
    pub(crate) fn quiet(&self) {
        if mode() == Mode::Hardware {
            return self.go_on_for(HARDWARE_QUIET);
        }
        if self.shared.roce.is_some() {
            self.go_on_for(bad_network().map_or(PACKETS_QUIET, |_| REPEATS_QUIET));
        }
        if matches!(self.shared.timing, Timing::Immediate) {
            return self.progress();
        }
        let end_ns = self.shared.clock.now_ns() + 100_000;
        let is_busy = |d: &Device| {
            d.soft()
                .and_then(|soft| soft.next_event_ns())
                .is_some_and(|at_ns| at_ns < end_ns)
        };
        self.settle(|| {
            let is_over = self.shared.clock.now_ns() >= end_ns;
            is_over || !self.shared.devices.borrow().iter().any(is_busy)
        });
        self.progress();
    }

    /// Makes progress for a time.
    fn go_on_for(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.progress();
        }
    }

    /// Takes the rules that a test broke on purpose.
    #[allow(dead_code, reason = "not every test does")]
    pub(crate) fn broken_rules(&self) -> Vec<Rule> {
        self.shared
            .devices
            .borrow()
            .iter()
            .filter_map(Device::soft)
            .flat_map(|soft| soft.take_violations())
            .map(|violation| violation.rule)
            .collect()
    }

    /// Lets `ns` pass, by setting the clock or in real time.
    pub(crate) fn pass_ns(&self, ns: u64) {
        match self.shared.clock {
            Clock::System => self.go_on_for(Duration::from_nanos(ns)),
            _ => drop(self.shared.now_ns.fetch_add(ns, Ordering::Relaxed)),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            for device in self.devices.get_mut() {
                assert_eq!(
                    device
                        .soft()
                        .map_or_else(Vec::new, |soft| soft.take_violations()),
                    [],
                    "{:?}",
                    device.info().name
                );
            }
        }
    }
}
