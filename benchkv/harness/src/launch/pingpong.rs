//! The lowest baseline: one cache line each way between two processes, only over shared memory.
//!
//! A message consists of 32 bytes and a sequence word in one line, which the other side polls. The
//! other side reads the bytes and answers with a line of its own. One mode uses the same two lines
//! for all messages; the other mode uses several lines in turn, like a ring. The faster mode
//! counts. No round trip of a message between two cores can be faster.

use std::io;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use copyrpc_shm::memfd::{Memfd, MemfdId};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::affinity::{AffinityError, pin_current_thread};
use crate::clock::Clock;
use crate::hist::{LatencyHistogram, LatencySummary};
use crate::launch::child::OwnChild;
use crate::launch::role_text::RoleText;

/// Bytes of a message, without its sequence word.
pub const MESSAGE_BYTES: usize = 32;

/// Round trips between two readings of the clock.
const BLOCK_TRIPS: u64 = 64;
/// Number of reads of the line between two checks for other events.
const LOOKS: u32 = 1 << 16;
/// Maximum time to wait for an answer, in ns. After it the other process is taken for stopped.
const ANSWER_LIMIT_NS: u64 = 5_000_000_000;
/// The sequence number that ends the measurement.
const END: u64 = u64::MAX;
/// Number of lines in each direction that are used in turn.
const ROTATING_LINES: u64 = 32;

/// The parameters of the baseline.
#[derive(Debug, Clone, Copy)]
pub struct PingPong {
    /// The core of the measuring thread, to which this thread is pinned already, and the core of
    /// the other process. `None`: neither is pinned, and both yield their core while they wait.
    pub cores: Option<(usize, usize)>,
    /// Length of the measurement: half of it with fixed lines, half with lines used in turn. A
    /// warm-up of a quarter of this length precedes it.
    pub duration: Duration,
}

/// The result of the faster one of the two modes, by the median.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PingPongResult {
    /// Whether the two processes had a core each.
    pub pinned: bool,
    /// Number of lines in each direction: 1, or 32 that are used in turn.
    pub lines: u64,
    /// Round-trip times; each value is the mean of 64 trips.
    pub latency_ns: LatencySummary,
}

/// A line, padded so that the processor's prefetcher does not load the next line.
#[repr(C, align(128))]
struct Line {
    sequence: AtomicU64,
    words: [AtomicU64; MESSAGE_BYTES / 8],
}

/// The memory of both processes; it starts as zero bytes.
#[repr(C)]
struct Shared {
    /// Number of lines that are used in turn: a power of two, at most [`ROTATING_LINES`]. Written
    /// before the other process is started.
    lines: AtomicU64,
    ping: [Line; ROTATING_LINES as usize],
    pong: [Line; ROTATING_LINES as usize],
}

const SHARED_BYTES: usize = 12 << 10;
const _: () = assert!(size_of::<Shared>() <= SHARED_BYTES);

fn shared(memory: &Memfd) -> &Shared {
    // SAFETY: the mapping is page-aligned, has SHARED_BYTES and lives as long as `memory`; a
    // `Shared` is atomics only, valid for any bytes.
    unsafe { memory.base().cast().as_ref() }
}

impl Line {
    #[inline(always)]
    fn send(&self, sequence: u64) {
        for word in &self.words {
            word.store(sequence, Ordering::Relaxed);
        }
        // Release: a reader that sees the number also sees the message.
        self.sequence.store(sequence, Ordering::Release);
    }

    /// Waits for a sequence number other than `last`. Returns `None` after [`LOOKS`] reads.
    #[inline(always)]
    fn receive(&self, last: u64, give_way: bool) -> Option<u64> {
        for _ in 0..LOOKS {
            let sequence = self.sequence.load(Ordering::Acquire);
            if sequence != last {
                return Some(sequence);
            }
            if give_way {
                std::thread::yield_now();
            }
        }
        None
    }

    #[inline(always)]
    fn is_whole(&self, sequence: u64) -> bool {
        let mut words = self.words.iter();
        words.all(|word| word.load(Ordering::Relaxed) == sequence)
    }
}

impl Shared {
    fn lines(&self) -> u64 {
        self.lines.load(Ordering::Relaxed)
    }
}

/// Returns the line of message `sequence` if the first `count` of `lines` are used in turn, and the
/// sequence number that the line had before.
#[inline(always)]
fn line(lines: &[Line; ROTATING_LINES as usize], sequence: u64, count: u64) -> (&Line, u64) {
    // The index is always below the number of lines. The clamp shows this to the compiler, and
    // limits a number that another process wrote.
    let index = sequence % count.clamp(1, ROTATING_LINES) % ROTATING_LINES;
    (&lines[index as usize], sequence.saturating_sub(count))
}

impl PingPong {
    /// Starts the other process, measures, and ends the process, once for each of the two modes.
    ///
    /// # Errors
    /// The other process, or the memory between the two, failed; no process is left in either case.
    pub fn measure(&self, clock: &Clock) -> Result<PingPongResult, Failure> {
        let measure = |lines| {
            let measured = self.measure_lines(lines, clock);
            measured.map_err(|why| format!("the ping-pong baseline failed: {why}"))
        };
        let (fixed, rotating) = (measure(1)?, measure(ROTATING_LINES)?);
        Ok(if rotating.latency_ns.p50 < fixed.latency_ns.p50 {
            rotating
        } else {
            fixed
        })
    }

    fn measure_lines(&self, lines: u64, clock: &Clock) -> Result<PingPongResult, Failure> {
        let memory = Memfd::create("ping-pong", SHARED_BYTES).map_err(io::Error::other)?;
        memory.commit(0..SHARED_BYTES).map_err(io::Error::other)?;
        let shared = shared(&memory);
        shared.lines.store(lines, Ordering::Relaxed);
        let (memory_id, core) = (memory.id(), self.cores.map(|(_, core)| core));
        let role = RoleText::PingPong {
            memory: memory_id,
            core,
        }
        .encode();
        // The child needs the socket only as a proof that this process started it.
        let (_socket, theirs) = UnixStream::pair()?;
        let mut peer = OwnChild::spawn(&role, &[], &[], theirs, Stdio::null())?;
        let result = self.run(shared, &mut peer, clock);
        shared.ping.iter().for_each(|line| line.send(END));
        result
    }

    fn run(
        &self,
        shared: &Shared,
        peer: &mut OwnChild,
        clock: &Clock,
    ) -> Result<PingPongResult, Failure> {
        let duration_ns = self.duration.as_nanos() as u64 / 2;
        let start_ns = clock.now_ns() + duration_ns / 4;
        let lines = shared.lines();
        let mut latencies = LatencyHistogram::new();
        let mut sequence = 0;
        loop {
            let block_ns = clock.now_ns();
            for _ in 0..BLOCK_TRIPS {
                sequence += 1;
                line(&shared.ping, sequence, lines).0.send(sequence);
                self.wait(line(&shared.pong, sequence, lines), sequence, peer, clock)?;
            }
            let now_ns = clock.now_ns();
            if block_ns >= start_ns {
                latencies.record((now_ns - block_ns) / BLOCK_TRIPS);
            }
            if now_ns >= start_ns + duration_ns && latencies.count() > 0 {
                return Ok(PingPongResult {
                    pinned: self.cores.is_some(),
                    lines,
                    latency_ns: latencies.summary(),
                });
            }
        }
    }

    #[inline(always)]
    fn wait(
        &self,
        (pong, last): (&Line, u64),
        sequence: u64,
        peer: &mut OwnChild,
        clock: &Clock,
    ) -> Result<(), Failure> {
        let silent = |how| Err(format!("the other process {how}").into());
        let mut since_ns = None;
        loop {
            match pong.receive(last, self.cores.is_none()) {
                Some(answer) if answer == sequence && pong.is_whole(sequence) => return Ok(()),
                Some(_) => return silent("answered something else"),
                None if peer.ended()?.is_some() => return silent("has ended"),
                None => {
                    let now_ns = clock.now_ns();
                    if now_ns - *since_ns.get_or_insert(now_ns) > ANSWER_LIMIT_NS {
                        return silent("does not answer");
                    }
                }
            }
        }
    }
}

/// The other process of the baseline.
#[derive(Debug)]
pub(crate) struct PingPongPeer {
    memory: MemfdId,
    core: Option<usize>,
}

impl PingPongPeer {
    pub(crate) const fn new(memory: MemfdId, core: Option<usize>) -> Self {
        Self { memory, core }
    }

    /// Answers messages until the sequence number [`END`] arrives. If the measuring process ends
    /// before that, the kernel ends this process.
    pub(crate) fn serve(self) -> io::Result<()> {
        if let Some(core) = self.core {
            pin_current_thread(core).map_err(|error: AffinityError| io::Error::other(error))?;
        }
        let memory = Memfd::attach(&self.memory, true).map_err(io::Error::other)?;
        if memory.len() < SHARED_BYTES {
            return Err(io::Error::other("the memory is too small for a ping-pong"));
        }
        let shared = shared(&memory);
        let lines = shared.lines();
        let mut next = 1;
        loop {
            let (ping, last) = line(&shared.ping, next, lines);
            match ping.receive(last, self.core.is_none()) {
                Some(END) => return Ok(()),
                Some(sequence) => {
                    // An incomplete message is not answered. The other side then reports that the
                    // answer is missing.
                    if sequence == next && ping.is_whole(sequence) {
                        line(&shared.pong, sequence, lines).0.send(sequence);
                    }
                    next += 1;
                }
                None => {}
            }
        }
    }
}
