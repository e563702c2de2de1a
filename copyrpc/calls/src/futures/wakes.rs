//! Wakes of tasks by a thread that does not run them.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use crate::oneshot::lock;

/// The wakes that are due to the tasks whose calls have ended. Most executors need a system call to
/// wake a task from a thread that is not theirs, but little work to wake it from another of their
/// tasks. So the thread of the connection wakes one task, whose call wakes the others, or wakes all
/// if that task does not run soon.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    due: Mutex<Vec<Waker>>,
    are_due: AtomicBool,
}

impl Wakes {
    /// Wakes one of the tasks, unless wakes are due already. The wakes of the other tasks become
    /// due.
    pub(crate) fn wake_one_of(&self, wakers: &mut Vec<Waker>) {
        let first = {
            let mut due = lock(&self.due);
            let first = if due.is_empty() { wakers.pop() } else { None };
            due.append(wakers);
            // The flag is stored before the wake, so the task that is woken sees it.
            self.are_due.store(!due.is_empty(), Ordering::Relaxed);
            first
        };
        if let Some(first) = first {
            first.wake();
        }
    }

    pub(crate) fn are_due(&self) -> bool {
        self.are_due.load(Ordering::Relaxed)
    }

    pub(crate) fn wake_all(&self) {
        if self.are_due() {
            let due = {
                let mut due = lock(&self.due);
                self.are_due.store(false, Ordering::Relaxed);
                std::mem::take(&mut *due)
            };
            due.into_iter().for_each(Waker::wake);
        }
    }
}
