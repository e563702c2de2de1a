//! The programs of a simulation, and the bell that wakes them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

/// The outcome of an actor's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Did {
    /// The actor worked for the given time in ns (at least 1), and is stepped again only after that
    /// time.
    Cost(u64),
    /// The actor found nothing to do: every queue is empty, and every memory word that it polls is
    /// unchanged. It is stepped again when one of its devices changes, or at this time if that is
    /// earlier.
    IdleUntil(Option<u64>),
}

/// A program in a simulation: a client, a server, a daemon. Closures are actors.
pub trait Actor {
    /// Takes a step at `now_ns`. All its posts happen at that moment. [`Did::Cost`] returns the
    /// time that the actor worked.
    ///
    /// A step must not wait: a poll of an empty CQ takes no time here, so a loop around a poll
    /// never ends.
    fn step(&mut self, now_ns: u64) -> Did;

    /// Returns whether the actor has something to do. Called while the actor is idle and one of its
    /// devices has changed; after `false` the actor stays idle. Actors that share a device
    /// implement this function.
    fn has_news(&mut self) -> bool {
        true
    }

    /// Returns the time of the actor's next step, if it is idle and woken at `now_ns`: at once, or
    /// at the time at which a polling loop would detect the event. `is_rung`: it was woken by a
    /// [`Bell`], and not by a device.
    fn notices_ns(&self, now_ns: u64, is_rung: bool) -> u64 {
        let _ = is_rung;
        now_ns
    }
}

/// The number of an actor in its [`Simulation`](crate::sim::Simulation), where actors are numbered
/// in the order in which they were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ActorId(pub(crate) usize);

/// Wakes idle actors when steps of other actors reach them by other means than a device: see
/// [`Simulation::bell`](crate::sim::Simulation::bell).
#[derive(Clone, Debug, Default)]
pub struct Bell(Arc<Rung>);

#[derive(Debug, Default)]
struct Rung {
    actors: Mutex<Vec<usize>>,
    /// Whether `actors` is not empty. Most steps ring no bell, and read only this flag.
    is_any: AtomicBool,
}

impl Bell {
    /// Wakes this actor if it is idle: it is stepped at the time of the current step, after it.
    /// Does nothing otherwise.
    pub fn ring(&self, actor: ActorId) {
        self.rung().push(actor.0);
        // The flag is stored after the actor: a thread that sees the flag sees the actor.
        self.0.is_any.store(true, Ordering::Release);
    }

    /// Returns a waker that rings the bell for this actor.
    #[must_use]
    pub fn waker(&self, actor: ActorId) -> Waker {
        Waker::from(Arc::new(Ring {
            bell: self.clone(),
            actor,
        }))
    }

    /// Takes the actors that the bell was rung for, in that order. A ring of another thread that is
    /// missed here counts at the next event.
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
