//! The changes in the course of a simulated job, as typed: [`CourseArgs`].

use std::fmt;
use std::str::FromStr;

use benchkv_harness::range::{RangeError, range};
use benchkv_harness::units;
use clap::Args;
use engine::drive::simulated::{Change, Event};
use engine::job::Job;
use engine::topology::Backend;

use super::job::JobArgs;

/// Options of the course of `benchkv sim`. Times count from the beginning of the job's warm-up.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Changes in mid-run")]
pub struct CourseArgs {
    /// Time, from the beginning of the warm-up, at which the policies and the batch window of the
    /// job begin to act. Until then the job runs as without them.
    #[arg(long, value_name = "TIME", value_parser = units::seconds)]
    pub policies_from: Option<f64>,

    /// Time at which the policies and the batch window cease to act.
    #[arg(long, value_name = "TIME", value_parser = units::seconds)]
    pub policies_until: Option<f64>,

    /// Pause all threads of this rank from the first TIME on, for the length of the second TIME.
    #[arg(long, value_name = "RANK@TIME+TIME")]
    pub pause: Option<Pause>,
}

/// The value of `--pause`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pause {
    rank: usize,
    from_s: f64,
    for_s: f64,
}

impl FromStr for Pause {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once('@')
            .and_then(|(rank, times)| Some((rank.parse().ok()?, times.split_once('+')?)));
        let (rank, (from, time)) = parts.ok_or("use RANK@TIME+TIME, as 0@2ms+1ms")?;
        Ok(Self {
            rank,
            from_s: units::seconds(from)?,
            for_s: units::seconds(time)?,
        })
    }
}

impl fmt::Display for Pause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}s+{}s", self.rank, self.from_s, self.for_s)
    }
}

impl CourseArgs {
    /// Returns the options as they are recorded.
    pub fn record(&self) -> Vec<String> {
        let Self {
            policies_from,
            policies_until,
            pause,
        } = self;
        let typed = [
            policies_from.map(|s| format!("--policies-from {s}s")),
            policies_until.map(|s| format!("--policies-until {s}s")),
            pause.map(|pause| format!("--pause {pause}")),
        ];
        typed.into_iter().flatten().collect()
    }

    /// Checks that the options have a meaning in this job.
    ///
    /// # Errors
    /// The first option that has no meaning in the job, and the legal values.
    pub fn check(&self, args: &JobArgs, job: &Job) -> Result<(), RangeError> {
        let end_s = if args.ops.is_some() {
            f64::INFINITY
        } else {
            args.warmup + args.duration * job.runs as f64
        };
        let within_job = |flag, given: String, at_s: f64| {
            let legal = || format!("a time below {end_s}s");
            let error = || range(flag, given, "the job is over by then", legal());
            (at_s < end_s).then_some(()).ok_or_else(error)
        };
        for (flag, time_s) in [
            ("--policies-from", self.policies_from),
            ("--policies-until", self.policies_until),
        ] {
            let Some(time_s) = time_s else { continue };
            within_job(flag, format!("{time_s}s"), time_s)?;
            if job.topology.backend == Backend::Direct {
                let why = "only policies and windows of daemons begin and end in mid-run, and its clients send the requests";
                let legal = "no value, so that its window acts all the time; or another --backend";
                return Err(range(flag, "with --backend direct", why, legal.to_owned()));
            }
            if !job.policies.govern() && job.policies.batch_window.batches().is_none() {
                let legal = "a policy, such as --batch-window completion:1".to_owned();
                return Err(range(
                    flag,
                    format!("{time_s}s"),
                    "the job has no policy",
                    legal,
                ));
            }
        }
        if let (Some(from_s), Some(until_s)) = (self.policies_from, self.policies_until) {
            if until_s <= from_s {
                let why = "not after --policies-from";
                let legal = format!("a time above {from_s}s");
                return Err(range("--policies-until", format!("{until_s}s"), why, legal));
            }
        }
        if let Some(pause) = self.pause {
            within_job("--pause", pause.to_string(), pause.from_s)?;
            if pause.rank >= job.topology.ranks {
                let legal = format!("a rank from 0 to {}", job.topology.ranks - 1);
                return Err(range("--pause", pause, "there is no such rank", legal));
            }
        }
        Ok(())
    }

    /// Returns the changes of a job with a warm-up and runs as in `args`.
    pub fn events(&self, args: &JobArgs, job: &Job) -> Vec<Event> {
        let policies = |at_s: f64, act| Event {
            at_ns: ns(at_s),
            change: Change::Policies(act),
        };
        let mut events = Vec::new();
        if let Some(from_s) = self.policies_from {
            events.extend([policies(0.0, false), policies(from_s, true)]);
        }
        events.extend(self.policies_until.map(|until_s| policies(until_s, false)));
        if let Some(sweep) = &args.sweep {
            for run in 0..sweep.runs() {
                let (clients, depth) = sweep.load(run, job.topology.clients, args.queue_depth);
                // The first load is also the load of the warm-up.
                let before = if run == 0 { 0.0 } else { args.warmup };
                events.push(Event {
                    at_ns: ns(before + args.duration * run as f64),
                    change: Change::Load { clients, depth },
                });
            }
        }
        events
    }

    /// Returns the paused rank, the time at which the pause begins, and the length of the pause;
    /// both times are in ns.
    pub fn stopped(&self) -> Option<(usize, u64, u64)> {
        self.pause
            .map(|pause| (pause.rank, ns(pause.from_s), ns(pause.for_s)))
    }
}

fn ns(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}
