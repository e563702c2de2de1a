//! The devices that this device has mapped.

use core::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use copyrpc_shm::lane::LaneTx;

use crate::error::ConnectError;
use crate::shared::datagrams::{Incoming, Outgoing};
use crate::shared::fabric::Membership;
use crate::shared::layout::{DATAGRAM_SLOTS, LID_BITS, MAX_DATAGRAM_LANES};
use crate::shared::memory::{DeviceMemory, commit};
use crate::shared::peer::Peer;

/// The other devices that this device has mapped, and the state of its datagrams.
#[derive(Default)]
pub(crate) struct Links {
    peers: Vec<Rc<Peer>>,
    /// Whether datagram queue pairs of this device exist or existed.
    pub(crate) has_datagrams: bool,
    /// Lanes of this device to others, by number.
    pub(crate) outgoing: Vec<Outgoing>,
    pub(crate) sent: u64,
    pub(crate) incoming: Vec<Incoming>,
    /// LIDs of devices whose lanes have to be read. The list is empty between two polls.
    pub(crate) ready: Vec<u16>,
}

impl Links {
    pub(crate) fn peers(&self) -> impl Iterator<Item = &Rc<Peer>> {
        self.peers.iter()
    }

    /// Returns the device that has this LID, if it is reached through shared memory: the
    /// incarnation `epoch`, or, for `None`, the present incarnation.
    pub(crate) fn peer(
        &mut self,
        membership: &Membership,
        lid: u16,
        epoch: Option<u64>,
    ) -> Result<Rc<Peer>, ConnectError> {
        let is_it = |peer: &&Rc<Peer>| {
            peer.lid == lid && epoch.map_or_else(|| !peer.is_gone(), |epoch| peer.epoch == epoch)
        };
        if let Some(peer) = self.peers.iter().find(is_it) {
            return Ok(Rc::clone(peer));
        }
        let peer = Rc::new(membership.attach(lid, epoch)?);
        self.peers.push(Rc::clone(&peer));
        Ok(peer)
    }

    /// Forgets the devices to which no object refers.
    pub(crate) fn forget_unused(&mut self) {
        self.peers.retain(|p| Rc::strong_count(p) > 1);
    }

    /// Returns the peers whose end is detected by this call.
    pub(crate) fn newly_gone(&self) -> Vec<Rc<Peer>> {
        self.peers
            .iter()
            .filter(|peer| peer.is_newly_gone())
            .cloned()
            .collect()
    }

    /// Returns the number of the lane towards `peer` in `memory`, the memory of this device. `None`
    /// if every lane belongs to another device that has not taken all its datagrams, or no memory
    /// is left for the lane.
    pub(crate) fn lane_to(&mut self, memory: &DeviceMemory, peer: &Rc<Peer>) -> Option<usize> {
        if let Some(index) = self
            .outgoing
            .iter()
            .position(|out| Rc::ptr_eq(&out.peer, peer))
        {
            return Some(index);
        }
        let is_full = self.outgoing.len() == MAX_DATAGRAM_LANES;
        let is_empty = |index, out: &Outgoing| {
            // Whether the receiver has consumed all messages (L2 of docs/shm-protocols.md).
            is_full
                && memory.datagram_lane(index).consumed.load(Ordering::Acquire) == out.tx.position()
        };
        // Selects the lane of a device that is gone, or else a new lane. If all lanes exist, the
        // empty lanes are candidates too. Of several candidates, selects the lane whose last
        // datagram is the oldest.
        let lanes = self
            .outgoing
            .iter()
            .enumerate()
            .filter(|&(index, out)| out.peer.is_gone() || is_empty(index, out));
        let index = lanes
            .min_by_key(|(_, out)| out.last)
            .map_or(self.outgoing.len(), |(index, _)| index);
        if index == MAX_DATAGRAM_LANES {
            return None;
        }
        let lane = memory.datagram_lane(index);
        commit(&memory.lanes_memfd, lane).ok()?;
        match self.outgoing.get_mut(index) {
            Some(out) => out.peer = Rc::clone(peer),
            None => {
                // SAFETY: the slots live as long as the device, and were never used. `tx` is their
                // only producing end, and publishes only after `next_payload` found room.
                let tx = unsafe {
                    LaneTx::new(NonNull::from(&lane.slots).cast(), DATAGRAM_SLOTS as u64, 0)
                };
                self.outgoing.push(Outgoing {
                    peer: Rc::clone(peer),
                    tx,
                    last: 0,
                    stopped_at: None,
                });
            }
        }
        lane.consumed
            .store(self.outgoing[index].tx.position(), Ordering::Relaxed);
        lane.target_epoch.store(peer.epoch, Ordering::Relaxed);
        let number = (lane.target.load(Ordering::Relaxed) >> LID_BITS) + 1;
        lane.target
            .store(number << LID_BITS | u64::from(peer.lid), Ordering::Release);
        self.forget_unused();
        Some(index)
    }
}
