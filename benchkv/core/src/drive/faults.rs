//! [`Faults`]: the faults of a simulated job.

use mlx5::Syndrome;

/// Faults of a simulated job: on given ranks at given times, or at random by one seed. The default
/// has none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of the random faults: the same seed gives the same faults.
    pub seed: u64,
    /// Rank whose host loses power, and the time.
    pub killed: Option<At>,
    /// Rank whose threads are paused, the time, and the length in ns.
    pub stopped: Option<(At, u64)>,
    /// Rank whose threads are slower, and the factor.
    pub slow: Option<(usize, u64)>,
    /// Share of messages that are delayed, in permille.
    pub delay_permille: u16,
    /// Length of that delay, in ns.
    pub delay_ns: u64,
    /// Share of messages that find no receive at the first try, in permille.
    pub rnr_permille: u16,
    /// Rank with a failing queue pair, and the number of the device's operation that fails.
    pub error: Option<(usize, u64)>,
    /// Share of completions that do not wake a thread, in permille. Threads then poll again after
    /// [`DAEMON_SLEEP`](crate::drain::DAEMON_SLEEP) at the latest.
    pub lost_permille: u16,
}

/// A rank and a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// The rank.
    pub rank: usize,
    /// The time, in ns since the beginning of the job.
    pub at_ns: u64,
}

impl Faults {
    /// Returns the faults of the device of a rank.
    pub(super) fn of_device(&self, rank: usize) -> mlx5::Faults {
        let failing = self.error.filter(|(failing, _)| *failing == rank);
        mlx5::Faults {
            seed: self.seed ^ (rank as u64) << 32,
            delay_permille: self.delay_permille,
            delay_ns: self.delay_ns,
            rnr_permille: self.rnr_permille,
            fail: failing.map(|(_, operation)| (operation, Syndrome::RemoteAccess)),
            ..mlx5::Faults::default()
        }
    }

    /// Returns the time for which the threads of a rank are still paused at `now_ns`, in ns; `None`
    /// if they are not paused.
    pub(super) fn stop_ns(&self, rank: usize, now_ns: u64) -> Option<u64> {
        let (At { at_ns, .. }, ns) = self.stopped.filter(|(at, _)| at.rank == rank)?;
        let end_ns = at_ns.saturating_add(ns);
        (at_ns..end_ns).contains(&now_ns).then(|| end_ns - now_ns)
    }

    pub(super) fn slowness(&self, rank: usize) -> u64 {
        let slow = self.slow.filter(|(slow, _)| *slow == rank);
        slow.map_or(1, |(_, times)| times)
    }
}
