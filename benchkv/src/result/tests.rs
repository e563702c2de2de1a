use benchkv_harness::clock::Clock;
use clap::Parser;

use super::*;
use crate::cli::Cli;
use crate::options::Options;
use engine::activity::Activity;
use engine::client::{ClientReport, Counts, OpenWindow, RoundTrips, Window};
use engine::counters::TransportReport;
use engine::verify::Verdict;

const SECOND: u64 = 1_000_000_000;

fn options(args: &str) -> Options {
    Options::resolve(
        Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace())).unwrap(),
    )
    .unwrap()
}

fn conditions() -> Conditions {
    Conditions {
        clock: Clock::monotonic().source(),
        environment: Environment::detect(),
    }
}

/// Returns the report of a client that ended `local` and `remote` operations of 1 ms in each of two
/// windows of one second.
fn client(local: u64, remote: u64, verdict: Option<Verdict>) -> ClientReport {
    // A quarter of the operations are reads.
    let record = |count| {
        let mut kinds = RoundTrips::default();
        kinds.gets.record_many(1_000_000, count / 4);
        kinds.puts.record_many(1_000_000, count - count / 4);
        kinds
    };
    let outstanding_ns = u128::from((local + remote) * 1_000_000);
    let window = Window {
        started_ns: 5,
        ended_ns: 5 + SECOND,
        outstanding_ns,
        carried_ns: 0,
        local: record(local),
        remote: record(remote),
        not_found: 2,
        errors: 1,
        open_loop: OpenWindow::default(),
    };
    let completed = 2 * (local + remote) + 10;
    ClientReport {
        counts: Counts {
            issued: completed + 3,
            completed,
            errors: 2,
            not_found: 4,
            ..Counts::default()
        },
        outstanding: 1,
        windows: vec![window; 2],
        verdict,
        pattern_hash: local,
        worker: WorkerReport::default(),
    }
}

/// Returns a course with windows of these lengths, in seconds.
fn course(windows_s: &[f64]) -> Course {
    Course {
        windows_s: windows_s.to_vec(),
        ..Course::default()
    }
}

pub(super) fn verdict(failures: u64, issued: u32, highest: [u32; 2]) -> Verdict {
    Verdict {
        failures,
        first: None,
        issued,
        highest: highest.to_vec(),
    }
}

pub(super) fn reduced(verdicts: [Verdict; 2]) -> JobResult {
    let options = options("--ranks 2 --runs 2 --duration 1");
    let [first, second] = verdicts;
    let parts: Vec<Vec<u8>> = [
        client(100, 300, Some(first)),
        client(200, 400, Some(second)),
    ]
    .into_iter()
    .enumerate()
    .map(|(rank, client)| {
        let transport = TransportReport {
            device: format!("soft:lid={rank}"),
            counted: [("writes", 10), ("messages", 25)].into(),
            ..TransportReport::default()
        };
        let window = Activity {
            span_ns: SECOND,
            loops: 4,
            moved: 2,
            transport: Some(transport.clone()),
            ..Activity::default()
        };
        let daemon = WorkerReport {
            loops: 10,
            empty_loops: 5,
            transport: Some(transport),
            windows: vec![window; 2],
            ..WorkerReport::default()
        };
        serde_json::to_vec(&RankReport::new(
            rank,
            course(&[1.0, 1.0]),
            vec![client],
            vec![daemon],
        ))
        .unwrap()
    })
    .collect();
    JobResult::reduce(&options, conditions(), &parts).unwrap()
}

#[test]
fn figures_add_up_over_ranks_and_average_over_runs() {
    let result = reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])]);
    assert_eq!(
        (result.measured.local_ops, result.measured.remote_ops),
        (600, 1400)
    );
    assert!(
        (result.measured.local_rps - 300.0).abs() < 1e-6
            && (result.measured.remote_rps - 700.0).abs() < 1e-6,
        "{result:?}"
    );
    assert_eq!(
        result
            .runs
            .iter()
            .map(|run| (run.measured.local_ops, run.measured.remote_ops, run.errors))
            .collect::<Vec<_>>(),
        [(300, 700, 2); 2]
    );
    assert_eq!(
        result.fate.issued,
        result.fate.completed + result.fate.errors + result.fate.lost
    );
    assert_eq!(
        (
            result.fate.errors,
            result.fate.lost,
            result.fate.unfinished,
            result.fate.not_found,
            result.verify_failures
        ),
        (4, 2, 0, 8, Some(0))
    );
    assert_eq!(
        result
            .per_rank
            .iter()
            .map(|rank| rank.measured.remote_ops)
            .collect::<Vec<_>>(),
        [600, 800]
    );
    let run = &result.runs[1].measured.activity;
    assert_eq!(
        (
            run.loops_per_s,
            run.messages_per_loop,
            run.per_s.of("writes_per_s"),
            run.messages_per_write
        ),
        (4.0, 0.5, 20.0, 2.5)
    );
    let rank = &result.per_rank[1].measured.activity;
    assert_eq!(
        (
            rank.loops_per_s,
            rank.messages_per_loop,
            rank.per_s.of("writes_per_s"),
            rank.messages_per_write
        ),
        (4.0, 0.5, 10.0, 2.5)
    );
    assert_eq!(
        result.measured.activity.per_s.of("writes_per_s"),
        20.0,
        "of all ranks, over all runs"
    );
    let [first, second] = &result.per_rank[..] else {
        panic!("two ranks: {result:?}")
    };
    assert_ne!(first.pattern_hash, second.pattern_hash);
    let merged = |of: fn(&Measured) -> &LatencyHistogram| {
        let mut all = of(&first.measured).clone();
        all.merge(of(&second.measured)).unwrap();
        all
    };
    assert_eq!(
        merged(|of| &of.histograms_ns.local),
        result.measured.histograms_ns.local
    );
    assert_eq!(
        merged(|of| &of.histograms_ns.remote),
        result.measured.histograms_ns.remote
    );
    let kinds = [
        &result.measured.get_latency_ns,
        &result.measured.put_latency_ns,
    ]
    .map(|kind| kind.count);
    assert_eq!(
        (
            kinds,
            result.measured.not_found_ops,
            result.runs[0].measured.not_found_ops
        ),
        ([500, 1500], 8, 4)
    );
    assert_eq!(
        result.measured.histograms_ns.get.count() + result.measured.histograms_ns.put.count(),
        2000
    );
    assert_eq!(
        (
            result.over_runs.total_rps.max,
            result.over_runs.total_rps.std_dev
        ),
        (1000.0, Some(0.0))
    );
    let law = result.littles_law;
    assert!(
        (law.outstanding - 1.0).abs() < 1e-6 && (law.throughput_times_latency - 1.0).abs() < 1e-3,
        "{law:?}"
    );
    assert!(!result.is_sound(), "two operations were lost");
}

#[test]
fn a_sequence_number_that_no_rank_issued_is_a_failure_of_the_job() {
    let result = reduced([verdict(1, 50, [9, 8]), verdict(2, 60, [50, 61])]);
    assert_eq!(result.verify_failures, Some(4));
    assert_eq!(
        result.first_verify_failure.unwrap(),
        "write 61 of writer 1 was read, but it issued only 60"
    );
}

#[test]
fn the_document_parses_back_and_has_the_promised_fields() {
    let result = reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])]);
    let text = serde_json::to_string(&result).unwrap();
    assert_eq!(serde_json::from_str::<JobResult>(&text).unwrap(), result);
    let document: serde_json::Value = serde_json::from_str(&text).unwrap();
    let promised = "schema_version backend device ranks server_threads client_threads queue_depth total_rps local_ops remote_ops issued \
                    completed errors lost unfinished verify_failures latency_ns runs per_rank";
    for field in promised.split_whitespace() {
        assert!(!document[field].is_null(), "{field}");
    }
    for field in ["mean", "p50", "p90", "p99", "p999", "p9999", "max"] {
        assert!(document["latency_ns"][field].is_number(), "{field}");
    }
    assert_eq!(
        (
            document["backend"].as_str(),
            document["schema_version"].as_u64()
        ),
        (Some("delegation"), Some(9))
    );
    assert_eq!(document["carrier"], "copyrpc");
    assert_eq!(
        (
            document["runs"].as_array().unwrap().len(),
            document["per_rank"].as_array().unwrap().len()
        ),
        (2, 2)
    );
}

#[test]
fn what_a_cut_drain_leaves_is_unfinished_and_not_lost() {
    let result = measured(
        "",
        Course {
            windows_s: vec![1.0, 1.0],
            is_cut: true,
            ..Course::default()
        },
        |_| (),
    );
    assert_eq!(
        (result.fate.lost, result.fate.unfinished, result.is_sound()),
        (0, 1, true)
    );
    assert_eq!(
        result.fate.issued,
        result.fate.completed + result.fate.errors + result.fate.unfinished
    );
    assert!(
        result
            .to_string()
            .contains("1 operation was under way when the drain was cut"),
        "{result}"
    );
}

#[test]
fn a_result_without_a_measured_operation_says_so() {
    let empty = |client: &mut ClientReport| {
        client
            .windows
            .iter_mut()
            .for_each(|window| window.local = RoundTrips::default())
    };
    let none = measured("", course(&[1.0]), empty);
    let some = measured("", course(&[1.0]), |_| ());
    assert_eq!((none.measured_ops(), some.measured_ops()), (0, 100));
    assert!(
        none.to_string().contains("NOTHING WAS MEASURED")
            && !some.to_string().contains("NOTHING WAS MEASURED"),
        "{none}"
    );
}

#[test]
fn unchecked_values_are_not_reported_as_correct() {
    let options = options("--ranks 1 --runs 2 --no-verify");
    let part = serde_json::to_vec(&RankReport::new(
        0,
        course(&[1.0, 1.0]),
        vec![client(1, 0, None)],
        Vec::new(),
    ))
    .unwrap();
    let result = JobResult::reduce(&options, conditions(), &[part]).unwrap();
    assert_eq!(result.verify_failures, None);
    assert!(result.to_string().contains("off"));
}

#[test]
fn a_report_that_cannot_be_read_names_its_rank() {
    let options = options("--ranks 2");
    let good = serde_json::to_vec(&RankReport::new(
        0,
        Course::default(),
        Vec::new(),
        Vec::new(),
    ))
    .unwrap();
    let error = JobResult::reduce(&options, conditions(), &[good, b"{}".to_vec()]).unwrap_err();
    assert!(error.to_string().contains("rank 1"), "{error}");
}

#[test]
fn the_table_shows_both_ranks_and_percentiles() {
    let text = reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])]).to_string();
    for part in [
        "delegation by copyrpc: 2 ranks",
        "round trip",
        "p99.9",
        "local",
        "remote",
        "verify failures",
        "completions a round (0: ",
        "Little's law",
    ] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
}

#[test]
fn a_little_less_than_nothing_carried_over_is_written_as_nothing() {
    let mut result = reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])]);
    for (carried, written) in [
        (-0.04, "windows 0.0:"),
        (-0.06, "windows -0.1:"),
        (0.04, "windows 0.0:"),
    ] {
        result.littles_law.carried = carried;
        assert!(result.to_string().contains(written), "{carried}: {result}");
    }
}

#[test]
fn littles_law_shows_how_far_its_sides_are_apart() {
    let law = LittlesLaw::new(50.0, 45.0, 2.0);
    assert!((law.deviation - 0.06).abs() < 1e-9, "{law:?}");
    assert_eq!(LittlesLaw::new(0.0, 0.0, 0.0).deviation, 0.0);
}

#[test]
fn the_spread_is_that_of_a_sample() {
    let spread = RunSpread::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
    assert_eq!((spread.min, spread.max), (2.0, 9.0));
    assert!(
        (spread.std_dev.unwrap() - (32.0f64 / 7.0).sqrt()).abs() < 1e-12,
        "{spread:?}"
    );
    assert_eq!(
        RunSpread::of(&[3.0]),
        RunSpread {
            min: 3.0,
            max: 3.0,
            std_dev: None
        },
        "one run says nothing of the next"
    );
    assert_eq!(RunSpread::of(&[]), RunSpread::default());
}

#[test]
fn counters_are_those_of_the_ports_that_were_used() {
    let options = options("--ranks 1 --runs 2");
    let ports = |value| {
        let counters = |value| BTreeMap::from([("out_of_buffer".to_owned(), value)]);
        BTreeMap::from([
            ("mlx5_0:1".to_owned(), counters(value)),
            ("mlx5_1:1".to_owned(), counters(0)),
        ])
    };
    let counted = |device: &str| {
        let transport = TransportReport {
            device: device.to_owned(),
            ..TransportReport::default()
        };
        let daemon = WorkerReport {
            transport: Some(transport),
            ..WorkerReport::default()
        };
        let mut report = RankReport::new(
            0,
            course(&[1.0, 1.0]),
            vec![client(1, 0, None)],
            vec![daemon.clone(), daemon],
        );
        report.add_hardware_counters(ports(5), ports(12));
        let result = JobResult::reduce(
            &options,
            conditions(),
            &[serde_json::to_vec(&report).unwrap()],
        )
        .unwrap();
        result.hardware_counters.map(|ports| {
            ports
                .iter()
                .map(|port| (port.port.clone(), port.counted("out_of_buffer")))
                .collect::<Vec<_>>()
        })
    };
    assert_eq!(
        counted("mlx5_0:1"),
        Some(vec![("mlx5_0:1".to_owned(), Some(7))]),
        "two daemons, one port"
    );
    assert_eq!(counted("soft:lid=1"), None);
}

/// Returns the result of a job of one rank in which `change` was applied to the client's report.
fn measured(args: &str, course: Course, change: impl FnOnce(&mut ClientReport)) -> JobResult {
    let mut report = client(100, 0, None);
    change(&mut report);
    let part = serde_json::to_vec(&RankReport::new(0, course, vec![report], Vec::new())).unwrap();
    let runs = if args.contains("--ops") {
        ""
    } else {
        "--runs 3"
    };
    JobResult::reduce(
        &options(&format!("--ranks 1 {runs} --no-verify {args}")),
        conditions(),
        &[part],
    )
    .unwrap()
}

#[test]
fn an_interrupted_job_has_its_complete_windows_and_the_cut_one_by_its_length() {
    let interrupted = |windows_s: &[f64]| {
        let course = Course {
            is_interrupted: true,
            ..course(windows_s)
        };
        // The second window: 50 operations in a quarter of a second.
        measured("", course, |client| {
            let [_, cut] = &mut client.windows[..] else {
                panic!("two windows")
            };
            cut.ended_ns = cut.started_ns + SECOND / 4;
            cut.local = RoundTrips::default();
            cut.local.puts.record_many(1_000_000, 50);
        })
    };
    let result = interrupted(&[1.0, 0.25]);
    assert!(result.interrupted);
    let runs = result
        .runs
        .iter()
        .map(|run| {
            (
                run.duration_s,
                run.measured.local_ops,
                run.measured.total_rps.round(),
            )
        })
        .collect::<Vec<_>>();
    assert_eq!(runs, [(1.0, 100, 100.0), (0.25, 50, 200.0)]);
    assert!(
        (result.measured.total_rps - 120.0).abs() < 1e-6
            && (result.per_rank[0].measured.total_rps - 120.0).abs() < 1e-6,
        "150 in 1.25 s: {result:?}"
    );
    assert!(
        result.to_string().contains("2 of 3 runs, interrupted"),
        "{result}"
    );
    // An incomplete window of 9 ms is too short to be a run.
    assert_eq!(
        (
            interrupted(&[1.0, 0.009]).runs.len(),
            interrupted(&[1.0]).runs.len(),
            interrupted(&[]).runs.len()
        ),
        (1, 1, 0)
    );
    assert!((interrupted(&[1.0, 0.009]).measured.total_rps - 100.0).abs() < 1e-6);
    assert_eq!(
        measured("", course(&[1.0, 0.009]), |_| ()).runs.len(),
        2,
        "a run that was not cut counts, however long it was"
    );
}

#[test]
fn a_rate_that_is_not_reached_is_said_in_words() {
    let open_loop = |args: &str, due, backlog| {
        let result = measured(
            &format!("--rate 1000 {args}"),
            course(&[1.0, 1.0]),
            |client| {
                let of = |window: &mut Window| {
                    window.open_loop = OpenWindow {
                        due,
                        backlog,
                        held_ns: 30_000_000,
                    }
                };
                client.windows.iter_mut().for_each(of);
            },
        );
        assert_eq!(result.runs.len(), 2);
        (
            result.open_loop.unwrap(),
            result.to_string(),
            result.littles_law,
        )
    };
    // Of the operations due in each of two windows, 100 end.
    let (kept, text, law) = open_loop("--queue-depth 1", 101, 9);
    assert_eq!(
        (kept.due, kept.backlog, kept.kept_up),
        (202, 9, true),
        "a hundredth may stay behind"
    );
    assert!(
        (kept.offered_rps - 101.0).abs() < 1e-6 && (kept.reached_rps - 100.0).abs() < 1e-6,
        "{kept:?}"
    );
    assert!(
        (kept.issue_delay_ns - 300_000.0).abs() < 1e-3,
        "30 ms for 100 operations: {kept:?}"
    );
    assert!(
        (law.throughput_times_latency - 0.07).abs() < 1e-3,
        "an operation is outstanding from its issue: {law:?}"
    );
    assert!(
        text.contains("offered 101 /s, reached 100 /s") && !text.contains("NOT REACHED"),
        "{text}"
    );
    let (behind, text, _) = open_loop("--queue-depth 1", 103, 10);
    assert!(
        !behind.kept_up
            && text.contains("THE RATE WAS NOT REACHED")
            && text.contains("10 operations were overdue"),
        "{text}"
    );
    // A backlog of the warm-up is drained in the window.
    let (caught_up, text, _) = open_loop("--queue-depth 1", 62, 0);
    assert!(
        !caught_up.kept_up && caught_up.reached_rps > 1.6 * caught_up.offered_rps,
        "{caught_up:?}"
    );
    assert!(
        text.contains("MORE OPERATIONS ENDED THAN BECAME DUE") && text.contains("--warmup"),
        "{text}"
    );
    assert!(
        open_loop("--queue-depth 1", 99, 0).0.kept_up,
        "one may be due before"
    );
    let deep = |due| open_loop("--queue-depth 4096", due, 0).0.kept_up;
    assert!(
        deep(105),
        "what becomes due in a tenth of a second is under way at the end"
    );
    assert!(!deep(110), "a hiccup is at one end, not at each");
    assert!(
        !deep(200),
        "a queue that takes all that is due is no sign of a rate that is reached"
    );
    assert_eq!(measured("", course(&[1.0]), |_| ()).open_loop, None);
}

#[test]
fn a_short_window_or_a_deep_queue_hides_no_shortfall() {
    /// Returns whether the rate was reached in a window of `span_s`. In the window `due - late`
    /// operations ended; on average over time, `outstanding` operations were outstanding, and
    /// `held` were due and not yet issued.
    fn kept_up(span_s: f64, due: u64, late: i64, outstanding: f64, held: f64) -> bool {
        let held_ns = (held * span_s * 1e9) as u128;
        let mut tally = open_loop::OpenTally::default();
        tally.add(
            &OpenWindow {
                due,
                backlog: 0,
                held_ns,
            },
            span_s * 1e9,
        );
        let ended = due.saturating_add_signed(-late);
        OpenLoop::of_run(&tally, ended as f64 / span_s, ended, outstanding, 8_192).kept_up
    }
    assert!(
        !kept_up(0.05, 5_000, 5_000, 2_500.0, 0.0),
        "all are outstanding in a deep queue"
    );
    assert!(
        !kept_up(200e-6, 6_793, 4_700, 2_350.0, 0.0),
        "a third of the rate for 200 us"
    );
    assert!(
        !kept_up(2.0, 20_000, 900, 4.0, 450.0),
        "a twentieth less, all the time"
    );
    assert!(
        !kept_up(2.0, 20_000, 900, 4_096.0, 1e6),
        "likewise, after long overload"
    );
    assert!(
        !kept_up(2.0, 20_000, 1_900, 4.0, 90.0),
        "a pause of a tenth of the window"
    );
    assert!(kept_up(2.0, 20_000, 900, 4.0, 20.0), "a pause at the end");
    assert!(kept_up(2.0, 20_000, 200, 4.0, 100.0), "a hundredth");
    assert!(
        !kept_up(2.0, 20_000, -900, 4.0, 450.0),
        "a backlog that is drained all the time"
    );
    assert!(
        kept_up(2.0, 20_000, -900, 4.0, 20.0),
        "a backlog that is drained at once"
    );
    assert!(
        kept_up(1.0, 20, 1, 0.05, 0.0) && !kept_up(1.0, 20, 2, 1.0, 0.0),
        "few operations"
    );
    assert!(
        kept_up(0.2, 200, 8, 10.0, 0.0),
        "chance, with ten under way"
    );
}

#[test]
fn operations_that_were_asked_for_and_not_issued_make_a_result_unsound() {
    let of = |args: &str, is_interrupted| {
        measured(
            args,
            Course {
                is_interrupted,
                ..course(&[1.0])
            },
            |client| client.outstanding = 0,
        )
    };
    let sound = of("--ops 213", false);
    assert_eq!(
        (sound.fate.issued, sound.unissued(), sound.is_sound()),
        (213, 0, true)
    );
    assert!(!sound.to_string().contains("ISSUED"), "{sound}");
    let short = of("--ops 1000", false);
    assert_eq!((short.unissued(), short.is_sound()), (787, false));
    let text = short.to_string();
    assert!(
        text.contains("1000 operations of each client, NOT ALL ISSUED")
            && text.contains("213 OF 1000 OPERATIONS WERE ISSUED"),
        "{text}"
    );
    assert_eq!(of("--ops 1000", true).unissued(), 0, "the user ended it");
    assert_eq!(of("", false).unissued(), 0);
}

#[test]
fn values_that_no_job_can_have_measured_are_refused_when_they_are_read() {
    let sound =
        serde_json::to_value(reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])])).unwrap();
    let path = std::env::temp_dir().join(format!("benchkv-impossible-{}.json", std::process::id()));
    let read = |document: &serde_json::Value| {
        std::fs::write(&path, document.to_string()).unwrap();
        JobResult::read(&path).map_err(|error| error.to_string())
    };
    read(&sound).unwrap();
    for (member, value, said) in [
        ("/ranks", "0", "ranks in per_rank"),
        ("/runs", "[]", "it has no run"),
        ("/options/runs", "1", "or more than in options"),
        ("/runs/1/duration_s", "0", "took no time"),
        ("/placement/usable_cores", "[]", "without threads or cores"),
        (
            "/completed",
            "18446744073709551615",
            "more operations ended than were issued",
        ),
        (
            "/not_found",
            "100000",
            "more operations ended than were issued",
        ),
        ("/total_rps", "-1", "a rate is below 0"),
        ("/runs/0/remote_rps", "-1e9", "a rate is below 0"),
        (
            "/per_rank/1/latency_ns/p99",
            "0",
            "a percentile of latencies is below a lower one",
        ),
        (
            "/activity/empty_loops",
            "1.5",
            "a share is not between 0 and 1",
        ),
    ] {
        let mut document = sound.clone();
        *document.pointer_mut(member).unwrap() = serde_json::from_str(value).unwrap();
        let refused = read(&document).unwrap_err();
        assert!(
            refused.contains("contradicts itself: ") && refused.contains(said),
            "{member}: {refused}"
        );
    }
    for (member, value, said) in [
        ("/per_rank/1/latency_ns/p99", "null", "per_rank[1]"),
        (
            "/placement/threads",
            "\"many\"",
            "placement.threads: invalid type: string \"many\"",
        ),
        (
            "/runs/1/duration_s",
            "[]",
            "runs[1].duration_s: invalid type: sequence",
        ),
        (
            "/littles_law/carried",
            "{}",
            "littles_law.carried: invalid type: map",
        ),
    ] {
        let mut document = sound.clone();
        *document.pointer_mut(member).unwrap() = serde_json::from_str(value).unwrap();
        let refused = read(&document).unwrap_err();
        assert!(
            refused.contains("malformed result") && refused.contains(said),
            "{member}: {refused}"
        );
    }
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_job_without_a_device_says_so_in_words() {
    let mut result = reduced([verdict(0, 50, [9, 8]), verdict(0, 60, [50, 60])]);
    assert!(
        result.to_string().contains("depth 32, soft device, "),
        "{result}"
    );
    result.device = NO_DEVICE.to_owned();
    assert!(
        result.to_string().contains("depth 32, no device, "),
        "{result}"
    );
}

/// The kernel counts CPU time in hundredths of a second, so runs of less than a second together
/// have no figure.
#[test]
fn cores_of_other_programs_are_those_of_the_host_without_the_ranks() {
    for (windows_s, other_cores) in [(&[1.0, 1.0][..], Some(0.55)), (&[0.1], None)] {
        let busy = Course {
            cpu_s: 0.5,
            host_cpu_s: 1.6,
            ..course(windows_s)
        };
        let result = measured("", busy, |_| ());
        let near = |is: f64| other_cores.is_some_and(|expected: f64| (is - expected).abs() < 1e-9);
        assert_eq!(result.other_cores.is_some_and(near), other_cores.is_some());
        assert_eq!(result.other_cores.is_some(), other_cores.is_some());
    }
}
