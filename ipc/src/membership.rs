//! The client's side of a session: its entry, and the state of the server.

use copyrpc_calls::SessionEnd;
use copyrpc_shm::region::{OwnerWatch, Region};

use crate::entries::{Entries, Holding, Session};
use crate::error::SetupError;

/// A client's entry at a server. The drop gives the entry up, except in a forked child, which has
/// only a copy of this value.
pub(crate) struct Membership {
    pub(crate) entries: Entries,
    pub(crate) entry: usize,
    pub(crate) holding: Holding,
    /// `None` only while this value is dropped.
    session: Option<Session>,
    watch: OwnerWatch,
    end: Option<SessionEnd>,
    /// Whether the server ended in good order: no handler got the unanswered calls.
    pub(crate) is_stopped: bool,
    /// The region is the last field, and so dropped last: the entries lie in it.
    pub(crate) region: Region,
}

impl Membership {
    /// Takes an entry for which `is_fit` returns `true`. A free entry for which it returns `false`
    /// was corrupted, and is returned to the server.
    ///
    /// # Safety
    /// `entries` lie in `region`.
    ///
    /// # Errors
    /// [`SetupError::Full`] or [`SetupError::Lock`].
    pub(crate) unsafe fn join(
        region: Region,
        entries: Entries,
        is_fit: impl Fn(usize) -> bool,
    ) -> Result<Self, SetupError> {
        let (session, holding) = loop {
            let joined = entries.join(region.lock_file())?;
            let session = joined.ok_or_else(|| SetupError::Full {
                max_clients: entries.count(),
            })?;
            match entries
                .held_by(session.entry, session.generation)
                .filter(|_| is_fit(session.entry))
            {
                Some(holding) => break (session, holding),
                None => entries.leave(session),
            }
        };
        Ok(Self {
            entries,
            entry: session.entry,
            holding,
            session: Some(session),
            watch: OwnerWatch::default(),
            end: None,
            is_stopped: false,
            region,
        })
    }

    /// Returns the reason why the session has ended, if it has ended; later calls return the same
    /// reason. Normally costs two loads of lines that are rarely written. Data that the server
    /// wrote before an orderly end are visible afterwards.
    #[inline(always)]
    pub(crate) fn end(&mut self) -> Option<SessionEnd> {
        let is_well = self.holding.lasts() && !self.region.owner_hint();
        if is_well { None } else { self.examine() }
    }

    #[cold]
    fn examine(&mut self) -> Option<SessionEnd> {
        if self.end.is_none() {
            self.is_stopped = self.holding.is_stopped();
            if self.is_stopped || self.watch.is_gone(&self.region) {
                self.end = Some(SessionEnd::PeerGone);
            } else if !self.holding.lasts() {
                self.end = Some(SessionEnd::Evicted);
            }
            if self.end.is_some() {
                self.holding.end();
            }
        }
        self.end
    }

    /// Leaves the state after a `SIGKILL`, for models: the lock is free, and the entry taken.
    #[cfg(all(test, loom))]
    pub(crate) fn die(mut self) {
        self.session = None;
    }

    /// Like [`end`](Self::end), but asks the kernel in this call if the owner of the region may be
    /// gone; `end` asks it once in 64 calls.
    pub(crate) fn check(&mut self) -> Option<SessionEnd> {
        self.watch.ask_next();
        self.end()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let session = self.session.take();
        // In a forked child the entry is the parent's, and the memory is not mapped.
        if let Some(session) = session.filter(|_| self.region.is_here()) {
            self.entries.leave(session);
        }
    }
}
