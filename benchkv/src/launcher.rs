//! The launcher of a job's ranks, and their hosts: printed with the plan, and recorded in the
//! result.

use std::fmt;

use benchkv_harness::launch::hosts::Hosts;
use benchkv_harness::report;
use serde::{Deserialize, Serialize};

/// The launcher of a job, as one of its ranks sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launcher {
    /// Kind of the launcher.
    pub kind: LauncherKind,
    /// The MPI library, by the name and version that the library reports; null without an MPI
    /// library.
    pub library: Option<String>,
    /// The hosts' names, each host once, in the order of their first ranks.
    pub hosts: Vec<String>,
    /// The ranks on this rank's host; in a result, the ranks on rank 0's host. The index of a rank
    /// in this list is its node-local rank, which decides its cores.
    pub ranks_here: Vec<usize>,
    /// Whether the MPI launcher bound the ranks of this host to cores: two ranks have different
    /// cores, or a rank has fewer cores than threads although it would have more cores if it were
    /// not bound. Threads that are not pinned stay on the cores of their rank.
    pub bound: bool,
}

/// The kinds of launchers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LauncherKind {
    /// benchkv itself, on this host.
    Local,
    /// An MPI launcher: mpirun, srun.
    Mpi,
}

impl Launcher {
    /// Makes the record of the launcher of ranks of `threads` threads each, on these hosts.
    /// `library` is the name of the MPI library.
    pub fn new(library: Option<String>, hosts: &Hosts, threads: usize) -> Self {
        Self {
            bound: library.is_some() && hosts.is_bound(threads),
            kind: library
                .as_ref()
                .map_or(LauncherKind::Local, |_| LauncherKind::Mpi),
            library,
            hosts: hosts.names(),
            ranks_here: hosts.ranks_here(),
        }
    }

    /// Returns the index of `rank` among the ranks of this host.
    pub fn local_rank(&self, rank: usize) -> Option<usize> {
        self.ranks_here.iter().position(|here| *here == rank)
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.library.as_deref().unwrap_or("local launcher");
        let here = &self.ranks_here;
        match self.hosts.as_slice() {
            [host] => {
                let ranks = report::plural(here.len(), "rank");
                write!(f, "{kind}: {ranks} on host {host}")?;
            }
            hosts => {
                let hosts = hosts.join(", ");
                write!(f, "{kind}: hosts {hosts}; on this one ranks {here:?}")?;
            }
        }
        f.write_str(if self.bound {
            ", bound to cores by their launcher (mpirun --bind-to none leaves them all)"
        } else {
            ""
        })
    }
}
