//! A value from a connection's thread to a future, which may run on any other thread.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as TaskContext, Poll, Waker};

/// Locks a mutex whose data is consistent even after a panic.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    waker: Option<Waker>,
    /// Whether the value has arrived, or will never arrive.
    is_over: bool,
}

/// The sender of the value. Its drop reports to the receiver that no value will arrive.
#[derive(Debug)]
pub struct Sender<T>(Arc<Mutex<State<T>>>);

/// A future of the value, or of `None` if no value will arrive.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct Receiver<T>(Arc<Mutex<State<T>>>);

/// Makes the sender and the receiver of one value.
pub fn oneshot<T>() -> (Sender<T>, Receiver<T>) {
    let state = Arc::new(Mutex::new(State {
        value: None,
        waker: None,
        is_over: false,
    }));
    (Sender(Arc::clone(&state)), Receiver(state))
}

impl<T> Sender<T> {
    /// Returns whether a receiver still waits for the value.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Stores the value and wakes the receiver.
    pub fn send(self, value: T) {
        lock(&self.0).value = Some(value);
        // The drop of the sender wakes the receiver.
    }

    /// Stores the value. Returns the waker of the receiver, for the caller to wake.
    #[must_use]
    pub fn put(self, value: T) -> Option<Waker> {
        let mut state = lock(&self.0);
        (state.value, state.is_over) = (Some(value), true);
        state.waker.take()
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let waker = {
            let mut state = lock(&self.0);
            state.is_over = true;
            state.waker.take()
        };
        // The wake is outside the lock, because the woken future may poll at once.
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Future for Receiver<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Option<T>> {
        let mut state = lock(&self.0);
        if state.is_over {
            return Poll::Ready(state.value.take());
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(task.waker()),
            none => *none = Some(task.waker().clone()),
        }
        Poll::Pending
    }
}
