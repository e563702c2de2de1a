//! The record that two endpoints exchange, by any channel, before they connect.
//!
//! The record has a fixed size of 128 bytes, so that a transport may send it without framing. A
//! record comes from another process: [`ExchangeRecord::decode`] refuses every number that the
//! protocol cannot work with, and [`ExchangeRecord::check_peer`] every pair of endpoints that
//! cannot connect.

use copyrpc_calls::OptionError;
use mlx5::QpAddress;
use mlx5_rendezvous::record::{Kind, field, put, require, u32_at, u64_at};
pub use mlx5_rendezvous::record::{RecordError, Refusal};

use crate::error::SetupError;
use crate::ring::RingSize;
use crate::wire::ALIGNMENT;

/// Bytes of an encoded record.
pub const EXCHANGE_RECORD_SIZE: usize = 128;
/// Version of the record and of the wire formats that follow it.
pub const EXCHANGE_VERSION: u16 = 4;

const ADDRESS_AT: usize = 16;
pub(crate) const KIND: Kind = Kind {
    name: "copyrpc exchange",
    magic: *b"copyrpc\0",
    version: EXCHANGE_VERSION,
};

/// The properties of an endpoint that its peer needs.
///
/// | offset | field | | offset | field |
/// |---|---|---|---|---|
/// | 0 | magic `copyrpc\0` | | 72 | `ring_size` u64 |
/// | 8 | version u16 | | 80 | `published_addr` u64 |
/// | 10 | size of the record u16 | | 88 | `initial_credit` u64 |
/// | 12 | 0, or a [`Refusal`] u32 | | 96 | `batches` u32 |
/// | 16 | `address`, as [`QpAddress::to_bytes`] | | 100 | `activity_rkey` u32 |
/// | 56 | `recv_ring_rkey` u32 | | 104 | largest padded message u64 |
/// | 60 | `published_rkey` u32 | | 112 | largest internal allowance u64 |
/// | 64 | `recv_ring_addr` u64 | | 120 | `activity_addr` u64 |
///
/// The two limits follow from the ring size. They are in the record so that ends with different
/// rules refuse each other instead of deadlocking. No field names the fabric. On the software HCA,
/// `address` has an epoch, a number that only one device has, so a connection to a device of
/// another fabric fails; on hardware, `address` has the LID and the GID of the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias("LocalEndpointInfo", "RemoteEndpointInfo"))]
pub struct ExchangeRecord {
    /// Kind of device, and address of the queue pair. Ends with unequal MTUs connect: an MTU is the
    /// maximum size of a packet, so the smaller one satisfies both ends, and both compute the same
    /// ([`Endpoint::path_mtu`](crate::Endpoint::path_mtu)).
    pub address: QpAddress,
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
    /// Address of the word that shows whether the context runs a handler, 8 bytes.
    pub activity_addr: u64,
    /// Key of the word at `activity_addr`.
    pub activity_rkey: u32,
    /// Maximum number of the peer's batches that this end has not yet reported as received; at
    /// least 1.
    pub batches: u32,
    /// Credit in bytes the peer starts with.
    pub initial_credit: u64,
}

impl ExchangeRecord {
    /// Returns the record's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; EXCHANGE_RECORD_SIZE] {
        let mut bytes = KIND.begin();
        let mut put = |at: usize, field: &[u8]| put(&mut bytes, at, field);
        put(ADDRESS_AT, &self.address.to_bytes());
        put(56, &self.recv_ring_rkey.to_le_bytes());
        put(60, &self.published_rkey.to_le_bytes());
        put(64, &self.recv_ring_addr.to_le_bytes());
        put(72, &self.ring_size.bytes().to_le_bytes());
        put(80, &self.published_addr.to_le_bytes());
        put(88, &self.initial_credit.to_le_bytes());
        put(96, &self.batches.to_le_bytes());
        put(100, &self.activity_rkey.to_le_bytes());
        put(104, &self.ring_size.max_message().to_le_bytes());
        put(112, &self.ring_size.max_internal_allowance().to_le_bytes());
        put(120, &self.activity_addr.to_le_bytes());
        bytes
    }

    /// Reads and checks a peer's record.
    ///
    /// # Errors
    /// [`SetupError`] naming the first field that cannot be used.
    pub fn decode(bytes: &[u8; EXCHANGE_RECORD_SIZE]) -> Result<Self, SetupError> {
        KIND.check(bytes)?;
        let (u32_at, u64_at) = (|at| u32_at(bytes, at), |at| u64_at(bytes, at));
        let address =
            QpAddress::from_bytes(&field(bytes, ADDRESS_AT)).ok_or(SetupError::Address)?;
        let illegal = RecordError::Field {
            field: "ring size",
            value: u64_at(72),
            legal: "a power of two, 4096..=268435456",
        };
        let ring_size = RingSize::for_connection(u64_at(72)).ok_or(illegal)?;
        let record = Self {
            address,
            recv_ring_rkey: u32_at(56),
            published_rkey: u32_at(60),
            recv_ring_addr: u64_at(64),
            ring_size,
            published_addr: u64_at(80),
            initial_credit: u64_at(88),
            activity_addr: u64_at(120),
            activity_rkey: u32_at(100),
            batches: u32_at(96),
        };
        record.check_numbers()?;
        require("largest message", u64_at(104), "1/8 ring", |limit| {
            limit == ring_size.max_message()
        })?;
        require("largest allowance", u64_at(112), "3/16 ring", |limit| {
            limit == ring_size.max_internal_allowance()
        })?;
        Ok(record)
    }

    /// Returns the bytes to send instead of a record, to a peer that is refused.
    #[must_use]
    pub fn refuse(refusal: Refusal) -> [u8; EXCHANGE_RECORD_SIZE] {
        KIND.refuse(refusal)
    }

    fn check_numbers(&self) -> Result<(), SetupError> {
        let ring_bytes = self.ring_size.bytes();
        if QpAddress::from_bytes(&self.address.to_bytes()) != Some(self.address) {
            return Err(SetupError::Address);
        }
        require(
            "receive ring address",
            self.recv_ring_addr,
            "an address with a whole ring above it",
            |addr| addr != 0 && addr.checked_add(ring_bytes).is_some(),
        )?;
        for (field, addr) in [
            ("published record address", self.published_addr),
            ("activity address", self.activity_addr),
        ] {
            require(field, addr, "a multiple of 8, not 0", |addr| {
                addr != 0 && addr % 8 == 0
            })?;
        }
        require("batches", self.batches, "1 or more", |batches| batches > 0)?;
        require(
            "initial credit",
            self.initial_credit,
            "a multiple of 32 up to a quarter ring",
            |credit| credit <= self.ring_size.max_reservation() && credit % ALIGNMENT == 0,
        )?;
        Ok(())
    }

    /// Checks whether this endpoint can be connected with the endpoint of `remote`.
    ///
    /// # Errors
    /// [`SetupError`] naming the difference, or the number of `remote` that is out of its range:
    /// `remote` need not come from [`ExchangeRecord::decode`]. Nothing is adjusted.
    pub fn check_peer(&self, remote: &Self) -> Result<(), SetupError> {
        remote.check_numbers()?;
        let [local, other] = [self, remote].map(|record| record.address.kind);
        if local != other {
            let remote = other;
            return Err(mlx5::ConnectError::DifferentKinds { local, remote }.into());
        }
        if self.ring_size != remote.ring_size {
            let legal = format!("{}, the peer's value", remote.ring_size.bytes());
            return Err(OptionError::new("ring_size", self.ring_size.bytes(), legal).into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use mlx5::DeviceKind;

    use super::*;

    fn record() -> ExchangeRecord {
        ExchangeRecord {
            address: QpAddress {
                kind: DeviceKind::Soft,
                mtu: 4096,
                lid: 0x2122,
                port: 0,
                qpn: 0x31_3233,
                psn: 0x41_4243,
                epoch: 0x1112_1314_1516_1718,
                gid: *b"0123456789abcdef",
            },
            recv_ring_rkey: 0x5152_5354,
            recv_ring_addr: 0x6162_6364_6566_6768,
            ring_size: RingSize::new(1 << 20).unwrap(),
            published_addr: 0x7172_7374_7576_7778,
            published_rkey: 0x8182_8384,
            activity_addr: 0xb1b2_b3b4_b5b6_b7b8,
            activity_rkey: 0xa1a2_a3a4,
            batches: 0x9192_9394,
            initial_credit: 0x4_0000,
        }
    }

    #[rustfmt::skip]
    const GOLDEN: [u8; EXCHANGE_RECORD_SIZE] = [
        b'c', b'o', b'p', b'y', b'r', b'p', b'c', 0,
        4, 0, 128, 0, 0, 0, 0, 0, // version, size, no refusal
        1, 0, 0x00, 0x10, 0x22, 0x21, 0, 0, // kind, zero, MTU, LID, zero
        0x33, 0x32, 0x31, 0, 0x43, 0x42, 0x41, 0, // QPN, PSN
        0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
        b'0', b'1', b'2', b'3', b'4', b'5', b'6', b'7',
        b'8', b'9', b'a', b'b', b'c', b'd', b'e', b'f',
        0x54, 0x53, 0x52, 0x51, 0x84, 0x83, 0x82, 0x81, // ring rkey, record rkey
        0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61,
        0, 0, 0x10, 0, 0, 0, 0, 0, // ring size
        0x78, 0x77, 0x76, 0x75, 0x74, 0x73, 0x72, 0x71,
        0, 0, 4, 0, 0, 0, 0, 0, // initial credit
        0x94, 0x93, 0x92, 0x91, 0xa4, 0xa3, 0xa2, 0xa1, // batches, activity rkey
        0, 0, 2, 0, 0, 0, 0, 0, // 1/8 ring
        0, 0, 3, 0, 0, 0, 0, 0, // 3/16 ring
        0xb8, 0xb7, 0xb6, 0xb5, 0xb4, 0xb3, 0xb2, 0xb1,
    ];

    #[test]
    fn record_has_the_documented_bytes() {
        assert_eq!(record().encode(), GOLDEN);
        assert_eq!(ExchangeRecord::decode(&GOLDEN).unwrap(), record());
    }

    #[test]
    fn each_illegal_number_is_refused_by_name() {
        let cases: [(usize, &[u8], &str); 8] = [
            (10, &[127], "size"),
            (12, &[6], "refusal"),
            (64, &[0xff; 8], "receive ring address"),
            (72, &[1], "ring size"),
            (80, &[1], "published record address"),
            (88, &[32], "initial credit"),
            (96, &[0; 4], "batches"),
            (120, &[1], "activity address"),
        ];
        for (at, patch, name) in cases {
            let mut bytes = GOLDEN;
            bytes[at..at + patch.len()].copy_from_slice(patch);
            match ExchangeRecord::decode(&bytes) {
                Err(SetupError::Record(RecordError::Field { field, .. })) => {
                    assert_eq!(field, name)
                }
                other => panic!("{name} at {at}: {other:?}"),
            }
        }
        // Kind, MTU, the upper bytes of QPN and PSN.
        for (at, value) in [(16, 3), (19, 0x20), (27, 1), (31, 1)] {
            let mut bytes = GOLDEN;
            bytes[at] = value;
            assert!(
                matches!(ExchangeRecord::decode(&bytes), Err(SetupError::Address)),
                "byte {at}"
            );
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

    fn refused(bytes: &[u8; EXCHANGE_RECORD_SIZE]) -> RecordError {
        match ExchangeRecord::decode(bytes) {
            Err(SetupError::Record(error)) => error,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn other_bytes_and_other_versions_are_refused() {
        let mut bytes = GOLDEN;
        bytes[0] = b'C';
        assert_eq!(
            refused(&bytes),
            RecordError::Magic {
                name: "copyrpc exchange",
                found: field(&bytes, 0)
            }
        );
        let mut bytes = GOLDEN;
        bytes[8] = 1;
        assert_eq!(
            refused(&bytes),
            RecordError::Version {
                name: "copyrpc exchange",
                version: 1,
                known: EXCHANGE_VERSION
            }
        );
    }

    #[test]
    fn a_refusal_has_the_documented_bytes_and_is_no_record() {
        for (refusal, code) in [(Refusal::Full, 1), (Refusal::Failed, 2)] {
            let mut golden = [0; EXCHANGE_RECORD_SIZE];
            golden[..12].copy_from_slice(&GOLDEN[..12]);
            golden[12] = code;
            assert_eq!(ExchangeRecord::refuse(refusal), golden);
            assert_eq!(refused(&golden), RecordError::Refused(refusal));
        }
    }

    #[test]
    fn unequal_endpoints_refuse_each_other() {
        let local = record();
        local.check_peer(&record()).unwrap();
        let mut other = record();
        other.recv_ring_addr = u64::MAX - 4095;
        assert!(matches!(
            local.check_peer(&other),
            Err(SetupError::Record(RecordError::Field {
                field: "receive ring address",
                ..
            }))
        ));
        let mut other = record();
        other.address.kind = DeviceKind::Hardware;
        assert!(matches!(
            local.check_peer(&other),
            Err(SetupError::Connect(
                mlx5::ConnectError::DifferentKinds { .. }
            ))
        ));
        let mut other = record();
        other.address.qpn = 1 << 24;
        assert!(matches!(local.check_peer(&other), Err(SetupError::Address)));
        let mut other = record();
        other.address.mtu = 1024;
        local
            .check_peer(&other)
            .expect("the path takes the smaller MTU");
        let mut other = record();
        other.ring_size = RingSize::new(2 << 20).unwrap();
        assert!(matches!(
            local.check_peer(&other),
            Err(SetupError::Option(OptionError {
                option: "ring_size",
                ..
            }))
        ));
    }
}
