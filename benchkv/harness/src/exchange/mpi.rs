//! The exchange of ranks that an MPI launcher started.

use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::point_to_point::MatchedReceiveVec;
use mpi::traits::{Communicator, Destination, Source};
use thiserror::Error;

use super::frame::MAX_PART_BYTES;
use super::{Exchange, ExchangeError};

/// Most ranks: the sends of all parts are buffered, in memory that is touched only as far as parts need it.
const MAX_RANKS: usize = 128;
/// What MPI may take of the send buffer for each message, with ample room.
const MESSAGE_OVERHEAD_BYTES: usize = 64 << 10;
/// Every MPI has at least these tags.
const TAGS: i32 = 1 << 15;
/// Pauses between two looks for messages: the first, and the longest. A rank that waits for a run to end must not take its core.
const PAUSES: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(10));

/// [`Exchange`] over MPI, for one thread: MPI is initialized with `MPI_THREAD_FUNNELED`.
///
/// `within` counts from this rank's own arrival. MPI ends the other ranks when one dies, so [`ExchangeError::RankDied`] does not occur. A rank
/// that fails must end the job with [`abort`](Self::abort); after an error of the exchange, dropping it does so with status 1, because
/// `MPI_Finalize` would wait for ranks that do not come. A peer that is stopped while a large part of its is on the way cannot be given up.
pub struct MpiExchange {
    universe: Universe,
    rank: usize,
    size: usize,
    tag: i32,
    /// Why the job is over, once it is.
    over: Option<ExchangeError>,
}

/// MPI cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum MpiError {
    /// This process has initialized MPI before.
    #[error("MPI is in use already")]
    Again,
    /// The library does not allow other threads in the process.
    #[error("this MPI does not support MPI_THREAD_FUNNELED")]
    Threading,
    /// Too many ranks.
    #[error("{ranks} ranks; legal are 1 to {MAX_RANKS}")]
    Ranks {
        /// Ranks of the job.
        ranks: usize,
    },
}

/// The MPI library, by the name and version it gives itself. MPI need not be initialized.
#[must_use]
pub fn mpi_library() -> String {
    let version = mpi::environment::library_version().unwrap_or_default();
    // Open MPI goes on about how it was built.
    version.split([',', '\n', '\0']).next().unwrap_or_default().trim().to_owned()
}

impl MpiExchange {
    /// Initializes MPI. The calling thread must be the main thread, and alone uses the exchange.
    ///
    /// # Errors
    /// [`MpiError`].
    pub fn start() -> Result<Self, MpiError> {
        let (mut universe, threading) = mpi::initialize_with_threading(Threading::Funneled).ok_or(MpiError::Again)?;
        let world = universe.world();
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if threading < Threading::Funneled {
            return Err(MpiError::Threading);
        }
        if size > MAX_RANKS {
            return Err(MpiError::Ranks { ranks: size });
        }
        universe.set_buffer_size(size * (MAX_PART_BYTES + 2 * MESSAGE_OVERHEAD_BYTES));
        Ok(Self { universe, rank, size, tag: 0, over: None })
    }

    /// Ends all ranks of the job; the launcher reports `status`.
    pub fn abort(&self, status: u8) -> ! {
        self.universe.world().abort(status.into())
    }

    /// Gives `part` to every rank and takes theirs. Sends are buffered, so nothing is pending here when a rank is given up.
    fn swap(&mut self, part: &[u8], within: Duration, give_up: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>, ExchangeError> {
        let world = self.universe.world();
        self.tag = (self.tag + 1) % TAGS;
        for other in (0..self.size).filter(|other| *other != self.rank) {
            world.process_at_rank(other as i32).buffered_send_with_tag(part, self.tag);
        }
        let mut parts: Vec<Option<Vec<u8>>> = (0..self.size).map(|rank| (rank == self.rank).then(|| part.to_vec())).collect();
        let end = Instant::now() + within;
        let (mut pause, longest) = PAUSES;
        loop {
            for (rank, place) in parts.iter_mut().enumerate().filter(|(_, part)| part.is_none()) {
                let message = world.process_at_rank(rank as i32).immediate_matched_probe_with_tag(self.tag);
                *place = message.map(|message| message.matched_receive_vec().0);
            }
            if parts.iter().all(Option::is_some) {
                return Ok(parts.into_iter().flatten().collect());
            }
            if give_up() {
                return Err(ExchangeError::GivenUp);
            }
            if Instant::now() >= end {
                let missing = parts.iter().enumerate().filter(|(_, part)| part.is_none());
                return Err(ExchangeError::Missing { ranks: missing.map(|(rank, _)| rank).collect(), within });
            }
            thread::sleep(pause);
            pause = (2 * pause).min(longest);
        }
    }

    fn gather(&mut self, part: &[u8], within: Duration, give_up: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>, ExchangeError> {
        if part.len() > MAX_PART_BYTES {
            return Err(ExchangeError::TooLarge { bytes: part.len() });
        }
        let parts = self.swap(part, within, give_up)?;
        // A large part moves only while its sender calls MPI. With this, no rank goes its way before all have it, and the buffer is free.
        self.swap(&[], within, give_up)?;
        Ok(parts)
    }

    fn doze(time: Duration, give_up: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
        let end = Instant::now() + time;
        loop {
            if give_up() {
                return Err(ExchangeError::GivenUp);
            }
            match end.saturating_duration_since(Instant::now()) {
                Duration::ZERO => return Ok(()),
                left => thread::sleep(left.min(PAUSES.1)),
            }
        }
    }

    /// Remembers why an operation failed.
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

    fn all_gather(&mut self, part: &[u8], within: Duration, give_up: &dyn Fn() -> bool) -> Result<Vec<Vec<u8>>, ExchangeError> {
        self.over.clone().map_or(Ok(()), Err)?;
        let outcome = self.gather(part, within, give_up);
        self.outcome(outcome)
    }

    fn sleep(&mut self, time: Duration, give_up: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
        self.over.clone().map_or(Ok(()), Err)?;
        let outcome = Self::doze(time, give_up);
        self.outcome(outcome)
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
        f.debug_struct("MpiExchange").field("rank", &self.rank).field("size", &self.size).field("over", &self.over).finish_non_exhaustive()
    }
}
