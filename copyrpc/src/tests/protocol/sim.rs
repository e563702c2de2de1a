//! Two [`Link`]s joined by simulated one-sided memory, and the checks that belong to the fabric:
//! no receive is missing (RNR), no live byte of a receive ring is overwritten, no byte of a send
//! ring changes between post and execution.

use std::collections::VecDeque;
use std::ptr::NonNull;

use crate::error::CloseReason;
use crate::link::past::Past;
use crate::link::{Emit, Event, Link, LinkConfig, Message, Request};
use crate::ring::{RecvBytes, RingSize, RingView};
use crate::wire::{
    FLOW_METADATA_SIZE, FlowWords, GIVEN_UP, HEADER_SIZE, Header, PublishedRecord, RESPONSE_FLAG,
    WRAP_MESSAGE_COUNT, padded,
};

/// Bytes of a ring that share one flag in [`End::live`].
const BLOCK: u64 = 32;

/// Ring memory at a fixed address, reached only by copy.
pub(crate) struct Memory {
    base: NonNull<[u8]>,
}

impl Memory {
    pub(crate) fn new(size: u64) -> Self {
        let bytes = vec![0xa5_u8; size as usize].into_boxed_slice();
        Self {
            base: NonNull::from(Box::leak(bytes)),
        }
    }

    pub(crate) fn view(&self, size: RingSize) -> RingView {
        assert_eq!(size.bytes(), self.base.len() as u64);
        // SAFETY: the memory lives until `self` is dropped, which is after the link that gets the
        // view (field order of `End`), and is reached through copies only.
        unsafe { RingView::new(self.base.cast(), size) }
    }

    pub(crate) fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        assert!(offset + len <= self.base.len() as u64);
        // SAFETY: the range was checked; `bytes` is other memory.
        unsafe {
            let source = self.base.cast::<u8>().add(offset as usize);
            std::ptr::copy_nonoverlapping(source.as_ptr(), bytes.as_mut_ptr(), bytes.len());
        }
        bytes
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(offset + bytes.len() as u64 <= self.base.len() as u64);
        // SAFETY: the range was checked; `bytes` is other memory.
        unsafe {
            let target = self.base.cast::<u8>().add(offset as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len());
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::leak` and is dropped once.
        drop(unsafe { Box::from_raw(self.base.as_ptr()) });
    }
}

/// A posted operation that the fabric has not executed.
enum Operation {
    /// A WRITE with immediate, and its bytes at the time of the post, to be compared with the bytes
    /// at its execution.
    WriteImm(Emit, Vec<u8>),
    Read,
    ReadActivity,
}

/// A completion of an operation that was signaled.
enum Completion {
    Write,
    Failed,
    Read([u8; FLOW_METADATA_SIZE]),
    ReadActivity(u64),
}

/// A batch as the fabric saw it: its range in the ring, which may be overwritten once the batch is
/// parsed, except for the ranges of its requests.
struct SeenBatch {
    offset: u64,
    bytes: u64,
    requests: Vec<(u64, u64)>,
}

pub(crate) struct End {
    pub(crate) link: Link<u64>,
    /// Requests that arrived and that the application has not received.
    pub(crate) inbox: VecDeque<Request>,
    /// Whether the application takes requests; otherwise they stay in the core.
    pub(crate) is_receiving: bool,
    /// Requests taken, or refused by the core.
    received: usize,
    send: Memory,
    recv: Memory,
    recv_view: RingView,
    record: PublishedRecord,
    /// The words before the last store to the record, where a READ may meet it (F3): the device
    /// mixes the bytes of old and new words.
    words_before: Option<FlowWords>,
    may_mix_bytes: bool,
    has_mixed: bool,
    /// The activity word of this end's context.
    pub(crate) activity: u64,
    posted: VecDeque<Operation>,
    recv_cq: VecDeque<u32>,
    send_cq: VecDeque<Completion>,
    srq_depth: u32,
    srq_posted: u32,
    /// Flag of each block of the receive ring that the receiver still needs.
    live: Vec<bool>,
    unparsed: VecDeque<SeenBatch>,
    /// Offset and length of each request in the ring, by arrival number.
    requests: VecDeque<(u64, u64)>,
}

/// The error of a post that was deferred because the send queue was full.
pub(crate) struct Deferred;

impl End {
    pub(crate) fn new(size: RingSize, config: &LinkConfig) -> Self {
        Self::with_past(size, config, &Past::default())
    }

    pub(crate) fn with_past(size: RingSize, config: &LinkConfig, past: &Past) -> Self {
        let (send, recv) = (Memory::new(size.bytes()), Memory::new(size.bytes()));
        let recv_view = recv.view(size);
        let record = PublishedRecord {
            words: FlowWords {
                consumer_pos: config.recv_start,
                credit: past.received.credit + config.local_credit,
                batches_received: past.received.batches,
            },
            heartbeat: past.heartbeat,
            batches_taken: past.received.batches as u32,
        };
        let srq_depth = (config.local_batches * 3).div_ceil(2);
        Self {
            link: Link::with_past(send.view(size), recv_view, config, past),
            inbox: VecDeque::new(),
            is_receiving: true,
            received: 0,
            send,
            recv,
            recv_view,
            record,
            words_before: None,
            may_mix_bytes: !config.reads_whole_words,
            has_mixed: false,
            activity: 0,
            posted: VecDeque::new(),
            recv_cq: VecDeque::new(),
            send_cq: VecDeque::new(),
            srq_depth,
            srq_posted: srq_depth,
            live: vec![false; (size.bytes() / BLOCK) as usize],
            unparsed: VecDeque::new(),
            requests: VecDeque::new(),
        }
    }

    /// Flushes; a post that `accept` refuses is deferred.
    pub(crate) fn flush(&mut self, mut accept: impl FnMut() -> bool) -> Result<(), Deferred> {
        let (send, posted) = (&self.send, &mut self.posted);
        let is_closing = self.link.is_closing();
        let outcome = self.link.flush(|emit: Emit| {
            if !accept() {
                return Err(Deferred);
            }
            let bytes = send.read(emit.offset, emit.bytes);
            posted.push_back(Operation::WriteImm(emit, bytes));
            Ok(())
        });
        if is_closing {
            // G2, G5: requests that were not received were refused.
            (self.received..self.requests.len()).for_each(|number| self.forget_request(number));
            self.received = self.requests.len();
        }
        outcome
    }

    pub(crate) fn publish(&mut self) {
        if let Some(words) = self.link.publish() {
            self.words_before = self.may_mix_bytes.then_some(self.record.words);
            self.record.words = words;
        }
    }

    /// Returns the bytes that a READ gets. Of two READs in a row, at most one is mixed with a
    /// store.
    fn read_record(&mut self) -> [u8; FLOW_METADATA_SIZE] {
        let mut bytes = self.record.encode();
        let has_mixed = std::mem::replace(&mut self.has_mixed, false);
        if let Some(words) = self.words_before.take().filter(|_| !has_mixed) {
            self.has_mixed = true;
            let before = PublishedRecord {
                words,
                ..self.record
            }
            .encode();
            // The first bytes of each word were copied before the store.
            (0..bytes.len())
                .filter(|at| at % 8 <= self.link.stats().reads as usize % 8)
                .for_each(|at| bytes[at] = before[at]);
        }
        bytes
    }

    /// Does the periodic work of a living owner, which takes place every few milliseconds.
    pub(crate) fn sweep(&mut self) {
        if let Some(heartbeat) = self.link.beat() {
            self.record.heartbeat = heartbeat;
        }
    }

    /// Publishes a block of credit more than the core granted.
    pub(crate) fn tell_more_credit(&mut self) {
        self.record.words.credit += BLOCK;
    }

    /// Publishes the heartbeat of an end without calls, as an owner does when a call has ended.
    pub(crate) fn publish_rest(&mut self) {
        if let Some(heartbeat) = self.link.rest() {
            self.record.heartbeat = heartbeat;
        }
    }

    pub(crate) fn read_if_wanted(&mut self, now_ns: u64) -> bool {
        let wanted = self.link.poll_read(now_ns);
        if wanted {
            self.posted.push_back(if self.link.asks_activity() {
                Operation::ReadActivity
            } else {
                Operation::Read
            });
            self.link.read_posted();
        }
        wanted
    }

    /// Takes the completions of the send queue. Called after [`End::poll`], as a driver does, so
    /// that batches that arrived before a failure are handled before it.
    pub(crate) fn take_send_completions(&mut self) {
        while let Some(completion) = self.send_cq.pop_front() {
            match completion {
                Completion::Write => _ = self.link.on_write_done(),
                Completion::Failed => self.link.close(CloseReason::Disconnected),
                Completion::Read(record) => _ = self.link.on_read_done(&record),
                Completion::ReadActivity(activity) => self.link.on_activity_read(activity),
            }
        }
    }

    /// Takes up to `max` receive completions, ends calls, refills the receive queue. `burst` is the
    /// number of completions that are announced before the messages are parsed.
    pub(crate) fn poll(
        &mut self,
        max: usize,
        burst: usize,
        mut ended: impl FnMut(u64, Ended),
    ) -> usize {
        let mut taken = 0;
        while taken < max && !self.recv_cq.is_empty() {
            let announced = burst.min(max - taken).min(self.recv_cq.len());
            for imm in self.recv_cq.drain(..announced) {
                self.link.on_imm(imm);
                self.record.batches_taken = self.link.batches_taken();
            }
            loop {
                // As a driver does: first the common kinds of messages, then all other events.
                let event = match self.link.next_message(self.is_receiving) {
                    Message::Reply {
                        user_data, payload, ..
                    } => Event::Ended {
                        user_data,
                        outcome: Ok(payload),
                    },
                    Message::Request { request, .. } => {
                        let name = self.link.hold(&request);
                        let request = self.link.held(name);
                        self.inbox.push_back(request);
                        self.received += 1;
                        continue;
                    }
                    Message::Done if !self.link.ends_calls() => break,
                    Message::Done | Message::Other => match self.link.next_event() {
                        Some(event) => event,
                        None => break,
                    },
                };
                match event {
                    Event::Requests(count) if self.is_receiving => {
                        // After this end's mark, the link returns no request (G5).
                        let before = self.inbox.len();
                        self.inbox
                            .extend((0..count).map_while(|_| self.link.next_request()));
                        self.received += self.inbox.len() - before;
                    }
                    Event::Requests(_) => {}
                    Event::Ended { user_data, outcome } => {
                        ended(
                            user_data,
                            outcome.map(|payload| self.recv_view.bytes(payload).to_vec()),
                        );
                    }
                }
            }
            for _ in 0..announced {
                self.forget_batch();
            }
            taken += announced;
        }
        if self.srq_posted * 3 < self.srq_depth * 2 {
            self.srq_posted = self.srq_depth;
        }
        taken
    }

    pub(crate) fn payload(&self, request: &Request) -> RecvBytes<'_> {
        self.recv_view.bytes(request.payload())
    }

    /// Notes that the bytes of the request with this arrival number are free.
    pub(crate) fn forget_request(&mut self, number: usize) {
        let (offset, bytes) = self.requests[number];
        self.set_live(offset, bytes, false);
    }

    fn forget_batch(&mut self) {
        let batch = self.unparsed.pop_front().unwrap();
        self.set_live(batch.offset, batch.bytes, false);
        for (offset, bytes) in batch.requests {
            self.set_live(offset, bytes, true);
            self.requests.push_back((offset, bytes));
        }
    }

    fn set_live(&mut self, offset: u64, bytes: u64, live: bool) {
        let blocks = (offset / BLOCK) as usize..((offset + bytes) / BLOCK) as usize;
        self.live[blocks].fill(live);
    }

    fn arrive(&mut self, emit: Emit, bytes: &[u8]) {
        assert!(self.srq_posted > 0, "RNR: a batch found no posted receive");
        self.srq_posted -= 1;
        let first = (emit.offset / BLOCK) as usize;
        for block in first..first + bytes.len() / BLOCK as usize {
            let live = &mut self.live[block];
            assert!(
                !*live,
                "overrun: live block {block} overwritten by {emit:?}"
            );
            *live = true;
        }
        self.recv.write(emit.offset, bytes);
        self.unparsed.push_back(SeenBatch {
            offset: emit.offset,
            bytes: emit.bytes,
            requests: requests_in(emit.offset, bytes),
        });
        self.recv_cq.push_back(emit.imm);
    }
}

/// Payload of a reply, or the reason why there is none.
pub(crate) type Ended = Result<Vec<u8>, crate::error::CallFailure>;

/// Returns the ring ranges of the requests in a batch, by a decoder that is independent of the
/// link's.
fn requests_in(offset: u64, batch: &[u8]) -> Vec<(u64, u64)> {
    let count = u32::from_le_bytes(batch[16..20].try_into().unwrap());
    let mut requests = Vec::new();
    let mut at = FLOW_METADATA_SIZE;
    if count == WRAP_MESSAGE_COUNT {
        assert_eq!(batch.len(), at, "a marker writes its metadata only");
        return requests;
    }
    for _ in 0..count {
        let header = Header::decode(batch[at..at + HEADER_SIZE].try_into().unwrap());
        let bytes = padded(u64::from(header.len));
        if header.call_id & RESPONSE_FLAG == 0 && header.piggyback != GIVEN_UP {
            requests.push((offset + at as u64, bytes));
        }
        at += bytes as usize;
    }
    assert_eq!(at, batch.len(), "messages fill the batch");
    requests
}

/// Executes the oldest operation that `ends[from]` posted. Returns whether there was one. The queue
/// pair of an end that has closed is gone: its operations are lost, and its peer's operations fail.
pub(crate) fn execute(ends: &mut [End; 2], from: usize) -> bool {
    let is_over = ends.each_ref().map(|end| end.link.closed().is_some());
    match ends[from].posted.pop_front() {
        None => false,
        Some(_) if is_over[from] => true,
        Some(_) if is_over[1 - from] => {
            ends[from].send_cq.push_back(Completion::Failed);
            true
        }
        Some(Operation::WriteImm(emit, bytes)) => {
            let now = ends[from].send.read(emit.offset, emit.bytes);
            assert_eq!(now, bytes, "send ring changed before {emit:?} executed");
            ends[1 - from].arrive(emit, &bytes);
            if emit.signal {
                ends[from].send_cq.push_back(Completion::Write);
            }
            true
        }
        Some(Operation::ReadActivity) => {
            let activity = ends[1 - from].activity;
            ends[from]
                .send_cq
                .push_back(Completion::ReadActivity(activity));
            true
        }
        Some(Operation::Read) => {
            let record = ends[1 - from].read_record();
            ends[from].send_cq.push_back(Completion::Read(record));
            true
        }
    }
}

/// Prints the text that reproduces a failed run.
pub(crate) struct OnFailure(pub String);

impl Drop for OnFailure {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed run: {}", self.0);
        }
    }
}
