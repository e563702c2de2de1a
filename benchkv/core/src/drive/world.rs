//! The world of a simulated job: its CPUs, its network, and how it is watched.

use mlx5::{Did, NicParameters};

use super::faults::Faults;
use crate::backend::BackendError;

/// The costs of CPUs, in ns. A core does the work of one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// A round of a daemon in which nothing is found.
    pub round_ns: u64,
    /// A poll that a policy adds to a round.
    pub poll_ns: u64,
    /// A message that a round of a daemon moves, received and sent on.
    pub message_ns: u64,
    /// A completion that it takes.
    pub completion_ns: u64,
    /// A WRITE or SEND posted.
    pub write_ns: u64,
    /// A step of a client in which nothing is found.
    pub client_ns: u64,
    /// An operation that it issues, or that ends.
    pub operation_ns: u64,
    /// Until one that polls sees what another core has written for it.
    pub line_ns: u64,
    /// The wait for the memory of other cores in a turn that finds messages, once a turn.
    pub stall_ns: u64,
}

impl Default for Cpu {
    /// Assumptions, not measurements: an operation through all its threads takes of the order of the instructions that `scripts/instructions`
    /// counts for it, at 3 a nanosecond; how they are shared out is a guess.
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
        }
    }
}

impl Cpu {
    /// A slower one.
    pub(super) const fn times(self, times: u64) -> Self {
        let Self { round_ns, poll_ns, message_ns, completion_ns, write_ns, client_ns, operation_ns, line_ns, stall_ns } = self;
        Self {
            round_ns: round_ns.saturating_mul(times),
            poll_ns: poll_ns.saturating_mul(times),
            message_ns: message_ns.saturating_mul(times),
            completion_ns: completion_ns.saturating_mul(times),
            write_ns: write_ns.saturating_mul(times),
            client_ns: client_ns.saturating_mul(times),
            operation_ns: operation_ns.saturating_mul(times),
            line_ns,
            stall_ns,
        }
    }
}

/// The parts of a simulation beside the job itself.
#[derive(Debug, Clone, Default)]
pub struct World {
    /// The CPUs.
    pub cpu: Cpu,
    /// The network and its NICs, one a rank.
    pub nic: NicParameters,
    /// Whether the devices check everything a NIC would not, and hash all they do: for tests; it takes most of the time.
    pub strict: bool,
    /// Rounds between the samples of a daemon's time series; `None`: no series.
    pub trace_interval: Option<u64>,
    /// The faults.
    pub faults: Faults,
    /// The changes in mid-run, in order.
    pub events: Vec<Event>,
    /// Is told of every turn.
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
    /// The policies of all daemons act, or rest.
    Policies(bool),
    /// The first `clients` of each rank have up to `depth` operations outstanding, and the others none.
    Load {
        /// Their number.
        clients: usize,
        /// Up to the job's.
        depth: usize,
    },
    /// The host of a rank loses power.
    Kill(usize),
}

/// A turn of a daemon or client.
#[derive(Debug)]
pub struct Turn<'a> {
    /// When it began.
    pub at_ns: u64,
    /// Its rank.
    pub rank: usize,
    /// Daemon or client.
    pub who: &'a str,
    /// Its number among those of the rank.
    pub number: usize,
    /// Messages it moved; operations of a client.
    pub moved: usize,
    /// The time that it took, or for which there is nothing to do.
    pub did: Did,
}

/// Why a simulated job ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// Something could not be made or connected.
    #[error(transparent)]
    Setup(BackendError),
    /// A daemon or client failed.
    #[error("{who} of rank {rank}, at {at_ns} ns: {source}")]
    Failed {
        /// The daemon or client.
        who: String,
        /// Its rank.
        rank: usize,
        /// When.
        at_ns: u64,
        /// How.
        source: BackendError,
    },
}
