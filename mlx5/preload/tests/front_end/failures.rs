//! The errors that programs get, and the launcher's treatment of programs that fail.

use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use crate::support::{Place, built, free_port};

/// Runs ibv_rc_pingpong without a peer and with a fault. Checks that it fails with the message
/// `says`.
fn refused(fault: &str, says: &str) {
    let finished =
        Place::new(&fault.replace(['=', '@'], "-")).run(&["--fault", fault], &["ibv_rc_pingpong"]);
    assert!(!finished.status.success(), "{finished:#?}");
    finished.said(says);
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn faults_reach_the_program() {
    refused("devices=none", "No IB devices found");
    refused("open=EACCES", "Couldn't get context");
    refused("get_context=ENODEV", "Couldn't get context");
    refused("alloc_pd=ENOMEM", "Couldn't allocate PD");
    refused("reg_mr=ENOMEM", "Couldn't register MR");
    refused("create_cq=ENOMEM", "Couldn't create CQ");
    refused("create_qp=ENOMEM", "Couldn't create QP");
    refused("modify_qp=EIO", "Failed to modify QP to INIT");
}

/// The program needs more descriptors than the device. At one of these limits the device opens, but
/// the program's completion channel gets no descriptor.
#[test]
#[ignore = "needs ibverbs-utils"]
fn a_program_without_descriptors_is_told_the_reason() {
    let place = Place::new("descriptors");
    let port = free_port().to_string();
    let mut outputs = (8..24).map(|limit| {
        let run = place.mlx5_run(&[]);
        let mut limited = Command::new("sh");
        limited
            .args(["-c", &format!("ulimit -n {limit} && exec \"$0\" \"$@\"")])
            .arg(run.get_program())
            .args(run.get_args())
            .args(["ibv_rc_pingpong", "-e", "-p", &port, "127.0.0.1"]);
        place.start(&mut limited).finish().output
    });
    let refused = outputs.find(|output| output.contains("Couldn't create completion channel"));
    let refused = refused.expect("a limit with which the device opens, and no channel");
    assert!(
        refused.contains("create_comp_channel") && refused.contains("`ulimit -n`"),
        "{refused}"
    );
}

/// The holder of the port is any other program, or the first program of another user or fabric at
/// this address.
#[test]
#[ignore = "needs ibverbs-utils"]
fn a_program_whose_udp_port_is_taken_gets_the_next_one() {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let address = IpAddr::from([127, 80, high, low]);
    let _taken = UdpSocket::bind((address, 4791)).unwrap();
    let shown = Place::new("taken").run(
        &["--link", "roce", "--address", &address.to_string()],
        &["ibv_devinfo"],
    );
    shown.succeeded().said("PORT_ACTIVE");
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn the_port_can_be_down_or_have_no_gid() {
    let place = Place::new("port");
    let shown = place.run(
        &["--fault", "port=down", "--fault", "gid=none"],
        &["ibv_devinfo", "-v"],
    );
    shown.succeeded().said("PORT_DOWN (1)");
    assert!(!shown.output.contains("fe80:"), "{shown:#?}");
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn a_fault_can_come_later() {
    let place = Place::new("later");
    let log = place.file("log");
    let options = [
        "--log",
        log.to_str().unwrap(),
        "--log-commands",
        "--fault",
        "modify_qp=EIO@1",
    ];
    let ends = place.pair(&options, &["ibv_rc_pingpong"]);
    assert!(ends.iter().all(|end| !end.status.success()), "{ends:#?}");
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("modify_qp qp=0 Reset -> Init"), "{log}");
    assert!(log.contains("modify_qp (26) refused: EIO"), "{log}");
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn bad_faults_are_refused_with_the_legal_ones() {
    let finished = Place::new("bad").run(&["--fault", "reg_mr=EWHAT"], &["ibv_devinfo"]);
    assert!(!finished.status.success());
    finished.said("EWHAT").said("ENOMEM");
}

#[test]
#[ignore = "needs ibverbs-utils"]
fn what_is_refused_is_logged_by_name() {
    let place = Place::new("log");
    let log = place.file("log");
    place
        .run(&["--log", log.to_str().unwrap()], &["ibv_devinfo"])
        .succeeded();
    assert!(
        !log.exists(),
        "nothing was refused for good: {:?}",
        fs::read_to_string(&log)
    );
    place.run(
        &["--log", log.to_str().unwrap(), "--fault", "alloc_pd=ENOMEM"],
        &["ibv_rc_pingpong"],
    );
    let refused = fs::read_to_string(&log).unwrap();
    assert!(
        refused.ends_with("alloc_pd (3) refused: ENOMEM\n") && refused.lines().count() == 1,
        "{refused}"
    );
    let all = place.run(&["--log", "-", "--log-commands"], &["ibv_devinfo"]);
    all.succeeded()
        .said("get_context bfregs=16/4")
        .said("query_port")
        .said("ioctl DEVICE.INVOKE_WRITE fell back: EPROTONOSUPPORT");
    all.said("get_context (0) fell back: EOPNOTSUPP");
}

#[test]
#[ignore = "needs perftest"]
fn a_work_request_can_fail_and_messages_can_be_lost() {
    let fails = |fault, status| {
        let place = Place::new(&format!("status-{status}"));
        let [_, client] = place.pair(
            &["--fault", fault],
            &["ib_write_bw", "-n", "300", "-s", "64"],
        );
        assert!(!client.status.success(), "{client:#?}");
        client
            .said("Completion with error")
            .said(&format!("Failed status {status}:"));
    };
    fails("wc=REM_ACCESS_ERR@100", 10);
    fails("loss.0=100%", 12);
    // `wc.1` is for a second queue pair, and the program has only one.
    for fault in ["loss=10%", "wc.1=REM_ACCESS_ERR"] {
        // The timeout is 1 ms.
        let ends = Place::new("lost").pair(
            &["--fault", fault],
            &["ib_write_bw", "-n", "300", "-s", "64", "-u", "8"],
        );
        ends.iter().for_each(|end| _ = end.succeeded());
    }
}

#[test]
#[ignore = "needs ibverbs-utils and user namespaces"]
fn a_peer_in_another_user_namespace_is_refused_with_the_reason() {
    let place = Place::new("namespaces");
    let port = crate::support::free_port();
    let command = |more: &[&str]| {
        let run = place.mlx5_run(&["ibv_rc_pingpong", "-p", &port.to_string()]);
        let mut command = Command::new("unshare");
        command
            .args(["--user", "--map-current-user"])
            .arg(run.get_program())
            .args(run.get_args())
            .args(more);
        command
    };
    let mut server = place.start(&mut command(&[]));
    server.wait_for(|| crate::support::is_listening(port));
    let client = place.start(&mut command(&["localhost"])).finish();
    assert!(!client.status.success(), "{client:#?}");
    // The server connects before it answers the client.
    let server = server.finish();
    assert!(!server.status.success(), "{server:#?}");
    server
        .said("Failed to modify QP to RTR")
        .said("in one user namespace");
}

/// Kills the server. Checks that the client's operations get no answer (`IBV_WC_RETRY_EXC_ERR`),
/// because the end of the server's process ends the connection.
fn survivor_of(test: &str, program: &str) {
    let place = Place::new(test);
    let log = place.file("log");
    let port = crate::support::free_port().to_string();
    let command = |more: &[&str]| {
        let mut command = place.mlx5_run(&["--log", log.to_str().unwrap(), "--log-commands"]);
        command
            .args([program, "-n", "10000000", "-p", &port])
            .args(more);
        command
    };
    let mut server = place.start(&mut command(&[]));
    server.wait_for(|| crate::support::is_listening(port.parse().unwrap()));
    let mut client = place.start(&mut command(&["localhost"]));
    client.wait_for(|| fs::read_to_string(&log).is_ok_and(|log| log.contains("-> ReadyToSend")));
    // The wait lets the client send messages before the server is killed.
    sleep(Duration::from_millis(500));
    // SAFETY: a child process that was not yet waited for.
    unsafe { libc::kill(server.id(), libc::SIGKILL) };
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&server.finish().status),
        Some(libc::SIGKILL)
    );
    let client = client.finish();
    assert!(!client.status.success(), "{client:#?}");
    client
        .said("Completion with error")
        .said("Failed status 12");
}

#[test]
#[ignore = "needs perftest"]
fn the_survivor_of_a_killed_peer_gets_no_answer_to_its_writes() {
    survivor_of("killed-write", "ib_write_bw");
}

#[test]
#[ignore = "needs perftest"]
fn the_survivor_of_a_killed_peer_gets_no_answer_to_its_reads() {
    survivor_of("killed-read", "ib_read_bw");
}

/// Returns the path of a run's tree, which the program has printed first.
fn tree(output: &str) -> PathBuf {
    PathBuf::from(output.lines().next().unwrap())
}

#[test]
#[ignore = "needs libibverbs1 and ibverbs-providers"]
fn the_launcher_ends_as_the_program_did_and_leaves_nothing() {
    let place = Place::new("ends");
    for (script, code) in [
        ("exit 7", 7),
        ("kill -TERM $$", 128 + libc::SIGTERM),
        ("exit 0", 0),
    ] {
        let finished = place.run(
            &[],
            &[
                "sh",
                "-c",
                &format!(
                    "echo $SYSFS_PATH; test -d $SYSFS_PATH/class/infiniband/mlx5_0 && {script}"
                ),
            ],
        );
        assert_eq!(finished.status.code(), Some(code), "{finished:#?}");
        assert!(!tree(&finished.output).exists(), "{finished:#?}");
    }
    assert_eq!(
        place.run(&[], &["there-is-no-such-program"]).status.code(),
        Some(127)
    );
}

#[test]
#[ignore = "needs libibverbs1 and ibverbs-providers"]
fn signals_go_on_to_the_program() {
    let place = Place::new("signals");
    let script = "trap 'exit 9' USR1; echo $SYSFS_PATH; while true; do sleep 0.05; done";
    let mut program = place.start(place.mlx5_run(&[]).args(["sh", "-c", script]));
    let output = place.file("output-0");
    program.wait_for(|| fs::read_to_string(&output).is_ok_and(|output| output.ends_with('\n')));
    // SAFETY: a child process that was not yet waited for.
    unsafe { libc::kill(program.id(), libc::SIGUSR1) };
    let finished = program.finish();
    assert_eq!(finished.status.code(), Some(9), "{finished:#?}");
    assert!(!tree(&finished.output).exists());
}

#[test]
#[ignore = "needs libibverbs1 and ibverbs-providers"]
fn a_killed_launcher_takes_its_program_with_it_and_the_next_one_cleans_up() {
    let place = Place::new("cleans");
    let mut program = place.start(place.mlx5_run(&[]).args([
        "sh",
        "-c",
        "echo $SYSFS_PATH; echo $$; exec sleep 1000",
    ]));
    let output = place.file("output-0");
    program.wait_for(|| {
        fs::read_to_string(&output)
            .is_ok_and(|output| output.lines().count() == 2 && output.ends_with('\n'))
    });
    // SAFETY: a child process that was not yet waited for.
    unsafe { libc::kill(program.id(), libc::SIGKILL) };
    let finished = program.finish();
    let sleeper: libc::pid_t = finished.output.lines().nth(1).unwrap().parse().unwrap();
    let other = place.start(place.mlx5_run(&[]).args([
        "sh",
        "-c",
        "echo $SYSFS_PATH; test -d $SYSFS_PATH && exec sleep 2",
    ]));
    place.run(&[], &["true"]).succeeded();
    assert!(!tree(&finished.output).exists(), "{finished:#?}");
    let other = other.finish();
    other.succeeded();
    // SAFETY: the call sends no signal. No parent waits for the sleeper, so its number is free when
    // the sleeper has ended.
    let is_gone = || unsafe { libc::kill(sleeper, 0) } != 0;
    let is_zombie = || {
        fs::read_to_string(format!("/proc/{sleeper}/stat")).is_ok_and(|stat| stat.contains(") Z "))
    };
    assert!(is_gone() || is_zombie(), "{sleeper} is still there");
}

#[test]
fn without_its_library_the_launcher_says_how_to_build_it() {
    let place = Place::new("alone");
    let alone = place.file("mlx5-run");
    fs::copy(built().join("mlx5-run"), &alone).unwrap();
    let finished = place.start(Command::new(&alone).arg("true")).finish();
    assert_eq!(finished.status.code(), Some(125), "{finished:#?}");
    finished.said("cargo build --release -p mlx5-preload");
}
