//! Counters of what the protocol did.

use std::ops::AddAssign;

/// Counters of one connection since it was made; add them up for a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls taken.
    pub calls: u64,
    /// Replies written, error replies included.
    pub replies: u64,
    /// Batches posted: every WRITE with Immediate, markers and metadata-only ones included.
    pub batches_sent: u64,
    /// Messages in them.
    pub messages_sent: u64,
    /// Bytes in them.
    pub bytes_sent: u64,
    /// Wrap markers among them.
    pub wraps: u64,
    /// Batches that were begun only to tell flow-control words.
    pub metadata_only: u64,
    /// Receive completions taken.
    pub batches_received: u64,
    /// Messages parsed.
    pub messages_received: u64,
    /// READs of the peer's published record, for whatever reason.
    pub reads: u64,
    /// Those among them that only asked whether a silent peer lives.
    pub probes: u64,
    /// Calls refused because the ring was full.
    pub ring_full: u64,
    /// Calls refused because credit was short.
    pub insufficient_credit: u64,
    /// Flushes that stopped at the limit of batches in flight.
    pub batch_stalls: u64,
    /// Flushes that stopped at the window.
    pub window_stalls: u64,
    /// Calls ended by their deadline.
    pub deadlines_exceeded: u64,
    /// Calls cancelled.
    pub cancelled: u64,
    /// Responses to calls that were cancelled or had run out of time.
    pub late_responses: u64,
    /// Responses to no request that waits for one: duplicate or forged.
    pub stale_responses: u64,
}

impl AddAssign for Stats {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.replies += other.replies;
        self.batches_sent += other.batches_sent;
        self.messages_sent += other.messages_sent;
        self.bytes_sent += other.bytes_sent;
        self.wraps += other.wraps;
        self.metadata_only += other.metadata_only;
        self.batches_received += other.batches_received;
        self.messages_received += other.messages_received;
        self.reads += other.reads;
        self.probes += other.probes;
        self.ring_full += other.ring_full;
        self.insufficient_credit += other.insufficient_credit;
        self.batch_stalls += other.batch_stalls;
        self.window_stalls += other.window_stalls;
        self.deadlines_exceeded += other.deadlines_exceeded;
        self.cancelled += other.cancelled;
        self.late_responses += other.late_responses;
        self.stale_responses += other.stale_responses;
    }
}
