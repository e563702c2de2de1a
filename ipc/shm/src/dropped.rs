//! Requests whose tokens were dropped without an answer: from any thread to the one that owes the rejections.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sync::{AtomicBool, Ordering};

/// Dropped requests, each named by a `K`. Costs a load as long as nobody drops one.
pub struct Dropped<K> {
    /// Up if there may be keys. Release after a key went in, Acquire before the keys are taken; never touched under the lock.
    any: AtomicBool,
    keys: Mutex<Vec<K>>,
}

impl<K> Default for Dropped<K> {
    fn default() -> Self {
        Self { any: AtomicBool::new(false), keys: Mutex::default() }
    }
}

impl<K> fmt::Debug for Dropped<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dropped").field("count", &self.lock().len()).finish_non_exhaustive()
    }
}

impl<K> Dropped<K> {
    fn lock(&self) -> MutexGuard<'_, Vec<K>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a request over. If the other thread may sleep, it is to be woken after.
    pub fn push(&self, key: K) {
        self.lock().push(key);
        self.any.store(true, Ordering::Release);
    }

    /// Whether there may be requests to [`take`](Self::take).
    #[must_use]
    #[inline(always)]
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Takes all there are.
    #[cold]
    #[must_use]
    pub fn take(&self) -> Vec<K> {
        // A key that comes meanwhile is taken below, or raises the flag again.
        self.any.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.lock())
    }
}
