//! What façades that block have in common. They wait in the thread that calls them, and start none.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sleep::SLICE;
use crate::sync::{AtomicBool, Ordering, spin_loop};

/// Rounds that find nothing before a façade sleeps.
pub(crate) const SPINS: u32 = 256;
/// How long to wait between two attempts.
const PAUSE: Duration = Duration::from_millis(1);

/// Ends a server's `serve`, from any thread.
#[derive(Clone, Default)]
pub struct StopHandle(Arc<AtomicBool>);

impl fmt::Debug for StopHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StopHandle").field("is_stopped", &self.is_stopped()).finish()
    }
}

impl StopHandle {
    /// Has the server return, within 100 ms ([`SLICE`]) if it sleeps, and at once otherwise. Requests that it has found by then are answered.
    pub fn stop(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was told to stop.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Steps `server` until `stop`, and has it `wait` after a few steps that found nothing.
pub fn serve<S>(server: &mut S, stop: &StopHandle, mut step: impl FnMut(&mut S) -> usize, wait: impl Fn(&mut S, Option<Duration>) -> bool) {
    let mut in_vain = 0;
    while !stop.is_stopped() {
        if step(server) > 0 {
            in_vain = 0;
        } else if in_vain < SPINS {
            in_vain += 1;
            spin_loop();
        } else {
            wait(server, Some(SLICE));
        }
    }
}

/// Tries until it succeeds, `patience` is over, or an error comes that will not pass. That error, or the last, is the outcome.
///
/// # Errors
/// Those of `attempt`.
pub fn retry<T, E>(patience: Duration, may_pass: impl Fn(&E) -> bool, mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let start = Instant::now();
    loop {
        let outcome = attempt();
        let left = patience.saturating_sub(start.elapsed());
        if left.is_zero() || !outcome.as_ref().is_err_and(&may_pass) {
            return outcome;
        }
        std::thread::sleep(left.min(PAUSE));
    }
}
