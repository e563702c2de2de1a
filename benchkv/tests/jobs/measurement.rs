//! The main job: operations of every kind, between all ranks, each of which ends and is verified.

use serde_json::Value;

use crate::job::{BACKENDS, Job, SHORT, Scratch, benchkv, run, turn};

/// Runs a short job alone; it has to be sound and to leave nothing.
fn measure(args: &[&str]) -> Value {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let result = run(&dir, &[args, &["--json", "-"]].concat()).result();
    assert_sound(&result);
    dir.assert_empty();
    result
}

/// Both backends, with the same further arguments.
fn each(args: &[&str], check: impl Fn(&Value)) {
    for backend in BACKENDS {
        let result = measure(&[&["--backend", backend], args].concat());
        assert_eq!(result["backend"], backend);
        check(&result);
    }
}

fn count(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} is no count: {value}"))
}

fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field].as_array().unwrap_or_else(|| panic!("{field} is no list: {value}"))
}

/// Every operation of the job, and of each rank, ended with the answer of a store, and every value read was right.
#[track_caller]
fn assert_sound(result: &Value) {
    for whose in list(result, "per_rank").iter().chain([result]) {
        assert!(count(whose, "issued") > 0, "{whose}");
        assert_eq!(count(whose, "issued"), count(whose, "completed"), "{whose}");
        assert_eq!((count(whose, "errors"), count(whose, "lost")), (0, 0), "{whose}");
        if result["options"]["verify"] == true {
            assert_eq!(count(whose, "verify_failures"), 0, "{result}");
        }
    }
    for field in ["issued", "completed", "local_ops", "remote_ops"] {
        let sum: u64 = list(result, "per_rank").iter().map(|rank| count(rank, field)).sum();
        assert_eq!(sum, count(result, field), "{field} of all ranks");
    }
}

fn daemons(result: &Value) -> impl Iterator<Item = &Value> {
    list(result, "per_rank").iter().flat_map(|rank| list(rank, "daemons"))
}

/// Sum of a statistic over the connections of all daemons.
fn transport(result: &Value, field: &str) -> u64 {
    daemons(result).map(|daemon| &daemon["transport"]).filter(|transport| !transport.is_null()).map(|all| count(all, field)).sum()
}

/// A request and its response are a message each, and go from rank to rank in WRITEs of the device.
#[track_caller]
fn assert_remote_by_rdma(result: &Value) {
    assert_eq!(result["device"], "soft");
    assert!(transport(result, "messages") >= 2 * count(result, "remote_ops"), "{result}");
    let has_written = |rank: &Value| list(rank, "daemons").iter().any(|daemon| daemon["transport"]["writes"].as_u64() > Some(0));
    assert!(list(result, "per_rank").iter().all(has_written), "{result}");
}

#[test]
fn every_rank_makes_local_and_remote_operations() {
    each(&[], |result| {
        assert_eq!(list(result, "per_rank").len(), 2);
        for rank in list(result, "per_rank") {
            assert!(count(rank, "local_ops") > 0 && count(rank, "remote_ops") > 0, "{rank}");
        }
        assert_remote_by_rdma(result);
    });
}

/// With remote requests only, a daemon that has neither connection nor ring is busy because others pass requests on, and the other way
/// round; a request that is not passed on to where it belongs is refused, which is an error.
#[test]
fn daemons_of_a_rank_pass_requests_on_to_each_other() {
    each(&["--server-threads", "2", "--remote-ratio", "1"], |result| {
        assert_remote_by_rdma(result);
        for rank in list(result, "per_rank") {
            let (carriers, others): (Vec<_>, Vec<_>) = list(rank, "daemons").iter().partition(|daemon| !daemon["transport"].is_null());
            assert_eq!((carriers.len(), others.len()), (1, 1), "two ranks, so each has one connection: {rank}");
            assert!(count(others[0], "loops") > count(others[0], "empty_loops"), "{rank}");
        }
    });
}

#[test]
fn clients_of_a_rank_work_side_by_side() {
    each(&["--client-threads", "2", "--queue-depth", "16"], |result| {
        let outstanding = result["littles_law"]["outstanding"].as_f64().unwrap();
        assert!(outstanding > 1.5 * 2.0 * 16.0, "one client per rank would explain {outstanding} operations outstanding");
    });
}

/// Of so many keys few are written in a short job, so a get that finds a value is rare unless keys are popular.
#[test]
fn zipfian_keys_are_hit_again_where_uniform_ones_are_not() {
    let hits = |distribution: &str| {
        let result = measure(&["--distribution", distribution, "--key-range", "4000000", "--read-ratio", "0.9"]);
        1.0 - count(&result, "not_found") as f64 / count(&result, "completed") as f64
    };
    let (uniform, zipfian) = (hits("uniform"), hits("zipfian:2"));
    assert!(zipfian > uniform + 0.3, "{uniform} of uniform operations, {zipfian} of zipfian ones find a value");
}

#[test]
fn a_ring_too_small_for_what_is_in_flight_makes_requests_wait_and_loses_none() {
    each(&["--ring-size", "4096", "--queue-depth", "256"], |result| {
        assert!(transport(result, "waits") > 0, "{result}");
        assert!(daemons(result).any(|daemon| count(&daemon["transport"], "backlog_peak") > 0), "{result}");
        assert!(count(result, "remote_ops") > 0, "{result}");
    });
}

/// All-to-all far above the credit: daemons that wait for each other in a circle would stand still for ever.
#[test]
fn many_ranks_that_overrun_their_rings_do_not_wait_for_each_other() {
    each(&["--ranks", "4", "--remote-ratio", "1", "--ring-size", "4096", "--queue-depth", "512"], |result| {
        assert!(transport(result, "waits") > 0, "{result}");
    });
}

#[test]
fn all_operations_can_be_remote() {
    each(&["--remote-ratio", "1"], |result| {
        assert_eq!(count(result, "local_ops"), 0);
        assert!(count(result, "remote_ops") > 0);
        assert_remote_by_rdma(result);
    });
}

#[test]
fn all_operations_can_be_local() {
    each(&["--remote-ratio", "0"], |result| {
        assert!(count(result, "local_ops") > 0);
        assert_eq!((count(result, "remote_ops"), transport(result, "messages")), (0, 0));
    });
}

#[test]
fn one_rank_works_without_a_device() {
    each(&["--ranks", "1"], |result| {
        assert!(count(result, "local_ops") > 0);
        assert_eq!((count(result, "remote_ops"), &result["device"]), (0, &Value::from("none")));
    });
}

#[test]
fn eight_ranks_on_few_cores_lose_nothing() {
    each(&["--ranks", "8"], |result| {
        assert_eq!(list(result, "per_rank").len(), 8);
        assert!(list(result, "per_rank").iter().all(|rank| count(rank, "completed") > 0), "{result}");
        assert_remote_by_rdma(result);
    });
}

#[test]
fn writes_only_and_reads_only_work() {
    for (ratio, has_reads) in [("0", false), ("1", true)] {
        // Private keys are read back whatever the ratio.
        let result = measure(&["--read-ratio", ratio, "--verify=false"]);
        assert_eq!(count(&result, "not_found"), if has_reads { count(&result, "completed") } else { 0 }, "{result}");
        assert!(result["verify_failures"].is_null(), "{result}");
    }
}

#[test]
fn two_jobs_at_once_share_a_directory() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let start = |backend| Job::start(benchkv(&["--backend", backend, "--json", "-"]).args(SHORT).arg("--shm-dir").arg(dir.path()));
    let jobs = BACKENDS.map(start);
    for job in jobs {
        assert_sound(&job.end().result());
    }
    dir.assert_empty();
}

/// A value is corrupted on its way to a store of the same rank, and on its way to another.
#[test]
fn one_corrupted_value_is_seen() {
    for (backend, remote_ratio) in BACKENDS.into_iter().flat_map(|backend| [(backend, "0"), (backend, "1")]) {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let args = ["--backend", backend, "--remote-ratio", remote_ratio, "--fault", "corrupt-value", "--json", "-"];
        let ended = run(&dir, &args);
        ended.assert_failed(3, &["the result is unsound: 0 operations lost, 1 verify failures", "first verify failure"]);
        let result: Value = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!((count(&result, "verify_failures"), count(&result, "lost")), (1, 0), "{result}");
        assert!(result["first_verify_failure"].is_string(), "{result}");
    }
}
