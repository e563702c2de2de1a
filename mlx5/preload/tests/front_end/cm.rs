//! Programs that connect with librdmacm.

use std::process::Command;
use std::time::Instant;

use crate::support::{Finished, Place, Program};

const LINKS: [&str; 2] = ["ib", "roce"];

/// Starts a server, and waits until it listens. Each place has its own ports.
fn serve(place: &Place, link: &str, program: &[&str]) -> Program {
    let mut command = place.mlx5_run(&["--link", link, "--log", "-", "--log-commands"]);
    let mut server = place.start(command.args(program));
    let log = server.output_path();
    server.wait_for(|| {
        std::fs::read_to_string(&log)
            .unwrap()
            .contains("rdma_cm listen")
    });
    server
}

/// Runs a server and its client on each of the two links. Returns the two ends for each link.
fn pair(test: &str, server: &[&str], client: &[&str]) -> Vec<[Finished; 2]> {
    let run = |link| {
        let place = Place::new(&format!("cm-{test}-{link}"));
        let server = serve(&place, link, server);
        let client = place.run(&["--link", link], client);
        client.succeeded();
        [server.finish(), client]
    };
    let ends: Vec<_> = LINKS.map(run).into();
    ends.iter().for_each(|[server, _]| _ = server.succeeded());
    ends
}

#[test]
#[ignore = "needs linux-libc-dev and a C compiler"]
fn the_device_file_behaves_as_the_kernels() {
    let place = Place::new("cm-file");
    let program = place.file("program");
    let mut cc = Command::new("cc");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/front_end/cm.c");
    cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(&program)
        .arg(source);
    place.start(&mut cc).finish().succeeded();
    place
        .run(&[], &[program.to_str().unwrap()])
        .succeeded()
        .said("end");
}

#[test]
#[ignore = "needs rdmacm-utils"]
fn rping_finishes() {
    for [server, client] in pair(
        "rping",
        &["rping", "-s", "-v", "-C", "50"],
        &["rping", "-c", "-a", "127.0.0.1", "-v", "-C", "50"],
    ) {
        // The server waits for this event. The client, which disconnects, may end before its other
        // thread has read it.
        server
            .said("server ping data: rdma-ping-49")
            .said("server DISCONNECT EVENT");
        client.said("ping data: rdma-ping-49");
    }
}

/// With the option `-m` the ids migrate to a second event channel.
#[test]
#[ignore = "needs rdmacm-utils"]
fn ucmatose_finishes_with_several_connections_and_migration() {
    for options in [&["-c", "3"][..], &["-m"]] {
        let server = [&["ucmatose"], options].concat();
        for end in pair(
            "ucmatose",
            &server,
            &[&server[..], &["-s", "127.0.0.1"]].concat(),
        )
        .iter()
        .flatten()
        {
            end.said("data transfers complete").said("return status 0");
        }
    }
}

#[test]
#[ignore = "needs rdmacm-utils"]
fn udaddy_finishes() {
    for end in pair("udaddy", &["udaddy"], &["udaddy", "-s", "127.0.0.1"])
        .iter()
        .flatten()
    {
        end.said("data transfers complete").said("return status 0");
    }
}

#[test]
#[ignore = "needs rdmacm-utils"]
fn rstream_finishes_over_sockets() {
    let program = ["rstream", "-S", "1000", "-C", "100"];
    pair(
        "rstream",
        &program,
        &[&program[..], &["-s", "127.0.0.1"]].concat(),
    );
}

/// Starts a program at an address of this host. Programs at different addresses reach each other by
/// packets.
fn start_at(place: &Place, end: u8, program: &[&str]) -> Program {
    let address = address(end);
    let options = ["--link", "roce", "--address", &address];
    let mut command = place.mlx5_run(&[&options[..], &["--log", "-", "--log-commands"]].concat());
    place.start(command.args(program))
}

/// Returns an address that no other test has.
fn address(end: u8) -> String {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    format!("127.{}.{high}.{low}", 100 + end)
}

/// For rdma_cm, two addresses are two hosts, which exchange the messages of InfiniBand.
#[test]
#[ignore = "needs rdmacm-utils"]
fn programs_of_two_hosts_connect_and_end() {
    let place = Place::new("cm-far");
    let to = address(1);
    for (server, client, said) in [
        (
            &["rping", "-s", "-v", "-C", "20"][..],
            &["rping", "-c", "-v", "-C", "20", "-a", &to][..],
            "ping data: rdma-ping-19",
        ),
        (
            &["ucmatose", "-c", "3"],
            &["ucmatose", "-c", "3", "-s", &to],
            "return status 0",
        ),
        (
            &["udaddy", "-c", "3"],
            &["udaddy", "-c", "3", "-s", &to],
            "return status 0",
        ),
    ] {
        let mut server = start_at(&place, 1, server);
        let log = server.output_path();
        server.wait_for(|| {
            std::fs::read_to_string(&log)
                .unwrap()
                .contains("rdma_cm listen")
        });
        let client = start_at(&place, 2, client).finish();
        client.succeeded().said(said);
        server.finish().succeeded().said(said);
    }
    let refused = |program: &[&str], said: &str| {
        // The launcher of this program keeps the gate of the address.
        let gate = start_at(&place, 1, &["sleep", "60"]);
        let client = start_at(&place, 2, program).finish();
        assert!(!client.status.success());
        client.said(said);
        drop(gate);
    };
    refused(
        &["rping", "-c", "-C", "1", "-a", &to],
        "RDMA_CM_EVENT_REJECTED, error 8",
    );
    refused(
        &["udaddy", "-s", &to],
        "RDMA_CM_EVENT_UNREACHABLE, error: 1",
    );
}

/// The first launcher of an address starts the gate, which stays for the other launchers. The gate
/// of a killed program detects its death.
#[test]
#[ignore = "needs rdmacm-utils"]
fn a_gate_outlives_its_launcher_and_reports_a_killed_program() {
    let place = Place::new("cm-gate");
    // Addresses that the other test does not use.
    let one = address(3);
    let first = start_at(&place, 3, &["sleep", "60"]);
    let mut server = start_at(&place, 3, &["rping", "-s", "-v"]);
    let log = server.output_path();
    let contains =
        |log: &std::path::Path, what: &str| std::fs::read_to_string(log).unwrap().contains(what);
    server.wait_for(|| contains(&log, "rdma_cm listen"));
    drop(first);
    let mut client = start_at(&place, 4, &["rping", "-c", "-v", "-a", &one]);
    let log = client.output_path();
    client.wait_for(|| contains(&log, "ping data"));
    drop(server);
    client.finish().said("client DISCONNECT EVENT");
}

#[test]
#[ignore = "needs perftest"]
fn perftest_connects_with_rdma_cm() {
    for program in [
        ["ib_write_bw", "-R", "-n", "50"],
        ["ib_send_lat", "-R", "-n", "50"],
    ] {
        for [_, client] in pair(
            program[0],
            &program,
            &[&program[..], &["127.0.0.1"]].concat(),
        ) {
            client.said(" 50 ");
        }
    }
}

#[test]
#[ignore = "needs rdmacm-utils"]
fn a_port_without_a_listener_or_with_one_already_is_refused() {
    let place = Place::new("cm-ports");
    let client = ["rping", "-c", "-a", "127.0.0.1", "-C", "1"];
    let refused = place.run(&[], &client);
    assert!(!refused.status.success());
    refused.said("RDMA_CM_EVENT_REJECTED, error 8");

    let server = serve(&place, "ib", &["rping", "-s", "-C", "1"]);
    let second = place.run(&[], &["rping", "-s", "-C", "1"]);
    assert!(!second.status.success());
    second.said("rdma_bind_addr: Cannot assign requested address");
    place.run(&[], &client).succeeded();
    server.finish().succeeded();
    let elsewhere = place.run(&[], &["rping", "-c", "-a", "192.0.2.1", "-C", "1"]);
    elsewhere
        .said("RDMA_CM_EVENT_ADDR_ERROR, error -19")
        .said("rdma_cm resolve_ip 192.0.2.1: no device of this host has the address");
}

/// The end of a peer is reported at once, and the port of a killed process is free.
#[test]
#[ignore = "needs rdmacm-utils"]
fn a_peer_that_is_killed_is_an_event() {
    let place = Place::new("cm-killed");
    for _ in 0..2 {
        let server = serve(&place, "roce", &["rping", "-s", "-v"]);
        let mut client = place.start(place.mlx5_run(&["--link", "roce"]).args([
            "rping",
            "-c",
            "-v",
            "-a",
            "127.0.0.1",
        ]));
        let output = client.output_path();
        client.wait_for(|| {
            std::fs::read_to_string(&output)
                .unwrap()
                .contains("ping data")
        });
        let killed = Instant::now();
        drop(server);
        client.finish().said("client DISCONNECT EVENT");
        println!("noticed after {:?}", killed.elapsed());
    }
}
