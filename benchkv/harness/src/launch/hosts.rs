//! The hosts of a job's ranks, and the cores that the ranks may use on their hosts.
//!
//! A launcher may bind each rank to cores of its own; together these are the cores of the ranks of
//! a host. Ranks that read the same boot id are on one host, whatever the host's name is.

use std::fs;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::affinity::{allowed_cores, by_node, later_threads, usable_cores};
use crate::launch::exchange::Exchange;

/// The hosts of a job, as one of its ranks sees them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hosts {
    places: Vec<Place>,
    rank: usize,
}

/// The host of one rank, and the cores of the rank there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Place {
    boot_id: String,
    host: String,
    /// Cores of the rank, the cores of one NUMA node together.
    cores: Vec<usize>,
    /// Number of cores that the rank could use if it were not bound.
    allowed: usize,
}

/// Returns the name of this host.
///
/// # Errors
/// The file that cannot be read.
pub fn host_name() -> Result<String, Failure> {
    kernel_says("/proc/sys/kernel/hostname")
}

fn kernel_says(path: &'static str) -> Result<String, Failure> {
    fs::read_to_string(path)
        .map(|text| text.trim().to_owned())
        .map_err(|why| format!("{path} cannot be read: {why}").into())
}

impl Place {
    fn mine() -> Result<Self, Failure> {
        Ok(Self {
            cores: usable_cores()?,
            allowed: allowed_cores()?,
            boot_id: kernel_says("/proc/sys/kernel/random/boot_id")?,
            host: host_name()?,
        })
    }
}

impl Hosts {
    /// Makes the record of `ranks` that this process starts on this host.
    ///
    /// # Errors
    /// This host cannot be identified.
    pub fn one(ranks: usize) -> Result<Self, Failure> {
        Ok(Self {
            places: vec![Place::mine()?; ranks],
            rank: 0,
        })
    }

    /// Gathers the places of all ranks. This is a collective operation.
    ///
    /// # Errors
    /// The reason why a rank cannot report its place; an error of the exchange if a rank has not
    /// called within `within` of the first.
    pub fn gather(exchange: &mut dyn Exchange, within: Duration) -> Result<Self, Failure> {
        let silent = |rank: usize, why| format!("rank {rank} does not say where it is: {why}");
        let part =
            serde_json::to_vec(&Place::mine()?).map_err(|why| silent(exchange.rank(), why))?;
        let parts = exchange.all_gather(&part, within, &|| false)?;
        let read = |(rank, part): (usize, &Vec<u8>)| {
            serde_json::from_slice(part).map_err(|why| silent(rank, why))
        };
        let places = parts.iter().enumerate().map(read);
        Ok(Self {
            places: places.collect::<Result<_, _>>()?,
            rank: exchange.rank(),
        })
    }

    /// Returns the number of ranks of the job.
    pub fn ranks(&self) -> usize {
        self.places.len()
    }

    /// Returns the hosts' names, each host once, ordered by their first rank.
    pub fn names(&self) -> Vec<String> {
        let is_first = |(rank, place): &(usize, &Place)| {
            !self
                .places
                .iter()
                .take(*rank)
                .any(|other| other.boot_id == place.boot_id)
        };
        self.places
            .iter()
            .enumerate()
            .filter(is_first)
            .map(|(_, place)| place.host.clone())
            .collect()
    }

    /// Returns the ranks on this rank's host; a rank's index in this list is its node-local rank.
    pub fn ranks_here(&self) -> Vec<usize> {
        self.here().map(|(rank, _)| rank).collect()
    }

    /// Returns the cores that the ranks of this host may use together, in the order of assignment:
    /// the first `threads` to the first rank, and so on.
    ///
    /// If the launcher gave each rank enough cores of its own, each rank gets its own cores.
    /// Otherwise all cores are one pool, and a rank gets cores of one NUMA node if a node has
    /// enough. In both cases the cores in `near`, next to the device, come first. Hardware threads
    /// that share a physical core with an earlier hardware thread come last.
    pub fn cores_here(&self, threads: usize, near: &[usize]) -> Vec<usize> {
        let masks = self.here().map(|(_, place)| near_first(&place.cores, near));
        let masks: Vec<Vec<usize>> = masks.collect();
        share_out(&masks, threads)
    }

    /// Returns whether the launcher bound the ranks of this host, of `threads` threads each, to
    /// cores: two ranks have different cores, or a rank has fewer cores than threads although it
    /// would have more cores if it were not bound. Threads that are not pinned stay on the cores of
    /// their rank.
    pub fn is_bound(&self, threads: usize) -> bool {
        let mut places = self.here().map(|(_, place)| place);
        let is_narrow = |place: &Place| place.cores.len() < threads.min(place.allowed);
        places.next().is_some_and(|first| {
            is_narrow(first) || places.any(|place| place.cores != first.cores || is_narrow(place))
        })
    }

    fn here(&self) -> impl Iterator<Item = (usize, &Place)> {
        let boot_id = self.places.get(self.rank).map(|place| &place.boot_id);
        let places = self.places.iter().enumerate();
        places.filter(move |(_, place)| Some(&place.boot_id) == boot_id)
    }
}

fn near_first(cores: &[usize], near: &[usize]) -> Vec<usize> {
    let (later, mut cores) = (later_threads(cores), cores.to_vec());
    cores.sort_by_key(|core| (later.contains(core), !near.contains(core)));
    cores
}

fn share_out(masks: &[Vec<usize>], threads: usize) -> Vec<usize> {
    let own = masks.iter().filter_map(|mask| mask.get(..threads));
    let own: Vec<usize> = own.flatten().copied().collect();
    let all = masks.iter().flatten().copied();
    if own.len() == masks.len() * threads && unique(own.iter().copied()).len() == own.len() {
        unique(own.into_iter().chain(all))
    } else {
        by_node(&unique(all), threads)
    }
}

/// Returns each core once, in the order of first appearance.
fn unique(cores: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut seen = std::collections::BTreeSet::new();
    cores.filter(|core| seen.insert(*core)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(boot_id: &str, host: &str, cores: std::ops::Range<usize>) -> Place {
        Place {
            boot_id: boot_id.to_owned(),
            host: host.to_owned(),
            cores: cores.collect(),
            allowed: 8,
        }
    }

    #[test]
    fn ranks_are_counted_by_host_and_hosts_named_once() {
        let places = vec![
            place("x", "a", 0..2),
            place("y", "b", 0..8),
            place("x", "a", 2..4),
            place("z", "b", 0..2),
        ];
        let hosts = |rank| Hosts {
            places: places.clone(),
            rank,
        };
        assert_eq!(hosts(0).names(), ["a", "b", "b"]);
        assert_eq!(
            (
                hosts(0).ranks_here(),
                hosts(2).ranks_here(),
                hosts(3).ranks_here()
            ),
            (vec![0, 2], vec![0, 2], vec![3])
        );
        assert_eq!(
            (hosts(2).cores_here(2, &[]), hosts(1).cores_here(2, &[])),
            ((0..4).collect(), (0..8).collect())
        );
        assert!(hosts(0).is_bound(1) && !hosts(1).is_bound(8));
    }

    #[test]
    fn one_rank_alone_on_its_host_is_bound_where_its_threads_need_more_cores_than_it_was_left() {
        let places = vec![place("x", "a", 0..1), place("y", "b", 0..8)];
        let is_bound = |rank, threads| {
            Hosts {
                places: places.clone(),
                rank,
            }
            .is_bound(threads)
        };
        assert_eq!(
            [1, 2, 47].map(|threads| is_bound(0, threads)),
            [false, true, true]
        );
        assert!(!is_bound(1, 47), "it has all that there are");
    }

    #[test]
    fn ranks_keep_the_cores_they_were_bound_to_where_those_are_enough() {
        let shared = |masks: &[&[usize]], threads| {
            share_out(
                &masks.iter().map(|mask| mask.to_vec()).collect::<Vec<_>>(),
                threads,
            )
        };
        assert_eq!(
            shared(&[&[0, 1, 2, 3], &[4, 5, 6, 7]], 3),
            [0, 1, 2, 4, 5, 6, 3, 7]
        );
        // The masks make one pool if each rank has one core for two threads, or if they overlap.
        assert_eq!(shared(&[&[3], &[1]], 2), [3, 1]);
        assert_eq!(shared(&[&[0, 1, 2, 3], &[0, 1, 2, 3]], 2), [0, 1, 2, 3]);
        assert_eq!(shared(&[&[2, 3, 0], &[0, 2, 1]], 1), [2, 0, 3, 1]);
    }

    #[test]
    fn cores_beside_the_device_come_first_within_those_of_each_rank() {
        let near: Vec<usize> = (4..8).collect();
        let pool = Hosts {
            places: vec![place("x", "a", 0..8); 2],
            rank: 0,
        };
        assert_eq!(pool.cores_here(2, &near), [4, 5, 6, 7, 0, 1, 2, 3]);
        let bound = Hosts {
            places: vec![place("x", "a", 0..6), place("x", "a", 6..9)],
            rank: 0,
        };
        assert_eq!(
            bound.cores_here(3, &near),
            [4, 5, 0, 6, 7, 8, 1, 2, 3],
            "a rank keeps its own"
        );
        assert_eq!(pool.cores_here(2, &[64, 65]), (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn ranks_started_here_are_all_here() {
        let hosts = Hosts::one(3).unwrap();
        assert_eq!(
            (hosts.ranks(), hosts.ranks_here(), hosts.names()),
            (3, vec![0, 1, 2], vec![host_name().unwrap()])
        );
        assert_eq!(
            (hosts.cores_here(1, &[]), hosts.is_bound(1)),
            (usable_cores().unwrap(), false)
        );
    }
}
