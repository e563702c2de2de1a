//! `--mlx5`: features of mlx5 devices that are off by default, each in whole jobs with and without
//! the feature.

use serde_json::Value;

use crate::job::{Scratch, run, turn};
use crate::measurement::{assert_sound, count, measure, run_operations, transports};

/// Returns the sum of a counter of all connections.
fn sum(result: &Value, counter: &str) -> u64 {
    transports(result)
        .map(|transport| count(transport, counter))
        .sum()
}

fn measure_operations(args: &[&str]) -> Value {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let result = run_operations(&dir, args).result();
    assert_sound(&result);
    result
}

#[test]
fn a_feature_is_used_if_it_is_asked_for() {
    for (feature, counter, job, args) in [
        // Because of the long round trip, many WRITEs of equal length arrive together.
        (
            "cqe-compression",
            "compressed",
            measure as fn(&[&str]) -> Value,
            ["--backend", "delegation", "--device", "soft:rtt_us=200"].as_slice(),
        ),
        (
            "cqe-compression",
            "compressed",
            measure,
            &["--backend", "rc-send"],
        ),
        (
            "scatter-to-cqe",
            "scattered",
            measure,
            &["--backend", "rc-send"],
        ),
        // Small rings wrap often; a flush then posts several WQEs, and those of one answer fit into
        // the BlueFlame register.
        (
            "blueflame-batch",
            "blueflame_batches",
            measure_operations,
            &[
                "--backend",
                "delegation",
                "--ring-size",
                "4096",
                "--queue-depth",
                "1",
            ],
        ),
    ] {
        assert_eq!(sum(&job(args), counter), 0, "{args:?}");
        let result = job(&[args, &["--mlx5", feature]].concat());
        assert!(sum(&result, counter) > 0, "{feature}, {args:?}: {result}");
        assert_eq!(result["options"]["mlx5"], serde_json::json!([feature]));
    }
}

#[test]
fn a_feature_that_a_carrier_has_no_use_for_is_refused() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    for (carrier, feature, legal) in [
        (
            "copyrpc",
            "scatter-to-cqe",
            "cqe-compression or blueflame-batch",
        ),
        (
            "rc-send",
            "blueflame-batch",
            "cqe-compression or scatter-to-cqe",
        ),
    ] {
        run(&dir, &["--carrier", carrier, "--mlx5", feature])
            .assert_failed(2, &["--mlx5", "the carrier has no use for it", legal]);
    }
}
