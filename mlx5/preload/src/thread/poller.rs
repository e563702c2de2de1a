//! The thread of an open device. It owns the HCA, carries out commands, and polls the doorbell
//! records, because the driver's doorbells are plain stores without a notification.
//!
//! The thread never spins. A program that polls its completion queue makes no system call. So on a
//! machine with few cores, a thread that spins or yields would get its core only at the scheduler's
//! tick, milliseconds later. This thread sleeps between polls; the sleep grows with the idle time.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::Duration;

use copyrpc_shm::threads::without_signals;

use crate::files::jobs::Job;
use crate::options::log;
use crate::options::settings::Settings;
use crate::system::held;
use crate::thread::session::Session;

/// Sleep between two polls after recent work.
const SHORTEST: Duration = Duration::from_micros(20);
/// Sleep between two polls after a long idle time.
const LONGEST: Duration = Duration::from_millis(1);
/// Number of polls without work after which the sleep doubles, up to `LONGEST`.
const PATIENCE: u32 = 256;
/// Number of polls without a sleep after work was found.
const POLLS_AT_ONCE: u32 = 8;

/// Starts the thread of the device that `open` opens. The thread sends to `outlives` if it
/// continues after the last command, because the registers are mapped. The thread takes no signals:
/// signals are for the program's threads.
pub(crate) fn spawn(
    jobs: Receiver<Job>,
    outlives: SyncSender<()>,
    settings: &'static Settings,
    open: impl FnOnce() -> Session + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let run = move || {
        // SAFETY: all arguments are plain numbers. A timer slack of 50 us, the default, would more
        // than triple the shortest sleep.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
        let served = catch_unwind(AssertUnwindSafe(|| serve(&jobs, &outlives, open())));
        if served.is_err() {
            let what =
                "the software HCA failed; all further commands of this context fail with EIO";
            log::error(settings, format_args!("{what}"));
        }
    };
    without_signals(|| {
        let thread = Builder::new().name("mlx5-hca".to_owned());
        thread.spawn(|| held::as_ourselves(run))
    })
}

fn serve(jobs: &Receiver<Job>, outlives: &SyncSender<()>, mut session: Session) {
    let mut pace = Pace::default();
    loop {
        let mut polls = 0;
        while session.progress() && polls < POLLS_AT_ONCE {
            polls += 1;
        }
        let mut next = jobs.recv_timeout(pace.after(polls > 0));
        while let Ok(job) = next {
            // A NIC reads the doorbell records by itself. The HCA cannot read the doorbell records
            // of a process that stops after the answer to its command. So doorbells that were rung
            // before a command take effect before its answer.
            session.progress();
            session.execute(job);
            pace = Pace::default();
            next = jobs.recv_timeout(Duration::ZERO);
        }
        if next.is_err_and(|error| error == RecvTimeoutError::Disconnected) {
            return outlive(outlives, session, pace);
        }
    }
}

/// Continues to poll while the program has the registers mapped, although the program has closed
/// the descriptors: a kernel keeps a file as long as its mappings.
fn outlive(outlives: &SyncSender<()>, mut session: Session, mut pace: Pace) {
    if !session.is_mapped() {
        return;
    }
    // The send does not block: the channel has room for one message.
    let _ = outlives.send(());
    while session.is_mapped() {
        for _ in 0..PATIENCE {
            sleep(pace.after(session.progress()));
        }
    }
}

/// The length of the next sleep.
#[derive(Debug, Default)]
struct Pace {
    /// Number of polls without work since the last work.
    without_work: u32,
}

impl Pace {
    /// Returns the sleep after a poll.
    fn after(&mut self, has_happened: bool) -> Duration {
        self.without_work = if has_happened {
            0
        } else {
            self.without_work.saturating_add(1)
        };
        let doublings = (self.without_work / PATIENCE).min(6);
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
        assert_eq!(
            (sleeps[0], sleeps[PATIENCE as usize * 2], sleeps.last()),
            (SHORTEST, SHORTEST * 4, Some(&LONGEST))
        );
        assert!(sleeps.is_sorted());
        assert_eq!(pace.after(true), SHORTEST);
    }
}
