//! The main job: operations of every kind, between all ranks, each of which ends and is verified.

use serde_json::Value;

use crate::job::{
    BACKENDS, Ended, Job, SHORT, Scratch, TWO_BACKENDS, WITH_RINGS, benchkv, run, turn,
};

/// Runs a short job alone. Asserts that it is sound and leaves nothing behind.
pub(crate) fn measure(args: &[&str]) -> Value {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let result = run(&dir, &[args, &["--json", "-"]].concat()).result();
    assert_sound(&result);
    dir.assert_empty();
    result
}

/// Runs a job in which each client ends 500 operations, however loaded the machine is.
pub(crate) fn run_operations(dir: &Scratch, args: &[&str]) -> Ended {
    Job::start(
        benchkv(&["--ops", "500", "--json", "-"])
            .args(args)
            .arg("--shm-dir")
            .arg(dir.path()),
    )
    .end()
}

/// Runs several backends, with the same further arguments.
fn each_of(backends: &[&str], args: &[&str], check: impl Fn(&Value)) {
    for backend in backends {
        let result = measure(&[&["--backend", backend], args].concat());
        let (way, carrier) = if *backend == "rc-send" {
            ("delegation", "rc-send")
        } else {
            (*backend, "copyrpc")
        };
        assert_eq!(
            (&result["backend"], &result["carrier"]),
            (&way.into(), &carrier.into())
        );
        check(&result);
    }
}

pub(crate) fn count(value: &Value, field: &str) -> u64 {
    value[field]
        .as_u64()
        .unwrap_or_else(|| panic!("{field} is no count: {value}"))
}

pub(crate) fn number(value: &Value, field: &str) -> f64 {
    value[field]
        .as_f64()
        .unwrap_or_else(|| panic!("{field} is no number: {value}"))
}

pub(crate) fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field]
        .as_array()
        .unwrap_or_else(|| panic!("{field} is no list: {value}"))
}

/// Asserts that every operation of the job, and of each rank, ended with the answer of a store,
/// that every value read was right, and that the clients' figures satisfy Little's law.
#[track_caller]
pub(crate) fn assert_sound(result: &Value) {
    for whose in list(result, "per_rank").iter().chain([result]) {
        assert!(count(whose, "issued") > 0, "{whose}");
        assert_eq!(count(whose, "issued"), count(whose, "completed"), "{whose}");
        assert_eq!(
            (count(whose, "errors"), count(whose, "lost")),
            (0, 0),
            "{whose}"
        );
        if result["options"]["verify"] == true {
            assert_eq!(count(whose, "verify_failures"), 0, "{result}");
        }
    }
    let law = &result["littles_law"];
    assert!(number(law, "deviation") < 0.05, "{law}");
    for field in ["issued", "completed", "local_ops", "remote_ops"] {
        let sum: u64 = list(result, "per_rank")
            .iter()
            .map(|rank| count(rank, field))
            .sum();
        assert_eq!(sum, count(result, field), "{field} of all ranks");
    }
}

pub(crate) fn daemons(result: &Value) -> impl Iterator<Item = &Value> {
    list(result, "per_rank")
        .iter()
        .flat_map(|rank| list(rank, "daemons"))
}

/// Iterates over the connections of all threads that have any.
pub(crate) fn transports(result: &Value) -> impl Iterator<Item = &Value> {
    let clients = list(result, "per_rank")
        .iter()
        .flat_map(|rank| list(rank, "clients"));
    daemons(result)
        .chain(clients)
        .map(|worker| &worker["transport"])
        .filter(|transport| !transport.is_null())
}

/// Returns the sum of a statistic over the connections.
fn transport(result: &Value, field: &str) -> u64 {
    transports(result).map(|all| count(all, field)).sum()
}

/// Asserts that a request and its response are a message each, and travel between ranks in WRITEs
/// of the device.
#[track_caller]
fn assert_remote_by_rdma(result: &Value) {
    assert_eq!(result["device"], "soft");
    assert!(
        transport(result, "messages") >= 2 * count(result, "remote_ops"),
        "{result}"
    );
    let has_written = |rank: &Value| {
        list(rank, "daemons")
            .iter()
            .any(|daemon| daemon["transport"]["writes"].as_u64() > Some(0))
    };
    assert!(list(result, "per_rank").iter().all(has_written), "{result}");
}

#[test]
fn every_rank_makes_local_and_remote_operations() {
    each_of(&TWO_BACKENDS, &[], |result| {
        assert_eq!(list(result, "per_rank").len(), 2);
        for rank in list(result, "per_rank") {
            assert!(
                count(rank, "local_ops") > 0 && count(rank, "remote_ops") > 0,
                "{rank}"
            );
        }
        assert_remote_by_rdma(result);
    });
}

/// All requests are remote, so a daemon without connections and rings has work only if the daemons
/// with connections or rings pass requests on, and vice versa. A request that is not passed on to
/// its owner is refused, which is an error.
#[test]
fn daemons_of_a_rank_pass_requests_on_to_each_other() {
    each_of(
        &["meta", "delegation"],
        &["--server-threads", "2", "--remote-ratio", "1"],
        |result| {
            assert_remote_by_rdma(result);
            for rank in list(result, "per_rank") {
                let (carriers, others): (Vec<_>, Vec<_>) = list(rank, "daemons")
                    .iter()
                    .partition(|daemon| !daemon["transport"].is_null());
                assert_eq!(
                    (carriers.len(), others.len()),
                    (1, 1),
                    "two ranks, so each has one connection: {rank}"
                );
                assert!(
                    count(others[0], "loops") > count(others[0], "empty_loops"),
                    "{rank}"
                );
            }
        },
    );
}

/// A rank has two daemons. A request reaches the daemon of its key without the other daemon, by a
/// connection from the daemon of the same number (`sharded`), or from the client (`direct`).
#[test]
fn daemons_that_own_their_connections_need_no_other() {
    for (backend, connected_clients) in [("sharded", 0), ("direct", 1)] {
        let result = measure(&[
            "--backend",
            backend,
            "--server-threads",
            "2",
            "--remote-ratio",
            "1",
        ]);
        assert_remote_by_rdma(&result);
        for rank in list(&result, "per_rank") {
            assert!(
                list(rank, "daemons")
                    .iter()
                    .all(|daemon| count(&daemon["transport"], "writes") > 0),
                "{rank}"
            );
            let clients = list(rank, "clients")
                .iter()
                .filter(|client| client["transport"]["writes"].as_u64() > Some(0));
            assert_eq!(clients.count(), connected_clients, "{rank}");
        }
    }
}

#[test]
fn sends_carry_requests_on_every_way() {
    for (backend, connected_clients) in [("meta", 0), ("sharded", 0), ("direct", 2)] {
        let args = [
            "--backend",
            backend,
            "--carrier",
            "rc-send",
            "--server-threads",
            "2",
            "--client-threads",
            "2",
            "--remote-ratio",
            "1",
        ];
        let result = measure(&[&args[..], &["--queue-depth", "100"]].concat());
        assert_eq!(
            (&result["backend"], &result["carrier"]),
            (&backend.into(), &"rc-send".into())
        );
        for rank in list(&result, "per_rank") {
            let clients = list(rank, "clients")
                .iter()
                .filter(|client| client["transport"]["writes"].as_u64() > Some(0));
            assert_eq!(clients.count(), connected_clients, "{rank}");
        }
        assert!(
            transports(&result).all(|of| of["writes"] == of["messages"]),
            "a SEND carries one message: {result}"
        );
    }
}

#[test]
fn a_job_of_a_number_of_operations_ends_with_the_last() {
    for (args, ops) in [
        ("-n 3 --client-threads 2 --ops 1000 -d 100", 6000),
        ("--ops 1 --backend direct --wait event", 2),
    ] {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let mut command = benchkv(&["--json", "-"]);
        let result = Job::start(
            command
                .args(args.split(' '))
                .arg("--shm-dir")
                .arg(dir.path()),
        )
        .end()
        .result();
        assert_eq!(
            [
                &result["issued"],
                &result["completed"],
                &result["options"]["ops"]
            ],
            [ops, ops, ops / if ops == 2 { 2 } else { 6 }]
        );
        assert_eq!(
            count(&result, "local_ops") + count(&result, "remote_ops"),
            ops,
            "all are measured"
        );
        assert_eq!(
            (&result["verify_failures"], list(&result, "runs").len()),
            (&0.into(), 1)
        );
        dir.assert_empty();
    }
}

#[test]
fn clients_of_a_rank_work_side_by_side() {
    each_of(
        &TWO_BACKENDS,
        &["--client-threads", "2", "--queue-depth", "16"],
        |result| {
            let outstanding = number(&result["littles_law"], "outstanding");
            assert!(
                outstanding > 1.5 * 2.0 * 16.0,
                "one client per rank would explain {outstanding} operations outstanding"
            );
        },
    );
}

/// A short job writes few of its keys, so a get rarely finds a value unless keys are popular.
#[test]
fn zipfian_keys_are_hit_again_where_uniform_ones_are_not() {
    let hits = |distribution: &str| {
        let result = measure(&[
            "--distribution",
            distribution,
            "--key-range",
            "4000000",
            "--read-ratio",
            "0.9",
            "--empty",
        ]);
        1.0 - count(&result, "not_found") as f64 / count(&result, "completed") as f64
    };
    let (uniform, zipfian) = (hits("uniform"), hits("zipfian:2"));
    assert!(
        zipfian > uniform + 0.3,
        "{uniform} of uniform operations, {zipfian} of zipfian ones find a value"
    );
}

#[test]
fn a_ring_too_small_for_what_is_in_flight_makes_requests_wait_and_loses_none() {
    each_of(
        &WITH_RINGS,
        &["--ring-size", "4096", "--queue-depth", "256"],
        |result| {
            assert!(transport(result, "waits") > 0, "{result}");
            assert!(
                transports(result).any(|transport| count(transport, "backlog_peak") > 0),
                "{result}"
            );
            assert!(count(result, "remote_ops") > 0, "{result}");
        },
    );
}

/// All-to-all load far above the credit: daemons that wait for each other in a circle would stop
/// forever.
#[test]
fn many_ranks_that_overrun_their_rings_do_not_wait_for_each_other() {
    each_of(
        &WITH_RINGS,
        &[
            "--ranks",
            "4",
            "--remote-ratio",
            "1",
            "--ring-size",
            "4096",
            "--queue-depth",
            "512",
        ],
        |result| {
            assert!(transport(result, "waits") > 0, "{result}");
        },
    );
}

/// Two clients with many operations each, over two connections, exceed the windows.
#[test]
fn many_ranks_that_overrun_their_windows_do_not_wait_for_each_other() {
    each_of(
        &["rc-send"],
        &[
            "--ranks",
            "3",
            "--remote-ratio",
            "1",
            "--client-threads",
            "2",
            "--queue-depth",
            "2048",
        ],
        |result| {
            assert!(transport(result, "waits") > 0, "{result}");
            assert!(
                transports(result)
                    .all(|transport| count(transport, "messages") == count(transport, "writes")),
                "{result}"
            );
        },
    );
}

#[test]
fn all_operations_can_be_remote() {
    each_of(&TWO_BACKENDS, &["--remote-ratio", "1"], |result| {
        assert_eq!(count(result, "local_ops"), 0);
        assert!(count(result, "remote_ops") > 0);
        assert_remote_by_rdma(result);
    });
}

#[test]
fn all_operations_can_be_local() {
    each_of(&TWO_BACKENDS, &["--remote-ratio", "0"], |result| {
        assert!(count(result, "local_ops") > 0);
        assert_eq!(
            (count(result, "remote_ops"), transport(result, "messages")),
            (0, 0)
        );
    });
}

/// Runs every backend on 1, 2, 4 and 8 ranks, with keys of both distributions and one or many
/// operations outstanding. By default runs a selection in which each backend has each value. With
/// `BENCHKV_TEST_SCALE` above 1, runs all combinations, each longer by this factor.
#[test]
fn every_backend_is_sound_on_any_number_of_ranks() {
    let scale: f64 =
        std::env::var("BENCHKV_TEST_SCALE").map_or(1.0, |scale| scale.parse().unwrap());
    let duration = (0.2 * scale).min(5.0).to_string();
    for (at, backend) in BACKENDS.into_iter().enumerate() {
        for (number, ranks) in [1, 2, 4, 8].into_iter().enumerate() {
            for (kind, distribution) in ["uniform", "zipfian"].into_iter().enumerate() {
                for (depth, queue_depth) in ["1", "32"].into_iter().enumerate() {
                    let selected = ((at + number) % 2, (at + number / 2) % 2) == (kind, depth);
                    if scale > 1.0 || selected {
                        let args = [
                            "--backend",
                            backend,
                            "--distribution",
                            distribution,
                            "--queue-depth",
                            queue_depth,
                        ];
                        is_sound_on(ranks, &[&args[..], &["--duration", &duration]].concat());
                    }
                }
            }
        }
    }
}

fn is_sound_on(ranks: usize, args: &[&str]) {
    let result = measure(
        &[
            args,
            &["--ranks", &ranks.to_string(), "--server-threads", "2"],
        ]
        .concat(),
    );
    assert_eq!(list(&result, "per_rank").len(), ranks, "{result}");
    assert!(
        list(&result, "per_rank")
            .iter()
            .all(|rank| count(rank, "completed") > 0),
        "{result}"
    );
    if ranks > 1 {
        assert_remote_by_rdma(&result);
    } else {
        assert_eq!(
            (count(&result, "remote_ops"), &result["device"]),
            (0, &Value::from("none"))
        );
    }
}

/// Figures per run and per rank cover windows only: the figures of the whole job are larger.
#[test]
fn what_daemons_and_connections_do_is_told_for_each_run_and_rank() {
    let result = measure(&[
        "--runs",
        "2",
        "--duration",
        "0.1",
        "--warmup",
        "0.3",
        "--remote-ratio",
        "1",
    ]);
    let activities = || {
        list(&result, "runs")
            .iter()
            .chain(list(&result, "per_rank"))
            .map(|whose| &whose["activity"])
    };
    assert_eq!(activities().count(), 4);
    for activity in activities() {
        for field in ["loops_per_s", "messages_per_loop", "writes_per_s"] {
            assert!(number(activity, field) > 0.0, "{field}: {activity}");
        }
        assert!(number(activity, "messages_per_write") >= 1.0, "{activity}");
        let shares: f64 = list(activity, "loops_by_messages")
            .iter()
            .map(|share| share.as_f64().unwrap())
            .sum();
        assert!((shares - 1.0).abs() < 1e-6, "{activity}");
    }
    let in_windows: f64 = list(&result, "runs")
        .iter()
        .map(|run| 0.1 * number(&run["activity"], "writes_per_s"))
        .sum();
    assert!(
        in_windows < transport(&result, "writes") as f64,
        "warm-up and drain are not in a window: {result}"
    );
    for daemon in daemons(&result) {
        let windows = list(daemon, "windows");
        let loops: u64 = windows.iter().map(|window| count(window, "loops")).sum();
        assert!(
            windows.len() == 2 && loops > 0 && loops < count(daemon, "loops"),
            "{daemon}"
        );
    }
}

#[test]
fn writes_only_and_reads_only_work() {
    for (ratio, has_reads) in [("0", false), ("1", true)] {
        // With `--no-verify` no access is to a private key, which would be both written and read.
        let result = measure(&["--read-ratio", ratio, "--no-verify", "--empty"]);
        assert_eq!(
            count(&result, "not_found"),
            if has_reads {
                count(&result, "completed")
            } else {
                0
            },
            "{result}"
        );
        assert!(result["verify_failures"].is_null(), "{result}");
    }
}

#[test]
fn jobs_at_once_share_a_directory() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let start = |backend| {
        Job::start(
            benchkv(&["--backend", backend, "--json", "-"])
                .args(SHORT)
                .arg("--shm-dir")
                .arg(dir.path()),
        )
    };
    let jobs = BACKENDS.map(start);
    for job in jobs {
        assert_sound(&job.end().result());
    }
    dir.assert_empty();
}

/// A value is corrupted on any path to another rank, and on its path to a store of the same rank.
#[test]
fn one_corrupted_value_is_seen() {
    let all_remote = BACKENDS.into_iter().map(|backend| (backend, "1"));
    for (backend, remote_ratio) in all_remote.chain([("delegation", "0")]) {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let ended = run_operations(
            &dir,
            &[
                "--backend",
                backend,
                "--remote-ratio",
                remote_ratio,
                "--fault",
                "corrupt-value",
            ],
        );
        ended.assert_failed(
            3,
            &[
                "the result is unsound: 0 operations lost, 1 verify failures",
                "first verify failure",
            ],
        );
        let result: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(
            (count(&result, "verify_failures"), count(&result, "lost")),
            (1, 0),
            "{result}"
        );
        assert!(result["first_verify_failure"].is_string(), "{result}");
    }
}

/// The rate is reached, or the result reports that it was not.
#[test]
fn an_open_loop_offers_its_rate() {
    let measure_once = || {
        let result = measure(&[
            "--rate",
            "2000",
            "--queue-depth",
            "256",
            "--duration",
            "0.3",
        ]);
        let open_loop = &result["open_loop"];
        let due = count(open_loop, "due");
        assert!(
            (500..=700).contains(&due),
            "0.3 s of 2,000 per second: {open_loop}"
        );
        assert!(
            count(&result, "local_ops") + count(&result, "remote_ops") < due + 512,
            "{result}"
        );
        open_loop["kept_up"] == true
    };
    // A loaded machine may pause for longer than the tolerated time.
    assert!((0..5).any(|_| measure_once()));
    // A ring of 4 KiB is too small for the rate with a round trip of 6 ms, whatever the queue
    // depth.
    let slow = [
        "--ring-size",
        "4096",
        "--device",
        "soft:rtt_us=6000",
        "--remote-ratio",
        "1",
    ];
    let result = measure(
        &[
            &[
                "--rate",
                "20000",
                "--queue-depth",
                "4096",
                "--duration",
                "0.5",
            ],
            &slow[..],
        ]
        .concat(),
    );
    let open_loop = &result["open_loop"];
    assert!(
        open_loop["kept_up"] == false
            && number(open_loop, "reached_rps") < 0.8 * number(open_loop, "offered_rps"),
        "{open_loop}"
    );
    // Latencies count from when the operations were due, and histograms are precise to a
    // thousandth: for few long operations the deviation from Little's law is below 1 %, for many
    // short operations 5 %.
    let few = ["--device", "soft:rtt_us=600", "--remote-ratio", "1"];
    let result = measure(
        &[
            &[
                "--rate",
                "1e9",
                "--arrivals",
                "poisson",
                "--queue-depth",
                "1",
            ],
            &few[..],
        ]
        .concat(),
    );
    let open_loop = &result["open_loop"];
    assert!(
        open_loop["kept_up"] == false && count(open_loop, "backlog") > 100_000_000,
        "{open_loop}"
    );
    assert!(
        number(open_loop, "reached_rps") < number(open_loop, "offered_rps") / 10.0,
        "{open_loop}"
    );
}

/// The schedule has a pause of 3.5 s between the first two operations, without an outstanding
/// operation or a message.
#[test]
fn a_job_of_operations_waits_for_those_that_are_not_due_yet() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let rate = [
        "--rate",
        "1",
        "--arrivals",
        "poisson",
        "--seed",
        "83",
        "--wait",
        "event",
    ];
    let mut command = benchkv(&["--ranks", "1", "--ops", "3", "--json", "-"]);
    let result = Job::start(command.args(rate).arg("--shm-dir").arg(dir.path()))
        .end()
        .result();
    assert_sound(&result);
    assert!(
        count(&result, "issued") == 3 && number(&list(&result, "runs")[0], "duration_s") > 3.6,
        "{result}"
    );
}

/// The jobs in virtual time have pauses of seconds, and windows of microseconds.
#[test]
fn an_open_loop_in_virtual_time_issues_all_operations_and_hides_no_shortfall() {
    let simulate = |args: &[&str]| {
        Job::start(benchkv(&["sim", "--json", "-"]).args(args))
            .end()
            .result()
    };
    let result = simulate(&[
        "--ranks",
        "1",
        "--ops",
        "50",
        "--rate",
        "1",
        "--arrivals",
        "poisson",
    ]);
    assert_sound(&result);
    assert_eq!(count(&result, "issued"), 50);
    let result = simulate(&[
        "--queue-depth",
        "4096",
        "--rate",
        "3e7",
        "--duration",
        "200us",
        "--warmup",
        "1us",
    ]);
    let open_loop = &result["open_loop"];
    assert!(
        open_loop["kept_up"] == false
            && number(open_loop, "reached_rps") < 0.8 * number(open_loop, "offered_rps"),
        "{open_loop}"
    );
}

/// Every get finds a value, in the store of any rank, without any write; and writes replace the
/// values.
#[test]
fn a_store_has_every_key_unless_it_starts_empty() {
    let measure = |args: &[&str]| {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        run_operations(&dir, args).result()
    };
    for args in [
        &["--read-ratio", "1"][..],
        &[
            "--value-size",
            "100",
            "--server-threads",
            "2",
            "--backend",
            "meta",
        ],
    ] {
        let result = measure(&[args, &["--distribution", "zipfian"]].concat());
        assert_eq!(
            (count(&result, "not_found"), count(&result, "not_found_ops")),
            (0, 0),
            "{result}"
        );
        assert!(count(&result["get_latency_ns"], "count") > 0, "{result}");
    }
    for args in [&["--read-ratio", "1"][..], &["--mix", "ycsb-c"]] {
        let result = measure(args);
        let gets = &result["get_latency_ns"];
        assert_eq!(
            (
                count(&result["put_latency_ns"], "count"),
                count(gets, "count")
            ),
            (0, count(&result, "completed")),
            "reads alone: {result}"
        );
    }
    let result = measure(&["--read-ratio", "0"]);
    assert_eq!(
        count(&result["get_latency_ns"], "count"),
        0,
        "writes alone: {result}"
    );
    let result = measure(&["--read-ratio", "1", "--no-verify", "--empty"]);
    assert_eq!(
        (
            count(&result["put_latency_ns"], "count"),
            count(&result, "not_found")
        ),
        (0, count(&result, "completed")),
        "{result}"
    );
    assert_eq!(
        count(&result["get_latency_ns"], "count"),
        count(&result, "not_found_ops"),
        "{result}"
    );
}

/// Clients verify every byte of the values.
#[test]
fn values_of_any_size_are_sound() {
    for (backend, carrier) in BACKENDS
        .into_iter()
        .flat_map(|backend| [(backend, "copyrpc"), (backend, "rc-send")])
    {
        if backend == "rc-send" && carrier != "rc-send" {
            continue;
        }
        let args = [
            "--backend",
            backend,
            "--carrier",
            carrier,
            "--value-size",
            "5000",
            "--queue-depth",
            "4",
            "--server-threads",
            "2",
        ];
        let result = measure(&[&args[..], &["--key-range", "10"]].concat());
        assert_eq!(result["options"]["value_size"], 5000);
        assert!(
            count(&result, "not_found") < count(&result, "completed") / 4,
            "{result}"
        );
    }
}

/// Each run of a job in real time has the load at its position in the sweep, which Little's law
/// shows: operations per second times latency.
#[test]
fn a_sweep_sets_the_load_of_each_run() {
    let (_turn, shm) = (turn(), Scratch::in_memory());
    for (sweep, loads) in [("depth=1,16,1", [1, 16, 1]), ("clients=2,1,2", [16, 8, 16])] {
        let args = ["--sweep", sweep, "--client-threads", "2", "-d", "16"];
        let times = ["-t", "0.3", "--warmup", "0.1", "--json", "-", "--shm-dir"];
        let mut command = benchkv(&args);
        let ended = Job::start(command.args(times).arg(shm.path())).end();
        let result = ended.result();
        assert_eq!(result["options"]["sweep"], sweep);
        let outstanding = |run: &Value| {
            let latency_ns = run["latency_ns"]["mean"].as_f64().unwrap();
            run["total_rps"].as_f64().unwrap() * latency_ns / 1e9
        };
        let runs = result["runs"].as_array().unwrap().iter();
        let runs: Vec<f64> = runs.map(outstanding).collect();
        // Loaded machines stop clients at the edges of runs, so only the order is checked.
        assert_eq!(runs.len(), loads.len());
        for (pair, of) in runs.windows(2).zip(loads.windows(2)) {
            assert_eq!(pair[0] < pair[1], of[0] < of[1], "{sweep}: {runs:?}");
        }
        assert_eq!(result["issued"], result["completed"]);
    }
    let refused = Job::start(&mut benchkv(&["--sweep", "depth=1,33"])).end();
    refused.assert_failed(
        2,
        &["--sweep depth=1,33", "1 to 32, which is --queue-depth"],
    );
}
