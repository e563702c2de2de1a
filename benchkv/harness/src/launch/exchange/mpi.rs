//! The exchange of ranks that an MPI launcher started.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use mpi::Threading;
use mpi::environment::Universe;
use mpi::point_to_point::MatchedReceiveVec;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Destination, Source};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use thiserror::Error;

use super::frame::MAX_PART_BYTES;
use super::{Exchange, ExchangeError};
use crate::launch::sys::Deadline;

const MAX_RANKS: usize = 1024;
/// Number of bytes that MPI may use in the send buffer for each message, beside the message.
const MESSAGE_OVERHEAD_BYTES: usize = 64 << 10;
/// Exit status of a rank after a second interrupt.
const EXIT_INTERRUPTED: i32 = 130;
/// Number of tags that every MPI has.
const TAGS: i32 = 1 << 15;
/// Pauses between two checks for messages: the first, and the maximum. A rank that waits for the
/// end of a run must not take a core from the measured threads.
const PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));

/// [`Exchange`] over MPI, for one thread: MPI is initialized with `MPI_THREAD_FUNNELED`.
///
/// After each part comes a byte that shows whether its sender is interrupted. A sleeping rank
/// checks for the parts of the next operation, so all ranks wake up when one of them is
/// interrupted.
///
/// `within` counts from this rank's own arrival. MPI ends the other ranks when one dies, so
/// [`ExchangeError::RankDied`] does not occur. A rank that fails must end the job with
/// [`abort`](Self::abort). After an error of the exchange, the drop of the exchange ends the job
/// with status 1, because `MPI_Finalize` would wait for missing ranks. The wait for a peer that
/// stops while one of its large parts is in flight cannot be ended.
pub struct MpiExchange {
    universe: Universe,
    rank: usize,
    size: usize,
    tag: i32,
    /// Parts of the next operation that have arrived already.
    early: Vec<Option<Vec<u8>>>,
    /// Set by the first signal once signals are caught; the next signal ends the process.
    signalled: Arc<AtomicBool>,
    /// Whether another rank has reported an interrupt.
    told: bool,
    over: Option<ExchangeError>,
}

/// The reason why MPI cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MpiError {
    /// This process has initialized MPI before.
    #[error("MPI is in use already")]
    Again,
    /// The library does not permit other threads in the process.
    #[error("this MPI does not support MPI_THREAD_FUNNELED")]
    Threading,
    /// Too many ranks.
    #[error("{ranks} ranks; legal are 1 to {MAX_RANKS}")]
    Ranks {
        /// Ranks of the job.
        ranks: usize,
    },
}

/// Returns the MPI library, by the name and version it reports. MPI need not be initialized.
pub fn mpi_library() -> String {
    let version = mpi::environment::library_version().unwrap_or_default();
    // Open MPI continues with details of its build.
    version
        .split([',', '\n', '\0'])
        .next()
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Returns the maximum length of a part among `ranks` ranks, in bytes. The sends of all parts are
/// buffered, and MPI takes the length of the buffer as an `int`. So from 497 ranks on, the maximum
/// is below [`MAX_PART_BYTES`]. The memory of the buffer is touched only as far as parts need it.
const fn most_part_bytes(ranks: usize) -> usize {
    let room = i32::MAX as usize / ranks - 1 - 2 * MESSAGE_OVERHEAD_BYTES;
    if room < MAX_PART_BYTES {
        room
    } else {
        MAX_PART_BYTES
    }
}

// A part has room for the parts of `Exchange::gather`, and for the connection records of a rank
// that has one connection to each other rank.
const _: () = assert!(
    most_part_bytes(MAX_RANKS) > 1 << 20
        && most_part_bytes(496) == MAX_PART_BYTES
        && most_part_bytes(497) < MAX_PART_BYTES
);

impl MpiExchange {
    /// Initializes MPI. The calling thread must be the main thread, and only it uses the exchange.
    ///
    /// # Errors
    /// [`MpiError`].
    pub fn start() -> Result<Self, MpiError> {
        let (mut universe, threading) =
            mpi::initialize_with_threading(Threading::Funneled).ok_or(MpiError::Again)?;
        let world = universe.world();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if threading < Threading::Funneled {
            return Err(MpiError::Threading);
        }
        if size > MAX_RANKS {
            return Err(MpiError::Ranks { ranks: size });
        }
        universe.set_buffer_size(size * (1 + most_part_bytes(size) + 2 * MESSAGE_OVERHEAD_BYTES));
        Ok(Self {
            universe,
            rank,
            size,
            tag: 0,
            early: vec![None; size],
            signalled: Arc::default(),
            told: false,
            over: None,
        })
    }

    /// Ends all ranks of the job. The launcher reports `status`.
    pub fn abort(&self, status: u8) -> ! {
        self.universe.world().abort(status.into())
    }

    /// Gives `part` to every rank, and takes the parts of the other ranks. Sends are buffered, so
    /// no send is pending when the wait for a rank is given up.
    fn swap(
        &mut self,
        part: &[u8],
        within: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError> {
        let world = self.universe.world();
        let tag = self.next_tag();
        let flagged = [part, &[self.is_interrupted().into()]].concat();
        for other in (0..self.size).filter(|other| *other != self.rank) {
            let peer = world.process_at_rank(other as i32);
            peer.buffered_send_with_tag(&flagged, tag);
        }
        let mut parts = std::mem::replace(&mut self.early, vec![None; self.size]);
        if let Some(mine) = parts.get_mut(self.rank) {
            *mine = Some(part.to_vec());
        }
        let end = Deadline::after(within);
        let (mut pause, longest) = PAUSES;
        loop {
            self.told |= self.take_parts(&world, tag, &mut parts);
            if parts.iter().all(Option::is_some) {
                self.tag = tag;
                return Ok(parts.into_iter().flatten().collect());
            }
            if give_up() {
                return Err(ExchangeError::GivenUp);
            }
            if end.left().is_zero() {
                let missing = parts.iter().enumerate().filter(|(_, part)| part.is_none());
                return Err(ExchangeError::Missing {
                    ranks: missing.map(|(rank, _)| rank).collect(),
                    within,
                });
            }
            thread::sleep(pause);
            pause = (2 * pause).min(longest);
        }
    }

    const fn next_tag(&self) -> i32 {
        (self.tag + 1) % TAGS
    }

    /// Takes missing parts that have arrived. Returns whether one of their senders is interrupted.
    fn take_parts(
        &self,
        world: &SimpleCommunicator,
        tag: i32,
        parts: &mut [Option<Vec<u8>>],
    ) -> bool {
        let mut interrupted = false;
        let is_missing =
            |(rank, part): &(usize, &mut Option<Vec<u8>>)| *rank != self.rank && part.is_none();
        for (rank, place) in parts.iter_mut().enumerate().filter(is_missing) {
            let peer = world.process_at_rank(rank as i32);
            let Some(message) = peer.immediate_matched_probe_with_tag(tag) else {
                continue;
            };
            let mut part = message.matched_receive_vec::<u8>().0;
            interrupted |= part.pop() == Some(1);
            *place = Some(part);
        }
        interrupted
    }

    fn gather(
        &mut self,
        part: &[u8],
        within: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError> {
        let most = most_part_bytes(self.size);
        if part.len() > most {
            return Err(ExchangeError::TooLarge {
                bytes: part.len(),
                most,
            });
        }
        let parts = self.swap(part, within, give_up)?;
        // A large part moves only while its sender calls MPI. This second exchange keeps every rank
        // in MPI until all ranks have the part, and the send buffer is free.
        self.swap(&[], within, give_up)?;
        Ok(parts)
    }

    fn doze(&mut self, time: Duration, give_up: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
        let (world, end) = (self.universe.world(), Deadline::after(time));
        loop {
            let mut early = std::mem::take(&mut self.early);
            self.told |= self.take_parts(&world, self.next_tag(), &mut early);
            self.early = early;
            if self.is_interrupted() {
                return Ok(());
            }
            if give_up() {
                return Err(ExchangeError::GivenUp);
            }
            match end.left() {
                Duration::ZERO => return Ok(()),
                left => thread::sleep(left.min(PAUSES.1)),
            }
        }
    }

    fn outcome<T>(&mut self, outcome: Result<T, ExchangeError>) -> Result<T, ExchangeError> {
        outcome.inspect_err(|error| self.over = Some(error.clone()))
    }
}

impl Exchange for MpiExchange {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn all_gather(
        &mut self,
        part: &[u8],
        within: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError> {
        self.over.clone().map_or(Ok(()), Err)?;
        let outcome = self.gather(part, within, give_up);
        self.outcome(outcome)
    }

    fn sleep(&mut self, time: Duration, give_up: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
        self.over.clone().map_or(Ok(()), Err)?;
        let outcome = self.doze(time, give_up);
        self.outcome(outcome)
    }

    fn catch_interrupts(&mut self) -> Result<(), ExchangeError> {
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // The order of the two registrations matters: at the first signal, the conditional
            // shutdown finds the flag unset, and then the second registration sets it.
            let is_set = || self.signalled.clone();
            flag::register_conditional_shutdown(signal, EXIT_INTERRUPTED, is_set())
                .and_then(|_| flag::register(signal, is_set()))
                .map_err(|error| ExchangeError::Signals(error.to_string()))?;
        }
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        self.told || self.signalled.load(Ordering::Relaxed)
    }
}

impl Drop for MpiExchange {
    fn drop(&mut self) {
        if self.over.is_some() {
            self.abort(1);
        }
    }
}

impl fmt::Debug for MpiExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiExchange")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .field("over", &self.over)
            .finish_non_exhaustive()
    }
}
