//! The system calls that the standard library does not offer.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use signal_hook::iterator::backend::{Pending, SignalDelivery};
use signal_hook::iterator::exfiltrator::SignalOnly;

/// The end of a wait. If the end is beyond the range of the clock, the wait never ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now().checked_add(time))
    }

    /// Returns the time until the end; zero when it has passed.
    pub(crate) fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |end| {
            end.saturating_duration_since(Instant::now())
        })
    }
}

/// Waits until one of `fds` is ready or `timeout` has passed. A signal ends the wait early, without
/// an error.
pub(crate) fn poll(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<()> {
    // A timeout beyond the system's range is no timeout, so the wait never ends.
    match rustix::event::poll(fds, Timespec::try_from(timeout).ok().as_ref()) {
        Err(error) if error != Errno::INTR => Err(error.into()),
        _ => Ok(()),
    }
}

/// The signals by which a user, a terminal or a service manager ends a job in order.
const END_SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// The delivery of [`END_SIGNALS`]. The process catches these signals from the creation of this
/// value until it exits, so that a signal shortly before the exit changes nothing.
#[derive(Debug)]
pub(crate) struct EndSignals(SignalDelivery<UnixStream, SignalOnly>);

impl EndSignals {
    pub(crate) fn take() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        let signals = END_SIGNALS
            .into_iter()
            .filter(|signal| !is_ignored(*signal));
        SignalDelivery::with_pipe(read, write, SignalOnly, signals).map(Self)
    }

    /// Returns the signals that arrived since the last call.
    pub(crate) fn pending(&mut self) -> Pending<SignalOnly> {
        self.0.pending()
    }
}

impl AsFd for EndSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_read().as_fd()
    }
}

/// Returns whether this process was started with `signal` ignored, as by nohup(1) for SIGHUP.
fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call sets no action, and stores the current action in `action`. All zeros is a
    // valid value of `action` too, if the call fails.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Prepares a child between fork and exec: the child dies with the launcher `parent`, and ignores
/// the signals that end a job, because the launcher takes these and ends the job in order. The
/// function is async-signal-safe: it makes only system calls, and does not allocate.
pub(crate) fn tie_to_parent(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != Some(parent) {
        // The parent ended before the call above took effect.
        return Err(Errno::SRCH.into());
    }
    for signal in END_SIGNALS {
        // SAFETY: the call sets no handler, and is async-signal-safe.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    Ok(())
}

pub(crate) fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("see signal(7)")
}
