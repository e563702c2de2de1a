//! A rank that an MPI launcher started.
//!
//! A rank that fails ends the job: MPI ends the other ranks. If a rank is killed, the launcher
//! detects the death and ends the other ranks, and the peers of the rank detect it too. If the
//! launcher is killed, the MPI library in each rank detects that.

use std::process::ExitCode;

use benchkv::cli::Cli;
use benchkv_harness::launch::exchange::{Exchange, MpiExchange, mpi_library};
use benchkv_harness::launch::role::{Foreign, foreign_launchers};

use crate::{EXIT_OPTIONS, fail, rank_process};

pub(crate) fn run(parsed: Result<Cli, clap::Error>) -> ExitCode {
    let mut exchange = match MpiExchange::start() {
        Ok(exchange) => exchange,
        Err(error) => return fail(EXIT_OPTIONS, &error),
    };
    if let Err(why) = check_size(&foreign_launchers(), exchange.size()) {
        return fail(EXIT_OPTIONS, &why);
    }
    let rank = exchange.rank();
    match rank_process(parsed, &mut exchange, Some(mpi_library())) {
        Ok(code) => code,
        Err(error) => {
            fail(1, &format!("rank {rank}: {error}"));
            exchange.abort(1);
        }
    }
}

/// Refuses a job if MPI connects a different number of processes than a launcher announced:
/// processes that MPI does not connect would each run a job of one rank, and write the same files.
/// If one launcher has started another, it is enough that one of the launchers announced MPI's
/// number.
fn check_size(announced: &[Foreign], size: usize) -> Result<(), String> {
    let agrees = |launcher: &Foreign| match launcher {
        Foreign::Sized {
            size: processes, ..
        } => *processes == size,
        // If this process is alone, it may be one of several processes that MPI does not connect.
        Foreign::Unsized { .. } => size > 1,
    };
    match announced {
        [launcher, ..] if !announced.iter().any(agrees) => Err(format!(
            "{launcher}, and MPI has brought {size} together: this build is for {}; start it with the mpirun of that, have srun speak its \
             PMI (srun --mpi=list), or build it for the MPI of the launcher",
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
        let [mpirun, srun] =
            [("mpirun", 4), ("srun", 2)].map(|(name, size)| Foreign::Sized { name, size });
        assert_eq!(
            (check_size(&[mpirun], 4), check_size(&[mpirun, srun], 2)),
            (Ok(()), Ok(()))
        );
        let refused = check_size(&[mpirun, srun], 1).unwrap_err();
        assert!(
            refused.starts_with("mpirun announces 4 processes, and MPI has brought 1 together: "),
            "{refused}"
        );
        let ranked = [Foreign::Unsized {
            variable: "PMIX_RANK",
        }];
        assert!(
            check_size(&ranked, 2).is_ok()
                && check_size(&ranked, 1)
                    .unwrap_err()
                    .starts_with("PMIX_RANK says that")
        );
    }
}
