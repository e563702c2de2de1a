//! Lanes of datagrams. Each is in the memory of the sender, and leads to one device.

use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::rc::Rc;

use copyrpc_shm::lane::{LaneRx, LaneTx};
use copyrpc_shm::ready::ReadyWords;
use mlx5_wire::GRH_BYTES;

use crate::shared::layout::{
    DATAGRAM_SLOTS, DatagramHeader, DatagramLane, MAX_DATAGRAM_LANES, MAX_LIDS, MAX_MTU,
};
use crate::shared::memory::DeviceMemory;
use crate::shared::peer::Peer;

/// Returns the words in which other devices announce datagrams for the owner of `memory`, by their
/// LIDs.
pub(crate) fn ready_lids(memory: &DeviceMemory) -> ReadyWords {
    // SAFETY: the lanes segment holds the words for MAX_LIDS. Views do not outlive the memory they
    // are made from.
    unsafe {
        ReadyWords::new(
            NonNull::from(&memory.lanes().datagram_ready).cast(),
            MAX_LIDS,
        )
    }
}

/// A lane of this device, towards one other device.
pub(crate) struct Outgoing {
    pub(crate) peer: Rc<Peer>,
    pub(crate) tx: LaneTx<DatagramHeader>,
    /// Number of the last datagram sent through this lane, among all datagrams of the device.
    pub(crate) last: u64,
    /// Value of the lane's `consumed` when a datagram was lost because it had waited its whole time
    /// for room; `None` before that.
    pub(crate) stopped_at: Option<u64>,
}

impl Outgoing {
    /// Returns the address of the next datagram's payload in `lane`, the memory of this lane, with
    /// room for a GRH and [`MAX_MTU`] bytes. `None` if the lane is full.
    pub(crate) fn next_payload(&mut self, lane: &DatagramLane) -> Option<NonNull<u8>> {
        let slot = self.tx.position() as usize % DATAGRAM_SLOTS;
        let payloads = NonNull::from(&lane.payloads).cast::<[u8; GRH_BYTES + MAX_MTU]>();
        // SAFETY: `slot` is below the number of the lane's payloads.
        self.tx
            .has_room(&lane.consumed)
            .then(|| unsafe { payloads.add(slot).cast() })
    }

    /// Returns whether a datagram that found no room in `lane` waits. If the time of its wait
    /// `is_over`, the datagram is lost. Then all further datagrams that find no room are lost too,
    /// until the receiver takes a datagram: so a stopped receiver delays a send queue only once.
    pub(crate) fn waits(&mut self, lane: &DatagramLane, is_over: bool) -> bool {
        let consumed = Some(lane.consumed.load(Ordering::Relaxed));
        if is_over {
            self.stopped_at = consumed;
        }
        self.stopped_at != consumed
    }

    /// Publishes a datagram of the device with this LID. The caller has written its payload at
    /// [`next_payload`](Self::next_payload), which returned an address because there is room.
    pub(crate) fn publish(&mut self, header: DatagramHeader, own_lid: u16) {
        self.tx.publish(header);
        ready_lids(&self.peer.memory).notify(usize::from(own_lid));
        self.peer.memory.wake();
    }
}

/// A lane of another device, towards this device.
pub(crate) struct Incoming {
    pub(crate) peer: Rc<Peer>,
    /// Number of the lane among the lanes of `peer`.
    number: usize,
    /// Value of the lane's `target` when the lane was found.
    target: u64,
    rx: LaneRx<DatagramHeader>,
    /// Number of datagrams taken, including those lost with earlier receivers.
    taken: u64,
}

impl Incoming {
    /// Returns the lane of `peer` that leads to the device with this LID and epoch.
    pub(crate) fn find(peer: Rc<Peer>, own: (u16, u64)) -> Option<Self> {
        let lanes =
            (0..MAX_DATAGRAM_LANES).map(|number| (number, peer.memory.datagram_lane(number)));
        let mut used = lanes
            .map(|(number, lane)| (number, lane, lane.target.load(Ordering::Acquire)))
            .take_while(|lane| lane.2 != 0);
        let (number, lane, target) = used.find(|(_, lane, target)| {
            (*target as u16, lane.target_epoch.load(Ordering::Relaxed)) == own
        })?;
        let (slots, taken) = (
            NonNull::from(&lane.slots).cast(),
            lane.consumed.load(Ordering::Acquire),
        );
        // SAFETY: the slots live as long as `peer`, and this device, the lane's target, is their
        // only consumer. When the lane was assigned to this device, `consumed` was the sender's
        // position. Any bytes are a valid header.
        let rx = unsafe { LaneRx::new(slots, DATAGRAM_SLOTS as u64, taken) };
        drop(used);
        Some(Self {
            peer,
            number,
            target,
            rx,
            taken,
        })
    }

    fn lane(&self) -> &DatagramLane {
        self.peer.memory.datagram_lane(self.number)
    }

    /// Returns whether the lane still leads to this device.
    pub(crate) fn is_own(&self) -> bool {
        self.lane().target.load(Ordering::Acquire) == self.target
    }

    /// Takes the next datagram: its header, and the address of its payload, which the sender may
    /// overwrite. `None` if there is none, or the lane leads to another device now.
    pub(crate) fn pop(&mut self) -> Option<(DatagramHeader, NonNull<u8>)> {
        let slot = self.rx.position() as usize % DATAGRAM_SLOTS;
        let header = self.rx.pop().filter(|_| self.is_own())?;
        self.taken = self.rx.position();
        Some((header, NonNull::from(&self.lane().payloads[slot]).cast()))
    }

    /// Reports to the sender, in `consumed`, that the slots of the taken datagrams are free.
    pub(crate) fn give_room(&self) {
        // The datagrams were copied before this store (L2 of docs/shm-protocols.md).
        self.lane().consumed.store(self.taken, Ordering::Release);
    }
}
