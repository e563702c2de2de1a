//! `--check-doorbells`: checks that the bytes that a driver stores to its BlueFlame registers
//! announce the WQEs in its send queues. A NIC acts on the register. The software HCA reads the
//! doorbell record, so a driver with a wrong register works here and hangs on a NIC (PRM, "Posting
//! a Work Request" and "BlueFlame").
//!
//! Registers are memory of the driver's process. The HCA's thread reads them between two commands
//! or polls, so not every doorbell is seen. If another doorbell on the same register follows before
//! the next check, the first doorbell is counted as overtaken.

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

/// Length of half a register, in bytes.
const HALF: usize = 256;
/// WQEBBs that half a register holds.
const HALF_BLOCKS: u16 = (HALF / WQEBB) as u16;
/// Offset of the registers in a page (`MLX5_BF_OFFSET`), and number of registers in a page
/// (`MLX5_BFREGS_PER_UAR`).
const REGISTERS_AT: usize = 0x800;
const PER_PAGE: usize = 4;
const PAGE: usize = 4096;
/// Maximum time between the store to the record and the store to the register: the driver's thread
/// may lose its core between the two.
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

    /// Returns half `half` of register `number`, in libmlx5's numbering; zeros if there is no such
    /// register.
    fn half(&self, number: u32, half: usize) -> Half {
        let number = number as usize;
        let at =
            number / PER_PAGE * PAGE + REGISTERS_AT + number % PER_PAGE * 2 * HALF + half * HALF;
        if at + HALF > self.0.len() {
            return [0; HALF / 8];
        }
        array::from_fn(|word| {
            // SAFETY: the word is inside the mapping, which `self` owns, and is aligned. The driver
            // may write the word meanwhile, but always by one store of 8 bytes.
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
    /// Checks that found the counter of a doorbell record changed.
    pub(crate) rung: u64,
    /// Doorbells whose register held the whole last WQE, or a batch that ends with it.
    pub(crate) blocks: u64,
    /// Doorbells whose register held only the first 8 bytes of the last WQE.
    pub(crate) words: u64,
    /// Doorbells whose registers were overwritten before they were read.
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
    /// The record's counter at the last check.
    producer: u16,
    /// The register's content at the last check.
    halves: [Half; 2],
    announced: Option<Announced>,
}

/// The WQEs that the record has announced, until the register is found to announce them too.
#[derive(Debug)]
struct Announced {
    since: Instant,
    /// The register's content before the record moved.
    before: [Half; 2],
    /// The last WQEBBs before the record's counter, as many as half a register holds; or the start
    /// of the last WQE, if that WQE is longer.
    tail: Half,
    /// Counter of the first WQEBB of `tail`.
    first: u16,
    /// Counter of the last WQE.
    last: u16,
    /// Whether the register held the first 8 bytes of the last WQE. These bytes are the whole
    /// announcement, or the first store of a longer announcement.
    is_word: bool,
}

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

    /// Returns the numbers of doorbells of all queues since the device was opened.
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

    /// Starts to check a queue pair that may now send, unless the queue pair is already checked.
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

    /// Removes a destroyed queue pair. Before that, checks the queue pair once more, without any
    /// wait for the register. Returns the violation, if the check finds one.
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
            // The register holds a doorbell of another queue pair that shares the register.
            self.counts.overtaken += 1;
            return None;
        }
        self.queues[index].is_ready = false;
        Some(broken)
    }
}

impl Watched {
    fn record(&self) -> u16 {
        // SAFETY: CREATE_QP has checked that the record is aligned and mapped, and the driver keeps
        // it until the queue pair is destroyed.
        u32::from_be(unsafe { self.sq.record.as_ref() }.load(Ordering::Acquire)) as u16
    }

    /// Returns word `word` of the WQEBB with this counter.
    fn word(&self, counter: u16, word: usize) -> u64 {
        let block = usize::from(counter) & (self.sq.wqe_cnt as usize - 1);
        // SAFETY: the place is inside the send queue, which the driver keeps until the queue pair
        // is destroyed.
        let place: NonNull<AtomicU64> =
            unsafe { self.sq.buffer.add(block * WQEBB).cast().add(word) };
        // SAFETY: the place is inside the send queue and aligned. The driver may write there
        // meanwhile.
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
        // If the driver has posted more WQEs meanwhile, they may have overwritten WQEs of `tail`.
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

    /// Ends the check of the last announcement, because the driver has announced further WQEs.
    /// Looks for the announcement once more: the further announcement is in the other half of the
    /// register. Counts the doorbell as overtaken if no check has found the announcement.
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

    /// Checks the record and the register. Returns the violation, if there is one.
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
            // Another queue pair, which shares the register, has overwritten the word.
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
    /// Returns how much of the WQEs before `producer` the register announces.
    fn find(&self, producer: u16, halves: &[Half; 2]) -> Found {
        let mut found =
            (0..2).map(|half| self.find_in(producer, &halves[half], &self.before[half]));
        found
            .find(|found| !matches!(found, Found::Nothing))
            .unwrap_or(Found::Nothing)
    }

    /// Returns how much of the WQEs half a register announces. `before` is the content of this half
    /// before the record moved.
    fn find_in(&self, producer: u16, half: &Half, before: &Half) -> Found {
        let ctrl = ctrl_of(half[0]);
        let offset = usize::from(ctrl.wqe_index().wrapping_sub(self.first));
        // The register must begin with the last WQE, or with an earlier WQE that starts a batch.
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
