//! The end of a server: it answers the requests that it has, and then reports to each client that
//! no other request will run (S27 of docs/scalerpc.md).

use super::zones::ZoneState;
use super::{Server, ServerOp};
use crate::protocol::memory::Memory;
use crate::protocol::request::ClientId;
use crate::protocol::wire::Event;

impl<M: Memory> Server<M> {
    /// Accepts the requests that have arrived in active zones, and none from now on. After that the
    /// owner calls [`dismiss`](Self::dismiss) in place of [`poll`](Self::poll).
    pub fn close(&mut self) {
        self.accept_active();
        for nth in 0..self.busy.len() {
            let zone = self.zone_mut(self.busy[nth]);
            if zone.state == ZoneState::Warming {
                // READs of this zone that complete later do not make it active.
                zone.state = ZoneState::Quarantined;
            }
        }
    }

    /// Reports to each client that the server closes, once all accepted requests of the client are
    /// answered: none waits for a worker, and `has_kept(client)` returns `false`, that is, no
    /// worker has one.
    pub fn dismiss(&mut self, has_kept: impl Fn(ClientId) -> bool, out: &mut Vec<ServerOp>) {
        for client in (0..self.clients.len()).map(|nth| ClientId(nth as u16)) {
            let is_queued = || {
                self.waiting()
                    .iter()
                    .any(|queued| queued.request.client == client)
            };
            let Some(record) = self
                .client(client)
                .filter(|record| !record.is_dismissed && !is_queued() && !has_kept(client))
            else {
                continue;
            };
            out.push(self.bare_event(client, record.regions, Event::Close));
            self.clients[client.index()]
                .iter_mut()
                .for_each(|record| record.is_dismissed = true);
        }
    }

    /// Drops the accepted requests that no worker took.
    pub(crate) fn drop_queued(&mut self) {
        self.dispatch.truncate(self.taken);
    }

    pub(crate) fn has_dismissed_all(&self) -> bool {
        self.clients
            .iter()
            .flatten()
            .all(|record| record.is_dismissed)
    }
}
