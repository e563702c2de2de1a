//! Every backend on a device of libibverbs: a NIC, or the software HCA under the real libraries.
//!
//! `mlx5-run --devices 2 cargo test -p benchkv --test jobs -- --ignored hardware`; on a NIC without
//! `mlx5-run`, and with `BENCHKV_TEST_DEVICE` if it is not mlx5_0.

use benchkv_harness::launch::device::DEVICE_VARIABLE;

use crate::job::{BACKENDS, Job, SHORT, Scratch, benchkv, run, turn};
use crate::measurement::{assert_sound, count, daemons, list, transports};

fn device() -> String {
    std::env::var("BENCHKV_TEST_DEVICE").unwrap_or_else(|_| "mlx5_0".to_owned())
}

/// Runs a short job of two ranks, with variables for UCX. Returns the path from the first rank to
/// the other.
fn measure(variables: &[(&str, &str)], args: &[&str]) -> String {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let mut command = benchkv(&["--server-threads", "2", "--json", "-"]);
    command
        .args(SHORT)
        .args(args)
        .arg("--shm-dir")
        .arg(dir.path())
        .envs(variables.iter().copied());
    let result = Job::start(&mut command).end().result();
    assert_sound(&result);
    for rank in list(&result, "per_rank") {
        assert!(rank["remote_ops"].as_u64() > Some(0), "{rank}");
    }
    dir.assert_empty();
    let first = transports(&result).next().unwrap();
    format!(
        "{} by {}",
        first["device"].as_str().unwrap(),
        first["reached_by"].as_str().unwrap()
    )
}

#[test]
#[ignore = "needs an mlx5 device, or mlx5-run"]
fn every_backend_is_sound_on_hardware() {
    let device = device();
    for backend in BACKENDS {
        let way = measure(&[], &["--backend", backend, "--device", &device]);
        assert!(way.starts_with(&device), "{backend}: {way}");
        measure(
            &[],
            &["--backend", backend, "--device", &device, "--wait", "event"],
        );
    }
}

/// `auto` takes hardware if a host has it, and the result gives the reason of the choice. A
/// variable can name another device.
#[test]
#[ignore = "needs an mlx5 device, or mlx5-run"]
fn auto_takes_the_hardware() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let args = ["--backend", "direct", "--device", "auto", "--json", "-"];
    let mut command = benchkv(&args);
    let ended = Job::start(
        command
            .args(SHORT)
            .arg("--shm-dir")
            .arg(dir.path())
            .env_remove(DEVICE_VARIABLE),
    )
    .end();
    let result = ended.result();
    let taken = result["options"]["device"].as_str().unwrap();
    let why = format!("{taken} is the first mlx5 device with an active port");
    assert_eq!(
        (&result["device"], &result["options"]["device_by_auto"]),
        (&taken.into(), &why.as_str().into())
    );
    assert!(
        taken != "soft"
            && ended
                .stderr
                .contains(&format!("--device auto is {taken}: {why}")),
        "{}",
        ended.stderr
    );
    let by_variable = run(&dir, &["--json", "-"]).result();
    let device =
        ["device", "device_by_auto"].map(|member| by_variable["options"][member].as_str().unwrap());
    assert_eq!(device, ["soft", "COPYRPC_DEVICE names it"]);
    dir.assert_empty();
}

/// Daemon number k of each rank opens device k of the list. The second list has a port that the
/// device does not have, so the daemon that opens it fails.
#[test]
#[ignore = "needs an mlx5 device, or mlx5-run"]
fn daemons_are_divided_among_the_devices_of_a_list() {
    let device = device();
    let way = measure(
        &[],
        &[
            "--backend",
            "sharded",
            "--device",
            &format!("{device},{device}:1"),
        ],
    );
    assert!(way.starts_with(&device), "{way}");
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let args = [
        "--backend",
        "sharded",
        "--server-threads",
        "2",
        "--device",
        &format!("{device}:1,{device}:200"),
    ];
    run(&dir, &args).assert_failed(1, &["port 200 was asked for"]);
}

/// Half of the connections of `direct` go between the devices.
#[test]
#[ignore = "needs two mlx5 devices on one network, or mlx5-run --devices 2"]
fn two_devices_are_two_rails_of_one_network() {
    for backend in ["sharded", "direct"] {
        let way = measure(
            &[],
            &[
                "--backend",
                backend,
                "--client-threads",
                "2",
                "--device",
                "mlx5_0,mlx5_1",
            ],
        );
        assert!(way.starts_with("mlx5_0"), "{backend}: {way}");
    }
}

/// Options that name the port's own values, and a smaller MTU, reach the device.
#[test]
#[ignore = "needs an mlx5 device, or mlx5-run"]
fn options_of_the_port_reach_the_hardware() {
    let args = [
        "--backend",
        "rc-send",
        "--device",
        &device(),
        "--port",
        "1",
        "--gid-index",
        "0",
        "--sl",
        "1",
        "--traffic-class",
        "104",
    ];
    let way = measure(&[], &[&args[..], &["--mtu", "256"]].concat());
    assert!(way.contains("GID index 0"), "{way}");
}

#[test]
#[ignore = "needs an mlx5 device and libucx0, or mlx5-run"]
fn ucx_is_sound_on_hardware() {
    let device = format!("{}:1", device());
    let variables = [
        ("UCX_TLS", "rc_x,ud_x"),
        ("UCX_NET_DEVICES", device.as_str()),
        ("UCX_IB_MLX5_DEVX", "n"),
    ];
    for errors in ["none", "peer"] {
        let way = measure(&variables, &["--backend", "ucx-am", "--ucx-errors", errors]);
        assert!(way.contains(&format!(" by rc_mlx5/{device}")), "{way}");
    }
}

/// A daemon that polled its connections every 100 us would make thousands of rounds.
#[test]
#[ignore = "needs an mlx5 device, or mlx5-run"]
fn daemons_without_work_sleep_until_the_device_has_an_event() {
    let args = [
        "--device",
        &device(),
        "--wait",
        "event",
        "--rate",
        "100",
        "--duration",
        "1",
    ];
    let result = crate::measurement::measure(&args);
    let most = 10 * count(&result, "issued");
    for daemon in daemons(&result) {
        assert!(
            count(daemon, "loops") < most,
            "{most} are more than it needs: {daemon}"
        );
    }
}

/// A device without a feature refuses it with the reason; the device of mlx5-run has no
/// compression.
#[test]
#[ignore = "needs an mlx5 device, or mlx5-run"]
fn features_reach_the_hardware_or_are_refused_with_the_reason() {
    let (device, dir) = (device(), Scratch::in_memory());
    measure(
        &[],
        &[
            "--backend",
            "rc-send",
            "--device",
            &device,
            "--mlx5",
            "scatter-to-cqe",
        ],
    );
    let _turn = turn();
    let mut command = benchkv(&[
        "--device",
        &device,
        "--mlx5",
        "cqe-compression",
        "--json",
        "-",
    ]);
    let ended = Job::start(command.args(SHORT).arg("--shm-dir").arg(dir.path())).end();
    assert!(
        ended.status.success()
            || ended
                .stderr
                .contains("this device has no compression of CQEs"),
        "{}",
        ended.stderr
    );
}
