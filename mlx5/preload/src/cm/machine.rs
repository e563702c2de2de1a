//! The states of an id and their transitions, as in InfiniBand's communication management.

use crate::options::errno::Errno;

/// The kernel's number of an event (`enum rdma_cm_event_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    AddressResolved = 0,
    AddressError = 1,
    RouteResolved = 2,
    ConnectRequest = 4,
    ConnectResponse = 5,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    DeviceRemoval = 11,
    TimewaitExit = 15,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u32)]
pub(crate) enum Kind {
    Request = 1,
    Reply,
    ReadyToUse,
    Reject,
    DisconnectRequest,
    DisconnectReply,
}

/// An action of the program on an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Bind,
    Listen,
    ResolveAddress,
    ResolveRoute,
    Connect,
    Accept,
    Reject,
    Disconnect,
}

/// An input from the peer: a message, the peer's end, or the lack of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// A message, with the reason of a [`Reject`](Kind::Reject).
    Message(Kind, i32),
    /// The end of the peer's id, or of the peer's process.
    End,
    /// The time of [`Machine::waits`] is over.
    Silence,
}

/// Reasons of rejections (`enum ib_cm_rej_reason`), and for datagrams (`enum ib_cm_sidr_status`).
pub(crate) mod reason {
    use crate::options::errno::Errno;

    pub(crate) const TIMEOUT: i32 = 4;
    pub(crate) const INVALID_SERVICE_ID: i32 = 8;
    pub(crate) const CONSUMER_DEFINED: i32 = 28;
    pub(crate) const DATAGRAM_UNSUPPORTED: i32 = 1;
    pub(crate) const DATAGRAM_REJECTED: i32 = 2;

    /// Returns the reason of a rejection for which no program gave a reason, for example because
    /// the peer has ended.
    pub(crate) fn by_program(is_datagram: bool) -> i32 {
        if is_datagram {
            DATAGRAM_REJECTED
        } else {
            CONSUMER_DEFINED
        }
    }

    /// Returns the reason of a rejection after a failed attempt to reach a service: too many
    /// requests wait for the service (`EAGAIN`), or the service does not exist.
    pub(crate) fn of(errno: Errno, is_datagram: bool) -> i32 {
        match (errno, is_datagram) {
            (Errno(libc::EAGAIN), _) => by_program(is_datagram),
            (_, false) => INVALID_SERVICE_ID,
            (_, true) => DATAGRAM_UNSUPPORTED,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    New,
    Bound,
    Listening,
    AddressResolved,
    RouteResolved,
    /// The request was sent.
    Requesting,
    /// A listener made the id, which waits for the peer's request.
    Arriving,
    /// The peer's request has arrived.
    Requested,
    /// The reply was sent.
    Replied,
    /// The peer's reply has arrived.
    Answered,
    Established,
    /// The request to disconnect was sent.
    Disconnecting,
    /// The peer's request to disconnect has arrived.
    Disconnected,
    /// The connection has ended; packets of it may still be on the way.
    TimeWait,
    Ended,
}

#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) state: State,
    /// Whether the id is for datagrams (`RDMA_PS_UDP`): the messages only exchange the numbers of
    /// queue pairs, and make no connection.
    pub(crate) is_datagram: bool,
}

impl Machine {
    /// Carries out the program's step. Returns the message for the peer.
    ///
    /// # Errors
    /// `EINVAL`: the state does not allow the step.
    pub(crate) fn take(&mut self, step: Step) -> Result<Option<Kind>, Errno> {
        use State::*;
        let (next, message) = match (step, self.state) {
            (Step::Bind, New) => (Bound, None),
            (Step::Listen, New | Bound) => (Listening, None),
            (Step::ResolveAddress, New | Bound) => (AddressResolved, None),
            (Step::ResolveRoute, AddressResolved) => (RouteResolved, None),
            (Step::Connect, RouteResolved) => (Requesting, Some(Kind::Request)),
            (Step::Accept, Requested) => (
                if self.is_datagram { Ended } else { Replied },
                Some(Kind::Reply),
            ),
            (Step::Accept, Answered) => (Established, Some(Kind::ReadyToUse)),
            (Step::Reject, Requested | Answered) => (Ended, Some(Kind::Reject)),
            (Step::Disconnect, Established) => (Disconnecting, Some(Kind::DisconnectRequest)),
            (Step::Disconnect, Disconnected) => (TimeWait, Some(Kind::DisconnectReply)),
            // Both ends may disconnect, in any order, so an early or late disconnect has no effect.
            (
                Step::Disconnect,
                Requesting | Replied | Answered | Disconnecting | TimeWait | Ended,
            ) => (self.state, None),
            _ => return Err(Errno(libc::EINVAL)),
        };
        self.state = next;
        Ok(message)
    }

    /// Returns whether this end waits for a time to pass: until the peer has to have answered a
    /// message, or until the packets of a connection that has ended are gone.
    pub(crate) fn waits(&self) -> bool {
        matches!(
            self.state,
            State::Requesting | State::Replied | State::Disconnecting | State::TimeWait
        )
    }

    /// Takes an input from the peer. Returns the event for the program, and its status.
    pub(crate) fn hear(&mut self, heard: Heard) -> Option<(Event, i32)> {
        use Heard::{End, Message, Silence};
        use State::*;
        let rejected = if self.is_datagram {
            Event::Unreachable
        } else {
            Event::Rejected
        };
        let (next, event) = match (self.state, heard) {
            (Arriving, Message(Kind::Request, _)) => (Requested, Some((Event::ConnectRequest, 0))),
            (Requesting, Message(Kind::Reply, _)) if self.is_datagram => {
                (Ended, Some((Event::Established, 0)))
            }
            (Requesting, Message(Kind::Reply, _)) => (Answered, Some((Event::ConnectResponse, 0))),
            (Requesting | Replied | Answered, Message(Kind::Reject, reason)) => {
                (Ended, Some((rejected, reason)))
            }
            (Replied, Message(Kind::ReadyToUse, _)) => (Established, Some((Event::Established, 0))),
            (Established, Message(Kind::DisconnectRequest, _)) => {
                (Disconnected, Some((Event::Disconnected, 0)))
            }
            (Requesting | Replied, Silence) => {
                (Ended, Some((Event::Unreachable, -libc::ETIMEDOUT)))
            }
            (Disconnecting, Silence) => (TimeWait, Some((Event::Disconnected, -libc::ETIMEDOUT))),
            (TimeWait, Silence) => (Ended, Some((Event::TimewaitExit, 0))),
            (TimeWait, _) => (TimeWait, None),
            // The program may still answer the request, although a datagram peer has ended.
            (Requested, End) if self.is_datagram => (Requested, None),
            // Every other input ends the connection: the answer to a request to disconnect, or a peer that
            // breaks the rules, ends, or disconnects at the same time.
            (Established | Disconnecting, _) => (TimeWait, Some((Event::Disconnected, 0))),
            (Requesting | Replied | Answered, _) => (
                Ended,
                Some((rejected, reason::by_program(self.is_datagram))),
            ),
            (Requested, _) => (Ended, Some((rejected, reason::TIMEOUT))),
            _ => (Ended, None),
        };
        self.state = next;
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE: Option<(Event, i32)> = Some((Event::Rejected, reason::CONSUMER_DEFINED));

    fn machine(state: State) -> Machine {
        Machine {
            state,
            is_datagram: false,
        }
    }

    /// Passes a step's message on, and returns the event at the other end.
    fn pass(from: &mut Machine, step: Step, to: &mut Machine) -> Option<(Event, i32)> {
        let kind = from.take(step).unwrap().unwrap();
        to.hear(Heard::Message(kind, 5))
    }

    fn requested() -> (Machine, Machine) {
        let (mut active, mut passive) = (machine(State::New), machine(State::Arriving));
        assert_eq!(
            [Step::Bind, Step::ResolveAddress, Step::ResolveRoute].map(|step| active.take(step)),
            [Ok(None); 3]
        );
        assert_eq!(
            pass(&mut active, Step::Connect, &mut passive),
            Some((Event::ConnectRequest, 0))
        );
        (active, passive)
    }

    fn established() -> (Machine, Machine) {
        let (mut active, mut passive) = requested();
        assert_eq!(
            pass(&mut passive, Step::Accept, &mut active),
            Some((Event::ConnectResponse, 0))
        );
        assert_eq!(
            pass(&mut active, Step::Accept, &mut passive),
            Some((Event::Established, 0))
        );
        (active, passive)
    }

    #[test]
    fn a_connection_is_made_and_ended_by_either_end() {
        for is_active_first in [true, false] {
            let (active, passive) = established();
            let (mut first, mut second) = if is_active_first {
                (active, passive)
            } else {
                (passive, active)
            };
            assert_eq!(
                pass(&mut first, Step::Disconnect, &mut second),
                Some((Event::Disconnected, 0))
            );
            assert_eq!(
                pass(&mut second, Step::Disconnect, &mut first),
                Some((Event::Disconnected, 0))
            );
            assert_eq!(
                (first.take(Step::Disconnect), second.hear(Heard::End)),
                (Ok(None), None)
            );
            for end in [&mut first, &mut second] {
                assert!(end.waits());
                assert_eq!(end.hear(Heard::Silence), Some((Event::TimewaitExit, 0)));
                assert_eq!((end.state, end.waits()), (State::Ended, false));
            }
        }
    }

    #[test]
    fn both_ends_may_disconnect_at_once() {
        let (mut active, mut passive) = established();
        let [one, other] =
            [&mut active, &mut passive].map(|end| end.take(Step::Disconnect).unwrap().unwrap());
        for (end, kind) in [(active, other), (passive, one)] {
            let mut end = end;
            assert_eq!(
                end.hear(Heard::Message(kind, 0)),
                Some((Event::Disconnected, 0))
            );
            assert_eq!(end.hear(Heard::End), None);
        }
    }

    #[test]
    fn either_end_may_reject_and_a_reason_arrives() {
        let (mut active, mut passive) = requested();
        assert_eq!(
            pass(&mut passive, Step::Reject, &mut active),
            Some((Event::Rejected, 5))
        );
        assert_eq!(passive.take(Step::Accept), Err(Errno(libc::EINVAL)));

        let (mut active, mut passive) = requested();
        pass(&mut passive, Step::Accept, &mut active);
        assert_eq!(
            pass(&mut active, Step::Reject, &mut passive),
            Some((Event::Rejected, 5))
        );
    }

    #[test]
    fn a_peer_that_dies_is_an_event_in_every_state_that_waits_for_it() {
        let (mut active, mut passive) = requested();
        assert_eq!(
            passive.hear(Heard::End),
            Some((Event::Rejected, reason::TIMEOUT))
        );
        assert_eq!(active.hear(Heard::End), GONE);

        let (mut active, mut passive) = requested();
        pass(&mut passive, Step::Accept, &mut active);
        assert_eq!(
            (active.hear(Heard::End), passive.hear(Heard::End)),
            (GONE, GONE)
        );

        let (mut active, mut passive) = established();
        assert_eq!(active.hear(Heard::End), Some((Event::Disconnected, 0)));
        passive.take(Step::Disconnect).unwrap();
        assert_eq!(passive.hear(Heard::End), Some((Event::Disconnected, 0)));
        assert_eq!(passive.hear(Heard::End), None, "once");
    }

    #[test]
    fn each_message_that_must_be_answered_has_an_event_if_it_is_not() {
        let unreachable = Some((Event::Unreachable, -libc::ETIMEDOUT));
        for (state, event, next) in [
            (State::Requesting, unreachable, State::Ended),
            (State::Replied, unreachable, State::Ended),
            (
                State::Disconnecting,
                Some((Event::Disconnected, -libc::ETIMEDOUT)),
                State::TimeWait,
            ),
        ] {
            let mut end = machine(state);
            assert!(end.waits());
            assert_eq!((end.hear(Heard::Silence), end.state), (event, next));
        }
    }

    #[test]
    fn datagrams_need_one_exchange() {
        let [mut active, mut passive] =
            [State::RouteResolved, State::Arriving].map(|state| Machine {
                state,
                is_datagram: true,
            });
        assert_eq!(
            pass(&mut active, Step::Connect, &mut passive),
            Some((Event::ConnectRequest, 0))
        );
        assert_eq!(
            pass(&mut passive, Step::Accept, &mut active),
            Some((Event::Established, 0))
        );
        assert_eq!(
            (active.hear(Heard::End), passive.hear(Heard::End)),
            (None, None)
        );

        let mut active = Machine {
            state: State::Requesting,
            is_datagram: true,
        };
        assert_eq!(
            active.hear(Heard::End),
            Some((Event::Unreachable, reason::DATAGRAM_REJECTED))
        );
    }

    /// A peer may send any message at any time. An unexpected message counts as the end of the
    /// peer.
    #[test]
    fn nonsense_of_a_peer_ends_the_connection() {
        for number in 1..=6 {
            let kind = Kind::from_repr(number).unwrap();
            let mut end = machine(State::Arriving);
            assert_eq!(
                end.hear(Heard::Message(kind, 0)).is_some(),
                kind == Kind::Request
            );
            let (mut active, _) = established();
            assert_eq!(
                active.hear(Heard::Message(kind, 0)),
                Some((Event::Disconnected, 0))
            );
        }
        assert_eq!((Kind::from_repr(0), Kind::from_repr(7)), (None, None));
    }

    #[test]
    fn steps_out_of_order_are_refused() {
        use Step::*;
        for (state, legal) in [
            (State::New, &[Bind, Listen, ResolveAddress][..]),
            (State::Bound, &[Listen, ResolveAddress]),
            (State::Listening, &[]),
            (State::AddressResolved, &[ResolveRoute]),
            (State::RouteResolved, &[Connect]),
            (State::Requesting, &[Disconnect]),
            (State::Arriving, &[]),
            (State::Requested, &[Accept, Reject]),
            (State::Ended, &[Disconnect]),
        ] {
            for step in [
                Bind,
                Listen,
                ResolveAddress,
                ResolveRoute,
                Connect,
                Accept,
                Reject,
                Disconnect,
            ] {
                assert_eq!(
                    machine(state).take(step).is_ok(),
                    legal.contains(&step),
                    "{step:?} in {state:?}"
                );
            }
        }
    }
}
