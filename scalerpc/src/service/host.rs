//! The server behind [`Server`](crate::Server) and [`AsyncServer`](crate::AsyncServer).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use copyrpc_calls::{Answer, Bind, Serving, Share, StopHandle};
use mlx5::DeviceInfo;
use mlx5_rendezvous::{Gate, Peer};

use super::DEFAULT_TYPE;
use super::server::{ServerOptions, SharedAddress, Stepped, gate_options};
use crate::protocol::{Handlers, HeldRequest, ServerStats};
use crate::rdma::SetupError;

/// Offset of the global clock from a server's clock, for servers on one host: they share one clock.
const SAME_CLOCK: Option<i64> = Some(0);

/// A server, and a handler that keeps each request for [`recv`](Serving::recv).
#[derive(Debug)]
pub struct Host {
    server: Stepped,
    handlers: Handlers<'static>,
    /// Requests that the handler has kept.
    received: Rc<RefCell<VecDeque<HeldRequest>>>,
    /// Whether the owner takes requests by [`recv`](Serving::recv). Otherwise it has handlers of its
    /// own, and only they know which requests they have.
    is_receiving: bool,
}

impl From<Stepped> for Host {
    fn from(server: Stepped) -> Self {
        let received = Rc::<RefCell<VecDeque<HeldRequest>>>::default();
        let mut handlers = Handlers::new(server.max_payload());
        let kept = Rc::clone(&received);
        handlers.insert_held(DEFAULT_TYPE, move |request| {
            kept.borrow_mut().push_back(request)
        });
        Self {
            server,
            handlers,
            received,
            is_receiving: false,
        }
    }
}

/// Closes a server whose requests are received by [`recv`](Serving::recv), and waits until the
/// answers have arrived, for little longer than `stop_timeout` at most.
impl Drop for Host {
    fn drop(&mut self) {
        if self.is_receiving {
            Serving::close(self);
            self.server.finish(&mut self.handlers);
        }
    }
}

impl Deref for Host {
    type Target = Stepped;

    fn deref(&self) -> &Stepped {
        &self.server
    }
}

impl DerefMut for Host {
    fn deref_mut(&mut self) -> &mut Stepped {
        &mut self.server
    }
}

impl Serving for Host {
    type Options = ServerOptions;
    type Request<'a> = &'a [u8];
    type Token = HeldRequest;
    type Peer = Peer;
    type Error = SetupError;
    type Address = SocketAddr;
    type Stats = ServerStats;
    type Device = DeviceInfo;
    const THREAD: &'static str = "scalerpc-server";

    fn address(&self) -> io::Result<SocketAddr> {
        self.server.gate.local_addr()
    }

    fn stop_handle(&self) -> StopHandle {
        self.server.stop.clone()
    }

    fn device(&self) -> DeviceInfo {
        self.server.rdma.device().info()
    }

    fn clients(&self) -> usize {
        self.server.rdma.clients()
    }

    fn stats(&self) -> ServerStats {
        *self.server.rdma.stats()
    }

    fn serve<R: AsRef<[u8]>>(
        &mut self,
        mut handler: impl FnMut(&[u8]) -> R,
    ) -> Result<(), SetupError> {
        let mut handlers = Handlers::new(self.max_payload());
        handlers.insert(DEFAULT_TYPE, |request: &[u8], place: &mut [u8]| {
            let response = handler(request);
            let response = response.as_ref();
            // A length that does not fit becomes a failure at the caller.
            if let Some(place) = place.get_mut(..response.len()) {
                place.copy_from_slice(response);
            }
            Ok(response.len())
        });
        self.serve_types(&mut handlers)
    }

    fn step(&mut self, _holds_back: bool) -> Result<(), SetupError> {
        if self.server.is_closed() {
            self.server.step_to_end(&mut self.handlers);
            return Ok(());
        }
        self.server.step(&mut self.handlers).map(drop)
    }

    fn hurry(&mut self) {
        self.server.hurry();
    }

    fn recv(&mut self) -> Option<(HeldRequest, Vec<u8>, Peer)> {
        self.is_receiving = true;
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

    fn has(&self, client: u64) -> bool {
        self.server.rdma.peers().any(|peer| peer.number == client)
    }

    fn is_wanted(&self, request: &HeldRequest) -> bool {
        request.is_wanted()
    }

    fn close(&mut self) {
        if self.server.begin_end() {
            self.server.rdma.drop_queued();
            while let Some(request) = self.received.borrow_mut().pop_front() {
                self.handlers.send_back(&request);
            }
        }
    }

    fn no_thread(error: io::Error) -> SetupError {
        SetupError::Thread(error)
    }
}

impl<A: ToSocketAddrs + fmt::Debug> Bind<A> for Host {
    fn bind_with(address: A, options: &ServerOptions) -> Result<Self, SetupError> {
        let gate = Gate::bind(address, gate_options(options))?;
        Stepped::at(gate, options.clone(), None).map(Self::from)
    }
}

impl Share for Host {
    fn share(&mut self) -> io::Result<SharedAddress> {
        let listener = self.gate.share()?;
        self.rdma.synchronise(SAME_CLOCK);
        Ok(SharedAddress {
            listener,
            options: self.options.clone(),
            stop: self.stop.clone(),
        })
    }

    fn beside(other: SharedAddress) -> Result<Self, SetupError> {
        let gate = Gate::beside(other.listener, gate_options(&other.options))?;
        let mut server = Stepped::at(gate, other.options, Some(other.stop))?;
        server.rdma.synchronise(SAME_CLOCK);
        Ok(server.into())
    }
}
