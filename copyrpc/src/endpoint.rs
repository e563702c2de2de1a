//! Connected endpoints: calls, and their end.

use std::rc::Rc;
use std::time::Duration;

use crate::connection::Connection;
use crate::error::{CallError, CloseReason};
use crate::link::CallKey;
use crate::stats::Stats;

/// Identifier of one call of one endpoint of this process, for [`Endpoint::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallToken {
    connection: u64,
    call: CallKey,
}

/// An end of a connection. Clones refer to the same connection, and so does
/// [`RecvHandle::endpoint`](crate::RecvHandle::endpoint).
///
/// Dropping the last handle closes the connection as [`Endpoint::close`] does: outstanding calls
/// end as they would, a received request can be answered, and the next polls report the close to
/// the peer. So keep a handle as long as the peer may call.
#[derive(Debug)]
#[must_use = "dropping the last handle of an endpoint closes its connection"]
#[doc(alias = "EndpointInner")]
pub struct Endpoint<U> {
    pub(crate) connection: Rc<Connection<U>>,
}

impl<U> Clone for Endpoint<U> {
    fn clone(&self) -> Self {
        Self::new(Rc::clone(&self.connection))
    }
}

impl<U> Drop for Endpoint<U> {
    fn drop(&mut self) {
        self.connection.remove_handle();
    }
}

impl<U> PartialEq for Endpoint<U> {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.connection, &other.connection)
    }
}

impl<U> Eq for Endpoint<U> {}

impl<U> Endpoint<U> {
    pub(crate) fn new(connection: Rc<Connection<U>>) -> Self {
        connection.add_handle();
        Self { connection }
    }

    /// Sends `payload` as a request whose reply may have `response_allowance` bytes. Nothing is
    /// posted before the next [`Context::poll`](crate::Context::poll) or
    /// [`flush_endpoints`](crate::Context::flush_endpoints); calls made until then share one WRITE.
    /// `user_data` is returned, exactly once, through the callback of a poll or from
    /// [`Endpoint::cancel`].
    ///
    /// # Errors
    /// [`CallError`], which returns `user_data`. After `RingFull` or `InsufficientCredit`, poll and
    /// retry.
    #[inline(always)]
    pub fn call(
        &self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
    ) -> Result<CallToken, CallError<U>> {
        // In two steps, so that rarely needed code is not part of the callers' code.
        let outcome = self
            .connection
            .link()
            .try_call(payload, user_data, response_allowance);
        match outcome {
            Ok(call) => {
                self.connection.mark_dirty();
                Ok(CallToken {
                    connection: self.connection.serial,
                    call,
                })
            }
            Err(user_data) => self.make_room_and_call(payload, user_data, response_allowance),
        }
    }

    /// Like [`Endpoint::call`], with a timeout: without a reply after `timeout` the call ends with
    /// [`CallFailure::TimedOut`](crate::CallFailure::TimedOut), in a later poll or drain. That is
    /// the first poll without arrivals after the timeout; under load, the 64th poll at the latest.
    /// A reply that arrives in the same poll wins. The peer is informed as by [`Endpoint::cancel`].
    /// Reads the clock; calls without a deadline do not.
    ///
    /// # Errors
    /// See [`Endpoint::call`].
    pub fn call_within(
        &self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
        timeout: Duration,
    ) -> Result<CallToken, CallError<U>> {
        let call = self.call(payload, user_data, response_allowance)?;
        self.end_within(call, timeout);
        Ok(call)
    }

    /// Sets a timeout, counted from now, for a call of this endpoint that has not ended. The call
    /// then ends as [`Endpoint::call_within`] describes.
    pub(crate) fn end_within(&self, call: CallToken, timeout: Duration) {
        let deadline_ns = self.connection.timers().deadline_in(timeout);
        self.connection
            .with_link(|link| link.end_at(call.call, deadline_ns));
        self.connection.arm(deadline_ns);
    }

    #[cold]
    #[inline(never)]
    fn make_room_and_call(
        &self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
    ) -> Result<CallToken, CallError<U>> {
        let outcome = self
            .connection
            .link()
            .call(payload, user_data, response_allowance);
        // A refused call also marks the connection, since it may need a READ. A connection that has
        // ended is not marked, since it is not flushed any more.
        if !matches!(outcome, Err(CallError::Closed { .. })) {
            self.connection.mark_dirty();
        }
        outcome.map(|call| CallToken {
            connection: self.connection.serial,
            call,
        })
    }

    /// Ends a call at once: returns its user data, and no callback gets it. Returns `None` if the
    /// call has ended, or was made on another endpoint. A later reply is dropped, but returns the
    /// call's share of ring and credit. The next flush sends a notice to the peer. When the notice
    /// has arrived, the request's [`RecvHandle::is_wanted`](crate::RecvHandle::is_wanted) is
    /// `false` there. May be called from a callback.
    pub fn cancel(&self, call: CallToken) -> Option<U> {
        if call.connection != self.connection.serial {
            return None;
        }
        let user_data = self.connection.with_link(|link| link.cancel(call.call))?;
        if !self.connection.is_closed() {
            self.connection.mark_dirty();
        }
        self.connection.publish_rest();
        Some(user_data)
    }

    /// Returns the maximum request payload in bytes.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.connection.recv_view.size().max_payload() as usize
    }

    /// Returns the maximum response allowance in bytes.
    #[must_use]
    pub fn max_response_allowance(&self) -> usize {
        self.connection.recv_view.size().max_response_allowance() as usize
    }

    /// Returns the number of calls that have not ended.
    #[must_use]
    pub fn outstanding_calls(&self) -> usize {
        self.connection.with_link(|link| link.outstanding_calls())
    }

    /// Returns the number of calls that ended by their deadline, by [`Endpoint::cancel`] or when
    /// the peer reported that it closes, and whose requests the peer has not answered. Each of
    /// these calls holds the credit for its reply until the peer answers it. If this number is
    /// above 0 and [`outstanding_calls`](Self::outstanding_calls) is 0, no other calls hold credit:
    /// [`CallError::InsufficientCredit`] then lasts until the peer answers.
    #[must_use]
    pub fn given_up_calls(&self) -> usize {
        self.connection
            .with_link(|link| link.unanswered_requests() - link.outstanding_calls())
    }

    /// Ends the connection when nothing is outstanding any more. This end takes no more calls from
    /// now on, and the peer takes none once it has received the close. Outstanding calls end as
    /// they would, and received requests may be answered. Requests of the peer that this process
    /// has not received by its next flush, and requests that arrive later, end at the peer with
    /// [`NotSent`](crate::ClientError::NotSent). Both ends have to continue polling. When nothing
    /// is outstanding any more, [`Endpoint::closed`] is [`CloseReason::ClosedHere`], and
    /// `ClosedByPeer` at the other end. The close takes as long as the handlers; if the peer is
    /// stopped or dies meanwhile, the connection ends as it does while calls are outstanding. The
    /// close does not wait for one-sided operations: end them first.
    pub fn close(&self) {
        self.connection.close();
    }

    /// Ends the connection at once: calls end with [`CloseReason::ClosedHere`] in the next poll or
    /// drain. The peer detects the end as if this process had died.
    pub fn abort(&self) {
        self.connection.abort();
    }

    /// Returns whether the connection takes no more calls, and has not ended.
    pub(crate) fn is_closing(&self) -> bool {
        self.connection.with_link(|link| link.is_closing())
    }

    /// Returns whether the peer has closed the connection, and the connection has not ended.
    pub(crate) fn is_closed_by_peer(&self) -> bool {
        self.connection.with_link(|link| link.is_closed_by_peer())
    }

    /// READs the peer's record with the next flush (K4 of docs/copyrpc-protocol.md): if the peer is
    /// gone, this ends the connection.
    pub(crate) fn probe(&self) {
        self.connection.probe();
    }

    /// Suspends the [`Window`](crate::Window) of this end from its next flush on, or ends the
    /// suspension. Has no effect on an endpoint without a window.
    pub fn suspend_window(&self, is_suspended: bool) {
        self.connection
            .with_link(|link| link.suspend_window(is_suspended));
    }

    /// Returns why the connection ended, once it has.
    #[must_use]
    pub fn closed(&self) -> Option<CloseReason> {
        self.connection.with_link(|link| link.closed())
    }

    /// Returns the counters of this connection.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.connection.with_link(|link| link.stats())
    }

    /// Returns the credit, in response bytes, that calls of this end have used, and the credit that
    /// replies of this end have returned. If no call is outstanding, the first number of one end
    /// equals the second number of the other end. For simulations.
    #[doc(hidden)]
    #[must_use]
    pub fn credit_used(&self) -> (u64, u64) {
        self.connection.with_link(|link| link.credit_used())
    }

    /// Returns the maximum payload bytes of a packet on the path to the peer: the smaller MTU of
    /// the two ends.
    #[must_use]
    pub fn path_mtu(&self) -> u16 {
        self.connection.remote.path_mtu
    }

    /// Returns the queue pair number of this end, which is unique on its device until the
    /// connection ends.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.connection.qpn()
    }
}
