//! The errors of calls: of sessions, of calls that were made, and of calls that were not; and the error
//! of an option.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;

use crate::tag::{REFUSED, SENT_BACK, TOO_LONG};

/// The error of a call that has ended without its reply. The results of its two functions decide
/// about a repetition, and mean the same for every RPC of this workspace; they are never both
/// `true`.
///
/// | [`is_retryable`](Self::is_retryable) | [`may_have_executed`](Self::may_have_executed) | |
/// |---|---|---|
/// | `true` | `false` | make the call again: no handler got it |
/// | `false` | `true` | repeat the call only if the server may execute it twice |
/// | `false` | `false` | no handler got it, and the same call fails again |
pub trait Ending: std::error::Error {
    /// Returns whether the same call can succeed later: no handler got, or will get, the request. A
    /// client that connects again by itself does so at the next call; with any other client,
    /// connect again if the session has ended.
    fn is_retryable(&self) -> bool;

    /// Returns whether a handler may have got the request, or may still get it.
    fn may_have_executed(&self) -> bool;
}

/// The end of a session. Permanent: connect anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SessionEnd {
    /// The other end, a server or a node, ended or died.
    #[error("the other end is gone: connect again when it is back")]
    PeerGone,
    /// The server ended this client's session. The client broke the protocol; or another part of
    /// its process opened and closed the region's file, and so dropped the lock that proves the
    /// client alive.
    #[error("the server ended this client's session: connect again")]
    Evicted,
}

/// The reason why a client has no connection. It decides whether the calls that wait for a
/// connection can be repeated.
pub trait ConnectFailure: std::error::Error {
    /// Returns whether a later attempt may succeed without a change of either end.
    fn may_pass(&self) -> bool;

    /// Returns a copy of the error, for a further call that waited for the connection. For an error
    /// that cannot be copied, the copy has only its text.
    #[must_use]
    fn again(&self) -> Self;
}

/// The error of a client that is always connected: no value of it exists.
impl ConnectFailure for Infallible {
    fn may_pass(&self) -> bool {
        match *self {}
    }

    fn again(&self) -> Self {
        *self
    }
}

/// The reason why a connection ended.
pub trait EndReason: std::error::Error + Copy {
    /// The reason of a connection that its client closed.
    const CLOSED_HERE: Self;
}

impl EndReason for SessionEnd {
    const CLOSED_HERE: Self = Self::PeerGone;
}

/// The reason why a call of a client has no reply. `C` is the reason why a client has no
/// connection, `R` the reason why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError<C, R> {
    /// The client and the server could not be connected.
    #[error(transparent)]
    Connect(C),
    /// The request is longer than the server accepts. It was not sent.
    #[error(
        "request of {len} bytes, the limit is {max}: send it in parts, or give the server more room"
    )]
    TooLarge {
        /// Length of the request in bytes.
        len: usize,
        /// Maximum length of a request in bytes.
        max: usize,
    },
    /// No handler got, or will get, the request: the call's time ended while it waited for room or
    /// for a server, or the server was closing.
    #[error(
        "not sent: its time ended without room at a server, or the server stopped; make the call again"
    )]
    NotSent,
    /// Another call of this client is unanswered, or all slots are taken by cancelled calls that
    /// the server has not answered yet. Poll first in the first case, call again later in the
    /// second.
    #[error("this client has unanswered calls: poll for replies, then call again")]
    Full,
    /// The call was not sent: calls whose time ended or that were dropped keep the room that this
    /// call needs, until the server answers them. No handler got, or will get, the request. The
    /// next call makes a new connection, on which all of the room is free.
    #[error(
        "not sent: {given_up} calls that were given up keep the room until the server answers them; the next call connects again \
         (smaller replies let more calls wait at a server: max_reply of copyrpc's ClientOptions)"
    )]
    NoCredit {
        /// Number of calls that were given up.
        given_up: usize,
    },
    /// The request was sent, and no reply arrived in time. It is not known whether the handler ran,
    /// or will run.
    #[error("no reply in time")]
    TimedOut,
    /// The handler refused the request.
    #[error("the server refused the request")]
    Refused,
    /// The server has no handler of this type, or the network of flux has no such node.
    #[error("there is no handler of this type, or no such node")]
    UnknownType,
    /// The handler ran, and its reply is longer than this client takes.
    #[error(
        "the handler ran, but its reply{} is too long for this client (max_reply of copyrpc's ClientOptions, slot_bytes of \
         scalerpc's ServerConfig, message_bytes of ipc's ServerOptions): fetch it in parts, or give it more room",
        of_bytes(*.len)
    )]
    ReplyTooLong {
        /// Length of the reply in bytes, if the server reports it.
        len: Option<usize>,
    },
    /// The handler dropped the request, or the server ended while the handler had it.
    #[error("the server dropped the request")]
    Dropped,
    /// The connection ended before a reply arrived. It is not known whether the handler ran. The
    /// next call connects again.
    #[error("no reply: {0}")]
    Closed(R),
}

/// The reason why a call that a connection has taken ended without a reply: a [`ClientError`] of a
/// client that polls, and so is connected. It is never `Connect`, `TooLarge`, `Full` or `NoCredit`.
pub type CallFailure<R = SessionEnd> = ClientError<Infallible, R>;

fn of_bytes(len: Option<usize>) -> String {
    len.map_or_else(String::new, |len| format!(" of {len} bytes"))
}

impl<C: ConnectFailure, R: EndReason> ClientError<C, R> {
    /// Returns whether the same call can succeed later: no handler got, or will get, the request.
    /// See [`Ending::is_retryable`].
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Connect(error) => error.may_pass(),
            error => matches!(error, Self::NotSent | Self::Full | Self::NoCredit { .. }),
        }
    }

    /// Returns whether a handler may have got the request, or may still get it: see
    /// [`Ending::may_have_executed`].
    #[must_use]
    pub const fn may_have_executed(&self) -> bool {
        use ClientError::{Closed, Dropped, Refused, ReplyTooLong, TimedOut};
        matches!(
            self,
            TimedOut | Refused | ReplyTooLong { .. } | Dropped | Closed(_)
        )
    }

    pub(crate) fn again(&self) -> Self {
        match self {
            Self::Connect(error) => Self::Connect(error.again()),
            _ => Self::NotSent,
        }
    }
}

impl<C: ConnectFailure + 'static, R: EndReason + 'static> Ending for ClientError<C, R> {
    fn is_retryable(&self) -> bool {
        self.is_retryable()
    }

    fn may_have_executed(&self) -> bool {
        self.may_have_executed()
    }
}

impl<C, R> ClientError<C, R> {
    /// Returns the end of a call whose answer has this note ([`Tag::pack`](crate::Tag::pack)),
    /// which is not [`ANSWERED`](crate::ANSWERED).
    #[must_use]
    pub const fn of_note(note: u8) -> Self {
        match note {
            REFUSED => Self::Refused,
            TOO_LONG => Self::ReplyTooLong { len: None },
            SENT_BACK => Self::NotSent,
            _ => Self::Dropped,
        }
    }
}

impl<R> CallFailure<R> {
    /// Returns the failure as the error of a client that connects by itself.
    // A function of its own would make the hot path of a client build its result in memory.
    #[must_use]
    #[inline(always)]
    pub fn of_client<C>(self) -> ClientError<C, R> {
        match self {
            Self::Connect(never) => match never {},
            Self::TooLarge { len, max } => ClientError::TooLarge { len, max },
            Self::NotSent => ClientError::NotSent,
            Self::Full => ClientError::Full,
            Self::NoCredit { given_up } => ClientError::NoCredit { given_up },
            Self::TimedOut => ClientError::TimedOut,
            Self::Refused => ClientError::Refused,
            Self::UnknownType => ClientError::UnknownType,
            Self::ReplyTooLong { len } => ClientError::ReplyTooLong { len },
            Self::Dropped => ClientError::Dropped,
            Self::Closed(reason) => ClientError::Closed(reason),
        }
    }
}

/// The reason why a call was not made. Nothing was sent; the request and the user data are
/// returned.
#[derive(thiserror::Error)]
pub enum CallError<Req, U> {
    /// All slots hold unanswered calls. Retryable: poll first.
    #[error("all {depth} calls that fit are unanswered: poll for replies, then try again")]
    Full {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// Maximum number of unanswered calls.
        depth: usize,
    },
    /// The request is longer than the other end accepts. Permanent.
    #[error("a request of {bytes} bytes: at most {max} are possible")]
    TooLarge {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// Length of the request.
        bytes: usize,
        /// Maximum length.
        max: usize,
    },
    /// Node `to` does not exist, or is the calling node, which cannot call itself. Only flux
    /// returns this. Permanent.
    #[error(
        "node {to} cannot be called: there are nodes 0 to {last}, and a node does not call itself"
    )]
    NoSuchNode {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// The node called.
        to: usize,
        /// The number of the last node.
        last: usize,
    },
    /// The session is over, or the other node was dropped. Permanent. Earlier calls still end in
    /// `poll`: poll until `poll` returns this end, too.
    #[error("{reason}")]
    #[doc(alias = "ServerDisconnected")]
    Closed {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// The end of the session.
        reason: SessionEnd,
    },
}

impl<C: ConnectFailure, R> From<C> for ClientError<C, R> {
    fn from(error: C) -> Self {
        Self::Connect(error)
    }
}

impl<Req, U, C> From<CallError<Req, U>> for ClientError<C, SessionEnd> {
    fn from(error: CallError<Req, U>) -> Self {
        match error {
            CallError::Full { .. } => Self::Full,
            CallError::TooLarge { bytes, max, .. } => Self::TooLarge { len: bytes, max },
            CallError::NoSuchNode { .. } => Self::UnknownType,
            CallError::Closed { .. } => Self::NotSent,
        }
    }
}

impl<Req, U> CallError<Req, U> {
    /// Returns whether the same call can succeed in this session, after more polls.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Returns `false`: the call was not made. See [`Ending::may_have_executed`].
    #[must_use]
    pub const fn may_have_executed(&self) -> bool {
        false
    }
}

// By hand, so that payloads and user data need not be printable.
impl<Req, U> fmt::Debug for CallError<Req, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CallError({self})")
    }
}

/// An option, or another number that the user of a crate chose, is outside its range. The same
/// choice is refused again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} is {value}: legal is {legal}")]
pub struct OptionError {
    /// Name of the option.
    pub option: &'static str,
    /// Value of the option.
    pub value: u64,
    /// Legal range, and what else to change.
    pub legal: Cow<'static, str>,
}

impl OptionError {
    /// Makes the error of an option.
    #[must_use]
    pub fn new(option: &'static str, value: u64, legal: impl Into<Cow<'static, str>>) -> Self {
        Self {
            option,
            value,
            legal: legal.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Asked = ClientError<Infallible, SessionEnd>;

    /// Checks every variant with the results of both functions.
    #[test]
    fn a_call_that_no_handler_got_is_retryable_unless_it_can_never_be_made() {
        let made = (false, true);
        let later = (true, false);
        let never = (false, false);
        assert_eq!(<CallFailure>::TimedOut.to_string(), "no reply in time");
        for end in [SessionEnd::PeerGone, SessionEnd::Evicted] {
            let failures = [
                (CallFailure::of_note(REFUSED), CallFailure::Refused),
                (
                    CallFailure::of_note(TOO_LONG),
                    CallFailure::ReplyTooLong { len: None },
                ),
                (CallFailure::of_note(crate::DROPPED), CallFailure::Dropped),
                (CallFailure::of_note(77), CallFailure::Dropped),
                (CallFailure::TimedOut, CallFailure::TimedOut),
                (CallFailure::Closed(end), CallFailure::Closed(end)),
            ];
            for (failure, expected) in failures {
                assert_eq!(failure, expected);
                assert_eq!(
                    (failure.is_retryable(), failure.may_have_executed()),
                    made,
                    "{failure}"
                );
            }
            let errors: [(CallError<(), ()>, _, _); 4] = [
                (
                    CallError::NoSuchNode {
                        request: (),
                        user_data: (),
                        to: 2,
                        last: 1,
                    },
                    false,
                    never,
                ),
                (
                    CallError::Full {
                        request: (),
                        user_data: (),
                        depth: 1,
                    },
                    true,
                    later,
                ),
                (
                    CallError::TooLarge {
                        request: (),
                        user_data: (),
                        bytes: 2,
                        max: 1,
                    },
                    false,
                    never,
                ),
                (
                    CallError::Closed {
                        request: (),
                        user_data: (),
                        reason: end,
                    },
                    false,
                    later,
                ),
            ];
            for (error, in_this_session, expected) in errors {
                assert_eq!(
                    (error.is_retryable(), error.may_have_executed()),
                    (in_this_session, false),
                    "{error}"
                );
                let asked = Asked::from(error);
                assert_eq!(
                    (asked.is_retryable(), asked.may_have_executed()),
                    expected,
                    "{asked}"
                );
                let ending: &dyn Ending = &asked;
                assert_eq!(
                    (ending.is_retryable(), ending.may_have_executed()),
                    expected,
                    "{ending}"
                );
            }
            for (failed, expected) in [
                (CallFailure::Closed(end), made),
                (CallFailure::NotSent, later),
            ] {
                assert_eq!(
                    (failed.is_retryable(), failed.may_have_executed()),
                    expected,
                    "{failed}"
                );
                let failed = Asked::from(failed);
                assert_eq!(
                    (failed.is_retryable(), failed.may_have_executed()),
                    expected,
                    "{failed}"
                );
            }
        }
    }
}
