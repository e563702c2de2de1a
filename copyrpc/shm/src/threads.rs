//! Threads of a library in somebody else's process.

/// Runs `start`, which starts a thread that takes no signals: they belong to the program.
pub fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let [mut all, mut before] = [core::mem::MaybeUninit::<libc::sigset_t>::uninit(); 2];
    // SAFETY: places for two masks; the first is filled before it is used.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let started = start();
    // SAFETY: the call above filled the mask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), core::ptr::null_mut()) };
    started
}
