//! The activity of a daemon, sampled over time: a [`Series`] of [`Sample`]s, and the [`recorder`]
//! that makes it while a job runs.

pub mod recorder;

use serde::{Deserialize, Serialize};

/// The state of a daemon at one time. Its fields are columns of a series, in their order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Time since this rank's warm-up began, in ns.
    pub time_ns: u64,
    /// Number of the measured run during which the sample was taken, from 0; `None` (an empty
    /// field) outside of a run.
    pub run: Option<u16>,
    /// Counter: rounds of the daemon's loop.
    pub loops: u64,
    /// Counter: completions taken.
    pub cqes: u64,
    /// Counter: messages that the daemon's rounds moved: messages of clients, of daemons and of
    /// other ranks.
    pub moved: u64,
    /// Counter: messages in the WRITEs, SENDs or active messages to other ranks.
    pub messages: u64,
    /// Counter: WRITEs, SENDs or active messages posted to other ranks.
    pub writes: u64,
    /// Counter: flushes that posted nothing because copyrpc's batch window was full.
    pub window_stalls: u64,
    /// Number of requests sent to other ranks and not answered yet.
    pub outstanding: u64,
    /// Number of requests that wait for room on their way out of the daemon.
    pub backlog: u64,
    /// Number of answers of other ranks that are held to be released together.
    pub held: u64,
    /// Maximum time for which answers are held, in ns; 0: answers are not held.
    pub hold_ns: u64,
}

/// The samples of a daemon, in the order of time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Series {
    /// The samples.
    pub samples: Vec<Sample>,
    /// The rank at the other end of each endpoint with which the daemon sends requests.
    pub endpoints: Vec<usize>,
    /// Numbers of requests sent through each endpoint and not answered yet: the numbers of all
    /// endpoints for the first sample, then for the second, and so on.
    pub by_endpoint: Vec<u32>,
}

impl Series {
    /// Returns each sample, and for each endpoint the number of its unanswered requests at that
    /// time.
    pub fn rows(&self) -> impl Iterator<Item = (&Sample, &[u32])> {
        let width = self.endpoints.len();
        let row = move |(at, sample)| {
            (
                sample,
                self.by_endpoint
                    .get(at * width..(at + 1) * width)
                    .unwrap_or_default(),
            )
        };
        self.samples.iter().enumerate().map(row)
    }
}
