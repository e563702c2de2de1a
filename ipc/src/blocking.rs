//! Blocking functions: serving, and waiting for a server. They wait in the calling thread.

use std::time::{Duration, Instant};

use copyrpc_calls::{Patience, StopHandle};
use copyrpc_shm::sleep::SLICE;

use crate::error::{ClientError, SetupError};

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(1);

/// Calls `step` until the handle `stop` is stopped. Calls `wait` when at least 256 steps in a row
/// found nothing ([`Patience`] has the exact number).
pub(crate) fn serve<S>(
    server: &mut S,
    stop: &StopHandle,
    mut step: impl FnMut(&mut S) -> usize,
    wait: impl Fn(&mut S, Option<Duration>) -> bool,
) {
    let mut patience = Patience::new();
    while !stop.is_stopped() {
        if step(server) > 0 {
            patience.reset();
        } else if let Some(start) = patience.idle() {
            wait(server, Some(SLICE));
            patience.slept(start);
        }
    }
}

/// Connects, if `patience` is not `None`. Tries for `patience` or for `timeout`, whichever is
/// shorter. Returns the part of `timeout` that is left.
///
/// # Errors
/// The error of a call that needed the connection; [`ClientError::NotSent`] if no time is left.
pub(crate) fn connect_first(
    timeout: Duration,
    patience: Option<Duration>,
    connect: impl FnOnce(Duration) -> Result<(), SetupError>,
) -> Result<Duration, ClientError> {
    let mut left = timeout;
    if let Some(patience) = patience {
        let start = Instant::now();
        if let Err(error) = connect(patience.min(timeout)) {
            if !error.may_pass() || start.elapsed() < timeout {
                return Err(error.of_call());
            }
        }
        left = timeout.saturating_sub(start.elapsed());
    }
    if left.is_zero() {
        return Err(ClientError::NotSent);
    }
    Ok(left)
}

/// Calls `attempt` until it succeeds, `may_pass` returns `false` for its error, or `timeout` is
/// over. Returns the last result.
///
/// # Errors
/// The errors of `attempt`.
pub(crate) fn retry<T, E>(
    timeout: Duration,
    mut may_pass: impl FnMut(&E) -> bool,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let start = Instant::now();
    loop {
        let outcome = attempt();
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() || !outcome.as_ref().is_err_and(&mut may_pass) {
            return outcome;
        }
        std::thread::sleep(left.min(PAUSE));
    }
}
