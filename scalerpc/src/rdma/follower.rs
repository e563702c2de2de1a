//! A server whose slices end at the same times as those of other servers.

use super::{RdmaClient, RdmaServer};
use crate::protocol::clock_sync::{ANSWER_BYTES, ClockSync, Offset, PROBE_TYPE, SYNC_INTERVAL_NS};
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
        Self { client, sync: ClockSync::default() }
    }

    /// One bounded step, called together with each step of `server`, which is always the same server: takes an answer, and sends a probe
    /// if its time has come. From the first answer on, the slices of `server` are synchronised. A probe that is not answered in time is
    /// followed by the next one.
    ///
    /// # Errors
    /// The leader does not return its time ([`CallFailure::UnknownType`], [`CallFailure::Refused`]), or the connection to it has
    /// ended. The slices of `server` stay synchronised by the last known offset; [`RdmaServer::synchronise`] can end that.
    pub fn step(&mut self, server: &mut RdmaServer) -> Result<(), CallFailure> {
        self.client.poll();
        let mut answer = [0; ANSWER_BYTES];
        while let Some(completion) = self.client.poll_completion(&mut answer) {
            match completion.outcome {
                Ok(ANSWER_BYTES) => {
                    // A refused answer changes nothing.
                    let _is_taken = self.sync.on_reply(&answer, server.device().now_ns());
                    server.synchronise(self.sync.offset().map(|offset| offset.offset_ns));
                }
                // The answer is not that of a `time_handler`.
                Ok(_) => return Err(CallFailure::Refused),
                Err(CallFailure::TimedOut) => {}
                Err(failure) => return Err(failure),
            }
        }
        let Some(probe) = self.sync.poll(server.device().now_ns()) else { return Ok(()) };
        if let Err(CallError::Closed(reason)) = self.client.call(PROBE_TYPE, &probe) {
            return Err(CallFailure::Closed(reason));
        }
        // Poll now, not in the next step: the time of the probe is now. Without a free slot the probe is not sent.
        self.client.poll();
        Ok(())
    }

    /// Returns the offset of `server` from the leader; `None` before the first answer.
    #[must_use]
    pub fn offset(&self) -> Option<Offset> {
        self.sync.offset()
    }
}
