//! The records by which two ends connect: *hello* of the client, *offer* of the server, *accept* of
//! the client, *admission* by the server. They can travel over any channel. Their sizes are fixed;
//! all fields are little-endian and checked. An end that cannot continue sends a [`Refusal`] in
//! place of its record.

use std::io::{Read, Write};

use mlx5::{Device, QpAddress};
use mlx5_rendezvous::record::{HEAD_BYTES, Kind, field, put, require, u32_at, u64_at};
pub use mlx5_rendezvous::record::{RecordError, Refusal};

use super::{PendingClient, RdmaClient, RdmaOptions, RdmaServer, SetupError};
use crate::protocol::{ClientId, ClientRegions, Layout, MAX_CLIENTS, MAX_DEPTH, ServerRegions};

const VERSION: u16 = 8;
/// Maximum number of zones: one for each client with grouping off, and the spare zones.
const MAX_ZONES: u32 = MAX_CLIENTS + 1024;

/// The first record of a client. A server creates a queue pair only after it has received this
/// record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello;

/// The first record of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Address of the queue pair for this client.
    pub address: QpAddress,
    /// The layout of slots and zones in memory.
    pub layout: Layout,
}

/// The client's answer to an offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accept {
    /// Address of the client's queue pair.
    pub address: QpAddress,
    /// Addresses and keys of the client's memory.
    pub regions: ClientRegions,
    /// Whether the client sleeps. If so, responses and events are WRITEs with immediate, for each
    /// of which the client posts a receive.
    pub sleeps: bool,
}

/// The record that admits the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission(
    /// Addresses and keys of the server's memory, and the client's number.
    pub ServerRegions,
);

fn address(bytes: &[u8], at: usize) -> Result<QpAddress, SetupError> {
    QpAddress::from_bytes(&field(bytes, at)).ok_or(SetupError::Address)
}

fn put_u32s<const N: usize>(bytes: &mut [u8], at: usize, numbers: [u32; N]) {
    put(bytes, at, numbers.map(u32::to_le_bytes).as_flattened());
}

fn put_u64s<const N: usize>(bytes: &mut [u8], at: usize, numbers: [u64; N]) {
    put(bytes, at, numbers.map(u64::to_le_bytes).as_flattened());
}

impl Hello {
    /// Bytes of the record.
    pub const BYTES: usize = HEAD_BYTES;
    const KIND: Kind = Kind {
        name: "scalerpc hello",
        magic: *b"scaleHEL",
        version: VERSION,
    };

    /// Returns the record's bytes: the head alone.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        Self::KIND.begin()
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`SetupError::Record`].
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, SetupError> {
        Ok(Self::KIND.check(bytes).map(|()| Self)?)
    }
}

impl Offer {
    /// Bytes of the record.
    pub const BYTES: usize = 72;
    const KIND: Kind = Kind {
        name: "scalerpc offer",
        magic: *b"scaleOFR",
        version: VERSION,
    };

    /// Returns the record's bytes: the head of every record; the number of slots of a client, the
    /// bytes of a slot, and the number of zones of a message pool, a u32 each; 4 bytes of zeros;
    /// the address of the queue pair.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let Layout {
            depth,
            slot_bytes,
            zones,
        } = self.layout;
        let mut bytes = Self::KIND.begin();
        put_u32s(
            &mut bytes,
            HEAD_BYTES,
            [depth, slot_bytes, zones].map(|number| number as u32),
        );
        put(&mut bytes, 32, &self.address.to_bytes());
        bytes
    }

    /// Returns the bytes to send instead of a record.
    #[must_use]
    pub fn refuse(refusal: Refusal) -> [u8; Self::BYTES] {
        Self::KIND.refuse(refusal)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`SetupError`]: the field that is wrong, or the peer's refusal.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, SetupError> {
        Self::KIND.check(bytes)?;
        let number = |at, field, is_legal: fn(u64) -> bool, legal| {
            let value = u32_at(bytes, at);
            require(field, value, legal, is_legal).map(|()| value as usize)
        };
        let depth = number(
            16,
            "depth",
            |depth| (1..=u64::from(MAX_DEPTH)).contains(&depth),
            "1..=64",
        )?;
        let is_slot = |bytes: u64| (128..=65_536).contains(&bytes) && bytes % 64 == 0;
        let zones = number(
            24,
            "zones",
            |zones| (1..=u64::from(MAX_ZONES)).contains(&zones),
            "1..=33792",
        )?;
        Ok(Self {
            address: address(bytes, 32)?,
            layout: Layout {
                depth,
                slot_bytes: number(20, "slot_bytes", is_slot, "a multiple of 64 in 128..=65536")?,
                zones,
            },
        })
    }
}

impl Accept {
    /// Bytes of the record.
    pub const BYTES: usize = 88;
    const KIND: Kind = Kind {
        name: "scalerpc accept",
        magic: *b"scaleACC",
        version: VERSION,
    };

    /// Returns the record's bytes: head, addresses of requests and responses (u64 each), their keys
    /// (u32 each), address of the queue pair, 1 if the client sleeps and else 0 (u32), 4 bytes of
    /// zeros.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let ClientRegions {
            requests_addr,
            requests_rkey,
            responses_addr,
            responses_rkey,
        } = self.regions;
        let mut bytes = Self::KIND.begin();
        put_u64s(&mut bytes, 16, [requests_addr, responses_addr]);
        put_u32s(&mut bytes, 32, [requests_rkey, responses_rkey]);
        put(&mut bytes, 40, &self.address.to_bytes());
        put_u32s(&mut bytes, 80, [u32::from(self.sleeps)]);
        bytes
    }

    /// Reads a record. The addresses of the client's memory are not checked: a wrong address fails
    /// the client's own queue pair only.
    ///
    /// # Errors
    /// [`SetupError`]: the field that is wrong, or the client's refusal.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, SetupError> {
        Self::KIND.check(bytes)?;
        let regions = ClientRegions {
            requests_addr: u64_at(bytes, 16),
            responses_addr: u64_at(bytes, 24),
            requests_rkey: u32_at(bytes, 32),
            responses_rkey: u32_at(bytes, 36),
        };
        let sleeps = u32_at(bytes, 80);
        require("sleeps", sleeps, "0 or 1", |sleeps| sleeps <= 1)?;
        Ok(Self {
            address: address(bytes, 40)?,
            regions,
            sleeps: sleeps == 1,
        })
    }
}

impl Admission {
    /// Bytes of the record.
    pub const BYTES: usize = 48;
    const KIND: Kind = Kind {
        name: "scalerpc admission",
        magic: *b"scaleADM",
        version: VERSION,
    };

    /// Returns the record's bytes: head, addresses of pools and entry (u64 each), their keys,
    /// client (u32 each), 4 bytes of zeros.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let ServerRegions {
            client,
            pools_addr,
            pools_rkey,
            entry_addr,
            entry_rkey,
        } = self.0;
        let mut bytes = Self::KIND.begin();
        put_u64s(&mut bytes, 16, [pools_addr, entry_addr]);
        put_u32s(&mut bytes, 32, [pools_rkey, entry_rkey, client.0.into()]);
        bytes
    }

    /// Returns the bytes to send instead of a record.
    #[must_use]
    pub fn refuse(refusal: Refusal) -> [u8; Self::BYTES] {
        Self::KIND.refuse(refusal)
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`SetupError`]: the field that is wrong, or the peer's refusal.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, SetupError> {
        Self::KIND.check(bytes)?;
        let client = u32_at(bytes, 40);
        require("client", client, "0..=65535", |client| {
            client <= u64::from(u16::MAX)
        })?;
        Ok(Self(ServerRegions {
            client: ClientId(client as u16),
            pools_addr: u64_at(bytes, 16),
            entry_addr: u64_at(bytes, 24),
            pools_rkey: u32_at(bytes, 32),
            entry_rkey: u32_at(bytes, 36),
        }))
    }
}

/// Returns the refusal for a peer to which no connection could be made.
pub(crate) fn refusal_of(error: &SetupError) -> Refusal {
    if matches!(error, SetupError::Full(_)) {
        Refusal::Full
    } else {
        Refusal::Failed
    }
}

impl RdmaServer {
    /// Admits the client at the other end of a byte channel; the client calls
    /// [`RdmaClient::connect_over`]. Blocks as long as the channel's reads do, and serves no client
    /// meanwhile. A server with other clients gives the channel a read timeout, or carries the
    /// records itself between [`offer`](Self::offer) and [`admit`](Self::admit).
    ///
    /// # Errors
    /// [`SetupError`]; the client was not admitted.
    pub fn accept_over(
        &mut self,
        channel: &mut (impl Read + Write),
    ) -> Result<ClientId, SetupError> {
        Hello::decode(&Hello::KIND.receive(channel)?)?;
        // The refusal is lost if the channel fails.
        let pending = self
            .offer()
            .inspect_err(|error| drop(channel.write_all(&Offer::refuse(refusal_of(error)))))?;
        channel.write_all(&pending.record().encode())?;
        let accept = Accept::decode(&Accept::KIND.receive(channel)?)?;
        let admission = self
            .admit(pending, &accept)
            .inspect_err(|error| drop(channel.write_all(&Admission::refuse(refusal_of(error)))))?;
        channel.write_all(&admission.encode())?;
        Ok(admission.0.client)
    }
}

impl RdmaClient {
    /// Connects to the server at the other end of a byte channel, as a client.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn connect_over(
        device: &mlx5::DeviceSpec,
        channel: &mut (impl Read + Write),
    ) -> Result<Self, SetupError> {
        Self::connect_on(&Device::open(device)?, &RdmaOptions::default(), channel)
    }

    /// Like [`connect_over`](Self::connect_over), with options, and on an open device, which many
    /// clients may share.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn connect_on(
        device: &Device,
        options: &RdmaOptions,
        channel: &mut (impl Read + Write),
    ) -> Result<Self, SetupError> {
        channel.write_all(&Hello.encode())?;
        let offer = Offer::decode(&Offer::KIND.receive(channel)?)?;
        let refuse = |error: &SetupError| {
            drop(channel.write_all(&Accept::KIND.refuse::<{ Accept::BYTES }>(refusal_of(error))))
        };
        let pending = PendingClient::on(device, &offer, options).inspect_err(refuse)?;
        channel.write_all(&pending.record().encode())?;
        Ok(pending.admitted(&Admission::decode(&Admission::KIND.receive(channel)?)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_way_and_wrong_ones_are_refused_by_field() {
        let layout = Layout {
            depth: 8,
            slot_bytes: 4096,
            zones: 64,
        };
        let offer = Offer {
            address: QpAddress::soft(1, 2, 3),
            layout,
        };
        let bytes = offer.encode();
        assert_eq!(Offer::decode(&bytes).unwrap(), offer);
        for (at, name) in [(16, "depth"), (20, "slot_bytes"), (25, "zones")] {
            let mut bad = bytes;
            bad[at] = 0xff;
            let refused = Offer::decode(&bad).unwrap_err();
            assert!(
                matches!(refused, SetupError::Record(RecordError::Field { field, .. }) if field == name),
                "{name}"
            );
        }
        let mut bad = bytes;
        bad[8] = 2;
        let refused = Offer::decode(&bad).unwrap_err();
        assert!(matches!(
            refused,
            SetupError::Record(RecordError::Version {
                version: 2,
                known: 8,
                ..
            })
        ));
        let refused = Offer::decode(&[0xa5; Offer::BYTES]).unwrap_err();
        assert!(matches!(
            refused,
            SetupError::Record(RecordError::Magic {
                name: "scalerpc offer",
                ..
            })
        ));
        let mut bad = bytes;
        bad[32] = 9;
        assert!(matches!(Offer::decode(&bad), Err(SetupError::Address)));
        let refused = Offer::decode(&Offer::refuse(Refusal::Full)).unwrap_err();
        assert!(matches!(
            refused,
            SetupError::Record(RecordError::Refused(Refusal::Full))
        ));

        let regions = ClientRegions {
            requests_addr: 1,
            requests_rkey: 2,
            responses_addr: 3,
            responses_rkey: 4,
        };
        let accept = Accept {
            address: QpAddress::soft(4, 5, 6),
            regions,
            sleeps: true,
        };
        assert_eq!(Accept::decode(&accept.encode()).unwrap(), accept);
        let mut bad = accept.encode();
        bad[80] = 2;
        assert!(matches!(
            Accept::decode(&bad),
            Err(SetupError::Record(RecordError::Field {
                field: "sleeps",
                ..
            }))
        ));
        let regions = ServerRegions {
            client: ClientId(7),
            pools_addr: 1,
            pools_rkey: 2,
            entry_addr: 3,
            entry_rkey: 4,
        };
        assert_eq!(
            Admission::decode(&Admission(regions).encode()).unwrap(),
            Admission(regions)
        );
        let mut bad = Admission(regions).encode();
        bad[42] = 1;
        assert!(matches!(
            Admission::decode(&bad),
            Err(SetupError::Record(RecordError::Field {
                field: "client",
                ..
            }))
        ));
    }
}
