//! The three records by which two ends meet: *offer* of the server, *accept* of the client, *admission* by the server. By whatever channel
//! they travel, they are of fixed sizes; all fields are little-endian and checked.

use std::io::{Error, ErrorKind, Read, Write};

use mlx5::QpAddress;
use thiserror::Error;

use super::{PendingClient, RdmaClient, RdmaServer, SetupError};
use crate::client::ServerRegions;
use crate::config::{Layout, MAX_CLIENTS, MAX_DEPTH, ReplyMode};
use crate::mapping::ClientId;
use crate::server::ClientRegions;
use crate::wire::{le_u32, le_u64};

const VERSION: u32 = 2;
/// Most zones a legal configuration has: with grouping off, and all spare ones.
const MAX_ZONES: u32 = MAX_CLIENTS + 1024;

/// What a server tells a client first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The queue pair for this client.
    pub address: QpAddress,
    /// Where everything lies.
    pub layout: Layout,
}

/// What the client answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accept {
    /// The client's queue pair.
    pub address: QpAddress,
    /// The client's memory.
    pub regions: ClientRegions,
}

/// What admits the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission(
    /// The server's memory.
    pub ServerRegions,
);

/// Bytes that are no record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// Not a record of this kind.
    #[error("not a scalerpc {0}")]
    Magic(&'static str),
    /// Of another version.
    #[error("record version {0}, this end speaks {VERSION}: use equal releases")]
    Version(u32),
    /// A field outside its range.
    #[error("{field} is {value} in the record; legal is {legal}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it holds.
        value: u64,
        /// The range.
        legal: &'static str,
    },
    /// The address of the queue pair is none.
    #[error("the record has no address of a queue pair")]
    Address,
}

/// Why two ends did not meet.
#[derive(Debug, Error)]
pub enum MeetError {
    /// The channel failed.
    #[error("exchanging records: {0}")]
    Channel(#[from] std::io::Error),
    /// The peer's record is none.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// This end could not be made.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

fn check_head(bytes: &[u8], magic: &[u8; 8], name: &'static str) -> Result<(), RecordError> {
    let mut version = [0; 4];
    version.copy_from_slice(&bytes[8..12]);
    match u32::from_le_bytes(version) {
        _ if bytes[..8] != *magic => Err(RecordError::Magic(name)),
        VERSION => Ok(()),
        version => Err(RecordError::Version(version)),
    }
}

fn address(bytes: &[u8]) -> Result<QpAddress, RecordError> {
    let mut address = [0; QpAddress::LEN];
    address.copy_from_slice(&bytes[..QpAddress::LEN]);
    QpAddress::from_bytes(&address).ok_or(RecordError::Address)
}

fn record<const N: usize>(fields: &[&[u8]]) -> [u8; N] {
    let mut bytes = [0; N];
    let mut at = 0;
    for field in fields {
        bytes[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
    bytes
}

impl Offer {
    /// Bytes of the record.
    pub const BYTES: usize = 72;
    const MAGIC: [u8; 8] = *b"scaleOFR";

    /// The record's bytes: magic, version, depth, bytes of a slot, zones of a pool, 1 if clients READ, a zero word, address.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let Layout { depth, slot_bytes, zones, reply_mode } = self.layout;
        let mut numbers = [0; 24];
        let reads = u32::from(reply_mode == ReplyMode::ClientReads);
        for (nth, number) in [VERSION, depth as u32, slot_bytes as u32, zones as u32, reads, 0].into_iter().enumerate() {
            numbers[4 * nth..4 * nth + 4].copy_from_slice(&number.to_le_bytes());
        }
        record(&[&Self::MAGIC, &numbers, &self.address.to_bytes()])
    }

    /// Reads a record.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, RecordError> {
        check_head(bytes, &Self::MAGIC, "offer")?;
        let field = |at, field, is_legal: fn(u32) -> bool, legal| {
            let value = le_u32(bytes, at);
            if is_legal(value) { Ok(value as usize) } else { Err(RecordError::Field { field, value: value.into(), legal }) }
        };
        let depth = field(12, "depth", |depth| (1..=MAX_DEPTH).contains(&depth), "1..=64")?;
        let is_slot = |bytes: u32| (128..=65_536).contains(&bytes) && bytes % 64 == 0;
        let slot_bytes = field(16, "slot_bytes", is_slot, "a multiple of 64 in 128..=65536")?;
        let zones = field(20, "zones", |zones| (1..=MAX_ZONES).contains(&zones), "1..=33792")?;
        let reads = field(24, "reply mode", |reads| reads <= 1, "0 or 1")?;
        field(28, "reserved word", |word| word == 0, "0")?;
        let reply_mode = if reads == 1 { ReplyMode::ClientReads } else { ReplyMode::ServerWrites };
        Ok(Self { address: address(&bytes[32..])?, layout: Layout { depth, slot_bytes, zones, reply_mode } })
    }
}

impl Accept {
    /// Bytes of the record.
    pub const BYTES: usize = 80;
    const MAGIC: [u8; 8] = *b"scaleACC";

    /// The record's bytes: magic, version, a zero word, addresses of requests and responses, their keys, address of the queue pair.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let ClientRegions { requests_addr, requests_rkey, responses_addr, responses_rkey } = self.regions;
        record(&[
            &Self::MAGIC,
            &VERSION.to_le_bytes(),
            &[0; 4],
            &requests_addr.to_le_bytes(),
            &responses_addr.to_le_bytes(),
            &requests_rkey.to_le_bytes(),
            &responses_rkey.to_le_bytes(),
            &self.address.to_bytes(),
        ])
    }

    /// Reads a record. Where the client's memory is, is the client's affair: an address that is wrong fails its own queue pair.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, RecordError> {
        check_head(bytes, &Self::MAGIC, "accept")?;
        let regions = ClientRegions {
            requests_addr: le_u64(bytes, 16),
            responses_addr: le_u64(bytes, 24),
            requests_rkey: le_u32(bytes, 32),
            responses_rkey: le_u32(bytes, 36),
        };
        Ok(Self { address: address(&bytes[40..])?, regions })
    }
}

impl Admission {
    /// Bytes of the record.
    pub const BYTES: usize = 56;
    const MAGIC: [u8; 8] = *b"scaleADM";

    /// The record's bytes: magic, version, client, addresses of pools, entry and responses, their keys, a zero word.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let ServerRegions { client, pools_addr, pools_rkey, entry_addr, entry_rkey, responses_addr, responses_rkey } = self.0;
        record(&[
            &Self::MAGIC,
            &VERSION.to_le_bytes(),
            &u32::from(client.0).to_le_bytes(),
            &pools_addr.to_le_bytes(),
            &entry_addr.to_le_bytes(),
            &responses_addr.to_le_bytes(),
            &pools_rkey.to_le_bytes(),
            &entry_rkey.to_le_bytes(),
            &responses_rkey.to_le_bytes(),
        ])
    }

    /// Reads a record.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, RecordError> {
        check_head(bytes, &Self::MAGIC, "admission")?;
        let client = le_u32(bytes, 12);
        let client = u16::try_from(client).map_err(|_| RecordError::Field { field: "client", value: client.into(), legal: "0..=65535" })?;
        Ok(Self(ServerRegions {
            client: ClientId(client),
            pools_addr: le_u64(bytes, 16),
            entry_addr: le_u64(bytes, 24),
            responses_addr: le_u64(bytes, 32),
            pools_rkey: le_u32(bytes, 40),
            entry_rkey: le_u32(bytes, 44),
            responses_rkey: le_u32(bytes, 48),
        }))
    }
}

fn receive<const N: usize>(channel: &mut impl Read) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    channel.read_exact(&mut bytes).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => Error::new(ErrorKind::UnexpectedEof, "the other end went away before its record came"),
        _ => error,
    })?;
    Ok(bytes)
}

impl RdmaServer {
    /// Admits the client at the other end of a byte channel, which calls [`RdmaClient::connect_over`]. Waits for it as long as the channel's reads
    /// do, and serves nobody meanwhile: a server with other clients gives the channel a read timeout, or carries the records itself between
    /// [`offer`](Self::offer) and [`admit`](Self::admit).
    ///
    /// # Errors
    /// [`MeetError`]; the client was not admitted.
    pub fn accept_over(&mut self, channel: &mut (impl Read + Write)) -> Result<ClientId, MeetError> {
        let pending = self.offer()?;
        channel.write_all(&pending.record().encode())?;
        let accept = Accept::decode(&receive(channel)?)?;
        let admission = self.admit(pending, &accept)?;
        channel.write_all(&admission.encode())?;
        Ok(admission.0.client)
    }
}

impl RdmaClient {
    /// Becomes a client of the server at the other end of a byte channel.
    ///
    /// # Errors
    /// [`MeetError`].
    pub fn connect_over(device: &mlx5::DeviceSpec, channel: &mut (impl Read + Write)) -> Result<Self, MeetError> {
        let pending = PendingClient::new(device, &Offer::decode(&receive(channel)?)?)?;
        channel.write_all(&pending.record().encode())?;
        Ok(pending.admitted(&Admission::decode(&receive(channel)?)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_way_and_wrong_ones_are_refused_by_field() {
        let layout = Layout { depth: 8, slot_bytes: 4096, zones: 64, reply_mode: ReplyMode::ClientReads };
        let offer = Offer { address: QpAddress::soft(1, 2, 3), layout };
        let bytes = offer.encode();
        assert_eq!(Offer::decode(&bytes), Ok(offer));
        for (at, name) in [(12, "depth"), (16, "slot_bytes"), (21, "zones"), (24, "reply mode"), (28, "reserved word")] {
            let mut bad = bytes;
            bad[at] = 0xff;
            assert!(matches!(Offer::decode(&bad), Err(RecordError::Field { field, .. }) if field == name), "{name}");
        }
        let mut bad = bytes;
        bad[8] = 1;
        assert_eq!(Offer::decode(&bad), Err(RecordError::Version(1)));
        assert_eq!(Offer::decode(&[0xa5; Offer::BYTES]), Err(RecordError::Magic("offer")));
        let mut bad = bytes;
        bad[32] = 9;
        assert_eq!(Offer::decode(&bad), Err(RecordError::Address));

        let regions = ClientRegions { requests_addr: 1, requests_rkey: 2, responses_addr: 3, responses_rkey: 4 };
        let accept = Accept { address: QpAddress::soft(4, 5, 6), regions };
        assert_eq!(Accept::decode(&accept.encode()), Ok(accept));
        let regions = ServerRegions {
            client: ClientId(7),
            pools_addr: 1,
            pools_rkey: 2,
            entry_addr: 3,
            entry_rkey: 4,
            responses_addr: 5,
            responses_rkey: 6,
        };
        assert_eq!(Admission::decode(&Admission(regions).encode()), Ok(Admission(regions)));
        let mut bad = Admission(regions).encode();
        bad[14] = 1;
        assert!(matches!(Admission::decode(&bad), Err(RecordError::Field { field: "client", .. })));
    }
}
