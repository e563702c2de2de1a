//! Simple conditions to sleep for, and the join of several conditions.

use std::fmt;
use std::time::Duration;

use super::{Bell, Sleeper, Watch, Word};
use crate::sync::Ordering;

/// Joins two watches. Every call reaches both, whatever the first returns.
struct Both<'a>(&'a mut dyn Watch, &'a mut dyn Watch);

impl Watch for Both<'_> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        self.0.words(show);
        self.1.words(show);
    }

    fn arm(&mut self) {
        self.0.arm();
        self.1.arm();
    }

    fn look(&mut self, is_told: bool) -> bool {
        self.0.look(is_told) | self.1.look(is_told)
    }

    fn slice(&mut self) -> Duration {
        self.0.slice().min(self.1.slice())
    }

    fn check(&mut self) -> bool {
        self.0.check() | self.1.check()
    }
}

/// Joins `watch` with the watches of all `parts`, and calls `then` with the result. Each watch is
/// valid only during the call in which its part lends it, so the calls are nested.
pub(super) fn link(
    parts: &mut dyn Iterator<Item = &mut dyn Sleeper>,
    watch: &mut dyn Watch,
    then: &mut dyn FnMut(&mut dyn Watch),
) {
    match parts.next() {
        Some(part) => part.with_watch(&mut |next| link(parts, &mut Both(watch, next), then)),
        None => then(watch),
    }
}

/// A watch that ends a sleep after this time at the latest, because something has to be done then.
/// [`Duration::MAX`]: it ends no sleep.
#[derive(Debug, Clone, Copy)]
pub struct Due(pub Duration);

impl Due {
    /// Returns the value for something that has to be done at once.
    #[must_use]
    pub const fn now() -> Self {
        Self(Duration::ZERO)
    }
}

impl Watch for Due {
    fn words(&mut self, _: &mut dyn FnMut(Word<'_>)) {}

    fn look(&mut self, _: bool) -> bool {
        false
    }

    fn slice(&mut self) -> Duration {
        self.0
    }

    fn check(&mut self) -> bool {
        self.0 < Duration::MAX
    }
}

/// A condition that a function checks. The thread that makes the condition true must wake the
/// sleeper through a word of another part.
pub struct Look<F>(pub F);

impl<F> fmt::Debug for Look<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Look")
    }
}

impl<F: FnMut() -> bool> Watch for Look<F> {
    fn words(&mut self, _: &mut dyn FnMut(Word<'_>)) {}

    fn look(&mut self, _: bool) -> bool {
        (self.0)()
    }

    fn slice(&mut self) -> Duration {
        Duration::MAX
    }
}

/// The condition that a [`Bell`] was rung after [`Bell::listen`].
#[derive(Debug)]
pub struct Listener<'a> {
    bell: &'a Bell,
    rings: u32,
}

impl<'a> Listener<'a> {
    pub(super) fn new(bell: &'a Bell) -> Self {
        // W4 (module `sleep`): the listener sleeps only while the word has this value.
        Self {
            bell,
            rings: bell.rings.load(Ordering::Acquire),
        }
    }
}

impl Watch for Listener<'_> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(Word {
            wakes: &self.bell.rings,
            sleeping: None,
        });
    }

    fn look(&mut self, _: bool) -> bool {
        self.bell.rings.load(Ordering::Acquire) != self.rings
    }

    fn slice(&mut self) -> Duration {
        Duration::MAX
    }
}
