//! Pairs of bounded queues within a process: crossbeam's `ArrayQueue` and channels,
//! crossfire's and kanal's channels, rtrb's rings.

use std::sync::Arc;

use benchkv_harness::Failure;
use benchkv_harness::load::{Answerer, Caller, Payload};
use crossbeam_queue::ArrayQueue;
use crossfire::spsc;
use rtrb::RingBuffer;

/// The slot of a call, and the request or reply.
type Message = (u32, Payload);

/// The end of a queue that takes a message if there is room.
pub(crate) trait Sends: FnMut(Message) -> bool + Send {}
impl<F: FnMut(Message) -> bool + Send> Sends for F {}

/// The end of a queue that returns the next message, if there is one.
pub(crate) trait Receives: FnMut() -> Option<Message> + Send {}
impl<F: FnMut() -> Option<Message> + Send> Receives for F {}

/// The two queue ends of one side: the end that sends if there is room, and the end that receives.
pub(crate) struct Ends<S, R>(S, R);

/// Makes both sides of a pair of queues; `queue` makes one queue.
pub(crate) fn pair<S, R>(queue: impl Fn() -> (S, R)) -> (Ends<S, R>, Ends<S, R>) {
    let ((to, requests), (replies, from)) = (queue(), queue());
    (Ends(to, from), Ends(replies, requests))
}

pub(crate) fn array_queue(depth: usize) -> (impl Sends, impl Receives) {
    let queue = Arc::new(ArrayQueue::new(depth));
    let to = Arc::clone(&queue);
    (move |message| to.push(message).is_ok(), move || queue.pop())
}

pub(crate) fn channel(depth: usize) -> (impl Sends, impl Receives) {
    let (to, from) = crossbeam_channel::bounded(depth);
    (
        move |message| to.try_send(message).is_ok(),
        move || from.try_recv().ok(),
    )
}

pub(crate) fn crossfire(depth: usize) -> (impl Sends, impl Receives) {
    let (to, from) = spsc::bounded_blocking(depth);
    (
        move |message| to.try_send(message).is_ok(),
        move || from.try_recv().ok(),
    )
}

pub(crate) fn kanal(depth: usize) -> (impl Sends, impl Receives) {
    let (to, from) = kanal::bounded(depth);
    (
        move |message| to.try_send(message).is_ok_and(|sent| sent),
        move || from.try_recv().ok().flatten(),
    )
}

pub(crate) fn ring(depth: usize) -> (impl Sends, impl Receives) {
    let (mut to, mut from) = RingBuffer::new(depth);
    (
        move |message| to.push(message).is_ok(),
        move || from.pop().ok(),
    )
}

impl<S: Sends, R: Receives> Answerer for Ends<S, R> {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let mut answered = 0;
        while let Some((slot, request)) = (self.1)() {
            if !(self.0)((slot, f(&request))) {
                return Err("the queue of replies is full, or the caller is gone".into());
            }
            answered += 1;
        }
        Ok(answered)
    }
}

impl<S: Sends, R: Receives> Caller for Ends<S, R> {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        Ok((self.0)((slot, request)))
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let mut taken = 0;
        while let Some((slot, reply)) = (self.1)() {
            f(slot, reply);
            taken += 1;
        }
        Ok(taken)
    }
}
