//! What rounds and connections count.

use serde::{Deserialize, Serialize};

/// What one round of a daemon did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Round {
    /// Messages it took in, or sent after they had waited; 0: nothing was to be done.
    pub moved: usize,
    /// Completions it took.
    pub cqes: usize,
    /// Requests to other ranks that were not answered at its end.
    pub outstanding: usize,
    /// It is not over: a policy adds polls to it, this one found nothing, and the next step is another. It counts as no round.
    pub is_part: bool,
}

/// What a thread's connections to other ranks did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportReport {
    /// The device that was really opened, for example `soft:lid=3`.
    pub device: String,
    /// When that device executes, by which clock, and which faults it makes.
    pub modes: String,
    /// How its peers are reached.
    pub reached_by: String,
    /// RDMA WRITEs with immediate posted; of `rc-send` SENDs, of `ucx-am` active messages.
    pub writes: u64,
    /// Messages in them.
    pub messages: u64,
    /// READs of a peer's published record.
    pub reads: u64,
    /// Calls that had to wait for ring space, credit, or a place in the window.
    pub waits: u64,
    /// Of these: for credit.
    pub credit_waits: u64,
    /// Flushes that posted nothing because the batch window was full.
    pub window_stalls: u64,
    /// Times that the device found no receive posted at a target and tried again; `None`: it does not count them.
    pub rnr_naks: Option<u64>,
    /// The maximum number of requests that waited at a time, for one of these, or for room on the way to another daemon.
    pub backlog_peak: u64,
}

impl TransportReport {
    /// What was done since `before`, or since the start.
    #[must_use]
    pub fn since(&self, before: Option<&Self>) -> Self {
        let Some(before) = before else { return self.clone() };
        Self {
            writes: self.writes - before.writes,
            messages: self.messages - before.messages,
            reads: self.reads - before.reads,
            waits: self.waits - before.waits,
            credit_waits: self.credit_waits - before.credit_waits,
            window_stalls: self.window_stalls - before.window_stalls,
            rnr_naks: self.rnr_naks.map(|naks| naks.saturating_sub(before.rnr_naks.unwrap_or(0))),
            ..self.clone()
        }
    }

    /// Adds what other connections did.
    pub fn add(&mut self, other: &Self) {
        if self.device.is_empty() {
            self.device.clone_from(&other.device);
            self.modes.clone_from(&other.modes);
            self.reached_by.clone_from(&other.reached_by);
        }
        self.writes += other.writes;
        self.messages += other.messages;
        self.reads += other.reads;
        self.waits += other.waits;
        self.credit_waits += other.credit_waits;
        self.window_stalls += other.window_stalls;
        if let Some(naks) = other.rnr_naks {
            *self.rnr_naks.get_or_insert(0) += naks;
        }
        self.backlog_peak = self.backlog_peak.max(other.backlog_peak);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_connections_are_differences_and_sums() {
        let at = |count: u64| TransportReport {
            credit_waits: count,
            window_stalls: 2 * count,
            rnr_naks: Some(3 * count),
            ..TransportReport::default()
        };
        let mut sum = at(10).since(Some(&at(4)));
        assert_eq!(sum, at(6));
        sum.add(&at(1));
        assert_eq!(sum, at(7));
        sum.add(&TransportReport::default());
        assert_eq!(sum, at(7), "a device that does not count adds nothing");
    }
}
