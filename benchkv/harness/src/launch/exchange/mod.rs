//! The communication of ranks outside the measured path.
//!
//! [`Exchange`] is the only interface: a Unix socket to the launcher ([`SocketExchange`]), or, with
//! the feature `mpi`, an MPI library (`MpiExchange`). In data-flow order: `frame` (the bytes),
//! `channel` (frames over a socket that never blocks), `socket` (a rank's end); `mpi`. The
//! launcher's end is [`crate::launch::launcher`].

pub(crate) mod channel;
pub(crate) mod frame;
#[cfg(feature = "mpi")]
mod mpi;
mod socket;

use std::time::Duration;

use thiserror::Error;

pub use frame::MAX_PART_BYTES;
#[cfg(feature = "mpi")]
pub use mpi::{MpiError, MpiExchange, mpi_library};
pub use socket::SocketExchange;

/// Maximum bytes of all parts in one step of [`Exchange::gather`]: each rank receives all of them.
const GATHERED_BYTES: usize = 64 << 20;

/// Collective operations of all ranks of a job, which every rank calls in the same order.
///
/// Every wait takes `give_up`, which is called about a hundred times per second, so a rank that
/// detects the end of the job by itself does not wait for the report of the exchange. After an
/// error the job is over: later calls return the same error.
pub trait Exchange {
    /// Returns this process's rank, below [`size`](Self::size).
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Gives `part` to every rank. Returns the parts of all ranks, by rank.
    ///
    /// # Errors
    /// [`ExchangeError::Missing`] contains the ranks that had not called within `within` of the
    /// first caller. [`ExchangeError::RankDied`] contains the rank that died.
    fn all_gather(
        &mut self,
        part: &[u8],
        within: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError>;

    /// Gives `bytes`, of any length, to rank 0, which receives the bytes of all ranks, by rank;
    /// other ranks receive nothing. Makes all-gathers of at most 64 MiB until all bytes are sent.
    /// Only rank 0 keeps the bytes of earlier all-gathers.
    ///
    /// # Errors
    /// See [`all_gather`](Self::all_gather). The limit `within` applies to each all-gather.
    fn gather(
        &mut self,
        bytes: &[u8],
        within: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError> {
        let part_bytes = MAX_PART_BYTES
            .min(GATHERED_BYTES / self.size().max(1))
            .max(1);
        let mut wholes = if self.rank() == 0 {
            vec![Vec::new(); self.size()]
        } else {
            Vec::new()
        };
        let mut rest = bytes;
        loop {
            let (part, later) = rest.split_at_checked(part_bytes).unwrap_or((rest, &[]));
            rest = later;
            let parts = self.all_gather(part, within, give_up)?;
            wholes
                .iter_mut()
                .zip(&parts)
                .for_each(|(whole, part)| whole.extend_from_slice(part));
            // All ranks have the same parts, so all ranks end the loop together.
            if parts.iter().all(|part| part.len() < part_bytes) {
                return Ok(wholes);
            }
        }
    }

    /// Sleeps for `time`, or until the job is known to be over. Returns early if the user
    /// interrupts the job; see [`catch_interrupts`](Self::catch_interrupts).
    ///
    /// # Errors
    /// The reason why the job is over.
    fn sleep(&mut self, time: Duration, give_up: &dyn Fn() -> bool) -> Result<(), ExchangeError>;

    /// Sets that an interrupt by the user (Ctrl-C, SIGTERM, SIGHUP) is no error from now on:
    /// [`sleep`](Self::sleep) ends early, other operations continue, and
    /// [`is_interrupted`](Self::is_interrupted) returns `true`. A second interrupt ends ranks at
    /// once.
    ///
    /// # Errors
    /// The signals cannot be caught.
    fn catch_interrupts(&mut self) -> Result<(), ExchangeError> {
        Ok(())
    }

    /// Returns whether the user interrupted the job. Ranks detect the interrupt at different times,
    /// so they must exchange this value before they act on it together.
    fn is_interrupted(&self) -> bool {
        false
    }

    /// Waits until every rank has called `barrier`.
    ///
    /// # Errors
    /// See [`all_gather`](Self::all_gather).
    fn barrier(
        &mut self,
        within: Duration,
        give_up: &dyn Fn() -> bool,
    ) -> Result<(), ExchangeError> {
        self.all_gather(&[], within, give_up).map(drop)
    }
}

/// The reason why the ranks can no longer act together.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ExchangeError {
    /// Another rank ended.
    #[error("rank {rank} {how}")]
    RankDied {
        /// The rank that ended first.
        rank: usize,
        /// Exit status or signal of the rank, in words.
        how: String,
    },
    /// Ranks did not call the operation in time.
    #[error("rank {} did not answer within {within:?}: see its output above, or check whether it is stopped", rank_list(.ranks))]
    Missing {
        /// The ranks that had not arrived.
        ranks: Vec<usize>,
        /// Time that the others waited.
        within: Duration,
    },
    /// The launcher neither completed the operation nor gave a reason.
    #[error("the launcher has not answered for {within:?}; it is stopped or overloaded")]
    NoAnswer {
        /// Time that this rank waited.
        within: Duration,
    },
    /// The launcher ended.
    #[error("the launcher has ended, and the job with it")]
    LauncherGone,
    /// The `give_up` of this rank ended the wait.
    #[error("this rank gave up")]
    GivenUp,
    /// The user interrupted the job, and interrupts were not caught.
    #[error("interrupted")]
    Interrupted,
    /// The part is larger than the maximum of the exchange.
    #[error("a part of {bytes} bytes exceeds the {most} bytes an exchange carries")]
    TooLarge {
        /// Bytes of the refused part.
        bytes: usize,
        /// Maximum bytes of a part. It is lower with many ranks of MPI.
        most: usize,
    },
    /// The other end of the socket sent bytes that this version never sends.
    #[error("the launcher's socket carries unexpected bytes: {0}")]
    Protocol(String),
    /// Signals cannot be caught.
    #[error("signals cannot be caught: {0}")]
    Signals(String),
    /// The socket failed.
    #[error("the launcher's socket failed: {0}")]
    Socket(String),
}

pub(crate) fn rank_list(ranks: &[usize]) -> String {
    ranks
        .iter()
        .map(usize::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An exchange whose other ranks are simulated. They send the bytes in `others`, as much in
    /// each all-gather as a real rank would send.
    struct Others {
        rank: usize,
        others: Vec<Vec<u8>>,
        rounds: usize,
    }

    impl Exchange for Others {
        fn rank(&self) -> usize {
            self.rank
        }

        fn size(&self) -> usize {
            1 + self.others.len()
        }

        fn all_gather(
            &mut self,
            part: &[u8],
            _: Duration,
            _: &dyn Fn() -> bool,
        ) -> Result<Vec<Vec<u8>>, ExchangeError> {
            let limit = MAX_PART_BYTES.min(GATHERED_BYTES / self.size());
            assert!(part.len() <= limit);
            self.rounds += 1;
            let next = |rest: &mut Vec<u8>| rest.drain(..rest.len().min(limit)).collect();
            let mut parts: Vec<Vec<u8>> = self.others.iter_mut().map(next).collect();
            parts.insert(self.rank, part.to_vec());
            Ok(parts)
        }

        fn sleep(&mut self, _: Duration, _: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
            Ok(())
        }
    }

    #[test]
    fn bytes_of_any_length_arrive_whole_at_rank_0() {
        let bytes = |length: usize| -> Vec<u8> { (0..length).map(|at| (at % 251) as u8).collect() };
        for (mine, others, rounds) in [
            (0, vec![], 1),
            (MAX_PART_BYTES - 1, vec![], 1),
            (MAX_PART_BYTES, vec![3], 2),
            (3, vec![2 * MAX_PART_BYTES + 5, MAX_PART_BYTES], 3),
            (GATHERED_BYTES / 40 + 1, vec![7; 39], 2),
        ] {
            let (mine, others): (_, Vec<_>) =
                (bytes(mine), others.into_iter().map(bytes).collect());
            for rank in [0, others.len()] {
                let mut exchange = Others {
                    rank,
                    others: others.clone(),
                    rounds: 0,
                };
                let wholes = exchange.gather(&mine, Duration::ZERO, &|| false).unwrap();
                assert_eq!(exchange.rounds, rounds);
                assert!(if rank == 0 {
                    wholes[0] == mine && wholes[1..] == others
                } else {
                    wholes.is_empty()
                });
            }
        }
    }
}
