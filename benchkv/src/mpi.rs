//! A rank that an MPI launcher started.
//!
//! A rank that fails ends the job: MPI ends the others. If a rank is killed, the launcher notices and ends the rest, and the peers notice
//! too. If the launcher is killed, the MPI library in each rank notices.

use std::process::ExitCode;

use benchkv::cli::Cli;
use launch::exchange::{Exchange, MpiExchange, mpi_library};
use launch::role::foreign_launchers;

use crate::{EXIT_OPTIONS, fail, rank_process};

/// Runs the part of this process.
pub(crate) fn run(cli: Cli) -> ExitCode {
    let mut exchange = match MpiExchange::start() {
        Ok(exchange) => exchange,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    if let Err(why) = check_size(&foreign_launchers(), exchange.size()) {
        return fail(EXIT_OPTIONS, &why);
    }
    let rank = exchange.rank();
    match rank_process(cli, &mut exchange, Some(mpi_library())) {
        Ok(code) => code,
        Err(error) => {
            fail(1, &format!("rank {rank}: {error}"));
            exchange.abort(1);
        }
    }
}

/// Refuses a job of another size than the one that was started: processes that MPI does not connect would each run a job of one rank, and
/// write the same files. One of the launchers may have started the other; MPI belongs to the one that announces its size.
fn check_size(announced: &[(&str, usize)], size: usize) -> Result<(), String> {
    match announced {
        [(name, processes), ..] if announced.iter().all(|(_, processes)| *processes != size) => Err(format!(
            "{name} announces {processes} processes, and MPI has brought {size} together: this build is for {}; start it with the mpirun of \
             that, have srun speak its PMI (srun --mpi=list), or build it for the MPI of the launcher",
            mpi_library()
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_the_launchers_has_to_announce_what_mpi_has_brought_together() {
        assert_eq!((check_size(&[("mpirun", 4)], 4), check_size(&[("mpirun", 4), ("srun", 2)], 2)), (Ok(()), Ok(())));
        let refused = check_size(&[("mpirun", 4), ("srun", 2)], 1).unwrap_err();
        assert!(refused.starts_with("mpirun announces 4 processes, and MPI has brought 1 together: "), "{refused}");
    }
}
