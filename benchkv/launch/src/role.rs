//! The role of this process. The launcher runs the same executable again for its ranks and for the other side of the baselines. A binary
//! first asks for its [`role`].

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use thiserror::Error;

use crate::child::ROLE_VARIABLE;
use crate::echo::EchoServer;
use crate::exchange::SocketExchange;
use crate::helper::Owner;
use crate::pingpong::PingPongPeer;
use crate::role_text::RoleText;

/// The role of this process.
#[derive(Debug)]
pub enum Role {
    /// Started by a user: starts the ranks.
    Launcher,
    /// One rank of a job, with its exchange with the others.
    Rank(SocketExchange),
    /// A process that does part of the work of a rank, with its connection to the rank.
    Helper(Owner),
    /// The other side of a baseline.
    Baseline(BaselinePeer),
}

/// The other side of a baseline, in a process of its own.
#[derive(Debug)]
pub struct BaselinePeer(Peer);

#[derive(Debug)]
enum Peer {
    Echo(EchoServer),
    PingPong(PingPongPeer),
}

impl BaselinePeer {
    /// Answers until the measurement is over.
    ///
    /// # Errors
    /// The socket's or the memory's error.
    pub fn serve(self) -> io::Result<()> {
        match self.0 {
            Peer::Echo(server) => server.serve(),
            Peer::PingPong(peer) => peer.serve(),
        }
    }
}

/// Why the process cannot take the role it was given.
#[derive(Debug, Error)]
pub enum RoleError {
    /// The variable has a value that no launcher writes.
    #[error("{ROLE_VARIABLE}={value:?} is set by the launcher for its own children; unset it to start a job")]
    Unknown {
        /// The value found.
        value: String,
    },
    /// Standard input is not the socket of a launcher.
    #[error("{ROLE_VARIABLE} is set, but standard input is not the launcher's socket ({source}); unset it to start a job")]
    Socket {
        /// The system's reason.
        source: io::Error,
    },
}

/// Returns a launcher of another kind that announces several processes: its name, and their number. Without MPI each of them would start
/// a job of its own, so a binary refuses.
#[must_use]
pub fn foreign_launcher() -> Option<(&'static str, usize)> {
    foreign_launchers().into_iter().next()
}

/// Returns all such launchers: one may have started the other.
#[must_use]
pub fn foreign_launchers() -> Vec<(&'static str, usize)> {
    announced(|variable| std::env::var(variable).ok())
}

fn announced(value_of: impl Fn(&str) -> Option<String>) -> Vec<(&'static str, usize)> {
    // srun sets the step's variables for its tasks only; those of an allocation (SLURM_NTASKS) are also seen by a plain script.
    let launchers =
        [("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE"), ("an MPI launcher with PMI", "PMI_SIZE"), ("Slurm's srun", "SLURM_STEP_NUM_TASKS")];
    let size_of = |(name, variable): (_, &str)| Some((name, value_of(variable)?.parse().ok()?));
    launchers.into_iter().filter_map(size_of).filter(|(_, size)| *size > 1).collect()
}

/// Returns the role of this process. Call it once: a rank's socket is its standard input.
///
/// # Errors
/// [`RoleError`] if the environment names a role that the process was not started for.
pub fn role() -> Result<Role, RoleError> {
    let Some(value) = std::env::var_os(ROLE_VARIABLE) else {
        return Ok(Role::Launcher);
    };
    let value = value.to_string_lossy().into_owned();
    let Some(text) = RoleText::decode(&value) else {
        return Err(RoleError::Unknown { value });
    };
    let socket = launcher_socket().map_err(|source| RoleError::Socket { source })?;
    match text {
        RoleText::Rank { rank, size } => {
            SocketExchange::new(socket, rank, size).map(Role::Rank).map_err(|source| RoleError::Socket { source })
        }
        RoleText::Helper => Owner::new(socket).map(Role::Helper).map_err(|source| RoleError::Socket { source }),
        RoleText::Echo { reply_bytes } => Ok(Role::Baseline(BaselinePeer(Peer::Echo(EchoServer::new(socket, reply_bytes))))),
        RoleText::PingPong { memory, core } => Ok(Role::Baseline(BaselinePeer(Peer::PingPong(PingPongPeer::new(memory, core))))),
    }
}

fn launcher_socket() -> io::Result<UnixStream> {
    let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // Fails with ENOTSOCK for a terminal, a file, a pipe.
    socket.peer_addr()?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_announced_processes_are_noticed() {
        let with = |name: &'static str, value: &'static str| announced(move |variable| (variable == name).then(|| value.to_owned()));
        assert_eq!(with("OMPI_COMM_WORLD_SIZE", "4"), [("Open MPI's mpirun", 4)]);
        assert_eq!(with("PMI_SIZE", "2"), [("an MPI launcher with PMI", 2)]);
        assert_eq!(with("SLURM_STEP_NUM_TASKS", "8"), [("Slurm's srun", 8)]);
        for (name, value) in [("PMI_SIZE", "1"), ("SLURM_NTASKS", "8"), ("PMI_SIZE", "many")] {
            assert_eq!(with(name, value), []);
        }
        assert_eq!(announced(|_| Some("2".to_owned())).len(), 3);
    }
}
