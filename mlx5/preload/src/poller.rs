//! The thread of an open device. It owns the HCA, carries out commands, and looks at the doorbell records, since the driver's doorbells are
//! plain stores that nobody tells us about.
//!
//! It never spins: a program that polls its completion queue makes no system call, so on a machine with few cores a thread that spun or yielded
//! would have its core only when the scheduler's tick says so, milliseconds later. It sleeps between looks; the longer nothing happens, the
//! longer.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::doorbells::Registers;
use crate::held;
use crate::log;
use crate::mailbox::{Mail, Mailbox};
use crate::session::Session;
use crate::settings::Settings;

/// Between two looks when something happened lately.
const SHORTEST: Duration = Duration::from_micros(20);
/// Between two looks when nothing has happened for long.
const LONGEST: Duration = Duration::from_millis(1);
/// So many looks in vain before the time between them grows, and before it grows again.
const PATIENCE: u32 = 256;
/// So often it looks again at once when something happened.
const LOOKS_AT_ONCE: u32 = 8;

/// Starts the thread, which takes no signals: they are the program's.
pub(crate) fn spawn(mailbox: Arc<Mailbox>, settings: &'static Settings, registers: Option<Registers>) -> io::Result<JoinHandle<()>> {
    let mut mask = core::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = core::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: places for two masks; the first is filled before it is used.
    unsafe {
        libc::sigfillset(mask.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, mask.as_ptr(), old.as_mut_ptr());
    }
    let thread = Builder::new().name("mlx5-hca".to_owned()).spawn(move || held::as_ourselves(|| run(&mailbox, settings, registers)));
    // SAFETY: the mask was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), core::ptr::null_mut()) };
    thread
}

fn run(mailbox: &Mailbox, settings: &'static Settings, registers: Option<Registers>) {
    // SAFETY: plain numbers. The default of 50 us would more than triple the sleep.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
    if catch_unwind(AssertUnwindSafe(|| serve(mailbox, settings, registers))).is_err() {
        log::error(settings, format_args!("the software HCA broke down; all further commands of this context fail with EIO"));
    }
    mailbox.die();
}

fn serve(mailbox: &Mailbox, settings: &'static Settings, registers: Option<Registers>) {
    let mut session = Session::new(settings, registers);
    let mut pace = Pace::default();
    loop {
        let mut looks = 0;
        while session.progress() && looks < LOOKS_AT_ONCE {
            looks += 1;
        }
        let mut mail = mailbox.take(pace.after(looks > 0));
        loop {
            match mail {
                Mail::Nothing => break,
                Mail::Close => return,
                Mail::Job(job) => {
                    let result = session.execute(&job.call);
                    job.answer(result);
                    pace = Pace::default();
                }
            }
            mail = mailbox.take(Duration::ZERO);
        }
    }
}

/// How long to sleep.
#[derive(Debug, Default)]
struct Pace {
    /// Looks in vain since something happened.
    in_vain: u32,
}

impl Pace {
    /// The sleep after a look.
    fn after(&mut self, has_happened: bool) -> Duration {
        self.in_vain = if has_happened { 0 } else { self.in_vain.saturating_add(1) };
        let doublings = (self.in_vain / PATIENCE).min(6);
        (SHORTEST * (1 << doublings)).min(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleep_grows_while_nothing_happens_up_to_a_limit_and_shrinks_at_once() {
        let mut pace = Pace::default();
        let sleeps: Vec<_> = (0..PATIENCE * 8).map(|_| pace.after(false)).collect();
        assert_eq!((sleeps[0], sleeps[PATIENCE as usize * 2], sleeps.last()), (SHORTEST, SHORTEST * 4, Some(&LONGEST)));
        assert!(sleeps.is_sorted());
        assert_eq!(pace.after(true), SHORTEST);
    }
}
