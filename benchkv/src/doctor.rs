//! `benchkv doctor`: which of the things that a job can use this machine has, which are missing, and how to get them.
//!
//! [`probe`] examines the machine; this file judges the findings, and touches nothing.

pub mod probe;
#[cfg(test)]
mod tests;

use std::fmt;

use engine::topology::{Routing, Topology, Transport};
use harness::affinity::{PinPolicy, Plan, Threads, Usable};
use harness::machine::{HugePages, Program, Space};
use harness::report::bytes;
use mlx5::SoftOptions;
use serde::{Deserialize, Serialize};

/// Raised whenever a field of [`Diagnosis`] changes its meaning, its type or its name.
pub const SCHEMA_VERSION: u32 = 1;

/// Polling threads of the default job: two ranks with a daemon and a client each.
const DEFAULT_THREADS: Threads = Threads { ranks: 2, daemons: 1, clients: 1 };
/// Maximum bytes of shared memory of the default job.
pub const DEFAULT_SHM_BYTES: u64 = 1 << 20;
/// The first kernel with every system call that is used: `pidfd_open`.
const OLDEST_KERNEL: (u32, u32) = (5, 3);

/// The findings on a machine.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Release of the kernel, `6.1.0-18-amd64`.
    pub kernel: String,
    /// Cores this process may use.
    pub usable_cores: Result<Usable, String>,
    /// Cores of the host that are online.
    pub cores_online: usize,
    /// Whether expedited memory barriers work.
    pub membarrier: bool,
    /// The directory for shared memory: its path and room.
    pub shm: Result<(String, Space), String>,
    /// Bytes that may be locked; `None` is without limit.
    pub memlock: Option<u64>,
    /// Maximum number of files that a process may have open; `None` is without limit.
    pub open_files: Option<u64>,
    /// Maximum bytes of address space of a process; `None` is without limit.
    pub address_space: Option<u64>,
    /// Huge pages.
    pub huge_pages: HugePages,
    /// The file of each library of the driver, by the name it is loaded by; or the loader's reason.
    pub driver: Vec<(&'static str, Result<String, String>)>,
    /// The mlx5 devices; or why there are none.
    pub devices: Result<Vec<Device>, String>,
    /// The MPI library of this build; `None` without the feature.
    pub mpi_library: Option<String>,
    /// The MPI launcher.
    pub mpirun: Option<Program>,
    /// Version of UCX; or the loader's reason.
    pub ucx: Result<String, String>,
}

/// An mlx5 device.
#[derive(Debug, Clone)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// The NUMA node it is plugged into, where that is known.
    pub numa_node: Option<u32>,
    /// Its ports; or why it does not say.
    pub ports: Result<Vec<Port>, String>,
}

/// A port of a device.
#[derive(Debug, Clone)]
pub struct Port {
    /// From 1.
    pub number: u8,
    /// Whether it carries traffic.
    pub is_active: bool,
    /// State, link layer, LID and MTU, in words.
    pub text: String,
    /// The address by which peers reach it, with its GID; or why it cannot be opened. `None` for a port that is not active.
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

/// One checked item.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// Name of the item.
    pub name: String,
    /// The outcome.
    pub status: Status,
    /// The finding.
    pub found: String,
    /// How to get it, or more of it, and its use; null when all is well.
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
    fn ok(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self { name: name.into(), status: Status::Ok, found: found.into(), advice: None }
    }

    fn bad(status: Status, name: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name: name.into(), status, found: found.into(), advice: Some(advice.into()) }
    }

    fn limited(name: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::bad(Status::Limited, name, found, advice)
    }

    fn missing(name: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::bad(Status::Missing, name, found, advice)
    }
}

impl Diagnosis {
    /// Judges the findings.
    #[must_use]
    pub fn of(machine: &Machine) -> Self {
        let mut checks = vec![kernel(&machine.kernel), cores(machine), membarrier(machine.membarrier), shared_memory(&machine.shm)];
        checks.extend([open_files(machine.open_files), address_space(machine.address_space)]);
        checks.extend([memlock(machine.memlock), huge_pages(&machine.huge_pages)]);
        checks.extend(machine.driver.iter().map(|(name, file)| driver(name, file)));
        checks.extend(devices(&machine.devices));
        checks.extend([mpi(machine.mpi_library.as_deref()), mpirun(machine.mpirun.as_ref()), ucx(&machine.ucx)]);
        Self { schema_version: SCHEMA_VERSION, benchkv_version: env!("CARGO_PKG_VERSION").to_owned(), checks }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
        for (number, Check { name, status, found, advice }) in self.checks.iter().enumerate() {
            write!(f, "{}{:<8}{name:<width$}  {found}", if number > 0 { "\n" } else { "" }, status.text())?;
            if let Some(advice) = advice {
                write!(f, "\n{:8}{:width$}  -> {advice}", "", "")?;
            }
        }
        Ok(())
    }
}

impl Status {
    const fn text(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

fn kernel(release: &str) -> Check {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) >= OLDEST_KERNEL => Check::ok("kernel", release),
        _ => {
            let (major, minor) = OLDEST_KERNEL;
            Check::limited("kernel", release, format!("the local launcher needs Linux {major}.{minor} or later"))
        }
    }
}

fn cores(machine: &Machine) -> Check {
    let usable = match &machine.usable_cores {
        Ok(usable) => usable,
        Err(why) => return Check::missing("cores", why, "without the affinity mask no job can start"),
    };
    let (count, needed, online) = (usable.cores.len(), DEFAULT_THREADS.total(), machine.cores_online);
    let at_once = if usable.at_once < count { format!(", {} at a time", usable.at_once) } else { String::new() };
    let found = format!("{count} of {online} usable{at_once}, {needed} threads in the default job");
    match Plan::new(&PinPolicy::Auto, usable.clone(), DEFAULT_THREADS) {
        Ok(plan) if !plan.pinned.is_empty() => Check::ok("cores", format!("{found}: each is pinned to its own")),
        _ if usable.at_once < count && count >= needed => Check::limited(
            "cores",
            format!("{found}: they share cores"),
            "hardware threads of one core count once, and a CPU quota of the control group counts (cpu.max; docker run --cpus)",
        ),
        _ if count < online => Check::limited(
            "cores",
            format!("{found}: they share cores"),
            "this process is bound to a part of the host: taskset -p $$, the cgroup's cpuset, or the launcher's --bind-to none",
        ),
        _ => Check::limited(
            "cores",
            format!("{found}: they share cores"),
            format!("threads take turns, which latencies show: use a host with {needed} cores"),
        ),
    }
}

fn membarrier(works: bool) -> Check {
    match works {
        true => Check::ok("membarrier", "expedited"),
        false => Check::limited(
            "membarrier",
            "refused by the kernel",
            "each message costs a full fence: a kernel with CONFIG_MEMBARRIER (4.16 or later), or a container whose seccomp filter allows it",
        ),
    }
}

fn shared_memory(shm: &Result<(String, Space), String>) -> Check {
    let name = "shared memory";
    let (path, space) = match shm {
        Ok(found) => found,
        Err(why) => {
            return Check::missing(name, why, "every job needs a directory of its user for shared memory: --shm-dir DIR names another");
        }
    };
    let found = format!("{path}: {} free of {}", bytes(space.free_bytes), bytes(space.size_bytes));
    if !space.is_memory {
        let advice = "it is not a tmpfs: pages are written to a disk; mount -t tmpfs, or --shm-dir with a directory in one";
        return Check::limited(name, found, advice);
    }
    if space.free_bytes < DEFAULT_SHM_BYTES {
        let needed = bytes(DEFAULT_SHM_BYTES);
        let advice = format!("the default job may need {needed}: mount -o remount,size=1g /dev/shm, or docker run --shm-size=1g");
        return Check::limited(name, found, advice);
    }
    Check::ok(name, found)
}

/// The default job.
const DEFAULT_JOB: Topology = Topology {
    routing: Routing::Delegation,
    transport: Transport::Copyrpc,
    ranks: DEFAULT_THREADS.ranks,
    daemons: DEFAULT_THREADS.daemons,
    clients: DEFAULT_THREADS.clients,
};

fn open_files(limit: Option<u64>) -> Check {
    let (name, needed) = ("open files", DEFAULT_JOB.open_files());
    let Some(limit) = limit else { return Check::ok(name, "without limit") };
    let found = format!("{limit} (ulimit -Hn), {needed} in a rank of the default job");
    if limit >= needed {
        return Check::ok(name, found);
    }
    let advice = "ranks cannot open what they need: \"* - nofile 65536\" in /etc/security/limits.conf, LimitNOFILE= in a systemd unit, docker run \
                  --ulimit nofile=65536";
    Check::limited(name, found, advice)
}

fn address_space(limit: Option<u64>) -> Check {
    let (name, needed) = ("address space", DEFAULT_JOB.mapped_devices() * SoftOptions::default().arena_bytes as u64);
    let Some(limit) = limit else { return Check::ok(name, "without limit") };
    let found = format!("{} (ulimit -v), {} in a rank of the default job on the software device", bytes(limit), bytes(needed));
    if limit >= needed {
        return Check::ok(name, found);
    }
    Check::limited(
        name,
        found,
        "ulimit -v unlimited; or have the batch system limit memory in use in the place of addresses (h_vmem, pvmem)",
    )
}

fn memlock(limit: Option<u64>) -> Check {
    match limit {
        None => Check::ok("locked memory", "without limit"),
        Some(limit) => Check::limited(
            "locked memory",
            format!("{} (ulimit -l)", bytes(limit)),
            "a NIC locks the memory of all rings, unless the process has CAP_IPC_LOCK: \"* - memlock unlimited\" in \
             /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, docker run --ulimit memlock=-1",
        ),
    }
}

fn huge_pages(pages: &HugePages) -> Check {
    let HugePages { page_bytes, reserved, shared } = pages;
    let name = "huge pages";
    if *page_bytes == 0 {
        return Check::missing(name, "the kernel has none", "a kernel with CONFIG_HUGETLBFS; they only save address translations");
    }
    let setting = if shared.is_empty() { "unknown" } else { shared };
    let found = format!("of {}; {reserved} reserved; in shared memory: {setting}", bytes(*page_bytes));
    match shared.as_str() {
        "always" | "within_size" | "advise" | "force" => Check::ok(name, found),
        _ => Check::limited(
            name,
            found,
            "they only save address translations: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
    }
}

fn driver(library: &str, file: &Result<String, String>) -> Check {
    match file {
        Ok(file) => Check::ok(library, file),
        Err(why) => {
            Check::missing(library, why, "only a NIC needs it: apt-get install libibverbs1 ibverbs-providers (rdma-core 33 or later)")
        }
    }
}

fn devices(devices: &Result<Vec<Device>, String>) -> Vec<Check> {
    let advice = "jobs run on the software device; for a NIC (ConnectX-4 or later) modprobe mlx5_ib ib_uverbs, and in a container give it \
                  /dev/infiniband";
    match devices.as_deref() {
        Err(why) => vec![Check::missing("RDMA device", why, advice)],
        Ok([]) => vec![Check::missing("RDMA device", "no mlx5 device", advice)],
        Ok(devices) => devices.iter().flat_map(device).collect(),
    }
}

fn device(device: &Device) -> Vec<Check> {
    let node = device.numa_node.map_or_else(String::new, |node| format!(", NUMA node {node}"));
    match &device.ports {
        Err(why) => {
            vec![Check::missing(&device.name, why, "the right to open /dev/infiniband/uverbs*: be in the group that owns it, often rdma")]
        }
        Ok(ports) => ports.iter().map(|port| port_check(&device.name, &node, port)).collect(),
    }
}

fn port_check(device: &str, node: &str, port: &Port) -> Check {
    let (name, found) = (format!("{device}:{}", port.number), format!("{}{node}", port.text));
    match &port.reached_by {
        _ if !port.is_active => Check::limited(
            name,
            found,
            "it carries no traffic: a cable; on InfiniBand a subnet manager (opensm); on Ethernet ip link set DEV up",
        ),
        Some(Err(why)) => Check::limited(name, found, why),
        Some(Ok(reached_by)) => Check::ok(name, format!("{found}; {reached_by}")),
        None => Check::ok(name, found),
    }
}

fn mpi(library: Option<&str>) -> Check {
    match library {
        Some(library) => Check::ok("MPI in this build", library),
        None => Check::missing(
            "MPI in this build",
            "built without the feature mpi",
            "for mpirun and srun: apt-get install libopenmpi-dev libclang-dev, then cargo build --release -p benchkv --features mpi",
        ),
    }
}

fn mpirun(program: Option<&Program>) -> Check {
    match program {
        None => Check::missing("mpirun", "not in PATH", "for ranks on several hosts: apt-get install openmpi-bin, or your site's module"),
        Some(Program { path, version: Ok(version) }) => Check::ok("mpirun", format!("{}: {version}", path.display())),
        Some(Program { path, version: Err(why) }) => {
            Check::limited("mpirun", format!("{} does not say its version: {why}", path.display()), "try mpirun -n 1 true")
        }
    }
}

fn ucx(version: &Result<String, String>) -> Check {
    match version {
        Ok(version) => Check::ok("UCX", version),
        Err(why) => Check::missing("UCX", why, "only comparisons with it need it: apt-get install libucx0"),
    }
}
