//! A nanosecond clock cheap enough to read twice per operation.
//!
//! If the kernel itself trusts the time stamp counter (it offers `tsc` as a clock source and the
//! CPU flags promise a constant rate), the counter is calibrated once against `CLOCK_MONOTONIC` and
//! read directly. Otherwise `CLOCK_MONOTONIC` is read through the vDSO. Every result records which
//! one is used.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Length of the calibration. The two clocks are read within about 50 ns of each other at its
/// beginning and at its end, so the error of the rate is about 2.5 ppm.
const CALIBRATION: Duration = Duration::from_millis(20);

/// The source of a [`Clock`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "source")]
pub enum ClockSource {
    /// The CPU's time stamp counter, calibrated at start.
    Tsc {
        /// Ticks per second found by calibration.
        hz: u64,
    },
    /// `clock_gettime(CLOCK_MONOTONIC)`.
    Monotonic,
    /// The clock of a simulation, in which only the models take time.
    Virtual,
}

impl fmt::Display for ClockSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tsc { hz } => write!(f, "calibrated TSC at {:.3} GHz", *hz as f64 / 1e9),
            Self::Monotonic => f.write_str("CLOCK_MONOTONIC"),
            Self::Virtual => f.write_str("virtual time"),
        }
    }
}

/// A clock in nanoseconds. Copy it to each thread; readings of all copies are comparable.
///
/// A reading does not order the memory accesses around it: a CPU may take it several ns early.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Reading);

#[derive(Debug, Clone, Copy)]
enum Reading {
    Tsc {
        base_tick: u64,
        base_ns: u64,
        ns_per_tick_q32: u64,
    },
    Monotonic,
}

impl Clock {
    /// Returns the best clock of this machine. Blocks about 20 ms for calibration if the counter is
    /// usable.
    pub fn detect() -> Self {
        if tsc::kernel_trusts_it() {
            Self::calibrate()
        } else {
            Self::monotonic()
        }
    }

    /// Returns a clock that reads `CLOCK_MONOTONIC`, on any machine.
    pub const fn monotonic() -> Self {
        Self(Reading::Monotonic)
    }

    /// Returns nanoseconds on the scale of `CLOCK_MONOTONIC`.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        match self.0 {
            Reading::Tsc {
                base_tick,
                base_ns,
                ns_per_tick_q32,
            } => {
                let ticks = tsc::read().saturating_sub(base_tick);
                base_ns + ((u128::from(ticks) * u128::from(ns_per_tick_q32)) >> 32) as u64
            }
            Reading::Monotonic => monotonic_ns(),
        }
    }

    /// Returns the source, for the result.
    pub fn source(&self) -> ClockSource {
        match self.0 {
            Reading::Tsc {
                ns_per_tick_q32, ..
            } => ClockSource::Tsc {
                hz: ((1e9 * 4_294_967_296.0) / ns_per_tick_q32 as f64).round() as u64,
            },
            Reading::Monotonic => ClockSource::Monotonic,
        }
    }

    fn calibrate() -> Self {
        let (base_tick, base_ns) = paired_reading();
        std::thread::sleep(CALIBRATION);
        let (tick, ns) = paired_reading();
        let ticks = tick.saturating_sub(base_tick);
        if ticks == 0 {
            return Self::monotonic();
        }
        let elapsed_ns = u128::from(ns.saturating_sub(base_ns));
        let ns_per_tick_q32 = ((elapsed_ns << 32) / u128::from(ticks)) as u64;
        Self(Reading::Tsc {
            base_tick,
            base_ns,
            ns_per_tick_q32,
        })
    }
}

/// Returns a reading of the counter and one of `CLOCK_MONOTONIC` at the same moment: the fastest of
/// several attempts, each a reading of the clock between two readings of the counter.
fn paired_reading() -> (u64, u64) {
    let mut best = (u64::MAX, 0, 0);
    for _ in 0..16 {
        let before = tsc::read();
        let ns = monotonic_ns();
        let after = tsc::read();
        let width = after.saturating_sub(before);
        if width < best.0 {
            best = (width, before + width / 2, ns);
        }
    }
    (best.1, best.2)
}

fn monotonic_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a live, writable timespec. CLOCK_MONOTONIC always exists on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(target_arch = "x86_64")]
mod tsc {
    const SOURCES: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";

    /// Returns whether the counter is usable: its rate is constant, and the kernel keeps `tsc`
    /// among the available clock sources, which it does only while its watchdog confirms the
    /// counter.
    pub(super) fn kernel_trusts_it() -> bool {
        let offered = std::fs::read_to_string(SOURCES)
            .is_ok_and(|sources| sources.split_whitespace().any(|source| source == "tsc"));
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let flags = info.lines().find(|line| line.starts_with("flags"));
        let has =
            |flag| flags.is_some_and(|flags| flags.split_whitespace().any(|word| word == flag));
        let constant = has("constant_tsc") && has("nonstop_tsc");
        offered && constant
    }

    #[inline]
    pub(super) fn read() -> u64 {
        // SAFETY: RDTSC has no precondition in user mode on Linux (CR4.TSD is clear).
        unsafe { core::arch::x86_64::_rdtsc() }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod tsc {
    pub(super) fn kernel_trusts_it() -> bool {
        false
    }

    pub(super) fn read() -> u64 {
        super::monotonic_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock must stay on the monotonic scale, or latencies of two ranks are not comparable.
    #[test]
    fn calibrated_clock_agrees_with_monotonic() {
        let clock = Clock::detect();
        for _ in 0..20 {
            let before = monotonic_ns();
            let now = clock.now_ns();
            let after = monotonic_ns();
            // The slack of 100 us covers the calibration error during this test.
            assert!(
                now + 100_000 >= before && now <= after + 100_000,
                "{before} <= {now} <= {after}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn clock_never_runs_backwards_in_one_thread() {
        let clock = Clock::detect();
        let mut last = clock.now_ns();
        for _ in 0..100_000 {
            let now = clock.now_ns();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn source_survives_json() {
        for source in [
            Clock::monotonic().source(),
            ClockSource::Tsc { hz: 2_449_999_000 },
        ] {
            let text = serde_json::to_string(&source).unwrap();
            assert_eq!(serde_json::from_str::<ClockSource>(&text).unwrap(), source);
        }
    }
}
