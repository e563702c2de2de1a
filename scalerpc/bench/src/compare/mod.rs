//! Round trip and rate of ScaleRPC, copyrpc, SEND on reliable connections and SEND on datagrams, in
//! turn in one run.
//!
//! In the order a run uses the files: [`options`] (the job), [`rank`] (the order of a job),
//! [`contestant`] (the interface), [`scale_rpc`], [`copy_rpc`] and [`send`] (its implementations),
//! [`load`] (the one loop), [`result`] (tables and document).

mod contestant;
mod copy_rpc;
mod load;
mod options;
mod rank;
mod result;
mod scale_rpc;
mod send;

use std::process::ExitCode;

use bench::load::Failure;
use bench::program::EXIT_OPTIONS;
use harness::clock::Clock;
use launch::exchange::Exchange;
use launch::role::{Role, foreign_launcher, role};

use options::Job;
pub(crate) use options::Options;
use result::{Comparison, Outcomes};

use crate::PROGRAM;

/// Runs the launcher, or one of the processes that it started.
pub(crate) fn run(options: &Options) -> ExitCode {
    let job = match Job::resolve(options) {
        Ok(job) => job,
        Err(error) => return PROGRAM.fail(EXIT_OPTIONS, &error),
    };
    let ended = match role() {
        Ok(Role::Launcher) => return launch(&job),
        Ok(Role::Rank(mut exchange)) => {
            let rank = exchange.rank();
            rank_process(&job, &mut exchange).map_err(|error| format!("rank {rank}: {error}"))
        }
        Ok(Role::Baseline(_)) => Err("it starts no baselines".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    ended.unwrap_or_else(|error| PROGRAM.fail(1, &error))
}

fn launch(job: &Job) -> ExitCode {
    if let Some(launcher) = foreign_launcher() {
        return PROGRAM.fail(
            EXIT_OPTIONS,
            &format!("{launcher}, but this program starts its own: start it alone"),
        );
    }
    PROGRAM.launch(job, job.options.json.as_ref(), job.time_limit())
}

fn rank_process(job: &Job, exchange: &mut dyn Exchange) -> Result<ExitCode, Failure> {
    if exchange.rank() != 0 {
        rank::serve_all(job, exchange)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (clock, mut outcomes) = (Clock::detect(), Outcomes::default());
    rank::call_all(job, exchange, clock, |load, kind, outcome| {
        outcomes.put(load, kind, outcome)
    })?;
    let result = Comparison::new(job, &outcomes, clock.source());
    PROGRAM.show(&result, job.options.json.as_ref(), result.defect())
}
