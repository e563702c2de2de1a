//! A child process that runs this same executable in another role and never outlives its owner.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use crate::launch::sys;

/// The variable that gives a child its role; see [`crate::launch::role`].
pub(crate) const ROLE_VARIABLE: &str = "BENCH_HARNESS_ROLE";

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The child exited with this status.
    Code(i32),
    /// This signal ended the child.
    Signal(i32),
}

impl Ended {
    /// Returns whether the process exited with status 0.
    pub const fn is_success(&self) -> bool {
        matches!(self, Self::Code(0))
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with status {code}"),
            Self::Signal(signal) => {
                let name = sys::signal_name(*signal);
                write!(f, "was killed by signal {signal} ({name})")
            }
        }
    }
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

/// A running child. Dropping it kills and reaps it.
#[derive(Debug)]
pub(crate) struct OwnChild {
    child: Child,
    pidfd: OwnedFd,
}

impl OwnChild {
    /// Starts this executable with `args`, the variables in `environment`, and `role` as the value
    /// of [`ROLE_VARIABLE`]. The child's standard input is `socket`.
    ///
    /// The child is killed when the calling *thread* ends, by `PR_SET_PDEATHSIG`.
    pub(crate) fn spawn(
        role: &str,
        args: &[OsString],
        environment: &[(&str, &str)],
        socket: UnixStream,
        stdout: Stdio,
    ) -> io::Result<Self> {
        let parent = getpid();
        // This link leads to the running executable even if a new build replaces its file.
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        command
            .args(args)
            .envs(environment.iter().copied())
            .env(ROLE_VARIABLE, role)
            .stdin(OwnedFd::from(socket))
            .stdout(stdout);
        // SAFETY: between fork and exec, the child of a multi-threaded process may only make
        // async-signal-safe system calls, and the closure makes no others.
        unsafe { command.pre_exec(move || sys::tie_to_parent(parent)) };
        let mut child = command.spawn()?;
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { child, pidfd }),
            Err(error) => {
                end(&mut child);
                Err(error.into())
            }
        }
    }

    /// Returns how the child ended; `None` while it runs. Does not block.
    pub(crate) fn ended(&mut self) -> io::Result<Option<Ended>> {
        Ok(self.child.try_wait()?.map(Ended::from))
    }

    /// Kills the child. [`ended`](Self::ended) returns a value once the child has ended.
    pub(crate) fn kill(&mut self) {
        // The call fails only for a child that was reaped before, which is no error here.
        let _ = self.child.kill();
    }
}

impl AsFd for OwnChild {
    /// Returns a descriptor that is readable once the child has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl Drop for OwnChild {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn end(child: &mut Child) {
    // Both calls fail only for a child that is reaped already, so their errors are ignored.
    let _ = child.kill();
    let _ = child.wait();
}
