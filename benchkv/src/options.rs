//! Resolves the command line to values that can run: checks the options that depend on each other
//! or on this host, and computes every `auto`. The launcher and each rank compute the same values
//! from the same arguments.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::affinity::{Plan, Threads, Usable};
use benchkv_harness::launch::hosts::Hosts;
use benchkv_harness::range::{RangeError, range};
use benchkv_harness::report;
use copyrpc::ring::{MAX_RING_SIZE, MIN_RING_SIZE};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::sleep::POLL_SLICE;
use copyrpc_shm::wait::WaitStrategy;
use engine::backend::BackendError;
use engine::backend::plan::Site;
use engine::carrier::name_of;
use engine::job::{Job, Sizes, least_ring};
use engine::pace::Pace;
use engine::topology::{Carrier, Topology};
use mlx5::{DeviceSpec, SoftOptions};

use crate::cli::{JobArgs, RingChoice, WaitChoice};
use crate::launcher::Launcher;
use crate::memory::Memory;
use crate::port::PortOptions;
use crate::trace::TraceOptions;
use engine::drain;
use engine::policy::PolicyOptions;

const DEFAULT_RANKS: usize = 2;
/// Minimum and maximum size of a ring of a connection between ranks, in bytes: copyrpc's limits.
const RING_BYTES: std::ops::RangeInclusive<u64> = MIN_RING_SIZE..=MAX_RING_SIZE;
/// A job that can run: the options, and the values that follow from the options on this host.
#[derive(Debug, Clone)]
pub struct Options {
    /// The options. Every `auto`, and every option that was not given, is replaced by the value
    /// that it means.
    pub asked: JobArgs,
    /// The job to run.
    pub job: Job,
    /// The expected memory of the ranks of this host.
    pub memory: Memory,
    /// The action of an idle thread.
    pub wait: WaitStrategy,
    /// `--wait` as given. What `auto` chooses depends on the cores of the host.
    pub given_wait: WaitChoice,
    /// The launcher of the ranks, and their hosts.
    pub launcher: Launcher,
    /// The hosts of the ranks, from which `launcher` and `plan` follow.
    pub hosts: Hosts,
    /// The cores of the threads of this host.
    pub plan: Plan,
}

impl Options {
    /// Checks the options and computes the values that follow from them, for ranks that this
    /// process starts. Reads properties of this host, such as its usable cores, its limits and its
    /// devices; changes nothing.
    ///
    /// # Errors
    /// The first option that cannot be honoured.
    pub fn resolve(asked: impl Into<JobArgs>) -> Result<Self, Failure> {
        let asked = asked.into();
        let ranks = asked.ranks.unwrap_or(DEFAULT_RANKS);
        asked.check(ranks)?;
        Self::resolve_on(asked, &Hosts::one(ranks)?, None)
    }

    /// Checks and computes everything like [`resolve`](Self::resolve), for ranks that are started
    /// already: by an MPI launcher if its `library` is given.
    ///
    /// # Errors
    /// The first option that cannot be honoured.
    pub fn resolve_on(
        asked: impl Into<JobArgs>,
        hosts: &Hosts,
        library: Option<String>,
    ) -> Result<Self, Failure> {
        let (mut asked, ranks) = (asked.into(), hosts.ranks());
        if let Some(given) = asked.ranks.filter(|given| *given != ranks) {
            let either = format!("leave --ranks out, or have {given} started (mpirun -n {given})");
            return Err(format!("--ranks {given}: {ranks} were started; {either}").into());
        }
        asked.check(ranks)?;
        asked.settle(ranks);
        asked.workload.check()?;
        let launcher = Launcher::new(library, hosts, asked.server_threads + asked.client_threads);
        let (backend, carrier) = asked.axes()?;
        check_ring(asked.ring_size, carrier, asked.workload.value_bytes)?;
        let pace = asked.pace.resolve();
        let is_noticed = asked.workload.private_share() > 0.0;
        if let Some(fault) = asked.fault.filter(|_| !is_noticed) {
            let legal = "only with a --read-ratio above 0 and below 1, and without --no-verify";
            let why = "nothing would notice it";
            return Err(range("--fault", fault, why, legal.to_owned()).into());
        }
        asked.ucx_errors =
            asked
                .ucx
                .resolve(carrier, &asked.device, &asked.port, launcher.hosts.len())?;
        let own_choice = carrier.traits().library;
        if own_choice.is_none() {
            (asked.device, asked.device_by_auto) = asked.device.resolve()?;
        }
        asked.port.check(&asked.device)?;
        let legal: Vec<String> = carrier.traits().features.iter().map(name_of).collect();
        let mut features = asked.mlx5.iter().map(name_of);
        if let Some(feature) = features.find(|name| !legal.contains(name)) {
            let legal = if legal.is_empty() {
                "no value".to_owned()
            } else {
                legal.join(" or ")
            };
            let why = "the carrier has no use for it";
            return Err(range("--mlx5", feature, why, legal).into());
        }
        if own_choice.is_none() && asked.device.is_soft() && launcher.hosts.len() > 1 {
            let (device, hosts) = (&asked.device, &launcher.hosts);
            return Err(format!(
                "--device {device}: it connects the processes of one host, and the ranks are on {}: {}; name a device, such as mlx5_0, or \
                 the network of a software device with packets, soft:roce=10.1.0.0/24, or start all ranks on one host",
                hosts.len(),
                hosts.join(", ")
            )
            .into());
        }
        asked.carried_by = own_choice.map_or_else(
            || asked.device.to_string(),
            |library| library.name.to_owned(),
        );
        let topology = Topology {
            backend,
            carrier,
            ranks,
            daemons: asked.server_threads,
            clients: asked.client_threads,
        };
        let sweep = asked.sweep.as_ref();
        sweep.map_or(Ok(()), |sweep| {
            sweep.check(topology.clients, asked.queue_depth)
        })?;
        asked.device.check(&topology)?;
        asked.policies.check(&topology)?;
        let workload = asked.workload;
        let sizes = Sizes::compute(
            asked.ring_size.bytes(),
            &topology,
            asked.queue_depth,
            workload.value_bytes,
        );
        let job = Job {
            topology,
            queue_depth: asked.queue_depth,
            ops: asked.ops,
            pace,
            runs: asked.runs,
            is_frugal: false,
            workload,
            sizes,
            policies: asked.policies.clone(),
            features: asked.mlx5.clone(),
            ucx_errors: asked.ucx_errors,
            corrupts_value: asked.fault.is_some(),
        };
        let ranks_here = launcher.ranks_here.len();
        let memory = Memory::of_rank(&job).times(ranks_here);
        memory.check(asked.memory_limit)?;
        let threads = Threads {
            ranks: ranks_here,
            daemons: asked.server_threads,
            clients: asked.client_threads,
        };
        let near = asked.device.cores();
        let cores = hosts.cores_here(asked.server_threads + asked.client_threads, &near);
        let plan = Plan::new(&asked.pin, Usable::on_this_host(cores), threads)
            .map_err(|why| format!("--pin: {why}"))?
            .beside_device(&near);
        let given_wait = asked.wait;
        let wait = given_wait.strategy(WaitStrategy::auto(threads.total(), plan.at_once));
        asked.wait = wait.into();
        Ok(Self {
            asked,
            job,
            memory,
            wait,
            given_wait,
            launcher,
            hosts: hosts.clone(),
            plan,
        })
    }

    /// Returns the maximum address space that the memory of software devices takes in the process
    /// of a rank, in bytes. Only a small part of it is in use at any time.
    pub fn address_bytes(&self) -> u64 {
        let topology = self.job.topology;
        let has_soft = self.asked.device.is_soft() && topology.carrier.traits().library.is_none();
        let devices = if has_soft {
            topology.mapped_devices()
        } else {
            0
        };
        devices * SoftOptions::default().arena_bytes as u64
    }

    /// Returns the length of a measured run. In a job with a number of operations
    /// ([`ops`](Job::ops)), returns the maximum length.
    pub fn duration(&self) -> Duration {
        Duration::from_secs_f64(self.asked.duration)
    }

    /// Returns the length of the load before the first run.
    pub fn warmup(&self) -> Duration {
        Duration::from_secs_f64(self.asked.warmup)
    }

    /// Returns the devices to open; software devices connect through `shm_dir`.
    pub fn device_specs(&self, shm_dir: &Path) -> Vec<DeviceSpec> {
        let devices = self.asked.device.specs(shm_dir).into_iter();
        devices.map(|device| self.asked.port.on(device)).collect()
    }

    /// Returns the site of `rank`. Opens the shared-memory directory.
    ///
    /// # Errors
    /// [`BackendError::Setup`] with the directory's reason.
    pub fn site(&self, rank: usize) -> Result<Site, BackendError> {
        let dir = Dir::open(self.asked.shm_dir.as_deref())
            .map_err(|e| BackendError::setup("the shared-memory directory", e))?;
        Ok(Site {
            rank,
            devices: self.device_specs(dir.path()),
            dir,
        })
    }

    /// Returns the maximum time of the job: its measurements, and ample time to set up and tear
    /// down on a loaded machine.
    pub fn time_limit(&self) -> Duration {
        self.warmup()
            + self.duration() * self.job.runs as u32
            + Duration::from_secs(60)
            + drain::LONGEST
    }
}

/// Formats the plan of a run, printed before it starts.
impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Job {
            workload,
            sizes,
            topology,
            queue_depth,
            ..
        } = &self.job;
        let ranks = report::plural(workload.ranks, "rank");
        let daemons = report::plural(topology.daemons, "daemon");
        let clients = report::plural(workload.clients, "client");
        let (backend, carrier) = (topology.backend, topology.carrier);
        writeln!(
            f,
            "backend {backend}, carrier {carrier}, {} device, {ranks} x ({daemons} + {clients}), depth {queue_depth}",
            self.asked.carried_by
        )?;
        if let Some(why) = &self.asked.device_by_auto {
            writeln!(f, "--device auto is {}: {why}", self.asked.device)?;
        }
        writeln!(
            f,
            "keys {} per rank ({}){}, values of {} B, {}, {:.0} % reads, {:.0} % remote, seed {}, verify {}",
            workload.store_keys(),
            report::bytes(workload.store_bytes()),
            if workload.empty { ", empty" } else { "" },
            workload.value_bytes,
            workload.distribution,
            workload.read_ratio * 100.0,
            workload.remote_ratio * 100.0,
            workload.seed,
            if workload.verify { "on" } else { "off" }
        )?;
        // Virtual time has no caches.
        if let Some(share) = workload.touched_at_most().filter(|_| !self.job.is_frugal) {
            let (accesses, share) = (workload.accesses, 100.0 * share);
            writeln!(
                f,
                "FEW KEYS: each client repeats {accesses} accesses, so at most {share:.2} % of the keys are touched, and caches miss less than the \
                 store's size suggests; use more clients or a smaller --key-range"
            )?;
        }
        let connection = match sizes.window {
            0 => format!("ring {}", report::bytes(sizes.ring_bytes)),
            window => format!("window {window} requests"),
        };
        writeln!(
            f,
            "{connection}, delegation ring {} slots, flux {} in flight, wait {}",
            sizes.ring_slots, sizes.flux_in_flight, self.wait
        )?;
        if self.wait == WaitStrategy::Event && topology.carrier.traits().library.is_some() {
            writeln!(
                f,
                "threads with connections sleep for {POLL_SLICE:?} at most: what other ranks send does not wake them"
            )?;
        }
        if self.asked.port != PortOptions::default() {
            writeln!(f, "port: {}", self.asked.port)?;
        }
        if !self.job.features.is_empty() {
            let features: Vec<String> = self.job.features.iter().map(name_of).collect();
            writeln!(f, "mlx5: {}", features.join(", "))?;
        }
        if let Some(errors) = self.job.ucx_errors {
            writeln!(f, "errors of UCX's endpoints: {errors}")?;
        }
        if self.job.policies != PolicyOptions::default() {
            writeln!(f, "policies: {}", self.job.policies)?;
        }
        if let Some(TraceOptions { dir, interval }) = &self.asked.traced {
            let dir = dir.display();
            writeln!(f, "traces to {dir}, a sample every {interval} rounds")?;
        }
        if let Some(Pace { rate, arrivals }) = self.job.pace {
            let rate = report::rate(rate);
            writeln!(
                f,
                "open loop: {rate} of all clients together, {arrivals} arrivals"
            )?;
        }
        writeln!(f, "memory about {}", self.memory)?;
        // In virtual time (`is_frugal`) all ranks are in one process, so its limits mean nothing.
        if !self.job.is_frugal {
            let files = topology.open_files();
            write!(f, "at most {files} open files of a rank (ulimit -n)")?;
            match self.address_bytes() {
                0 => writeln!(f)?,
                mapped => writeln!(f, ", {} of addresses (ulimit -v)", report::bytes(mapped))?,
            }
        }
        writeln!(f, "{}\n{}", self.launcher, self.plan)?;
        match self.job.ops {
            Some(ops) => {
                let operations = report::plural(ops as usize, "operation");
                write!(f, "{operations} of each client")
            }
            None => {
                let runs = report::plural(self.job.runs, "run");
                let (warmup, duration) = (self.warmup(), self.duration());
                write!(f, "warm-up {warmup:?}, {runs} of {duration:?}")
            }
        }
    }
}

fn check_ring(ring: RingChoice, carrier: Carrier, value_bytes: usize) -> Result<(), RangeError> {
    let RingChoice::Bytes(given) = ring else {
        return Ok(());
    };
    let is_by_message = carrier.traits().is_by_message;
    let (lowest, most) = (*RING_BYTES.start(), *RING_BYTES.end());
    let least = least_ring(value_bytes).max(lowest);
    let legal = if is_by_message {
        "no value; leave it out".to_owned()
    } else {
        format!("auto, or a power of two from {least} to {most}")
    };
    let mut wrongs = [
        (
            is_by_message,
            "messages of this --carrier are not written into rings",
        ),
        (given < lowest, "too small to hold a batch"),
        (
            given < least,
            "too small for a message with a value of --value-size",
        ),
        (given > most, "more than is supported"),
        (!given.is_power_of_two(), "not a power of two"),
    ]
    .into_iter();
    wrongs
        .find(|(is_wrong, _)| *is_wrong)
        .map_or(Ok(()), |(_, why)| {
            Err(range("--ring-size", given, why, legal))
        })
}

#[cfg(test)]
mod tests;
