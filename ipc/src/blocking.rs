//! Blocking functions: serving, and waiting for a server. They wait in the calling thread, and start none.

use std::time::{Duration, Instant};

use shm::sleep::SLICE;
use shm::sync::spin_loop;

use crate::token::StopHandle;

/// Rounds that find nothing before one that blocks sleeps.
pub(crate) const SPINS: u32 = 256;
/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(1);

/// Steps `server` until `stop`, and has it `wait` after a few steps that found nothing.
pub(crate) fn serve<S>(
    server: &mut S,
    stop: &StopHandle,
    mut step: impl FnMut(&mut S) -> usize,
    wait: impl Fn(&mut S, Option<Duration>) -> bool,
) {
    let mut idle_rounds = 0;
    while !stop.is_stopped() {
        if step(server) > 0 {
            idle_rounds = 0;
        } else if idle_rounds < SPINS {
            idle_rounds += 1;
            spin_loop();
        } else {
            wait(server, Some(SLICE));
        }
    }
}

/// Tries until it succeeds, `patience` is over, or an error comes that will not pass. That error, or the last, is the outcome.
///
/// # Errors
/// The errors of `attempt`.
pub(crate) fn retry<T, E>(patience: Duration, may_pass: impl Fn(&E) -> bool, mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
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
