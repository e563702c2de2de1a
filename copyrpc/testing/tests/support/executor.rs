//! An executor of one future.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

/// Runs a future: polls it when it is woken, and parks the thread between the polls.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let (mut future, mut task) = (pin!(future), Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut task) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// A future that was polled once, and its output if it has ended.
pub struct Begun<F: Future>(Pin<Box<F>>, Option<F::Output>);

impl<F: Future> Begun<F> {
    pub fn new(future: F) -> Self {
        let mut future = Box::pin(future);
        let Poll::Ready(output) = future
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        else {
            return Self(future, None);
        };
        Self(future, Some(output))
    }

    pub fn end(self) -> F::Output {
        self.1.unwrap_or_else(|| block_on(self.0))
    }
}
