//! `--check-doorbells`: checks that the bytes that a driver stores to its BlueFlame registers
//! announce the WQEs in its send queues. A NIC acts on the register. The software HCA reads the
//! doorbell record, so a driver with a wrong register works here and hangs on a NIC (PRM, "Posting
//! a Work Request" and "BlueFlame").
//!
//! Registers are memory of the driver's process. They are read between two commands or polls of the
//! HCA, so not every doorbell is seen. If another doorbell on the same register follows before the
//! next check, the first doorbell is counted as overtaken.

use core::array;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use memmap2::MmapRaw;
use mlx5_hca::wire::{CtrlWords, SEGMENT, WQEBB, announced_bytes};
use mlx5_hca::{Queue, Rule, SqMemory, Violation};

use crate::options::errno::Errno;

/// Bytes of half a register.
const HALF: usize = 256;
/// WQEBBs that half a register holds.
const HALF_BLOCKS: u16 = (HALF / WQEBB) as u16;
/// Offset of the registers in a page, and their number (`MLX5_BF_OFFSET`, `MLX5_BFREGS_PER_UAR`).
const REGISTERS_AT: usize = 0x800;
const PER_PAGE: usize = 4;
const PAGE: usize = 4096;
/// Maximum delay from the record to the register: the driver's thread may lose its core between the
/// two.
const PATIENCE: Duration = Duration::from_secs(1);

/// The content of half a register.
type Half = [u64; HALF / 8];

/// The pages of the device file that contain a driver's registers.
#[derive(Debug)]
pub(crate) struct Registers(MmapRaw);

impl Registers {
    /// Maps the registers of an open device file.
    ///
    /// # Errors
    /// `ENOMEM`: the file cannot be mapped.
    pub(crate) fn of(file: &OwnedFd) -> Result<Self, Errno> {
        memmap2::MmapOptions::new()
            .map_raw(file.as_raw_fd())
            .map(Self)
            .map_err(|_| Errno(libc::ENOMEM))
    }

    /// Returns half `half` of register `number`, in libmlx5's numbering.
    fn half(&self, number: u32, half: usize) -> Half {
        let number = number as usize;
        let at =
            number / PER_PAGE * PAGE + REGISTERS_AT + number % PER_PAGE * 2 * HALF + half * HALF;
        if at + HALF > self.0.len() {
            return [0; HALF / 8];
        }
        array::from_fn(|word| {
            // SAFETY: inside the mapping, aligned; the driver writes there, in words of 8 bytes.
            unsafe { &*self.0.as_mut_ptr().add(at).cast::<AtomicU64>().add(word) }
                .load(Ordering::Relaxed)
        })
    }

    fn halves(&self, number: u32) -> [Half; 2] {
        [self.half(number, 0), self.half(number, 1)]
    }
}

/// Numbers of doorbells, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Doorbell records whose counter was found changed.
    pub(crate) rung: u64,
    /// Registers that held all new WQEs of the send queue.
    pub(crate) blocks: u64,
    /// Registers that held the first 8 bytes of a new WQE.
    pub(crate) words: u64,
    /// Registers overwritten before they were read.
    pub(crate) overtaken: u64,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rung, blocks, words] = [self.rung, self.blocks, self.words];
        write!(f, "{rung} seen, {blocks} blocks, {words} words, ")?;
        write!(f, "{} overtaken by the next", self.overtaken)
    }
}

/// The send queues that are checked.
#[derive(Debug)]
pub(crate) struct Doorbells {
    registers: Registers,
    queues: Vec<Watched>,
    counts: Counts,
}

#[derive(Debug)]
struct Watched {
    qpn: u32,
    sq: SqMemory,
    register: u32,
    /// Whether the queue pair may send.
    is_ready: bool,
    /// The record at the last check.
    producer: u16,
    /// The register at the last check.
    halves: [Half; 2],
    announced: Option<Announced>,
}

/// A record that moved, whose register was not seen yet.
#[derive(Debug)]
struct Announced {
    since: Instant,
    /// The register before the record moved.
    before: [Half; 2],
    /// The WQEs before the record, as many as a register holds; or the start of the last WQE if it
    /// is longer.
    tail: Half,
    /// Counter of the first WQE of `tail`.
    first: u16,
    /// Counter of the last WQE.
    last: u16,
    /// Whether the register held the first 8 bytes of the last WQE: the whole announcement, or the
    /// first store of a longer one.
    is_word: bool,
}

/// The result of reading a register.
enum Found {
    Block,
    Word,
    /// The first 8 bytes of the last WQE, and other bytes after them.
    Part,
    Nothing,
}

impl Doorbells {
    pub(crate) fn new(registers: Registers) -> Self {
        Self {
            registers,
            queues: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Adds a new queue pair whose register the kernel assigned.
    pub(crate) fn add(&mut self, qpn: u32, sq: SqMemory, register: u32) {
        self.queues.push(Watched {
            qpn,
            sq,
            register,
            is_ready: false,
            producer: 0,
            halves: [[0; HALF / 8]; 2],
            announced: None,
        });
    }

    /// Returns the numbers of all queues since the start.
    pub(crate) fn counts(&self) -> Counts {
        let announced = self
            .queues
            .iter()
            .filter_map(|queue| queue.announced.as_ref());
        let words = announced.filter(|announced| announced.is_word).count();
        Counts {
            words: self.counts.words + words as u64,
            ..self.counts
        }
    }

    /// Starts checking a queue pair that may send. It may have been able to send before.
    pub(crate) fn start(&mut self, qpn: u32) {
        let Self {
            registers, queues, ..
        } = self;
        if let Some(queue) = queues
            .iter_mut()
            .find(|queue| queue.qpn == qpn && !queue.is_ready)
        {
            (queue.is_ready, queue.producer, queue.halves) =
                (true, queue.record(), registers.halves(queue.register));
        }
    }

    /// Stops checking a queue pair that may not send any more.
    pub(crate) fn stop(&mut self, qpn: u32) {
        if let Some(queue) = self.queues.iter_mut().find(|queue| queue.qpn == qpn) {
            queue.is_ready = false;
            queue.give_up(&self.registers.halves(queue.register), &mut self.counts);
        }
    }

    /// Removes a destroyed queue pair. Returns its driver's last violation.
    pub(crate) fn remove(&mut self, qpn: u32) -> Option<Violation> {
        let index = self.queues.iter().position(|queue| queue.qpn == qpn)?;
        let broken = self.check_queue(index, Duration::ZERO);
        self.queues.swap_remove(index);
        broken
    }

    /// Checks all queues. Returns the next violation; its queue is not checked any more.
    pub(crate) fn check(&mut self) -> Option<Violation> {
        (0..self.queues.len()).find_map(|index| self.check_queue(index, PATIENCE))
    }

    fn check_queue(&mut self, index: usize, patience: Duration) -> Option<Violation> {
        let queue = self.queues.get_mut(index).filter(|queue| queue.is_ready)?;
        let broken = queue.check(&self.registers, &mut self.counts, patience)?;
        let register = queue.register;
        let named = CtrlWords::parse(&broken.bytes).qpn();
        if broken.rule == Rule::RegisterQueue
            && self
                .queues
                .iter()
                .any(|other| (other.qpn, other.register) == (named, register))
        {
            // The two queue pairs share the register.
            self.counts.overtaken += 1;
            return None;
        }
        self.queues[index].is_ready = false;
        Some(broken)
    }
}

impl Watched {
    fn record(&self) -> u16 {
        // SAFETY: the driver keeps the record until the queue pair is destroyed.
        u32::from_be(unsafe { self.sq.record.as_ref() }.load(Ordering::Acquire)) as u16
    }

    /// Returns a word of the send queue.
    fn word(&self, counter: u16, word: usize) -> u64 {
        let block = usize::from(counter) & (self.sq.wqe_cnt as usize - 1);
        // SAFETY: inside the queue, aligned; the driver may write there meanwhile.
        let place: NonNull<AtomicU64> =
            unsafe { self.sq.buffer.add(block * WQEBB).cast().add(word) };
        // SAFETY: as above.
        unsafe { place.as_ref() }.load(Ordering::Relaxed)
    }

    /// Returns the counter of the last WQE before `producer`, if the WQEs since the last check are
    /// still in the queue.
    fn last(&self, producer: u16) -> Option<u16> {
        let (mut at, mut last) = (self.producer, None);
        while at != producer {
            let ctrl = ctrl_of(self.word(at, 0));
            let blocks = u16::from(ctrl.ds()).div_ceil(4);
            let is_one = ctrl.wqe_index() == at
                && ctrl.qpn() == self.qpn
                && (1..=producer.wrapping_sub(at)).contains(&blocks);
            if !is_one {
                return None;
            }
            last = Some(at);
            at = at.wrapping_add(blocks);
        }
        last
    }

    fn announced(&self, producer: u16, now: Instant) -> Option<Announced> {
        let capacity = self.sq.wqe_cnt.min(1 << 15) as u16;
        if producer.wrapping_sub(self.producer) > capacity {
            return None;
        }
        let last = self.last(producer)?;
        let first = if producer.wrapping_sub(last) > HALF_BLOCKS {
            last
        } else {
            producer.wrapping_sub(HALF_BLOCKS.min(capacity))
        };
        let tail =
            array::from_fn(|word| self.word(first.wrapping_add((word / 8) as u16), word % 8));
        // The driver may have posted more meanwhile, and wrapped around.
        let is_whole = self.record().wrapping_sub(first) <= capacity;
        is_whole.then_some(Announced {
            since: now,
            before: self.halves,
            tail,
            first,
            last,
            is_word: false,
        })
    }

    /// Counts the announcement by its present state if its WQEs were not seen completely, because
    /// the next announcement is in the other half of the register.
    fn give_up(&mut self, halves: &[Half; 2], counts: &mut Counts) {
        let Some(announced) = self.announced.take() else {
            return;
        };
        match announced.find(self.producer, halves) {
            Found::Block => counts.blocks += 1,
            _ if announced.is_word => counts.words += 1,
            _ => counts.overtaken += 1,
        }
    }

    /// Checks the record and the register.
    fn check(
        &mut self,
        registers: &Registers,
        counts: &mut Counts,
        patience: Duration,
    ) -> Option<Violation> {
        let producer = self.record();
        let halves = registers.halves(self.register);
        let now = Instant::now();
        if producer != self.producer {
            counts.rung += 1;
            self.give_up(&halves, counts);
            self.announced = self.announced(producer, now);
            counts.overtaken += u64::from(self.announced.is_none());
            self.producer = producer;
        }
        self.halves = halves;
        let announced = self.announced.as_mut()?;
        match announced.find(producer, &halves) {
            Found::Block => counts.blocks += 1,
            // The word may also be the first store of a block, which the next check may find.
            Found::Word if now - announced.since < patience => {
                announced.is_word = true;
                return None;
            }
            Found::Word => counts.words += 1,
            // Another queue pair shares the register.
            Found::Nothing if announced.is_word => counts.words += 1,
            _ if now - announced.since < patience => return None,
            _ => {
                let violation = announced.broken(self.qpn, &halves);
                self.announced = None;
                return Some(violation);
            }
        }
        self.announced = None;
        None
    }
}

impl Announced {
    /// Returns how far a register announces the WQEs before `producer`.
    fn find(&self, producer: u16, halves: &[Half; 2]) -> Found {
        let mut found =
            (0..2).map(|half| self.find_in(producer, &halves[half], &self.before[half]));
        found
            .find(|found| !matches!(found, Found::Nothing))
            .unwrap_or(Found::Nothing)
    }

    /// Returns how far half a register announces the WQEs. `before` is the content of the half
    /// before the record moved.
    fn find_in(&self, producer: u16, half: &Half, before: &Half) -> Found {
        let ctrl = ctrl_of(half[0]);
        let offset = usize::from(ctrl.wqe_index().wrapping_sub(self.first));
        // The last WQE, or an earlier one of a batch.
        let is_among = offset <= usize::from(self.last.wrapping_sub(self.first));
        if !is_among || half[0] != self.tail[offset * WQEBB / 8] {
            return Found::Nothing;
        }
        let is_last = ctrl.wqe_index() == self.last;
        let bytes = announced_bytes(ctrl, producer).map(|bytes| bytes / 8);
        let is_block =
            bytes.is_some_and(|words| half[..words] == self.tail[offset * WQEBB / 8..][..words]);
        match () {
            () if is_block => Found::Block,
            () if is_last && half[1..] == before[1..] => Found::Word,
            () if is_last => Found::Part,
            () => Found::Nothing,
        }
    }

    /// Makes the violation of the rule that was broken, with the bytes that were found.
    fn broken(&self, qpn: u32, halves: &[Half; 2]) -> Violation {
        let changed = halves
            .iter()
            .zip(&self.before)
            .find(|(half, before)| half != before)
            .map(|(half, _)| half);
        let (rule, words) = match changed {
            None => (
                Rule::RegisterNotWritten,
                &self.tail[usize::from(self.last.wrapping_sub(self.first)) * WQEBB / 8..],
            ),
            Some(half) if ctrl_of(half[0]).qpn() != qpn => (Rule::RegisterQueue, &half[..]),
            Some(half) if ctrl_of(half[0]).wqe_index() != self.last => {
                (Rule::RegisterNotLast, &half[..])
            }
            Some(half) => (Rule::RegisterBytes, &half[..]),
        };
        let mut bytes = [0; SEGMENT];
        bytes
            .chunks_exact_mut(8)
            .zip(words)
            .for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_ne_bytes()));
        Violation {
            queue: Queue::Send(qpn),
            index: self.last.into(),
            bytes,
            rule,
        }
    }
}

/// Returns the fields of the first word of a WQE.
fn ctrl_of(word: u64) -> CtrlWords {
    let mut bytes = [0; SEGMENT];
    bytes[..8].copy_from_slice(&word.to_ne_bytes());
    CtrlWords::parse(&bytes)
}
