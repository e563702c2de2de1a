//! The client's writes in IDLE, WARMUP and PROCESS. The table of these states is in
//! `docs/scalerpc.md`.

use super::{Client, ClientOp, State};
use crate::protocol::bits;
use crate::protocol::memory::Memory;
use crate::protocol::wire::{Announcement, Release, ZoneId};

impl<M: Memory> Client<M> {
    /// WRITEs a request of `len` bytes from the slot that begins at `start` into the slot of the
    /// same number of the client's zone.
    #[inline]
    pub(super) fn write_request(&mut self, start: usize, len: u32) -> ClientOp {
        let from = start + self.layout.slot_bytes - len as usize;
        self.stats.direct += 1;
        ClientOp::WriteRequest {
            addr: self.zone_addr.wrapping_add(from as u64),
            rkey: self.server.pools_rkey,
            from,
            len,
        }
    }

    /// Begins PROCESS. Announced requests were READ; the other requests are written now.
    pub(super) fn activate(&mut self, epoch: u64, zone: ZoneId, out: &mut Vec<ClientOp>) {
        self.state = State::Process { epoch, zone };
        self.zone_addr = self
            .server
            .pools_addr
            .wrapping_add(self.layout.pool_slot(zone, 0) as u64);
        self.stats.activations += 1;
        let unread = self.pending & !self.lent;
        self.take_back_slots();
        for slot in bits(unread) {
            self.calls[slot].is_offered = true;
            out.push(self.write_request(self.layout.client_slot(slot), self.calls[slot].len));
        }
    }

    /// Ends the slice: releases the zone, announces all unanswered requests (S5).
    pub(super) fn switch(&mut self, epoch: u64, out: &mut Vec<ClientOp>) {
        self.closed_epoch = epoch;
        self.state = State::Idle;
        self.take_back_slots();
        self.announce(
            Some(Release {
                client: u32::from(self.server.client.0),
                epoch: epoch as u32,
            }),
            out,
        );
    }

    /// Writes the entry: a release, an announcement of the unanswered requests, or both.
    #[inline(never)]
    pub(super) fn announce(&mut self, release: Option<Release>, out: &mut Vec<ClientOp>) {
        let mut bytes = [0; Release::BYTES + Announcement::BYTES];
        let (mut start, mut end) = (Release::BYTES, Release::BYTES);
        if let Some(release) = release {
            bytes[..Release::BYTES].copy_from_slice(&release.encode());
            start = 0;
        }
        if self.pending != 0 {
            self.announcements = self.announcements.wrapping_add(1);
            let announcement = Announcement {
                given_up: self.quarantined,
                slots: self.pending,
                client: u32::from(self.server.client.0),
                number: self.announcements,
                longest: bits(self.pending)
                    .map(|slot| self.calls[slot].len)
                    .max()
                    .unwrap_or(0),
            };
            bytes[Announcement::AT..].copy_from_slice(&announcement.encode());
            end = bytes.len();
            bits(self.pending).for_each(|slot| self.calls[slot].is_offered = true);
            self.told = self.quarantined;
            self.lent = self.pending;
            self.state = State::Warmup;
            self.stats.announcements += 1;
        }
        bytes.copy_within(start..end, 0);
        out.push(self.write_entry(start, bytes, end - start));
    }

    /// Tells the server which calls were given up, if that has changed (S28).
    pub(super) fn tell_given_up(&mut self, out: &mut Vec<ClientOp>) {
        if self.told != self.quarantined {
            self.told = self.quarantined;
            let mut bytes = [0; Release::BYTES + Announcement::BYTES];
            let word = self.told.to_le_bytes();
            bytes[..word.len()].copy_from_slice(&word);
            out.push(self.write_entry(Announcement::AT, bytes, word.len()));
        }
    }

    /// WRITEs the first `len` of the bytes to byte `at` of the entry.
    const fn write_entry(
        &self,
        at: usize,
        bytes: [u8; Release::BYTES + Announcement::BYTES],
        len: usize,
    ) -> ClientOp {
        ClientOp::WriteEntry {
            addr: self.server.entry_addr.wrapping_add(at as u64),
            rkey: self.server.entry_rkey,
            bytes,
            len: len as u8,
        }
    }
}
