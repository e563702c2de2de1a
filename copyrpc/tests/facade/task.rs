//! Futures, below an executor of a few lines.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use copyrpc::EndpointConfig;
use copyrpc::future::{AsyncContext, AsyncEndpoint, AsyncRequest, Ticket};
use mlx5::LocalFabric;

use super::{builder, connect, step_until};

#[derive(Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A future and its waker.
pub(super) struct Task<'a, T> {
    future: Option<Pin<Box<dyn Future<Output = T> + 'a>>>,
    flag: Arc<Flag>,
    pub(super) polls: u64,
}

impl<'a, T> Task<'a, T> {
    pub(super) fn new(future: impl Future<Output = T> + 'a) -> Self {
        Self { future: Some(Box::pin(future)), flag: Arc::new(Flag(AtomicBool::new(true))), polls: 0 }
    }

    pub(super) fn is_woken(&self) -> bool {
        self.flag.0.load(Ordering::Relaxed)
    }

    /// Polls it if it was woken.
    pub(super) fn turn(&mut self) -> Option<T> {
        let future = self.future.as_mut()?;
        if !self.flag.0.swap(false, Ordering::Relaxed) {
            return None;
        }
        self.polls += 1;
        let waker = Waker::from(Arc::clone(&self.flag));
        match future.as_mut().poll(&mut TaskContext::from_waker(&waker)) {
            Poll::Ready(value) => {
                self.future = None;
                Some(value)
            }
            Poll::Pending => None,
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.future.is_none()
    }
}

pub(super) struct Pair {
    pub(super) near: AsyncContext,
    pub(super) far: AsyncContext,
    pub(super) endpoint: AsyncEndpoint,
    pub(super) peer: AsyncEndpoint,
}

impl Pair {
    pub(super) fn new(config: &EndpointConfig) -> Self {
        let fabric = LocalFabric::new();
        let (near, far) = (builder(&fabric).build::<Ticket>().unwrap(), builder(&fabric).build::<Ticket>().unwrap());
        let (endpoint, peer) = connect(&near, &far, config);
        let (near, far) = (AsyncContext::new(near), AsyncContext::new(far));
        Self { endpoint: near.endpoint(endpoint), peer: far.endpoint(peer), near, far }
    }

    pub(super) fn poll(&self) {
        self.near.poll().unwrap();
        self.far.poll().unwrap();
    }

    /// Polls until all that the near end posted has arrived, and nothing comes of it any more.
    pub(super) fn settle(&self) {
        step_until(|| {
            self.poll();
            self.far.stats().batches_received == self.near.stats().batches_sent
        });
        // A READ is on its way, at most. What is behind libibverbs here takes its time.
        let least = if std::env::var_os("MLX5_TEST_DEVICE").is_some() { Duration::from_millis(50) } else { Duration::ZERO };
        let (start, mut rounds) = (Instant::now(), 0);
        step_until(|| {
            self.poll();
            rounds += 1;
            rounds >= 10 && start.elapsed() >= least
        });
    }

    /// Gives the tasks turns until all are done.
    pub(super) fn finish(&self, tasks: &mut [Task<'_, ()>]) {
        step_until(|| {
            tasks.iter_mut().for_each(|task| _ = task.turn());
            self.poll();
            tasks.iter().all(Task::is_done)
        });
    }

    /// The value of one future.
    pub(super) fn value<T>(&self, future: impl Future<Output = T>) -> T {
        let (mut task, mut value) = (Task::new(future), None);
        step_until(|| {
            value = task.turn();
            self.poll();
            value.is_some()
        });
        value.unwrap()
    }

    /// The next request at the far end.
    pub(super) fn request(&self) -> AsyncRequest {
        self.value(self.far.recv()).unwrap()
    }
}

pub(super) fn bytes(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (number + at) as u8).collect()
}

pub(super) async fn echo(context: &AsyncContext, requests: &Cell<usize>) {
    while requests.get() > 0 {
        let request = context.recv().await.unwrap();
        requests.set(requests.get() - 1);
        let answer = request.data().to_vec();
        request.reply(&answer).unwrap();
    }
}
