//! The record two endpoints exchange, by whatever channel they have, before they connect.
//!
//! A fixed 128 bytes, so that a transport may send it without framing. It comes from another
//! process: [`ExchangeRecord::decode`] refuses every number the protocol cannot work with, and
//! [`ExchangeRecord::check_peer`] every pair of endpoints that cannot talk.

use thiserror::Error;

use crate::ring::RingSize;
use crate::wire::ALIGNMENT;

/// Bytes of an encoded record.
pub const EXCHANGE_RECORD_SIZE: usize = 128;
/// Version of the record and of the wire formats behind it.
pub const EXCHANGE_VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"copyrpc\0";
const MAX_24_BIT: u32 = (1 << 24) - 1;

/// What an endpoint lives on. Kinds never connect with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The software HCA.
    Soft = 1,
    /// A NIC.
    Hardware = 2,
}

/// One endpoint as its peer must know it.
///
/// | offset | field | | offset | field |
/// |---|---|---|---|---|
/// | 0 | magic `copyrpc\0` | | 60 | `recv_ring_rkey` u32 |
/// | 8 | version u16 | | 64 | `recv_ring_addr` u64 |
/// | 10 | size of the record u16 | | 72 | `ring_size` u64 |
/// | 12 | `device` u8, zero u8 | | 80 | `published_addr` u64 |
/// | 14 | `mtu` u16 | | 88 | `published_rkey` u32 |
/// | 16 | `fabric` u64 | | 92 | `batches` u32 |
/// | 24 | `epoch` u64 | | 96 | `initial_credit` u64 |
/// | 32 | `gid` 16 B | | 104 | largest padded message u64 |
/// | 48 | `lid` u16, zero u16 | | 112 | largest internal allowance u64 |
/// | 52 | `qpn` u32 | | 120 | zero u64 |
/// | 56 | `psn` u32 | | | |
///
/// The two limits follow from the ring size; they are in the record so that ends with different
/// rules refuse each other instead of deadlocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeRecord {
    /// Kind of device.
    pub device: Device,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu: u16,
    /// Identity of the fabric; only equal ones connect.
    pub fabric: u64,
    /// Incarnation of the device, for kinds that have one, else 0.
    pub epoch: u64,
    /// Global identifier of the port; zero where there is none.
    pub gid: [u8; 16],
    /// Local identifier of the port.
    pub lid: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// First packet sequence number, 24 bits.
    pub psn: u32,
    /// Key of the receive ring.
    pub recv_ring_rkey: u32,
    /// Address of the receive ring.
    pub recv_ring_addr: u64,
    /// Size of the receive ring, and of the send ring too.
    pub ring_size: RingSize,
    /// Address of the published record, 32 bytes.
    pub published_addr: u64,
    /// Key of the published record.
    pub published_rkey: u32,
    /// Batches the peer may have sent and not been told the receipt of, at least 1.
    pub batches: u32,
    /// Credit in bytes the peer starts with.
    pub initial_credit: u64,
}

/// A record that is damaged, or two endpoints that cannot connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ExchangeError {
    /// The bytes are no record.
    #[error("not a copyrpc exchange record")]
    Magic,
    /// The peer speaks another version.
    #[error("exchange record version {0}, this end speaks {EXCHANGE_VERSION}: use equal releases")]
    Version(u16),
    /// A number outside its range.
    #[error("{field} is {value} in the exchange record, legal is {legal}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// What it holds.
        value: u64,
        /// What it may hold.
        legal: &'static str,
    },
    /// One end is software, the other hardware.
    #[error("this end is {local:?}, the peer {remote:?}: both must use the same kind of device")]
    Device {
        /// Kind of this end.
        local: Device,
        /// Kind of the peer.
        remote: Device,
    },
    /// The ends are on fabrics that do not reach each other.
    #[error("this end is on fabric {local:#x}, the peer on {remote:#x}")]
    Fabric {
        /// Fabric of this end.
        local: u64,
        /// Fabric of the peer.
        remote: u64,
    },
    /// The ring sizes differ.
    #[error("ring size {local} here, {remote} at the peer: they must be equal")]
    RingSize {
        /// Ring bytes of this end.
        local: u64,
        /// Ring bytes of the peer.
        remote: u64,
    },
    /// The path MTUs differ.
    #[error("MTU {local} here, {remote} at the peer: they must be equal")]
    Mtu {
        /// MTU of this end.
        local: u16,
        /// MTU of the peer.
        remote: u16,
    },
}

impl ExchangeRecord {
    /// The record's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; EXCHANGE_RECORD_SIZE] {
        let mut bytes = [0; EXCHANGE_RECORD_SIZE];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(8, &EXCHANGE_VERSION.to_le_bytes());
        put(10, &(EXCHANGE_RECORD_SIZE as u16).to_le_bytes());
        put(12, &[self.device as u8]);
        put(14, &self.mtu.to_le_bytes());
        put(16, &self.fabric.to_le_bytes());
        put(24, &self.epoch.to_le_bytes());
        put(32, &self.gid);
        put(48, &self.lid.to_le_bytes());
        put(52, &self.qpn.to_le_bytes());
        put(56, &self.psn.to_le_bytes());
        put(60, &self.recv_ring_rkey.to_le_bytes());
        put(64, &self.recv_ring_addr.to_le_bytes());
        put(72, &self.ring_size.bytes().to_le_bytes());
        put(80, &self.published_addr.to_le_bytes());
        put(88, &self.published_rkey.to_le_bytes());
        put(92, &self.batches.to_le_bytes());
        put(96, &self.initial_credit.to_le_bytes());
        put(104, &self.ring_size.max_message().to_le_bytes());
        put(112, &self.ring_size.max_internal_allowance().to_le_bytes());
        bytes
    }

    /// Reads and checks a peer's record.
    ///
    /// # Errors
    /// [`ExchangeError`] naming the first field that cannot be used.
    pub fn decode(bytes: &[u8; EXCHANGE_RECORD_SIZE]) -> Result<Self, ExchangeError> {
        if field::<8>(bytes, 0) != MAGIC {
            return Err(ExchangeError::Magic);
        }
        let version = u16::from_le_bytes(field(bytes, 8));
        if version != EXCHANGE_VERSION {
            return Err(ExchangeError::Version(version));
        }
        let u16_at = |at| u16::from_le_bytes(field(bytes, at));
        let u32_at = |at| u32::from_le_bytes(field(bytes, at));
        let u64_at = |at| u64::from_le_bytes(field(bytes, at));
        require("size", u16_at(10), "128", |size| size == EXCHANGE_RECORD_SIZE as u64)?;
        let reserved = u64::from(bytes[13]) | u64::from(u16_at(50)) | u64_at(120);
        require("reserved", reserved, "0", |reserved| reserved == 0)?;
        let device = match bytes[12] {
            1 => Device::Soft,
            2 => Device::Hardware,
            other => return Err(illegal("device", other, "1 (soft) or 2 (hardware)")),
        };
        let ring_size =
            RingSize::for_connection(u64_at(72)).map_err(|_| illegal("ring size", u64_at(72), "a power of two, 4096..=268435456"))?;
        let record = Self {
            device,
            mtu: u16_at(14),
            fabric: u64_at(16),
            epoch: u64_at(24),
            gid: field(bytes, 32),
            lid: u16_at(48),
            qpn: u32_at(52),
            psn: u32_at(56),
            recv_ring_rkey: u32_at(60),
            recv_ring_addr: u64_at(64),
            ring_size,
            published_addr: u64_at(80),
            published_rkey: u32_at(88),
            batches: u32_at(92),
            initial_credit: u64_at(96),
        };
        record.check_numbers()?;
        require("largest message", u64_at(104), "1/8 ring", |limit| limit == ring_size.max_message())?;
        require("largest allowance", u64_at(112), "3/16 ring", |limit| limit == ring_size.max_internal_allowance())?;
        Ok(record)
    }

    fn check_numbers(&self) -> Result<(), ExchangeError> {
        let ring_bytes = self.ring_size.bytes();
        require("MTU", self.mtu, "256, 512, 1024, 2048 or 4096", |mtu| mtu.is_power_of_two() && (256..=4096).contains(&mtu))?;
        require("QPN", self.qpn, "0..2^24", |qpn| qpn <= u64::from(MAX_24_BIT))?;
        require("PSN", self.psn, "0..2^24", |psn| psn <= u64::from(MAX_24_BIT))?;
        require("receive ring address", self.recv_ring_addr, "an address with a whole ring above it", |addr| {
            addr != 0 && addr.checked_add(ring_bytes).is_some()
        })?;
        require("published record address", self.published_addr, "a multiple of 8, not 0", |addr| addr != 0 && addr % 8 == 0)?;
        require("batches", self.batches, "1 or more", |batches| batches > 0)?;
        require("initial credit", self.initial_credit, "a multiple of 32 up to a quarter ring", |credit| {
            credit <= self.ring_size.max_reservation() && credit % ALIGNMENT == 0
        })
    }

    /// Whether this endpoint and that of `remote` can be connected.
    ///
    /// # Errors
    /// [`ExchangeError`] naming the difference, or the number of `remote` that is out of its range: it need not come from
    /// [`ExchangeRecord::decode`]. Nothing is adjusted.
    pub fn check_peer(&self, remote: &Self) -> Result<(), ExchangeError> {
        remote.check_numbers()?;
        if self.device != remote.device {
            return Err(ExchangeError::Device { local: self.device, remote: remote.device });
        }
        if self.fabric != remote.fabric {
            return Err(ExchangeError::Fabric { local: self.fabric, remote: remote.fabric });
        }
        if self.mtu != remote.mtu {
            return Err(ExchangeError::Mtu { local: self.mtu, remote: remote.mtu });
        }
        if self.ring_size != remote.ring_size {
            return Err(ExchangeError::RingSize { local: self.ring_size.bytes(), remote: remote.ring_size.bytes() });
        }
        Ok(())
    }
}

fn field<const N: usize>(bytes: &[u8; EXCHANGE_RECORD_SIZE], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

fn illegal(field: &'static str, value: impl Into<u64>, legal: &'static str) -> ExchangeError {
    ExchangeError::Field { field, value: value.into(), legal }
}

fn require(
    field: &'static str,
    value: impl Into<u64>,
    legal: &'static str,
    is_legal: impl FnOnce(u64) -> bool,
) -> Result<(), ExchangeError> {
    let value = value.into();
    if is_legal(value) { Ok(()) } else { Err(illegal(field, value, legal)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> ExchangeRecord {
        ExchangeRecord {
            device: Device::Soft,
            mtu: 4096,
            fabric: 0x0102_0304_0506_0708,
            epoch: 0x1112_1314_1516_1718,
            gid: *b"0123456789abcdef",
            lid: 0x2122,
            qpn: 0x31_3233,
            psn: 0x41_4243,
            recv_ring_rkey: 0x5152_5354,
            recv_ring_addr: 0x6162_6364_6566_6768,
            ring_size: RingSize::new(1 << 20).unwrap(),
            published_addr: 0x7172_7374_7576_7778,
            published_rkey: 0x8182_8384,
            batches: 0x9192_9394,
            initial_credit: 0x4_0000,
        }
    }

    #[rustfmt::skip]
    const GOLDEN: [u8; EXCHANGE_RECORD_SIZE] = [
        b'c', b'o', b'p', b'y', b'r', b'p', b'c', 0,
        1, 0, 128, 0, 1, 0, 0x00, 0x10, // version, size, device, zero, MTU
        8, 7, 6, 5, 4, 3, 2, 1,
        0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
        b'0', b'1', b'2', b'3', b'4', b'5', b'6', b'7',
        b'8', b'9', b'a', b'b', b'c', b'd', b'e', b'f',
        0x22, 0x21, 0, 0, 0x33, 0x32, 0x31, 0, // LID, zero, QPN
        0x43, 0x42, 0x41, 0, 0x54, 0x53, 0x52, 0x51, // PSN, ring rkey
        0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61,
        0, 0, 0x10, 0, 0, 0, 0, 0, // ring size
        0x78, 0x77, 0x76, 0x75, 0x74, 0x73, 0x72, 0x71,
        0x84, 0x83, 0x82, 0x81, 0x94, 0x93, 0x92, 0x91, // record rkey, batches
        0, 0, 4, 0, 0, 0, 0, 0, // initial credit
        0, 0, 2, 0, 0, 0, 0, 0, // 1/8 ring
        0, 0, 3, 0, 0, 0, 0, 0, // 3/16 ring
        0, 0, 0, 0, 0, 0, 0, 0,
    ];

    #[test]
    fn record_has_the_documented_bytes() {
        assert_eq!(record().encode(), GOLDEN);
        assert_eq!(ExchangeRecord::decode(&GOLDEN), Ok(record()));
    }

    #[test]
    fn each_illegal_number_is_refused_by_name() {
        let cases: [(usize, &[u8], &str); 12] = [
            (10, &[127], "size"),
            (12, &[3], "device"),
            (13, &[1], "reserved"),
            (14, &[0, 0x20], "MTU"),
            (50, &[1], "reserved"),
            (55, &[1], "QPN"),
            (59, &[1], "PSN"),
            (64, &[0xff; 8], "receive ring address"),
            (72, &[1], "ring size"),
            (80, &[1], "published record address"),
            (92, &[0; 4], "batches"),
            (96, &[32], "initial credit"),
        ];
        for (at, patch, name) in cases {
            let mut bytes = GOLDEN;
            bytes[at..at + patch.len()].copy_from_slice(patch);
            match ExchangeRecord::decode(&bytes) {
                Err(ExchangeError::Field { field, .. }) => assert_eq!(field, name),
                other => panic!("{name} at {at}: {other:?}"),
            }
        }
        for limit in [104, 112] {
            let mut bytes = GOLDEN;
            bytes[limit] = 32;
            assert!(ExchangeRecord::decode(&bytes).is_err());
        }
    }

    #[test]
    fn rings_below_the_public_minimum_are_refused() {
        let mut small = record();
        small.ring_size = RingSize::new(2 << 10).unwrap();
        small.initial_credit = 0;
        assert!(ExchangeRecord::decode(&small.encode()).is_err());
    }

    #[test]
    fn other_bytes_and_other_versions_are_refused() {
        let mut bytes = GOLDEN;
        bytes[0] = b'C';
        assert_eq!(ExchangeRecord::decode(&bytes), Err(ExchangeError::Magic));
        let mut bytes = GOLDEN;
        bytes[8] = 2;
        let error = ExchangeRecord::decode(&bytes);
        assert_eq!(error, Err(ExchangeError::Version(2)));
    }

    #[test]
    fn unequal_endpoints_refuse_each_other() {
        let local = record();
        assert_eq!(local.check_peer(&record()), Ok(()));
        let mut other = record();
        other.recv_ring_addr = u64::MAX - 4095;
        assert!(matches!(local.check_peer(&other), Err(ExchangeError::Field { field: "receive ring address", .. })));
        let mut other = record();
        other.device = Device::Hardware;
        assert!(matches!(local.check_peer(&other), Err(ExchangeError::Device { .. })));
        let mut other = record();
        other.fabric += 1;
        assert!(matches!(local.check_peer(&other), Err(ExchangeError::Fabric { .. })));
        let mut other = record();
        other.mtu = 1024;
        assert!(matches!(local.check_peer(&other), Err(ExchangeError::Mtu { .. })));
        let mut other = record();
        other.ring_size = RingSize::new(2 << 20).unwrap();
        assert!(matches!(local.check_peer(&other), Err(ExchangeError::RingSize { .. })));
    }
}
