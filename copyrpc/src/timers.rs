//! The clock of a context, and the deadlines of its connections.
//!
//! The clock is the device's, so that virtual time governs both. Calls with a deadline read the
//! clock, and so do drains that found nothing while a call may have a deadline. All other drains
//! read it only after a pause, which is a number of drains without a reading. The pause is 0 if a
//! millisecond or more has passed since the last pause of 0; otherwise each reading lengthens it:
//! 1, 3, 7, and so on, at most 63 drains. So an owner that does other work for long between drains
//! reads the clock in each drain, and an owner that polls as fast as it can spends nothing on the
//! clock.
//!
//! A deadline is detected by the first reading after it, and ends its call in that drain: never
//! early, late by at most the drains of a pause. While no call has a deadline, a coarse reading is
//! enough, several milliseconds late for a fifth of the cost: all remaining work is done every 10
//! ms or more rarely.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use copyrpc_calls::Deadlines;
use mlx5::Device;

/// Maximum number of drains between two readings of the clock.
const MAX_PAUSE: u32 = 63;
/// Time since the pause was last 0, in ns, after which a reading sets it to 0 again.
const PACE_NS: u64 = 1_000_000;
/// Interval of the sweeps, which watch silent peers and send heartbeats, in ns.
const SWEEP_INTERVAL_NS: u64 = 10_000_000;
/// Maximum number of idle connections that a sweep checks, among those that are due. The others
/// wait for the next sweeps.
pub(crate) const IDLE_CHECKS: usize = 32;
/// Checks of idle connections are postponed to multiples of this time, in ns, so that a process
/// that sleeps wakes once for many of them.
const IDLE_GRID_NS: u64 = 50_000_000;
/// Maximum lag of a coarse reading, in ns: a tick of a kernel with the lowest tick rate.
const COARSE_LAG_NS: u64 = 10_000_000;
const NEVER: u64 = u64::MAX;

/// The timer of a connection. Of the connection's entries in [`Timers::deadlines`], only the one
/// with this serial number counts; the others are of earlier timers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timer {
    at_ns: u64,
    serial: u64,
}

impl Timer {
    pub(crate) const NONE: Self = Self {
        at_ns: NEVER,
        serial: 0,
    };
}

pub(crate) trait Timed {
    fn timer(&self) -> &Cell<Timer>;
}

struct Armed<C> {
    serial: u64,
    connection: Weak<C>,
}

impl<C: Timed> Armed<C> {
    fn live(&self) -> Option<Rc<C>> {
        self.connection
            .upgrade()
            .filter(|connection| connection.timer().get().serial == self.serial)
    }
}

/// Timers in nanoseconds of the device's clock.
pub(crate) struct Timers<C> {
    device: Device,
    now_ns: Cell<u64>,
    /// Number of further drains that do not read the clock, whether they find something or not; 0
    /// while there are deadlines.
    drains_left: Cell<u32>,
    /// Number of further drains that do not read the clock although `drains_left` is 0, because
    /// they have arrivals; 0 while there are no deadlines.
    busy_drains_left: Cell<u32>,
    /// Length of the pause after the last reading, in drains.
    pause: Cell<u32>,
    /// Time of the last reading that set the pause to 0, in ns.
    moved_ns: Cell<u64>,
    last_sweep_ns: Cell<u64>,
    deadlines: RefCell<Deadlines<Armed<C>>>,
    has_deadlines: Cell<bool>,
    /// Times of each connection's next check for idleness.
    idle: RefCell<Deadlines<Weak<C>>>,
    last_serial: Cell<u64>,
}

impl<C: Timed> Timers<C> {
    pub(crate) fn start(device: Device) -> Self {
        let now_ns = device.coarse_now_ns();
        Self {
            device,
            now_ns: Cell::new(now_ns),
            drains_left: Cell::new(0),
            busy_drains_left: Cell::new(0),
            pause: Cell::new(0),
            moved_ns: Cell::new(now_ns),
            last_sweep_ns: Cell::new(now_ns),
            deadlines: RefCell::new(Deadlines::new()),
            has_deadlines: Cell::new(false),
            idle: RefCell::new(Deadlines::new()),
            last_serial: Cell::new(0),
        }
    }

    /// Returns the time of the last reading by a drain, in ns.
    pub(crate) fn now_ns(&self) -> u64 {
        self.now_ns.get()
    }

    /// Returns the time `timeout` from now, in ns, for [`Timers::arm`].
    pub(crate) fn deadline_in(&self, timeout: Duration) -> u64 {
        self.device.now_ns().saturating_add(nanoseconds(timeout))
    }

    /// Called once per drain. Returns whether it is time for [`Timers::read_clock`].
    #[inline]
    pub(crate) fn tick(&self, is_idle: bool) -> bool {
        let left = self.drains_left.get();
        if left == 0 {
            return self.tick_slowly(is_idle);
        }
        self.drains_left.set(left - 1);
        false
    }

    /// Decides for a drain whether to read the clock, once `drains_left` is 0. A drain that found
    /// nothing reads it; a drain with arrivals reads it when `busy_drains_left` is 0 as well.
    #[cold]
    #[inline(never)]
    fn tick_slowly(&self, is_idle: bool) -> bool {
        let left = self.busy_drains_left.get();
        if is_idle || left == 0 {
            return true;
        }
        self.busy_drains_left.set(left - 1);
        false
    }

    pub(crate) fn read_clock(&self) {
        let now_ns = if self.has_deadlines.get() {
            self.device.now_ns()
        } else {
            self.device.coarse_now_ns()
        };
        // The coarse clock may be behind an earlier precise reading, and the time must not
        // decrease.
        let now_ns = self.now_ns.get().max(now_ns);
        self.now_ns.set(now_ns);
        let pause = if now_ns - self.moved_ns.get() >= PACE_NS {
            self.moved_ns.set(now_ns);
            0
        } else {
            (2 * self.pause.get() + 1).min(MAX_PAUSE)
        };
        self.pause.set(pause);
        self.pass_over(pause);
    }

    /// Makes the next `drains` drains skip the reading of the clock. While there are deadlines,
    /// only drains with arrivals skip it.
    fn pass_over(&self, drains: u32) {
        let (idle, busy) = if self.has_deadlines.get() {
            (0, drains)
        } else {
            (drains, 0)
        };
        self.drains_left.set(idle);
        self.busy_drains_left.set(busy);
    }

    /// Makes the next drain read the clock. Called after a sleep.
    pub(crate) fn read_clock_next(&self) {
        self.pass_over(0);
    }

    pub(crate) const fn sweep_interval(&self) -> Duration {
        Duration::from_nanos(SWEEP_INTERVAL_NS)
    }

    /// Returns the time until the next deadline of a connection, or until the sweep that makes the
    /// next check of an idle connection, whichever is earlier.
    pub(crate) fn until_next(&self) -> Option<Duration> {
        // The drain after this wake-up reads the coarse clock, which lags: a wake-up without the
        // lag would find nothing due, and the next sleep would end at once.
        let by_coarse_clock = |at_ns: u64| {
            at_ns
                .max(self.last_sweep_ns.get() + SWEEP_INTERVAL_NS)
                .saturating_add(COARSE_LAG_NS)
        };
        let idle_ns = self.idle.borrow().first_ns().map(by_coarse_clock);
        let at_ns = self
            .deadlines
            .borrow()
            .first_ns()
            .into_iter()
            .chain(idle_ns)
            .min()?;
        // A time is due only when it has passed, so 1 is added.
        Some(Duration::from_nanos(
            at_ns.saturating_add(1).saturating_sub(self.device.now_ns()),
        ))
    }

    /// Called after a reading of the clock. Returns whether the connections should be swept.
    pub(crate) fn is_sweep_due(&self) -> bool {
        let now_ns = self.now_ns.get();
        let is_due = now_ns - self.last_sweep_ns.get() >= SWEEP_INTERVAL_NS;
        if is_due {
            self.last_sweep_ns.set(now_ns);
        }
        is_due
    }

    /// Makes [`Timers::take_due`] return this connection after `at_ns`, or earlier if it is armed
    /// for an earlier time.
    pub(crate) fn arm(&self, connection: &Rc<C>, at_ns: u64) {
        let timer = connection.timer();
        if timer.get().at_ns <= at_ns {
            return;
        }
        let serial = self.last_serial.get() + 1;
        self.last_serial.set(serial);
        timer.set(Timer { at_ns, serial });
        let armed = Armed {
            serial,
            connection: Rc::downgrade(connection),
        };
        self.deadlines
            .borrow_mut()
            .push(at_ns, armed, |armed| armed.live().is_some());
        if !self.has_deadlines.replace(true) {
            self.pass_over(self.drains_left.get());
        }
    }

    /// Makes [`Timers::take_idle`] return this connection after `at_ns`, rounded up to a multiple
    /// of [`IDLE_GRID_NS`].
    pub(crate) fn arm_idle(&self, connection: &Rc<C>, at_ns: u64) {
        let at_ns = at_ns
            .checked_next_multiple_of(IDLE_GRID_NS)
            .unwrap_or(NEVER);
        self.idle
            .borrow_mut()
            .push(at_ns, Rc::downgrade(connection), |connection| {
                connection.strong_count() > 0
            });
    }

    /// Takes a connection whose check for idleness is due.
    pub(crate) fn take_idle(&self) -> Option<Rc<C>> {
        let mut idle = self.idle.borrow_mut();
        std::iter::from_fn(|| idle.pop_before(self.now_ns.get()))
            .find_map(|connection| connection.upgrade())
    }

    /// Takes a connection whose timer has expired, and clears the timer.
    pub(crate) fn take_due(&self) -> Option<Rc<C>> {
        let mut deadlines = self.deadlines.borrow_mut();
        while let Some(armed) = deadlines.pop_before(self.now_ns.get()) {
            if let Some(connection) = armed.live() {
                connection.timer().set(Timer::NONE);
                return Some(connection);
            }
        }
        self.has_deadlines.set(!deadlines.is_empty());
        None
    }
}

/// Returns a duration in ns. Saturates after 584 years.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use mlx5::{Clock, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;

    struct NoConnection;

    impl Timed for NoConnection {
        fn timer(&self) -> &Cell<Timer> {
            unreachable!("no timer is armed")
        }
    }

    /// Returns the number of drains without arrivals that pass before a drain reads the clock.
    fn drains_without_reading(timers: &Timers<NoConnection>) -> usize {
        let drains = std::iter::repeat_with(|| timers.tick(true))
            .take_while(|is_time| !is_time)
            .count();
        timers.read_clock();
        drains
    }

    #[test]
    fn a_fast_loop_reads_the_clock_seldom_and_a_slow_one_at_every_drain() {
        let now_ns = Arc::new(AtomicU64::new(1));
        let fabric = FabricSpec::Local(LocalFabric::new());
        let clock = Clock::Manual(Arc::clone(&now_ns));
        let timers = Timers::start(
            Device::open(DeviceSpec::Soft(SoftOptions {
                fabric,
                clock,
                ..SoftOptions::default()
            }))
            .unwrap(),
        );
        let fast: Vec<_> = (0..9).map(|_| drains_without_reading(&timers)).collect();
        assert_eq!(fast, [0, 1, 3, 7, 15, 31, 63, 63, 63]);
        let slow = |_| {
            now_ns.fetch_add(PACE_NS, Ordering::Relaxed);
            drains_without_reading(&timers)
        };
        assert_eq!((0..5).map(slow).collect::<Vec<_>>(), [63, 0, 0, 0, 0]);
        // While there are deadlines, each drain that found nothing reads the clock.
        timers.has_deadlines.set(true);
        let fast: Vec<_> = (0..9).map(|_| drains_without_reading(&timers)).collect();
        assert_eq!(fast, [0; 9]);
        assert!(!timers.tick(false));
        timers.read_clock_next();
        assert!(timers.tick(false), "after a sleep");
    }
}
