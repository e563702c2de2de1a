//! One value from the thread of a connection to a future, which may be on any other.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as TaskContext, Poll, Waker};

/// Locks what no panic leaves half changed.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    waker: Option<Waker>,
    /// Nothing comes any more.
    is_over: bool,
}

/// Puts the value there, or says with its drop that none comes.
#[derive(Debug)]
pub struct Sender<T>(Arc<Mutex<State<T>>>);

/// The value, or `None`: none comes.
#[derive(Debug)]
#[must_use = "the value comes to whom polls it"]
pub struct Receiver<T>(Arc<Mutex<State<T>>>);

/// A place for one value.
pub fn oneshot<T>() -> (Sender<T>, Receiver<T>) {
    let state = Arc::new(Mutex::new(State { value: None, waker: None, is_over: false }));
    (Sender(Arc::clone(&state)), Receiver(state))
}

impl<T> Sender<T> {
    /// Whether anybody waits for it.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Puts the value there.
    pub fn send(self, value: T) {
        lock(&self.0).value = Some(value);
        // Its drop wakes.
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let waker = {
            let mut state = lock(&self.0);
            state.is_over = true;
            state.waker.take()
        };
        // Not under the lock: it may poll at once.
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
