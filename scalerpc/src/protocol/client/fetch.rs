//! Responses that the client READs: first the trailer, and the message once the trailer is that of the call.

use super::{Client, ClientOp};
use crate::protocol::bits;
use crate::protocol::config::ReplyMode;
use crate::protocol::memory::Memory;
use crate::protocol::wire::{HEADER_BYTES, TRAILER_BYTES, Trailer, valid};

/// Interval between READs of a response's trailer, in ns.
const READ_INTERVAL_NS: u64 = 2_000;

/// The progress of a slot's response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Fetch {
    #[default]
    Unasked,
    /// The trailer is being READ.
    Trailer,
    /// The trailer was that of the call, and the message is being READ.
    Message,
    Here,
}

impl<M: Memory> Client<M> {
    /// READs the trailers of responses that may be there.
    pub(super) fn fetch(&mut self, now_ns: u64, out: &mut Vec<ClientOp>) {
        if now_ns < self.next_read_ns {
            return;
        }
        for slot in bits(self.pending) {
            if self.calls[slot].fetch == Fetch::Unasked && self.calls[slot].is_offered {
                self.next_read_ns = now_ns.saturating_add(READ_INTERVAL_NS);
                let at = self.layout.client_slot(slot) + self.layout.trailer_at();
                self.read(slot, Fetch::Trailer, at, self.layout.read_trailer(slot), TRAILER_BYTES as u32, out);
            }
        }
    }

    fn read(&mut self, slot: usize, fetch: Fetch, at: usize, into: usize, len: u32, out: &mut Vec<ClientOp>) {
        self.calls[slot].fetch = fetch;
        let addr = self.server.responses_addr.wrapping_add(at as u64);
        out.push(ClientOp::Read { addr, rkey: self.server.responses_rkey, into, len, slot: slot as u8 });
    }

    /// Takes the successful completion of a READ. READs the message whose trailer has arrived.
    pub fn on_read_done(&mut self, slot: u8, out: &mut Vec<ClientOp>) {
        let slot = usize::from(slot);
        let Some(call) = self.calls.get_mut(slot) else { return };
        if call.fetch != Fetch::Trailer {
            call.fetch = Fetch::Here;
            return;
        }
        let trailer = Trailer::from_word(self.memory.responses.load(self.layout.read_trailer(slot)));
        if trailer.valid != valid(call.sequence) || !(HEADER_BYTES..=self.layout.trailer_at()).contains(&(trailer.len as usize)) {
            call.fetch = Fetch::Unasked;
            return;
        }
        let len = trailer.len + TRAILER_BYTES as u32;
        let at = self.layout.client_slot(slot) + self.layout.slot_bytes - len as usize;
        self.read(slot, Fetch::Message, at, at, len, out);
    }

    pub(super) fn next_fetch_ns(&self) -> Option<u64> {
        let is_asked = self.layout.reply_mode == ReplyMode::ClientReads && self.pending != 0;
        is_asked.then_some(self.next_read_ns)
    }
}
