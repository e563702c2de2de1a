//! `benchkv sim`: a job in virtual time. [`engine::drive::simulated`] lists the parts that are real
//! and the parts that are models.

use benchkv_harness::Failure;
use benchkv_harness::clock::ClockSource;
use benchkv_harness::environment::Environment;
use benchkv_harness::launch::device::{DeviceChoice, SoftDevice};
use copyrpc_shm::wait::WaitStrategy;
use engine::drive::faults::{At, Faults};
use engine::drive::simulated::{Simulated, World};
use engine::trace::recorder::Recorder;

use crate::cli::world::{Named, Nic, SimulationRecord};
use crate::cli::{JobArgs, SimArgs, WaitChoice};
use crate::memory::Memory;
use crate::options::Options;
use crate::result::{Conditions, Course, JobResult, RankReport};

pub mod calibrate;

/// Number of accesses in a client's pattern. The accesses repeat sooner than in a job in real time,
/// which affects only the distribution of keys.
const ACCESSES: usize = 4096;

/// Returns the job in virtual time, and checks whether it fits into memory.
///
/// # Errors
/// The first option that cannot be honoured.
pub fn resolve(args: &SimArgs) -> Result<Options, Failure> {
    // `Options::resolve` computes the memory of real processes, so it gets the highest limit. The
    // memory of the simulation is checked below.
    let device = DeviceChoice::Soft(SoftDevice::default()).into();
    let mut options = Options::resolve(JobArgs {
        memory_limit: Some(u64::MAX),
        device,
        ..args.job.clone()
    })?;
    options.asked.wait = WaitChoice::Busy;
    options.wait = WaitStrategy::Busy;
    options.job.workload.accesses = ACCESSES;
    options.job.is_frugal = true;
    args.course.check(&args.job, &options.job)?;
    options.memory = Memory::of_rank(&options.job).times(options.job.topology.ranks);
    options.memory.check(args.job.memory_limit)?;
    Ok(options)
}

/// Runs the job. Equal options give equal results, except for [`JobResult::environment`].
///
/// # Errors
/// The simulation ended early, or a report cannot be encoded.
pub fn run(args: &SimArgs, options: &Options) -> Result<JobResult, Failure> {
    let cpu = args.world.cpu.0;
    let nic = mlx5::NicParameters {
        seed: options.job.workload.seed,
        ..args.world.nic.0
    };
    let stopped = args.course.stopped();
    let world = World {
        cpu,
        nic,
        strict: args.world.strict,
        trace_interval: options.asked.traced.as_ref().map(|trace| trace.interval),
        faults: Faults {
            stopped: stopped.map(|(rank, at_ns, ns)| (At { rank, at_ns }, ns)),
            ..Faults::default()
        },
        events: args.course.events(&args.job, &options.job),
        ..World::default()
    };
    let (runs, window) = (options.job.runs, options.duration());
    let (mut outcomes, summary) =
        Simulated::new(&options.job, &world)?.run(options.warmup(), window, runs)?;
    // In a job with a number of operations, the window lasts from the first beginning to the last
    // end of a client's window.
    let clients = || outcomes.iter().flat_map(|rank| &rank.clients);
    let windows = || clients().filter_map(|client| client.windows.first());
    let ended_ns = windows().map(|window| window.ended_ns).max().unwrap_or(0);
    let started_ns = windows().map(|window| window.started_ns).min();
    let taken_ns = ended_ns - started_ns.unwrap_or(0).min(ended_ns);
    let window_s = match options.job.ops {
        Some(_) => taken_ns as f64 / 1e9,
        None => window.as_secs_f64(),
    };
    if options.job.ops.is_none() {
        // A client that is paused when a window begins or ends sees that late, and its own
        // times would make its rate too high or too low.
        let clients = outcomes.iter_mut().flat_map(|rank| &mut rank.clients);
        let windows = clients.flat_map(|client| &mut client.windows);
        let length_ns = window.as_nanos() as u64;
        windows.for_each(|seen| seen.ended_ns = seen.started_ns + length_ns);
    }
    let mut parts = Vec::with_capacity(outcomes.len());
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        let course = Course {
            windows_s: vec![window_s; runs],
            ..Course::default()
        };
        let mut report =
            RankReport::new(rank, course, outcome.clients, outcome.daemons).of_no_process();
        if let Some(trace) = &options.asked.traced {
            let series = outcome.series.iter().map(Recorder::series);
            let written = trace.write(rank, series);
            written.unwrap_or_else(|failure| report.add_trace_failure(&*failure));
        }
        parts.push(serde_json::to_vec(&report)?);
    }
    let conditions = Conditions {
        clock: ClockSource::Virtual,
        environment: Environment::detect(),
    };
    let simulation = SimulationRecord {
        cpu: cpu.record(),
        nic: Nic::from(nic).record(),
        course: args.course.record(),
        summary,
    };
    Ok(JobResult {
        simulation: Some(simulation),
        ..JobResult::reduce(options, conditions, &parts)?
    })
}

#[cfg(test)]
mod tests;
