use super::{HeldRequest, HeldRequests};

impl HeldRequests {
    /// Changes the state as if this number of requests had been answered before.
    pub(in crate::link) const fn skip(&mut self, answered: u64) {
        (self.oldest, self.untaken, self.next) = (answered, answered, answered);
    }

    /// Returns the requests that are not answered, with their numbers. The application must have
    /// taken all requests.
    pub(in crate::link) fn unanswered(&self) -> impl Iterator<Item = (u64, HeldRequest)> {
        assert_eq!(
            self.untaken, self.next,
            "requests are taken when they arrive"
        );
        let held = (self.oldest..self.next).map(|number| (number, self.room[self.place(number)]));
        held.filter(|(_, request)| request.internal_allowance != 0)
    }

    /// Restores these requests as held and taken.
    pub(in crate::link) fn restore(&mut self, requests: impl Iterator<Item = HeldRequest>) {
        (self.oldest, self.untaken, self.next) = (0, 0, 0);
        requests.for_each(|request| self.push(request));
        self.untaken = self.next;
    }
}
