//! A pair of crossbeam's bounded channels, never blocking.

use crossbeam_channel::{Receiver, Sender, TryRecvError, TrySendError, bounded};

use bench::load::{Answerer, Caller, Failure, Payload};

type Message = (u32, Payload);

/// The caller's ends.
pub(crate) struct ChannelCaller(Sender<Message>, Receiver<Message>);
/// The answerer's ends.
pub(crate) struct ChannelAnswerer(Receiver<Message>, Sender<Message>);

pub(crate) fn pair(depth: usize) -> (ChannelCaller, ChannelAnswerer) {
    let ((to, requests), (replies, from)) = (bounded(depth), bounded(depth));
    (ChannelCaller(to, from), ChannelAnswerer(requests, replies))
}

impl Answerer for ChannelAnswerer {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let mut answered = 0;
        loop {
            match self.0.try_recv() {
                Ok((slot, request)) => self
                    .1
                    .try_send((slot, f(&request)))
                    .map_err(|_| "the channel of replies is full")?,
                Err(TryRecvError::Empty) => return Ok(answered),
                Err(TryRecvError::Disconnected) => return Err("the caller is gone".into()),
            }
            answered += 1;
        }
    }
}

impl Caller for ChannelCaller {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        match self.0.try_send((slot, request)) {
            Ok(()) => Ok(true),
            Err(TrySendError::Full(_)) => Ok(false),
            Err(TrySendError::Disconnected(_)) => Err("the answerer is gone".into()),
        }
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let mut taken = 0;
        loop {
            match self.1.try_recv() {
                Ok((slot, reply)) => f(slot, reply),
                Err(TryRecvError::Empty) => return Ok(taken),
                Err(TryRecvError::Disconnected) => return Err("the answerer is gone".into()),
            }
            taken += 1;
        }
    }
}
