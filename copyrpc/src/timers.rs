//! The clock of a context, and when its connections' deadlines come.
//!
//! The clock is the device's, so that virtual time is that of both. It is read once per drain that found nothing and at every
//! [`CLOCK_INTERVAL`]th drain under load, and by calls that have a deadline. So a deadline is noticed at the first of these that finds it
//! passed, and ends its call in the drain that looked: never early, late by at most as many drains. While no call has a deadline, a coarse
//! reading is enough, some milliseconds behind for a fifth of the cost: all that is left to do then is done every 10 ms or more seldom.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use mlx5::Device;

use crate::connection::Connection;
use crate::link::Deadlines;

/// Under load every this many drains look at the clock.
const CLOCK_INTERVAL: u32 = 64;
/// How often connections are looked at for silence, and for requests that wait.
const SWEEP_INTERVAL_NS: u64 = 10_000_000;
/// Idle connections that a sweep looks at, at most: those whose turn has come. More wait for the next sweeps.
pub(crate) const IDLE_LOOKS: usize = 32;
/// Looks at idle connections are put off to multiples of this, so that a process that sleeps wakes for many at once.
const IDLE_GRID_NS: u64 = 50_000_000;
/// How far a coarse reading is behind, at most: a tick of a kernel with the fewest.
const COARSE_LAG_NS: u64 = 10_000_000;
/// No deadline.
const NEVER: u64 = u64::MAX;

/// The one timer a connection has in the heap that counts; others of it are dead.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timer {
    at_ns: u64,
    serial: u64,
}

impl Timer {
    pub(crate) const NONE: Self = Self { at_ns: NEVER, serial: 0 };
}

#[derive(Debug)]
struct Armed<U> {
    serial: u64,
    connection: Weak<Connection<U>>,
}

impl<U> Armed<U> {
    fn live(&self) -> Option<Rc<Connection<U>>> {
        self.connection.upgrade().filter(|connection| connection.timer().get().serial == self.serial)
    }
}

/// Time in nanoseconds of the device's clock.
#[derive(Debug)]
pub(crate) struct Timers<U> {
    device: Device,
    now_ns: Cell<u64>,
    drains_since_look: Cell<u32>,
    last_sweep_ns: Cell<u64>,
    deadlines: RefCell<Deadlines<Armed<U>>>,
    /// When each connection has its next look for idleness.
    idle: RefCell<Deadlines<Weak<Connection<U>>>>,
    last_serial: Cell<u64>,
}

impl<U> Timers<U> {
    pub(crate) fn start(device: Device) -> Self {
        let now_ns = device.coarse_now_ns();
        Self {
            device,
            now_ns: Cell::new(now_ns),
            drains_since_look: Cell::new(0),
            last_sweep_ns: Cell::new(now_ns),
            deadlines: RefCell::new(Deadlines::new()),
            idle: RefCell::new(Deadlines::new()),
            last_serial: Cell::new(0),
        }
    }

    /// When the clock was last read by a drain.
    pub(crate) fn now_ns(&self) -> u64 {
        self.now_ns.get()
    }

    /// The time `timeout` from now, for [`Timers::arm`].
    pub(crate) fn deadline_in(&self, timeout: Duration) -> u64 {
        self.device.now_ns().saturating_add(nanoseconds(timeout))
    }

    /// Called once per drain. Whether it looked at the clock.
    pub(crate) fn tick(&self, is_idle: bool) -> bool {
        let drains = self.drains_since_look.get() + 1;
        if !is_idle && drains < CLOCK_INTERVAL {
            self.drains_since_look.set(drains);
            return false;
        }
        self.drains_since_look.set(0);
        let now_ns = if self.deadlines.borrow().is_empty() { self.device.coarse_now_ns() } else { self.device.now_ns() };
        // The coarse reading is behind the other.
        self.now_ns.set(self.now_ns.get().max(now_ns));
        true
    }

    /// Has the next drain look at the clock, after a sleep.
    pub(crate) fn look_next(&self) {
        self.drains_since_look.set(CLOCK_INTERVAL);
    }

    pub(crate) const fn sweep_interval(&self) -> Duration {
        Duration::from_nanos(SWEEP_INTERVAL_NS)
    }

    /// From now until a connection is due, or the sweep that looks at an idle one; it may turn out that none is.
    pub(crate) fn until_next(&self) -> Option<Duration> {
        // A drain that wakes for this reads the coarse clock: earlier, it would find nothing due, and the next sleep would end at once.
        let by_coarse_clock = |at_ns: u64| at_ns.max(self.last_sweep_ns.get() + SWEEP_INTERVAL_NS).saturating_add(COARSE_LAG_NS);
        let idle_ns = self.idle.borrow().first_ns().map(by_coarse_clock);
        let at_ns = self.deadlines.borrow().first_ns().into_iter().chain(idle_ns).min()?;
        // Due is what has passed.
        Some(Duration::from_nanos(at_ns.saturating_add(1).saturating_sub(self.device.now_ns())))
    }

    /// After a look at the clock: whether the connections should be swept.
    pub(crate) fn is_sweep_due(&self) -> bool {
        let now_ns = self.now_ns.get();
        let is_due = now_ns - self.last_sweep_ns.get() >= SWEEP_INTERVAL_NS;
        if is_due {
            self.last_sweep_ns.set(now_ns);
        }
        is_due
    }

    /// Has [`Timers::take_due`] give out this connection after `at_ns`, or earlier if it was to be already.
    pub(crate) fn arm(&self, connection: &Rc<Connection<U>>, at_ns: u64) {
        let timer = connection.timer();
        if timer.get().at_ns <= at_ns {
            return;
        }
        let serial = self.last_serial.get() + 1;
        self.last_serial.set(serial);
        timer.set(Timer { at_ns, serial });
        let armed = Armed { serial, connection: Rc::downgrade(connection) };
        self.deadlines.borrow_mut().push(at_ns, armed, |armed| armed.live().is_some());
    }

    /// Has [`Timers::take_idle`] give out this connection after `at_ns`.
    pub(crate) fn arm_idle(&self, connection: &Rc<Connection<U>>, at_ns: u64) {
        let at_ns = at_ns.checked_next_multiple_of(IDLE_GRID_NS).unwrap_or(NEVER);
        self.idle.borrow_mut().push(at_ns, Rc::downgrade(connection), |connection| connection.strong_count() > 0);
    }

    /// A connection whose look for idleness is due.
    pub(crate) fn take_idle(&self) -> Option<Rc<Connection<U>>> {
        let mut idle = self.idle.borrow_mut();
        std::iter::from_fn(|| idle.pop_before(self.now_ns.get())).find_map(|connection| connection.upgrade())
    }

    /// A connection whose time has passed. It has no timer then.
    pub(crate) fn take_due(&self) -> Option<Rc<Connection<U>>> {
        let mut deadlines = self.deadlines.borrow_mut();
        if deadlines.is_empty() {
            return None;
        }
        while let Some(armed) = deadlines.pop_before(self.now_ns.get()) {
            if let Some(connection) = armed.live() {
                connection.timer().set(Timer::NONE);
                return Some(connection);
            }
        }
        None
    }
}

/// Saturates after 584 years.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(NEVER)
}
