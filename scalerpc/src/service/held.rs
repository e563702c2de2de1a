//! The server that keeps its requests for an [`AsyncServer`](super::AsyncServer).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::rc::Rc;

use copyrpc_calls::{Answer, Bind, Serving, StopHandle};
use mlx5::DeviceInfo;
use mlx5_rendezvous::Peer;

use super::DEFAULT_TYPE;
use super::server::{Server, ServerOptions};
use crate::protocol::{Handlers, HeldRequest, ServerStats};
use crate::rdma::SetupError;

/// A [`Server`] whose only handler keeps each request.
#[derive(Debug)]
pub struct HeldServer {
    server: Server,
    handlers: Handlers<'static>,
    /// Requests that the handler has kept, for [`recv`](Serving::recv).
    received: Rc<RefCell<VecDeque<HeldRequest>>>,
}

/// Closes the server, and waits until the answers have arrived, for little longer than
/// `stop_timeout` at most.
impl Drop for HeldServer {
    fn drop(&mut self) {
        Serving::close(self);
        self.server.finish(&mut self.handlers);
    }
}

impl Serving for HeldServer {
    type Token = HeldRequest;
    type Peer = Peer;
    type Error = SetupError;
    type Address = SocketAddr;
    type Stats = ServerStats;
    type Device = DeviceInfo;

    fn address(&self) -> io::Result<SocketAddr> {
        self.server.local_addr()
    }

    fn stop_handle(&self) -> StopHandle {
        self.server.stop_handle()
    }

    fn device(&self) -> DeviceInfo {
        self.server.device_info()
    }

    fn counts(&self) -> (usize, ServerStats) {
        (self.server.clients(), *self.server.stats())
    }

    fn step(&mut self, _holds_back: bool) -> Result<(), SetupError> {
        if self.server.is_closed() {
            self.server.step_to_end(&mut self.handlers);
            return Ok(());
        }
        self.server.step(&mut self.handlers).map(drop)
    }

    fn may_check(&self) -> bool {
        self.server.checks_next()
    }

    fn recv(&mut self) -> Option<(HeldRequest, Vec<u8>, Peer)> {
        loop {
            let mut request = self.received.borrow_mut().pop_front()?;
            // There always is a peer, as a `Server` has admitted every client.
            let Some(peer) = request.peer() else { continue };
            let payload = request.take_payload();
            return Some((request, payload, peer));
        }
    }

    fn answer(&mut self, request: HeldRequest, answer: Answer) {
        match answer {
            // If the reply is too long, `reply` ends the call with `ReplyTooLong`.
            Answer::Reply(reply) => drop(request.reply(reply)),
            Answer::Refusal => request.refuse(),
            Answer::SentBack => self.handlers.send_back(&request),
            Answer::Dropped => drop(request),
        }
    }

    fn is_wanted(&self, request: &HeldRequest) -> bool {
        request.is_wanted()
    }

    fn close(&mut self) {
        if self.server.begin_end() {
            self.server.rdma().drop_queued();
            while let Some(request) = self.received.borrow_mut().pop_front() {
                self.handlers.send_back(&request);
            }
        }
    }
}

impl<A: ToSocketAddrs + fmt::Debug> Bind<A> for HeldServer {
    type Options = ServerOptions;
    const THREAD: &'static str = "scalerpc-server";

    fn bind_with(address: A, options: &ServerOptions) -> Result<Self, SetupError> {
        let server = Server::with_options(address, options)?;
        let received = Rc::<RefCell<VecDeque<HeldRequest>>>::default();
        let mut handlers = Handlers::new(server.max_payload());
        let kept = Rc::clone(&received);
        handlers.insert_held(DEFAULT_TYPE, move |request| {
            kept.borrow_mut().push_back(request)
        });
        Ok(Self {
            server,
            handlers,
            received,
        })
    }

    fn no_thread(error: io::Error) -> SetupError {
        SetupError::Thread(error)
    }
}
