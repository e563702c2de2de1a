//! Counters of the protocol.

use std::ops::AddAssign;

/// Counters of one connection since it was made; [`Context::stats`](crate::Context::stats) returns their sums over all connections ever
/// made.
///
/// All only grow. Rates and means are their differences over a time: WRITEs per second are `batches_sent`, messages per WRITE
/// `messages_sent / batches_sent`, bytes per WRITE `bytes_sent / batches_sent`, calls that had to wait `ring_full + insufficient_credit`.
/// Receivers that were not ready (RNR) are counted by devices and not here; the batch limit (B1) excludes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls accepted, without those that were refused.
    pub calls: u64,
    /// Replies written. Includes those that report that a request was refused, dropped by its handler or met a closing end.
    pub replies: u64,
    /// Batches posted: every WRITE with Immediate, wrap markers and metadata-only batches included.
    pub batches_sent: u64,
    /// Requests and responses in them.
    pub messages_sent: u64,
    /// Bytes in them as the WRITEs carry them: 32 of metadata each, and per message its header, payload and padding. Excludes bytes that
    /// a wrap skips.
    pub bytes_sent: u64,
    /// Wrap markers among `batches_sent`.
    pub wraps: u64,
    /// Batches begun only to tell flow-control words (L4) or that this end closes (G1). If such a batch has to wait to be posted,
    /// messages may join it.
    pub metadata_only: u64,
    /// Batches of any kind announced by receive completions.
    pub batches_received: u64,
    /// Requests and responses parsed, stale and late responses included.
    pub messages_received: u64,
    /// READs posted of the peer's published record, for any reason.
    pub reads: u64,
    /// READs among `reads` that flow control did not ask for (L5): they check whether a silent peer lives (K1).
    pub probes: u64,
    /// Calls refused because the send ring was full; each try counts.
    pub ring_full: u64,
    /// Calls refused because credit was short, or because the number of calls reached that of call ids; each try counts.
    pub insufficient_credit: u64,
    /// Flushes that left something unposted because of the limit of batches in flight (B1).
    pub batch_stalls: u64,
    /// Flushes that posted nothing because the window was full (W1).
    pub window_stalls: u64,
    /// Flushes that announced several operations together: see [`ContextBuilder::blueflame_batch`](crate::ContextBuilder::blueflame_batch).
    pub blueflame_batches: u64,
    /// Calls ended by their deadlines.
    pub deadlines_exceeded: u64,
    /// Calls cancelled before they ended.
    pub cancelled: u64,
    /// Responses to calls that were cancelled or had reached their deadline (C3).
    pub late_responses: u64,
    /// Responses that match no waiting request, ignored (C1): duplicate or forged.
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
        self.blueflame_batches += other.blueflame_batches;
        self.deadlines_exceeded += other.deadlines_exceeded;
        self.cancelled += other.cancelled;
        self.late_responses += other.late_responses;
        self.stale_responses += other.stale_responses;
    }
}
