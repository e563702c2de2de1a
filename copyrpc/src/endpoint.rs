//! Connected endpoints: called, closed.

use std::rc::Rc;
use std::time::Duration;

use crate::connection::Connection;
use crate::error::{CallError, CloseReason};
use crate::link::CallKey;
use crate::stats::Stats;

/// Names one call of one endpoint of this process, for [`Endpoint::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallToken {
    connection: u64,
    call: CallKey,
}

/// One end of a connection. Clones name the same connection, and so does [`RecvHandle::endpoint`](crate::RecvHandle::endpoint).
///
/// Dropping the last of them closes the connection as [`Endpoint::close`] does: outstanding calls end as they would, a request that was
/// received can be answered, and the peer hears of it with the next polls. So keep it for as long as the peer may call.
#[derive(Debug)]
#[must_use = "dropping the last handle of an endpoint closes its connection"]
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

    /// Sends `payload` as a request whose reply may have `response_allowance` bytes. Nothing leaves before the next
    /// [`Context::poll`](crate::Context::poll) or [`flush_endpoints`](crate::Context::flush_endpoints); calls made until then share one
    /// WRITE. `user_data` comes back, exactly once, through the callback of a poll or from [`Endpoint::cancel`].
    ///
    /// # Errors
    /// [`CallError`], with `user_data`. After `RingFull` or `InsufficientCredit`, poll and retry.
    #[inline(always)]
    pub fn call(&self, payload: &[u8], user_data: U, response_allowance: usize) -> Result<CallToken, CallError<U>> {
        let outcome = self.connection.link().try_call(payload, user_data, response_allowance);
        match outcome {
            Ok(call) => {
                self.connection.mark_dirty();
                Ok(CallToken { connection: self.connection.serial(), call })
            }
            Err(user_data) => self.call_after_all(payload, user_data, response_allowance),
        }
    }

    #[cold]
    #[inline(never)]
    fn call_after_all(&self, payload: &[u8], user_data: U, response_allowance: usize) -> Result<CallToken, CallError<U>> {
        let outcome = self.connection.link().call(payload, user_data, response_allowance);
        self.note_call(outcome)
    }

    /// Like [`Endpoint::call`], but when there is no reply after `timeout` the call ends with
    /// [`CallFailure::DeadlineExceeded`](crate::CallFailure::DeadlineExceeded), in a later poll or drain: the first one without arrivals
    /// that comes after it, under load at the latest the 64th. A reply that arrives in that same poll wins. The peer is not told, and a
    /// reply that comes later reaches no call. Reads the clock; calls without a deadline do not.
    ///
    /// # Errors
    /// Like [`Endpoint::call`].
    pub fn call_within(
        &self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
        timeout: Duration,
    ) -> Result<CallToken, CallError<U>> {
        let deadline_ns = self.connection.timers().deadline_in(timeout);
        let outcome = self.connection.link().call_until(payload, user_data, response_allowance, deadline_ns);
        if outcome.is_ok() {
            self.connection.arm(deadline_ns);
        }
        self.note_call(outcome)
    }

    fn note_call(&self, outcome: Result<CallKey, CallError<U>>) -> Result<CallToken, CallError<U>> {
        // A refused call too: it may want a READ. Not one on a connection that has ended: nobody flushes that.
        if !matches!(outcome, Err(CallError::Closed { .. })) {
            self.connection.mark_dirty();
        }
        outcome.map(|call| CallToken { connection: self.connection.serial(), call })
    }

    /// Ends a call at once: its user data comes back here, and no callback gets it. `None` when the call has ended, or was made on
    /// another endpoint. The peer is not told, and its reply reaches no call; what the call took of ring and credit comes back with that
    /// reply. From a callback too.
    pub fn cancel(&self, call: CallToken) -> Option<U> {
        if call.connection != self.connection.serial() {
            return None;
        }
        self.connection.with_link(|link| link.cancel(call.call))
    }

    /// Largest request payload in bytes.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.connection.recv_view().size().max_payload() as usize
    }

    /// Largest response allowance in bytes.
    #[must_use]
    pub fn max_response_allowance(&self) -> usize {
        self.connection.recv_view().size().max_response_allowance() as usize
    }

    /// Calls that have not ended.
    #[must_use]
    pub fn outstanding_calls(&self) -> usize {
        self.connection.with_link(|link| link.outstanding_calls())
    }

    /// Ends the connection when all is done: no more calls are taken, on either side, as soon as the peer hears of it; outstanding calls
    /// end as they would; requests that were received may be answered. Those that were not received by the next flush, and those that
    /// arrive later, end at the peer with [`CloseReason::ClosedByPeer`]. Both ends go on polling. When nothing is outstanding any more,
    /// [`Endpoint::closed`] is [`CloseReason::ClosedHere`], and `ClosedByPeer` at the other end. It takes as long as the handlers; a peer
    /// that is stopped or dead meanwhile ends it as it ends calls. One-sided operations are not waited for: end them first.
    pub fn close(&self) {
        self.connection.close();
    }

    /// Ends the connection at once: calls end with [`CloseReason::ClosedHere`] in the next poll or drain. The peer finds out as if this
    /// process had died.
    pub fn abort(&self) {
        self.connection.abort();
    }

    /// Why the connection ended, once it has.
    #[must_use]
    pub fn closed(&self) -> Option<CloseReason> {
        self.connection.with_link(|link| link.closed())
    }

    /// Counters of this connection.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.connection.with_link(|link| link.stats())
    }

    /// Response bytes that calls of this end have paid for, and those that replies of this end have given back: the first is the second of the
    /// other end where no call is outstanding. For simulations.
    #[doc(hidden)]
    #[must_use]
    pub fn credit_used(&self) -> (u64, u64) {
        self.connection.with_link(|link| link.credit_used())
    }

    /// Most payload bytes of a packet on the way to the peer: the smaller of both ends' MTUs.
    #[must_use]
    pub fn path_mtu(&self) -> u16 {
        self.connection.path_mtu()
    }

    /// Queue pair number of this end: unique on its device while the endpoint lives.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.connection.qpn()
    }
}
