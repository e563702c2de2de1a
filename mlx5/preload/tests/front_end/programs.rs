//! Unmodified programs of other projects under `mlx5-run`.

use crate::support::{Finished, Place};

/// Checks that both ends of a ping-pong verified the received bytes, and printed their duration.
fn pingpong(test: &str, options: &[&str], program: &[&str]) {
    for end in Place::new(test).pair(options, &[program, &["-n", "300", "-c"]].concat()) {
        end.succeeded().said("300 iters in ");
        assert!(!end.output.contains("invalid data"), "{end:#?}");
    }
}

/// Runs both ends of a program of perftest. Checks that the client's table has a line for messages
/// of this size.
fn perftest(test: &str, options: &[&str], program: &[&str], bytes: u32, iterations: u32) {
    let place = Place::new(test);
    let [server, client] = place.pair(
        options,
        &[
            program,
            &["-n", &iterations.to_string(), "-s", &bytes.to_string()],
        ]
        .concat(),
    );
    server.succeeded();
    has_line(client.succeeded(), bytes, iterations);
}

fn has_line(client: &Finished, bytes: u32, iterations: u32) {
    let (bytes, iterations) = (bytes.to_string(), iterations.to_string());
    let is_result = |line: &str| line.split_whitespace().take(2).eq([&*bytes, &*iterations]);
    assert!(
        client.output.lines().any(is_result),
        "no result of {iterations} iterations with {bytes} bytes: {client:#?}"
    );
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn ibv_devinfo_shows_the_device() {
    let place = Place::new("devinfo");
    let shown = place.run(&[], &["ibv_devinfo", "-v"]);
    shown
        .succeeded()
        .said("hca_id:\tmlx5_0")
        .said("PORT_ACTIVE (4)")
        .said("InfiniBand")
        .said("port_lid:\t\t1");
    shown
        .said("fe80:0000:0000:0000:0200:00ff:fe00:0001")
        .said("ATOMIC_HCA (1)")
        .said("vendor_part_id:\t\t\t4123");
    let shown = place.run(&["--link", "roce"], &["ibv_devinfo", "-v"]);
    shown.succeeded().said("link_layer:\t\tEthernet");
    shown
        .said("fe80:0000:0000:0000:0200:00ff:fe00:0001, RoCE v1")
        .said("fe80::200:ff:fe00:1, RoCE v2");
    shown
        .said("0000:0000:0000:0000:0000:ffff:7f00:0001, RoCE v1")
        .said("::ffff:127.0.0.1, RoCE v2");
}

/// Programs that find the device without libibverbs read `/sys` in many ways. No program needs a
/// right that other users lack.
#[test]
#[ignore = "needs libibverbs1 and ibverbs-providers"]
fn programs_find_the_device_in_sys() {
    const SCRIPT: &str = r#"
        set -e
        realpath /sys/class/infiniband/mlx5_0/device /sys/class/infiniband/mlx5_0/../..
        ls -l /sys/class/infiniband
        ls /sys/class/infiniband_verbs/uverbs0/
        cat /sys/class/infiniband/mlx5_0/ports/1/link_layer /sys/bus/pci/devices/7357:00:00.0/vendor
        for state in /sys/class/infiniband/*/ports/*/state; do test -r $state && read value <$state && echo "$state is $value"; done
        find /sys/class/infiniband/mlx5_0/ports/1/gids -type f | wc -l
        cd /sys/class && cat infiniband/mlx5_0/device/numa_node
        cd infiniband/mlx5_0/ports/1 && cat counters/port_xmit_data
        python3 -c 'import os; print(os.listdir("/sys/class/infiniband"), os.path.realpath("/sys/class/infiniband/mlx5_0"))'
        ! test -e /sys/class/infiniband_mad
        test -r /dev/infiniband/uverbs0 && stat -c '%F %t:%T' /dev/infiniband/uverbs0
    "#;
    const SAYS: &str = "\
/sys/devices/pci7357:00/7357:00:00.0
/sys/devices/pci7357:00/7357:00:00.0
mlx5_0 -> ../../devices/pci7357:00/7357:00:00.0/infiniband/mlx5_0
abi_version
dev
device
ibdev
InfiniBand
0x15b3
/sys/class/infiniband/mlx5_0/ports/1/state is 4: ACTIVE
8
-1
0
['mlx5_0'] /sys/devices/pci7357:00/7357:00:00.0/infiniband/mlx5_0
character special file e7:c0
";
    let place = Place::new("sys");
    let run = place.mlx5_run(&["sh", "-c", SCRIPT]);
    // SAFETY: no arguments.
    let mut command = if unsafe { libc::geteuid() } == 0 {
        let mut without_rights = std::process::Command::new("setpriv");
        without_rights
            .args(["--bounding-set=-all", "--inh-caps=-all"])
            .arg(run.get_program())
            .args(run.get_args());
        without_rights
    } else {
        run
    };
    let shown = place.start(&mut command).finish();
    let lines = shown
        .succeeded()
        .output
        .lines()
        .filter(|line| !line.starts_with("total "));
    let said: Vec<_> = lines
        .map(|line| {
            line.split_once("mlx5_0 ->")
                .map_or(line.to_owned(), |(_, to)| format!("mlx5_0 ->{to}"))
        })
        .collect();
    assert_eq!(said, SAYS.lines().collect::<Vec<_>>(), "{shown:#?}");
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn ibv_rc_pingpong_finishes() {
    pingpong("rc", &[], &["ibv_rc_pingpong"]);
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn ibv_rc_pingpong_finishes_with_events() {
    pingpong("rc-events", &[], &["ibv_rc_pingpong", "-e"]);
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn ibv_rc_pingpong_finishes_over_roce() {
    for index in ["0", "1", "2", "3"] {
        pingpong(
            "rc-roce",
            &["--link", "roce"],
            &["ibv_rc_pingpong", "-g", index],
        );
    }
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn two_devices_of_a_program_or_of_two_reach_each_other() {
    let place = Place::new("devices");
    let shown = place.run(
        &["--devices", "2", "--link", "roce"],
        &["ibv_devinfo", "-v"],
    );
    shown
        .succeeded()
        .said("hca_id:\tmlx5_1")
        .said("node_guid:\t\t\t0200:00ff:fe00:0002")
        .said("::ffff:127.0.0.2, RoCE v2");
    for (link, program) in [
        ("ib", &["ibv_rc_pingpong"][..]),
        ("roce", &["ibv_rc_pingpong", "-g", "3"]),
        ("roce", &["ibv_ud_pingpong", "-g", "1"]),
    ] {
        let port = crate::support::free_port();
        let command = |device: &str, more: &[&str]| {
            let mut command = place.mlx5_run(&["--devices", "2", "--link", link]);
            command
                .args(program)
                .args([
                    "-s",
                    "512",
                    "-n",
                    "100",
                    "-d",
                    device,
                    "-p",
                    &port.to_string(),
                ])
                .args(more);
            command
        };
        let mut server = place.start(&mut command("mlx5_1", &[]));
        server.wait_for(|| crate::support::is_listening(port));
        let client = place.start(&mut command("mlx5_0", &["localhost"])).finish();
        [client, server.finish()]
            .iter()
            .for_each(|end| _ = end.succeeded().said("100 iters in "));
    }
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn ibv_srq_pingpong_finishes() {
    pingpong("srq", &[], &["ibv_srq_pingpong"]);
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn ibv_ud_pingpong_finishes() {
    pingpong("ud", &[], &["ibv_ud_pingpong", "-s", "1024"]);
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn ibv_ud_pingpong_finishes_over_roce() {
    for index in ["0", "1", "2", "3"] {
        pingpong(
            "ud-roce",
            &["--link", "roce"],
            &["ibv_ud_pingpong", "-g", index, "-s", "1024"],
        );
    }
}

/// Both ends use one port. On shared memory the port counts payloads, in words of 4 bytes and
/// packets of 4 KiB; with packets it counts whole packets, and acknowledgements.
#[test]
#[ignore = "needs perftest"]
fn ib_write_bw_finishes_and_its_counters_have_what_it_wrote() {
    let counted = |options: &[&str]| {
        let names = [
            "counters/port_xmit_data",
            "counters/port_rcv_data",
            "counters/port_xmit_packets",
            "hw_counters/rx_write_requests",
        ];
        let report = format!(
            "--report-counters={},hw_counters/out_of_buffer",
            names.join(",")
        );
        let [server, client] =
            Place::new("write-bw").pair(options, &["ib_write_bw", &report, "-n", "500"]);
        server.succeeded();
        has_line(
            client.succeeded().said("hw_counters/out_of_buffer=0\n"),
            65_536,
            500,
        );
        let count = |name| {
            client
                .output
                .split_once(&format!("{name}="))?
                .1
                .lines()
                .next()?
                .parse::<u64>()
                .ok()
        };
        names.map(|name| count(name).unwrap())
    };
    const WORDS: u64 = 500 * 65_536 / 4;
    assert_eq!(counted(&[]), [WORDS, WORDS, 500 * 16, 500]);
    let [sent, received, packets, _] =
        counted(&["--link", "roce", "--address", "127.0.0.1,packets=all"]);
    assert!(
        sent > WORDS && received > WORDS && packets > 500 * 16,
        "{sent} {received} {packets}"
    );
}

/// Programs of all kinds, as a user without rights, read the counters that an earlier program has
/// advanced.
#[test]
#[ignore = "needs ibverbs-utils"]
fn counters_of_the_fabric_are_read_in_all_ways() {
    let place = Place::new("counters");
    place
        .pair(&[], &["ibv_rc_pingpong", "-s", "4096", "-n", "100"])
        .iter()
        .for_each(|end| _ = end.succeeded());
    const SCRIPT: &str = r#"
        set -e
        cat /sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data
        read value </sys/class/infiniband/mlx5_0/device/infiniband/mlx5_0/ports/1/counters/port_xmit_packets && echo $value
        cd /sys/class/infiniband/mlx5_0/ports/1/counters && cat port_rcv_packets
        awk '{ print }' /sys/class/infiniband/mlx5_0/ports/1/hw_counters/rx_write_requests
        python3 -c 'print(open("/sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data").read().strip())'
    "#;
    let shown = place.run(&[], &["sh", "-c", SCRIPT]);
    // 100 messages each way.
    assert_eq!(shown.succeeded().output, "204800\n200\n200\n0\n204800\n");
}

#[test]
#[ignore = "needs perftest"]
fn ib_read_bw_finishes() {
    perftest("read-bw", &[], &["ib_read_bw"], 4_096, 500);
}

#[test]
#[ignore = "needs perftest"]
fn ib_send_lat_finishes() {
    perftest("send-lat", &[], &["ib_send_lat"], 64, 300);
}

/// This program arms its queues again before it polls them, and takes every event for a completion.
#[test]
#[ignore = "needs perftest"]
fn ib_send_lat_finishes_with_events() {
    perftest("send-lat-events", &[], &["ib_send_lat", "-e"], 64, 300);
}

#[test]
#[ignore = "needs perftest"]
fn ib_send_bw_finishes_over_roce() {
    for gid in [&[][..], &["-x", "0"], &["-x", "1"]] {
        perftest(
            "send-bw-roce",
            &["--link", "roce"],
            &[&["ib_send_bw"], gid].concat(),
            4_096,
            300,
        );
    }
}

#[test]
#[ignore = "needs perftest"]
fn ib_send_bw_finishes_with_a_shared_receive_queue() {
    perftest("send-bw-srq", &[], &["ib_send_bw", "--use-srq"], 4_096, 500);
}

#[test]
#[ignore = "needs perftest"]
fn ib_atomic_lat_finishes_with_events() {
    let [server, client] =
        Place::new("atomic-lat-events").pair(&[], &["ib_atomic_lat", "-e", "-n", "200"]);
    server.succeeded();
    has_line(client.succeeded(), 8, 200);
}

#[test]
#[ignore = "needs perftest"]
fn ib_atomic_bw_finishes() {
    let [server, client] = Place::new("atomic-bw").pair(&[], &["ib_atomic_bw", "-n", "200"]);
    server.succeeded();
    has_line(client.succeeded(), 8, 200);
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn a_launcher_that_was_copied_alone_has_its_library_if_it_is_a_release_build() {
    let place = Place::new("alone");
    let alone = place.file("mlx5-run");
    std::fs::copy(crate::support::built().join("mlx5-run"), &alone).unwrap();
    let mut command = std::process::Command::new(alone);
    let shown = place
        .start(
            command
                .arg("--fabric")
                .arg(place.file("fabric"))
                .arg("ibv_devinfo"),
        )
        .finish();
    if cfg!(debug_assertions) {
        assert!(!shown.status.success());
        shown.said("only a release build has it inside");
    } else {
        shown
            .succeeded()
            .said("hca_id:\tmlx5_0")
            .said("PORT_ACTIVE (4)");
    }
}
