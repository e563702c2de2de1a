//! Records of a fixed size, little-endian, that begin with 16 bytes of the same form: magic (8),
//! version u16, size of the record u16, and a [`Refusal`] u32 or 0.

use thiserror::Error;

/// Bytes before a record's own fields.
pub const HEAD_BYTES: usize = 16;

const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const REFUSAL_AT: usize = 12;

/// The identity of one kind of record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Name, for errors.
    pub name: &'static str,
    /// The first eight bytes.
    pub magic: [u8; 8],
    /// Version, which changes with every change of the fields.
    pub version: u16,
}

/// The reason why there is no connection. It is sent in place of a record, in a head that is
/// followed by zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The peer has no room for another peer.
    #[error("the server has as many clients as it has room for")]
    Full = 1,
    /// Another error, which the refusing end reports to its own caller.
    #[error("no connection could be made at the server, which reports the reason")]
    Failed = 2,
    /// The server wants a secret, and the client has none.
    #[error("the server wants a secret (ClientOptions::secret)")]
    Secret = 3,
    /// The client has a secret, and the server has none to prove.
    #[error("the server has no secret (ServerOptions::secret)")]
    NoSecret = 4,
    /// The client's secret is not the server's.
    #[error("the server has another secret")]
    WrongSecret = 5,
}

impl Refusal {
    const ALL: [Self; 5] = [
        Self::Full,
        Self::Failed,
        Self::Secret,
        Self::NoSecret,
        Self::WrongSecret,
    ];
}

/// Bytes that are not a record of the expected kind, or a record that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The bytes are not a record of this kind: the peer speaks another protocol.
    #[error("not a {name} record, but \"{}\": another program is at this address", found.escape_ascii())]
    Magic {
        /// The kind of record.
        name: &'static str,
        /// The first bytes.
        found: [u8; 8],
    },
    /// A record of another version.
    #[error("{name} record version {version}, this end speaks {known}: use equal releases")]
    Version {
        /// The kind of record.
        name: &'static str,
        /// Version of the record.
        version: u16,
        /// Version of this end.
        known: u16,
    },
    /// The peer refuses.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The server accepted the client's proof, and did not prove that it knows the secret: it is
    /// not the server that the client wants.
    #[error(
        "the server did not prove that it knows the secret: another program is at this address"
    )]
    Unproven,
    /// A field is outside its range.
    #[error("{field} is {value} in the record, legal is {legal}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        value: u64,
        /// Legal range.
        legal: &'static str,
    },
}

impl RecordError {
    /// Returns whether a later exchange may succeed without a change of either end: the peer had no
    /// room, or an error of its own.
    #[must_use]
    pub const fn may_pass(&self) -> bool {
        matches!(self, Self::Refused(Refusal::Full | Refusal::Failed))
    }
}

impl Kind {
    /// Makes a record whose own fields are 0.
    #[must_use]
    pub fn begin<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        put(&mut bytes, 0, &self.magic);
        put(&mut bytes, VERSION_AT, &self.version.to_le_bytes());
        put(&mut bytes, SIZE_AT, &(N as u16).to_le_bytes());
        bytes
    }

    /// Makes the bytes to send in place of a record.
    #[must_use]
    pub fn refuse<const N: usize>(&self, refusal: Refusal) -> [u8; N] {
        let mut bytes = self.begin();
        put(&mut bytes, REFUSAL_AT, &(refusal as u32).to_le_bytes());
        bytes
    }

    /// Checks the head of a record.
    ///
    /// # Errors
    /// See [`RecordError`]; a refusal is an error too.
    pub fn check<const N: usize>(&self, bytes: &[u8; N]) -> Result<(), RecordError> {
        self.check_magic(bytes)?;
        let version = u16::from_le_bytes(field(bytes, VERSION_AT));
        if version != self.version {
            return Err(RecordError::Version {
                name: self.name,
                version,
                known: self.version,
            });
        }
        require(
            "size",
            u16::from_le_bytes(field(bytes, SIZE_AT)),
            "that of its kind",
            |size| size == N as u64,
        )?;
        match u32::from_le_bytes(field(bytes, REFUSAL_AT)) {
            0 => Ok(()),
            code => match Refusal::ALL
                .into_iter()
                .find(|refusal| *refusal as u32 == code)
            {
                Some(refusal) => Err(RecordError::Refused(refusal)),
                None => require("refusal", code, "0..=5", |_| false),
            },
        }
    }

    /// Checks the first bytes of a record, as soon as there are eight.
    pub(crate) fn check_magic(&self, bytes: &[u8]) -> Result<(), RecordError> {
        match bytes.first_chunk() {
            Some(found) if *found != self.magic => Err(RecordError::Magic {
                name: self.name,
                found: *found,
            }),
            _ => Ok(()),
        }
    }
}

/// Writes a field, which must lie inside the record.
#[inline(always)]
pub fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

/// Returns the bytes of a field, which must lie inside the record.
#[must_use]
#[inline(always)]
pub fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}

/// Returns the number in a field of 4 bytes.
#[must_use]
#[inline(always)]
pub fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_le_bytes(field(bytes, at))
}

/// Returns the number in a field of 8 bytes.
#[must_use]
#[inline(always)]
pub fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from_le_bytes(field(bytes, at))
}

/// Refuses a value that is not legal.
///
/// # Errors
/// [`RecordError::Field`].
pub fn require(
    field: &'static str,
    value: impl Into<u64>,
    legal: &'static str,
    is_legal: impl FnOnce(u64) -> bool,
) -> Result<(), RecordError> {
    let value = value.into();
    if is_legal(value) {
        Ok(())
    } else {
        Err(RecordError::Field {
            field,
            value,
            legal,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        name: "test",
        magic: *b"testREC\0",
        version: 0x0302,
    };

    #[test]
    fn the_head_has_the_documented_bytes() {
        let golden = *b"testREC\0\x02\x03\x18\0\0\0\0\0\0\0\0\0\0\0\0\0";
        assert_eq!(KIND.begin::<24>(), golden);
        assert_eq!(KIND.check(&golden), Ok(()));
        for (refusal, code) in Refusal::ALL.into_iter().zip(1..) {
            let mut bytes = golden;
            bytes[12] = code;
            assert_eq!(KIND.refuse::<24>(refusal), bytes);
            assert_eq!(KIND.check(&bytes), Err(RecordError::Refused(refusal)));
        }
    }

    #[test]
    fn each_wrong_byte_of_the_head_is_refused_by_name() {
        let golden: [u8; 24] = KIND.begin();
        for at in 0..HEAD_BYTES {
            let mut bytes = golden;
            bytes[at] ^= 0x80;
            let error = KIND.check(&bytes).unwrap_err();
            let is_named = match error {
                RecordError::Magic { name: "test", .. } => at < 8,
                RecordError::Version {
                    name: "test",
                    known: 0x0302,
                    ..
                } => at == 8 || at == 9,
                RecordError::Field { field: "size", .. } => at == 10 || at == 11,
                RecordError::Field {
                    field: "refusal", ..
                } => at >= 12,
                _ => false,
            };
            assert!(is_named, "byte {at}: {error}");
        }
    }
}
