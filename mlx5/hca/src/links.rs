//! The devices that this one knows.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use shm::lane::{LaneRx, LaneTx};

use super::Hca;
use super::error::ConnectError;
use super::fabric::Peer;
use super::layout::DatagramHeader;
use super::request::Address;

/// Other devices, mapped, and the exchanges beside the lanes of connections.
#[derive(Default)]
pub(crate) struct Links {
    peers: Vec<Rc<Peer>>,
    /// Datagram queue pairs of this device exist or existed.
    pub(crate) has_datagrams: bool,
    /// By number of the lane.
    pub(crate) outgoing: Vec<Outgoing>,
    /// Datagrams sent.
    pub(crate) sent: u64,
    pub(crate) incoming: Vec<Incoming>,
    /// LIDs to be looked at; empty in between.
    pub(crate) ready: Vec<u16>,
}

impl Links {
    /// Returns all peers.
    pub(crate) fn peers(&self) -> impl Iterator<Item = &Rc<Peer>> {
        self.peers.iter()
    }

    /// Returns the device that gave `address`.
    pub(crate) fn peer(&mut self, hca: &Hca, address: &Address) -> Result<Rc<Peer>, ConnectError> {
        if let Some(peer) = self.peers.iter().find(|p| p.lid == address.lid && p.epoch == address.epoch) {
            return Ok(Rc::clone(peer));
        }
        let peer = Rc::new(hca.membership.attach(address.lid, Some(address.epoch))?);
        self.peers.push(Rc::clone(&peer));
        Ok(peer)
    }

    /// Returns the device that has `lid` now.
    pub(crate) fn peer_of_lid(&mut self, hca: &Hca, lid: u16) -> Result<Rc<Peer>, ConnectError> {
        if let Some(peer) = self.peers.iter().find(|p| p.lid == lid && !p.is_gone()) {
            return Ok(Rc::clone(peer));
        }
        let peer = Rc::new(hca.membership.attach(lid, None)?);
        self.peers.push(Rc::clone(&peer));
        Ok(peer)
    }

    /// Forgets the devices that nothing refers to.
    pub(crate) fn forget_unused(&mut self) {
        self.peers.retain(|p| Rc::strong_count(p) > 1);
    }

    /// Returns the peers that are gone, each once.
    pub(crate) fn newly_gone(&self) -> Vec<Rc<Peer>> {
        self.peers.iter().filter(|p| !p.was_noticed() && p.is_gone() && p.notice()).cloned().collect()
    }
}

/// A lane of this device, towards one other.
pub(crate) struct Outgoing {
    pub(crate) peer: Rc<Peer>,
    pub(crate) tx: LaneTx<DatagramHeader>,
    /// Number of the last datagram that was sent there.
    pub(crate) last: u64,
}

impl Outgoing {
    /// Returns whether a datagram has room.
    #[cfg(test)]
    pub(crate) fn is_room(&mut self, lane: &super::layout::DatagramLane) -> bool {
        self.tx.has_room(&lane.consumed)
    }

    /// Sends what no datagram is.
    pub(crate) fn forge(&mut self, header: DatagramHeader) {
        self.tx.publish(header);
    }
}

/// A lane of another device, towards this one.
pub(crate) struct Incoming {
    pub(crate) peer: Rc<Peer>,
    pub(crate) lane: usize,
    /// The lane's `target` when it was found.
    pub(crate) target: u64,
    pub(crate) rx: LaneRx<DatagramHeader>,
}

impl Incoming {
    /// Returns whether the lane is still for this device.
    pub(crate) fn is_own(&self) -> bool {
        self.peer.memory.datagram_lane(self.lane).target.load(Ordering::Acquire) == self.target
    }
}
