//! Futures that wait for their turn: for room, for a request, for the end of a connection. Each lane is a queue of which only the head is
//! woken; a future that leaves, done or dropped, wakes the next. So no wake-up is lost and none wakes many futures at once.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::rc::Rc;
use std::task::{Context as TaskContext, Poll, Waker};

use super::Ticket;
use crate::endpoint::Endpoint;

/// The event that is waited for, with the connection's serial number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    /// Room for a call.
    Calls(u64),
    /// Room for a one-sided operation.
    Transfers(u64),
    /// A request.
    Requests,
    /// The end of the connection. Last: lanes from here on are checked only when a connection has ended.
    End(u64),
}

/// The result of a poll of the context.
pub(super) struct News<F> {
    /// Whether there was a completion.
    pub(super) has_moved: bool,
    /// Whether a connection ended.
    pub(super) has_ended: bool,
    /// Returns whether there is a request that was not taken.
    pub(super) has_requests: F,
}

#[derive(Default)]
struct Waiter(Cell<Option<Waker>>);

#[derive(Default)]
struct Queue {
    waiters: VecDeque<Rc<Waiter>>,
    /// The endpoint of a lane of calls, and the state that its room depended on when the head was refused.
    refused: Option<(Endpoint<Ticket>, [u64; 5])>,
}

impl Queue {
    fn is_due(&self, lane: Lane, has_moved: bool, has_requests: bool) -> bool {
        match lane {
            Lane::Calls(_) => self.refused.as_ref().is_none_or(|(endpoint, room)| room_of(endpoint) != *room),
            Lane::Transfers(_) => has_moved,
            Lane::Requests => has_requests,
            Lane::End(_) => false,
        }
    }
}

/// Returns every value that decides whether a call is admitted (L3, S4); one of them changes whenever that may change.
fn room_of(endpoint: &Endpoint<Ticket>) -> [u64; 5] {
    endpoint.connection.with_link(|link| {
        let written = link.stats().calls + link.stats().replies;
        [link.in_flight(), link.credit_balance(), link.reserved(), link.unanswered_requests() as u64, written]
    })
}

/// The queues of one context.
#[derive(Default)]
pub(super) struct Waiting {
    queues: RefCell<BTreeMap<Lane, Queue>>,
}

impl fmt::Debug for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.queues.borrow().iter().map(|(lane, queue)| (lane, queue.waiters.len()))).finish()
    }
}

/// A future's place in a queue; its drop leaves the queue.
pub(super) struct Place {
    lane: Lane,
    waiter: Rc<Waiter>,
    waiting: Rc<Waiting>,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("lane", &self.lane).finish_non_exhaustive()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let next = {
            let mut queues = self.waiting.queues.borrow_mut();
            let Some(queue) = queues.get_mut(&self.lane) else { return };
            let was_head = queue.waiters.front().is_some_and(|head| Rc::ptr_eq(head, &self.waiter));
            queue.waiters.retain(|other| !Rc::ptr_eq(other, &self.waiter));
            if queue.waiters.is_empty() {
                queues.remove(&self.lane);
                return;
            }
            queue.waiters.front().filter(|_| was_head).and_then(|head| head.0.take())
        };
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

impl Waiting {
    /// Runs `attempt` if it is this future's turn. If it returns nothing, or it is not its turn, the future waits at its `place`.
    /// `endpoint` is that of a lane of calls.
    pub(super) fn admit<T>(
        self: &Rc<Self>,
        place: &mut Option<Place>,
        lane: Lane,
        endpoint: Option<&Endpoint<Ticket>>,
        task: &TaskContext<'_>,
        attempt: impl FnOnce() -> Option<T>,
    ) -> Poll<T> {
        let is_head = self.queues.borrow().get(&lane).is_none_or(|queue| {
            place.as_ref().is_some_and(|place| queue.waiters.front().is_some_and(|head| Rc::ptr_eq(head, &place.waiter)))
        });
        if let Some(value) = if is_head { attempt() } else { None } {
            *place = None;
            return Poll::Ready(value);
        }
        let mut queues = self.queues.borrow_mut();
        let queue = queues.entry(lane).or_default();
        if is_head {
            queue.refused = endpoint.map(|endpoint| (endpoint.clone(), room_of(endpoint)));
        }
        let place = place.get_or_insert_with(|| {
            let waiter = Rc::<Waiter>::default();
            queue.waiters.push_back(Rc::clone(&waiter));
            Place { lane, waiter, waiting: Rc::clone(self) }
        });
        place.waiter.0.set(Some(task.waker().clone()));
        Poll::Pending
    }

    /// Wakes the heads of the queues that the news concerns.
    pub(super) fn wake(&self, news: &News<impl Fn() -> bool>) {
        let mut due = Vec::new();
        {
            let queues = self.queues.borrow();
            if queues.is_empty() {
                return;
            }
            let has_requests = (news.has_requests)();
            let end = if news.has_ended { Lane::End(u64::MAX) } else { Lane::End(0) };
            for (lane, queue) in queues.range(..end) {
                if news.has_ended || queue.is_due(*lane, news.has_moved, has_requests) {
                    due.extend(queue.waiters.front().and_then(|head| head.0.take()));
                }
            }
        }
        due.into_iter().for_each(Waker::wake);
    }
}
