//! The system calls that the standard library does not offer.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The end of a wait. A time beyond the range of the clock never ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now().checked_add(time))
    }

    /// Returns the time until the end; zero when it has passed.
    pub(crate) fn left(self) -> Duration {
        self.0.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()))
    }
}

/// Turns the -1 of a system call into its error.
fn checked(status: libc::c_long) -> io::Result<RawFd> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status as RawFd) }
}

/// Waits until one of `fds` is ready or `timeout` has passed. `revents` shows which is ready. A signal ends the wait early, without an
/// error.
pub(crate) fn poll(fds: &mut [libc::pollfd], timeout: Duration) -> io::Result<()> {
    // Rounded up: rounding down would spin through the last millisecond before a deadline.
    let millis = timeout.as_nanos().div_ceil(1_000_000).min(i32::MAX as u128) as i32;
    // SAFETY: the pointer and length are those of a live, writable slice.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) };
    match checked(ready.into()) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

/// Makes an entry for [`poll`].
pub(crate) fn interest(fd: &impl AsRawFd, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 }
}

/// Makes a connected pair of sockets that keeps message borders and reports a closed peer (a datagram pair does not).
pub(crate) fn seqpacket_pair() -> io::Result<(UnixStream, UnixStream)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for the two descriptors the kernel stores.
    let status = unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()) };
    checked(status.into())?;
    // SAFETY: the call succeeded, so both are open descriptors without another owner.
    Ok(unsafe { (UnixStream::from_raw_fd(fds[0]), UnixStream::from_raw_fd(fds[1])) })
}

/// Returns a descriptor that becomes readable when process `pid`, a child not yet waited for, ends.
pub(crate) fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and touches no memory of this process.
    let fd = checked(unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) })?;
    // SAFETY: the call succeeded, so `fd` is an open descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The signals by which a user, a terminal or a service manager ends a job in order.
const END_SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// [`END_SIGNALS`], blocked permanently, so that a signal just before the end of the process changes nothing.
///
/// Only the calling thread's mask changes: make it before other threads exist.
#[derive(Debug)]
pub(crate) struct EndSignals {
    fd: OwnedFd,
}

impl EndSignals {
    pub(crate) fn take() -> io::Result<Self> {
        let mut set = empty_signal_set();
        for signal in END_SIGNALS.into_iter().filter(|signal| !is_ignored(*signal)) {
            // SAFETY: `set` is initialised and the signals are valid.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
        // SAFETY: `set` is initialised; -1 asks for a new descriptor.
        let fd = checked(unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) }.into())?;
        // SAFETY: the call succeeded, so `fd` is an open descriptor without another owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: the set is initialised and live; the previous mask is not requested.
        let status = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if status != 0 { Err(io::Error::from_raw_os_error(status)) } else { Ok(Self { fd }) }
    }

    /// Returns the oldest signal not yet taken.
    pub(crate) fn next(&self) -> Option<i32> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        // SAFETY: the buffer has the size stated; the descriptor does not block.
        let read = unsafe { libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size_of_val(&info)) };
        if read != size_of_val(&info) as isize {
            return None;
        }
        // SAFETY: a signalfd delivers whole records only, and the read returned one.
        Some(unsafe { info.assume_init() }.ssi_signo as i32)
    }
}

impl AsRawFd for EndSignals {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Returns whether this process was started with `signal` ignored, as by nohup(1) for SIGHUP.
fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: no action is set, and the current one is stored in `action`, for which all zeros is a valid value too.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

fn empty_signal_set() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set it is given and cannot fail for a valid pointer.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    }
}

/// Prepares a child between fork and exec. It dies with the launcher `parent` and takes signals again, but not those that end a job: the
/// launcher takes those, and ends the job in order. Async-signal-safe: system calls only, no allocation.
pub(crate) fn tie_to_parent(parent: u32) -> io::Result<()> {
    let none_blocked = empty_signal_set();
    // SAFETY: integer arguments and one initialised, live set; all of these calls are async-signal-safe.
    unsafe {
        checked(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL).into())?;
        if libc::getppid() as u32 != parent {
            // The parent ended before the line above took effect.
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // First, so that a signal that has been pending since the fork is discarded and not delivered.
        for signal in END_SIGNALS {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none_blocked, std::ptr::null_mut());
    }
    Ok(())
}

/// Returns the name of a signal that commonly ends a process.
pub(crate) const fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGHUP => "SIGHUP",
        libc::SIGILL => "SIGILL",
        libc::SIGINT => "SIGINT",
        libc::SIGKILL => "SIGKILL",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGTERM => "SIGTERM",
        _ => "see signal(7)",
    }
}
