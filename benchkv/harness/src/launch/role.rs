//! The role of this process. The launcher runs the same executable again for its ranks. So a binary
//! first asks for its [`role`].

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Failure;

use crate::launch::child::ROLE_VARIABLE;
use crate::launch::exchange::SocketExchange;

/// A rank's place in its job. Its JSON text is the value of [`ROLE_VARIABLE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RankOf {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl RankOf {
    pub(crate) fn encode(self) -> String {
        // Encoding fails only for maps, and a place contains none.
        serde_json::to_string(&self).unwrap_or_default()
    }

    fn decode(text: &str) -> Option<Self> {
        let place: Option<Self> = serde_json::from_str(text).ok();
        place.filter(|place| place.rank < place.size)
    }
}

/// A launcher other than this program, as the environment of this process shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Foreign {
    /// A launcher that announces that it started several processes.
    #[error("{name} announces {size} processes")]
    Sized {
        /// Name of the launcher.
        name: &'static str,
        /// Number of processes.
        size: usize,
    },
    /// A launcher that gives this process a rank, but no number of processes.
    #[error(
        "{variable} says that a launcher started this process, and no variable says how many it started (unset it to start a job alone)"
    )]
    Unsized {
        /// The variable with the rank.
        variable: &'static str,
    },
}

/// Returns a launcher, not this program, that started or may have started several processes. In a
/// binary without MPI each process would start a job of its own, so such a binary refuses to run.
pub fn foreign_launcher() -> Option<Foreign> {
    foreign_launchers().into_iter().next()
}

/// Returns all launchers that started or may have started several processes. There can be several,
/// because a launcher may have started another one.
pub fn foreign_launchers() -> Vec<Foreign> {
    announced(|variable| std::env::var(variable).ok())
}

fn announced(value_of: impl Fn(&str) -> Option<String>) -> Vec<Foreign> {
    // srun sets the variables of a step only in its tasks. The variables of an allocation
    // (SLURM_NTASKS) are set in a plain script too, so they are not read.
    const SIZES: [(&str, &str); 5] = [
        ("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE"),
        ("an MPI launcher with PMI", "PMI_SIZE"),
        ("MVAPICH's launcher", "MV2_COMM_WORLD_SIZE"),
        ("Slurm's srun", "SLURM_STEP_NUM_TASKS"),
        ("Flux", "FLUX_JOB_SIZE"),
    ];
    const RANKS: [&str; 5] = [
        "PMIX_RANK",
        "PMI_RANK",
        "PALS_RANKID",
        "FLUX_TASK_RANK",
        "MV2_COMM_WORLD_RANK",
    ];
    let size_of = |(name, variable): (_, &str)| {
        Some(Foreign::Sized {
            name,
            size: value_of(variable)?.parse().ok()?,
        })
    };
    let sized: Vec<_> = SIZES.into_iter().filter_map(size_of).collect();
    // A launcher that announces one process has started no other process, so it is not returned.
    let mut ranks = RANKS
        .into_iter()
        .filter(|variable| value_of(variable).is_some());
    let ranked = ranks.next().filter(|_| sized.is_empty());
    let is_alone = |launcher: &Foreign| matches!(launcher, Foreign::Sized { size: ..=1, .. });
    let several = sized.into_iter().filter(|launcher| !is_alone(launcher));
    let ranked = ranked.map(|variable| Foreign::Unsized { variable });
    several.chain(ranked).collect()
}

/// Returns the exchange of this rank with the other ranks; `None` in a process that a user started.
/// Such a process starts the ranks. Call it once: a rank's socket is its standard input.
///
/// # Errors
/// The environment names a role that the process was not started for.
pub fn role() -> Result<Option<SocketExchange>, Failure> {
    let Some(value) = std::env::var_os(ROLE_VARIABLE) else {
        return Ok(None);
    };
    let value = value.to_string_lossy().into_owned();
    let Some(RankOf { rank, size }) = RankOf::decode(&value) else {
        return Err(format!("{ROLE_VARIABLE}={value:?} is set by the launcher for its own children; unset it to start a job").into());
    };
    let no_socket = |why| {
        format!(
            "{ROLE_VARIABLE} is set, but standard input is not the launcher's socket ({why}); unset it to start a job"
        )
    };
    let socket = launcher_socket().map_err(no_socket)?;
    let exchange = SocketExchange::new(socket, rank, size);
    Ok(Some(exchange.map_err(no_socket)?))
}

fn launcher_socket() -> io::Result<UnixStream> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // The call fails with ENOTSOCK if standard input is a terminal, a file or a pipe.
    socket.peer_addr()?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_reads_back_as_written() {
        let place = RankOf { rank: 3, size: 8 };
        assert_eq!(RankOf::decode(&place.encode()), Some(place));
    }

    #[test]
    fn a_place_nobody_wrote_is_refused() {
        for text in [
            "",
            r#""rank""#,
            r#"{"rank":1}"#,
            r#"{"rank":2,"size":2}"#,
            r#"{"rank":0,"size":2,"more":9}"#,
            r#"{"rank":0,"size":2}9"#,
            r#"{"rank":-1,"size":2}"#,
            r#""launcher""#,
            r#"{"launcher":{}}"#,
        ] {
            assert_eq!(RankOf::decode(text), None, "{text:?}");
        }
    }

    #[test]
    fn several_announced_processes_are_noticed() {
        let with = |name: &'static str, value: &'static str| {
            announced(move |variable| (variable == name).then(|| value.to_owned()))
        };
        for (variable, value, name) in [
            ("OMPI_COMM_WORLD_SIZE", "4", "Open MPI's mpirun"),
            ("PMI_SIZE", "2", "an MPI launcher with PMI"),
            ("MV2_COMM_WORLD_SIZE", "2", "MVAPICH's launcher"),
            ("SLURM_STEP_NUM_TASKS", "8", "Slurm's srun"),
            ("FLUX_JOB_SIZE", "3", "Flux"),
        ] {
            assert_eq!(
                with(variable, value),
                [Foreign::Sized {
                    name,
                    size: value.parse().unwrap()
                }]
            );
        }
        for (name, value) in [
            ("PMI_SIZE", "1"),
            ("SLURM_NTASKS", "8"),
            ("PMI_SIZE", "many"),
        ] {
            assert_eq!(with(name, value), []);
        }
        assert_eq!(announced(|_| Some("2".to_owned())).len(), 5);
    }

    #[test]
    fn a_rank_without_a_number_of_ranks_is_noticed() {
        for variable in [
            "PMIX_RANK",
            "PMI_RANK",
            "PALS_RANKID",
            "FLUX_TASK_RANK",
            "MV2_COMM_WORLD_RANK",
        ] {
            let alone = announced(|asked| (asked == variable).then(|| "0".to_owned()));
            assert_eq!(alone, [Foreign::Unsized { variable }]);
            let of_one = announced(|asked| {
                [(variable, "0"), ("PMI_SIZE", "1")]
                    .iter()
                    .find(|(name, _)| *name == asked)
                    .map(|(_, v)| (*v).to_owned())
            });
            assert_eq!(of_one, [], "mpirun -n 1");
        }
    }
}
