//! Rest: a client that is not polled, because no call of it is outstanding, leaves it to the server
//! whether it keeps its zone (S26).

use std::sync::atomic::{Ordering, fence};

use super::{Client, ClientOp, State};
use crate::protocol::bits;
use crate::protocol::memory::Memory;
use crate::protocol::wire::{EVENT_SLOT_BYTES, RESTS, TRAILER_BYTES};

impl<M: Memory> Client<M> {
    /// Begins a rest: from now on the client may go without a [`poll`](Self::poll) for any time,
    /// and is not evicted. Until the next poll nothing may be sent: all operations were taken and
    /// posted before.
    ///
    /// Does nothing while calls are outstanding, since their requests may still be on their way
    /// into the zone. Returns `false` if the server awaits an answer: poll, then rest again.
    #[must_use]
    pub fn rest(&mut self) -> bool {
        if self.pending != 0 || matches!(self.state, State::Closed(_) | State::Resting) {
            return true;
        }
        self.rested = std::mem::replace(&mut self.state, State::Resting);
        self.say(RESTS);
        if self.is_switched() {
            // The server may have found this client awake before, and does not ask again.
            self.end_rest();
        }
        self.state == State::Resting
    }

    /// Ends a rest, if there is one, for a poll. Sends the calls that were made meanwhile, if the
    /// zone is this client's. Returns whether the connection goes on.
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

    /// Ends a rest, if there is one. The client is in PROCESS only if the zone is still its own.
    pub(super) fn end_rest(&mut self) {
        if self.state != State::Resting {
            return;
        }
        self.say(0);
        self.state = match self.rested {
            // The zone may have been taken back. The next poll closes the epoch, as if the zone had
            // never been named.
            State::Process { .. } if self.is_switched() => State::Warmup,
            other => other,
        };
    }

    /// Writes the rest word. Loads after it are not older.
    ///
    /// The fence pairs with the order of the server's operations, *switch* before its READ of the
    /// word: either the READ finds this word, or a load behind the fence finds *switch*.
    fn say(&self, word: u64) {
        self.memory.requests.store(self.layout.rest_word(), word);
        fence(Ordering::SeqCst);
    }

    /// Returns whether a bare *switch* is here. While no call is outstanding no response is in
    /// flight that could carry one.
    fn is_switched(&self) -> bool {
        self.memory
            .responses
            .load(self.layout.switch_slot() + EVENT_SLOT_BYTES - TRAILER_BYTES)
            != 0
    }
}
