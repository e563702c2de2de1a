//! The virtual mapping: which zone of which pool a client has, and which client has a zone. Both directions are one lookup.

use crate::protocol::wire::ZoneId;

/// The name of a client of a server: its number there, which is that of its endpoint entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u16);

impl ClientId {
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A one-to-one mapping of clients and zones (S8).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VirtualMapping {
    zone_of: Vec<Option<ZoneId>>,
    client_of: [Vec<Option<ClientId>>; 2],
}

/// The client or the zone is bound already.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("client {client:?} or zone {zone:?} is bound already, or does not exist")]
pub struct Bound {
    /// The client.
    pub client: ClientId,
    /// The zone.
    pub zone: ZoneId,
}

impl VirtualMapping {
    /// Makes a mapping without bindings, of that many clients and that many zones a pool.
    #[must_use]
    pub fn new(clients: usize, zones: usize) -> Self {
        Self { zone_of: vec![None; clients], client_of: [vec![None; zones], vec![None; zones]] }
    }

    /// Binds a client and a zone.
    ///
    /// # Errors
    /// [`Bound`]: the client or the zone is bound already, or does not exist.
    pub fn bind(&mut self, client: ClientId, zone: ZoneId) -> Result<(), Bound> {
        let pool = self.client_of.get_mut(usize::from(zone.pool));
        match (self.zone_of.get_mut(client.index()), pool.and_then(|pool| pool.get_mut(usize::from(zone.zone)))) {
            (Some(of_client @ None), Some(of_zone @ None)) => {
                *of_client = Some(zone);
                *of_zone = Some(client);
                Ok(())
            }
            _ => Err(Bound { client, zone }),
        }
    }

    /// Takes the zone of a client away. Returns the zone.
    pub fn unbind(&mut self, client: ClientId) -> Option<ZoneId> {
        let zone = self.zone_of.get_mut(client.index())?.take()?;
        self.client_of[usize::from(zone.pool)][usize::from(zone.zone)] = None;
        Some(zone)
    }

    /// Returns the zone of a client.
    #[must_use]
    pub fn zone(&self, client: ClientId) -> Option<ZoneId> {
        *self.zone_of.get(client.index())?
    }

    /// Returns the client of a zone.
    #[must_use]
    pub fn client(&self, zone: ZoneId) -> Option<ClientId> {
        *self.client_of.get(usize::from(zone.pool))?.get(usize::from(zone.zone))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_has_one_client_and_a_client_one_zone() {
        let mut mapping = VirtualMapping::new(2, 2);
        let (a, b) = (ClientId(0), ClientId(1));
        let (first, second) = (ZoneId { pool: 0, zone: 1 }, ZoneId { pool: 1, zone: 1 });
        mapping.bind(a, first).unwrap();
        assert!(mapping.bind(a, second).is_err() && mapping.bind(b, first).is_err());
        assert!(mapping.bind(ClientId(2), second).is_err() && mapping.bind(b, ZoneId { pool: 1, zone: 2 }).is_err());
        mapping.bind(b, second).unwrap();
        assert_eq!((mapping.client(first), mapping.zone(b)), (Some(a), Some(second)));
        assert_eq!((mapping.unbind(a), mapping.unbind(a), mapping.client(first)), (Some(first), None, None));
        mapping.bind(a, first).unwrap();
    }
}
