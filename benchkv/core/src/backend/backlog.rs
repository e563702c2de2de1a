//! [`Backlog`]: requests that wait for room on their way out of a thread.

use std::collections::VecDeque;

use super::BackendError;
use crate::message::Request;

pub(super) enum SendError<W> {
    /// Room or credit is lacking now. The error contains the caller; try again after a poll.
    Full(W),
    Down(BackendError),
}

/// Requests that found no room: a queue for each path, which is a link to another rank or a daemon
/// of this rank. `W` is the caller to answer.
#[derive(Debug)]
pub(super) struct Backlog<W> {
    queues: Vec<VecDeque<(Request, W)>>,
    waiting: usize,
    /// Maximum of `waiting` since the last [`take_peak`](Self::take_peak).
    peak: usize,
}

impl<W> Backlog<W> {
    pub(super) fn new(paths: usize) -> Self {
        Self {
            queues: (0..paths).map(|_| VecDeque::new()).collect(),
            waiting: 0,
            peak: 0,
        }
    }

    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the maximum of `waiting` since the last call.
    pub(super) fn take_peak(&mut self) -> usize {
        std::mem::replace(&mut self.peak, self.waiting)
    }

    #[inline(always)]
    pub(super) fn is_empty(&self, path: usize) -> bool {
        self.waiting == 0 || self.queues.get(path).is_none_or(VecDeque::is_empty)
    }

    /// Adds a request that found no room, or whose path has waiting requests.
    pub(super) fn push(
        &mut self,
        path: usize,
        request: Request,
        whom: W,
    ) -> Result<(), Box<BackendError>> {
        let Some(queue) = self.queues.get_mut(path) else {
            let why = format!("there is no path {path}");
            let error = BackendError::transport("a call to another thread", why);
            return Err(Box::new(error));
        };
        queue.push_back((request, whom));
        self.waiting += 1;
        self.peak = self.peak.max(self.waiting);
        Ok(())
    }

    /// Sends the waiting requests of each path by `send`, in order, until a request finds no room.
    /// Returns the number of requests sent.
    pub(super) fn retry(
        &mut self,
        mut send: impl FnMut(usize, &Request, W) -> Result<(), SendError<W>>,
    ) -> Result<usize, BackendError> {
        let before = self.waiting;
        if before == 0 {
            return Ok(0);
        }
        for (path, queue) in self.queues.iter_mut().enumerate() {
            while let Some((request, whom)) = queue.pop_front() {
                match send(path, &request, whom) {
                    Ok(()) => self.waiting -= 1,
                    Err(SendError::Full(whom)) => {
                        queue.push_front((request, whom));
                        break;
                    }
                    Err(SendError::Down(error)) => return Err(error),
                }
            }
        }
        Ok(before - self.waiting)
    }
}
