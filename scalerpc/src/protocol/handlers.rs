//! The worker: takes requests, runs the handlers of their types, answers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Instant;

use copyrpc_calls::methods::{self, Header};
use mlx5_rendezvous::Peer;

use crate::protocol::error::CallFailure;
use crate::protocol::memory::Memory;
use crate::protocol::request::{ClientId, Request};
use crate::protocol::server::{Server, ServerOp};
use crate::protocol::wire::Status;

/// The error of a handler that cannot answer. The caller gets
/// [`CallFailure::Refused`](crate::protocol::CallFailure::Refused). If a handler panics or drops
/// its request, the caller gets [`CallFailure::Dropped`](crate::protocol::CallFailure::Dropped)
/// instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandlerError;

/// A function that answers requests of one type. Its arguments are the payload, and the place of
/// the response. It returns the number of the response's bytes. A number above the length of
/// `response` means that the response is too large: the call ends with a failure.
pub trait Handler: FnMut(&[u8], &mut [u8]) -> Result<usize, HandlerError> {}
impl<F: FnMut(&[u8], &mut [u8]) -> Result<usize, HandlerError>> Handler for F {}

/// A request that is answered later, from the thread that steps the server or from any other
/// thread. Dropping it ends the call with
/// [`CallFailure::Dropped`](crate::protocol::CallFailure::Dropped).
///
/// A held request uses no response buffer and no zone of the server, only an entry of a table. A
/// client has no more held requests than slots. The end of the client's slice meanwhile changes
/// nothing: the response is written to the slot of its call at any time.
#[must_use = "a request that is dropped is answered by a failure"]
#[derive(Debug)]
#[doc(alias = "DispatchThread")]
pub struct HeldRequest {
    /// Name of the request, and its sequence number in its slot; `None` once it is answered.
    id: Option<(HeldId, u32)>,
    payload: Vec<u8>,
    max_payload: usize,
    peer: Option<Peer>,
    arrived: Instant,
    is_unwanted: Arc<AtomicBool>,
    answers: Sender<Answer>,
}

/// The name of a held request: client, generation, slot.
type HeldId = (ClientId, u32, u8);

/// The server's side of a held request.
#[derive(Debug)]
struct Held {
    request: Request,
    /// Whether the client has disconnected, or gave up the call. The [`HeldRequest`] shares the
    /// flag.
    is_unwanted: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Answer {
    id: (HeldId, u32),
    outcome: Result<Vec<u8>, Status>,
}

impl HeldRequest {
    /// Returns the request's payload.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// Returns the maximum number of bytes of a response.
    #[must_use]
    pub const fn max_response(&self) -> usize {
        self.max_payload
    }

    /// Returns the client that called: the [`Peer`] that
    /// [`ServerOptions::events`](crate::ServerOptions::events) reports; `None` if no
    /// [`Server`](crate::Server) admitted the client.
    #[must_use]
    pub const fn peer(&self) -> Option<Peer> {
        self.peer
    }

    /// Returns the deadline of the caller, if this is the request of a method
    /// ([`service!`](crate::service!)) and its caller has a time limit. The limit is counted from
    /// the time at which the server took the request, so the caller's own deadline is not later
    /// than the result. The bytes of another request may look like the header of a method: call
    /// this only in a server of methods.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        Header::deadline(&self.payload, self.arrived)
    }

    /// Returns whether the caller waits for the response: the client is connected, according to the
    /// server's last step, and did not give up the call, which a [`Server`](crate::Server) checks
    /// once a millisecond, or in one of 1,024 steps.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        !self.is_unwanted.load(Ordering::Relaxed)
    }

    /// Answers the request. The response is sent with the server's next step. A client that has
    /// disconnected gets no response.
    ///
    /// # Errors
    /// [`CallFailure::ReplyTooLong`]: the response is larger than a slot. The caller's call ends
    /// with the same error.
    pub fn reply(mut self, response: impl Into<Vec<u8>>) -> Result<(), CallFailure> {
        let response = response.into();
        let len = response.len();
        if len > self.max_payload {
            self.end(Err(Status::ReplyTooLong));
            return Err(CallFailure::ReplyTooLong { len: Some(len) });
        }
        self.end(Ok(response));
        Ok(())
    }

    /// Refuses the request.
    pub fn refuse(mut self) {
        self.end(Err(Status::Refused));
    }

    pub(crate) fn take_payload(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.payload)
    }

    fn end(&mut self, outcome: Result<Vec<u8>, Status>) {
        if let Some(id) = self.id.take() {
            // If the handlers were dropped, the answer is not sent.
            let _sent = self.answers.send(Answer { id, outcome });
        }
    }
}

impl methods::Request for HeldRequest {
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.payload)
    }

    fn context(&self) -> methods::Context<'_> {
        let context = methods::Context::new()
            .with_deadline(self.deadline())
            .with_wanted(self);
        self.peer.map_or(context, |peer| {
            context.with_client(peer.number, Some(peer.address))
        })
    }
}

impl methods::Wanted for HeldRequest {
    fn is_wanted(&self) -> bool {
        self.is_wanted()
    }
}

impl Drop for HeldRequest {
    fn drop(&mut self) {
        self.end(Err(Status::Dropped));
    }
}

enum Action<'h> {
    Answer(Box<dyn Handler + 'h>),
    Hold(Box<dyn FnMut(HeldRequest) + 'h>),
}

/// Handlers by `rpc_type`, and the buffers of one worker.
#[doc(alias("RpcHandler", "WorkerConfig"))]
pub struct Handlers<'h> {
    /// Sorted by type.
    table: Vec<(u16, Action<'h>)>,
    request: Vec<u8>,
    response: Vec<u8>,
    answers: (Sender<Answer>, Receiver<Answer>),
    /// An answer for which no response buffer was free.
    late: Option<Answer>,
    held: BTreeMap<HeldId, Held>,
    /// Value of `Server::left` when the requests of disconnected clients were last dropped.
    left: u64,
}

impl fmt::Debug for Handlers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handlers")
            .field(
                "types",
                &Vec::from_iter(self.table.iter().map(|(rpc_type, _)| *rpc_type)),
            )
            .field("held", &self.held.len())
            .finish_non_exhaustive()
    }
}

/// The request whose handler runs. If the handler panics, the drop reports that to the caller.
struct Running<'a, M: Memory> {
    server: &'a mut Server<M>,
    out: &'a mut Vec<ServerOp>,
    request: &'a Request,
    now_ns: u64,
}

impl<M: Memory> Running<'_, M> {
    /// Answers the request, whose handler has returned.
    #[inline(always)]
    fn end(self, status: Status, payload: &[u8], clock: &mut impl FnMut() -> u64) {
        let mut running = ManuallyDrop::new(self);
        let Self {
            server,
            out,
            request,
            ..
        } = &mut *running;
        server.answer(request, status, payload, clock, out);
    }
}

impl<M: Memory> Drop for Running<'_, M> {
    #[cold]
    fn drop(&mut self) {
        self.server
            .reply(self.request, Err(Status::Dropped), self.now_ns, self.out);
    }
}

impl<'h> Handlers<'h> {
    /// Makes an empty table, for a server with payloads of at most `max_payload` bytes
    /// ([`Layout::max_payload`](crate::protocol::Layout::max_payload)).
    #[must_use]
    pub fn new(max_payload: usize) -> Self {
        Self {
            table: Vec::new(),
            request: vec![0; max_payload],
            response: vec![0; max_payload],
            answers: mpsc::channel(),
            late: None,
            held: BTreeMap::new(),
            left: 0,
        }
    }

    /// Installs `handler` for requests of this type, in place of an earlier handler.
    pub fn insert(&mut self, rpc_type: u16, handler: impl Handler + 'h) {
        self.put(rpc_type, Action::Answer(Box::new(handler)));
    }

    /// Installs `take` for requests of this type. `take` gets each request, to be answered later,
    /// in this or another thread. Answers are sent in later steps of the server. Each request
    /// allocates memory for its payload and its place in a table.
    pub fn insert_held(&mut self, rpc_type: u16, take: impl FnMut(HeldRequest) + 'h) {
        self.put(rpc_type, Action::Hold(Box::new(take)));
    }

    fn put(&mut self, rpc_type: u16, action: Action<'h>) {
        match self
            .table
            .binary_search_by_key(&rpc_type, |(rpc_type, _)| *rpc_type)
        {
            Ok(place) => self.table[place].1 = action,
            Err(place) => self.table.insert(place, (rpc_type, action)),
        }
    }

    /// Returns the number of held requests that are not answered.
    #[must_use]
    pub fn held(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn has_any_of(&self, client: ClientId) -> bool {
        self.held
            .range((client, 0, 0)..=(client, u32::MAX, u8::MAX))
            .next()
            .is_some()
    }

    /// Forgets a held request. The client of the request ends the call as not sent once it is
    /// informed that the server stops.
    pub(crate) fn send_back(&mut self, request: &HeldRequest) {
        if let Some((id, _)) = &request.id {
            self.held.remove(id);
        }
    }

    /// Ends the held requests as dropped, as long as response buffers are free. Answers that arrive
    /// later are discarded.
    pub(crate) fn give_up<M: Memory>(
        &mut self,
        server: &mut Server<M>,
        now_ns: u64,
        out: &mut Vec<ServerOp>,
    ) {
        self.held.retain(|_, held| {
            let is_answered = server.resume(&mut held.request);
            if is_answered {
                server.reply(&held.request, Err(Status::Dropped), now_ns, out);
            }
            !is_answered
        });
    }

    /// Marks the held requests of calls that their callers gave up.
    pub(crate) fn mark_given_up<M: Memory>(&self, server: &Server<M>) {
        for held in self.held.values() {
            if server.is_given_up(&held.request) {
                held.is_unwanted.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Answers the held requests that have an answer, then requests of the pool while the total is
    /// below `budget`. Returns the total. `now_ns` is the time at which the step began, and `clock`
    /// returns the time, in ns.
    pub fn step<M: Memory>(
        &mut self,
        server: &mut Server<M>,
        budget: usize,
        now_ns: u64,
        clock: impl FnMut() -> u64,
        out: &mut Vec<ServerOp>,
    ) -> usize {
        let is_idle = self.held.is_empty() && server.queued() == 0;
        if is_idle {
            0
        } else {
            self.answer_some(server, budget, now_ns, clock, out)
        }
    }

    /// Like [`step`](Self::step), if there is something to answer.
    #[inline(never)]
    fn answer_some<M: Memory>(
        &mut self,
        server: &mut Server<M>,
        budget: usize,
        now_ns: u64,
        mut clock: impl FnMut() -> u64,
        out: &mut Vec<ServerOp>,
    ) -> usize {
        let mut done = if !self.held.is_empty() {
            self.answer_held(server, now_ns, out)
        } else {
            0
        };
        let room = self.response.len().min(server.layout().max_payload());
        let Self {
            table,
            request: place,
            response,
            answers,
            held,
            ..
        } = self;
        let response = &mut response[..room];
        while done < budget
            && server.take_then(place, |server, payload, request| {
                let rpc_type = request.rpc_type;
                let place = table.binary_search_by_key(&rpc_type, |(rpc_type, _)| *rpc_type);
                match place.ok().and_then(|place| table.get_mut(place)) {
                    Some((_, Action::Answer(handler))) => {
                        let running = Running {
                            server,
                            out,
                            request,
                            now_ns,
                        };
                        let (status, payload) = match handler(payload, response) {
                            Ok(bytes) if bytes <= room => (Status::Ok, &response[..bytes]),
                            outcome => (failure(outcome), &[][..]),
                        };
                        running.end(status, payload, &mut clock);
                    }
                    Some((_, Action::Hold(take))) => {
                        let running = Running {
                            server,
                            out,
                            request,
                            now_ns,
                        };
                        hold(take, running, payload, room, held, &answers.0);
                    }
                    None => {
                        server.reply(request, Err(Status::UnknownType), now_ns, out);
                    }
                }
            })
        {
            done += 1;
        }
        done
    }

    /// Answers the held requests that have their answer by now, as long as response buffers are
    /// free. Returns their number.
    #[cold]
    fn answer_held<M: Memory>(
        &mut self,
        server: &mut Server<M>,
        now_ns: u64,
        out: &mut Vec<ServerOp>,
    ) -> usize {
        if self.left != server.left() {
            self.left = server.left();
            self.held.retain(|_, held| {
                let is_here = server.is_here(&held.request);
                held.is_unwanted.store(!is_here, Ordering::Relaxed);
                is_here
            });
        }
        let mut answered = 0;
        while let Some(answer) = self.late.take().or_else(|| self.answers.1.try_recv().ok()) {
            // If the request is no longer in `held`, its client has disconnected, or the request
            // was given up. If the sequence number differs, a client that breaks the rules has used
            // the slot again.
            let (id, sequence) = answer.id;
            let Some(held) = self
                .held
                .get_mut(&id)
                .filter(|held| held.request.id.sequence == sequence)
            else {
                continue;
            };
            if !server.resume(&mut held.request) {
                self.late = Some(answer);
                break;
            }
            server.reply(
                &held.request,
                answer.outcome.as_deref().map_err(|status| *status),
                now_ns,
                out,
            );
            self.held.remove(&id);
            answered += 1;
        }
        answered
    }
}

/// Returns the status of a handler that failed, or whose response is too large.
#[cold]
fn failure(outcome: Result<usize, HandlerError>) -> Status {
    outcome.map_or(Status::Refused, |_| Status::ReplyTooLong)
}

/// Gives a request to a handler that answers later.
#[cold]
#[inline(never)]
fn hold<M: Memory>(
    take: &mut dyn FnMut(HeldRequest),
    running: Running<'_, M>,
    payload: &[u8],
    max_payload: usize,
    held: &mut BTreeMap<HeldId, Held>,
    answers: &Sender<Answer>,
) {
    let mut request = running.request.clone();
    let id = (request.client, request.generation, request.id.slot);
    let is_unwanted = Arc::<AtomicBool>::default();
    take(HeldRequest {
        id: Some((id, request.id.sequence)),
        payload: payload.to_vec(),
        max_payload,
        peer: running.server.peer(request.client),
        arrived: Instant::now(),
        is_unwanted: Arc::clone(&is_unwanted),
        answers: answers.clone(),
    });
    // The answer, which another thread may have given by now, is taken in a later step.
    ManuallyDrop::new(running).server.hold(&mut request);
    held.insert(
        id,
        Held {
            request,
            is_unwanted,
        },
    );
}
