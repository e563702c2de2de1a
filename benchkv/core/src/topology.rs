//! The endpoints between threads, and the paths of requests: everything that distinguishes the
//! topologies.
//!
//! | | meta | delegation | sharded | direct |
//! |---|---|---|---|---|
//! | remote key: client | -ipc-> the daemon of the key's number -flux-> the gateway | -ring-> daemon 0 | -ring-> the daemon of the key's number | |
//! | -copyrpc-> | a daemon of the peer | its daemon 0 | its daemon of the same number | its daemon that owns the key |
//! | there -flux-> | the daemon that owns the key | the same | | |
//! | endpoints of a rank | N - 1 | N - 1 | D (N - 1) | 2 C D (N - 1): half of clients, half of daemons |
//!
//! N ranks, D daemons and C clients of each. The gateway to rank r is daemon r mod D. A local key:
//! client -ipc-> the daemon that owns it.
//!
//! `-copyrpc->` means the [`Carrier`], the only arrow between ranks. The other carriers send a SEND
//! or a UCX active message for each message. Any carrier combines with any [`Backend`].

use std::fmt;
use std::ops::Range;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

pub use crate::carrier::Carrier;
use crate::carrier::name_of;

/// A thread of a rank that can have endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Worker {
    /// The daemon of this number.
    Daemon(usize),
    /// The client of this number.
    Client(usize),
}

/// A thread of another rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Peer {
    /// The rank.
    pub rank: usize,
    /// The thread of that rank.
    pub worker: Worker,
}

impl Peer {
    /// Returns whether the thread serves requests.
    pub const fn is_daemon(&self) -> bool {
        matches!(self.worker, Worker::Daemon(_))
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.worker {
            Worker::Daemon(daemon) => write!(f, "daemon {daemon} of rank {}", self.rank),
            Worker::Client(client) => write!(f, "client {client} of rank {}", self.rank),
        }
    }
}

/// The path of a request for another rank. Each variant is a column of the table of the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// Passes by ipc to the daemon of this rank with the key's number, and by flux to the daemon
    /// with the endpoint.
    Meta,
    /// Passes through the shared ring of daemon 0 of this rank.
    Delegation,
    /// Passes through the shared ring of the daemon of this rank with the key's number.
    Sharded,
    /// Passes straight from the client to the daemon that owns the key.
    Direct,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name_of(self))
    }
}

/// A topology: the threads of a job and the connections between them. It consists of plain numbers,
/// which are equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Topology {
    /// The path of requests for other ranks.
    pub backend: Backend,
    /// The carrier of messages between ranks.
    pub carrier: Carrier,
    /// Ranks of the job.
    pub ranks: usize,
    /// Daemons of each rank.
    pub daemons: usize,
    /// Clients of each rank.
    pub clients: usize,
}

impl Topology {
    /// Returns the number of the daemon that has the endpoint to rank `remote`: the same number on
    /// every rank. Returns `None` if the endpoint depends on the key, or on the client.
    fn gateway(&self, remote: usize) -> Option<usize> {
        match self.backend {
            Backend::Meta => Some(remote % self.daemons),
            Backend::Delegation => Some(0),
            Backend::Sharded | Backend::Direct => None,
        }
    }

    /// Returns the number of the daemon to which the other daemons of its rank pass requests for
    /// rank `rank`; `None` if they pass on no requests.
    pub fn gateway_of(&self, rank: usize) -> Option<usize> {
        self.gateway(rank).filter(|_| self.backend == Backend::Meta)
    }

    /// Returns whether daemons get requests for other ranks from clients by ipc, and pass them to
    /// each other by flux. If not, each request that a daemon gets by ipc or flux is for its own
    /// shard.
    #[inline]
    pub const fn daemons_pass_on(&self) -> bool {
        matches!(self.backend, Backend::Meta) && self.ranks > 1
    }

    /// Returns the number of daemons of another rank among which the key of a request selects one
    /// at the thread that sends it; 1 if the thread has an endpoint to one daemon of each rank.
    pub const fn far_daemons(&self) -> usize {
        match self.backend {
            Backend::Meta | Backend::Delegation | Backend::Sharded => 1,
            Backend::Direct => self.daemons,
        }
    }

    /// Returns the number of daemons of a rank that pass on requests of other ranks to other
    /// daemons, because the keys belong to these: all daemons or none.
    pub const fn passing_daemons(&self) -> usize {
        let pass = matches!(self.backend, Backend::Meta | Backend::Delegation)
            && self.daemons > 1
            && self.ranks > 1;
        if pass { self.daemons } else { 0 }
    }

    /// Returns whether connections between ranks send each message separately, and not in copyrpc's
    /// rings.
    pub const fn is_by_message(&self) -> bool {
        self.carrier.traits().is_by_message
    }

    /// Returns the maximum number of a thread's connections to other ranks.
    pub fn endpoints_of_a_thread(&self) -> usize {
        let of_a_rank = match self.backend {
            Backend::Direct => self.daemons.max(self.clients),
            Backend::Meta | Backend::Delegation | Backend::Sharded => 1,
        };
        (self.ranks - 1) * of_a_rank
    }

    /// Returns the number of shared rings of a rank. Ring number k is served by daemon number k.
    pub const fn rings(&self) -> usize {
        match self.backend {
            Backend::Meta | Backend::Direct => 0,
            Backend::Delegation => 1,
            Backend::Sharded => self.daemons,
        }
    }

    /// Returns the threads of other ranks to which `worker` of rank `rank` has an endpoint.
    pub fn peers_of(&self, rank: usize, worker: Worker) -> Vec<Peer> {
        let far = |remote| -> (fn(usize) -> Worker, Range<usize>) {
            match (self.backend, worker) {
                (Backend::Meta | Backend::Delegation, Worker::Daemon(daemon)) => {
                    // On the remote rank, the same rule chooses the daemon that has the endpoint to
                    // this rank.
                    let far_end = self.gateway(rank).unwrap_or(0);
                    let count = usize::from(self.gateway(remote) == Some(daemon));
                    (Worker::Daemon, far_end..far_end + count)
                }
                (Backend::Sharded, Worker::Daemon(daemon)) => (Worker::Daemon, daemon..daemon + 1),
                (Backend::Direct, Worker::Daemon(_)) => (Worker::Client, 0..self.clients),
                (Backend::Direct, Worker::Client(_)) => (Worker::Daemon, 0..self.daemons),
                (_, Worker::Client(_)) => (Worker::Client, 0..0),
            }
        };
        let others = (0..self.ranks).filter(|remote| *remote != rank);
        let peers = others.flat_map(|rank| {
            let (worker, numbers) = far(rank);
            let worker = numbers.map(worker);
            worker.map(move |worker| Peer { rank, worker })
        });
        peers.collect()
    }

    /// Returns the ranks that a daemon sends requests to, each through an endpoint, in the order of
    /// [`peers_of`](Self::peers_of).
    pub fn asks(&self, rank: usize, daemon: usize) -> Vec<usize> {
        let peers = self.peers_of(rank, Worker::Daemon(daemon)).into_iter();
        let asked = peers.filter(Peer::is_daemon);
        asked.map(|peer| peer.rank).collect()
    }

    /// Returns the number of threads of a rank that have endpoints.
    pub const fn threads_with_endpoints(&self) -> u64 {
        let threads = match self.backend {
            _ if self.ranks == 1 => 0,
            Backend::Meta if self.ranks <= self.daemons => self.ranks,
            Backend::Meta | Backend::Sharded => self.daemons,
            Backend::Delegation => 1,
            Backend::Direct => self.daemons + self.clients,
        };
        threads as u64
    }

    /// Returns the maximum number of open files of a rank's process. The number is computed for the
    /// software device, because endpoints and threads with endpoints need more files with it than
    /// with other devices. Each end of shared memory keeps a file open.
    pub const fn open_files(&self) -> u64 {
        const PER_ENDPOINT: u64 = 4;
        const PER_THREAD: u64 = 6;
        const OTHERS: u64 = 32;
        let channels = self.daemons + self.rings();
        let of_clients = self.clients * (channels + 2);
        OTHERS
            + channels as u64
            + of_clients as u64
            + PER_THREAD * self.threads_with_endpoints()
            + PER_ENDPOINT * self.endpoints()
    }

    /// Returns the maximum number of software devices whose memory a rank's process maps: the
    /// devices of its threads and of their peers.
    pub const fn mapped_devices(&self) -> u64 {
        self.threads_with_endpoints() + self.endpoints()
    }

    /// Returns the number of endpoints of a rank, all its threads together.
    pub const fn endpoints(&self) -> u64 {
        let others = self.ranks as u64 - 1;
        match self.backend {
            Backend::Meta | Backend::Delegation => others,
            Backend::Sharded => self.daemons as u64 * others,
            Backend::Direct => 2 * self.clients as u64 * self.daemons as u64 * others,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::owner_of;

    const ROUTINGS: [Backend; 4] = [
        Backend::Meta,
        Backend::Delegation,
        Backend::Sharded,
        Backend::Direct,
    ];

    fn topology(backend: Backend, ranks: usize, daemons: usize, clients: usize) -> Topology {
        Topology {
            backend,
            carrier: Carrier::Copyrpc,
            ranks,
            daemons,
            clients,
        }
    }

    fn workers(topology: &Topology) -> Vec<Worker> {
        (0..topology.daemons)
            .map(Worker::Daemon)
            .chain((0..topology.clients).map(Worker::Client))
            .collect()
    }

    #[test]
    fn every_endpoint_has_one_at_its_other_end_and_they_are_counted() {
        for (backend, (ranks, daemons, clients)) in ROUTINGS
            .into_iter()
            .flat_map(|backend| [(1, 2, 2), (2, 1, 1), (5, 3, 2)].map(|sizes| (backend, sizes)))
        {
            let topology = topology(backend, ranks, daemons, clients);
            for rank in 0..ranks {
                let mut endpoints = 0;
                for worker in workers(&topology) {
                    for peer in topology.peers_of(rank, worker) {
                        let back = topology.peers_of(peer.rank, peer.worker);
                        assert_eq!(
                            back.iter()
                                .filter(|there| **there == Peer { rank, worker })
                                .count(),
                            1,
                            "{topology:?}: {worker:?}, {peer:?}"
                        );
                        endpoints += 1;
                    }
                }
                assert_eq!(endpoints, topology.endpoints(), "{topology:?}");
            }
        }
    }

    /// Each thread that sends a request has an endpoint to the daemon that gets the request.
    #[test]
    fn every_remote_key_can_be_sent() {
        for backend in ROUTINGS {
            let topology = topology(backend, 5, 3, 2);
            for (rank, remote, key) in (0..5).flat_map(|rank| {
                (0..5).flat_map(move |remote| (0..6).map(move |key| (rank, remote, key)))
            }) {
                let sender = match backend {
                    Backend::Meta => Worker::Daemon(topology.gateway_of(remote).unwrap()),
                    Backend::Delegation => Worker::Daemon(0),
                    Backend::Sharded => Worker::Daemon(owner_of(key, 3)),
                    Backend::Direct => Worker::Client(1),
                };
                let far_end = Peer {
                    rank: remote,
                    worker: Worker::Daemon(
                        topology.gateway(rank).unwrap_or_else(|| owner_of(key, 3)),
                    ),
                };
                assert_eq!(
                    topology.peers_of(rank, sender).contains(&far_end),
                    rank != remote,
                    "{backend:?}: {rank} to {remote}, key {key}"
                );
            }
        }
    }
}
