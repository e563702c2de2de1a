//! [`Cluster`]: all ranks of a job in one process and one thread, connected; the caller decides
//! which of them to step.

use std::collections::HashMap;

use mlx5::Device;

use crate::backend::composed::Composed;
use crate::backend::daemon::KvDaemon;
use crate::backend::paths::ClientPaths;
use crate::backend::plan::Site;
use crate::backend::{BackendError, Daemon, Endpoints, Records};
use crate::client::{Client, Step};
use crate::counters::Round;
use crate::job::Job;
use crate::phase::Phase;
use crate::topology::{Peer, Worker};

/// A rank of a [`Cluster`].
#[derive(Debug)]
pub struct Rank {
    /// Daemons, indexed by number.
    pub daemons: Vec<KvDaemon>,
    /// Clients, indexed by number.
    pub clients: Vec<Client<ClientPaths>>,
}

/// The ranks of a job.
#[derive(Debug)]
pub struct Cluster {
    /// Ranks, indexed by number.
    pub ranks: Vec<Rank>,
}

/// Numbers of the messages and rounds of a [run](Cluster::run).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Moved {
    /// Number of operations issued plus number of operations ended; an operation that has ended
    /// counts twice.
    pub by_clients: u64,
    /// Number of messages that daemons moved. A message that waits in a daemon counts again when
    /// the daemon sends it.
    pub by_daemons: u64,
    /// Number of rounds of the daemons.
    pub rounds: u64,
    /// Number of these rounds that took completions.
    pub rounds_with_cqes: u64,
    /// Number of completions that the daemons took.
    pub cqes: u64,
}

impl Moved {
    fn note(&mut self, round: Round) {
        self.by_daemons += round.moved as u64;
        self.cqes += round.cqes as u64;
        self.rounds_with_cqes += u64::from(round.cqes > 0);
        self.rounds += u64::from(!round.is_part);
    }
}

impl Cluster {
    /// Opens and connects every daemon and client of `job`; `site` returns the site of a rank. Each
    /// thread with connections has its own device.
    ///
    /// # Errors
    /// The failure of making or connecting a rank.
    pub fn new(
        job: &Job,
        site: impl Fn(usize) -> Result<Site, BackendError>,
    ) -> Result<Self, BackendError> {
        Self::on(job, |rank| Ok((site(rank)?, None)))
    }

    /// Opens and connects the ranks as [`new`](Self::new) does. `site` also returns a device that
    /// all threads of the rank share; `None`: each thread has its own.
    ///
    /// # Errors
    /// The failure of making or connecting a rank.
    pub fn on(
        job: &Job,
        mut site: impl FnMut(usize) -> Result<(Site, Option<Device>), BackendError>,
    ) -> Result<Self, BackendError> {
        let mut open = |rank| {
            let (site, device) = site(rank)?;
            Rank::open(job, rank, site, device.as_ref())
        };
        let ranks = (0..job.topology.ranks).map(&mut open);
        let ranks = ranks.collect::<Result<_, BackendError>>()?;
        let mut cluster = Self { ranks };
        cluster.connect()?;
        Ok(cluster)
    }

    fn connect(&mut self) -> Result<(), BackendError> {
        let mut mail: HashMap<Peer, Records> = HashMap::new();
        self.endpoints(|me, end| {
            for (to, bytes) in end.records() {
                mail.entry(to).or_default().push((me, bytes));
            }
            Ok(())
        })?;
        self.endpoints(|me, end| end.connect(&mail.remove(&me).unwrap_or_default()))?;
        self.endpoints(|_, end| {
            while !end.settle()? {}
            Ok(())
        })
    }

    /// Calls `visit` with the endpoints of every thread: rank after rank, daemons before clients.
    ///
    /// # Errors
    /// The first error of `visit`.
    pub fn endpoints(
        &mut self,
        mut visit: impl FnMut(Peer, &mut dyn Endpoints) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        for (rank, Rank { daemons, clients }) in self.ranks.iter_mut().enumerate() {
            let at = |worker| Peer { rank, worker };
            for (number, daemon) in daemons.iter_mut().enumerate() {
                visit(at(Worker::Daemon(number)), daemon)?;
            }
            for (number, client) in clients.iter_mut().enumerate() {
                visit(at(Worker::Client(number)), client.paths_mut())?;
            }
        }
        Ok(())
    }

    /// Steps all threads in turn, rank after rank, clients before daemons, until clients have made
    /// `moves` moves (a move is the issue or the end of an operation); then until no operation is
    /// outstanding. No thread waits, so every run does the same.
    ///
    /// # Errors
    /// The first error of a daemon or client.
    pub fn run(&mut self, moves: u64, now_ns: impl Fn() -> u64) -> Result<Moved, BackendError> {
        let (mut moved, mut drained) = (Moved::default(), 0);
        let clients: usize = self.ranks.iter().map(|rank| rank.clients.len()).sum();
        while drained < clients {
            drained = 0;
            let phase = if moved.by_clients < moves {
                Phase::Window(0)
            } else {
                Phase::Drain
            };
            for Rank { daemons, clients } in &mut self.ranks {
                for client in clients {
                    match client.step(phase, &now_ns)? {
                        Step::Busy(count) => moved.by_clients += count as u64,
                        Step::Idle => {}
                        Step::Drained => drained += 1,
                    }
                }
                for daemon in daemons {
                    moved.note(daemon.step(&now_ns)?);
                }
            }
        }
        Ok(moved)
    }
}

impl Rank {
    fn open(
        job: &Job,
        rank: usize,
        site: Site,
        device: Option<&Device>,
    ) -> Result<Self, BackendError> {
        let backend = Composed::new(job, site)?;
        let daemons =
            (0..job.topology.daemons).map(|daemon| backend.open_daemon_on(daemon, device));
        let daemons = daemons.collect::<Result<_, _>>()?;
        let client = |number| {
            let spec = job.client(rank, number);
            let paths = backend.open_client_on(number, device)?;
            Ok::<_, BackendError>(Client::new(spec, paths))
        };
        let clients = (0..job.topology.clients).map(client);
        Ok(Self {
            daemons,
            clients: clients.collect::<Result<_, _>>()?,
        })
    }
}
