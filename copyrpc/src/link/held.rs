//! Requests from their arrival to their answer. They are numbered in the order of arrival, which is the order in which the application
//! gets them. They are answered in any order, and their bytes become free in the order of arrival (S3).

#[cfg(test)]
#[path = "explore/held.rs"]
mod explore;

/// Number of requests with room once one has arrived; doubled when it is used up.
const FIRST_ROOM: usize = 4;

/// A request that the application has not answered; its bytes are needed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeldRequest {
    /// Position of its message in the ring.
    pub(super) position: u64,
    pub(super) call_id: u32,
    /// Payload bytes.
    pub(super) len: u32,
    /// Internal allowance in bytes; 0 once it is answered and waits for older ones.
    pub(super) internal_allowance: u32,
}

/// A ring of requests, each at its number modulo the room.
#[derive(Debug)]
pub(super) struct HeldRequests {
    /// Places for requests: a power of two, or none.
    room: Vec<HeldRequest>,
    /// Number of the oldest request that is not answered.
    oldest: u64,
    /// Number of the next request that the application gets. `oldest <= untaken <= next`.
    untaken: u64,
    /// Number of the next request to arrive.
    next: u64,
}

impl HeldRequests {
    /// Makes a ring after `answered` requests, all answered.
    pub(super) const fn new(answered: u64) -> Self {
        Self { room: Vec::new(), oldest: answered, untaken: answered, next: answered }
    }

    #[inline(always)]
    fn place(&self, number: u64) -> usize {
        number as usize & self.room.len().wrapping_sub(1)
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.oldest == self.next
    }

    /// Returns the oldest request that is not answered.
    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<&HeldRequest> {
        if self.is_empty() { None } else { self.room.get(self.place(self.oldest)) }
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
    pub(super) fn get(&self, number: u64) -> Option<HeldRequest> {
        if number.wrapping_sub(self.oldest) >= self.untaken - self.oldest {
            return None;
        }
        self.room.get(self.place(number)).copied().filter(|request| request.internal_allowance != 0)
    }

    /// Returns whether the application has a request that is not answered.
    pub(super) const fn has_taken(&self) -> bool {
        // The oldest is not answered, unless there is none.
        self.oldest != self.untaken
    }

    /// Notes that the request, which [`HeldRequests::get`] returned, is answered.
    #[inline(always)]
    pub(super) fn answer(&mut self, number: u64) {
        if number == self.oldest {
            self.oldest += 1;
            while self.oldest().is_some_and(|request| request.internal_allowance == 0) {
                self.oldest += 1;
            }
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
        HeldRequest { position, call_id: 0, len: 0, internal_allowance: 64 }
    }

    #[test]
    fn requests_are_taken_in_order_answered_in_any_and_free_from_the_oldest_on() {
        let mut held = HeldRequests::new(0);
        let mut rng = fastrand::Rng::with_seed(1);
        let (mut arrived, mut taken, mut open) = (0, 0, Vec::new());
        for _ in 0..20_000 {
            match rng.u8(..4) {
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
                _ if !open.is_empty() => {
                    let number = open.swap_remove(rng.usize(..open.len()));
                    assert_eq!(held.get(number).unwrap().position, number);
                    held.answer(number);
                    assert!(held.get(number).is_none(), "answered twice");
                }
                _ => {}
            }
            assert!(held.get(taken).is_none(), "not with the application");
            let oldest = open.iter().copied().min().unwrap_or(taken);
            assert_eq!(held.oldest().map(|request| request.position), (oldest < arrived).then_some(oldest));
        }
    }
}
