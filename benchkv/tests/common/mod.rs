//! Starting the binary, with a watchdog.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// No job of a test takes this long; one that does is killed and fails the test.
const WATCHDOG: Duration = Duration::from_secs(60);

/// The binary with piped output and no terminal.
pub(crate) fn benchkv(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_benchkv"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits for the end of a launcher. Killing it kills its ranks. The output of a job is far below what a pipe holds.
pub(crate) fn finish(mut launcher: Child) -> Output {
    let start = Instant::now();
    while launcher.try_wait().unwrap().is_none() {
        if start.elapsed() > WATCHDOG {
            launcher.kill().unwrap();
            panic!("the job did not end: {:?}", launcher.wait_with_output().unwrap());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    launcher.wait_with_output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A directory that goes away with the test.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("benchkv-test-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
