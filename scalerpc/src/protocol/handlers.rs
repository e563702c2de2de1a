//! The worker: takes requests, runs the handler of their type, answers.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::mpsc::{self, Receiver, Sender};

use crate::protocol::memory::Memory;
use crate::protocol::request::Request;
use crate::protocol::server::{ReplyFailure, Server, ServerOp};
use crate::protocol::wire::Status;

/// A handler that cannot answer; its caller gets [`CallFailure::HandlerFailed`](crate::protocol::CallFailure::HandlerFailed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandlerError;

/// Answers requests of one type: gets the payload, and where the response goes. Returns the response's bytes; a number above the length of
/// `response` says that it would have been larger, and the caller is told so.
pub trait Handler: FnMut(&[u8], &mut [u8]) -> Result<usize, HandlerError> {}
impl<F: FnMut(&[u8], &mut [u8]) -> Result<usize, HandlerError>> Handler for F {}

/// So many runs in a row that take longer than a slice make a type long: a single one may be the operating system's doing.
pub const LONG_RUNS: u8 = 3;

/// A request whose answer comes later, from the thread that steps the server or from any other. Dropping it answers that the handler failed.
///
/// It keeps nothing of the server's but a place in the table of its client, who may call no more than its slots allow. A context switch
/// meanwhile changes nothing: the response goes to the slot of its call whenever it comes.
#[must_use = "a request that is dropped is answered by a failure"]
#[derive(Debug)]
pub struct HeldRequest {
    request: Option<Request>,
    payload: Vec<u8>,
    max_payload: usize,
    answers: Sender<Answer>,
}

/// What was said to a request that was held.
#[derive(Debug)]
struct Answer {
    request: Request,
    outcome: Result<Vec<u8>, Status>,
}

impl HeldRequest {
    /// The request's payload.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.payload
    }

    /// The maximum number of bytes of a response.
    #[must_use]
    pub const fn max_response(&self) -> usize {
        self.max_payload
    }

    /// Answers it. The response leaves with the server's next step; a client that has left gets none.
    ///
    /// # Errors
    /// The response is larger than a slot, which the caller is told.
    pub fn reply(mut self, response: impl Into<Vec<u8>>) -> Result<(), ReplyFailure> {
        let response = response.into();
        let (len, max) = (response.len(), self.max_payload);
        if len > max {
            self.end(Err(Status::ResponseTooLarge));
            return Err(ReplyFailure::TooLarge { len, max });
        }
        self.end(Ok(response));
        Ok(())
    }

    fn end(&mut self, outcome: Result<Vec<u8>, Status>) {
        if let Some(request) = self.request.take() {
            // If the handlers are gone, nobody answers any more.
            let _sent = self.answers.send(Answer { request, outcome });
        }
    }
}

impl Drop for HeldRequest {
    fn drop(&mut self) {
        self.end(Err(Status::Failed));
    }
}

/// What is done with requests of a type.
enum Action<'h> {
    Answer(Box<dyn Handler + 'h>),
    Hold(Box<dyn FnMut(HeldRequest) + 'h>),
}

struct Entry<'h> {
    rpc_type: u16,
    action: Action<'h>,
    /// Runs in a row that were longer than a slice.
    long_runs: u8,
}

/// Handlers by `rpc_type`, and the buffers of one worker.
pub struct Handlers<'h> {
    /// Sorted by type.
    table: Vec<Entry<'h>>,
    request: Vec<u8>,
    response: Vec<u8>,
    answers: (Sender<Answer>, Receiver<Answer>),
    /// An answer that found no room.
    late: Option<Answer>,
    /// Requests that were held and are not answered.
    held: usize,
}

impl fmt::Debug for Handlers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handlers")
            .field("types", &Vec::from_iter(self.table.iter().map(|entry| entry.rpc_type)))
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

/// The request whose handler runs. If the handler panics, its caller is told that it failed.
struct Running<'a, M: Memory> {
    server: &'a mut Server<M>,
    out: &'a mut Vec<ServerOp>,
    request: &'a Request,
    now_ns: u64,
}

impl<M: Memory> Running<'_, M> {
    /// Answers the request: it does not run any more.
    #[inline(always)]
    fn end(self, status: Status, payload: &[u8], now_ns: u64) {
        let mut running = ManuallyDrop::new(self);
        let Self { server, out, request, .. } = &mut *running;
        // The caller is told of a response that is too large; one that has left, nothing.
        let _answered = server.answer(request, status, payload, now_ns, out);
    }
}

impl<M: Memory> Drop for Running<'_, M> {
    #[cold]
    fn drop(&mut self) {
        let _answered = self.server.reply(self.request.clone(), Err(Status::Failed), self.now_ns, self.out);
    }
}

impl<'h> Handlers<'h> {
    /// No handlers, for a server with payloads of at most `max_payload` bytes ([`Layout::max_payload`](crate::protocol::Layout::max_payload)).
    #[must_use]
    pub fn new(max_payload: usize) -> Self {
        Self {
            table: Vec::new(),
            request: vec![0; max_payload],
            response: vec![0; max_payload],
            answers: mpsc::channel(),
            late: None,
            held: 0,
        }
    }

    /// Has requests of this type answered by `handler`, instead of another one if there was one.
    pub fn insert(&mut self, rpc_type: u16, handler: impl Handler + 'h) {
        self.put(rpc_type, Action::Answer(Box::new(handler)));
    }

    /// Gives requests of this type to `take`, which has them answered later: by itself, or by another thread. Their answers leave with the steps
    /// that follow. Allocates for each of them.
    pub fn insert_held(&mut self, rpc_type: u16, take: impl FnMut(HeldRequest) + 'h) {
        self.put(rpc_type, Action::Hold(Box::new(take)));
    }

    fn put(&mut self, rpc_type: u16, action: Action<'h>) {
        let entry = Entry { rpc_type, action, long_runs: 0 };
        match self.table.binary_search_by_key(&rpc_type, |entry| entry.rpc_type) {
            Ok(place) => self.table[place] = entry,
            Err(place) => self.table.insert(place, entry),
        }
    }

    /// Requests that were held and are not answered.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.held
    }

    /// Answers at most `budget` requests of the pool; how many, those included that were held and are answered now. `clock` gives the time in ns: a
    /// handler that takes longer than a slice [`LONG_RUNS`] times in a row has its type marked, and later requests of it are for
    /// [`step_legacy`](Self::step_legacy).
    pub fn step<M: Memory>(
        &mut self,
        server: &mut Server<M>,
        budget: usize,
        mut clock: impl FnMut() -> u64,
        out: &mut Vec<ServerOp>,
    ) -> usize {
        if self.held == 0 && server.queued() == 0 {
            return 0;
        }
        let mut now_ns = clock();
        let answered = if self.held > 0 { self.answer_held(server, now_ns, out) } else { 0 };
        for done in answered..budget {
            let Some(request) = server.take(&mut self.request, now_ns, out) else { return done };
            // Between two runs are but two copies: one look at the clock serves as the end of one and the start of the next.
            now_ns = self.run(server, request, now_ns, &mut clock, out);
        }
        budget.max(answered)
    }

    /// Answers the requests that were held and have their answer by now, as long as there are buffers for the responses; how many.
    #[cold]
    fn answer_held<M: Memory>(&mut self, server: &mut Server<M>, now_ns: u64, out: &mut Vec<ServerOp>) -> usize {
        let before = self.held;
        while let Some(mut answer) = self.late.take().or_else(|| self.answers.1.try_recv().ok()) {
            if !server.resume(&mut answer.request) {
                self.late = Some(answer);
                break;
            }
            self.held -= 1;
            // Too large is none of them; who has left gets nothing.
            let _answered = server.reply(answer.request, answer.outcome.as_deref().map_err(|status| *status), now_ns, out);
        }
        before - self.held
    }

    /// Answers one request of the legacy lane; whether there was one.
    pub fn step_legacy<M: Memory>(&mut self, server: &mut Server<M>, mut clock: impl FnMut() -> u64, out: &mut Vec<ServerOp>) -> bool {
        let Some(request) = server.take_legacy(&mut self.request) else { return false };
        let now_ns = clock();
        self.run(server, request, now_ns, &mut clock, out);
        true
    }

    /// Answers one request, and takes note of how long that took. Returns when it ended. One of the legacy lane is of a type that is marked
    /// already, which stays so.
    #[inline(always)]
    fn run<M: Memory>(
        &mut self,
        server: &mut Server<M>,
        mut request: Request,
        now_ns: u64,
        clock: &mut impl FnMut() -> u64,
        out: &mut Vec<ServerOp>,
    ) -> u64 {
        let (rpc_type, len) = (request.rpc_type(), request.len().min(self.request.len()));
        let place = self.table.binary_search_by_key(&rpc_type, |entry| entry.rpc_type);
        let Some(entry) = place.ok().and_then(|place| self.table.get_mut(place)) else {
            // One that has left is told nothing.
            let _answered = server.reply(request, Err(Status::UnknownType), now_ns, out);
            return now_ns;
        };
        let handler = match &mut entry.action {
            Action::Answer(handler) => handler,
            Action::Hold(take) => {
                server.hold(&mut request);
                self.held += 1;
                let (payload, max_payload) = (self.request[..len].to_vec(), self.response.len());
                take(HeldRequest { request: Some(request), payload, max_payload, answers: self.answers.0.clone() });
                return now_ns;
            }
        };
        let slice_ns = server.slice_ns();
        let running = Running { server: &mut *server, out, request: &request, now_ns };
        let answer = handler(&self.request[..len], &mut self.response);
        let end_ns = clock();
        let (status, payload) = match answer.map(|bytes| self.response.get(..bytes)) {
            Ok(Some(payload)) => (Status::Ok, payload),
            Ok(None) => (Status::ResponseTooLarge, &[][..]),
            Err(HandlerError) => (Status::Failed, &[][..]),
        };
        running.end(status, payload, end_ns);
        if end_ns.saturating_sub(now_ns) <= slice_ns {
            entry.long_runs = 0;
            return end_ns;
        }
        entry.long_runs = entry.long_runs.saturating_add(1);
        if entry.long_runs >= LONG_RUNS {
            server.mark_long(rpc_type);
        }
        end_ns
    }
}
