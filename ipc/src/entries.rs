//! The clients of a server: entries with generations in its region. A client holds its entry by a
//! lock that the kernel releases when the client dies.
//!
//! | word | writer | reader | pairing |
//! |---|---|---|---|
//! | `Entry::session` free -> taken -> left | the client that holds the entry's lock | server | **C1**: AcqRel CAS / Acquire load |
//! | `Entry::session` taken or left -> evicted or free | server | clients | **C2**: Release store or CAS / Acquire load: the entry's memory is reset |
//! | `Entry::session` free or taken -> stopped | server at its end | clients | **C6**: AcqRel CAS / Acquire load: all answers to the client are visible |
//! | `departures` | clients `fetch_add` after leaving | server | **C3**: Release / Acquire: the departed entry is seen |
//!
//! **C4**: a client takes the byte lock `1 + entry` of the region's file first and the entry
//! second, so a taken entry whose lock is free belongs to a dead client. A client stopped or killed
//! at any instruction affects its own entry only, and only the server makes an entry free again,
//! after it has reset the client's memory. (If a client's own process opens and closes the region's
//! file by other means, the client loses its lock, is taken for dead, and is
//! [disconnected](Holding::lasts).)

use std::ptr::NonNull;

use copyrpc_shm::lock::{ByteLock, LockError, LockFile};
use copyrpc_shm::ready::ARMED;
use copyrpc_shm::sleep::Sleep;
use copyrpc_shm::sync::{AtomicU32, AtomicU64, FIRST, LightBarrier, Ordering};

const FREE: u64 = 0;
const TAKEN: u64 = 1;
const LEFT: u64 = 2;
const EVICTED: u64 = 3;
/// A value that is not a state of an entry: see [`Holding::end`].
const NEVER: u64 = 4;
const STOPPED: u64 = 5;

fn word(generation: u32, state: u64) -> u64 {
    u64::from(generation) << 32 | state
}

/// The cache line of a client's entry, 64 B. Zeroed bytes are a free entry.
#[derive(Debug)]
#[repr(C, align(64))]
struct Entry {
    /// Generation in the high half, state in the low half.
    session: AtomicU64,
    /// The flag that makes the client announce itself: see [`Entries::armed`].
    armed: AtomicU32,
    /// The client's process, for people who inspect the memory; no decision depends on it.
    pid: AtomicU32,
    sleep: Sleep,
}

/// The line before the entries, 64 B.
#[derive(Debug)]
#[repr(C, align(64))]
struct Head {
    departures: AtomicU64,
    sleep: Sleep,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Head>() == 64);
    assert!(size_of::<Entry>() == 64);
    assert!(std::mem::offset_of!(Entry, session) == 0);
    assert!(std::mem::offset_of!(Entry, armed) == 8);
    assert!(std::mem::offset_of!(Entry, pid) == 12);
    assert!(std::mem::offset_of!(Entry, sleep) == 16);
    assert!(std::mem::offset_of!(Head, sleep) == 8);
};

/// A client's hold on its entry. [`Entries::leave`] ends it. If the session is only dropped, the
/// server takes the client for dead, with the same outcome a little later.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) entry: usize,
    /// A number that distinguishes this holder of the entry from earlier holders.
    pub(crate) generation: u32,
    _lock: ByteLock,
}

/// A view of an entry by which either end checks, with every message, that a holder still has the
/// entry. [`Entries::held_by`] returns it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holding {
    entry: NonNull<Entry>,
    /// The session word as long as the holder has the entry.
    word: u64,
    barrier: LightBarrier,
}

// SAFETY: a `Holding` is a view of shared atomics, which any thread may use. The entry stays mapped
// as long as the view is used (contract of `Entries::new`).
unsafe impl Send for Holding {}

impl Holding {
    #[inline(always)]
    fn entry(&self) -> &Entry {
        // SAFETY: the entry stays mapped as long as this view is used (contract of `Entries::new`),
        // and consists of atomics.
        unsafe { self.entry.as_ref() }
    }

    /// Returns whether the holder has the entry. Costs one load of a line that is rarely written.
    #[inline(always)]
    pub(crate) fn lasts(&self) -> bool {
        // C1, C2: pairs with every change of the entry's state.
        self.entry().session.load(Ordering::Acquire) == self.word
    }

    /// Returns whether the server has ended in good order, and has answered all that it took from
    /// the holder.
    pub(crate) fn is_stopped(&self) -> bool {
        // C6: if this is `true`, all answers of the server are visible.
        self.entry().session.load(Ordering::Acquire) == self.word - TAKEN + STOPPED
    }

    /// Returns the reason why the holder has lost the entry, which is free for others soon.
    pub(crate) fn reason_of_end(&self) -> &'static str {
        match u64::from(self.entry().session.load(Ordering::Acquire) as u32) {
            LEFT => "the client has left",
            EVICTED => "the client broke the protocol",
            _ => "the client has died",
        }
    }

    /// Makes [`lasts`](Self::lasts) return `false` from now on, whatever the entry contains later.
    pub(crate) fn end(&mut self) {
        self.word = NEVER;
    }

    #[inline(always)]
    pub(crate) fn armed(&self) -> &AtomicU32 {
        &self.entry().armed
    }

    /// Returns whether the holder, which has published a request, must announce itself.
    #[inline(always)]
    pub(crate) fn must_announce(&self) -> bool {
        // R1 (`docs/shm-protocols.md`): the request is published before the flag is loaded.
        self.barrier.execute();
        self.armed().load(Ordering::Relaxed) == ARMED
    }

    /// Wakes the holder if it sleeps, after the server has published a response.
    #[inline(always)]
    pub(crate) fn wake(&self) {
        self.sleep().wake_behind(self.barrier);
    }

    #[inline(always)]
    pub(crate) fn sleep(&self) -> &Sleep {
        &self.entry().sleep
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Entries {
    head: NonNull<Head>,
    count: usize,
}

// SAFETY: `Entries` is a view of shared atomics, which any thread may use. The memory stays mapped
// as long as the view is used (contract of `new`).
unsafe impl Send for Entries {}
// SAFETY: as above; `&Entries` gives access to atomics only.
unsafe impl Sync for Entries {}

impl Entries {
    /// Returns the number of bytes of the head and `count` entries, a line each.
    pub(crate) const fn bytes(count: usize) -> usize {
        size_of::<Head>() + count * size_of::<Entry>()
    }

    /// Makes a view of the entries at `base`.
    ///
    /// # Safety
    /// `base` is aligned to 64 and points to [`bytes(count)`](Self::bytes) bytes, which were zeroed
    /// before the first use and stay mapped as long as this value or a copy is used.
    pub(crate) const unsafe fn new(base: NonNull<u8>, count: usize) -> Self {
        Self {
            head: base.cast(),
            count,
        }
    }

    /// Makes a free entry, for models.
    #[cfg(all(test, loom))]
    pub(crate) fn leaked() -> Self {
        #[repr(C)]
        struct One(Head, Entry);
        let head = Head {
            departures: AtomicU64::new(0),
            sleep: Sleep::default(),
        };
        let one = Box::leak(Box::new(One(
            head,
            Entry {
                session: AtomicU64::new(word(FIRST, FREE)),
                armed: AtomicU32::new(0),
                pid: AtomicU32::new(0),
                sleep: Sleep::default(),
            },
        )));
        // SAFETY: the memory is leaked, and the entry directly follows the head, as both are whole
        // lines.
        unsafe { Self::new(NonNull::from(one).cast(), 1) }
    }

    /// Initialises the entries of a new region: all are free, and all lanes are armed.
    pub(crate) fn prepare(&self) {
        for entry in (0..self.count).filter_map(|entry| self.entry(entry)) {
            entry.session.store(word(FIRST, FREE), Ordering::Relaxed);
            entry.armed.store(ARMED, Ordering::Relaxed);
        }
    }

    fn head(&self) -> &Head {
        // SAFETY: the head begins at `base` of `new`, and stays mapped as long as this value is
        // used (contract of `new`).
        unsafe { self.head.as_ref() }
    }

    fn entry(&self, entry: usize) -> Option<&Entry> {
        if entry >= self.count {
            return None;
        }
        // SAFETY: the index was checked, so the entry lies in the memory after the head, which
        // stays mapped as long as this value is used (contract of `new`).
        Some(unsafe { self.head.add(1).cast::<Entry>().add(entry).as_ref() })
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Client: takes a free entry. Returns `None` if all entries are taken.
    ///
    /// # Errors
    /// The lock that proves the client alive cannot be taken; nothing stays taken.
    pub(crate) fn join(&self, file: &LockFile) -> Result<Option<Session>, LockError> {
        for index in 0..self.count {
            let Some(entry) = self.entry(index) else {
                break;
            };
            let free = entry.session.load(Ordering::Acquire);
            if free as u32 != FREE as u32 {
                continue;
            }
            let lock = match file.try_lock(1 + index as u64) {
                Ok(lock) => lock,
                Err(LockError::Held { .. }) => continue,
                Err(error) => return Err(error),
            };
            let generation = ((free >> 32) as u32).wrapping_add(1);
            // C1: the server sees the client. C2: the client sees that the entry's memory is reset.
            if entry
                .session
                .compare_exchange(
                    free,
                    word(generation, TAKEN),
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                )
                .is_ok()
            {
                entry.pid.store(std::process::id(), Ordering::Relaxed);
                return Ok(Some(Session {
                    entry: index,
                    generation,
                    _lock: lock,
                }));
            }
        }
        Ok(None)
    }

    /// Returns the view by which the holder `generation` of `entry` is checked; `None` if no entry
    /// has this number. Registers this process for barriers, which may take long the first time.
    pub(crate) fn held_by(&self, entry: usize, generation: u32) -> Option<Holding> {
        let entry = NonNull::from(self.entry(entry)?);
        let barrier = LightBarrier::of_process();
        Some(Holding {
            entry,
            word: word(generation, TAKEN),
            barrier,
        })
    }

    /// Client: gives up its entry. After that, the client must not write to the entry's memory.
    pub(crate) fn leave(&self, session: Session) {
        let Some(entry) = self.entry(session.entry) else {
            return;
        };
        let taken = word(session.generation, TAKEN);
        let left = word(session.generation, LEFT);
        // C1. The exchange fails if the client was evicted.
        if entry
            .session
            .compare_exchange(taken, left, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            // C3: a server that sees the count sees the departed entry.
            self.head().departures.fetch_add(1, Ordering::Release);
            self.head().sleep.wake();
        }
    }

    /// Returns the [`armed`](copyrpc_shm::ready) flag of the client's lane.
    #[inline(always)]
    pub(crate) fn armed(&self, entry: usize) -> Option<&AtomicU32> {
        self.entry(entry).map(|entry| &entry.armed)
    }

    /// Returns the word that the server sleeps on.
    #[inline(always)]
    pub(crate) fn server_sleep(&self) -> &Sleep {
        &self.head().sleep
    }

    /// Server: returns the generation of the client that has `entry`; `None` if no client has it.
    #[inline(always)]
    pub(crate) fn taken_by(&self, entry: usize) -> Option<u32> {
        // C1: pairs with the client's exchanges.
        let session = self.entry(entry)?.session.load(Ordering::Acquire);
        (session as u32 == TAKEN as u32).then_some((session >> 32) as u32)
    }

    /// Server: ends the session of a client that breaks the protocol. The entry is free again when
    /// that client has ended.
    pub(crate) fn evict(&self, entry: usize, generation: u32) {
        if let Some(entry) = self.entry(entry) {
            let (taken, evicted) = (word(generation, TAKEN), word(generation, EVICTED));
            // C2. The exchange fails if the client has given up its entry meanwhile.
            let _ =
                entry
                    .session
                    .compare_exchange(taken, evicted, Ordering::AcqRel, Ordering::Relaxed);
            entry.sleep.wake();
        }
    }

    /// Server: at its end, takes a free entry out of use, or reports to the client of the entry
    /// that no further request will be received. The server must have answered all requests that it
    /// has received from that client.
    pub(crate) fn stop(&self, entry: usize) {
        if let Some(entry) = self.entry(entry) {
            let stopped = |session: u64| {
                matches!(u64::from(session as u32), FREE | TAKEN)
                    .then(|| word((session >> 32) as u32, STOPPED))
            };
            // C6: a client that sees this state sees all answers.
            let _ = entry
                .session
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, stopped);
            entry.sleep.wake();
        }
    }

    /// Returns the generation of the client of `entry` if that client gave up the entry, or if the
    /// lock of the entry is free. Each check of a lock reduces `checks` by one; at 0, no lock is
    /// checked.
    fn departed(&self, entry: usize, file: &LockFile, checks: &mut usize) -> Option<u32> {
        let session = self.entry(entry)?.session.load(Ordering::Acquire);
        let generation = (session >> 32) as u32;
        match u64::from(session as u32) {
            FREE => None,
            LEFT => Some(generation),
            _ => {
                *checks = checks.checked_sub(1)?;
                (!file.is_held(1 + entry as u64)).then_some(generation)
            }
        }
    }
}

/// The server's search for clients that have ended. The next pass finds a client that gave up its
/// entry. A client that died is found within at most a millisecond for every [`LOOKS_PER_ROUND`]
/// entries; a server that sleeps takes a [`SLICE`](copyrpc_shm::sleep::SLICE) more.
#[derive(Debug)]
pub(crate) struct Reaper {
    entries: Entries,
    next: usize,
    departures: u64,
    /// A pass is due once the count of departures differs from this value.
    expected: u64,
    /// The time, if the clock was read since the last pass.
    now_ns: Option<u64>,
    round_ns: u64,
}

/// Maximum number of locks that a round, the search of one millisecond, checks. Each check is a
/// system call of about 0.2 us.
pub(crate) const LOOKS_PER_ROUND: usize = 8;
/// Maximum number of entries that the search of one millisecond reads, a cache line each.
pub(crate) const ENTRIES_PER_ROUND: usize = 64;
const ROUND_NS: u64 = 1_000_000;
/// Maximum number of rounds that a pass catches up with, for a server that polls rarely.
const ROUNDS_PER_PASS: usize = 8;

impl Reaper {
    pub(crate) fn of(entries: Entries) -> Self {
        Self {
            entries,
            next: 0,
            departures: 0,
            expected: 0,
            now_ns: None,
            round_ns: 0,
        }
    }

    #[inline(always)]
    fn departures(&self) -> u64 {
        // C3: pairs with the increment in `Entries::leave`.
        self.entries.head().departures.load(Ordering::Acquire)
    }

    /// Makes the next pass check for dead clients. `now_ns` is the time of any monotonic clock; it
    /// is returned. Call this whenever the clock is read anyway.
    pub(crate) fn tick(&mut self, now_ns: u64) -> u64 {
        self.now_ns = Some(now_ns);
        self.expected = !self.departures();
        now_ns
    }

    /// Returns whether [`pass`](Self::pass) has something to do, which is rare. Costs one load.
    #[inline(always)]
    pub(crate) fn is_due(&self) -> bool {
        self.departures() != self.expected
    }

    /// Does one pass that [is due](Self::is_due). `reap(entry, generation)` must forget the client
    /// and reset the memory of its entry, which is free for others afterwards. Returns whether
    /// locks were checked, as they are about every millisecond.
    #[cold]
    pub(crate) fn pass(&mut self, file: &LockFile, mut reap: impl FnMut(usize, u32)) -> bool {
        self.expected = self.departures();
        if self.expected != self.departures {
            self.departures = self.expected;
            self.round(file, self.entries.count, 0, &mut reap);
        }
        let now_ns = self.now_ns.take();
        now_ns.is_some_and(|now_ns| self.catch_up(file, now_ns, ROUNDS_PER_PASS, &mut reap))
    }

    /// Like [`pass`](Self::pass), for a server that is idle: makes all checks that are due.
    pub(crate) fn check(&mut self, file: &LockFile, now_ns: u64, mut reap: impl FnMut(usize, u32)) {
        self.pass(file, &mut reap);
        self.catch_up(file, now_ns, self.entries.count, &mut reap);
    }

    /// Runs a round without asking the kernel, for models.
    #[cfg(all(test, loom))]
    pub(crate) fn reap_departed(&mut self, file: &LockFile, mut reap: impl FnMut(usize, u32)) {
        self.round(file, self.entries.count, 0, &mut reap);
    }

    #[cold]
    fn catch_up(
        &mut self,
        file: &LockFile,
        now: u64,
        max: usize,
        reap: &mut impl FnMut(usize, u32),
    ) -> bool {
        let due = usize::try_from(now.wrapping_sub(self.round_ns) / ROUND_NS)
            .unwrap_or(max)
            .min(max);
        if due > 0 {
            self.round_ns = now;
            let max = |per_round: usize| due.saturating_mul(per_round).min(self.entries.count);
            self.round(file, max(ENTRIES_PER_ROUND), max(LOOKS_PER_ROUND), reap);
        }
        due > 0
    }

    /// Checks up to `max` entries, which follow the entries of the previous round. Finds clients
    /// that gave up their entries, and, by at most `checks` system calls, clients that died; ends
    /// when these calls are used up. If `checks` is 0, no lock is checked, and the next round
    /// begins with the same entry.
    #[cold]
    fn round(
        &mut self,
        file: &LockFile,
        max: usize,
        mut checks: usize,
        reap: &mut impl FnMut(usize, u32),
    ) {
        let start = self.next;
        let checks_locks = checks > 0;
        for step in 0..max {
            if checks_locks && checks == 0 {
                break;
            }
            let index = (start + step) % self.entries.count;
            let departed = self.entries.departed(index, file, &mut checks);
            if checks_locks {
                self.next = index + 1;
            }
            if let (Some(generation), Some(entry)) = (departed, self.entries.entry(index)) {
                reap(index, generation);
                entry.sleep.reset();
                // C2: the next client sees the reset memory.
                entry
                    .session
                    .store(word(generation, FREE), Ordering::Release);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
