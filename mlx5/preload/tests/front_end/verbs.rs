//! A program whose messages a NIC would refuse, and the completions and events that it gets.

use std::process::Command;

use crate::support::Place;

/// The completions and events of `verbs.c` in each mode, and a part of the log's line.
const SHOWN: &[(&str, &str, &str)] = &[
    (
        "same",
        "sent: success\nno event\nresponder: alive\nend\n",
        "",
    ),
    (
        "mtu",
        "sent: remote invalid request error\nevent: invalid request local work queue error\nresponder: failed\nend\n",
        "path_mtu is 1024 at the sender and 4096 at the receiver",
    ),
    (
        "psn",
        "sent: transport retry counter exceeded\nno event\nresponder: alive\nend\n",
        "sq_psn is 0x7, and the receiver's rq_psn 0x9",
    ),
    (
        "reads",
        "sent: success\nsent: remote invalid request error\nevent: invalid request local work queue error\nresponder: failed\nend\n",
        "max_rd_atomic is 16, and the receiver's max_dest_rd_atomic 1",
    ),
    (
        "format",
        "sent: transport retry counter exceeded\nno event\nresponder: alive\nend\n",
        "of type RoCE v2, and the receiver's of type RoCE v1",
    ),
    (
        "qkey",
        "sent: success\nno event\nresponder: alive\nend\n",
        "Q_Key 0x5, and the receiver 0x6",
    ),
    (
        "access",
        "sent: remote access error\nreceived: Work Request Flushed Error\nreceived: Work Request Flushed Error\nevent: local access violation work queue error\nresponder: failed\nend\n",
        "has refused an access of its peer",
    ),
    (
        "limit",
        "limit 2\nno event\nsent: success\nreceived: success\nevent: SRQ limit reached\nlimit 0\nresponder: alive\nend\n",
        "fewer than 2 receives",
    ),
    (
        "last",
        "sent: success\nreceived: success\nevent: last WQE reached\nresponder: failed\nend\n",
        "",
    ),
    (
        "unread",
        "sent: remote access error\nreceived: Work Request Flushed Error\nreceived: Work Request Flushed Error\nno event\n",
        "",
    ),
    (
        "same --gids -,v2=fd00::1",
        "sent: success\nno event\nresponder: alive\nend\n",
        "",
    ),
    (
        "late",
        "sent: success\nreceived: success\nno event\nresponder: alive\nend\n",
        "",
    ),
    (
        "late --fault delay=2000..3000,seed=7",
        "received: success\nsent: success\nno event\nresponder: alive\nend\n",
        "",
    ),
    (
        "buffer --check-buffers --fault delay=50000..60000",
        "sent: success\nno event\nresponder: alive\nend\n",
        "the source buffer changed",
    ),
];

#[test]
#[ignore = "needs libibverbs-dev and a C compiler"]
fn a_program_that_a_nic_would_refuse_is_refused_with_the_reason() {
    let place = Place::new("verbs");
    let program = place.file("program");
    let mut cc = Command::new("cc");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/front_end/verbs.c");
    cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(source)
        .arg("-libverbs");
    place.start(&mut cc).finish().succeeded();
    let program = program.to_str().unwrap();
    for (mode, shown, logged) in SHOWN {
        let (mode, more) = mode.split_once(' ').unwrap_or((mode, ""));
        let log = place.file(&format!("log-{mode}"));
        let mut options = vec!["--link", "roce", "--log", log.to_str().unwrap()];
        options.extend(more.split_whitespace());
        let finished = place.run(&options, &[program, mode]);
        finished.succeeded();
        assert_eq!(finished.output, *shown, "{mode}");
        let log = std::fs::read_to_string(log).unwrap_or_default();
        assert!(log.contains(logged), "{mode}: {logged:?} is not in {log}");
        if mode == "same" {
            assert_eq!(log, "");
        }
    }
}
