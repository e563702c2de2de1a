//! The result as a flat table: a row for the job, one for each run, one for each rank. The options are repeated on each row, so that a
//! row stands alone and tables of several jobs can be concatenated.

use std::borrow::Cow;

use engine::activity::{ActivityRates, FIGURES};
use engine::backend::counter_names;
use engine::client::Counts;
use harness::hist::LatencySummary;

use super::{HardwareCounters, JobResult, Measured, OpenLoop, RankResult, RunResult};

/// A row: its subject, in the job it belongs to.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    job: &'a JobResult,
    scope: Scope<'a>,
}

#[derive(Debug, Clone, Copy)]
enum Scope<'a> {
    Job,
    Run(usize, &'a RunResult),
    Rank(&'a RankResult),
}

/// A column: its name, with the unit, its type, and the function that returns a row's value. A row without such a value has no value,
/// which is not zero.
#[derive(Debug, Clone)]
pub struct Column {
    /// The name.
    pub name: Cow<'static, str>,
    /// The type, and the value in a row.
    pub cell: Cell,
}

/// A function that returns a row's value in a column, by the column's type.
#[derive(Debug, Clone, Copy)]
pub enum Cell {
    /// A word or a text.
    Text(fn(&Row<'_>) -> Option<String>),
    /// A whole number.
    Count(fn(&Row<'_>) -> Option<u64>),
    /// Any other number.
    Number(fn(&Row<'_>) -> Option<f64>),
    /// A whole number out of a list of counters.
    Fate(&'static str, fn(&Counts) -> u64),
    /// Any other number, out of a list of figures.
    Figure(fn(&ActivityRates) -> f64),
    /// The rate of a counter of a carrier.
    Rate(&'static str),
}

/// A value of a cell.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// The value of a [`Cell::Text`].
    Text(String),
    /// A whole number.
    Count(u64),
    /// Any other number.
    Number(f64),
}

impl Cell {
    /// Returns the value in a row.
    #[must_use]
    pub fn of(&self, row: &Row<'_>) -> Option<Value> {
        match self {
            Self::Text(get) => get(row).map(Value::Text),
            Self::Count(get) => get(row).map(Value::Count),
            Self::Fate(name, get) => row.fate(name, *get).map(Value::Count),
            Self::Number(get) => get(row).map(Value::Number),
            Self::Figure(get) => Some(Value::Number(get(&row.measured().activity))),
            Self::Rate(name) => Some(Value::Number(row.measured().activity.per_s.of(&format!("{name}_per_s")))),
        }
    }
}

/// Returns the rows of a job: the job, its runs, its ranks.
#[must_use]
pub fn rows(job: &JobResult) -> Vec<Row<'_>> {
    let runs = job.runs.iter().enumerate().map(|(number, run)| Scope::Run(number, run));
    let ranks = job.per_rank.iter().map(Scope::Rank);
    [Scope::Job].into_iter().chain(runs).chain(ranks).map(|scope| Row { job, scope }).collect()
}

impl Row<'_> {
    fn measured(&self) -> &Measured {
        match self.scope {
            Scope::Job => &self.job.measured,
            Scope::Run(_, run) => &run.measured,
            Scope::Rank(rank) => &rank.measured,
        }
    }

    fn scope(&self) -> &'static str {
        match self.scope {
            Scope::Job => "job",
            Scope::Run(..) => "run",
            Scope::Rank(_) => "rank",
        }
    }

    /// Returns a counter of the whole job, drain included. It has no value in a run, except for errors.
    fn fate(&self, name: &str, get: fn(&Counts) -> u64) -> Option<u64> {
        match self.scope {
            Scope::Job => Some(get(&self.job.fate)),
            Scope::Rank(rank) => Some(get(&rank.fate)),
            Scope::Run(_, run) => (name == "errors").then_some(run.errors),
        }
    }

    /// Returns a figure of the job as a whole.
    fn of_job<'b, T>(&'b self, figure: impl FnOnce(&'b JobResult) -> T) -> Option<T> {
        matches!(self.scope, Scope::Job).then(|| figure(self.job))
    }

    /// Returns the figures of the open loop, in the job or in one run.
    fn open_loop(&self) -> Option<&OpenLoop> {
        match self.scope {
            Scope::Job => self.job.open_loop.as_ref(),
            Scope::Run(_, run) => run.open_loop.as_ref(),
            Scope::Rank(_) => None,
        }
    }

    /// Returns the increase of a counter of all NICs.
    fn hardware(&self, name: &str) -> Option<u64> {
        let counters = self.of_job(|job| job.hardware_counters.as_ref())??;
        counters.iter().filter_map(|port: &HardwareCounters| port.counted(name)).reduce(|sum, more| sum + more)
    }
}

/// Returns a figure of a latency; `None` for no operations.
fn latency(summary: &LatencySummary, figure: fn(&LatencySummary) -> f64) -> Option<f64> {
    (summary.count > 0).then(|| figure(summary))
}

macro_rules! columns {
    ($($kind:ident $name:literal: $get:expr;)*) => { &[$(Column { name: Cow::Borrowed($name), cell: Cell::$kind($get) }),*] };
}

macro_rules! options {
    ($($kind:ident $name:literal: $get:expr;)*) => { columns! { $($kind $name: |row| { let get: fn(&JobResult) -> _ = $get; Some(get(row.job)) };)* } };
}

macro_rules! measured {
    ($($kind:ident $name:literal: $get:expr;)*) => { columns! { $($kind $name: |row| { let get: fn(&Measured) -> _ = $get; Some(get(row.measured())) };)* } };
}

macro_rules! latencies {
    ($($summary:ident: $mean:literal $min:literal $p50:literal $p99:literal $p999:literal $max:literal;)*) => { columns! { $(
        Number $mean: |row| latency(&row.measured().$summary, |all| all.mean);
        Number $min: |row| latency(&row.measured().$summary, |all| all.min as f64);
        Number $p50: |row| latency(&row.measured().$summary, |all| all.p50 as f64);
        Number $p99: |row| latency(&row.measured().$summary, |all| all.p99 as f64);
        Number $p999: |row| latency(&row.measured().$summary, |all| all.p999 as f64);
        Number $max: |row| latency(&row.measured().$summary, |all| all.max as f64);
    )* } };
}

const ABOUT: &[Column] = columns! {
    Text "scope": |row| Some(row.scope().to_owned());
    Count "run": |row| match row.scope { Scope::Run(number, _) => Some(number as u64), _ => None };
    Count "rank": |row| match row.scope { Scope::Rank(rank) => Some(rank.rank as u64), _ => None };
};

const OPTIONS: &[Column] = options! {
    Text "backend": |job| job.backend.to_string();
    Text "carrier": |job| job.carrier.to_string();
    Text "device": |job| job.device.clone();
    Count "ranks": |job| job.ranks as u64;
    Count "server_threads": |job| job.server_threads as u64;
    Count "client_threads": |job| job.client_threads as u64;
    Count "queue_depth": |job| job.queue_depth as u64;
    Count "seed": |job| job.seed;
    Number "duration_s": |job| job.options.duration;
    Number "warmup_s": |job| job.options.warmup;
    Count "key_range": |job| job.options.workload.key_range;
    Count "value_size": |job| job.options.workload.value_bytes as u64;
    Text "preload": |job| job.options.workload.preload.to_string();
    Number "read_ratio": |job| job.options.workload.read_ratio;
    Number "remote_ratio": |job| job.options.workload.remote_ratio;
    Text "distribution": |job| job.options.workload.distribution.to_string();
    Count "ring_bytes": |job| job.sizes.ring_bytes;
    Text "verify": |job| job.options.workload.verify.to_string();
    Text "wait": |job| job.options.wait.to_string();
    Text "policies": |job| job.options.policies.to_string();
    Text "options_json": |job| serde_json::to_string(&job.options).unwrap_or_default();
    Text "hosts": |job| job.launcher.hosts.join(" ");
    Count "threads": |job| job.placement.threads as u64;
    Count "usable_cores": |job| job.placement.usable_cores.len() as u64;
    Text "cpu_model": |job| job.environment.cpu_model.clone();
    Text "kernel": |job| job.environment.kernel.clone();
    Text "git_commit": |job| job.environment.git_commit.clone();
    Text "build_profile": |job| job.environment.build_profile.clone();
};

const RATES: &[Column] = measured! {
    Number "total_rps": |of| of.total_rps;
    Number "local_rps": |of| of.local_rps;
    Number "remote_rps": |of| of.remote_rps;
    Count "local_ops": |of| of.local_ops;
    Count "remote_ops": |of| of.remote_ops;
    Count "not_found_ops": |of| of.not_found_ops;
};

const LATENCIES: &[Column] = latencies! {
    latency_ns: "latency_mean_ns" "latency_min_ns" "latency_p50_ns" "latency_p99_ns" "latency_p999_ns" "latency_max_ns";
    local_latency_ns: "local_mean_ns" "local_min_ns" "local_p50_ns" "local_p99_ns" "local_p999_ns" "local_max_ns";
    get_latency_ns: "get_mean_ns" "get_min_ns" "get_p50_ns" "get_p99_ns" "get_p999_ns" "get_max_ns";
    put_latency_ns: "put_mean_ns" "put_min_ns" "put_p50_ns" "put_p99_ns" "put_p999_ns" "put_max_ns";
    remote_latency_ns: "remote_mean_ns" "remote_min_ns" "remote_p50_ns" "remote_p99_ns" "remote_p999_ns" "remote_max_ns";
};

const PEAKS: &[Column] = measured! {
    Count "outstanding_peak": |of| of.activity.outstanding_peak.outstanding;
    Count "backlog_peak": |of| of.activity.backlog_peak;
};

const REST: &[Column] = columns! {
    Count "verify_failures": |row| match row.scope {
        Scope::Job => row.job.verify_failures,
        Scope::Rank(rank) => rank.verify_failures,
        Scope::Run(..) => None,
    };
    Text "pattern_hash": |row| match row.scope { Scope::Rank(rank) => Some(rank.pattern_hash.clone()), _ => None };
    Count "peak_rss_bytes": |row| match row.scope { Scope::Rank(rank) => Some(rank.peak_rss_bytes), _ => None };
    Number "total_rps_std_dev": |row| row.of_job(|job| job.over_runs.total_rps.std_dev)?;
    Number "total_rps_min": |row| row.of_job(|job| job.over_runs.total_rps.min);
    Number "total_rps_max": |row| row.of_job(|job| job.over_runs.total_rps.max);
    Number "cpu_ns_per_op": |row| row.of_job(|job| job.cpu_ns_per_op)?;
    Number "littles_law_deviation_ratio": |row| row.of_job(|job| job.littles_law.deviation);
    Count "rnr_nak_retry_err": |row| row.hardware("rnr_nak_retry_err");
    Count "out_of_buffer": |row| row.hardware("out_of_buffer");
    Count "local_ack_timeout_err": |row| row.hardware("local_ack_timeout_err");
};

const COURSE: &[Column] = columns! {
    Text "interrupted": |row| Some(row.job.interrupted.to_string());
    Number "window_s": |row| match row.scope { Scope::Run(_, run) => Some(run.duration_s), _ => None };
    Text "label": |row| row.job.options.label.clone();
    Count "ops": |row| row.job.options.ops;
    Number "rate_rps": |row| row.job.options.pace.rate;
    Text "arrivals": |row| row.job.options.pace.arrivals.map(|arrivals| arrivals.to_string());
    Number "offered_rps": |row| row.open_loop().map(|open| open.offered_rps);
    Count "due_backlog": |row| row.open_loop().map(|open| open.backlog);
    Text "kept_up": |row| row.open_loop().map(|open| open.kept_up.to_string());
    Number "issue_delay_ns": |row| row.open_loop().map(|open| open.issue_delay_ns);
};

/// Returns all columns, in their order. Each counter is a column.
pub fn columns() -> impl Iterator<Item = Column> {
    let of = |name: &'static str, cell: Cell| Column { name: name.into(), cell };
    let rates = counter_names().filter(|name| *name != "messages");
    let counted = FIGURES.iter().map(move |(name, get)| of(name, Cell::Figure(*get)));
    let counted = counted.chain(rates.map(|name| Column { name: format!("{name}_per_s").into(), cell: Cell::Rate(name) }));
    let fates = Counts::LIST.iter().map(move |(name, get)| of(name, Cell::Fate(name, *get)));
    let fixed = |lists: &'static [&[Column]]| lists.iter().copied().flatten().cloned();
    fixed(&[ABOUT, OPTIONS, COURSE, RATES, LATENCIES]).chain(counted).chain(fixed(&[PEAKS])).chain(fates).chain(fixed(&[REST]))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_column_has_a_name_of_its_own_and_is_documented() {
        let guide = include_str!("../../../docs/benchmarking/reference.md");
        let names: Vec<String> = columns().map(|column| column.name.into_owned()).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{names:?}");
        for name in names {
            assert!(guide.contains(&format!("`{name}`")), "docs/benchmarking/reference.md does not explain the column {name}");
        }
    }
}
