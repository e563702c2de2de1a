//! Small policies: when to flush, when to take requests, when to look at clients, when connections begin.

/// Send-side batching: a flush every so many rounds that did something.
#[derive(Debug)]
pub struct FlushEvery {
    every: u32,
    waiting: u32,
}

impl FlushEvery {
    /// At least every `every` rounds.
    #[must_use]
    pub const fn new(every: u32) -> Self {
        Self { every, waiting: 0 }
    }

    /// A round ends that moved something or not: whether it flushes. One that moved nothing does, so that nothing waits for work to come.
    pub fn flushes(&mut self, has_moved: bool) -> bool {
        self.waiting += u32::from(has_moved);
        let flushes = !has_moved || self.waiting >= self.every;
        if flushes {
            self.waiting = 0;
        }
        flushes
    }
}

/// Receive coalescing: for some time after requests were sent, nothing but answers is taken.
#[derive(Debug)]
pub struct Coalesce {
    wait_ns: u64,
    sent_ns: Option<u64>,
}

impl Coalesce {
    /// For `wait_ns`.
    #[must_use]
    pub const fn new(wait_ns: u64) -> Self {
        Self { wait_ns, sent_ns: None }
    }

    /// Requests were sent.
    pub fn sent(&mut self, now_ns: u64) {
        self.sent_ns = Some(now_ns);
    }

    /// Whether this round takes answers only. Not when none can come.
    pub fn gathers(&mut self, now_ns: u64, outstanding: usize) -> bool {
        let gathers = outstanding > 0 && self.sent_ns.is_some_and(|sent_ns| now_ns.saturating_sub(sent_ns) < self.wait_ns);
        if !gathers {
            self.sent_ns = None;
        }
        gathers
    }
}

/// Leaves the clients of a daemon out for some rounds after a look at them that found nothing.
#[derive(Debug)]
pub struct SkipIdle {
    rounds: u32,
    left: u32,
}

impl SkipIdle {
    /// For `rounds` rounds.
    #[must_use]
    pub const fn new(rounds: u32) -> Self {
        Self { rounds, left: 0 }
    }

    /// Whether this round looks.
    pub fn looks(&mut self) -> bool {
        let looks = self.left == 0;
        self.left = self.left.saturating_sub(1);
        looks
    }

    /// A look found so many requests.
    pub fn looked(&mut self, found: usize) {
        if found == 0 {
            self.left = self.rounds;
        }
    }
}

/// The connections of a daemon begin to send one after the other, counted from its first request.
#[derive(Debug)]
pub struct Stagger {
    interval_ns: u64,
    started_ns: Option<u64>,
}

impl Stagger {
    /// `interval_ns` apart, at least 1.
    #[must_use]
    pub fn new(interval_ns: u64) -> Self {
        Self { interval_ns: interval_ns.max(1), started_ns: None }
    }

    /// How many connections may send; `has_work`: a request waits, or was sent.
    pub fn open(&mut self, now_ns: u64, has_work: bool) -> usize {
        if self.started_ns.is_none() && !has_work {
            return 1;
        }
        let elapsed_ns = now_ns.saturating_sub(*self.started_ns.get_or_insert(now_ns));
        usize::try_from(elapsed_ns / self.interval_ns).map_or(usize::MAX, |further| further.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_wait_for_rounds_but_never_for_work() {
        let mut policy = FlushEvery::new(3);
        let rounds = [true, true, true, true, false, true, true, true, false, false];
        let flushes = [false, false, true, false, true, false, false, true, true, true];
        assert_eq!(rounds.map(|has_moved| policy.flushes(has_moved)), flushes);
        let mut policy = FlushEvery::new(1);
        assert!(policy.flushes(true) && policy.flushes(false));
    }

    #[test]
    fn gathering_ends_with_its_time_or_when_nothing_can_come() {
        let mut policy = Coalesce::new(1_000);
        assert!(!policy.gathers(0, 5), "nothing was sent yet");
        policy.sent(100);
        assert!(policy.gathers(100, 5) && policy.gathers(1_099, 1));
        assert!(!policy.gathers(1_100, 5));
        policy.sent(2_000);
        assert!(!policy.gathers(2_001, 0), "all are answered");
        assert!(!policy.gathers(2_002, 1), "what has ended does not begin again");
        policy.sent(5_000);
        assert!(policy.gathers(4_000, 1), "time went back");
        assert!(!policy.gathers(6_000, 1));
    }

    #[test]
    fn clients_are_left_out_for_a_bounded_number_of_rounds_only_after_a_vain_look() {
        let mut policy = SkipIdle::new(2);
        let mut looks = |found| {
            let looks = policy.looks();
            if looks {
                policy.looked(found);
            }
            looks
        };
        let found = [3, 0, 9, 9, 1, 0, 0, 0, 0];
        assert_eq!(found.map(&mut looks), [true, true, false, false, true, true, false, false, true]);
    }

    #[test]
    fn connections_begin_one_after_the_other_from_the_first_request_on() {
        let mut policy = Stagger::new(1_000);
        assert_eq!([10, 1_000_000].map(|now_ns| policy.open(now_ns, false)), [1, 1]);
        let at = [2_000_000, 2_000_999, 2_001_000, 2_005_500, 1_000];
        assert_eq!(at.map(|now_ns| policy.open(now_ns, true)), [1, 1, 2, 6, 1]);
        assert_eq!(Stagger::new(0).interval_ns, 1);
        let mut fast = Stagger::new(1);
        fast.open(0, true);
        assert_eq!(fast.open(u64::MAX, true), usize::MAX);
    }
}
