//! Responses that the client READs: first the trailer, and the message once the trailer is that of the call.

use super::{Client, ClientOp};
use crate::protocol::bits;
use crate::protocol::config::ReplyMode;
use crate::protocol::memory::Memory;
use crate::protocol::wire::{HEADER_BYTES, TRAILER_BYTES, Trailer, valid};

/// The progress of a slot's response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Fetch {
    #[default]
    Unasked,
    /// The trailer is being READ.
    Looking,
    /// The trailer was that of the call; the message has `len` bytes, trailer included.
    Found {
        len: u32,
    },
    /// The message is being READ.
    Reading,
    Here,
}

impl<M: Memory> Client<M> {
    /// READs responses that may be there.
    pub(super) fn fetch(&mut self, now_ns: u64, out: &mut Vec<ClientOp>) {
        let may_look = now_ns >= self.next_read_ns;
        for slot in bits(self.pending) {
            let start = self.layout.client_slot(slot);
            let (at, into, len, next) = match self.calls[slot].fetch {
                Fetch::Unasked if may_look && self.calls[slot].is_offered => {
                    self.next_read_ns = now_ns.saturating_add(self.read_interval_ns);
                    (start + self.layout.trailer_at(), self.layout.read_trailer(slot), TRAILER_BYTES as u32, Fetch::Looking)
                }
                Fetch::Found { len } => {
                    let at = start + self.layout.slot_bytes - len as usize;
                    (at, at, len, Fetch::Reading)
                }
                _ => continue,
            };
            self.calls[slot].fetch = next;
            let addr = self.server.responses_addr.wrapping_add(at as u64);
            out.push(ClientOp::Read { addr, rkey: self.server.responses_rkey, into, len, slot: slot as u8 });
        }
    }

    /// Takes the successful completion of a READ.
    pub fn on_read_done(&mut self, slot: u8) {
        let slot = usize::from(slot);
        let Some(call) = self.calls.get_mut(slot) else { return };
        call.fetch = match call.fetch {
            Fetch::Looking => {
                let trailer = Trailer::from_word(self.memory.responses.load(self.layout.read_trailer(slot)));
                let len = trailer.len as usize;
                let is_it = trailer.valid == valid(call.sequence) && (HEADER_BYTES..=self.layout.trailer_at()).contains(&len);
                if is_it { Fetch::Found { len: trailer.len + TRAILER_BYTES as u32 } } else { Fetch::Unasked }
            }
            Fetch::Reading => Fetch::Here,
            other => other,
        };
    }

    pub(super) fn next_fetch_ns(&self) -> Option<u64> {
        let is_asked = self.layout.reply_mode == ReplyMode::ClientReads && self.pending != 0;
        is_asked.then_some(self.next_read_ns)
    }
}
