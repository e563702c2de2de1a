//! The cores that this process may use, and the placement of threads on them.
//!
//! A [`Plan`] is made by the same rule in every rank of a host, from the options and the cores of
//! the host. Each rank gets a run of neighbouring cores (inside a NUMA node if it fits), daemons
//! first, then clients. Threads are pinned only if each can have a core of its own: with more
//! threads than cores, pinning would prevent the scheduler from using a free core. Hardware threads
//! of one core count as one core, and a CPU quota of the control group limits the number of cores.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cgroup;

/// The values of `--pin`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PinPolicy {
    /// Pin if every thread can have a core of its own.
    #[default]
    Auto,
    /// Leave placement to the scheduler.
    None,
    /// Use exactly these cores, in this order.
    List(Vec<usize>),
}

/// The reason why the cores cannot be determined, or cannot be used.
#[derive(Debug, Error)]
pub enum AffinityError {
    /// The kernel does not return the affinity mask.
    #[error("the affinity mask of this process cannot be read: {0}")]
    Mask(#[source] std::io::Error),
    /// A listed core is outside the affinity mask.
    #[error("core {core} may not be used by this process; usable are {}", CoreList(.usable))]
    NotUsable {
        /// The first listed core that is not usable.
        core: usize,
        /// The usable cores.
        usable: Vec<usize>,
    },
    /// The list has fewer cores than threads.
    #[error(
        "the list names {listed} cores for {threads} threads; list at least {threads}, or use --pin none"
    )]
    TooFew {
        /// Number of listed cores.
        listed: usize,
        /// Number of threads to place.
        threads: usize,
    },
    /// The kernel refused to move the calling thread.
    #[error(
        "the thread could not be pinned to core {core}; the affinity mask may have changed since the start"
    )]
    Refused {
        /// The core to which the thread was to be pinned.
        core: usize,
    },
}

impl FromStr for PinPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            list => parse_core_list(list).map(Self::List).ok_or_else(|| {
                format!("{text:?} is neither auto, none nor a core list such as 0-3,8")
            }),
        }
    }
}

impl fmt::Display for PinPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::List(cores) => CoreList(cores).fmt(f),
        }
    }
}

/// Parses the kernel's list format: `0-3,8`. Returns `None` if the text is malformed, is empty or
/// contains a core twice.
fn parse_core_list(text: &str) -> Option<Vec<usize>> {
    /// Upper bound of core numbers: more cores than any Linux kernel is built for. With it, the
    /// text `0-99999999999` cannot fill the memory.
    const CORE_LIMIT: usize = 65_536;
    let mut cores = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= CORE_LIMIT {
            return None;
        }
        cores.extend(first..=last);
    }
    let distinct: BTreeSet<_> = cores.iter().collect();
    (distinct.len() == cores.len()).then_some(cores)
}

/// Formats cores as the kernel does: `0-3,8`.
struct CoreList<'a>(&'a [usize]);

impl fmt::Display for CoreList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for run in self.0.chunk_by(|a, b| a + 1 == *b) {
            match run {
                [first, .., last] => write!(f, "{separator}{first}-{last}")?,
                [only] => write!(f, "{separator}{only}")?,
                [] => {}
            }
            separator = ",";
        }
        Ok(())
    }
}

/// Number of words in a mask of 65,536 cores, which is more cores than any kernel is built for;
/// glibc's own `cpu_set_t` has only 1,024 cores.
const MASK_WORDS: usize = 1024;

/// Returns the cores in the affinity mask of the calling thread, the cores of one NUMA node
/// together. Hardware threads that share a core with an earlier hardware thread come last, so that
/// the first threads get cores of their own.
///
/// Reads the raw mask, because libraries leave out isolated cores, which a careful user may have
/// reserved for this run.
///
/// # Errors
/// [`AffinityError::Mask`] if the kernel refuses.
pub fn usable_cores() -> Result<Vec<usize>, AffinityError> {
    let mut mask = [0u64; MASK_WORDS];
    // SAFETY: the pointer and length describe the live array, which the kernel fills with at most
    // `length` bytes; a `cpu_set_t` is an array of words like this array, and pid 0 is the caller.
    let status =
        unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    if status != 0 {
        return Err(AffinityError::Mask(std::io::Error::last_os_error()));
    }
    let is_set = |core: &usize| mask[core / 64] >> (core % 64) & 1 == 1;
    let mut cores: Vec<usize> = (0..64 * MASK_WORDS).filter(is_set).collect();
    let nodes = numa_nodes();
    let node_of = |core: &usize| nodes.iter().position(|node| node.contains(core));
    cores.sort_by_key(|core| (node_of(core).unwrap_or(nodes.len()), *core));
    let later = later_threads(&cores);
    cores.sort_by_key(|core| later.contains(core));
    Ok(cores)
}

/// Returns those hardware threads among `cores` that share a physical core with an earlier hardware
/// thread.
pub fn later_threads(cores: &[usize]) -> Vec<usize> {
    later_of(cores, |core| {
        let file = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
        let list = std::fs::read_to_string(file).unwrap_or_default();
        parse_core_list(&list).unwrap_or_default()
    })
}

fn later_of(cores: &[usize], siblings: impl Fn(usize) -> Vec<usize>) -> Vec<usize> {
    let mut taken = BTreeSet::new();
    let is_later = |core: &usize| {
        let is_taken = !taken.insert(*core);
        taken.extend(siblings(*core));
        is_taken
    };
    cores.iter().copied().filter(is_later).collect()
}

/// Orders the cores of a pool for ranks of `threads` threads each. A rank gets cores of one NUMA
/// node if a node has enough cores left.
pub fn by_node(cores: &[usize], threads: usize) -> Vec<usize> {
    aligned(cores, threads, &numa_nodes())
}

fn aligned(cores: &[usize], threads: usize, nodes: &[Vec<usize>]) -> Vec<usize> {
    let node_of = |core: &usize| nodes.iter().position(|node| node.contains(core));
    let runs = || cores.chunk_by(|one, next| node_of(one) == node_of(next));
    let runs = || runs().map(|run| run.chunks_exact(threads.max(1)));
    let rests = runs().flat_map(|run| run.remainder());
    runs().flatten().flatten().chain(rests).copied().collect()
}

/// Returns the number of cores that this process could use if it were not bound: the number of
/// cores of the host that its control group permits. If a process may not change its mask, as in
/// some containers, returns the number of cores to which it is bound.
///
/// # Errors
/// [`AffinityError::Mask`] if the kernel does not return the mask.
pub fn allowed_cores() -> Result<usize, AffinityError> {
    // A mask belongs to a thread, so a short-lived thread can change its own mask without effect on
    // other threads. The kernel removes cores that are not permitted.
    let unbind = || {
        let all = [u64::MAX; MASK_WORDS];
        // SAFETY: the pointer and length describe the live array, which is read only; pid 0 is the
        // caller.
        unsafe { libc::sched_setaffinity(0, size_of_val(&all), all.as_ptr().cast()) };
        usable_cores().map(|cores| cores.len())
    };
    let panicked = || std::io::Error::other("the thread that asks for it panicked");
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .spawn_scoped(scope, unbind)
            .map_err(AffinityError::Mask)?
            .join()
            .map_err(|_| AffinityError::Mask(panicked()))?
    })
}

/// Returns the cores of each NUMA node. Empty if the kernel does not list them.
fn numa_nodes() -> Vec<Vec<usize>> {
    (0..).map_while(cores_of_node).collect()
}

/// Returns the cores of a NUMA node; `None` if the kernel has no such node.
pub fn cores_of_node(node: u32) -> Option<Vec<usize>> {
    let list =
        std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()?;
    Some(parse_core_list(&list).unwrap_or_default())
}

/// Pins the calling thread to one core.
///
/// # Errors
/// [`AffinityError::Refused`] if the kernel does not permit it.
pub fn pin_current_thread(core: usize) -> Result<(), AffinityError> {
    // The crate `core_affinity` uses glibc's `cpu_set_t`, and panics for a larger core number. So
    // such a number is refused here.
    let is_in_mask = core < libc::CPU_SETSIZE as usize;
    if is_in_mask && core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        Ok(())
    } else {
        Err(AffinityError::Refused { core })
    }
}

/// The cores that threads may use, in the order of assignment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usable {
    /// The cores, as the kernel numbers them: hardware threads.
    pub cores: Vec<usize>,
    /// Number of threads that can each have a physical core of its own at the same time.
    pub at_once: usize,
}

impl Usable {
    /// Counts the physical cores among `cores` of this host, limited by the process's CPU quota.
    pub fn on_this_host(cores: Vec<usize>) -> Self {
        let physical = cores.len() - later_threads(&cores).len();
        let quota = cgroup::cpu_limit().map_or(usize::MAX, |cpus| (cpus as usize).max(1));
        Self {
            at_once: physical.min(quota),
            cores,
        }
    }
}

/// Makes cores with one hardware thread each, without a quota.
impl From<Vec<usize>> for Usable {
    fn from(cores: Vec<usize>) -> Self {
        Self {
            at_once: cores.len(),
            cores,
        }
    }
}

/// The threads of one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Threads {
    /// Number of ranks on this host.
    pub ranks: usize,
    /// Number of daemon threads of each rank.
    pub daemons: usize,
    /// Number of client threads of each rank.
    pub clients: usize,
}

impl Threads {
    /// Returns the number of polling threads of this host.
    pub const fn total(&self) -> usize {
        self.ranks * (self.daemons + self.clients)
    }
}

/// The placement of every thread of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Hardware threads that this process may use, in the order of assignment.
    pub usable_cores: Vec<usize>,
    /// Number of threads that can each have a physical core of its own at the same time.
    pub at_once: usize,
    /// The usable cores in the NUMA nodes of the devices, which are preferred. Empty if all usable
    /// cores are in these nodes, or none is.
    pub device_cores: Vec<usize>,
    /// Number of polling threads of all ranks on this host.
    pub threads: usize,
    /// The cores of the ranks of this host, indexed by node-local rank; empty if no thread is
    /// pinned.
    pub pinned: Vec<RankCores>,
}

/// The cores of one rank, one per thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCores {
    /// Cores of daemons 0, 1, ...
    pub daemons: Vec<usize>,
    /// Cores of clients 0, 1, ...
    pub clients: Vec<usize>,
}

impl Plan {
    /// Places `threads` on `usable` cores by `policy`.
    ///
    /// # Errors
    /// [`AffinityError`]: a core list is too short, or names a core outside `usable`.
    pub fn new(
        policy: &PinPolicy,
        usable: impl Into<Usable>,
        threads: Threads,
    ) -> Result<Self, AffinityError> {
        let Usable {
            cores: usable,
            at_once,
        } = usable.into();
        let cores: &[usize] = match policy {
            PinPolicy::None => &[],
            PinPolicy::Auto if at_once < threads.total() => &[],
            PinPolicy::Auto => &usable,
            PinPolicy::List(list) => {
                if let Some(&core) = list.iter().find(|core| !usable.contains(core)) {
                    return Err(AffinityError::NotUsable { core, usable });
                }
                if list.len() < threads.total() {
                    return Err(AffinityError::TooFew {
                        listed: list.len(),
                        threads: threads.total(),
                    });
                }
                list
            }
        };
        let rank = |cores: &[usize]| {
            let (daemons, clients) = cores.split_at(threads.daemons);
            RankCores {
                daemons: daemons.to_vec(),
                clients: clients.to_vec(),
            }
        };
        let chunks = cores.chunks_exact(threads.daemons + threads.clients);
        let pinned = chunks.take(threads.ranks).map(rank).collect();
        Ok(Self {
            threads: threads.total(),
            pinned,
            usable_cores: usable,
            at_once,
            device_cores: Vec::new(),
        })
    }

    /// Records the cores that come first because they are near the device. Records none if all
    /// usable cores are near the device.
    pub fn beside_device(self, near: &[usize]) -> Self {
        let cores = self.usable_cores.iter();
        let (mut device_cores, others): (Vec<usize>, Vec<usize>) =
            cores.partition(|core| near.contains(core));
        if others.is_empty() {
            device_cores.clear();
        }
        Self {
            device_cores,
            ..self
        }
    }

    /// Returns the core of a daemon thread, if it is pinned.
    pub fn daemon_core(&self, local_rank: usize, daemon: usize) -> Option<usize> {
        self.pinned.get(local_rank)?.daemons.get(daemon).copied()
    }

    /// Returns the core of a client thread, if it is pinned.
    pub fn client_core(&self, local_rank: usize, client: usize) -> Option<usize> {
        self.pinned.get(local_rank)?.clients.get(client).copied()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let usable = CoreList(&self.usable_cores);
        write!(f, "{} threads, usable cores {usable}", self.threads)?;
        if (1..self.usable_cores.len()).contains(&self.at_once) {
            let at_once = self.at_once;
            write!(
                f,
                " ({at_once} at a time: hardware threads share cores, or the control group has a CPU quota)"
            )?;
        }
        if !self.device_cores.is_empty() {
            let beside = CoreList(&self.device_cores);
            write!(f, ", first those beside the device, {beside}")?;
        }
        f.write_str(": ")?;
        if self.pinned.is_empty() {
            return f.write_str("not pinned");
        }
        f.write_str("pinned")?;
        for (rank, cores) in self.pinned.iter().enumerate() {
            write!(f, "; rank {rank}:")?;
            let threads = [(" daemons", &cores.daemons), (" clients", &cores.clients)];
            let mut separator = "";
            for (name, cores) in threads.into_iter().filter(|(_, cores)| !cores.is_empty()) {
                write!(f, "{separator}{name} {}", CoreList(cores))?;
                separator = ",";
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR_RANKS: Threads = Threads {
        ranks: 2,
        daemons: 1,
        clients: 2,
    };

    #[test]
    fn policy_text_round_trips() {
        for text in ["auto", "none", "0-3,8", "7", "5,3"] {
            assert_eq!(text.parse::<PinPolicy>().unwrap().to_string(), text);
        }
        assert_eq!("2-4".parse(), Ok(PinPolicy::List(vec![2, 3, 4])));
    }

    #[test]
    fn malformed_core_lists_are_refused() {
        for text in [
            "",
            "a",
            "3-1",
            "1,,2",
            "-1",
            "1-",
            "0,0",
            "0-2,1",
            "0-99999999999",
        ] {
            assert!(text.parse::<PinPolicy>().is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn this_process_can_run_somewhere() {
        let cores = usable_cores().unwrap();
        assert!(!cores.is_empty());
        std::thread::spawn(move || pin_current_thread(cores[0]).unwrap())
            .join()
            .unwrap();
    }

    #[test]
    fn a_thread_that_is_bound_finds_how_many_cores_it_could_have() {
        let (cores, allowed) = (usable_cores().unwrap(), allowed_cores().unwrap());
        assert!(allowed >= cores.len());
        let bound = move || {
            pin_current_thread(cores[0]).unwrap();
            (allowed_cores().unwrap(), usable_cores().unwrap().len())
        };
        assert_eq!(
            std::thread::spawn(bound).join().unwrap(),
            (allowed, 1),
            "and stays bound"
        );
    }

    #[test]
    fn pinning_to_a_core_that_does_not_exist_is_an_error() {
        for absent in [1023, 1024, 65_535, 65_536] {
            assert!(
                matches!(pin_current_thread(absent), Err(AffinityError::Refused { core }) if core == absent)
            );
        }
    }

    #[test]
    fn hardware_threads_of_a_core_count_once_and_are_used_last() {
        let neighbours = |core: usize| vec![core & !1, core | 1];
        assert_eq!(later_of(&[0, 1, 2, 3, 5], neighbours), [1, 3]);
        assert_eq!(
            later_of(&[0, 1, 2, 3], |core| vec![core % 2, core % 2 + 2]),
            [2, 3]
        );
        assert_eq!(
            later_of(&[0, 1], |_| Vec::new()),
            [0; 0],
            "a kernel that does not tell"
        );
        let usable = Usable {
            cores: vec![0, 2, 4, 6, 1, 3, 5, 7],
            at_once: 4,
        };
        let plan = |ranks| {
            Plan::new(
                &PinPolicy::Auto,
                usable.clone(),
                Threads {
                    ranks,
                    daemons: 1,
                    clients: 1,
                },
            )
            .unwrap()
        };
        assert_eq!(
            (plan(2).daemon_core(1, 0), plan(2).client_core(1, 0)),
            (Some(4), Some(6))
        );
        let text = plan(3).to_string();
        assert!(
            plan(3).pinned.is_empty()
                && text.contains("(4 at a time: hardware threads share cores, or"),
            "{text}"
        );
        let list: PinPolicy = "0-5".parse().unwrap();
        assert_eq!(
            Plan::new(
                &list,
                usable,
                Threads {
                    ranks: 3,
                    daemons: 1,
                    clients: 1
                }
            )
            .unwrap()
            .pinned
            .len(),
            3
        );
    }

    #[test]
    fn a_rank_is_inside_a_numa_node_if_one_has_cores_for_it() {
        let nodes = [(0..24).collect::<Vec<_>>(), (24..48).collect()];
        let place = |cores: &[usize], ranks, threads: usize| {
            let order = aligned(cores, threads, &nodes);
            assert_eq!(
                order.iter().collect::<BTreeSet<_>>(),
                cores.iter().collect()
            );
            Plan::new(
                &PinPolicy::Auto,
                order,
                Threads {
                    ranks,
                    daemons: 1,
                    clients: threads - 1,
                },
            )
            .unwrap()
        };
        let cores: Vec<usize> = (0..48).collect();
        let plan = place(&cores, 3, 10);
        assert_eq!(
            [0, 1, 2].map(|rank| plan.daemon_core(rank, 0)),
            [Some(0), Some(10), Some(24)],
            "rank 2 does not have cores of both nodes"
        );
        assert_eq!(place(&cores, 4, 12).client_core(3, 10), Some(47));
        assert_eq!(
            place(&cores, 1, 30).pinned.len(),
            1,
            "a rank that fits into no node"
        );
        let near_first = [&cores[24..], &cores[..24]].concat();
        assert_eq!(place(&near_first, 3, 10).daemon_core(2, 0), Some(0));
    }

    #[test]
    fn each_rank_gets_neighbouring_cores_daemons_first() {
        let plan = Plan::new(&PinPolicy::Auto, (0..8).collect::<Vec<_>>(), FOUR_RANKS).unwrap();
        assert_eq!(plan.daemon_core(0, 0), Some(0));
        assert_eq!(
            (plan.client_core(0, 0), plan.client_core(0, 1)),
            (Some(1), Some(2))
        );
        assert_eq!(
            (plan.daemon_core(1, 0), plan.client_core(1, 1)),
            (Some(3), Some(5))
        );
        assert_eq!(
            (plan.daemon_core(2, 0), plan.client_core(0, 2)),
            (None, None)
        );
    }

    #[test]
    fn a_plan_names_the_cores_beside_the_device() {
        let one_rank = Threads {
            ranks: 1,
            daemons: 1,
            clients: 1,
        };
        let plan = |near: &[usize]| {
            Plan::new(&PinPolicy::Auto, vec![2, 3, 0, 1], one_rank)
                .unwrap()
                .beside_device(near)
        };
        assert_eq!(plan(&[2, 3, 9]).device_cores, [2, 3]);
        let text = plan(&[2, 3]).to_string();
        assert!(
            text.starts_with(
                "2 threads, usable cores 2-3,0-1, first those beside the device, 2-3: pinned"
            ),
            "{text}"
        );
        for near in [&[][..], &[0, 1, 2, 3], &[8]] {
            assert_eq!(
                plan(near).device_cores,
                [0; 0],
                "{near:?} distinguishes no core"
            );
        }
    }

    #[test]
    fn auto_never_pins_two_threads_to_one_core() {
        let plan = Plan::new(&PinPolicy::Auto, (0..5).collect::<Vec<_>>(), FOUR_RANKS).unwrap();
        assert_eq!(plan.pinned, []);
        assert!(plan.to_string().ends_with("not pinned"));
    }

    #[test]
    fn a_list_is_used_in_its_order_or_refused() {
        let list = |text: &str| text.parse::<PinPolicy>().unwrap();
        let usable: Vec<usize> = (0..8).collect();
        let plan = Plan::new(&list("7,6,5,4,3,2"), usable.clone(), FOUR_RANKS).unwrap();
        assert_eq!(
            (plan.daemon_core(0, 0), plan.client_core(1, 1)),
            (Some(7), Some(2))
        );
        let short = Plan::new(&list("0-4"), usable.clone(), FOUR_RANKS);
        assert!(matches!(
            short,
            Err(AffinityError::TooFew {
                listed: 5,
                threads: 6
            })
        ));
        let foreign = Plan::new(&list("0-4,9"), usable, FOUR_RANKS);
        assert!(matches!(
            foreign,
            Err(AffinityError::NotUsable { core: 9, .. })
        ));
    }
}
