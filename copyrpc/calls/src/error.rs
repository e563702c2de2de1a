//! The errors of calls: of sessions, of calls that were made, and of calls that were not.

use std::fmt;

use crate::futures::CallError as CallEnd;
use crate::tag::{REFUSED, TOO_LONG};

/// The error of a call that has ended without its reply. Its two answers decide about a repetition,
/// and mean the same for every RPC of this workspace; never are both `true`.
///
/// | [`is_retryable`](Self::is_retryable) | [`may_have_executed`](Self::may_have_executed) | |
/// |---|---|---|
/// | `true` | `false` | make the call again: no handler got it |
/// | `false` | `true` | repeat it only if the server takes it twice without harm |
/// | `false` | `false` | no handler got it, and the same call fails again |
pub trait Ending: std::error::Error {
    /// Returns whether the same call can succeed later: no handler got the request, and none will.
    /// A client that connects again by itself does so at the next call; with another one, connect
    /// again if the session has ended.
    fn is_retryable(&self) -> bool;

    /// Returns whether a handler may have got the request, or may still get it.
    fn may_have_executed(&self) -> bool;
}

/// Implements [`Ending`] for an error by its own two functions of these names, which need no import
/// of the trait.
#[doc(hidden)]
#[macro_export]
macro_rules! ending {
    ($error:ty) => {
        impl $crate::Ending for $error {
            fn is_retryable(&self) -> bool {
                self.is_retryable()
            }

            fn may_have_executed(&self) -> bool {
                self.may_have_executed()
            }
        }
    };
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

/// The end of a call without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallFailed {
    /// The handler refused the request.
    #[error("the other end refused the request")]
    Refused,
    /// The handler executed the call, and its answer is longer than the lanes carry: it was not
    /// sent.
    #[error("the other end executed the call, but its answer is too long")]
    ReplyTooLong,
    /// The handler dropped the request without an answer, or panicked. It may or may not have
    /// executed the call.
    #[error("the other end dropped the request")]
    Dropped,
    /// No answer arrived before the call's deadline. The other end may execute the request; a later
    /// answer is discarded.
    #[error("no reply in time")]
    TimedOut,
    /// The server ended in good order, and no handler got the request: make the call again at the
    /// next server.
    #[error("the server stopped before it took the request")]
    Stopped,
    /// The session ended before an answer arrived. The other end may have executed the request.
    #[error("connection lost before a reply arrived (the call may have executed): {0}")]
    Disconnected(SessionEnd),
}

impl CallFailed {
    /// Returns the end of a call whose answer has this note, which is not
    /// [`ANSWERED`](crate::ANSWERED).
    #[must_use]
    pub const fn of_note(note: u8) -> Self {
        match note {
            REFUSED => Self::Refused,
            TOO_LONG => Self::ReplyTooLong,
            _ => Self::Dropped,
        }
    }

    /// Returns whether no handler got the call, although it was made. See [`Ending::is_retryable`].
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::Stopped)
    }

    /// Returns whether a handler may have got the call. See [`Ending::may_have_executed`].
    #[must_use]
    pub const fn may_have_executed(&self) -> bool {
        !self.is_retryable()
    }
}

/// Why the server that has the name now does not fit a client of the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// Its types or its tag are others: build both from the same.
    #[error("it has other types or another tag: build both from the same")]
    Types,
    /// Its region has another layout or version: use programs of one build.
    #[error("its region has another version: use programs of one build")]
    Version,
    /// Its directory or its region cannot be used; `connect` returns the reason.
    #[error("its directory or region cannot be used: connect returns the reason")]
    Unusable,
}

/// The error of a blocking call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// Another call of this client is unanswered, or all slots are taken by cancelled calls that
    /// the server has not answered yet. Retryable: poll first in the first case, ask again later in
    /// the second.
    #[error("this client has unanswered calls: poll for replies, then ask again")]
    Full,
    /// The request is longer than the other end accepts. Permanent.
    #[error("the request is longer than the {max} bytes that are possible")]
    TooLarge {
        /// Maximum length.
        max: usize,
    },
    /// The time of the call ended while it waited for a slot or for the next server. Retryable.
    #[error("not sent in time: there was no free slot, or no server")]
    Late,
    /// The session was over before the call was made, and there is no other server of the name.
    /// Retryable: the next call connects again.
    #[error("not sent: {0}")]
    NotSent(SessionEnd),
    /// The session was over before the call was made, and the next server of the name does not fit
    /// this client. Permanent.
    #[error("not sent: the server that has the name now does not fit this client: {0}")]
    Misfit(Misfit),
    /// The call was made, and ended without an answer.
    #[error(transparent)]
    Failed(#[from] CallFailed),
}

impl AskError {
    /// Returns whether the same call can succeed later: see [`Ending::is_retryable`].
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Full | Self::Late | Self::NotSent(_) | Self::Failed(CallFailed::Stopped)
        )
    }

    /// Returns whether a handler may have got the request: see [`Ending::may_have_executed`].
    #[must_use]
    pub const fn may_have_executed(&self) -> bool {
        matches!(self, Self::Failed(failed) if failed.may_have_executed())
    }
}

impl CallEnd for AskError {
    fn not_sent() -> Self {
        Self::Late
    }

    fn closed() -> Self {
        Self::Failed(CallFailed::Disconnected(SessionEnd::PeerGone))
    }
}

crate::ending!(AskError);

impl<Req, U> From<CallError<Req, U>> for AskError {
    fn from(error: CallError<Req, U>) -> Self {
        match error {
            CallError::Full { .. } => Self::Full,
            CallError::TooLarge { max, .. } => Self::TooLarge { max },
            CallError::Disconnected { end, .. } => Self::NotSent(end),
        }
    }
}

/// The reason why a call was not made. Nothing was sent; the request and the user data come back.
#[derive(thiserror::Error)]
pub enum CallError<Req, U> {
    /// All slots hold unanswered calls. Retryable: poll first.
    #[error("all {depth} calls that fit are unanswered: poll for replies, then try again")]
    Full {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// Calls that can be unanswered.
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
    /// The session is over. Permanent. Earlier calls still end in `poll`: poll until it returns
    /// this end too.
    #[error("{end}")]
    #[doc(alias = "ServerDisconnected")]
    Disconnected {
        /// The request.
        request: Req,
        /// The user data.
        user_data: U,
        /// The end of the session.
        end: SessionEnd,
    },
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
        match self {
            Self::Full { depth, .. } => f
                .debug_struct("Full")
                .field("depth", depth)
                .finish_non_exhaustive(),
            Self::TooLarge { bytes, max, .. } => f
                .debug_struct("TooLarge")
                .field("bytes", bytes)
                .field("max", max)
                .finish_non_exhaustive(),
            Self::Disconnected { end, .. } => f
                .debug_struct("Disconnected")
                .field("end", end)
                .finish_non_exhaustive(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every variant, with the two answers.
    #[test]
    fn a_call_that_no_handler_got_is_retryable_unless_it_can_never_be_made() {
        let made = (false, true);
        let later = (true, false);
        let never = (false, false);
        assert_eq!(CallFailed::TimedOut.to_string(), "no reply in time");
        for end in [SessionEnd::PeerGone, SessionEnd::Evicted] {
            let failures = [
                (CallFailed::of_note(REFUSED), CallFailed::Refused),
                (CallFailed::of_note(TOO_LONG), CallFailed::ReplyTooLong),
                (CallFailed::of_note(crate::DROPPED), CallFailed::Dropped),
                (CallFailed::of_note(77), CallFailed::Dropped),
                (CallFailed::TimedOut, CallFailed::TimedOut),
                (CallFailed::Disconnected(end), CallFailed::Disconnected(end)),
            ];
            for (failure, expected) in failures {
                assert_eq!(failure, expected);
                assert_eq!(
                    (failure.is_retryable(), failure.may_have_executed()),
                    made,
                    "{failure}"
                );
            }
            let errors: [(CallError<(), ()>, _, _); 3] = [
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
                    CallError::Disconnected {
                        request: (),
                        user_data: (),
                        end,
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
                let asked = AskError::from(error);
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
            let misfit = AskError::Misfit(Misfit::Types);
            assert_eq!(
                (misfit.is_retryable(), misfit.may_have_executed()),
                never,
                "{misfit}"
            );
            for (failed, expected) in [
                (CallFailed::Disconnected(end), made),
                (CallFailed::Stopped, later),
            ] {
                assert_eq!(
                    (failed.is_retryable(), failed.may_have_executed()),
                    expected,
                    "{failed}"
                );
                let failed = AskError::from(failed);
                assert_eq!(
                    (failed.is_retryable(), failed.may_have_executed()),
                    expected,
                    "{failed}"
                );
            }
        }
    }
}
