//! The programs of a simulation, and the bell that wakes them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

/// The action of an actor in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Did {
    /// It worked, and that took this many ns (at least 1): it is stepped again then, and not before.
    Cost(u64),
    /// It found nothing to do: every queue empty, every memory word it looks at unchanged. It is stepped again when one of its devices
    /// changes, or at this time if that is earlier.
    IdleUntil(Option<u64>),
}

/// A program in a simulation: a client, a server, a daemon. Closures are actors.
pub trait Actor {
    /// Does something at `now_ns`. Everything it posts is posted at that moment; how long it worked it says with [`Did::Cost`].
    ///
    /// It must not wait: a poll of an empty CQ takes no time here, so that a loop around one never ends.
    fn step(&mut self, now_ns: u64) -> Did;

    /// Returns whether there is something to do for it, asked while it is idle and one of its devices has changed; `false`: it sleeps on.
    /// For actors that share a device.
    fn has_news(&mut self) -> bool {
        true
    }

    /// When it takes its turn, if it is idle and woken at `now_ns`: at once, or when a loop that had polled on would have noticed. `is_rung`: by
    /// a [`Bell`], and not by a device.
    fn notices_ns(&self, now_ns: u64, is_rung: bool) -> u64 {
        let _ = is_rung;
        now_ns
    }
}

/// The number of an actor in its [`Simulation`](crate::Simulation), in the order in which they were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActorId(pub(crate) usize);

/// Ends the sleep of actors from inside the steps of others, which have a way to them that is no device: see [`Simulation::bell`](crate::Simulation::bell).
#[derive(Clone, Debug, Default)]
pub struct Bell(Arc<Rung>);

/// The actors that it was rung for.
#[derive(Debug, Default)]
struct Rung {
    actors: Mutex<Vec<usize>>,
    /// Whether there are some: most steps ring no bell.
    is_any: AtomicBool,
}

impl Bell {
    /// If it is idle, this actor is stepped at the time of the step that is going on, after it. If not, nothing happens.
    pub fn ring(&self, actor: ActorId) {
        self.rung().push(actor.0);
        // After the actor: a thread that sees this sees the actor.
        self.0.is_any.store(true, Ordering::Release);
    }

    /// Returns a waker that rings the bell for this actor.
    #[must_use]
    pub fn waker(&self, actor: ActorId) -> Waker {
        Waker::from(Arc::new(Ring { bell: self.clone(), actor }))
    }

    /// Takes the actors that it was rung for, in that order. A ring of another thread that is missed here is heard with the next event.
    pub(crate) fn take(&self) -> Vec<usize> {
        if !self.0.is_any.load(Ordering::Acquire) {
            return Vec::new();
        }
        self.0.is_any.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.rung())
    }

    fn rung(&self) -> MutexGuard<'_, Vec<usize>> {
        self.0.actors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Ring {
    bell: Bell,
    actor: ActorId,
}

impl Wake for Ring {
    fn wake(self: Arc<Self>) {
        self.bell.ring(self.actor);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.bell.ring(self.actor);
    }
}

impl<F: FnMut(u64) -> Did> Actor for F {
    fn step(&mut self, now_ns: u64) -> Did {
        self(now_ns)
    }
}
