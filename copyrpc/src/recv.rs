//! A received request that the application has.

use std::borrow::Cow;
use std::rc::Rc;
use std::time::Instant;

use copyrpc_calls::methods::{self, Header};
use mlx5_rendezvous::Peer;

use crate::connection::Connection;
use crate::endpoint::Endpoint;
use crate::error::ReplyError;
use crate::link::{Held, Request};
use crate::ring::RecvBytes;
use crate::wire::Status;

/// A request to be answered, at any time and in any order. Its bytes stay in the receive ring,
/// unchanged, until the answer. The ring space from the oldest unanswered request on is not reused:
/// to hold a request for long, copy the bytes and [release them](Self::release_data).
///
/// A drop without a reply answers the caller with
/// [`CallFailure::Dropped`](crate::error::CallFailure::Dropped).
#[derive(Debug)]
#[must_use = "dropping a request answers it with an error"]
pub struct RecvHandle<U> {
    connection: Rc<Connection<U>>,
    name: Held,
}

impl<U> RecvHandle<U> {
    #[inline]
    pub(crate) const fn new(connection: Rc<Connection<U>>, name: Held) -> Self {
        Self { connection, name }
    }

    #[inline]
    fn request(&self) -> Request {
        self.connection.with_link(|link| link.held(self.name))
    }

    /// Returns the request's bytes, in place.
    #[must_use]
    #[inline]
    pub fn data(&self) -> RecvBytes<'_> {
        self.connection.recv_view.bytes(self.request().payload())
    }

    /// Releases the bytes' place in the ring: [`data`](Self::data) is empty from now on. A request
    /// whose bytes were released delays no other request of its connection, however long it is
    /// held; until it is answered, it only holds the caller's credit for the reply.
    pub fn release_data(&mut self) {
        let mut request = self.request();
        self.connection.link().release_bytes(&mut request);
        self.name = request.name();
        // Nothing serves a connection that has ended, and the worklist of a dropped context would
        // keep the connection forever.
        if !self.connection.is_closed() {
            self.connection.mark_dirty();
        }
    }

    /// Returns whether the caller waits for the reply, as far as the last poll or drain has shown:
    /// the connection has not ended, and the caller did not give up the call, by its deadline or a
    /// cancellation. The call keeps its credit until the request is answered or dropped.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        !self.connection.is_closed() && !self.request().is_given_up()
    }

    /// Returns the maximum length of a reply in bytes: the caller's allowance, rounded up.
    #[must_use]
    pub fn max_reply(&self) -> usize {
        self.request().max_reply()
    }

    /// Returns the client that called; `None` at an endpoint that no [`Server`](crate::Server)
    /// made.
    #[must_use]
    pub fn peer(&self) -> Option<Peer> {
        self.connection.peer.get()
    }

    /// Returns the endpoint at which the request arrived.
    pub fn endpoint(&self) -> Endpoint<U> {
        Endpoint::new(Rc::clone(&self.connection))
    }

    /// Answers. Never fails for lack of ring space or credit. Like a call, the reply is sent with
    /// the next poll or flush.
    ///
    /// # Errors
    /// [`ReplyError::TooLarge`] with this handle, or [`ReplyError::Closed`] after the end of the
    /// connection.
    #[inline]
    pub fn reply(self, payload: &[u8]) -> Result<(), ReplyError<Self>> {
        self.respond(Status::Ok, payload)
    }

    /// Answers with [`CallFailure::Refused`](crate::error::CallFailure::Refused).
    ///
    /// # Errors
    /// [`ReplyError::Closed`] after the end of the connection.
    pub fn refuse(self) -> Result<(), ReplyError<Self>> {
        self.respond(Status::Refused, &[])
    }

    /// Sends the reply, or an error if the reply is longer than the caller allowed. Does nothing if
    /// the connection has ended.
    pub(crate) fn answer(self, payload: &[u8]) {
        if let Err(ReplyError::TooLarge { request, len, .. }) = self.reply(payload) {
            let _gone = request.respond(Status::too_long(len), &[]);
        }
    }

    #[inline(always)]
    pub(crate) fn respond(
        mut self,
        status: Status,
        payload: &[u8],
    ) -> Result<(), ReplyError<Self>> {
        let mut link = self.connection.link();
        let request = link.held(self.name);
        let outcome = link.respond(&request, status, payload);
        drop(link);
        match outcome {
            Ok(()) => {
                self.connection.mark_dirty();
                self.name = Held::Answered;
                Ok(())
            }
            Err(error) => Err(error.map_request(|()| self)),
        }
    }
}

impl<U> methods::Request for RecvHandle<U> {
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(self.data().to_vec())
    }

    fn context(&self) -> methods::Context<'_> {
        let header = self.data().read::<[u8; Header::BYTES]>();
        let deadline = header.and_then(|header| Header::deadline(&header, Instant::now()));
        let context = methods::Context::new()
            .with_deadline(deadline)
            .with_wanted(if self.is_wanted() { &true } else { &false });
        self.peer().map_or(context, |peer| {
            context.with_client(peer.number, Some(peer.address))
        })
    }
}

/// The bytes are copied, because they lie where the peer can write.
impl methods::Request for RecvBytes<'_> {
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Owned(self.to_vec())
    }
}

impl<U> Drop for RecvHandle<U> {
    #[inline]
    fn drop(&mut self) {
        if self.name != Held::Answered {
            drop_request(&self.connection, self.request());
        }
    }
}

#[inline(always)]
fn respond<U>(
    connection: &Rc<Connection<U>>,
    request: &Request,
    status: Status,
    payload: &[u8],
) -> Result<(), ReplyError<()>> {
    connection.link().respond(request, status, payload)?;
    connection.mark_dirty();
    Ok(())
}

#[cold]
#[inline(never)]
fn respond_slowly<U>(
    connection: &Rc<Connection<U>>,
    request: Request,
    status: Status,
    payload: &[u8],
) -> Result<(), ReplyError<()>> {
    respond(connection, &request, status, payload)
}

/// Answers in place of a handler that did not answer. If the connection has ended, no caller waits
/// for the answer.
#[cold]
#[inline(never)]
fn drop_request<U>(connection: &Rc<Connection<U>>, request: Request) {
    if respond(connection, &request, Status::Dropped, &[]).is_err() {
        connection.release(&request);
    }
}

/// The answer to a request of [`Context::serve`](crate::Context::serve), to be given at once or
/// after [`Reply::hold`].
///
/// A drop answers the caller with [`CallFailure::Dropped`](crate::error::CallFailure::Dropped).
#[derive(Debug)]
#[must_use = "dropping a reply answers the request with an error"]
pub struct Reply<'a, U> {
    connection: &'a Rc<Connection<U>>,
    request: Request,
    is_done: bool,
}

impl<'a, U> Reply<'a, U> {
    #[inline(always)]
    pub(crate) const fn new(connection: &'a Rc<Connection<U>>, request: Request) -> Self {
        Self {
            connection,
            request,
            is_done: false,
        }
    }

    /// Returns the maximum length of a reply in bytes: the caller's allowance, rounded up.
    #[must_use]
    pub const fn max_len(&self) -> usize {
        self.request.max_reply()
    }

    /// Returns the endpoint at which the request arrived.
    pub fn endpoint(&self) -> Endpoint<U> {
        Endpoint::new(Rc::clone(self.connection))
    }

    /// Answers: copies the payload to the place from which the device sends it. Never fails for
    /// lack of ring space or credit. The reply is sent by the next flush: at the end of
    /// [`Context::serve`](crate::Context::serve), or after a drain by a later poll or flush.
    ///
    /// # Errors
    /// [`ReplyError::TooLarge`] with this reply, or [`ReplyError::Closed`] after the end of the
    /// connection.
    #[inline(always)]
    pub fn send(self, payload: &[u8]) -> Result<(), ReplyError<Self>> {
        // In two steps, so that rarely needed code is not part of the callers' code.
        let is_sent = self
            .connection
            .link()
            .reply_in_place(&self.request, payload);
        let outcome = if is_sent {
            Ok(())
        } else {
            respond_slowly(self.connection, self.request, Status::Ok, payload)
        };
        self.end(outcome)
    }

    /// Answers with [`CallFailure::Refused`](crate::error::CallFailure::Refused).
    ///
    /// # Errors
    /// [`ReplyError::Closed`] after the end of the connection.
    pub fn refuse(self) -> Result<(), ReplyError<Self>> {
        self.respond(Status::Refused, &[])
    }

    #[inline(always)]
    pub(crate) fn answer(self, payload: &[u8]) {
        if let Err(ReplyError::TooLarge { request, len, .. }) = self.send(payload) {
            let _gone = request.respond(Status::too_long(len), &[]);
        }
    }

    fn respond(self, status: Status, payload: &[u8]) -> Result<(), ReplyError<Self>> {
        let outcome = respond_slowly(self.connection, self.request, status, payload);
        self.end(outcome)
    }

    #[inline(always)]
    fn end(mut self, outcome: Result<(), ReplyError<()>>) -> Result<(), ReplyError<Self>> {
        match outcome {
            Ok(()) => {
                self.is_done = true;
                Ok(())
            }
            Err(error) => Err(error.map_request(|()| self)),
        }
    }

    /// Keeps the request, to be answered later: its bytes stay where they are until then.
    #[inline(always)]
    pub fn hold(mut self) -> RecvHandle<U> {
        self.is_done = true;
        let name = self.connection.link().hold(&self.request);
        RecvHandle::new(Rc::clone(self.connection), name)
    }
}

impl<U> Drop for Reply<'_, U> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.is_done {
            drop_request(self.connection, self.request);
        }
    }
}

#[cfg(test)]
mod tests {
    use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;
    use crate::{Context, ContextBuilder, EndpointConfig};

    /// Asserts that the device and the memory of the request's connection are freed.
    #[test]
    fn bytes_that_are_released_after_the_context_leave_nothing_behind() {
        let fabric = LocalFabric::new();
        let context = || -> Context<()> {
            let fabric = FabricSpec::Local(fabric.clone());
            ContextBuilder::new(DeviceSpec::Soft(SoftOptions {
                fabric,
                ..SoftOptions::default()
            }))
            .build()
            .unwrap()
        };
        let (client, server) = (context(), context());
        let [a, b] = [&client, &server]
            .map(|context| context.create_endpoint(&EndpointConfig::default()).unwrap());
        let (record_a, record_b) = (a.local_info(), b.local_info());
        let (endpoint, peer) = (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap());
        endpoint.call(b"held", (), 0).unwrap();
        client.flush_endpoints().unwrap();
        server.poll(|(), _| ()).unwrap();
        let mut request = server.recv().unwrap();
        let worklist = Rc::downgrade(&server.inner.worklist);
        drop((peer, server));
        request.release_data();
        drop(request);
        assert!(worklist.upgrade().is_none());
    }
}
