//! The program: its start, its signals, its end.

use core::mem::MaybeUninit;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};

const FORWARDED: [libc::c_int; 7] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGCONT,
];

/// Runs the program to its end. Returns its exit code, or 128 plus the signal that ended it. The
/// program does not outlive this process, which removes the files of the run afterwards.
pub(crate) fn run(command: &mut Command) -> io::Result<u8> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the pointers are to two masks. The first is emptied before signals are added to it,
    // and the last call initializes the second.
    let (set, old) = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in FORWARDED.into_iter().chain([libc::SIGCHLD]) {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), old.as_mut_ptr());
        (set.assume_init(), old.assume_init())
    };
    let parent = std::process::id();
    // SAFETY: this process has one thread, so its fork may run the closure, which makes system
    // calls and allocates only an error.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid() as u32 != parent {
                return Err(io::Error::other("mlx5-run was killed"));
            }
            libc::sigprocmask(libc::SIG_SETMASK, &raw const old, core::ptr::null_mut());
            Ok(())
        })
    };
    let mut child = command.spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(code(status));
        }
        let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
        // SAFETY: the pointers are to an initialized mask and to memory for the information.
        let signal = unsafe { libc::sigwaitinfo(&raw const set, info.as_mut_ptr()) };
        // SAFETY: the call has written the information, because it returned a signal.
        let is_of_terminal = signal > 0 && unsafe { info.assume_init() }.si_code == libc::SI_KERNEL;
        // A signal of the terminal reaches the program directly, and is not forwarded.
        if FORWARDED.contains(&signal) && !is_of_terminal {
            // SAFETY: the number is of a child that was not yet waited for, so no other process has
            // it.
            unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        }
    }
}

fn code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    code as u8
}
