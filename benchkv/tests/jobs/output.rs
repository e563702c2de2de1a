//! The output for people and for programs.

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use benchkv::result::JobResult;
use serde_json::Value;

use crate::death;
use crate::job::{Job, SHORT, Scratch, TICKS_OF_RUN, TWO_BACKENDS, benchkv, run, turn};

/// Returns the cells of a row of the ranks' table: three rates of two words, then counts.
fn cells(stdout: &str, rank: &str) -> Vec<String> {
    let row = stdout
        .lines()
        .find(|line| line.split_whitespace().next() == Some(rank));
    row.unwrap_or_else(|| panic!("no row for {rank}: {stdout}"))
        .split_whitespace()
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_table_goes_to_standard_output_and_the_plan_to_standard_error() {
    for backend in TWO_BACKENDS {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let ended = Job::start(
            benchkv(&SHORT)
                .args(["--backend", backend])
                .arg("--shm-dir")
                .arg(dir.path()),
        )
        .end();
        assert!(ended.status.success(), "{}", ended.stderr);
        let out = &ended.stdout;
        for rank in ["0", "1", "all"] {
            let cells = cells(out, rank);
            for rate in [1, 3, 5] {
                assert!(
                    cells[rate].parse::<f64>().unwrap() > 0.0 && cells[rate + 1].ends_with("/s"),
                    "local, remote, total: {cells:?}"
                );
            }
            assert!(cells[7].parse::<u64>().unwrap() > 0, "issued: {cells:?}");
            assert!(cells[8].parse::<u64>().is_ok(), "not found: {cells:?}");
            assert_eq!(
                cells[9..12],
                ["0", "0", "0"],
                "errors, lost, verify failures: {cells:?}"
            );
        }
        for part in [
            "rank ",
            "round trip",
            "p50",
            "p99",
            "p99.9",
            "max",
            "remote  ",
            "soft device",
            "Little's law",
        ] {
            assert!(out.contains(part), "{part:?} is missing: {out}");
        }
        for part in [
            backend,
            "2 ranks x (1 daemon + 1 client)",
            "seed 1",
            "usable cores",
            "wait ",
        ] {
            assert!(
                ended.stderr.contains(part),
                "{part:?} is missing: {}",
                ended.stderr
            );
        }
        assert!(
            !ended.stderr.contains("benchkv:"),
            "a success has no complaint: {}",
            ended.stderr
        );
        assert!(
            !ended.stderr.contains("run 1 of 1") && !ended.stderr.contains(['\r', '\u{1b}']),
            "no progress in a file: {}",
            ended.stderr
        );
    }
}

/// Asserts that the document has every key that a program may rely on.
#[track_caller]
fn assert_complete(result: &Value) {
    let text = ["backend", "device"];
    let numbers = [
        "schema_version",
        "ranks",
        "server_threads",
        "client_threads",
        "queue_depth",
        "total_rps",
        "local_ops",
        "remote_ops",
    ];
    let counts = ["issued", "completed", "errors", "lost", "verify_failures"];
    let latencies = ["mean", "p50", "p90", "p99", "p999", "p9999", "max"];
    assert!(text.iter().all(|key| result[key].is_string()), "{result}");
    for key in numbers.iter().chain(&counts) {
        assert!(result[key].is_number(), "{key}: {result}");
    }
    let latency = latencies.map(|key| {
        result["latency_ns"][key]
            .as_f64()
            .unwrap_or_else(|| panic!("{key}: {result}"))
    });
    assert!(
        latency[1] > 0.0 && latency[1..].is_sorted(),
        "percentiles rise: {latency:?}"
    );
    assert_eq!(result["runs"].as_array().map(Vec::len), Some(1), "{result}");
    assert_eq!(
        result["per_rank"].as_array().map(Vec::len),
        Some(2),
        "{result}"
    );
    let ended = ["completed", "errors", "lost"].map(|key| result[key].as_u64().unwrap());
    assert_eq!(
        result["issued"].as_u64().unwrap(),
        ended.iter().sum::<u64>(),
        "{result}"
    );
}

#[test]
fn json_to_standard_output_is_exactly_one_document() {
    for backend in TWO_BACKENDS {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let ended = run(&dir, &["--backend", backend, "--ranks", "2", "--json", "-"]);
        let result = ended.result();
        assert_complete(&result);
        assert_eq!(
            (&result["backend"], &result["device"]),
            (&Value::from(backend), &Value::from("soft"))
        );
        assert!(
            ended.stderr.contains("round trip"),
            "the table makes room: {}",
            ended.stderr
        );
        let typed: JobResult = serde_json::from_str(&ended.stdout).unwrap();
        assert_eq!(
            serde_json::to_value(&typed).unwrap(),
            result,
            "what is written reads back as the same"
        );
    }
}

/// Returns a pseudo-terminal of this number of columns: its screen, and the end that a process
/// writes to.
fn terminal(columns: u16) -> (File, File) {
    let (mut screen, mut end) = (0, 0);
    let none = std::ptr::null_mut();
    let mut size = libc::winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: both descriptors are written to live variables, the size is read from one; name and
    // attributes are left to the system.
    let status = unsafe {
        libc::openpty(
            &raw mut screen,
            &raw mut end,
            none,
            none.cast(),
            &raw mut size,
        )
    };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call succeeded, so both are open descriptors without another owner.
    unsafe { (File::from_raw_fd(screen), File::from_raw_fd(end)) }
}

/// Returns the output of a short job on a terminal of this number of columns.
fn shown_by_a_job(columns: u16) -> String {
    let (_turn, dir, (mut screen, end)) = (turn(), Scratch::in_memory(), terminal(columns));
    let reader = std::thread::spawn(move || {
        let (mut shown, mut some) = (Vec::new(), [0; 1024]);
        // An error is the end: all processes have closed the terminal.
        while let Ok(count @ 1..) = screen.read(&mut some) {
            shown.extend_from_slice(&some[..count]);
        }
        String::from_utf8_lossy(&shown).into_owned()
    });
    let mut command = benchkv(&["--json", "-"]);
    // Without the variable, or on a dumb terminal, no progress is shown.
    command.env("TERM", "xterm");
    let job = Job::start_on(end, command.args(SHORT).arg("--shm-dir").arg(dir.path()));
    drop(command);
    let ended = job.end();
    let shown = reader.join().unwrap();
    assert_complete(&ended.result());
    shown
}

#[test]
fn progress_is_shown_on_a_terminal_and_gone_before_the_table() {
    let shown = shown_by_a_job(80);
    let at = |part: &str| {
        shown
            .rfind(part)
            .unwrap_or_else(|| panic!("{part:?} is missing: {shown}"))
    };
    assert!(
        at("warming up") < at("run 1 of 1") && at("run 1 of 1") < at("round trip"),
        "{shown}"
    );
    assert!(at(" left") < at("round trip"), "{shown}");
    let table = shown
        .lines()
        .find(|line| line.contains("benchkv delegation by copyrpc:"))
        .unwrap();
    // The line is erased, and the table begins at the line's start.
    assert!(
        table
            .rsplit('\u{1b}')
            .next()
            .unwrap()
            .trim_start_matches("[2K")
            .starts_with("benchkv delegation by copyrpc:"),
        "{table:?}"
    );
}

#[test]
fn progress_fits_a_narrow_terminal() {
    let shown = shown_by_a_job(45);
    let drawn: Vec<&str> = shown
        .split(['\r', '\n', '\u{1b}'])
        .filter(|line| line.contains(" left"))
        .collect();
    assert!(!drawn.is_empty(), "{shown:?}");
    for line in drawn {
        // The line begins with the remainder of the escape code that clears it.
        let line = line.trim_start_matches("[2K");
        assert!(
            line.len() <= 45 && line.contains("["),
            "{line:?} of {shown:?}"
        );
    }
}

/// Returns the number of operations in a line of `--report-interval`, of rank 0 of two.
fn operations_in(line: &str) -> Option<u64> {
    let (before, after) = line.split_once(" operations ")?;
    let is_whole =
        after.contains("/s") && after.ends_with("(rank 0 of 2)") && before.contains(" s  ");
    before.rsplit(' ').next().filter(|_| is_whole)?.parse().ok()
}

#[test]
fn lines_of_intervals_are_printed_if_they_are_asked_for_and_count_the_operations_of_rank_0() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let args = ["--client-threads", "2", "--duration", "0.6", "--json", "-"];
    let ended = run(&dir, &[&args[..], &["--report-interval", "100ms"]].concat());
    let issued = ended.result()["per_rank"][0]["issued"].as_u64().unwrap();
    let counts: Vec<u64> = ended.stderr.lines().filter_map(operations_in).collect();
    let sum: u64 = counts.iter().sum();
    assert!(
        sum > 0 && sum <= issued,
        "{counts:?} of {issued}: {}",
        ended.stderr
    );
    let without = run(&dir, &args);
    assert!(
        without.status.success()
            && !without
                .stderr
                .lines()
                .any(|line| operations_in(line).is_some()),
        "{}",
        without.stderr
    );
    dir.assert_empty();
}

#[test]
fn json_to_a_file_replaces_it_and_leaves_the_table_where_it_was() {
    let _turn = turn();
    let dir = Scratch::in_memory();
    let files = Scratch::on_disk();
    let file = files.path().join("result.json");
    std::fs::write(&file, "an older and longer result ".repeat(10_000)).unwrap();
    let ended = run(&dir, &["--json", file.to_str().unwrap()]);
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(
        ended.stdout.contains("round trip") && !ended.stdout.contains("schema_version"),
        "{}",
        ended.stdout
    );
    let result: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_complete(&result);
    assert_eq!(
        cells(&ended.stdout, "all")[7],
        result["issued"].to_string(),
        "table and document are of the same job"
    );
    assert_eq!(files.names(), ["result.json"]);
}

#[track_caller]
fn read_json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The job ends, and prints the table and the reason.
#[test]
fn a_pipe_that_nobody_reads_costs_its_document_and_not_the_table() {
    for flag in ["--json", "--output"] {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let pipe = dir.path().join("pipe.csv");
        let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
        // SAFETY: the name is a live string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0, "{flag}");
        let ended = Job::start(benchkv(&["sim", "-t", "60us", flag]).arg(&pipe)).end();
        ended.assert_failed(1, &[pipe.to_str().unwrap(), "start a reader of the pipe"]);
        assert!(
            ended.stdout.contains("benchkv delegation by copyrpc"),
            "{}",
            ended.stdout
        );
    }
}

/// Standard output is a pipe without a reader, or a file system without room.
#[test]
fn files_are_written_whatever_becomes_of_standard_output() {
    let closed = File::from(OwnedFd::from(UnixStream::pair().unwrap().0));
    let full = File::options().write(true).open("/dev/full").unwrap();
    for (stdout, code) in [(closed, 0), (full, 1)] {
        let _turn = turn();
        let dir = Scratch::in_memory();
        let files = Scratch::on_disk();
        let (json, csv) = (
            files.path().join("result.json"),
            files.path().join("result.csv"),
        );
        let mut command = benchkv(&SHORT);
        command
            .arg("--shm-dir")
            .arg(dir.path())
            .arg("--json")
            .arg(&json)
            .arg("--output")
            .arg(&csv);
        let ended = Job::start_into(stdout, &mut command).end();
        assert_eq!(ended.status.code(), Some(code), "{}", ended.stderr);
        assert_eq!(
            ended
                .stderr
                .contains("the table cannot be written to standard output: No space left"),
            code == 1,
            "{}",
            ended.stderr
        );
        assert_complete(&read_json(&json));
        assert_eq!(
            std::fs::read_to_string(csv).unwrap().lines().count(),
            5,
            "a header, the job, a run, two ranks"
        );
        dir.assert_empty();
    }
}

/// A word, such as the names of the values of a flag, is not broken.
#[test]
fn help_is_as_wide_as_the_terminal() {
    for args in [
        &["-h"][..],
        &["--help"],
        &["sim", "--help"],
        &["doctor", "--help"],
        &["report", "--help"],
    ] {
        for columns in [40, 80] {
            let output = benchkv(args)
                .env("COLUMNS", columns.to_string())
                .output()
                .unwrap();
            let help = String::from_utf8(output.stdout).unwrap();
            let is_long = |line: &&str| line.len() > columns && line.starts_with("        ");
            let wrong: Vec<_> = help.lines().filter(is_long).collect();
            assert!(
                output.status.success() && wrong.is_empty(),
                "{args:?} in {columns} columns: {wrong:?}"
            );
            // If the help were in a column next to long names, each line would have room for one
            // word.
            let indent = help
                .lines()
                .map(|line| line.len() - line.trim_start().len())
                .max();
            assert!(indent < Some(columns - 10), "{help}");
        }
    }
}

/// Tests the output of each command, also of commands that write line by line.
#[test]
fn output_that_finds_no_room_is_a_failure_and_a_reader_that_goes_is_none() {
    let _turn = turn();
    for args in [
        &["--help"][..],
        &["-h"],
        &["--version"],
        &["help", "report"],
        &["doctor", "--help"],
        &["doctor"],
        &["doctor", "--json", "-"],
        &["sim", "-t", "100us"],
        &["sim", "-t", "100us", "--json", "-"],
    ] {
        let closed = File::from(OwnedFd::from(UnixStream::pair().unwrap().0));
        let full = File::options().write(true).open("/dev/full").unwrap();
        for (stdout, code) in [(closed, 0), (full, 1)] {
            let ended = Job::start_into(stdout, &mut benchkv(args)).end();
            assert_eq!(
                ended.status.code(),
                Some(code),
                "{args:?}: {}",
                ended.stderr
            );
            let says = ended
                .stderr
                .contains("cannot be written to standard output: No space left");
            assert_eq!(says, code == 1, "{args:?}: {}", ended.stderr);
        }
    }
}

#[test]
fn a_file_that_cannot_be_written_keeps_nothing_else_from_being_written() {
    let _turn = turn();
    let dir = Scratch::in_memory();
    let files = Scratch::on_disk();
    let csv = files.path().join("result.csv");
    let ended = run(
        &dir,
        &["--json", "/dev/full", "--output", csv.to_str().unwrap()],
    );
    ended.assert_failed(
        1,
        &["benchkv: the JSON result: /dev/full cannot be written: No space left"],
    );
    assert!(
        csv.exists() && ended.stdout.contains("round trip"),
        "{}",
        ended.stdout
    );
    dir.assert_empty();
}

/// A directory takes the place of a series after the check at the start.
#[test]
fn a_series_that_cannot_be_written_costs_no_result() {
    let _turn = turn();
    let dir = Scratch::in_memory();
    let files = Scratch::on_disk();
    let (trace, json) = (files.path().join("trace"), files.path().join("result.json"));
    let (trace_arg, json_arg) = (trace.to_str().unwrap(), json.to_str().unwrap());
    let (job, _) = death::start_and_load_with(&dir, &["--trace", trace_arg, "--json", json_arg], 2);
    assert!(
        !trace.exists(),
        "it is made when there is something to put there"
    );
    std::fs::create_dir_all(trace.join("rank-1-daemon-0.csv")).unwrap();
    let rank = job.rank(0);
    job.until_used(rank, "client-0", TICKS_OF_RUN);
    job.launcher().signal(libc::SIGTERM);
    let ended = job.end();
    ended.assert_failed(143, &["benchkv: --trace: rank 1: ", "Is a directory"]);
    assert!(ended.stdout.contains("round trip"), "{}", ended.stdout);
    let result = read_json(&json);
    assert!(
        result["trace_failure"]
            .as_str()
            .unwrap()
            .starts_with("rank 1: ")
            && result["lost"] == 0,
        "{result}"
    );
    assert!(trace.join("rank-0-daemon-0.csv").exists());
    dir.assert_empty();
}

/// The second operation is due one second after the first, which is in the warm-up. If the machine
/// pauses for a second, the test is tried again.
#[test]
fn a_job_that_measured_nothing_says_so_and_has_its_status() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let args = [
        "--ranks",
        "1",
        "--rate",
        "1",
        "--warmup",
        "0.4",
        "--duration",
        "0.01",
    ];
    let ended = (0..5)
        .map(|_| run(&dir, &args))
        .find(|ended| !ended.status.success())
        .unwrap();
    ended.assert_failed(
        4,
        &["benchkv: nothing was measured: no operation ended in a run"],
    );
    assert!(
        ended.stdout.contains("NOTHING WAS MEASURED"),
        "{}",
        ended.stdout
    );
    dir.assert_empty();
}

/// A missing item is not a failure, on any machine.
#[test]
fn the_doctor_says_what_is_missing_and_succeeds() {
    let doctor = |args: &[&str]| {
        Job::start(benchkv(&["doctor"]).args(args).env("PATH", "/nonexistent")).end()
    };
    let text = doctor(&["--shm-dir", "/nonexistent"]);
    assert!(
        text.status.success() && text.stderr.is_empty(),
        "{}: {}",
        text.status,
        text.stderr
    );
    let json = doctor(&["--json", "-"]);
    let checks = json.result()["checks"].as_array().unwrap().clone();
    assert!(
        json.stderr.contains("-> "),
        "the text makes room: {}",
        json.stderr
    );
    let status = |name: &str| {
        checks
            .iter()
            .find(|check| check["name"] == name)
            .map(|check| check["status"].clone())
    };
    assert_eq!(
        (status("mpirun"), status("shared memory")),
        (Some("missing".into()), Some("ok".into())),
        "{checks:?}"
    );
    let says = |name: &str, status: &str| {
        let mut lines = text
            .stdout
            .lines()
            .skip_while(|line| !line.contains(&format!(" {name}  ")));
        let (line, advice) = (lines.next().unwrap(), lines.next().unwrap());
        assert!(
            line.starts_with(status) && advice.trim_start().starts_with("-> "),
            "{line}: {advice}"
        );
    };
    says("mpirun", "missing");
    says("shared memory", "missing");
    for check in checks {
        assert!(
            text.stdout.contains(check["name"].as_str().unwrap()),
            "{check}"
        );
        assert_eq!(
            check["advice"].is_null(),
            check["status"] == "ok",
            "{check}"
        );
    }
}

#[test]
fn the_doctor_takes_no_options_of_a_job() {
    let ended = Job::start(&mut benchkv(&["--ranks", "2", "doctor"])).end();
    ended.assert_failed(2, &["doctor"]);
}

#[test]
fn a_label_goes_into_table_and_result() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let ended = run(
        &dir,
        &[
            "--label",
            "before <the> change",
            "--no-verify",
            "--json",
            "-",
        ],
    );
    let result = ended.result();
    assert_eq!(
        (&result["options"]["label"], &result["options"]["verify"]),
        (&"before <the> change".into(), &false.into())
    );
    assert!(
        ended.stderr.contains("\nlabel: before <the> change\n"),
        "{}",
        ended.stderr
    );
}
