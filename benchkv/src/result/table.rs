//! The result as a table for people.

use std::fmt;

use benchkv_harness::report::{Table, bytes, nanos, plural, rate};

use super::{EchoBaseline, JobResult, NO_DEVICE, RunSpread};
use engine::activity::{ActivityRates, WorkerReport};
use engine::policy::PolicyReport;

/// Formats the table for people.
impl fmt::Display for JobResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ranks, daemons) = (
            plural(self.ranks, "rank"),
            plural(self.server_threads, "daemon"),
        );
        let clients = plural(self.client_threads, "client");
        write!(
            f,
            "benchkv {} by {}: {ranks} x ({daemons} + {clients}), depth {}, ",
            self.backend, self.carrier, self.queue_depth
        )?;
        write!(
            f,
            "{} device, ",
            if self.device == NO_DEVICE {
                "no"
            } else {
                &self.device
            }
        )?;
        match (plural(self.options.runs, "run"), self.options.duration) {
            (runs, _) if self.interrupted => {
                writeln!(f, "{} of {runs}, interrupted", self.runs.len())?
            }
            (runs, duration_s) => match self.options.ops {
                Some(ops) => {
                    write!(f, "{} of each client", plural(ops as usize, "operation"))?;
                    writeln!(
                        f,
                        "{}",
                        if self.unissued() > 0 {
                            ", NOT ALL ISSUED"
                        } else {
                            ""
                        }
                    )?;
                }
                None => writeln!(f, "{runs} of {duration_s} s")?,
            },
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
        if self.fate.unfinished > 0 {
            let (operations, were) = (
                plural(self.fate.unfinished as usize, "operation"),
                if self.fate.unfinished == 1 {
                    "was"
                } else {
                    "were"
                },
            );
            writeln!(
                f,
                "{operations} {were} under way when the drain was cut: neither completed nor lost"
            )?;
        }
        if self.unissued() > 0 {
            let (issued, asked) = (self.fate.issued, self.fate.issued + self.unissued());
            writeln!(
                f,
                "{issued} OF {asked} OPERATIONS WERE ISSUED: the job ended before its clients had issued the others"
            )?;
        }
        if self.measured_ops() == 0 {
            writeln!(
                f,
                "NOTHING WAS MEASURED: no operation ended in a measured run"
            )?;
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
        let law = self.littles_law;
        let outstanding = law.outstanding;
        let product = law.throughput_times_latency;
        let apart = law.deviation * 100.0;
        if let Some(open_loop) = &self.open_loop {
            writeln!(f, "{open_loop}")?;
        }
        write!(
            f,
            "Little's law: {outstanding:.1} outstanding, throughput x latency {product:.1}, "
        )?;
        // Rounded before it is written, and without the sign of a zero.
        let carried = (10.0 * law.carried).round() / 10.0 + 0.0;
        writeln!(
            f,
            "carried over the edges of windows {carried:.1}: {apart:.1} % apart"
        )?;
        for EchoBaseline { echo, remote_ratio } in &self.unix_echo {
            let (rps, p50) = (rate(echo.rps), nanos(echo.latency_ns.p50 as f64));
            writeln!(
                f,
                "Unix-socket echo, depth {}: {rps}, p50 {p50}; remote operations are {remote_ratio:.1} x that",
                echo.depth
            )?;
        }
        let (environment, commit) = (&self.environment, &self.environment.git_commit);
        writeln!(
            f,
            "{}, {} cores, {}",
            environment.cpu_model, environment.cores_online, environment.kernel
        )?;
        write!(
            f,
            "{} build of commit {commit}, wait {}, clock {}",
            environment.build_profile, self.options.wait, self.clock
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
        ]
        .into_iter();
        // The ranks of a simulation have no memory of their own.
        let memory = self
            .per_rank
            .iter()
            .any(|rank| rank.peak_rss_bytes.is_some())
            .then_some("memory");
        let mut table = Table::new(columns.chain(memory));
        let failures = |failures: Option<u64>| {
            failures.map_or_else(|| "off".to_owned(), |count| count.to_string())
        };
        for rank in &self.per_rank {
            let (loops, empty) = rank.daemons.iter().fold((0, 0), |(loops, empty), daemon| {
                (loops + daemon.loops, empty + daemon.empty_loops)
            });
            let cells = [
                rank.rank.to_string(),
                rate(rank.measured.local_rps),
                rate(rank.measured.remote_rps),
                rate(rank.measured.total_rps),
                rank.fate.issued.to_string(),
                rank.fate.not_found.to_string(),
                rank.fate.errors.to_string(),
                rank.fate.lost.to_string(),
                failures(rank.verify_failures),
                format!("{:.0} %", 100.0 * empty as f64 / loops.max(1) as f64),
            ];
            table.row(cells.into_iter().chain(rank.peak_rss_bytes.map(bytes)));
        }
        let rates = [
            rate(self.measured.local_rps),
            rate(self.measured.remote_rps),
            rate(self.measured.total_rps),
        ];
        let counts = [
            self.fate.issued.to_string(),
            self.fate.not_found.to_string(),
            self.fate.errors.to_string(),
            self.fate.lost.to_string(),
            failures(self.verify_failures),
        ];
        table.row(["all".to_owned()].into_iter().chain(rates).chain(counts));
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
            table.row(
                [load]
                    .into_iter()
                    .chain(rates)
                    .chain([latency.mean, latency.p50 as f64, latency.p99 as f64].map(nanos)),
            );
        }
        Some(table)
    }

    /// Returns one line about the spread of the runs, if they repeat each other.
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

    /// Returns one line about core time, and whether there were cores for all threads.
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

    /// Returns one line about gets that found no value, if there were any: they are cheaper than
    /// gets that did.
    fn misses_line(&self) -> Option<String> {
        let (missed, gets) = (
            self.measured.not_found_ops,
            self.measured.get_latency_ns.count,
        );
        let share = 100.0 * missed as f64 / gets.max(1) as f64;
        (missed > 0)
            .then(|| format!("{missed} of {gets} measured gets found no value ({share:.1} %)"))
    }

    /// Returns one line about the connections between ranks, all threads together.
    fn transport_line(&self) -> Option<String> {
        let workers = || {
            self.per_rank
                .iter()
                .flat_map(|rank| rank.daemons.iter().chain(&rank.clients))
        };
        let all = || workers().filter_map(|worker| worker.transport.as_ref());
        let (sum, first) = (
            |name: &str| all().map(|one| one.counted.of(name)).sum::<u64>(),
            all().next()?,
        );
        let (writes, messages) = (sum("writes"), sum("messages"));
        let per_write = messages as f64 / writes.max(1) as f64;
        let peak = all().map(|t| t.backlog_peak).max().unwrap_or(0);
        let waits = sum("waits");
        let reads = sum("reads");
        let reached_by = &first.reached_by;
        let operations = self.carrier.traits().operations;
        Some(format!(
            "{writes} {operations} of {per_write:.1} messages, {waits} waits, backlog peak {peak}, {reads} READs; {reached_by}"
        ))
    }

    /// Returns one line about the rounds of the daemons that have connections: their completions,
    /// and their length beside a round trip.
    fn loop_line(&self) -> Option<String> {
        let ActivityRates {
            cqes_per_loop,
            loops_by_cqes,
            loop_ns,
            rtt_ns,
            rho,
            message_ns,
            ..
        } = &self.measured.activity;
        let [cqes_per_loop, loop_ns, rtt_ns, rho, message_ns] =
            [*cqes_per_loop, *loop_ns, *rtt_ns, *rho, *message_ns];
        if loop_ns == 0.0 {
            return None;
        }
        let [none, one, some, many, more] =
            loops_by_cqes.map(|share| format!("{:.1} %", 100.0 * share));
        let rho = if rtt_ns > 0.0 {
            format!(", T_rtt {}, rho {rho:.3}", nanos(rtt_ns))
        } else {
            String::new()
        };
        Some(format!(
            "{cqes_per_loop:.3} completions a round (0: {none}, 1: {one}, 2-10: {some}, 11-100: {many}, more: {more}); T_loop {}{rho}; {} a message",
            nanos(loop_ns),
            nanos(message_ns)
        ))
    }

    fn daemons(&self) -> impl Iterator<Item = &WorkerReport> {
        self.per_rank.iter().flat_map(|rank| &rank.daemons)
    }

    /// Returns one line about the effects of policies, all daemons together.
    fn policy_line(&self) -> Option<String> {
        let mut sum: Option<PolicyReport> = None;
        self.daemons()
            .filter_map(|daemon| daemon.policy.as_ref())
            .for_each(|report| sum.get_or_insert_default().add(report));
        Some(format!("policies: {}; {}", self.options.policies, sum?))
    }

    /// Returns one line about the series of daemons, and their dropped samples.
    fn trace_line(&self) -> Option<String> {
        let dir = self.options.traced.as_ref()?.dir.display();
        let all = || self.daemons().filter_map(|daemon| daemon.trace.as_ref());
        let (samples, thinned) = all().fold((0, 0), |(samples, thinned), one| {
            (samples + one.samples, thinned + one.thinned)
        });
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
            "p99",
            "p99.9",
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
            let times = [
                summary.mean,
                summary.p50 as f64,
                summary.p99 as f64,
                summary.p999 as f64,
                summary.max as f64,
            ];
            table.row(
                [kind.to_owned(), summary.count.to_string()]
                    .into_iter()
                    .chain(times.map(nanos)),
            );
        }
        table
    }
}
