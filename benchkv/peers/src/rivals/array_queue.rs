//! A pair of crossbeam's `ArrayQueue`: requests of all clients in one, replies to the client in the
//! other.

use crossbeam_queue::ArrayQueue;

use bench::load::{Answerer, Caller, Failure, Payload};

/// The two queues.
pub(crate) struct Queues {
    /// Client, slot, payload.
    requests: ArrayQueue<(u32, u32, Payload)>,
    /// By client: slot, payload.
    replies: Vec<ArrayQueue<(u32, Payload)>>,
}

impl Queues {
    pub(crate) fn new(clients: usize, ring_depth: usize, depth: usize) -> Self {
        Self {
            requests: ArrayQueue::new(ring_depth),
            replies: (0..clients).map(|_| ArrayQueue::new(depth)).collect(),
        }
    }
}

/// One client of [`Queues`].
pub(crate) struct QueueCaller<'a>(pub(crate) &'a Queues, pub(crate) u32);
/// The server of [`Queues`].
pub(crate) struct QueueAnswerer<'a>(pub(crate) &'a Queues);

impl Answerer for QueueAnswerer<'_> {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let mut answered = 0;
        while let Some((client, slot, request)) = self.0.requests.pop() {
            let replies = self
                .0
                .replies
                .get(client as usize)
                .ok_or("an unknown client")?;
            replies
                .push((slot, f(&request)))
                .map_err(|_| "the queue of replies is full")?;
            answered += 1;
        }
        Ok(answered)
    }
}

impl Caller for QueueCaller<'_> {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        Ok(self.0.requests.push((self.1, slot, request)).is_ok())
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let replies = self
            .0
            .replies
            .get(self.1 as usize)
            .ok_or("an unknown client")?;
        let mut taken = 0;
        while let Some((slot, reply)) = replies.pop() {
            f(slot, reply);
            taken += 1;
        }
        Ok(taken)
    }
}
