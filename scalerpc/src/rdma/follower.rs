//! A server whose slices end at the same times as those of other servers.

use super::{RdmaClient, RdmaServer};
use crate::protocol::clock_sync::{ClockSync, Offset, PROBE_TYPE, Probe, ProbeReply, SYNC_INTERVAL_NS};
use crate::protocol::{CallError, CallFailure};

/// A server's view of the leader's time: a client of the leader, which asks for the time every [`SYNC_INTERVAL_NS`]. Any server with a
/// [`time_handler`](crate::protocol::clock_sync::time_handler) can lead. A leader with few clients is best, since a probe that waits for
/// its group's turn is less accurate.
#[derive(Debug)]
pub struct TimeFollower {
    client: RdmaClient,
    sync: ClockSync,
}

impl TimeFollower {
    /// Makes a follower. `client` is a client of the leader, and used for nothing else.
    #[must_use]
    pub fn new(mut client: RdmaClient) -> Self {
        // After that time the next probe is sent, and an answer to this one would be refused.
        client.set_timeout_ns(SYNC_INTERVAL_NS);
        Self { client, sync: ClockSync::new() }
    }

    /// One bounded step, called together with each step of `server`, which is always the same server: takes an answer, and sends a probe
    /// if its time has come. From the first answer on, the slices of `server` are synchronised. A probe that is not answered in time is
    /// followed by the next one.
    ///
    /// # Errors
    /// The leader cannot tell its time ([`CallFailure::UnknownType`], [`CallFailure::HandlerFailed`]), or the connection to it has ended.
    /// The slices of `server` stay synchronised by the last known offset; [`RdmaServer::synchronise`] can end that.
    pub fn step(&mut self, server: &mut RdmaServer) -> Result<(), CallFailure> {
        self.client.poll();
        let mut payload = [0; ProbeReply::BYTES];
        while let Some(completion) = self.client.poll_completion(&mut payload) {
            match completion.outcome {
                Ok(ProbeReply::BYTES) => {
                    // A refused answer changes nothing.
                    let _believed = self.sync.on_reply(ProbeReply::decode(&payload), server.device().now_ns());
                    server.synchronise(self.sync.offset().map(|offset| offset.offset_ns));
                }
                // The answer is not that of a `time_handler`.
                Ok(_) => return Err(CallFailure::HandlerFailed),
                Err(CallFailure::DeadlineExceeded) => {}
                Err(failure) => return Err(failure),
            }
        }
        self.probe(server.device().now_ns())
    }

    /// Returns the offset of `server` from the leader; `None` before the first answer.
    #[must_use]
    pub fn offset(&self) -> Option<Offset> {
        self.sync.offset()
    }

    fn probe(&mut self, now_ns: u64) -> Result<(), CallFailure> {
        let Some(probe) = self.sync.poll(now_ns) else { return Ok(()) };
        match self.client.call(PROBE_TYPE, &Probe::encode(probe)) {
            Err(CallError::Closed(reason)) => Err(CallFailure::Closed(reason)),
            // Poll now, not in the next step: the time of the probe is now. Without a free slot the probe is not sent.
            _ => {
                self.client.poll();
                Ok(())
            }
        }
    }
}
