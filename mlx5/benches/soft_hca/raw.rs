//! The reference: messages between the two processes over shared memory only.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use copyrpc_shm::lane::{LaneRx, LaneTx, Slot};
use copyrpc_shm::memfd::{Memfd, MemfdId};

use crate::Wait;

const SLOTS: usize = 128;
/// Interval, in messages, at which the receiver reports its position to the sender, as in the
/// software HCA.
const CONSUMED_EVERY: u64 = 16;

/// A line, padded so that the processor's prefetcher does not load the next line.
#[repr(C, align(128))]
struct Line([AtomicU64; 8]);

/// The shared memory of both processes. It starts as zero bytes.
#[repr(C)]
struct Shared {
    /// Number of each process's arrivals at the meeting point.
    met: [Line; 2],
    /// A sequence word and 56 B of data, one line per sender.
    line: [Line; 2],
    /// The 64 B of data of each sender; the sequence word is in a line of its own (`sequence`).
    payload: [Line; 2],
    sequence: [Line; 2],
    window: Line,
    consumed: Line,
    slots: [Slot<[u64; 7]>; SLOTS],
}

pub(crate) struct Raw {
    memory: Memfd,
    me: usize,
    wait: Wait,
    met: u64,
    sent: u64,
    tx: LaneTx<[u64; 7]>,
    rx: LaneRx<[u64; 7]>,
}

impl Raw {
    pub(crate) fn create(wait: Wait) -> Self {
        let bytes = size_of::<Shared>().next_multiple_of(4096);
        let memory = Memfd::create("soft-hca-raw", bytes).unwrap();
        memory.commit(0..bytes).unwrap();
        Self::new(memory, 0, wait)
    }

    /// Returns the argument of [`attach`](Self::attach).
    pub(crate) fn describe(&self) -> String {
        let MemfdId {
            token,
            bytes,
            pid,
            fd,
        } = self.memory.id();
        format!("{token} {bytes} {pid} {fd}")
    }

    pub(crate) fn attach(text: &str, wait: Wait) -> Self {
        let n: Vec<u64> = text
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        let id = MemfdId {
            token: n[0],
            bytes: n[1],
            pid: n[2] as u32,
            fd: n[3] as u32,
        };
        Self::new(Memfd::attach(&id, true).unwrap(), 1, wait)
    }

    fn new(memory: Memfd, me: usize, wait: Wait) -> Self {
        // SAFETY: the mapping has the size of `Shared` and is not at address 0; only the address of
        // the slots is taken.
        let slots = unsafe {
            NonNull::new_unchecked(&raw mut (*memory.base().cast::<Shared>().as_ptr()).slots)
        }
        .cast();
        // SAFETY: the slots live as long as `memory`. Only process 1 publishes to the lane and only
        // process 0 takes from it, and `has_room` is called before `publish`.
        let (tx, rx) = unsafe {
            (
                LaneTx::new(slots, SLOTS as u64, 0),
                LaneRx::new(slots, SLOTS as u64, 0),
            )
        };
        Self {
            memory,
            me,
            wait,
            met: 0,
            sent: 0,
            tx,
            rx,
        }
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the memory is mapped and committed for the size of `Shared` and page-aligned.
        // `Shared` consists of atomics and slots, for which any bytes are valid.
        unsafe { self.memory.base().cast().as_ref() }
    }

    /// Waits until both processes have called this function the same number of times.
    pub(crate) fn meet(&mut self) {
        self.met += 1;
        let met = &self.shared().met;
        met[self.me].0[0].store(self.met, Ordering::Release);
        self.wait
            .until(|| met[1 - self.me].0[0].load(Ordering::Acquire) >= self.met);
    }

    /// Returns the word in which the receiver of a one-way measurement reports the number of
    /// received messages.
    pub(crate) fn window(&self) -> &AtomicU64 {
        &self.shared().window.0[0]
    }

    /// Makes `trips` round trips by `send` and `receive`: process 0 sends first, and process 1
    /// answers.
    #[inline(always)]
    fn trips(
        &mut self,
        trips: u64,
        send: impl Fn(&Shared, usize, u64),
        receive: impl Fn(&Shared, usize, u64, Wait),
    ) {
        let (me, wait) = (self.me, self.wait);
        for n in self.sent + 1..=self.sent + trips {
            if me == 0 {
                send(self.shared(), 0, n);
            }
            receive(self.shared(), 1 - me, n, wait);
            if me == 1 {
                send(self.shared(), 1, n);
            }
        }
        self.sent += trips;
    }

    #[inline(never)]
    pub(crate) fn line_trips(&mut self, trips: u64) {
        let send = |shared: &Shared, from: usize, n: u64| {
            let Line([sequence, payload @ ..]) = &shared.line[from];
            for word in payload {
                word.store(n, Ordering::Relaxed);
            }
            sequence.store(n, Ordering::Release);
        };
        let receive = |shared: &Shared, from: usize, n: u64, wait: Wait| {
            let Line([sequence, first, .., last]) = &shared.line[from];
            wait.until(|| sequence.load(Ordering::Acquire) == n);
            assert!(first.load(Ordering::Relaxed) == n && last.load(Ordering::Relaxed) == n);
        };
        self.trips(trips, send, receive);
    }

    #[inline(never)]
    pub(crate) fn two_line_trips(&mut self, trips: u64) {
        let send = |shared: &Shared, from: usize, n: u64| {
            for word in &shared.payload[from].0 {
                word.store(n, Ordering::Relaxed);
            }
            shared.sequence[from].0[0].store(n, Ordering::Release);
        };
        let receive = |shared: &Shared, from: usize, n: u64, wait: Wait| {
            wait.until(|| shared.sequence[from].0[0].load(Ordering::Acquire) == n);
            let Line([first, .., last]) = &shared.payload[from];
            assert!(first.load(Ordering::Relaxed) == n && last.load(Ordering::Relaxed) == n);
        };
        self.trips(trips, send, receive);
    }

    #[inline(never)]
    pub(crate) fn lane_send(&mut self, messages: u64) {
        let wait = self.wait;
        let consumed = NonNull::from(&self.shared().consumed.0[0]);
        // SAFETY: the word is in the shared memory, which lives as long as `self`.
        let consumed = unsafe { consumed.as_ref() };
        for _ in 0..messages {
            wait.until(|| self.tx.has_room(consumed));
            self.tx.publish([self.tx.position(); 7]);
        }
    }

    #[inline(never)]
    pub(crate) fn lane_receive(&mut self, messages: u64) {
        for _ in 0..messages {
            let at = self.rx.position();
            let mut message = None;
            self.wait.until(|| {
                message = self.rx.pop();
                message.is_some()
            });
            assert!(message.is_some_and(|[first, .., last]| first == at && last == at));
            if self.rx.position() % CONSUMED_EVERY == 0 {
                self.shared().consumed.0[0].store(self.rx.position(), Ordering::Release);
            }
        }
    }
}
