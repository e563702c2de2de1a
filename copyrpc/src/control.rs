//! The two small pieces of registered memory of an endpoint: the record its peer READs, and the
//! place its own READs land.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mlx5::{Access, Mr, Pd, RegisterError, Sge};

use crate::wire::{FLOW_METADATA_SIZE, FlowWords, PublishedRecord};

/// Bytes 0..32: the published record, in the layout of [`PublishedRecord`]. Bytes 32..64: the target of READs.
#[derive(Debug)]
pub(crate) struct ControlMemory {
    memory: Mr,
}

impl ControlMemory {
    pub(crate) fn new(pd: &Pd, words: FlowWords) -> Result<Self, RegisterError> {
        let memory = pd.alloc(2 * FLOW_METADATA_SIZE, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let control = Self { memory };
        control.publish(words);
        Ok(control)
    }

    /// Address and key of the published record, for the peer.
    pub(crate) fn published(&self) -> (u64, u32) {
        (self.memory.addr(), self.memory.rkey())
    }

    /// Stores the words. A READ meanwhile may see old and new ones mixed; each word is true by itself (F1).
    pub(crate) fn publish(&self, words: FlowWords) {
        for (index, word) in [(0, words.consumer_pos), (1, words.credit), (3, words.batches_received)] {
            // SAFETY: the region is page-aligned and 64 bytes long; this thread is the only writer of these words.
            let target = unsafe { self.memory.as_ptr().cast::<AtomicU64>().add(index).as_ref() };
            // Release: whoever reads the new position must find us done with the bytes before it.
            target.store(word.to_le(), Ordering::Release);
        }
    }

    /// Stores the heartbeat.
    pub(crate) fn beat(&self, heartbeat: u32) {
        // SAFETY: the region is page-aligned and 64 bytes long; this thread is the only writer of this word.
        let target = unsafe { self.memory.as_ptr().byte_add(PublishedRecord::HEARTBEAT_OFFSET).cast::<AtomicU32>().as_ref() };
        // It orders nothing: it only has to change.
        target.store(heartbeat.to_le(), Ordering::Relaxed);
    }

    /// Where a READ puts the peer's record.
    pub(crate) fn read_target(&self) -> Sge {
        Sge { addr: self.memory.addr() + FLOW_METADATA_SIZE as u64, len: FLOW_METADATA_SIZE as u32, lkey: self.memory.lkey() }
    }

    /// The record a completed READ brought.
    pub(crate) fn take_read(&self) -> [u8; FLOW_METADATA_SIZE] {
        let mut record = [0; FLOW_METADATA_SIZE];
        let read = self.memory.read(FLOW_METADATA_SIZE, &mut record);
        debug_assert!(read.is_ok(), "the region has 64 bytes");
        record
    }
}
