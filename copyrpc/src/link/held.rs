//! Requests from their arrival to their answer. They are numbered in the order of arrival, which is
//! the order in which the application gets them. They are answered in any order, and their bytes
//! become free in the order of arrival (S3 of docs/copyrpc-protocol.md). A request whose bytes the
//! application has copied is no longer part of that order, and waits for its answer without a place
//! in the ring.

#[cfg(test)]
#[path = "explore/held.rs"]
mod explore;

use super::{Hold, Request};
use crate::ring::Payload;
use crate::wire::RESPONSE_FLAG;

/// Number of places for requests once the first request has arrived; doubled when all are taken.
const FIRST_ROOM: usize = 4;

/// The bit of a held request's `call_id` that marks a call that was given up. The id of a call has
/// 31 bits.
pub(super) const GIVEN_UP: u32 = RESPONSE_FLAG;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeldRequest {
    /// Position of the request's message in the ring, while its bytes are needed.
    pub(super) position: u64,
    /// Id of the call, with [`GIVEN_UP`] once its caller no longer waits.
    pub(super) call_id: u32,
    pub(super) len: u32,
    /// Internal allowance in bytes; 0 once the request is answered and waits for older requests.
    pub(super) internal_allowance: u32,
}

/// A ring of requests. The place of each request is its number modulo the length of `room`.
#[derive(Debug)]
pub(super) struct HeldRequests {
    /// Places for requests: a power of two, or none.
    room: Vec<HeldRequest>,
    /// Unanswered requests whose bytes the application has released, and free places for more. The
    /// `position` of a free place, whose `internal_allowance` is 0, is the index of the next free
    /// place.
    released: Vec<HeldRequest>,
    /// Index of the first free place in `released`; its length if there is none.
    free: usize,
    /// Number of requests in `released`.
    without_bytes: usize,
    /// Number of the oldest request whose bytes are needed.
    oldest: u64,
    /// Number of the next request that the application gets. `oldest <= untaken <= next`.
    untaken: u64,
    /// Number of the next request to arrive.
    next: u64,
}

impl HeldRequests {
    pub(super) const fn new() -> Self {
        Self {
            room: Vec::new(),
            released: Vec::new(),
            free: 0,
            without_bytes: 0,
            oldest: 0,
            untaken: 0,
            next: 0,
        }
    }

    #[inline(always)]
    fn place(&self, number: u64) -> usize {
        number as usize & self.room.len().wrapping_sub(1)
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.needs_bytes() && self.without_bytes == 0
    }

    #[inline]
    pub(super) const fn needs_bytes(&self) -> bool {
        self.oldest != self.next
    }

    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<&HeldRequest> {
        if !self.needs_bytes() {
            None
        } else {
            self.room.get(self.place(self.oldest))
        }
    }

    /// Adds an arrived request. Allocates only when the number of held requests reaches a new
    /// maximum.
    #[inline(always)]
    pub(super) fn push(&mut self, request: HeldRequest) {
        if self.next - self.oldest == self.room.len() as u64 {
            self.grow();
        }
        let place = self.place(self.next);
        self.room[place] = request;
        self.next += 1;
    }

    /// Holds a request that the application has and that is [in place](Hold::InPlace). Returns its
    /// number.
    pub(super) fn hold(&mut self, payload: Payload, internal_allowance: u32, call_id: u32) -> u32 {
        debug_assert!(!self.has_untaken());
        self.push(HeldRequest {
            position: payload.message(),
            call_id,
            len: payload.len() as u32,
            internal_allowance,
        });
        self.untaken = self.next;
        (self.next - 1) as u32
    }

    #[inline(always)]
    pub(super) const fn has_untaken(&self) -> bool {
        self.untaken != self.next
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let mut room = vec![HeldRequest::default(); (2 * self.room.len()).max(FIRST_ROOM)];
        let mask = room.len() - 1;
        for number in self.oldest..self.next {
            room[number as usize & mask] = self.room[self.place(number)];
        }
        self.room = room;
    }

    /// Takes the next request for the application. Returns its number.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<u32> {
        if self.untaken == self.next {
            return None;
        }
        self.untaken += 1;
        Some((self.untaken - 1) as u32)
    }

    #[inline(always)]
    pub(super) fn get(&self, number: u32) -> Request {
        let place = self.place(u64::from(number));
        let HeldRequest {
            position,
            call_id,
            len,
            internal_allowance,
        } = self.room.get(place).copied().unwrap_or_default();
        Request {
            hold: Hold::Held(number),
            payload: Payload::of_message(position, len),
            internal_allowance,
            call_id,
        }
    }

    /// Returns whether the application has a request that is not answered, and whose bytes it did
    /// not release.
    pub(super) const fn has_taken_bytes(&self) -> bool {
        // The oldest request whose bytes are needed is not answered, so it counts if the
        // application has it.
        self.oldest != self.untaken
    }

    pub(super) fn release_bytes(&mut self, request: &mut Request) {
        if let Hold::Held(_) = request.hold {
            self.answer(request.hold);
            let released = HeldRequest {
                call_id: request.call_id,
                internal_allowance: request.internal_allowance,
                ..HeldRequest::default()
            };
            let index = self.free;
            if let Some(place) = self.released.get_mut(index) {
                self.free = std::mem::replace(place, released).position as usize;
            } else {
                self.released.push(released);
                self.free = self.released.len();
            }
            request.hold = Hold::WithoutBytes(index as u32);
            request.payload = Payload::default();
            self.without_bytes += 1;
        }
    }

    /// Returns a request whose bytes the application has released.
    pub(super) fn get_released(&self, index: u32) -> Request {
        let released = self.released.get(index as usize);
        let HeldRequest {
            call_id,
            internal_allowance,
            ..
        } = released.copied().unwrap_or_default();
        Request {
            hold: Hold::WithoutBytes(index),
            payload: Payload::default(),
            internal_allowance,
            call_id,
        }
    }

    /// Marks the request of a call that its caller gave up. Ignores an id that no unanswered
    /// request has: usually the answer and the notice have crossed on their way, and an id that the
    /// peer made up looks the same.
    #[cold]
    pub(super) fn give_up(&mut self, call_id: u32) {
        let mask = self.room.len().wrapping_sub(1);
        let room = &mut self.room;
        let held = (self.oldest..self.next).map(|number| number as usize & mask);
        let place = held
            .into_iter()
            .find(|place| is_call(&room[*place], call_id));
        let request = match place {
            Some(place) => self.room.get_mut(place),
            None => self
                .released
                .iter_mut()
                .find(|released| is_call(released, call_id)),
        };
        if let Some(request) = request {
            request.call_id |= GIVEN_UP;
        }
    }

    #[inline(always)]
    pub(super) fn answer(&mut self, hold: Hold) {
        match hold {
            Hold::InPlace => {}
            Hold::WithoutBytes(index) => {
                let free = std::mem::replace(&mut self.free, index as usize);
                self.released[index as usize] = HeldRequest {
                    position: free as u64,
                    ..HeldRequest::default()
                };
                self.without_bytes -= 1;
            }
            Hold::Held(number) if number == self.oldest as u32 => {
                self.oldest += 1;
                while self
                    .oldest()
                    .is_some_and(|request| request.internal_allowance == 0)
                {
                    self.oldest += 1;
                }
            }
            Hold::Held(number) => {
                let place = self.place(u64::from(number));
                self.room[place].internal_allowance = 0;
            }
        }
    }
}

/// Returns whether this is an unanswered request of the call, whose caller waits as far as is
/// known.
fn is_call(request: &HeldRequest, call_id: u32) -> bool {
    request.call_id == call_id && request.internal_allowance != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(position: u64) -> HeldRequest {
        HeldRequest {
            position,
            call_id: position as u32,
            len: 8,
            internal_allowance: 64,
        }
    }

    #[test]
    fn requests_are_taken_in_order_answered_in_any_and_their_bytes_free_from_the_oldest_on() {
        let mut held = HeldRequests::new();
        let mut rng = fastrand::Rng::with_seed(1);
        let mut arrived = 0;
        let mut taken = 0;
        let mut open = Vec::new();
        let mut copied = Vec::new();
        for _ in 0..20_000 {
            match rng.u8(..5) {
                0 | 1 if arrived - taken < 100 => {
                    held.push(request(arrived));
                    arrived += 1;
                }
                2 => match held.take().map(|number| held.get(number)) {
                    Some(request) => {
                        assert_eq!(
                            (request.hold, request.payload.message()),
                            (Hold::Held(taken as u32), taken)
                        );
                        open.push(request);
                        taken += 1;
                    }
                    None => assert_eq!(taken, arrived),
                },
                3 if !open.is_empty() => {
                    let mut request = open.swap_remove(rng.usize(..open.len()));
                    if rng.bool() {
                        held.answer(request.hold);
                    } else {
                        held.release_bytes(&mut request);
                        let hold = request.hold;
                        assert!(matches!(hold, Hold::WithoutBytes(_)));
                        held.release_bytes(&mut request);
                        assert_eq!((request.hold, request.payload), (hold, Payload::default()));
                        copied.push(request);
                    }
                }
                4 if !copied.is_empty() => {
                    held.answer(copied.swap_remove(rng.usize(..copied.len())).hold)
                }
                _ => {}
            }
            assert_eq!(held.has_taken_bytes(), !open.is_empty());
            assert_eq!(
                held.is_empty(),
                arrived == taken && open.is_empty() && copied.is_empty()
            );
            let oldest = open
                .iter()
                .map(|request| request.payload.message())
                .min()
                .unwrap_or(taken);
            assert_eq!(
                held.oldest().map(|request| request.position),
                (oldest < arrived).then_some(oldest)
            );
        }
    }
}
