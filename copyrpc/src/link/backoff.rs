//! How long an end that waits for its peer's words goes without a READ after READs that brought none (L5).

/// The maximum number of calls of [`Link::poll_read`](super::Link::poll_read) between two READs that are wanted.
const MAX_PAUSE: u32 = 64;

#[derive(Debug)]
pub(super) struct Backoff {
    /// Polls passed over after the last READ; 0 unless it was in vain.
    pause: u32,
    /// How many of them are left.
    left: u32,
    /// Batches that had arrived at the last look. One more is news, which is found here so that arrivals need not tell.
    arrived: u64,
}

impl Backoff {
    /// After so many batches arrived.
    pub(super) const fn new(arrived: u64) -> Self {
        Self { pause: 0, left: 0, arrived }
    }

    /// Whether a READ that is wanted is posted at this poll; `arrived` batches have arrived in all.
    #[inline(never)]
    pub(super) const fn ends_at_this_poll(&mut self, arrived: u64) -> bool {
        if arrived != self.arrived {
            self.arrived = arrived;
            self.news();
        }
        if self.left == 0 {
            return true;
        }
        self.left -= 1;
        false
    }

    /// A READ completed and found nothing new.
    pub(super) fn vain_read(&mut self) {
        self.pause = (2 * self.pause).clamp(1, MAX_PAUSE);
        self.left = self.pause;
    }

    /// A READ completed and found something new.
    pub(super) const fn news(&mut self) {
        self.pause = 0;
        self.left = 0;
    }
}
