//! Jobs in directories of their own.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use benchkv_harness::launch::device::DEVICE_VARIABLE;
use serde_json::Value;

pub(crate) const COPYRPC_BENCH: &str = env!("CARGO_BIN_EXE_copyrpc_bench");
pub(crate) const SCALERPC_BENCH: &str = env!("CARGO_BIN_EXE_scalerpc_bench");

/// The directory of a job of its own; only one job uses the cores at a time.
pub(crate) struct Scratch {
    dir: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("copyrpc-bench-{}-{number}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        static TURN: Mutex<()> = Mutex::new(());
        Self {
            dir,
            _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Returns the command of a job with these arguments. The job's own time limit ends it if it
    /// hangs.
    pub(crate) fn command(&self, program: &str, args: &str) -> Command {
        let mut command = Command::new(program);
        // A job uses no device of the machine unless its test names one.
        command
            .args(args.split_whitespace())
            .arg("--shm-dir")
            .arg(&self.dir)
            .env(DEVICE_VARIABLE, "soft");
        command
    }

    pub(crate) fn files(&self) -> usize {
        fs::read_dir(&self.dir).unwrap().count()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _gone = fs::remove_dir_all(&self.dir);
    }
}

/// Runs a job, and asserts that it leaves nothing behind.
pub(crate) fn run(program: &str, args: &str) -> Output {
    let scratch = Scratch::new();
    let output = scratch.command(program, args).output().unwrap();
    assert_eq!(scratch.files(), 0, "{}", stderr(&output));
    output
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the document of a sound job. Nothing else is on standard output.
pub(crate) fn result(program: &str, args: &str) -> Value {
    let output = run(program, &format!("{args} --json -"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Asserts that `auto` takes the device that the environment names, and reports it, in jobs with
/// the arguments of a short job.
#[track_caller]
pub(crate) fn assert_auto_takes_the_named_device(program: &str, short: &str) {
    let scratch = Scratch::new();
    let job = |args: &str, named: &str| {
        let mut command = scratch.command(program, args);
        command.env(DEVICE_VARIABLE, named).output().unwrap()
    };
    let short = format!("{short} --json -");
    let output = job(&short, "soft:rtt_us=3");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (
            &document["job"]["device"],
            &document["job"]["device_by_auto"]
        ),
        (&"soft:rtt_us=3".into(), &"COPYRPC_DEVICE names it".into())
    );
    assert!(
        stderr(&output).contains("\n--device auto is soft:rtt_us=3: COPYRPC_DEVICE names it\n"),
        "{}",
        stderr(&output)
    );
    let named: Value =
        serde_json::from_slice(&job(&format!("{short} --device soft"), "eth0").stdout).unwrap();
    assert_eq!(
        (&named["job"]["device"], &named["job"]["device_by_auto"]),
        (&"soft".into(), &Value::Null)
    );
    let refused = job("--runs 1", "eth0");
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(
        stderr(&refused).contains("--device auto: COPYRPC_DEVICE is \"eth0\": use auto, soft"),
        "{}",
        stderr(&refused)
    );
}

/// Asserts that a process that another launcher started, as one of several, does not start a job
/// itself.
#[track_caller]
pub(crate) fn assert_alone(program: &str) {
    let output = Command::new(program)
        .env("OMPI_COMM_WORLD_SIZE", "2")
        .output()
        .unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.is_empty()),
        (Some(2), true)
    );
    assert!(
        stderr(&output).contains("announces 2 processes"),
        "{}",
        stderr(&output)
    );
}
