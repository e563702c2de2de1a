//! What a daemon was doing, sampled over time: a [`Sample`], and the [`recorder`] that takes them while a job runs.

pub mod recorder;

/// How a daemon stood at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Since this rank's warm-up began.
    pub time_ns: u64,
    /// The measured run it lies in, from 0; `None` (an empty field): in none.
    pub run: Option<u16>,
    /// Counter: rounds over all phases.
    pub loops: u64,
    /// Counter: completions taken.
    pub cqes: u64,
    /// Counter: messages that rounds moved, of clients, daemons and other ranks.
    pub moved: u64,
    /// Counter: messages in WRITEs to other ranks.
    pub messages: u64,
    /// Counter: WRITEs posted to other ranks.
    pub writes: u64,
    /// Counter: flushes that posted nothing because copyrpc's batch window was full.
    pub window_stalls: u64,
    /// Requests sent to other ranks and not answered yet.
    pub outstanding: u64,
    /// Requests that wait on their way out of the daemon.
    pub backlog: u64,
    /// Answers of other ranks that wait to be released together.
    pub held: u64,
    /// How long answers are held at most; 0: not.
    pub hold_ns: u64,
    /// Polls added to a round while they find nothing.
    pub poll_budget: u64,
    /// From a flush to the next completion, smoothed; 0 while no policy asks for it.
    pub rtt_ns: u64,
}
