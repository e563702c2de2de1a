//! UCX, unmodified, over its transports rc_mlx5 (`rc_x`) and ud_mlx5 (`ud_x`): its own benchmark,
//! which checks no data, and programs in this package that check every byte and value.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::support::{Finished, Place, Program};

/// Settings without DEVX, which the device does not have.
const DEVICE: [&str; 3] = ["env", "UCX_NET_DEVICES=mlx5_0:1", "UCX_IB_MLX5_DEVX=n"];
const RC: &str = "UCX_TLS=rc_x,ud_x";
const UD: &str = "UCX_TLS=ud_x";

/// Sizes for inline data, a copy, several packets, zero copy, and rendezvous.
const SIZES: [u32; 6] = [8, 200, 2_048, 8_192, 65_536, 1_048_576];

/// Runs ucx_perftest once for each of `lines`, with its default number of iterations unless the
/// line changes it.
fn perftest(test: &str, options: &[&str], environment: &[&str], lines: &[String]) -> Finished {
    let place = Place::new(test);
    let batch = place.file("batch");
    let named: String = lines
        .iter()
        .enumerate()
        .map(|(i, line)| format!("{i} {line}\n"))
        .collect();
    fs::write(&batch, named).unwrap();
    let program = [
        "ucx_perftest",
        "-n",
        "30",
        "-w",
        "5",
        "-b",
        batch.to_str().unwrap(),
    ];
    let [server, client] = place.pair(
        options,
        &[&DEVICE[..], environment, &["UCX_LOG_LEVEL=info"], &program].concat(),
    );
    server.succeeded();
    client.succeeded();
    let results = client
        .output
        .lines()
        .filter(|line| line.starts_with("Final:"))
        .count();
    assert_eq!(results, lines.len(), "{client:#?}");
    client
}

/// Runs each test with each size, over this transport only.
fn protocols(test: &str, tests: &[&str], sizes: &[u32]) {
    let lines: Vec<_> = tests
        .iter()
        .flat_map(|test| {
            sizes
                .iter()
                .map(move |bytes| format!("-t {test} -s {bytes}"))
        })
        .collect();
    let client = perftest(test, &[], &[RC], &lines);
    let lanes = client
        .output
        .lines()
        .filter(|line| line.contains("ep_cfg["))
        .collect::<Vec<_>>();
    let is_rc = |line: &&str| line.contains("(rc_mlx5/mlx5_0:1)");
    assert!(
        lanes.len() >= lines.len() && lanes.iter().all(is_rc),
        "{lanes:#?}"
    );
}

#[test]
#[ignore = "needs ucx-utils"]
fn tagged_messages_finish() {
    protocols(
        "ucx-tag",
        &["tag_lat", "tag_bw", "tag_sync_lat", "tag_sync_bw"],
        &SIZES,
    );
}

#[test]
#[ignore = "needs ucx-utils"]
fn put_and_get_finish() {
    protocols("ucx-rma", &["ucp_put_lat", "ucp_put_bw", "ucp_get"], &SIZES);
}

#[test]
#[ignore = "needs ucx-utils"]
fn atomics_finish() {
    protocols(
        "ucx-amo",
        &["ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap"],
        &[4, 8],
    );
}

#[test]
#[ignore = "needs ucx-utils"]
fn streams_finish() {
    protocols("ucx-stream", &["stream_lat", "stream_bw"], &SIZES);
}

#[test]
#[ignore = "needs ucx-utils"]
fn active_messages_finish() {
    protocols("ucx-am", &["ucp_am_lat", "ucp_am_bw"], &SIZES);
}

/// Below the protocols, the benchmark requests one transport by name, and atomics are the device's
/// atomics.
#[test]
#[ignore = "needs ucx-utils"]
fn the_transports_finish_by_themselves() {
    let rc = [
        "am_lat -D short -s 8",
        "am_lat -D shortiov -s 64",
        "am_bw -D bcopy -s 8000",
        "am_lat -D zcopy -s 8000",
        "put_lat -D short -s 8",
        "put_bw -D short -s 200",
        "put_bw -D bcopy -s 8000",
        "put_bw -D zcopy -s 1048576",
        "get -D bcopy -s 4096",
        "get -D zcopy -s 1048576",
        "add_lat -s 8",
        "add_mr -s 8",
        "fadd -s 8",
        "cswap -s 8",
    ];
    let ud = [
        "am_lat -D short -s 8",
        "am_lat -D shortiov -s 64",
        "am_bw -D bcopy -s 4000",
        "am_bw -D zcopy -s 4000",
    ];
    let of = |transport, runs: &[&str]| {
        runs.iter()
            .map(|run| format!("-d mlx5_0:1 -x {transport} -t {run}"))
            .collect::<Vec<_>>()
    };
    let lines = [
        of("rc_mlx5", &rc),
        of("ud_mlx5", &ud),
        of("rc_verbs", &rc[..1]),
        of("ud_verbs", &ud[..1]),
    ]
    .concat();
    for (test, link) in [("ucx-uct", "ib"), ("ucx-uct-roce", "roce")] {
        perftest(test, &["--link", link], &[], &lines);
    }
}

#[test]
#[ignore = "needs ucx-utils"]
fn without_devx_and_dc_there_is_rc() {
    for devx in ["UCX_IB_MLX5_DEVX=try", "UCX_IB_MLX5_DEVX=n"] {
        let client = perftest(
            "ucx-devx",
            &[],
            &[devx, "UCX_TLS=ib"],
            &["-t tag_bw -s 8192".to_owned()],
        );
        client.said("tag(rc_mlx5/mlx5_0:1)");
    }
    let place = Place::new("ucx-dc");
    let log = place.file("log");
    let program = [
        &DEVICE[..],
        &["UCX_TLS=dc_x", "ucx_perftest", "-l", "-t", "tag_bw"],
    ]
    .concat();
    let dc = place.run(&["--log", log.to_str().unwrap()], &program);
    assert!(!dc.status.success(), "{dc:#?}");
    dc.said("no usable transports/devices");
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("create_qp (24) refused: EOPNOTSUPP"), "{log}");
}

/// Compiles a program of `ucx/` into the directory.
fn compile(place: &Place, name: &str) -> PathBuf {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/front_end/ucx")
        .join(name)
        .with_extension("c");
    let program = place.file(name);
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(source)
        .args(["-lucp", "-luct", "-lucs"]);
    place.start(&mut cc).finish().succeeded();
    program
}

/// Starts processes that know each other.
fn start_all(
    place: &Place,
    program: &str,
    ranks: usize,
    options: &[&str],
    environment: &[&str],
) -> Vec<Program> {
    let program = compile(place, program);
    let dir = place.file("exchange");
    fs::create_dir(&dir).unwrap();
    let start = |rank: usize| {
        let mut command = place.mlx5_run(options);
        command
            .args(DEVICE)
            .args(environment)
            .arg(&program)
            .arg(&dir)
            .args([rank, ranks].map(|n| n.to_string()));
        place.start(&mut command)
    };
    (0..ranks).map(start).collect()
}

/// Checks that all processes found all data correct.
fn exchange(test: &str, ranks: usize, options: &[&str], environment: &[&str]) -> Vec<Finished> {
    let ends: Vec<_> = start_all(&Place::new(test), "data", ranks, options, environment)
        .into_iter()
        .map(Program::finish)
        .collect();
    // All ends are shown, because an end may have failed only because its peer failed.
    let is_right =
        |end: &Finished| end.status.success() && end.output.contains("all data is right");
    assert!(ends.iter().all(is_right), "{ends:#?}");
    ends
}

#[test]
#[ignore = "needs libucx-dev"]
fn all_data_is_right() {
    for end in exchange("ucx-data", 2, &[], &[RC]) {
        assert!(
            !end.output.contains(", 0 by rendezvous")
                && !end.output.contains(" 0 active messages eager"),
            "{end:#?}"
        );
    }
}

#[test]
#[ignore = "needs libucx-dev"]
fn all_data_is_right_over_roce() {
    exchange("ucx-roce", 2, &["--link", "roce"], &[RC]);
}

#[test]
#[ignore = "needs libucx-dev"]
fn all_data_is_right_over_datagrams() {
    exchange("ucx-ud", 2, &[], &[UD]);
}

#[test]
#[ignore = "needs libucx-dev"]
fn all_data_is_right_over_datagrams_and_roce() {
    exchange("ucx-ud-roce", 2, &["--link", "roce"], &[UD]);
}

/// Runs each protocol for several sizes.
#[test]
#[ignore = "needs libucx-dev"]
fn all_data_is_right_with_each_protocol() {
    let protocols = [
        ["UCX_ZCOPY_THRESH=inf", "UCX_RNDV_THRESH=inf"],
        ["UCX_ZCOPY_THRESH=1", "UCX_RNDV_THRESH=inf"],
        ["UCX_RNDV_THRESH=1", "UCX_RNDV_SCHEME=get_zcopy"],
        ["UCX_RNDV_THRESH=1", "UCX_RNDV_SCHEME=put_zcopy"],
        ["UCX_RNDV_THRESH=1", "UCX_RNDV_SCHEME=am"],
    ];
    for protocol in protocols {
        exchange("ucx-protocol", 2, &[], &[&[RC][..], &protocol].concat());
    }
}

#[test]
#[ignore = "needs libucx-dev"]
fn all_data_is_right_among_eight() {
    exchange("ucx-eight", 8, &[], &[RC]);
}

#[test]
#[ignore = "needs libucx-dev"]
fn the_devices_atomics_are_atomic() {
    for (test, link) in [("ucx-atomics", "ib"), ("ucx-atomics-roce", "roce")] {
        let place = Place::new(test);
        for end in start_all(&place, "atomics", 4, &["--link", link], &[]) {
            end.finish().succeeded().said("all values are right");
        }
    }
}

/// Kills one of two processes, number 0, which sends, or number 1, which does not send. Checks that
/// the survivor gets an error.
fn survivor(test: &str, killed: usize, tls: &str) {
    let place = Place::new(test);
    // A process that does not send detects the death by UCX's own keep-alive, over datagrams.
    let mut ends = start_all(
        &place,
        "survivor",
        2,
        &[],
        &[tls, "UCX_KEEPALIVE_INTERVAL=1s", "UCX_UD_TIMEOUT=10s"],
    );
    for (rank, end) in ends.iter_mut().enumerate() {
        let output = place.file(&format!("output-{}", rank + 1));
        end.wait_for(|| {
            fs::read_to_string(&output).is_ok_and(|output| output.contains("there is traffic"))
        });
    }
    let dead = ends.remove(killed);
    // SAFETY: a child process that was not yet waited for.
    unsafe { libc::kill(dead.id(), libc::SIGKILL) };
    drop(dead);
    ends.remove(0)
        .finish()
        .succeeded()
        .said("the endpoint failed: Endpoint timeout");
}

#[test]
#[ignore = "needs libucx-dev"]
fn the_survivors_endpoint_fails() {
    survivor("ucx-killed-0", 0, RC);
    survivor("ucx-killed-1", 1, RC);
}

#[test]
#[ignore = "needs libucx-dev"]
fn the_survivors_endpoint_fails_over_datagrams() {
    survivor("ucx-killed-ud-0", 0, UD);
    survivor("ucx-killed-ud-1", 1, UD);
}

/// Without an error handler UCX ends the process.
#[test]
#[ignore = "needs ucx-utils"]
fn the_survivor_of_a_killed_receiver_ends() {
    let place = Place::new("ucx-killed-server");
    let port = crate::support::free_port();
    let command = |more: &[&str]| {
        let mut command = place.mlx5_run(&[]);
        // UCX's flow control is off, because it may wait for the receiver with nothing in flight.
        command.args(DEVICE).args([
            RC,
            "UCX_RC_FC_ENABLE=n",
            "ucx_perftest",
            "-t",
            "tag_bw",
            "-s",
            "4096",
            "-n",
            "100000000",
        ]);
        command.args(["-p", &port.to_string()]).args(more);
        command
    };
    let mut server = place.start(&mut command(&[]));
    server.wait_for(|| crate::support::is_listening(port));
    let mut client = place.start(&mut command(&["localhost"]));
    // The first line of results comes after a second of traffic.
    let output = place.file("output-1");
    client
        .wait_for(|| fs::read_to_string(&output).is_ok_and(|output| output.contains("[thread 0]")));
    // SAFETY: a child process that was not yet waited for.
    unsafe { libc::kill(server.id(), libc::SIGKILL) };
    drop(server);
    let client = client.finish();
    assert!(!client.status.success(), "{client:#?}");
    client.said("Transport retry count exceeded");
}
