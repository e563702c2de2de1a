//! The two small pieces of registered memory of an endpoint: the record that its peer READs, and
//! the destination of its own READs. The endpoints of a context share regions, because a region for
//! each endpoint would take a page and a key each.

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mlx5::{Access, Mr, Pd, RegisterError, Sge};

use crate::wire::{FLOW_METADATA_SIZE, FlowWords, PublishedRecord};

/// Bytes of a place, the part of a region that one endpoint has: a cache line.
const PLACE_BYTES: usize = 2 * FLOW_METADATA_SIZE;
const PLACES: usize = u64::BITS as usize;

/// The regions of one context. Each lives as long as an endpoint, or the context's [`Activity`],
/// has a place in it.
#[derive(Debug, Default)]
pub(crate) struct ControlRegions {
    regions: RefCell<Vec<Weak<Region>>>,
}

#[derive(Debug)]
struct Region {
    memory: Mr,
    /// Bit i is 1 if place i is taken.
    taken: Cell<u64>,
}

impl ControlRegions {
    /// Returns a region with a free place. `pd` must be the same in all calls.
    fn vacant(&self, pd: &Pd) -> Result<Rc<Region>, RegisterError> {
        let mut regions = self.regions.borrow_mut();
        regions.retain(|region| region.strong_count() > 0);
        if let Some(region) = regions
            .iter()
            .filter_map(Weak::upgrade)
            .find(|region| region.taken.get() != u64::MAX)
        {
            return Ok(region);
        }
        let memory = pd.alloc(
            PLACES * PLACE_BYTES,
            Access::LOCAL_WRITE | Access::REMOTE_READ,
        )?;
        let region = Rc::new(Region {
            memory,
            taken: Cell::new(0),
        });
        regions.push(Rc::downgrade(&region));
        Ok(region)
    }
}

/// A place of an endpoint. Bytes 0..32: the published record, in the layout of [`PublishedRecord`].
/// Bytes 32..64: the destination of READs. The drop frees the place. Before that, the queue pair
/// that READs into the place, and through which the peer READs the record, must be destroyed.
#[derive(Debug)]
pub(crate) struct ControlMemory {
    region: Rc<Region>,
    place: usize,
    start: NonNull<u8>,
}

impl ControlMemory {
    pub(crate) fn new(
        regions: &ControlRegions,
        pd: &Pd,
        words: FlowWords,
    ) -> Result<Self, RegisterError> {
        let region = regions.vacant(pd)?;
        let taken = region.taken.get();
        let place = taken.trailing_ones() as usize;
        region.taken.set(taken | 1 << place);
        // SAFETY: the region has `PLACES` places of `PLACE_BYTES`, and `vacant` returned a region
        // with a free place, so `place` is below `PLACES`.
        let start = unsafe { region.memory.as_ptr().add(place * PLACE_BYTES) };
        let control = Self {
            region,
            place,
            start,
        };
        let cleared = control
            .region
            .memory
            .write(control.offset(), &[0; PLACE_BYTES]);
        debug_assert!(cleared.is_ok(), "the region has {PLACES} places");
        control.publish(words);
        Ok(control)
    }

    const fn offset(&self) -> usize {
        self.place * PLACE_BYTES
    }

    #[inline]
    fn at(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: all callers give an `offset` inside the place; its region lives as long as
        // `self`.
        unsafe { self.start.add(offset) }
    }

    /// Returns address and key of the published record, for the peer.
    pub(crate) fn published(&self) -> (u64, u32) {
        (
            self.region.memory.addr() + self.offset() as u64,
            self.region.memory.rkey(),
        )
    }

    /// Stores the words. A concurrent READ may see old and new words mixed; each word is valid by
    /// itself (F1 of docs/copyrpc-protocol.md), unless bytes are mixed too (F3).
    pub(crate) fn publish(&self, words: FlowWords) {
        for (index, word) in [
            (0, words.consumer_pos),
            (1, words.credit),
            (3, words.batches_received),
        ] {
            // SAFETY: the word is aligned and inside the place, because regions are page-aligned
            // and a place has 64 bytes; its region lives as long as `self`. Only this thread writes
            // these words.
            let target = unsafe { self.at(8 * index).cast::<AtomicU64>().as_ref() };
            // Release: a reader of the new position must find that this end no longer uses the
            // bytes before that position.
            target.store(word.to_le(), Ordering::Release);
        }
    }

    pub(crate) fn beat(&self, heartbeat: u32) {
        // SAFETY: as in `publish`; the offset is a multiple of 4.
        let target = unsafe {
            self.at(PublishedRecord::HEARTBEAT_OFFSET)
                .cast::<AtomicU32>()
                .as_ref()
        };
        // Relaxed: the peer only compares the number, and reads nothing that depends on it.
        target.store(heartbeat.to_le(), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn note_taken(&self, batches: u32) {
        // SAFETY: as in `publish`; the offset is a multiple of 4.
        let target = unsafe {
            self.at(PublishedRecord::BATCHES_TAKEN_OFFSET)
                .cast::<AtomicU32>()
                .as_ref()
        };
        // Relaxed: the peer only compares the number, and reads nothing that depends on it.
        target.store(batches.to_le(), Ordering::Relaxed);
    }

    /// Returns the destination of this end's READs.
    pub(crate) fn read_target(&self) -> Sge {
        let memory = &self.region.memory;
        Sge {
            addr: memory.addr() + (self.offset() + FLOW_METADATA_SIZE) as u64,
            len: FLOW_METADATA_SIZE as u32,
            lkey: memory.lkey(),
        }
    }

    pub(crate) fn take_read(&self) -> [u8; FLOW_METADATA_SIZE] {
        let mut record = [0; FLOW_METADATA_SIZE];
        let read = self
            .region
            .memory
            .read(self.offset() + FLOW_METADATA_SIZE, &mut record);
        debug_assert!(read.is_ok(), "a place has 64 bytes");
        record
    }
}

/// The word of a context that its peers READ before they give up the context (K7 of
/// docs/copyrpc-protocol.md). The word is odd while a handler runs, and each handler changes it.
#[derive(Debug)]
pub(crate) struct Activity(ControlMemory);

impl Activity {
    pub(crate) fn new(regions: &ControlRegions, pd: &Pd) -> Result<Self, RegisterError> {
        Ok(Self(ControlMemory::new(regions, pd, FlowWords::default())?))
    }

    pub(crate) fn published(&self) -> (u64, u32) {
        self.0.published()
    }

    pub(crate) fn word(&self) -> &AtomicU64 {
        // SAFETY: as in `publish`: the word is the first one of a place that lives as long as
        // `self`.
        unsafe { self.0.at(0).cast::<AtomicU64>().as_ref() }
    }
}

/// Adds 1 to the word. This thread is its only writer.
#[inline(always)]
fn count(word: &AtomicU64) {
    let next = u64::from_le(word.load(Ordering::Relaxed)).wrapping_add(1);
    // Release: the stores of a handler are visible before the word shows that the handler has
    // ended.
    word.store(next.to_le(), Ordering::Release);
}

pub(crate) struct Handling<'a>(&'a AtomicU64);

impl<'a> Handling<'a> {
    /// Marks a handler as running until the guard is dropped, also by a panic of the handler.
    #[inline(always)]
    pub(crate) fn begin(word: &'a AtomicU64) -> Self {
        count(word);
        Self(word)
    }
}

impl Drop for Handling<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        count(self.0);
    }
}

impl Drop for ControlMemory {
    fn drop(&mut self) {
        self.region
            .taken
            .set(self.region.taken.get() & !(1 << self.place));
    }
}

#[cfg(test)]
mod tests {
    use mlx5::{Device, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;

    fn pd() -> Pd {
        let fabric = FabricSpec::Local(LocalFabric::new());
        Device::open(DeviceSpec::Soft(SoftOptions {
            fabric,
            ..SoftOptions::default()
        }))
        .unwrap()
        .alloc_pd()
        .unwrap()
    }

    /// The word wraps at the end of its 64 bits.
    #[test]
    fn activity_is_odd_while_a_handler_runs_and_another_number_after_it() {
        let activity = Activity::new(&ControlRegions::default(), &pd()).unwrap();
        let word = activity.word();
        for before in [0_u64, 6, u64::MAX - 1] {
            word.store(before.to_le(), Ordering::Relaxed);
            let running = Handling::begin(word);
            assert_eq!(u64::from_le(word.load(Ordering::Relaxed)), before + 1);
            drop(running);
            assert_eq!(
                u64::from_le(word.load(Ordering::Relaxed)),
                before.wrapping_add(2)
            );
        }
    }

    #[test]
    fn places_are_apart_cleared_and_used_again_and_regions_go_with_their_last_one() {
        let pd = pd();
        let regions = ControlRegions::default();
        let make = |credit| {
            ControlMemory::new(
                &regions,
                &pd,
                FlowWords {
                    credit,
                    ..FlowWords::default()
                },
            )
            .unwrap()
        };
        let mut all: Vec<_> = (0..2 * PLACES as u64 + 1).map(make).collect();
        assert_eq!(regions.regions.borrow().len(), 3);
        let mut places: Vec<_> = all.iter().map(|control| control.published().0).collect();
        places.sort_unstable();
        assert!(
            places
                .windows(2)
                .all(|pair| pair[1] - pair[0] >= PLACE_BYTES as u64)
        );
        all[70].beat(9);
        let place = all[70].published();
        all.remove(70);
        let again = make(7);
        assert_eq!(again.published(), place);
        let mut bytes = [0; PLACE_BYTES];
        again
            .region
            .memory
            .read(again.offset(), &mut bytes)
            .unwrap();
        let mut expected = [0; PLACE_BYTES];
        expected[8] = 7;
        assert_eq!(bytes, expected);
        drop((all, again));
        let _last = make(1);
        assert_eq!(regions.regions.borrow().len(), 1);
    }
}
