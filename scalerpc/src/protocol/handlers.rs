//! The worker: takes requests, runs the handler of their type, answers.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use crate::memory::Memory;
use crate::server::{Request, Server, ServerOp};
use crate::wire::Status;

/// A handler that cannot answer; its caller gets [`CallFailure::HandlerFailed`](crate::CallFailure::HandlerFailed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandlerError;

/// Answers requests of one type: gets the payload, and where the response goes. Returns the response's bytes; a number above the length of
/// `response` says that it would have been larger, and the caller is told so.
pub trait Handler: FnMut(&[u8], &mut [u8]) -> Result<usize, HandlerError> {}
impl<F: FnMut(&[u8], &mut [u8]) -> Result<usize, HandlerError>> Handler for F {}

/// So many runs in a row that take longer than a slice make a type long: a single one may be the operating system's doing.
pub const LONG_RUNS: u8 = 3;

struct Entry {
    handler: Box<dyn Handler>,
    /// Runs in a row that were longer than a slice.
    long_runs: u8,
}

/// Handlers by `rpc_type`, and the buffers of one worker.
pub struct Handlers {
    table: BTreeMap<u16, Entry>,
    request: Vec<u8>,
    response: Vec<u8>,
}

impl fmt::Debug for Handlers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handlers").field("types", &self.table.keys()).finish_non_exhaustive()
    }
}

/// A request whose handler runs. If the handler panics, its caller is told that it failed.
struct Running<'a, M: Memory> {
    server: &'a mut Server<M>,
    out: &'a mut VecDeque<ServerOp>,
    request: Option<Request>,
    now_ns: u64,
}

impl<M: Memory> Running<'_, M> {
    fn end(&mut self, outcome: Result<&[u8], Status>, now_ns: u64) {
        if let Some(request) = self.request.take() {
            // The caller is told of a response that is too large; one that has left, nothing.
            let _answered = self.server.reply(request, outcome, now_ns, self.out);
        }
    }
}

impl<M: Memory> Drop for Running<'_, M> {
    fn drop(&mut self) {
        self.end(Err(Status::Failed), self.now_ns);
    }
}

impl Handlers {
    /// No handlers, for a server with payloads of at most `max_payload` bytes ([`Layout::max_payload`](crate::Layout::max_payload)).
    #[must_use]
    pub fn new(max_payload: usize) -> Self {
        Self { table: BTreeMap::new(), request: vec![0; max_payload], response: vec![0; max_payload] }
    }

    /// Has requests of this type answered by `handler`, instead of another one if there was one.
    pub fn insert(&mut self, rpc_type: u16, handler: impl Handler + 'static) {
        self.table.insert(rpc_type, Entry { handler: Box::new(handler), long_runs: 0 });
    }

    /// Answers at most `budget` requests of the pool; how many. `clock` gives the time in ns: a handler that takes longer than a slice
    /// [`LONG_RUNS`] times in a row has its type marked, and later requests of it are for [`step_legacy`](Self::step_legacy).
    pub fn step<M: Memory>(
        &mut self,
        server: &mut Server<M>,
        budget: usize,
        mut clock: impl FnMut() -> u64,
        out: &mut VecDeque<ServerOp>,
    ) -> usize {
        let mut now_ns = clock();
        for done in 0..budget {
            let Some(request) = server.take(&mut self.request, now_ns, out) else { return done };
            // Between two runs are but two copies: one look at the clock serves as the end of one and the start of the next.
            now_ns = self.run(server, request, now_ns, &mut clock, out);
        }
        budget
    }

    /// Answers one request of the legacy lane; whether there was one.
    pub fn step_legacy<M: Memory>(&mut self, server: &mut Server<M>, mut clock: impl FnMut() -> u64, out: &mut VecDeque<ServerOp>) -> bool {
        let Some(request) = server.take_legacy(&mut self.request) else { return false };
        let now_ns = clock();
        self.run(server, request, now_ns, &mut clock, out);
        true
    }

    /// Answers one request, and takes note of how long that took; when it ended. One of the legacy lane is of a type that is marked already,
    /// which stays so.
    fn run<M: Memory>(
        &mut self,
        server: &mut Server<M>,
        request: Request,
        now_ns: u64,
        clock: &mut impl FnMut() -> u64,
        out: &mut VecDeque<ServerOp>,
    ) -> u64 {
        let (rpc_type, len) = (request.rpc_type(), request.len().min(self.request.len()));
        let mut running = Running { server, out, request: Some(request), now_ns };
        let Some(entry) = self.table.get_mut(&rpc_type) else {
            running.end(Err(Status::UnknownType), now_ns);
            return now_ns;
        };
        let answer = (entry.handler)(&self.request[..len], &mut self.response);
        let end_ns = clock();
        let outcome = match answer {
            Ok(bytes) => self.response.get(..bytes).ok_or(Status::ResponseTooLarge),
            Err(HandlerError) => Err(Status::Failed),
        };
        running.end(outcome, end_ns);
        let is_long = end_ns.saturating_sub(now_ns) > running.server.slice_ns();
        entry.long_runs = if is_long { entry.long_runs.saturating_add(1) } else { 0 };
        if entry.long_runs >= LONG_RUNS {
            running.server.mark_long(rpc_type);
        }
        end_ns
    }
}
