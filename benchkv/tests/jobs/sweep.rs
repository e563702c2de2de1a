//! `scripts/sweep`: each point is measured once, even if the sweep is ended and started again
//! several times.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use benchkv_harness::launch::device::DEVICE_VARIABLE;

use crate::job::{Ended, Job, Scratch, turn};

/// The script, with a stand-in for benchkv that records each job before it becomes benchkv.
struct Sweep {
    files: Scratch,
    shm: Scratch,
    noting: PathBuf,
}

const POINTS: [&str; 3] = [
    "delegation-r2-d1-none-1",
    "direct-r2-d1-none-1",
    "meta-r2-d1-none-1",
];

impl Sweep {
    fn new() -> Self {
        let files = Scratch::on_disk();
        let noting = files.path().join("noting");
        let jobs = files.path().join("jobs");
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = report ] || echo \"$@\" >>'{}'\nexec '{}' \"$@\"\n",
            jobs.display(),
            env!("CARGO_BIN_EXE_benchkv")
        );
        fs::write(&noting, script).unwrap();
        fs::set_permissions(&noting, fs::Permissions::from_mode(0o755)).unwrap();
        Self {
            files,
            shm: Scratch::in_memory(),
            noting,
        }
    }

    fn start(&self, flags: &[&str]) -> Job {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/sweep");
        let mut command = Command::new(script);
        command.env(DEVICE_VARIABLE, "soft");
        command
            .args([
                "--name",
                "test",
                "--backends",
                "meta delegation direct",
                "--depths",
                "1",
                "--benchkv",
            ])
            .arg(&self.noting);
        command.arg("--results").arg(self.files.path()).args(flags);
        command
            .args([
                "--",
                "--duration",
                "0.1",
                "--runs",
                "1",
                "--warmup",
                "0",
                "--shm-dir",
            ])
            .arg(self.shm.path());
        Job::start(&mut command)
    }

    /// Runs the script. While a job of a killed run still runs, the script refuses, and is tried
    /// again.
    fn complete(&self) -> Ended {
        loop {
            let ended = self.start(&[]).end();
            if !(ended.status.code() == Some(2) && ended.stderr.contains("still running")) {
                return ended;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.files.path().join("test").join(name)
    }

    fn result(&self, point: &str) -> PathBuf {
        self.file(&format!("{point}.json"))
    }

    /// Returns how often each point was started.
    fn starts(&self) -> BTreeMap<&'static str, usize> {
        let jobs = fs::read_to_string(self.files.path().join("jobs")).unwrap_or_default();
        let of = |point| {
            jobs.lines()
                .filter(|job| job.contains(&format!("/{point}.json")))
                .count()
        };
        POINTS.into_iter().map(|point| (point, of(point))).collect()
    }
}

#[test]
#[ignore = "needs python3"]
fn a_killed_sweep_goes_on_where_it_was_and_repeats_only_what_is_broken() {
    let _turn = turn();
    let sweep = Sweep::new();
    let killed = sweep.start(&[]);
    killed.until("a point is measured", || {
        sweep.result("meta-r2-d1-none-1").exists().then_some(())
    });
    killed.launcher().signal(libc::SIGKILL);
    killed.end();
    assert!(sweep.starts().values().sum::<usize>() < 4 && !sweep.file("report.txt").exists());
    let resumed = sweep.complete();
    assert!(
        resumed.status.success(),
        "{}{}",
        resumed.stdout,
        resumed.stderr
    );
    assert_eq!(
        sweep.starts(),
        POINTS.map(|point| (point, 1)).into(),
        "the job that outlived the killed sweep counts, too: {}",
        resumed.stdout
    );
    assert!(
        fs::read_to_string(sweep.file("report.txt"))
            .unwrap()
            .contains("3 results")
    );

    let [torn, cut, sound] = POINTS;
    let text = fs::read_to_string(sweep.result(torn)).unwrap();
    fs::write(sweep.result(torn), &text[..text.len() / 2]).unwrap();
    fs::write(
        sweep.result(cut),
        text.replace("\"interrupted\": false", "\"interrupted\": true"),
    )
    .unwrap();
    let repaired = sweep.complete();
    assert!(
        repaired.status.success() && repaired.stdout.contains("2 measured, 1 there before"),
        "{}",
        repaired.stdout
    );
    assert_eq!(
        sweep.starts(),
        BTreeMap::from([(torn, 2), (cut, 2), (sound, 1)])
    );
}

#[test]
#[ignore = "needs python3"]
fn a_sweep_that_would_mix_results_or_has_no_grid_is_refused() {
    let sweep = Sweep::new();
    let dry = sweep
        .start(&["--dry-run", "--policies", "none= short=--duration,0.05"])
        .end();
    assert!(
        dry.status.success()
            && sweep.starts().values().all(|count| *count == 0)
            && !sweep.file("").exists(),
        "{}",
        dry.stderr
    );
    assert_eq!(dry.stdout.lines().count(), 6, "{}", dry.stdout);
    let rates = sweep
        .start(&["--dry-run", "--rates", "1000 2000", "--launcher", "sim"])
        .end();
    for rate in ["1000", "2000"] {
        let point = format!("meta-r2-d1-at{rate}-none-1.json");
        let is_it = |line: &str| line.contains(" sim ") && line.ends_with(&point);
        let command = rates.stdout.lines().find(|line| is_it(line));
        assert!(
            command.is_some_and(|line| line.contains(&format!("--rate {rate} "))),
            "{}{}",
            rates.stdout,
            rates.stderr
        );
    }
    assert!(
        dry.stdout
            .lines()
            .filter(
                |line| line.contains("--duration 0.1") && line.contains("--duration 0.05 --json")
            )
            .count()
            == 3,
        "{}",
        dry.stdout
    );
    fs::create_dir(sweep.file("")).unwrap();
    fs::write(
        sweep.file("conditions"),
        "launcher local\nflag --duration\nflag 9\npolicy none=\n",
    )
    .unwrap();
    sweep.start(&[]).end().assert_failed(
        2,
        &["other options", "< flag 9", "> flag 0.1", "another --name"],
    );
    for (flags, complaint) in [
        (["--depths", "0"], "--depths '0': numbers from 1"),
        (
            ["--rates", "1e5"],
            "--rates '1e5': numbers from 1 to 999999999",
        ),
        (["--repeats", "many"], "--repeats 'many': 1 to 99"),
        (["--name", "../x"], "--name '../x'"),
        (["--launcher", "ssh"], "local, sim, mpirun, srun or slurm"),
        (["--benchkv", "/nonexistent"], "/nonexistent is no program"),
        (["--policies", "--hold"], "NAME=FLAGS"),
    ] {
        sweep.start(&flags).end().assert_failed(2, &[complaint]);
    }
}
