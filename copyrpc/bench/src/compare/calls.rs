//! The calls of a client: their slots, their content, and their ends.

use benchkv_harness::Failure;
use benchkv_harness::clock::Clock;
use benchkv_harness::hist::LatencyHistogram;
use benchkv_harness::pattern::Tag;

pub(crate) trait Content {
    /// Writes the request of `slot`, for the call with the tag `tag`.
    fn request(&mut self, slot: u32, tag: Tag, request: &mut [u8]);
    /// Checks the reply. Returns the number of operations that the reply ends; `None` if the reply
    /// is wrong.
    fn reply(&mut self, slot: u32, tag: Tag, reply: &[u8]) -> Option<u64>;
}

/// State that all clients of a measurement share.
#[derive(Debug)]
pub(crate) struct Shared {
    clock: Clock,
    pub(crate) is_timed: bool,
    /// Number of calls that may still be made.
    pub(crate) left: u64,
    pub(crate) ended: u64,
    request: Vec<u8>,
    pub(crate) round_trips: LatencyHistogram,
}

impl Shared {
    pub(crate) fn new(clock: Clock, request_bytes: usize) -> Self {
        Self {
            clock,
            is_timed: false,
            left: u64::MAX,
            ended: 0,
            request: vec![0; request_bytes],
            round_trips: LatencyHistogram::new(),
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// Tag of the unanswered call in this slot.
    tag: Option<Tag>,
    /// Start of the call's round-trip time, if calls are timed: the end of the slot's previous
    /// call, or the time of [`Book::start`].
    sent_ns: u64,
}

/// The calls of one client. Slots of one endpoint are next to each other.
#[derive(Debug)]
pub(crate) struct Book<W> {
    pub(crate) content: W,
    first_endpoint: usize,
    depth: usize,
    slots: Vec<Slot>,
    /// Slots without an unanswered call. The last of these is used next.
    free: Vec<u32>,
    /// Number of the next call, by endpoint.
    next: Vec<u64>,
    pub(crate) made: u64,
    pub(crate) ended: u64,
    pub(crate) operations: u64,
    pub(crate) bad_replies: u64,
    pub(crate) refused: u64,
}

impl<W> Book<W> {
    pub(crate) fn new(content: W, number: usize, endpoints: usize, depth: usize) -> Self {
        let slot = Slot {
            tag: None,
            sent_ns: 0,
        };
        Self {
            content,
            first_endpoint: number * endpoints,
            depth,
            slots: vec![slot; endpoints * depth],
            free: (0..(endpoints * depth) as u32).collect(),
            next: vec![0; endpoints],
            made: 0,
            ended: 0,
            operations: 0,
            bad_replies: 0,
            refused: 0,
        }
    }

    /// Sets the start time of the next call of every slot.
    pub(crate) fn start(&mut self, now_ns: u64) {
        self.slots.iter_mut().for_each(|slot| slot.sent_ns = now_ns);
    }

    pub(crate) fn unanswered(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[derive(Debug)]
pub(crate) struct Calls<'a, W> {
    pub(crate) book: &'a mut Book<W>,
    pub(crate) shared: &'a mut Shared,
}

impl<W: Content> Calls<'_, W> {
    /// Ends the call of `slot`. `reply` is `None` if the server did not execute the call; then one
    /// more call may be made.
    #[inline]
    pub(crate) fn ended(&mut self, slot: u32, reply: Option<&[u8]>) {
        let Self { book, shared } = self;
        let place = book.slots.get_mut(slot as usize);
        let Some((sent_ns, tag)) =
            place.and_then(|slot| Some((&mut slot.sent_ns, slot.tag.take()?)))
        else {
            book.bad_replies += 1;
            return;
        };
        book.free.push(slot);
        let Some(reply) = reply else {
            book.refused += 1;
            shared.left = shared.left.saturating_add(1);
            return;
        };
        match book.content.reply(slot, tag, reply) {
            Some(operations) => book.operations += operations,
            None => book.bad_replies += 1,
        }
        (book.ended, shared.ended) = (book.ended + 1, shared.ended + 1);
        if shared.is_timed {
            let elapsed_ns = shared.clock.now_ns().saturating_sub(*sent_ns);
            shared.round_trips.record(elapsed_ns);
            *sent_ns = shared.clock.now_ns();
        }
    }

    /// Makes a call from the slot whose call ended last, if a slot is free and more calls are
    /// wanted. `issue` sends the call, or returns `false` if there is no room now. Returns whether
    /// a call was made.
    #[inline]
    pub(crate) fn again(
        &mut self,
        issue: impl FnOnce(u32, &[u8]) -> Result<bool, Failure>,
    ) -> Result<bool, Failure> {
        let Self { book, shared } = self;
        let Some(&slot) = book.free.last().filter(|_| shared.left > 0) else {
            return Ok(false);
        };
        let endpoint = slot as usize / book.depth;
        let (Some(place), Some(next)) = (
            book.slots.get_mut(slot as usize),
            book.next.get_mut(endpoint),
        ) else {
            return Ok(false);
        };
        let tag = Tag::new(book.first_endpoint + endpoint, *next);
        book.content.request(slot, tag, &mut shared.request);
        if !issue(slot, &shared.request)? {
            return Ok(false);
        }
        place.tag = Some(tag);
        book.free.pop();
        (*next, book.made, shared.left) = (*next + 1, book.made + 1, shared.left - 1);
        Ok(true)
    }
}
