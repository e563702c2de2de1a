//! The legacy lane: requests whose handlers take longer than a slice. They are copied out of the pool, so that they pin no zone.

use std::collections::VecDeque;

use crate::protocol::pool::MessagePool;
use crate::protocol::request::Request;

/// A queue of fixed length with the requests' bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LegacyLane {
    places: MessagePool,
    queue: VecDeque<(Request, u32)>,
    bytes: Vec<u8>,
    place_bytes: usize,
}

impl LegacyLane {
    pub(crate) fn new(capacity: u32, place_bytes: usize) -> Self {
        Self {
            places: MessagePool::new(capacity),
            queue: VecDeque::with_capacity(capacity as usize),
            bytes: vec![0; capacity as usize * place_bytes],
            place_bytes,
        }
    }

    /// Copies a request into the lane. Returns `false` if the lane is full.
    pub(crate) fn push(&mut self, request: Request, payload: &[u8]) -> bool {
        let payload = &payload[..payload.len().min(self.place_bytes)];
        let Some(place) = self.places.allocate() else { return false };
        let at = place as usize * self.place_bytes;
        self.bytes[at..at + payload.len()].copy_from_slice(payload);
        self.queue.push_back((request, place));
        true
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes the oldest request. Copies as much of its payload as fits to `into`.
    pub(crate) fn pop(&mut self, into: &mut [u8]) -> Option<Request> {
        let (request, place) = self.queue.pop_front()?;
        let at = place as usize * self.place_bytes;
        let len = request.len().min(into.len());
        into[..len].copy_from_slice(&self.bytes[at..at + len]);
        // `push` allocated it, and it is freed only here.
        let _freed = self.places.release(place);
        Some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::mapping::ClientId;
    use crate::protocol::wire::ReqId;

    #[test]
    fn a_lane_keeps_order_and_bytes_and_is_bounded() {
        let request =
            |slot, len| Request { client: ClientId(1), generation: 1, id: ReqId { slot, sequence: 1 }, rpc_type: 2, len, buffer: None };
        let mut lane = LegacyLane::new(2, 4);
        for round in 0..5_u8 {
            assert!(lane.push(request(round, 3), &[round, 2, 3]));
            assert!(lane.push(request(round + 1, 4), &[4, 5, 6, round]));
            assert!(!lane.push(request(9, 1), &[1]), "full");
            let mut bytes = [0; 4];
            assert_eq!((lane.pop(&mut bytes), bytes), (Some(request(round, 3)), [round, 2, 3, 0]));
            assert_eq!((lane.pop(&mut bytes), bytes), (Some(request(round + 1, 4)), [4, 5, 6, round]));
            assert_eq!(lane.pop(&mut bytes), None);
        }
    }
}
