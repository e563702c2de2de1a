//! Transports of calls between two processes, in turn in one run: round trips and rates.
//!
//! In the order a run uses the files: [`options`] (the job), [`case`](mod@case) (one measurement of
//! it), [`rank`] (the order of a job), [`contestant`] (the interface), [`scale_rpc`], [`copy_rpc`]
//! and [`send`] (its implementations), [`load`] (the loop that all use), [`calls`] (the calls of a
//! client), [`result`] (tables and document).

pub(crate) mod calls;
mod case;
mod contestant;
mod copy_rpc;
pub(crate) mod load;
mod options;
mod rank;
mod result;
pub(crate) mod scale_rpc;
mod send;

use std::process::ExitCode;

use benchkv_harness::Failure;
use benchkv_harness::clock::Clock;
use benchkv_harness::launch::exchange::Exchange;
use benchkv_harness::launch::role::foreign_launcher;

use options::Job;
pub(crate) use options::Options;
use result::{Comparison, Outcomes};

use benchkv_harness::launch::program::{EXIT_OPTIONS, Program};

/// Runs the launcher, or one of the processes that it started.
pub(crate) fn run(program: Program, options: &Options) -> ExitCode {
    let job = match Job::resolve(options) {
        Ok(job) => job,
        Err(error) => return program.fail(EXIT_OPTIONS, &error),
    };
    let child = program.child(|exchange| rank_process(program, &job, exchange), |_| false);
    child.unwrap_or_else(|| launch(program, &job))
}

fn launch(program: Program, job: &Job) -> ExitCode {
    if let Some(launcher) = foreign_launcher() {
        return program.fail(
            EXIT_OPTIONS,
            &format!("{launcher}, but this program starts its own: start it alone"),
        );
    }
    program.launch(job, job.options.json.as_ref(), job.time_limit())
}

fn rank_process(
    program: Program,
    job: &Job,
    exchange: &mut dyn Exchange,
) -> Result<ExitCode, Failure> {
    if exchange.rank() != 0 {
        rank::serve_all(job, exchange)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (clock, mut outcomes) = (Clock::detect(), Outcomes::default());
    let raw_cacheline_ns = rank::call_all(job, exchange, clock, |load, kind, outcome| {
        outcomes.put(load, kind, outcome);
    })?;
    let result = Comparison::new(job, &outcomes, raw_cacheline_ns, clock.source())?;
    Ok(program.show(&result, job.options.json.as_ref(), result.defect()))
}
