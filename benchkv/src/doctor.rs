//! `benchkv doctor`: checks whether this machine has the things that a job can use, and reports how
//! to get the missing things.
//!
//! [`probe`] examines the machine; this file judges the findings, and touches nothing.

pub mod probe;
#[cfg(test)]
mod tests;

use std::fmt;

use benchkv_harness::affinity::{PinPolicy, Plan, Threads, Usable};
use benchkv_harness::machine::{HugePages, Program, Space};
use benchkv_harness::report::bytes;
use engine::topology::{Backend, Carrier, Topology};
use mlx5::SoftOptions;
use serde::{Deserialize, Serialize};

/// Version of the document. It is raised whenever a field of [`Diagnosis`] changes its meaning, its
/// type or its name.
pub const SCHEMA_VERSION: u32 = 1;

/// Polling threads of the default job: two ranks with a daemon and a client each.
const DEFAULT_THREADS: Threads = Threads {
    ranks: 2,
    daemons: 1,
    clients: 1,
};
/// Maximum bytes of shared memory of the default job.
pub const DEFAULT_SHM_BYTES: u64 = 1 << 20;
/// The first kernel with all system calls that are used. The newest of them is `pidfd_open`.
const OLDEST_KERNEL: (u32, u32) = (5, 3);

/// The findings on a machine.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Release of the kernel, for example `6.1.0-18-amd64`.
    pub kernel: String,
    /// Cores this process may use.
    pub usable_cores: Result<Usable, String>,
    /// Cores of the host that are online.
    pub cores_online: usize,
    /// Whether expedited memory barriers work.
    pub membarrier: bool,
    /// The directory for shared memory: its path, and the size of its file system.
    pub shm: Result<(String, Space), String>,
    /// Number of bytes that may be locked; `None` if there is no limit.
    pub memlock: Option<u64>,
    /// Maximum number of files that a process may have open; `None` if there is no limit.
    pub open_files: Option<u64>,
    /// Maximum address space of a process, in bytes; `None` if there is no limit.
    pub address_space: Option<u64>,
    /// Huge pages.
    pub huge_pages: HugePages,
    /// Each library of the driver: the name by which it is loaded, and its file, or the loader's
    /// reason why it was not loaded.
    pub driver: Vec<(&'static str, Result<String, String>)>,
    /// The RDMA devices, or the reason why there are none.
    pub devices: Result<Vec<Device>, String>,
    /// The MPI library of this build; `None` without the feature.
    pub mpi_library: Option<String>,
    /// The MPI launcher.
    pub mpirun: Option<Program>,
    /// Version of UCX, or the loader's reason why it was not loaded.
    pub ucx: Result<String, String>,
}

/// An RDMA device.
#[derive(Debug, Clone)]
pub struct Device {
    /// Name of the device.
    pub name: String,
    /// The NUMA node of the device, if it is known.
    pub numa_node: Option<u32>,
    /// Ports of the device, or the reason why it does not report them.
    pub ports: Result<Vec<Port>, String>,
}

/// A port of a device.
#[derive(Debug, Clone)]
pub struct Port {
    /// Number of the port, from 1.
    pub number: u8,
    /// Whether the port carries traffic.
    pub is_active: bool,
    /// State, link layer, LID and MTU, in words.
    pub text: String,
    /// The address by which peers reach the port (RoCE version and GID, or LID), and whether this
    /// process drives the device directly or through the calls of libibverbs (a relay); or the
    /// reason why the port cannot be opened. `None` for a port that is not active.
    pub reached_by: Option<Result<String, String>>,
}

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Present, and complete.
    Ok,
    /// Present, but limited.
    Limited,
    /// Not present, or not usable.
    Missing,
}

/// A checked item.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Name of the item.
    pub name: String,
    /// The outcome.
    pub status: Status,
    /// The finding.
    pub found: String,
    /// How to get the item, or more of it, and the use of the item; null if the status is `Ok`.
    pub advice: Option<String>,
}

/// All checks: the JSON document.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Version of benchkv.
    pub benchkv_version: String,
    /// The checks, in the order of their importance.
    pub checks: Vec<Check>,
}

impl Check {
    /// Makes a check; `advice` is omitted if the status is `Ok`.
    fn new(
        name: impl Into<String>,
        status: Status,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self {
            name: name.into(),
            status,
            found: found.into(),
            advice: (status != Status::Ok).then(|| advice.into()),
        }
    }

    /// Makes a check of something that is present, or is missing with a reason.
    fn present(name: &str, found: &Result<String, String>, advice: &str) -> Self {
        let status = if found.is_ok() {
            Status::Ok
        } else {
            Status::Missing
        };
        let (Ok(text) | Err(text)) = found;
        Self::new(name, status, text, advice)
    }

    /// Makes a check of a limit, which has to be at least `needed`; a `limit` of `None` means that
    /// there is no limit. `what` formats the limit.
    fn limit(
        name: &str,
        limit: Option<u64>,
        needed: u64,
        what: impl FnOnce(u64) -> String,
        advice: &str,
    ) -> Self {
        let status = Status::limited_unless(limit.is_none_or(|limit| limit >= needed));
        let found = limit.map_or_else(|| "without limit".to_owned(), what);
        Self::new(name, status, found, advice)
    }
}

impl Diagnosis {
    /// Judges the findings.
    pub fn of(machine: &Machine) -> Self {
        let library = machine.mpi_library.clone();
        let library = library.ok_or_else(|| "built without the feature mpi".to_owned());
        let needs_driver = "only a NIC needs it: apt-get install libibverbs1 ibverbs-providers (rdma-core 33 or later)";
        let needs_mpi = "for mpirun and srun: apt-get install libopenmpi-dev libclang-dev, then cargo build --release -p benchkv --features mpi";
        let needs_ucx = "only comparisons with it need it: apt-get install libucx0";
        let mut checks = vec![
            kernel(&machine.kernel),
            cores(machine),
            membarrier(machine.membarrier),
            shared_memory(&machine.shm),
        ];
        checks.extend(limits(machine));
        checks.push(huge_pages(&machine.huge_pages));
        let driver = machine.driver.iter();
        checks.extend(driver.map(|(name, file)| Check::present(name, file, needs_driver)));
        checks.extend(devices(&machine.devices));
        checks.extend([
            Check::present("MPI in this build", &library, needs_mpi),
            mpirun(machine.mpirun.as_ref()),
            Check::present("UCX", &machine.ucx, needs_ucx),
        ]);
        Self {
            schema_version: SCHEMA_VERSION,
            benchkv_version: env!("CARGO_PKG_VERSION").to_owned(),
            checks,
        }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths = self.checks.iter().map(|check| check.name.chars().count());
        let width = widths.max().unwrap_or(0);
        for (number, check) in self.checks.iter().enumerate() {
            let Check {
                name,
                status,
                found,
                advice,
            } = check;
            let line = format!("{:<8}{name:<width$}  {found}", status.text());
            write!(f, "{}{line}", if number > 0 { "\n" } else { "" })?;
            if let Some(advice) = advice {
                write!(f, "\n{:8}{:width$}  -> {advice}", "", "")?;
            }
        }
        Ok(())
    }
}

impl Status {
    const fn limited_unless(is_ok: bool) -> Self {
        if is_ok { Self::Ok } else { Self::Limited }
    }

    const fn text(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

fn kernel(release: &str) -> Check {
    let numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut numbers = numbers.map_while(|part| part.parse::<u32>().ok());
    let version = numbers.next().zip(numbers.next());
    let is_new = version.is_some_and(|version| version >= OLDEST_KERNEL);
    let (major, minor) = OLDEST_KERNEL;
    let advice = format!("the local launcher needs Linux {major}.{minor} or later");
    Check::new("kernel", Status::limited_unless(is_new), release, advice)
}

fn cores(machine: &Machine) -> Check {
    let usable = match &machine.usable_cores {
        Ok(usable) => usable,
        Err(why) => {
            let advice = "without the affinity mask no job can start";
            return Check::new("cores", Status::Missing, why, advice);
        }
    };
    let count = usable.cores.len();
    let needed = DEFAULT_THREADS.total();
    let online = machine.cores_online;
    let at_once = if usable.at_once < count {
        format!(", {} at a time", usable.at_once)
    } else {
        String::new()
    };
    let is_pinned = Plan::new(&PinPolicy::Auto, usable.clone(), DEFAULT_THREADS)
        .is_ok_and(|plan| !plan.pinned.is_empty());
    let advice = if usable.at_once < count && count >= needed {
        "hardware threads of one core count once, and a CPU quota of the control group counts (cpu.max; docker run --cpus)".to_owned()
    } else if count < online {
        "this process is bound to a part of the host: taskset -p $$, the cgroup's cpuset, or the launcher's --bind-to none".to_owned()
    } else {
        format!("threads take turns, which latencies show: use a host with {needed} cores")
    };
    let shares = if is_pinned {
        "each is pinned to its own"
    } else {
        "they share cores"
    };
    let found = format!(
        "{count} of {online} usable{at_once}, {needed} threads in the default job: {shares}"
    );
    Check::new("cores", Status::limited_unless(is_pinned), found, advice)
}

fn membarrier(works: bool) -> Check {
    let advice = "each message costs a full fence: a kernel with CONFIG_MEMBARRIER (4.16 or later), or a container whose seccomp filter allows it";
    let found = if works {
        "expedited"
    } else {
        "refused by the kernel"
    };
    Check::new("membarrier", Status::limited_unless(works), found, advice)
}

fn shared_memory(shm: &Result<(String, Space), String>) -> Check {
    let name = "shared memory";
    let needed = bytes(DEFAULT_SHM_BYTES);
    let (path, space) = match shm {
        Ok(found) => found,
        Err(why) => {
            let advice = "every job needs a directory of its user for shared memory: --shm-dir DIR names another";
            return Check::new(name, Status::Missing, why, advice);
        }
    };
    let [free, size] = [space.free_bytes, space.size_bytes].map(bytes);
    let is_ok = space.is_memory && space.free_bytes >= DEFAULT_SHM_BYTES;
    let advice = if space.is_memory {
        format!(
            "the default job may need {needed}: mount -o remount,size=1g /dev/shm, or docker run --shm-size=1g"
        )
    } else {
        "it is not a tmpfs: pages are written to a disk; mount -t tmpfs, or --shm-dir with a directory in one".to_owned()
    };
    let found = format!("{path}: {free} free of {size}");
    Check::new(name, Status::limited_unless(is_ok), found, advice)
}

const DEFAULT_JOB: Topology = Topology {
    backend: Backend::Delegation,
    carrier: Carrier::Copyrpc,
    ranks: DEFAULT_THREADS.ranks,
    daemons: DEFAULT_THREADS.daemons,
    clients: DEFAULT_THREADS.clients,
};

fn limits(machine: &Machine) -> [Check; 3] {
    let files = DEFAULT_JOB.open_files();
    let addresses = DEFAULT_JOB.mapped_devices() * SoftOptions::default().arena_bytes as u64;
    let needs = bytes(addresses);
    [
        Check::limit(
            "open files",
            machine.open_files,
            files,
            |limit| format!("{limit} (ulimit -Hn), {files} in a rank of the default job"),
            "ranks cannot open what they need: \"* - nofile 65536\" in /etc/security/limits.conf, LimitNOFILE= in a systemd unit, docker run \
             --ulimit nofile=65536",
        ),
        Check::limit(
            "address space",
            machine.address_space,
            addresses,
            |limit| {
                let limit = bytes(limit);
                format!(
                    "{limit} (ulimit -v), {needs} in a rank of the default job on the software device"
                )
            },
            "ulimit -v unlimited; or have the batch system limit memory in use in the place of addresses (h_vmem, pvmem)",
        ),
        Check::limit(
            "locked memory",
            machine.memlock,
            u64::MAX,
            |limit| format!("{} (ulimit -l)", bytes(limit)),
            "a NIC locks the memory of all rings, unless the process has CAP_IPC_LOCK: \"* - memlock unlimited\" in \
             /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, docker run --ulimit memlock=-1",
        ),
    ]
}

fn huge_pages(pages: &HugePages) -> Check {
    let HugePages {
        page_bytes,
        reserved,
        shared,
    } = pages;
    let name = "huge pages";
    if *page_bytes == 0 {
        let advice = "a kernel with CONFIG_HUGETLBFS; they only save address translations";
        return Check::new(name, Status::Missing, "the kernel has none", advice);
    }
    let setting = if shared.is_empty() { "unknown" } else { shared };
    let is_used = ["always", "within_size", "advise", "force"].contains(&&**shared);
    let page = bytes(*page_bytes);
    let found = format!("of {page}; {reserved} reserved; in shared memory: {setting}");
    let advice = "they only save address translations: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
    Check::new(name, Status::limited_unless(is_used), found, advice)
}

fn devices(devices: &Result<Vec<Device>, String>) -> Vec<Check> {
    let none = |why: &str| {
        let advice = "jobs run on the software device; for a NIC (ConnectX-4 or later) modprobe mlx5_ib ib_uverbs, and in a container give \
                      it /dev/infiniband";
        vec![Check::new("RDMA device", Status::Missing, why, advice)]
    };
    match devices.as_deref() {
        Err(why) => none(why),
        Ok([]) => none("no mlx5 device"),
        Ok(devices) => devices.iter().flat_map(device).collect(),
    }
}

fn device(device: &Device) -> Vec<Check> {
    let name = &device.name;
    let node = device.numa_node;
    let node = node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
    let denied =
        "the right to open /dev/infiniband/uverbs*: be in the group that owns it, often rdma";
    match &device.ports {
        Err(why) => vec![Check::new(name, Status::Missing, why, denied)],
        Ok(ports) => {
            let ports = ports.iter();
            ports.map(|port| port_check(name, &node, port)).collect()
        }
    }
}

fn port_check(device: &str, node: &str, port: &Port) -> Check {
    let (reached_by, advice) = match &port.reached_by {
        _ if !port.is_active => (
            None,
            "it carries no traffic: a cable; on InfiniBand a subnet manager (opensm); on Ethernet ip link set DEV up",
        ),
        Some(Err(why)) => (None, &**why),
        Some(Ok(reached_by)) => (Some(format!("; {reached_by}")), ""),
        None => (Some(String::new()), ""),
    };
    let behind = reached_by.as_deref().unwrap_or_default();
    let found = format!("{}{node}{behind}", port.text);
    let status = Status::limited_unless(reached_by.is_some());
    Check::new(format!("{device}:{}", port.number), status, found, advice)
}

fn mpirun(program: Option<&Program>) -> Check {
    let (status, found, advice) = match program {
        None => (
            Status::Missing,
            "not in PATH".to_owned(),
            "for ranks on several hosts: apt-get install openmpi-bin, or your site's module",
        ),
        Some(Program {
            path,
            version: Ok(version),
        }) => (Status::Ok, format!("{}: {version}", path.display()), ""),
        Some(Program {
            path,
            version: Err(why),
        }) => (
            Status::Limited,
            format!("{} does not say its version: {why}", path.display()),
            "try mpirun -n 1 true",
        ),
    };
    Check::new("mpirun", status, found, advice)
}
