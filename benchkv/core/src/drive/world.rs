//! The world of a simulated job: its CPUs, its network, its changes and its observer.

use mlx5::{Did, NicParameters};

use super::faults::Faults;
use crate::backend::BackendError;

/// The costs of CPUs, in ns. A core does the work of one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// Cost of each round of a daemon, in addition to what it finds.
    pub round_ns: u64,
    /// Cost of a poll that a policy adds to a round.
    pub poll_ns: u64,
    /// Cost of a message that a round of a daemon receives and sends on.
    pub message_ns: u64,
    /// Cost of a completion that a round takes.
    pub completion_ns: u64,
    /// Cost of a WRITE or SEND that a round posts.
    pub write_ns: u64,
    /// Cost of each step of a client, in addition to what it finds.
    pub client_ns: u64,
    /// Cost of the issue of an operation by a client. The end of an operation costs the same.
    pub operation_ns: u64,
    /// Delay until a polling core sees a store of another core.
    pub line_ns: u64,
    /// Cost of the wait for the memory of other cores, once in each turn that finds messages.
    pub stall_ns: u64,
    /// Maximum random deviation, in percent, of the time of a turn from these costs, up or down
    /// alike: 0 to 100.
    pub noise: u64,
}

impl Default for Cpu {
    /// Returns assumed costs. For one operation they add up to about the time of the instructions
    /// that `scripts/instructions` counts, at 3 instructions per nanosecond. The distribution of
    /// this time over the costs is a guess.
    fn default() -> Self {
        Self {
            round_ns: 60,
            poll_ns: 25,
            message_ns: 70,
            completion_ns: 40,
            write_ns: 100,
            client_ns: 25,
            operation_ns: 60,
            line_ns: 0,
            stall_ns: 0,
            noise: 0,
        }
    }
}

impl Cpu {
    /// Returns the costs with their names on a command line. The last three are not costs of a
    /// core.
    pub const fn named(&mut self) -> [(&'static str, &mut u64); 10] {
        [
            ("round", &mut self.round_ns),
            ("poll", &mut self.poll_ns),
            ("message", &mut self.message_ns),
            ("completion", &mut self.completion_ns),
            ("write", &mut self.write_ns),
            ("client", &mut self.client_ns),
            ("operation", &mut self.operation_ns),
            ("line", &mut self.line_ns),
            ("stall", &mut self.stall_ns),
            ("noise", &mut self.noise),
        ]
    }

    /// Returns the costs of a CPU that is slower by `factor`.
    pub(super) fn times(mut self, factor: u64) -> Self {
        self.named()
            .into_iter()
            .take(7)
            .for_each(|(_, ns)| *ns = ns.saturating_mul(factor));
        self
    }
}

/// The parts of a simulation other than the job itself.
#[derive(Debug, Clone, Default)]
pub struct World {
    /// The CPUs.
    pub cpu: Cpu,
    /// The network and its NICs, one per rank.
    pub nic: NicParameters,
    /// Whether the devices check rules that a NIC does not check, and hash their actions. It is for
    /// tests, because it takes most of the time of a simulation.
    pub strict: bool,
    /// Rounds with work between two samples of a daemon's time series; `None`: no series.
    pub trace_interval: Option<u64>,
    /// The faults.
    pub faults: Faults,
    /// The changes in mid-run, in order.
    pub events: Vec<Event>,
    /// Observer of every turn.
    pub on_turn: Option<fn(&Turn<'_>)>,
}

/// A change in mid-run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The time, in ns since the beginning of the job.
    pub at_ns: u64,
    /// The change.
    pub change: Change,
}

/// The kinds of [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The policies of all daemons act (`true`), or are suspended (`false`).
    Policies(bool),
    /// The first `clients` of each rank keep up to `depth` operations outstanding, the other
    /// clients none.
    Load {
        /// Number of clients.
        clients: usize,
        /// Maximum number of outstanding operations of each client, at most the number of the job.
        depth: usize,
    },
    /// The host of a rank loses power.
    Kill(usize),
}

/// A turn of a daemon or client.
#[derive(Debug)]
pub struct Turn<'a> {
    /// Time at which the turn begins, in ns.
    pub at_ns: u64,
    /// Rank of the daemon or client.
    pub rank: usize,
    /// Kind of the thread: daemon or client.
    pub who: &'a str,
    /// Number of the daemon or client in its rank.
    pub number: usize,
    /// Number of messages that a daemon moved; for a client, the number of operations that it issued
    /// plus the number of operations that ended.
    pub moved: usize,
    /// Time that the turn took, or time for which the thread has nothing to do.
    pub did: Did,
}

/// The reason why a simulated job could not begin, or ended early.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A rank could not be made or connected.
    #[error(transparent)]
    Setup(BackendError),
    /// A daemon or client failed.
    #[error("{who} of rank {rank}, at {at_ns} ns: {source}")]
    Failed {
        /// The daemon or client.
        who: String,
        /// Rank of the daemon or client.
        rank: usize,
        /// Virtual time, in ns.
        at_ns: u64,
        /// The reason.
        source: BackendError,
    },
}
