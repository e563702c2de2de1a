//! Threads that a library starts in a program and that take none of the program's signals.

/// Runs `start` with all signals blocked, so that a thread that `start` starts takes no signals.
pub fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let [mut all, mut before] = [core::mem::MaybeUninit::<libc::sigset_t>::uninit(); 2];
    // SAFETY: both pointers are to valid places for a mask; `all` is filled before it is used.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let started = start();
    // SAFETY: the first call of `pthread_sigmask` filled `before`.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), core::ptr::null_mut()) };
    started
}
