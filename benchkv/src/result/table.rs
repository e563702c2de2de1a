//! The result as a table for people.

use std::fmt;

use benchkv_harness::hist::LatencySummary;
use benchkv_harness::report::{Table, bytes, nanos, percent, plural, rate};

use super::{JobResult, Measured, NO_DEVICE, RunSpread};
use engine::activity::WorkerReport;
use engine::client::Counts;
use engine::policy::PolicyReport;
use engine::trace::recorder::TraceReport;

const UNDER_WAY: &str = "under way when the drain was cut: neither completed nor lost";

impl fmt::Display for JobResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks = plural(self.ranks, "rank");
        let daemons = plural(self.server_threads, "daemon");
        let clients = plural(self.client_threads, "client");
        let device = if self.device == NO_DEVICE {
            "no"
        } else {
            &self.device
        };
        write!(
            f,
            "benchkv {} by {}: {ranks} x ({daemons} + {clients}), depth {}, {device} device, ",
            self.backend, self.carrier, self.queue_depth
        )?;
        let runs = plural(self.options.runs, "run");
        match self.options.ops {
            _ if self.interrupted => writeln!(f, "{} of {runs}, interrupted", self.runs.len())?,
            None => writeln!(f, "{runs} of {} s", self.options.duration)?,
            Some(ops) => {
                let operations = plural(ops as usize, "operation");
                let not_all = if self.unissued() > 0 {
                    ", NOT ALL ISSUED"
                } else {
                    ""
                };
                writeln!(f, "{operations} of each client{not_all}")?;
            }
        }
        if let Some(label) = &self.options.label {
            writeln!(f, "label: {label}")?;
        }
        if let Some(loads) = self.sweep_table() {
            writeln!(
                f,
                "\n{loads}\nAll loads together, whose means describe none of them:"
            )?;
        }
        writeln!(f, "\n{}", self.rank_table())?;
        writeln!(f, "{}", self.latency_table())?;
        let fate = &self.fate;
        match fate.unfinished {
            0 => {}
            1 => writeln!(f, "1 operation was {UNDER_WAY}")?,
            more => writeln!(f, "{more} operations were {UNDER_WAY}")?,
        }
        if self.unissued() > 0 {
            let asked = fate.issued + self.unissued();
            writeln!(
                f,
                "{} OF {asked} OPERATIONS WERE ISSUED: the job ended before its clients had issued the others",
                fate.issued
            )?;
        }
        if self.measured_ops() == 0 {
            let nothing = "NOTHING WAS MEASURED: no operation ended in a measured run";
            writeln!(f, "{nothing}")?;
        }
        for line in [
            self.runs_line(),
            self.cores_line(),
            self.misses_line(),
            self.transport_line(),
            self.loop_line(),
            self.policy_line(),
            self.trace_line(),
        ]
        .into_iter()
        .flatten()
        {
            writeln!(f, "{line}")?;
        }
        if let Some(open_loop) = &self.open_loop {
            writeln!(f, "{open_loop}")?;
        }
        let law = self.littles_law;
        let (outstanding, product) = (law.outstanding, law.throughput_times_latency);
        // The figure is rounded before it is printed, and `+ 0.0` removes the sign of a negative
        // zero.
        let carried = (10.0 * law.carried).round() / 10.0 + 0.0;
        writeln!(
            f,
            "Little's law: {outstanding:.1} outstanding, throughput x latency {product:.1}, \
             carried over the edges of windows {carried:.1}: {:.1} % apart",
            law.deviation * 100.0
        )?;
        let environment = &self.environment;
        write!(
            f,
            "{}, {} cores, {}\n{} build of commit {}, wait {}, clock {}",
            environment.cpu_model,
            environment.cores_online,
            environment.kernel,
            environment.build_profile,
            environment.git_commit,
            self.options.wait,
            self.clock
        )?;
        if let Some(failure) = &self.first_verify_failure {
            write!(f, "\nfirst verify failure: {failure}")?;
        }
        Ok(())
    }
}

impl JobResult {
    fn rank_table(&self) -> Table {
        let columns = [
            "rank",
            "local",
            "remote",
            "total",
            "issued",
            "not found",
            "errors",
            "lost",
            "verify failures",
            "empty loops",
        ];
        // The ranks of a simulation have no memory of their own, so the table then has no column
        // for it.
        let mut ranks = self.per_rank.iter();
        let has_memory = ranks.any(|rank| rank.peak_rss_bytes.is_some());
        let mut table = Table::new(columns.into_iter().chain(has_memory.then_some("memory")));
        let rates = |of: &Measured| [of.local_rps, of.remote_rps, of.total_rps].map(rate);
        let counts = |fate: &Counts, failures: Option<u64>| {
            let failures = failures.map_or_else(|| "off".to_owned(), |count| count.to_string());
            let counts = [fate.issued, fate.not_found, fate.errors, fate.lost];
            let counts = counts.map(|count| count.to_string());
            counts.into_iter().chain([failures])
        };
        for rank in &self.per_rank {
            let sum = |count: fn(&WorkerReport) -> u64| rank.daemons.iter().map(count).sum::<u64>();
            let empty = sum(|daemon| daemon.empty_loops) as f64;
            let share = 100.0 * empty / sum(|daemon| daemon.loops).max(1) as f64;
            let cells = [rank.rank.to_string()].into_iter();
            let cells = cells.chain(rates(&rank.measured));
            let cells = cells.chain(counts(&rank.fate, rank.verify_failures));
            let cells = cells.chain([format!("{share:.0} %")]);
            table.row(cells.chain(rank.peak_rss_bytes.map(bytes)));
        }
        let all = ["all".to_owned()].into_iter().chain(rates(&self.measured));
        table.row(all.chain(counts(&self.fate, self.verify_failures)));
        table
    }

    /// Returns the runs of a sweep, a row for each load.
    fn sweep_table(&self) -> Option<Table> {
        let mut table = Table::new([
            "load",
            "local",
            "remote",
            "total",
            "mean latency",
            "p50",
            "p99",
        ]);
        for (load, run) in self.sweep()?.loads().zip(&self.runs) {
            let (of, latency) = (&run.measured, run.measured.latency_ns);
            let rates = [of.local_rps, of.remote_rps, of.total_rps].map(rate);
            let times = [latency.mean, latency.p50 as f64, latency.p99 as f64].map(nanos);
            table.row([load].into_iter().chain(rates).chain(times));
        }
        Some(table)
    }

    /// Returns one line about the spread of the runs; `None` for runs that do not repeat each
    /// other.
    fn runs_line(&self) -> Option<String> {
        if self.sweep().is_some() {
            return None;
        }
        let RunSpread { min, max, std_dev } = self.over_runs.total_rps;
        let deviation = 100.0 * std_dev? / self.measured.total_rps.max(f64::MIN_POSITIVE);
        Some(format!(
            "{}: slowest {}, fastest {}, standard deviation {deviation:.1} %",
            plural(self.runs.len(), "run"),
            rate(min),
            rate(max)
        ))
    }

    fn cores_line(&self) -> Option<String> {
        let cpu = format!("{} of core time an operation", nanos(self.cpu_ns_per_op?));
        let (threads, cores) = (self.placement.threads, self.placement.usable_cores.len());
        let warning = "OVER-SUBSCRIBED: latencies and rates contain the scheduler's";
        Some(if self.is_oversubscribed() {
            format!(
                "{cpu}; {warning} ({threads} polling threads on {})",
                plural(cores, "core")
            )
        } else {
            cpu
        })
    }

    /// Returns one line about gets that found no value, if there were such gets. It is shown
    /// because they are cheaper than gets that find a value.
    fn misses_line(&self) -> Option<String> {
        let missed = self.measured.not_found_ops;
        let gets = self.measured.get_latency_ns.count;
        let share = 100.0 * missed as f64 / gets.max(1) as f64;
        (missed > 0)
            .then(|| format!("{missed} of {gets} measured gets found no value ({share:.1} %)"))
    }

    fn transport_line(&self) -> Option<String> {
        let ranks = || self.per_rank.iter();
        let workers = || ranks().flat_map(|rank| rank.daemons.iter().chain(&rank.clients));
        let all = || workers().filter_map(|worker| worker.transport.as_ref());
        let reached_by = &all().next()?.reached_by;
        let sum = |name: &str| all().map(|one| one.counted.of(name)).sum::<u64>();
        let (writes, messages) = (sum("writes"), sum("messages"));
        let per_write = messages as f64 / writes.max(1) as f64;
        let peak = all().map(|t| t.backlog_peak).max().unwrap_or(0);
        let (waits, reads) = (sum("waits"), sum("reads"));
        let operations = self.carrier.traits().operations;
        Some(format!(
            "{writes} {operations} of {per_write:.1} messages, {waits} waits, backlog peak {peak}, {reads} READs; {reached_by}"
        ))
    }

    /// Returns one line about the rounds of the daemons that have connections: their completions,
    /// and their length compared with a round trip.
    fn loop_line(&self) -> Option<String> {
        let of = &self.measured.activity;
        if of.loop_ns == 0.0 {
            return None;
        }
        let [none, one, some, many, more] = of.loops_by_cqes.map(percent);
        let rho = if of.rtt_ns > 0.0 {
            format!(", T_rtt {}, rho {:.3}", nanos(of.rtt_ns), of.rho)
        } else {
            String::new()
        };
        Some(format!(
            "{:.3} completions a round (0: {none}, 1: {one}, 2-10: {some}, 11-100: {many}, more: {more}); T_loop {}{rho}; {} a message",
            of.cqes_per_loop,
            nanos(of.loop_ns),
            nanos(of.message_ns)
        ))
    }

    fn daemons(&self) -> impl Iterator<Item = &WorkerReport> {
        self.per_rank.iter().flat_map(|rank| &rank.daemons)
    }

    fn policy_line(&self) -> Option<String> {
        let mut sum: Option<PolicyReport> = None;
        self.daemons()
            .filter_map(|daemon| daemon.policy.as_ref())
            .for_each(|report| sum.get_or_insert_default().add(report));
        Some(format!("policies: {}; {}", self.options.policies, sum?))
    }

    fn trace_line(&self) -> Option<String> {
        let dir = self.options.traced.as_ref()?.dir.display();
        let all = || self.daemons().filter_map(|daemon| daemon.trace.as_ref());
        let sum = |count: fn(&TraceReport) -> u64| all().map(count).sum::<u64>();
        let (samples, thinned) = (sum(|one| one.samples), sum(|one| one.thinned));
        let interval = all().map(|one| one.interval).max()?;
        let dropped = if thinned > 0 {
            format!("; {thinned} more were dropped so that they fit")
        } else {
            String::new()
        };
        Some(format!(
            "traces in {dir}: {samples} samples, {interval} rounds apart at most{dropped}"
        ))
    }

    fn latency_table(&self) -> Table {
        let mut table = Table::new([
            "round trip",
            "operations",
            "mean",
            "p50",
            "p90",
            "p99",
            "p99.9",
            "p99.99",
            "max",
        ]);
        let of = &self.measured;
        let kinds = [
            ("local", &of.local_latency_ns),
            ("remote", &of.remote_latency_ns),
            ("get", &of.get_latency_ns),
            ("put", &of.put_latency_ns),
            ("all", &of.latency_ns),
        ];
        for (kind, summary) in kinds.into_iter().filter(|(_, summary)| summary.count > 0) {
            let LatencySummary {
                p50,
                p90,
                p99,
                p999,
                p9999,
                max,
                ..
            } = *summary;
            let times = [p50, p90, p99, p999, p9999, max].map(|ns| nanos(ns as f64));
            let cells = [
                kind.to_owned(),
                summary.count.to_string(),
                nanos(summary.mean),
            ];
            table.row(cells.into_iter().chain(times));
        }
        table
    }
}
