//! The clock of a context, and when its connections' deadlines come.
//!
//! The clock is the device's, so that virtual time is that of both. It is read by calls that have a deadline, by drains that found nothing while
//! a call may have one, and by every drain after a pause. The pause is none when a millisecond or more has passed since the last but one such
//! look, else it grows: 1, 3, 7 and at most 63 drains. So an owner that does something else for long between drains is noticed by each of
//! them, and one that polls as fast as it can spends nothing on the clock; the pause is at most as many drains as came in the millisecond
//! before, and one. A deadline is noticed at the first look that finds it passed, and ends its call in the drain that looked: never early,
//! late by at most as many drains. While no call has a deadline, a coarse reading is enough, some milliseconds behind for a fifth of the cost:
//! all that is left to do then is done every 10 ms or more seldom.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use mlx5::Device;

use crate::link::Deadlines;

/// Most drains without a look at the clock in between.
const MAX_PAUSE: u32 = 63;
/// Looks come at every drain while each finds that so much has passed.
const PACE_NS: u64 = 1_000_000;
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

/// A connection, as far as timers know it.
pub(crate) trait Timed {
    /// Its timer that counts.
    fn timer(&self) -> &Cell<Timer>;
}

#[derive(Debug)]
struct Armed<C> {
    serial: u64,
    connection: Weak<C>,
}

impl<C: Timed> Armed<C> {
    fn live(&self) -> Option<Rc<C>> {
        self.connection.upgrade().filter(|connection| connection.timer().get().serial == self.serial)
    }
}

/// Time in nanoseconds of the device's clock.
#[derive(Debug)]
pub(crate) struct Timers<C> {
    device: Device,
    now_ns: Cell<u64>,
    /// Drains until the next look, or until [`Timers::tick_slowly`] decides: at once while there are deadlines.
    drains_left: Cell<u32>,
    /// Drains until the next look that found something, while there are deadlines.
    busy_drains_left: Cell<u32>,
    /// Drains passed over after the last look.
    pause: Cell<u32>,
    /// When a look found that [`PACE_NS`] had passed.
    moved_ns: Cell<u64>,
    last_sweep_ns: Cell<u64>,
    deadlines: RefCell<Deadlines<Armed<C>>>,
    /// There is something in it.
    has_deadlines: Cell<bool>,
    /// When each connection has its next look for idleness.
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

    /// When the clock was last read by a drain.
    pub(crate) fn now_ns(&self) -> u64 {
        self.now_ns.get()
    }

    /// The time `timeout` from now, for [`Timers::arm`].
    pub(crate) fn deadline_in(&self, timeout: Duration) -> u64 {
        self.device.now_ns().saturating_add(nanoseconds(timeout))
    }

    /// Called once per drain. Whether it is time for [`Timers::look`].
    #[inline]
    pub(crate) fn tick(&self, is_idle: bool) -> bool {
        let left = self.drains_left.get();
        if left == 0 {
            return self.tick_slowly(is_idle);
        }
        self.drains_left.set(left - 1);
        false
    }

    /// One that found nothing looks, and one that found something when its pause is over, which there is with deadlines only.
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

    /// Looks at the clock.
    pub(crate) fn look(&self) {
        let now_ns = if self.has_deadlines.get() { self.device.now_ns() } else { self.device.coarse_now_ns() };
        // The coarse reading is behind the other.
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

    /// Has so many drains pass over the look at the clock.
    fn pass_over(&self, drains: u32) {
        let (idle, busy) = if self.has_deadlines.get() { (0, drains) } else { (drains, 0) };
        self.drains_left.set(idle);
        self.busy_drains_left.set(busy);
    }

    /// Makes the next drain look at the clock, after a sleep.
    pub(crate) fn look_next(&self) {
        self.pass_over(0);
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
    pub(crate) fn arm(&self, connection: &Rc<C>, at_ns: u64) {
        let timer = connection.timer();
        if timer.get().at_ns <= at_ns {
            return;
        }
        let serial = self.last_serial.get() + 1;
        self.last_serial.set(serial);
        timer.set(Timer { at_ns, serial });
        let armed = Armed { serial, connection: Rc::downgrade(connection) };
        self.deadlines.borrow_mut().push(at_ns, armed, |armed| armed.live().is_some());
        if !self.has_deadlines.replace(true) {
            self.pass_over(self.drains_left.get());
        }
    }

    /// Has [`Timers::take_idle`] give out this connection after `at_ns`.
    pub(crate) fn arm_idle(&self, connection: &Rc<C>, at_ns: u64) {
        let at_ns = at_ns.checked_next_multiple_of(IDLE_GRID_NS).unwrap_or(NEVER);
        self.idle.borrow_mut().push(at_ns, Rc::downgrade(connection), |connection| connection.strong_count() > 0);
    }

    /// A connection whose look for idleness is due.
    pub(crate) fn take_idle(&self) -> Option<Rc<C>> {
        let mut idle = self.idle.borrow_mut();
        std::iter::from_fn(|| idle.pop_before(self.now_ns.get())).find_map(|connection| connection.upgrade())
    }

    /// A connection whose time has passed. It has no timer then.
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

/// Saturates after 584 years.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use mlx5::{Clock, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;

    struct NoConnection(Cell<Timer>);

    impl Timed for NoConnection {
        fn timer(&self) -> &Cell<Timer> {
            &self.0
        }
    }

    /// Drains that found nothing and did not look, and the look behind them.
    fn drains_without_look(timers: &Timers<NoConnection>) -> usize {
        let drains = std::iter::repeat_with(|| timers.tick(true)).take_while(|is_time| !is_time).count();
        timers.look();
        drains
    }

    #[test]
    fn who_polls_as_fast_as_it_can_looks_seldom_and_who_is_slow_at_every_drain() {
        let now_ns = Arc::new(AtomicU64::new(1));
        let (fabric, clock) = (FabricSpec::Local(LocalFabric::new()), Clock::Manual(Arc::clone(&now_ns)));
        let timers = Timers::start(Device::open(DeviceSpec::Soft(SoftOptions { fabric, clock, ..SoftOptions::default() })).unwrap());
        let fast: Vec<_> = (0..9).map(|_| drains_without_look(&timers)).collect();
        assert_eq!(fast, [0, 1, 3, 7, 15, 31, 63, 63, 63]);
        let slow = |_| {
            now_ns.fetch_add(PACE_NS, Ordering::Relaxed);
            drains_without_look(&timers)
        };
        assert_eq!((0..5).map(slow).collect::<Vec<_>>(), [63, 0, 0, 0, 0]);
        // A deadline is looked for by each drain that found nothing, and not by others.
        timers.has_deadlines.set(true);
        let fast: Vec<_> = (0..9).map(|_| drains_without_look(&timers)).collect();
        assert_eq!(fast, [0; 9]);
        assert!(!timers.tick(false));
        timers.look_next();
        assert!(timers.tick(false), "after a sleep");
    }
}
