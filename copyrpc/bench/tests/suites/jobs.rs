//! `copyrpc_bench`: whole jobs of copyrpc.

use benchkv_harness::affinity::{pin_current_thread, usable_cores};
use serde_json::Value;

use crate::support::{self, COPYRPC_BENCH, run, stderr};

fn result(args: &str) -> Value {
    support::result(COPYRPC_BENCH, &format!("--warmup 0 {args}"))
}

/// Returns the figures of copyrpc under the one load of a job.
fn figures(result: &Value) -> &Value {
    let loads = result["figures"].as_object().unwrap();
    assert_eq!(loads.len(), 1, "{result}");
    &loads.values().next().unwrap()["copyrpc"]
}

#[test]
fn every_call_of_a_latency_job_is_timed_and_counted_on_both_sides() {
    let result = result("--mode latency --calls 500 --runs 3 --endpoints 2 --depth 4 --baseline");
    let figures = figures(&result);
    assert_eq!(figures["runs"].as_array().unwrap().len(), 3);
    for run in figures["runs"].as_array().unwrap() {
        let counted = [
            &run["calls"],
            &run["round_trip_ns"]["count"],
            &run["client"]["calls"],
            &run["server"]["replies"],
        ];
        assert!(
            counted.iter().all(|count| count.as_u64() == Some(500)),
            "{run}"
        );
        assert!(
            run["round_trip_ns"]["min"].as_u64() <= run["round_trip_ns"]["p50"].as_u64(),
            "{run}"
        );
    }
    assert_eq!(figures["bad_payloads"], 0);
    assert!(result["raw_cacheline_ns"].as_f64() > Some(0.0), "{result}");
    assert!(
        result["environment"]["kernel"]
            .as_str()
            .unwrap()
            .starts_with("Linux")
    );
}

/// An endpoint's queues and books; its rings are registered memory.
#[test]
fn an_endpoint_takes_at_most_5118_bytes_beside_its_rings() {
    let queues = "--ring-size 16384 --batches 4 --srq-size 2047";
    let result = result(&format!(
        "--clients 100,300 --calls 300 --runs 1 --wait yield {queues}"
    ));
    let further = |bytes: &str| {
        result[format!("server_{bytes}_per_further_client")]["copyrpc"]
            .as_f64()
            .unwrap()
    };
    let beside = further("bytes") - further("registered_bytes");
    assert!(beside > 0.0 && beside <= 5118.0, "{beside}: {result}");
}

#[test]
fn calls_gather_in_writes_when_there_are_many() {
    let result = result("--depth 64 --duration 0.1 --runs 1");
    let figures = figures(&result);
    let count = |name: &str| figures["runs"][0]["client"][name].as_f64().unwrap();
    assert!(count("messages_sent") > 2.0 * count("writes"), "{result}");
    assert!(figures["calls_per_s"]["median"].as_f64() > Some(0.0));
    assert!(figures["round_trip_ns"].is_null());
}

#[test]
fn a_job_ends_with_either_window_and_counts_its_stalls() {
    for (kind, window) in [
        ("completion", "completion:1"),
        ("consumption", "consumption:1"),
    ] {
        let result = result(&format!(
            "--endpoints 2 --depth 32 --calls 5000 --runs 1 --window {window}"
        ));
        assert_eq!(result["job"]["window"][kind], 1);
        let run = &figures(&result)["runs"][0];
        for counts in [&run["client"], &run["server"]] {
            // The number of stalls of a consumption window depends on timing. A completion window
            // has none, because the software HCA completes a WRITE before the flush ends.
            assert!(
                counts["window_stalls"]
                    .as_u64()
                    .is_some_and(|stalls| stalls == 0 || kind == "consumption"),
                "{window}: {counts}"
            );
            assert_eq!(counts["rnr_naks"], 0, "{window}: {counts}");
        }
    }
}

#[test]
fn payloads_of_every_kind_of_length_are_right() {
    for sizes in [
        "--payload 0 --reply 0",
        "--payload 5 --reply 100",
        "--payload 8180 --reply 12244 --ring-size 65536",
        "--payload 100000",
    ] {
        let result = result(&format!("{sizes} --depth 8 --calls 200 --runs 1"));
        let figures = figures(&result);
        assert_eq!(
            (&figures["bad_payloads"], &figures["runs"][0]["calls"]),
            (&0.into(), &200.into()),
            "{sizes}"
        );
    }
}

#[test]
fn a_job_ends_on_one_core_whatever_the_wait() {
    // A process may use the cores of the thread that starts it.
    let on_one_core = || {
        pin_current_thread(usable_cores().unwrap()[0]).unwrap();
        for wait in ["auto", "event"] {
            let result = result(&format!(
                "--wait {wait} --endpoints 3 --connected 5 --depth 8 --duration 0.05 --runs 1"
            ));
            assert!(
                figures(&result)["runs"][0]["calls"].as_u64() > Some(0),
                "{wait}: {result}"
            );
            assert_eq!(
                result["job"]["placement"]["usable_cores"]
                    .as_array()
                    .unwrap()
                    .len(),
                1
            );
        }
    };
    std::thread::spawn(on_one_core).join().unwrap();
}

#[test]
fn auto_takes_the_device_that_the_environment_names_and_says_so() {
    support::assert_auto_takes_the_named_device(COPYRPC_BENCH, "--calls 10 --runs 1");
}

#[test]
fn a_wrong_bit_in_a_request_or_a_reply_is_noticed() {
    for fault in ["corrupt-request", "corrupt-reply"] {
        let output = run(
            COPYRPC_BENCH,
            &format!("--calls 100 --runs 1 --fault {fault}"),
        );
        assert_eq!(
            output.status.code(),
            Some(3),
            "{fault}: {}",
            stderr(&output)
        );
        assert!(stderr(&output).contains("payloads were not the right ones"));
    }
}

#[test]
fn options_that_cannot_be_honoured_are_refused_before_anything_starts() {
    for (args, legal) in [
        ("--depth 257", "1 to 256"),
        ("--ring-size 4096 --payload 501", "0 to 500"),
        ("--json /nowhere/x", "--json"),
    ] {
        let output = run(COPYRPC_BENCH, args);
        assert_eq!(output.status.code(), Some(2), "{args}");
        assert!(
            stderr(&output).contains(legal),
            "{args}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn one_of_several_processes_does_not_start_a_job_of_its_own() {
    support::assert_alone(COPYRPC_BENCH);
}
