//! A pair of rtrb's rings.

use rtrb::{Consumer, Producer, RingBuffer};

use bench::load::{Answerer, Caller, Failure, Payload};

type Message = (u32, Payload);

/// The caller's ends.
pub(crate) struct RingCaller(Producer<Message>, Consumer<Message>);
/// The answerer's ends.
pub(crate) struct RingAnswerer(Consumer<Message>, Producer<Message>);

pub(crate) fn pair(depth: usize) -> (RingCaller, RingAnswerer) {
    let ((to, requests), (replies, from)) = (RingBuffer::new(depth), RingBuffer::new(depth));
    (RingCaller(to, from), RingAnswerer(requests, replies))
}

impl Answerer for RingAnswerer {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let mut answered = 0;
        while let Ok((slot, request)) = self.0.pop() {
            self.1
                .push((slot, f(&request)))
                .map_err(|_| "the ring of replies is full")?;
            answered += 1;
        }
        Ok(answered)
    }
}

impl Caller for RingCaller {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        Ok(self.0.push((slot, request)).is_ok())
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let mut taken = 0;
        while let Ok((slot, reply)) = self.1.pop() {
            f(slot, reply);
            taken += 1;
        }
        Ok(taken)
    }
}
