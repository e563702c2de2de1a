//! Requests from their arrival to their answer. They are numbered in the order of arrival, which is the order in which the application
//! gets them. They are answered in any order, and their bytes become free in the order of arrival (S3). A request whose bytes the
//! application has copied leaves that order, and waits for its answer without a place in the ring.

#[cfg(test)]
#[path = "explore/held.rs"]
mod explore;

use slab::Slab;

use super::IN_PLACE;

/// Number of requests with room once one has arrived; doubled when it is used up.
const FIRST_ROOM: usize = 4;
/// The least number of a request without bytes. Their numbers go down from the one below [`IN_PLACE`]; no count of arrivals reaches them.
const WITHOUT_BYTES: u64 = IN_PLACE - u32::MAX as u64;

/// Returns the key of a request without bytes.
const fn key_of(number: u64) -> usize {
    (IN_PLACE - 1).wrapping_sub(number) as usize
}

/// A request that the application has not answered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeldRequest {
    /// Position of its message in the ring, while its bytes are needed.
    pub(super) position: u64,
    pub(super) call_id: u32,
    /// Payload bytes that are needed.
    pub(super) len: u32,
    /// Internal allowance in bytes; 0 once it is answered and waits for older ones.
    pub(super) internal_allowance: u32,
}

/// A ring of requests, each at its number modulo the room; and requests that have no bytes any more.
#[derive(Debug)]
pub(super) struct HeldRequests {
    /// Places for requests: a power of two, or none.
    room: Vec<HeldRequest>,
    without_bytes: Slab<HeldRequest>,
    /// Number of the oldest request whose bytes are needed.
    oldest: u64,
    /// Number of the next request that the application gets. `oldest <= untaken <= next`.
    untaken: u64,
    /// Number of the next request to arrive.
    next: u64,
}

impl HeldRequests {
    /// Makes a ring after `answered` requests, all answered.
    pub(super) const fn new(answered: u64) -> Self {
        Self { room: Vec::new(), without_bytes: Slab::new(), oldest: answered, untaken: answered, next: answered }
    }

    #[inline(always)]
    fn place(&self, number: u64) -> usize {
        number as usize & self.room.len().wrapping_sub(1)
    }

    /// Returns whether every request is answered.
    pub(super) fn is_empty(&self) -> bool {
        !self.needs_bytes() && self.without_bytes.is_empty()
    }

    /// Returns whether the bytes of a request are needed.
    #[inline]
    pub(super) const fn needs_bytes(&self) -> bool {
        self.oldest != self.next
    }

    /// Returns the oldest request whose bytes are needed.
    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<&HeldRequest> {
        if !self.needs_bytes() { None } else { self.room.get(self.place(self.oldest)) }
    }

    /// Adds an arrived request. Allocates only while the number of held requests reaches a new maximum.
    #[inline(always)]
    pub(super) fn push(&mut self, request: HeldRequest) {
        if self.next - self.oldest == self.room.len() as u64 {
            self.grow();
        }
        let place = self.place(self.next);
        self.room[place] = request;
        self.next += 1;
    }

    /// Adds a request that goes to the application at once, which has all others. Returns its number.
    pub(super) fn push_taken(&mut self, request: HeldRequest) -> u64 {
        debug_assert!(!self.has_untaken());
        self.push(request);
        self.untaken = self.next;
        self.next - 1
    }

    /// Returns whether there are requests that the application has not got.
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

    /// Takes the next request for the application. Returns its number too.
    #[inline(always)]
    pub(super) fn take(&mut self) -> Option<(u64, &HeldRequest)> {
        if self.untaken == self.next {
            return None;
        }
        let number = self.untaken;
        self.untaken += 1;
        self.room.get(self.place(number)).map(|request| (number, request))
    }

    /// Returns the request with this number, if the application has it.
    #[inline(always)]
    pub(super) fn get(&self, number: u64) -> Option<&HeldRequest> {
        if number.wrapping_sub(self.oldest) >= self.untaken - self.oldest {
            return self.get_without_bytes(number);
        }
        self.room.get(self.place(number)).filter(|request| request.internal_allowance != 0)
    }

    #[cold]
    #[inline(never)]
    fn get_without_bytes(&self, number: u64) -> Option<&HeldRequest> {
        self.without_bytes.get(key_of(number))
    }

    /// Returns whether the application has a request that is not answered, and whose bytes it did not give up.
    pub(super) const fn has_taken_bytes(&self) -> bool {
        // The oldest is not answered, unless there is none.
        self.oldest != self.untaken
    }

    /// Gives up the bytes of the request with this number, if the application has it. Returns its new number.
    pub(super) fn give_up_bytes(&mut self, number: u64) -> u64 {
        let request = match self.get(number) {
            Some(request) if number < WITHOUT_BYTES => *request,
            _ => return number,
        };
        self.answer(number);
        IN_PLACE - 1 - self.without_bytes.insert(HeldRequest { position: 0, len: 0, ..request }) as u64
    }

    /// Notes that the request, which [`HeldRequests::get`] returned, is answered.
    #[inline(always)]
    pub(super) fn answer(&mut self, number: u64) {
        if number == self.oldest {
            self.oldest += 1;
            while self.oldest().is_some_and(|request| request.internal_allowance == 0) {
                self.oldest += 1;
            }
        } else if number >= WITHOUT_BYTES {
            let _answered = self.without_bytes.try_remove(key_of(number));
        } else {
            let place = self.place(number);
            self.room[place].internal_allowance = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(position: u64) -> HeldRequest {
        HeldRequest { position, call_id: position as u32, len: 8, internal_allowance: 64 }
    }

    #[test]
    fn requests_are_taken_in_order_answered_in_any_and_their_bytes_free_from_the_oldest_on() {
        let mut held = HeldRequests::new(0);
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut arrived, mut taken, mut open, mut copied) = (0, 0, Vec::new(), Vec::new());
        for _ in 0..20_000 {
            match rng.u8(..5) {
                0 | 1 if arrived - taken < 100 => {
                    held.push(request(arrived));
                    arrived += 1;
                }
                2 => match held.take() {
                    Some((number, request)) => {
                        assert_eq!((number, request.position), (taken, taken));
                        open.push(number);
                        taken += 1;
                    }
                    None => assert_eq!(taken, arrived),
                },
                3 if !open.is_empty() => {
                    let number = open.swap_remove(rng.usize(..open.len()));
                    let request = *held.get(number).unwrap();
                    assert_eq!(request.position, number);
                    if rng.bool() {
                        held.answer(number);
                    } else {
                        let new = held.give_up_bytes(number);
                        assert_eq!(held.give_up_bytes(new), new, "given up twice");
                        copied.push((new, number as u32));
                    }
                    assert!(held.get(number).is_none(), "answered twice");
                }
                4 if !copied.is_empty() => {
                    let (number, call_id) = copied.swap_remove(rng.usize(..copied.len()));
                    let request = *held.get(number).unwrap();
                    assert_eq!((request.call_id, request.len), (call_id, 0));
                    held.answer(number);
                    assert!(held.get(number).is_none(), "answered twice");
                }
                _ => {}
            }
            assert_eq!(held.has_taken_bytes(), !open.is_empty());
            assert_eq!(held.is_empty(), arrived == taken && open.is_empty() && copied.is_empty());
            assert!(held.get(taken).is_none(), "not with the application");
            let oldest = open.iter().copied().min().unwrap_or(taken);
            assert_eq!(held.oldest().map(|request| request.position), (oldest < arrived).then_some(oldest));
        }
    }
}
