//! The receives and the memory of a queue pair whose messages arrive as packets or datagrams: this
//! device takes, fills and completes the receives by itself.

use mlx5_wire::roce::{AtomicEth, Nak, Opcode as PacketKind, Reth};
use mlx5_wire::{Access, CqeOpcode, Syndrome};

use crate::Hca;
use crate::packets::responder::{Completion, Target};
use crate::queues::cq::SoftCq;
use crate::queues::data::scatter;
use crate::queues::qp::SoftQp;
use crate::queues::rqs::RqSlot;
use crate::responder::deliver::{Sender, deliver, fail_receive, take_own_receive, trace};
use crate::shared::atomics;
use crate::shared::layout::{Message, Taking};
use crate::shared::memory::Keyed;
use crate::types::outcome::refusal_of_receive;

/// A queue pair on which messages are executed.
pub(crate) struct Responding<'a> {
    pub(crate) hca: &'a Hca,
    pub(crate) qp: &'a mut SoftQp,
    pub(crate) cq: &'a mut SoftCq,
    pub(crate) rqs: &'a mut [Option<RqSlot>],
    pub(crate) open: &'a mut Option<Taking>,
    pub(crate) sender: Sender,
    pub(crate) refused: Option<(Syndrome, u8)>,
}

impl Responding<'_> {
    /// Copies `len` bytes of the message, at `from`, to byte `offset` of its receive's buffers.
    ///
    /// # Safety
    /// `from` is readable for `len` bytes.
    pub(crate) unsafe fn copy(
        &mut self,
        offset: usize,
        from: *const u8,
        len: usize,
    ) -> Result<(), Nak> {
        let Some(taking) = *self.open else {
            return Err(Nak::RemoteOperational);
        };
        let (memory, receives) = (&self.hca.memory, &self.qp.receives);
        let part = [(from, len)].into_iter();
        // SAFETY: guaranteed by the caller.
        let placed = unsafe { scatter(memory, receives, taking.index(), offset, part) };
        placed.map_err(|refused| {
            self.refused = Some(refused);
            refusal_of_receive(refused.0)
        })
    }

    /// Fails the queue pair, and the receive of the message that was refused with `nak`.
    pub(crate) fn fail(self, nak: Nak) {
        let (syndrome, vendor) = self.refused.unwrap_or((Syndrome::LocalQpOperation, 0));
        let Some(taking) = self.open.take() else {
            return self.qp.refused(self.hca, Syndrome::from(nak) as u8);
        };
        fail_receive(self.hca, self.qp, self.cq, taking, (syndrome as u8, vendor));
        self.qp.fail(self.hca);
    }
}

impl Target for Responding<'_> {
    fn take_receive(&mut self) -> bool {
        // A receive whose message was lost on its way is used for the next message.
        if self.open.is_none() {
            *self.open = take_own_receive(self.qp, self.rqs);
        }
        self.open.is_some()
    }

    fn place(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Nak> {
        // SAFETY: a slice is readable.
        unsafe { self.copy(offset as usize, bytes.as_ptr(), bytes.len()) }
    }

    fn check(&mut self, at: &Reth, is_read: bool) -> Result<(), Nak> {
        let needed = if is_read {
            Access::REMOTE_READ
        } else {
            Access::REMOTE_WRITE
        };
        if !self.qp.access.contains(needed) {
            return Err(Nak::InvalidRequest);
        }
        let memory = &self.hca.memory;
        let bytes = Keyed::new(at.rkey, at.addr, at.len.into());
        memory.check(bytes, needed, self.qp.pd)?;
        Ok(())
    }

    fn write(&mut self, at: &Reth, offset: u32, bytes: &[u8]) -> Result<(), Nak> {
        if bytes.is_empty() {
            return Ok(());
        }
        let addr = at.addr.wrapping_add(offset.into());
        let len = bytes.len();
        let to = Keyed::new(at.rkey, addr, len as u64);
        let memory = &self.hca.memory;
        let span = memory.resolve(to, Access::REMOTE_WRITE, self.qp.pd)?;
        // SAFETY: `bytes` is readable for `len` bytes, and the span was resolved for `len` bytes.
        Ok(unsafe { span.write(0, bytes.as_ptr(), len) }?)
    }

    fn execute(&mut self, opcode: PacketKind, atomic: &AtomicEth) -> Result<u64, Nak> {
        if atomic.addr % 8 != 0 {
            return Err(Nak::InvalidRequest);
        }
        let (memory, of) = (&self.hca.memory, (self.qp.access, self.qp.pd));
        let word = atomics::word(memory, atomic.rkey, atomic.addr, of)?;
        let is_add = opcode == PacketKind::FetchAdd;
        Ok(atomics::execute(word, is_add, &atomic.operands))
    }

    fn complete(&mut self, completion: Completion) {
        let Some(taking) = self.open.take() else {
            return;
        };
        let opcode = match (completion.is_write, completion.imm) {
            (true, _) => CqeOpcode::ResponderWriteImm,
            (false, Some(_)) => CqeOpcode::ResponderSendImm,
            (false, None) => CqeOpcode::ResponderSend,
        };
        let message = Message {
            payload: 0,
            byte_count: completion.len,
            imm: completion.imm.unwrap_or(0),
            taking,
            op_own: Message::op_own(opcode, completion.is_solicited),
        };
        trace(self.hca, self.qp, &message);
        deliver(self.hca, self.qp, self.cq, message, self.sender);
    }
}
