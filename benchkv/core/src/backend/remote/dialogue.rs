//! The state of a link that sends each message separately: calls of this end that wait for answers,
//! and requests of the peer that this end has not answered. Each end keeps room for `window`
//! requests and `window` answers of the other end, so at most `window` calls and `window` requests
//! wait.

use super::calls::Calls;
use super::frame::{Content, Frame, FrameBytes};
use crate::message::{Request, Response};

/// The state of one link. `C` is the caller to answer.
pub(super) struct Dialogue<C> {
    calls: Calls<C>,
    window: usize,
    /// Number of requests of the peer that are not answered.
    unanswered: usize,
    tail_bytes: usize,
}

/// A message that has arrived from the peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrival<C> {
    /// The answer to a call; `None` if it was refused.
    Answer(C, Option<Response>),
    /// A request, and the id that its answer returns.
    Request(Request, u32),
}

impl<C> Dialogue<C> {
    /// Makes a dialogue without calls, for at most `window` calls at a time, and for values with
    /// tails of `tail_bytes` bytes.
    pub(super) fn new(window: usize, tail_bytes: usize) -> Self {
        Self {
            calls: Calls::new(window),
            window,
            unanswered: 0,
            tail_bytes,
        }
    }

    /// Returns the number of calls that the peer has not answered.
    pub(super) fn missing(&self) -> usize {
        self.calls.len()
    }

    /// Makes the message of a call. Returns it with the call's id.
    ///
    /// # Errors
    /// A whole window of calls waits already. The error contains `whom`.
    #[inline]
    pub(super) fn call(&mut self, request: &Request, whom: C) -> Result<(u32, FrameBytes), C> {
        let call = self.calls.insert(whom)?;
        let content = Content::Request(*request);
        Ok((call, Frame { call, content }.encode()))
    }

    /// Removes a call whose message was not sent. Returns its caller.
    pub(super) fn take_back(&mut self, call: u32) -> Option<C> {
        self.calls.take(call)
    }

    /// Makes the message that answers the request with this id, or refuses it if there is no
    /// response.
    #[inline]
    pub(super) fn answer(&mut self, call: u32, response: Option<Response>) -> FrameBytes {
        self.unanswered = self.unanswered.saturating_sub(1);
        let content = response.map_or(Content::Refusal, Content::Response);
        Frame { call, content }.encode()
    }

    /// Decodes a message of the peer. Returns it with the tail that follows.
    ///
    /// # Errors
    /// The message breaks the protocol. No further message of the peer can be trusted.
    #[inline]
    pub(super) fn arrive<'a>(&mut self, bytes: &'a [u8]) -> Result<(Arrival<C>, &'a [u8]), String> {
        let (Frame { call, content }, tail) = Frame::decode(bytes, self.tail_bytes)
            .ok_or_else(|| format!("it sent {} bytes that are not a message", bytes.len()))?;
        let response = match content {
            Content::Request(_) if self.unanswered == self.window => {
                return Err(format!(
                    "it sent more than the {} requests that it may have unanswered",
                    self.window
                ));
            }
            Content::Request(request) => {
                self.unanswered += 1;
                return Ok((Arrival::Request(request, call), tail));
            }
            Content::Response(response) => Some(response),
            Content::Refusal => None,
        };
        let whom = self.calls.take(call).ok_or_else(|| {
            format!("it answered call {call:#x}, which does not wait for an answer")
        })?;
        Ok((Arrival::Answer(whom, response), tail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Outcome;

    const REQUEST: Request = Request::get(1, 2);

    fn request(call: u32) -> FrameBytes {
        Frame {
            call,
            content: Content::Request(REQUEST),
        }
        .encode()
    }

    #[test]
    fn a_call_is_answered_or_refused_and_its_room_is_free_again() {
        let (mut asking, mut answering) = (Dialogue::new(1, 0), Dialogue::<()>::new(1, 0));
        for (whom, response) in [(7, Some(Response::new(Outcome::PutOk))), (8, None)] {
            let (_, message) = asking.call(&REQUEST, whom).unwrap();
            assert!(asking.missing() > 0 && asking.call(&REQUEST, 9).is_err());
            let Ok((Arrival::Request(REQUEST, call), [])) = answering.arrive(message.as_bytes())
            else {
                panic!("no request")
            };
            let answer = answering.answer(call, response);
            assert_eq!(
                asking.arrive(answer.as_bytes()),
                Ok((Arrival::Answer(whom, response), &[][..]))
            );
            assert_eq!(asking.missing(), 0);
        }
    }

    #[test]
    fn what_no_sound_peer_sends_is_a_violation() {
        let mut link = Dialogue::new(2, 0);
        let (call, _) = link.call(&REQUEST, ()).unwrap();
        let violation = |arrived: Result<(Arrival<()>, &[u8]), String>| arrived.unwrap_err();
        assert_eq!(
            violation(link.arrive(&[1; 9])),
            "it sent 9 bytes that are not a message"
        );
        let answer = Dialogue::<()>::new(1, 0).answer(call + 1, None);
        assert_eq!(
            violation(link.arrive(answer.as_bytes())),
            format!(
                "it answered call {:#x}, which does not wait for an answer",
                call + 1
            )
        );
        for call in [5, 6] {
            assert_eq!(
                link.arrive(request(call).as_bytes()),
                Ok((Arrival::Request(REQUEST, call), &[][..]))
            );
        }
        assert_eq!(
            violation(link.arrive(request(7).as_bytes())),
            "it sent more than the 2 requests that it may have unanswered"
        );
        link.answer(6, None);
        assert!(
            link.arrive(request(7).as_bytes()).is_ok(),
            "one is answered"
        );
    }
}
