//! Rest: while a client is not polled, because it has no outstanding call, the server may take back
//! its zone (S26 of docs/scalerpc.md).

use std::sync::atomic::{Ordering, fence};

use super::{Client, ClientOp, State};
use crate::protocol::bits;
use crate::protocol::memory::Memory;
use crate::protocol::wire::{EVENT_SLOT_BYTES, RESTS, TRAILER_BYTES};

impl<M: Memory> Client<M> {
    /// Begins a rest: from now on the client need not [`poll`](Self::poll) for any time, and is not
    /// evicted. Until the next poll nothing may be sent: all operations must have been taken and
    /// posted before.
    ///
    /// Does nothing while calls are outstanding, since their requests may still be on their way
    /// into the zone. Returns `false` if the server awaits an answer: poll, then rest again.
    pub fn rest(&mut self) -> bool {
        if self.pending != 0 || matches!(self.state, State::Closed(_) | State::Resting) {
            return true;
        }
        self.rested = std::mem::replace(&mut self.state, State::Resting);
        self.say(RESTS);
        if self.is_switched() {
            // The server may have READ the rest word before it was written, and does not READ it
            // again.
            self.end_rest();
        }
        self.state == State::Resting
    }

    /// Ends a rest, if there is one, at the start of a poll. Sends the calls that were made
    /// meanwhile, if the client still has its zone. Returns whether the connection is still open.
    #[cold]
    pub(super) fn wake(&mut self, out: &mut Vec<ClientOp>) -> bool {
        self.end_rest();
        if let State::Process { .. } = self.state {
            for slot in bits(self.pending) {
                self.calls[slot].is_offered = true;
                out.push(self.write_request(self.layout.client_slot(slot), self.calls[slot].len));
            }
        }
        !matches!(self.state, State::Closed(_))
    }

    /// Ends a rest. Afterwards the client is in PROCESS only if it still has the zone.
    pub(super) fn end_rest(&mut self) {
        if self.state != State::Resting {
            return;
        }
        self.say(0);
        self.state = match self.rested {
            // The zone may have been taken back: the next poll closes the epoch.
            State::Process { .. } if self.is_switched() => State::Warmup,
            other => other,
        };
    }

    /// Writes the rest word. Later loads are not executed before the write.
    ///
    /// The fence pairs with the order of the server's operations, *switch* before its READ of the
    /// word: either the READ finds this word, or a load after the fence finds *switch*.
    fn say(&self, word: u64) {
        self.memory.requests.store(self.layout.rest_word(), word);
        fence(Ordering::SeqCst);
    }

    /// Returns whether a bare *switch* has arrived. While no call is outstanding, no response is in
    /// flight that could carry *switch*.
    fn is_switched(&self) -> bool {
        self.memory
            .responses
            .load(self.layout.switch_slot() + EVENT_SLOT_BYTES - TRAILER_BYTES)
            != 0
    }
}
