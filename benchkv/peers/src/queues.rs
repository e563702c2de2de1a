//! Pairs of bounded queues within a process: crossbeam's `ArrayQueue` and channels, rtrb's rings.

use std::sync::Arc;

use benchkv_harness::Failure;
use benchkv_harness::load::{Answerer, Caller, Payload};
use crossbeam_channel::{Receiver, Sender, bounded};
use crossbeam_queue::ArrayQueue;
use rtrb::{Consumer, Producer, RingBuffer};

/// A slot and its request or reply.
type Message = (u32, Payload);

/// The sending end of a queue.
pub(crate) trait Push {
    /// Sends a message, if there is room.
    fn push(&mut self, message: Message) -> bool;
}

/// The receiving end of a queue.
pub(crate) trait Pop {
    fn pop(&mut self) -> Option<Message>;
}

impl Push for Arc<ArrayQueue<Message>> {
    #[inline]
    fn push(&mut self, message: Message) -> bool {
        ArrayQueue::push(self, message).is_ok()
    }
}

impl Pop for Arc<ArrayQueue<Message>> {
    #[inline]
    fn pop(&mut self) -> Option<Message> {
        ArrayQueue::pop(self)
    }
}

impl Push for Sender<Message> {
    #[inline]
    fn push(&mut self, message: Message) -> bool {
        self.try_send(message).is_ok()
    }
}

impl Pop for Receiver<Message> {
    #[inline]
    fn pop(&mut self) -> Option<Message> {
        self.try_recv().ok()
    }
}

impl Push for Producer<Message> {
    #[inline]
    fn push(&mut self, message: Message) -> bool {
        Self::push(self, message).is_ok()
    }
}

impl Pop for Consumer<Message> {
    #[inline]
    fn pop(&mut self) -> Option<Message> {
        Self::pop(self).ok()
    }
}

/// The ends of one side: a queue to the other side, and one from there.
pub(crate) struct Ends<S, R>(S, R);

/// Makes both sides of a pair of queues, which `queue` makes.
pub(crate) fn pair<S, R>(queue: impl Fn() -> (S, R)) -> (Ends<S, R>, Ends<S, R>) {
    let ((to, requests), (replies, from)) = (queue(), queue());
    (Ends(to, from), Ends(replies, requests))
}

pub(crate) fn array_queue(depth: usize) -> (Arc<ArrayQueue<Message>>, Arc<ArrayQueue<Message>>) {
    let queue = Arc::new(ArrayQueue::new(depth));
    (Arc::clone(&queue), queue)
}

pub(crate) fn channel(depth: usize) -> (Sender<Message>, Receiver<Message>) {
    bounded(depth)
}

pub(crate) fn ring(depth: usize) -> (Producer<Message>, Consumer<Message>) {
    RingBuffer::new(depth)
}

impl<S: Push, R: Pop> Answerer for Ends<S, R> {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let mut answered = 0;
        while let Some((slot, request)) = self.1.pop() {
            if !self.0.push((slot, f(&request))) {
                return Err("the queue of replies is full, or the caller is gone".into());
            }
            answered += 1;
        }
        Ok(answered)
    }
}

impl<S: Push, R: Pop> Caller for Ends<S, R> {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        Ok(self.0.push((slot, request)))
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let mut taken = 0;
        while let Some((slot, reply)) = self.1.pop() {
            f(slot, reply);
            taken += 1;
        }
        Ok(taken)
    }
}
