//! The parameters of a link.

use super::window::Window;
use crate::ring::RingSize;
use crate::wire::ALIGNMENT;

/// The parameters of a link: values that both ends agreed on, and options of this end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkConfig {
    /// Credit in bytes this side grants at the start: a multiple of 32, at most a quarter ring.
    pub(crate) local_credit: u64,
    pub(crate) peer_credit: u64,
    /// Maximum number of the peer's batches that this side has not yet reported as received (B1 of
    /// docs/copyrpc-protocol.md); at least 1.
    pub(crate) local_batches: u32,
    /// Maximum number of this side's batches that the peer has not yet reported as received (B1);
    /// at least 1.
    pub(crate) peer_batches: u32,
    /// First position of the send ring, a multiple of 32: the peer's `recv_start`.
    pub(crate) send_start: u64,
    /// First position of the receive ring, a multiple of 32: the peer's `send_start`.
    pub(crate) recv_start: u64,
    /// Time in ns after which the record of a silent peer is READ, to check that the peer lives,
    /// while the peer owes this end something (K1 of docs/copyrpc-protocol.md).
    pub(crate) keepalive_ns: u64,
    /// Time in ns after which a living peer without news is given up, while the peer owes this end
    /// something (K2).
    pub(crate) stall_ns: u64,
    /// Time in ns between two checks that the peer lives, while nothing is outstanding: each check
    /// READs the peer's record. `u64::MAX` for never (K4).
    pub(crate) idle_keepalive_ns: u64,
    /// Time with nothing outstanding after which the connection ends, in ns; `u64::MAX` for never
    /// (K5).
    pub(crate) idle_timeout_ns: u64,
    /// Whether a READ returns each word of the peer's record as it was at one moment (F3).
    pub(crate) reads_whole_words: bool,
    pub(crate) window: Window,
}

impl LinkConfig {
    /// Returns whether the invariants cover these parameters, for rings of these sizes.
    pub(crate) fn is_covered(&self, send: RingSize, recv: RingSize) -> bool {
        let is_credit = |credit| credit <= send.max_reservation() && credit % ALIGNMENT == 0;
        let window_batches = match self.window {
            Window::Off => 1,
            Window::Completion { batches, .. } | Window::Consumption { batches, .. } => batches,
        };
        send == recv
            && [self.local_credit, self.peer_credit]
                .into_iter()
                .all(is_credit)
            && self
                .local_batches
                .min(self.peer_batches)
                .min(window_batches)
                > 0
            && (self.send_start | self.recv_start) % ALIGNMENT == 0
    }
}
