//! Jobs that `mpirun` starts: the same results as with the local launcher, their refusals, and
//! their end when a process is killed.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a failing test panics; clippy's exemption covers #[test] functions only"
)]

#[path = "../jobs/job.rs"]
#[allow(dead_code, reason = "the other tests use more of it")]
mod job;

mod hosts;
#[path = "../support/series.rs"]
mod series_file;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use benchkv::trace::daemon_of;
use benchkv_harness::launch::device::DEVICE_VARIABLE;
use job::{BACKENDS, Ended, Job, Process, SHORT, Scratch, TICKS_OF_LOAD, TICKS_OF_RUN, run, turn};
use serde_json::Value;

/// A number of ranks of a job, and the arguments of these ranks.
type Part<'a> = (usize, &'a [&'a str]);

/// Directories of a job: one for benchkv's shared memory, and one for the shared memory of MPI,
/// which does not remove its files when it is killed.
struct Dirs {
    shm: Scratch,
    mpi: Scratch,
}

impl Dirs {
    fn new() -> Self {
        Self {
            shm: Scratch::in_memory(),
            mpi: Scratch::in_memory(),
        }
    }

    /// Returns the command of a program that runs MPI's processes.
    fn launcher(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env(DEVICE_VARIABLE, "soft");
        for variable in [
            "OMPI_ALLOW_RUN_AS_ROOT",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
            "OMPI_MCA_rmaps_base_oversubscribe",
        ] {
            command.env(variable, "1");
        }
        command
            .env("TMPDIR", self.mpi.path())
            .env("OMPI_MCA_btl_vader_backing_directory", self.mpi.path());
        command
    }

    /// Appends the binary with its options.
    fn benchkv(&self, command: &mut Command, args: &[&str]) {
        command
            .args([env!("CARGO_BIN_EXE_benchkv"), "--shm-dir"])
            .arg(self.shm.path())
            .args(args);
    }

    /// Returns the command of an mpirun with these parts.
    fn mpirun(&self, parts: &[Part<'_>]) -> Command {
        let mut command = self.launcher("mpirun");
        for (number, (ranks, args)) in parts.iter().enumerate() {
            command
                .args((number > 0).then_some(":"))
                .args(["-n", &ranks.to_string()]);
            self.benchkv(&mut command, args);
        }
        command
    }

    fn end(&self, parts: &[Part<'_>]) -> Ended {
        Job::start(&mut self.mpirun(parts)).end()
    }

    /// Returns the result of a short job.
    fn measure(&self, ranks: usize, args: &[&str]) -> Value {
        self.end(&[(ranks, &[&SHORT, args, &["--json", "-"]].concat())])
            .result()
    }

    /// Starts a long job. Returns the job and its ranks once all ranks are under load.
    fn load(&self, ranks: usize, backend: &str) -> (Job, Vec<Process>) {
        let json = self.result();
        let args = [
            "--backend",
            backend,
            "--duration",
            "60",
            "--runs",
            "1",
            "--warmup",
            "0",
            "--json",
            json.to_str().unwrap(),
        ];
        let job = Job::start(&mut self.mpirun(&[(ranks, &args)]));
        let processes: Vec<Process> = (0..ranks)
            .map(|rank| job.child_with(&format!("OMPI_COMM_WORLD_RANK={rank}")))
            .collect();
        for process in &processes {
            job.until_used(*process, "client-0", TICKS_OF_LOAD);
        }
        (job, processes)
    }

    /// Returns the path of a long job's result.
    fn result(&self) -> PathBuf {
        self.mpi.path().join("result.json")
    }

    /// Asserts that the next job removes everything that was left behind.
    #[track_caller]
    fn assert_next_job_cleans(&self, backend: &str) {
        assert_ne!(self.shm.names(), [""; 0], "there is something to clean");
        assert_sound(&self.measure(2, &["--backend", backend]), 2);
        self.shm.assert_empty();
    }
}

#[track_caller]
fn assert_sound(result: &Value, ranks: usize) {
    assert!(
        result["issued"].as_u64().unwrap() > 0 && result["remote_ops"].as_u64().unwrap() > 0,
        "{result}"
    );
    assert_eq!(
        (
            &result["issued"],
            &result["lost"],
            &result["verify_failures"]
        ),
        (&result["completed"], &0.into(), &0.into()),
        "{result}"
    );
    assert_eq!(
        (
            &result["ranks"],
            result["per_rank"].as_array().unwrap().len()
        ),
        (&ranks.into(), ranks)
    );
}

/// Collects the paths of all members, without their values; the paths of list elements have no
/// index.
fn members(value: &Value, path: &str, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(name, value)| members(value, &format!("{path}.{name}"), into)),
        Value::Array(elements) => elements
            .iter()
            .for_each(|element| members(element, &format!("{path}[]"), into)),
        _ => _ = into.insert(path.to_owned()),
    }
}

#[test]
fn every_backend_runs_below_mpirun_and_its_result_has_the_members_of_a_local_one() {
    run_below_mpirun(&BACKENDS, "soft");
}

#[test]
#[ignore = "needs libucx0"]
fn ucx_runs_below_mpirun_and_its_result_has_the_members_of_a_local_one() {
    run_below_mpirun(&["ucx-am"], "ucx");
}

fn run_below_mpirun(backends: &[&str], device: &str) {
    let _turn = turn();
    for backend in backends.iter().copied() {
        let (dirs, mut local) = (Dirs::new(), BTreeSet::new());
        let result = run(&dirs.shm, &["--backend", backend, "--json", "-"]).result();
        assert_eq!(
            (&result["launcher"]["kind"], &result["launcher"]["library"]),
            (&"local".into(), &Value::Null)
        );
        members(&result, "", &mut local);
        // Only one backend also runs with two ranks, because all backends look the same to a
        // launcher.
        for ranks in [4, 2]
            .into_iter()
            .take(if backend == "delegation" { 2 } else { 1 })
        {
            let (result, mut found) = (
                dirs.measure(ranks, &["--backend", backend]),
                BTreeSet::new(),
            );
            assert_sound(&result, ranks);
            let name = if result["carrier"] == "copyrpc" {
                &result["backend"]
            } else {
                &result["carrier"]
            };
            assert_eq!((name, &result["device"]), (&backend.into(), &device.into()));
            members(&result, "", &mut found);
            assert_eq!(found, local);
            let launcher = &result["launcher"];
            assert_eq!(
                (
                    &launcher["kind"],
                    launcher["hosts"].as_array().unwrap().len()
                ),
                (&"mpi".into(), 1),
                "{launcher}"
            );
            assert!(
                launcher["library"]
                    .as_str()
                    .unwrap()
                    .chars()
                    .any(|digit| digit.is_ascii_digit()),
                "its version: {launcher}"
            );
            assert_eq!(launcher["ranks_here"], (0..ranks).collect::<Value>());
        }
        dirs.shm.assert_empty();
    }
}

/// Each rank writes the series of its own daemons.
#[test]
fn every_rank_writes_the_series_of_its_daemons() {
    let (_turn, dirs) = (turn(), Dirs::new());
    let traces = dirs.mpi.path().join("traces");
    let result = dirs.measure(
        3,
        &[
            "--server-threads",
            "2",
            "--trace-interval",
            "2",
            "--trace",
            traces.to_str().unwrap(),
        ],
    );
    assert_sound(&result, 3);
    let series = series_file::files_in(&traces);
    assert_eq!(
        series.iter().map(|(daemon, _)| *daemon).collect::<Vec<_>>(),
        [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    );
    for ((rank, daemon), file) in series {
        let (samples, report) = (
            series_file::read(&file).unwrap().samples,
            &result["per_rank"][rank]["daemons"][daemon]["trace"],
        );
        assert_eq!(&report["samples"], samples.len(), "{file:?}");
        assert!(
            samples.iter().any(|sample| sample.run == Some(0)),
            "{file:?}"
        );
    }
    dirs.shm.assert_empty();
}

#[test]
fn the_plan_says_who_started_the_ranks_and_which_cores_they_share() {
    let (_turn, dirs) = (turn(), Dirs::new());
    let ended = dirs.end(&[(2, &[SHORT.as_slice(), &["--ranks", "2"]].concat())]);
    assert!(
        ended.status.success() && ended.stdout.contains("round trip"),
        "{}",
        ended.stderr
    );
    for part in [
        "MPI",
        "2 ranks on host ",
        "2 ranks x (1 daemon + 1 client)",
        "4 threads, usable cores ",
    ] {
        assert!(
            ended.stderr.contains(part),
            "{part:?} is missing: {}",
            ended.stderr
        );
    }
}

/// Runs jobs that are refused before there is any load, at the same time: mpirun takes seconds to
/// end a failed job.
fn refused(jobs: &[(&[Part<'_>], &[&str])]) {
    let _turn = turn();
    std::thread::scope(|scope| {
        for (parts, said) in jobs {
            scope.spawn(move || {
                let dirs = Dirs::new();
                let ended = dirs.end(parts);
                ended.assert_failed(2, said);
                assert_eq!(
                    ended.stderr.matches("benchkv: ").count(),
                    1,
                    "it is said once: {}",
                    ended.stderr
                );
                assert_eq!(ended.stdout, "");
                dirs.shm.assert_empty();
            });
        }
    });
}

#[test]
fn what_cannot_be_run_is_refused_once() {
    refused(&[
        (
            &[(2, &["--ranks", "4"])],
            &["benchkv: --ranks 4: 2 were started", "mpirun -n 4"],
        ),
        (
            &[(4, &["--queue-depth", "0"])],
            &["--queue-depth", "from 1 to 4096"],
        ),
        (
            &[(2, &["--json", "/nonexistent/result"])],
            &["benchkv: rank 0: --json: ", "No such file"],
        ),
        (
            &[(2, &["--shm-dir", "/nonexistent"])],
            &["benchkv: rank 0: --shm-dir: ", "does not exist"],
        ),
        // One rank of two differs.
        (
            &[(1, &[]), (1, &["--runs", "0"])],
            &[
                "benchkv: rank 1: invalid value '0' for '--runs",
                "from 1 to 32",
            ],
        ),
    ]);
}

#[test]
fn ranks_that_would_run_different_jobs_are_named_with_every_difference() {
    refused(&[(
        &[
            (1, &[]),
            (
                2,
                &["--seed", "7", "--backend", "meta", "--device", "mlx5_0"],
            ),
        ],
        &[
            "the ranks disagree on --seed: 1 on rank 0; 7 on ranks 1, 2",
            "the ranks disagree on --backend: delegation on rank 0; meta on ranks 1, 2",
            "the ranks disagree on --device: soft on rank 0; mlx5_0 on ranks 1, 2",
        ],
    )]);
}

/// Under the mpirun of another MPI, the MPI library of this build finds this process alone.
#[test]
fn processes_that_mpi_does_not_bring_together_are_refused_before_they_write_the_same_file() {
    let (_turn, dirs) = (turn(), Dirs::new());
    let mut command =
        job::benchkv(&[&SHORT[..], &["--json", dirs.result().to_str().unwrap()]].concat());
    let ended = Job::start(
        command
            .env("PMI_SIZE", "2")
            .env("TMPDIR", dirs.mpi.path())
            .arg("--shm-dir")
            .arg(dirs.shm.path()),
    )
    .end();
    ended.assert_failed(
        2,
        &[
            "an MPI launcher with PMI announces 2 processes, and MPI has brought 1 together",
            "start it with the mpirun of that",
        ],
    );
    assert!(
        ended.stdout.is_empty() && !dirs.result().exists(),
        "{}",
        ended.stderr
    );
}

#[test]
fn a_failing_rank_ends_the_job_with_its_reason() {
    let (_turn, dirs) = (turn(), Dirs::new());
    let args = [SHORT.as_slice(), &["--device", "mlx5_99"]].concat();
    dirs.end(&[(2, &args)])
        .assert_failed(1, &["benchkv: rank ", "mlx5_99"]);
}

#[test]
fn wrong_values_have_their_status() {
    let (_turn, dirs) = (turn(), Dirs::new());
    let args = [SHORT.as_slice(), &["--fault", "corrupt-value"]].concat();
    dirs.end(&[(2, &args)]).assert_failed(
        3,
        &["the result is unsound: 0 operations lost, 1 verify failures"],
    );
}

#[test]
fn a_killed_rank_ends_the_job_and_the_next_one_cleans() {
    let (_turn, dirs) = (turn(), Dirs::new());
    let (job, ranks) = dirs.load(4, "delegation");
    ranks[1].signal(libc::SIGKILL);
    // mpirun kills the other ranks, and does not wait until they have ended.
    for rank in ranks {
        job.until("every rank has ended", || rank.has_ended().then_some(()));
    }
    let ended = job.end();
    assert!(!ended.status.success(), "{}", ended.stderr);
    dirs.assert_next_job_cleans("meta");
}

#[test]
fn ranks_do_not_outlive_a_killed_mpirun() {
    let (_turn, dirs) = (turn(), Dirs::new());
    let (job, ranks) = dirs.load(2, "delegation");
    job.launcher().signal(libc::SIGKILL);
    for rank in ranks {
        job.until("every rank has ended", || rank.has_ended().then_some(()));
    }
    assert_eq!(job.end().status.code(), None);
    dirs.assert_next_job_cleans("delegation");
}

/// mpirun passes a signal to the ranks as SIGTERM, and kills the ranks a second later. If only one
/// rank gets the signal, it informs the other ranks.
#[test]
fn an_interrupted_job_writes_what_it_has_measured() {
    let _turn = turn();
    for (signal, to_rank) in [(libc::SIGINT, None), (libc::SIGTERM, Some(1))] {
        let dirs = Dirs::new();
        let (job, ranks) = dirs.load(2, "delegation");
        ranks
            .iter()
            .for_each(|rank| job.until_used(*rank, "client-0", TICKS_OF_RUN));
        to_rank
            .map_or(job.launcher(), |rank: usize| ranks[rank])
            .signal(signal);
        let ended = job.end();
        assert!(!ended.status.success(), "{}", ended.stderr);
        let text = std::fs::read_to_string(dirs.result())
            .unwrap_or_else(|error| panic!("no result: {error}: {}", ended.stderr));
        let result: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (
                &result["interrupted"],
                result["runs"].as_array().unwrap().len()
            ),
            (&true.into(), 1)
        );
        assert!(
            result["runs"][0]["duration_s"].as_f64().unwrap() < 60.0,
            "{text}"
        );
        assert_sound(&result, 2);
        dirs.shm.assert_empty();
    }
}
