//! The futures of an endpoint: calls and one-sided operations.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context as TaskContext, Poll, ready};
use std::time::Duration;

use thiserror::Error;

use super::waiting::{Lane, Place};
use super::{AsyncEndpoint, Progress, Ticket};
use crate::endpoint::{CallToken, Endpoint};
use crate::error::{CallError, CallFailure, CloseReason};
use crate::raw::{Memory, RdmaError, RemoteMemory};
use crate::typed::SizeError;

/// Why an awaited call has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AsyncCallError {
    /// The call was refused permanently; nothing was sent.
    #[error("not sent: {0}")]
    NotTaken(#[from] CallError<()>),
    /// The call ended without a reply.
    #[error(transparent)]
    Failed(#[from] CallFailure),
    /// The reply has another size than the type that was asked for.
    #[error("the reply: {0}")]
    Size(#[from] SizeError),
}

impl AsyncCallError {
    pub(super) const fn wrong_size<T>(received: usize) -> Self {
        Self::Size(SizeError { received, expected: size_of::<T>() })
    }
}

/// The progress of an operation; `T` names it once it was taken.
#[derive(Debug)]
enum Stage<T> {
    Waiting(Option<Place>),
    Taken(T),
    Ended,
}

/// A call. Its deadline and its cancellation are those of [`Endpoint::call_within`] and [`Endpoint::cancel`].
#[must_use = "a call is made when it is polled"]
pub struct CallFuture<'a> {
    endpoint: &'a AsyncEndpoint,
    payload: &'a [u8],
    response_allowance: usize,
    timeout: Option<Duration>,
    progress: Rc<Progress>,
    stage: Stage<CallToken>,
}

impl fmt::Debug for CallFuture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture").field("bytes", &self.payload.len()).field("stage", &self.stage).finish_non_exhaustive()
    }
}

impl<'a> CallFuture<'a> {
    pub(super) fn new(endpoint: &'a AsyncEndpoint, payload: &'a [u8], response_allowance: usize) -> Self {
        Self { endpoint, payload, response_allowance, timeout: None, progress: Rc::default(), stage: Stage::Waiting(None) }
    }

    /// Sets a timeout, from the time when there is room for the call: without a reply the call ends with
    /// [`CallFailure::DeadlineExceeded`].
    pub const fn within(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

impl Future for CallFuture<'_> {
    type Output = Result<Vec<u8>, AsyncCallError>;

    fn poll(self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let Self { endpoint: AsyncEndpoint { endpoint, waiting }, payload, response_allowance, timeout, progress, stage } = self.get_mut();
        if let Stage::Waiting(place) = stage {
            let lane = Lane::Calls(endpoint.connection.serial());
            let taken = ready!(waiting.admit(place, lane, Some(endpoint), task, || {
                let ticket = Ticket(Rc::clone(progress));
                let taken = match timeout {
                    None => endpoint.call(payload, ticket, *response_allowance),
                    Some(timeout) => endpoint.call_within(payload, ticket, *response_allowance, *timeout),
                };
                taken.map_or_else(|error| if error.is_retryable() { None } else { Some(Err(error)) }, |call| Some(Ok(call)))
            }));
            match taken {
                Ok(call) => *stage = Stage::Taken(call),
                Err(error) => {
                    *stage = Stage::Ended;
                    return Poll::Ready(Err(error.map_user_data(|_| ()).into()));
                }
            }
        }
        let Stage::Taken(_) = stage else { return Poll::Pending };
        let outcome = ready!(progress.poll(task));
        *stage = Stage::Ended;
        Poll::Ready(outcome.map_err(AsyncCallError::from))
    }
}

impl Drop for CallFuture<'_> {
    fn drop(&mut self) {
        if let Stage::Taken(call) = self.stage {
            self.endpoint.endpoint.cancel(call);
        }
    }
}

/// [`Endpoint::rdma_read`] or [`Endpoint::rdma_write`].
type Post = fn(&Endpoint<Ticket>, &Memory, usize, &RemoteMemory, u64, usize, Ticket) -> Result<(), RdmaError<Ticket>>;

/// A one-sided operation. If it is dropped after it was taken, it is executed anyway; its memory lives until then.
#[must_use = "an operation is made when it is polled"]
pub struct TransferFuture<'a> {
    endpoint: &'a AsyncEndpoint,
    post: Post,
    local: (&'a Memory, usize),
    remote: (&'a RemoteMemory, u64),
    len: usize,
    progress: Option<Rc<Progress>>,
    stage: Stage<()>,
}

impl fmt::Debug for TransferFuture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferFuture").field("bytes", &self.len).field("stage", &self.stage).finish_non_exhaustive()
    }
}

impl<'a> TransferFuture<'a> {
    pub(super) const fn new(
        endpoint: &'a AsyncEndpoint,
        post: Post,
        local: (&'a Memory, usize),
        remote: (&'a RemoteMemory, u64),
        len: usize,
    ) -> Self {
        Self { endpoint, post, local, remote, len, progress: None, stage: Stage::Waiting(None) }
    }
}

impl Future for TransferFuture<'_> {
    type Output = Result<(), RdmaError<()>>;

    fn poll(self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let Self { endpoint: AsyncEndpoint { endpoint, waiting }, post, local, remote, len, progress, stage } = self.get_mut();
        let progress = progress.get_or_insert_default();
        if let Stage::Waiting(place) = stage {
            let lane = Lane::Transfers(endpoint.connection.serial());
            let taken = ready!(waiting.admit(place, lane, None, task, || {
                match post(endpoint, local.0, local.1, remote.0, remote.1, *len, Ticket(Rc::clone(progress))) {
                    Err(error) if error.is_retryable() => None,
                    taken => Some(taken),
                }
            }));
            match taken {
                Ok(()) => *stage = Stage::Taken(()),
                Err(error) => {
                    *stage = Stage::Ended;
                    return Poll::Ready(Err(error.map_user_data(|_| ())));
                }
            }
        }
        let Stage::Taken(()) = stage else { return Poll::Pending };
        let outcome = ready!(progress.poll(task));
        *stage = Stage::Ended;
        Poll::Ready(match outcome {
            Ok(_) => Ok(()),
            Err(CallFailure::Closed(reason)) => Err(RdmaError::Closed { user_data: (), reason }),
            // Only calls end this way.
            Err(CallFailure::Dropped | CallFailure::Refused | CallFailure::ReplyTooLong { .. } | CallFailure::DeadlineExceeded) => {
                Err(RdmaError::Closed { user_data: (), reason: CloseReason::Disconnected })
            }
        })
    }
}
