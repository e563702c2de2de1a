//! A secret that both ends know, and prove to each other before they exchange records: challenge
//! and response by HMAC-SHA256.
//!
//! | record, 48 bytes | from | fields |
//! |---|---|---|
//! | challenge | client | 32 random bytes |
//! | challenge | server | 32 random bytes, or a refusal |
//! | proof | client | HMAC-SHA256 of `client` and both challenges, the client's first |
//! | proof | server | the same of `server`, or a refusal |

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use crate::pieces::Incoming;
use crate::record::{HEAD_BYTES, Kind, RecordError, Refusal, field, put};
use crate::setup::SetupError;

const KIND: Kind = Kind {
    name: "secret",
    magic: *b"secretHS",
    version: 1,
};
const BYTES: usize = HEAD_BYTES + FIELD_BYTES;
const FIELD_BYTES: usize = 32;
/// Maximum number of bytes that are read from a peer that is refused.
const DRAINED_BYTES: usize = 4096;

type Field = [u8; FIELD_BYTES];

/// A secret that a server and its clients share: any bytes, best 32 random bytes, because a peer
/// that has seen a proof can try guesses offline.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

impl<T: Into<Arc<[u8]>>> From<T> for Secret {
    fn from(bytes: T) -> Self {
        Self(bytes.into())
    }
}

/// Formats the name of the type without the bytes.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Proves to the server at the other end of a stream that this client knows the secret, and
    /// checks that the server knows it. The exchange of records follows.
    ///
    /// # Errors
    /// The errors of the stream; [`RecordError`], with [`Refusal::NoSecret`] or
    /// [`Refusal::WrongSecret`] if the server refuses, and [`RecordError::Unproven`] if it does not
    /// know the secret.
    pub fn prove(&self, stream: &mut (impl Read + Write)) -> Result<(), SetupError> {
        let ours = challenge()?;
        stream.write_all(&record(&ours))?;
        let theirs = received(&KIND.receive(stream)?)?;
        stream.write_all(&record(
            &self
                .mac(b"client", &ours, &theirs)
                .finalize()
                .into_bytes()
                .into(),
        ))?;
        let proof = received(&KIND.receive(stream)?)?;
        self.mac(b"server", &ours, &theirs)
            .verify_slice(&proof)
            .map_err(|_| RecordError::Unproven.into())
    }

    /// Returns the MAC of the proof of `end`, to be finalized or compared.
    fn mac(&self, end: &[u8; 6], client: &Field, server: &Field) -> Hmac<Sha256> {
        // HMAC takes keys of all lengths; the empty key is for an error that cannot occur.
        let mac = Hmac::<Sha256>::new_from_slice(&self.0)
            .unwrap_or_else(|_| Hmac::new(&Default::default()));
        mac.chain_update(end)
            .chain_update(client)
            .chain_update(server)
    }
}

/// The progress of a peer's proof, before the exchange of records.
#[derive(Debug, Default)]
pub(crate) enum Proof {
    /// Nothing has arrived.
    #[default]
    Silent,
    Challenge(Incoming<BYTES>),
    /// Both challenges were sent.
    Response {
        client: Field,
        server: Field,
        incoming: Incoming<BYTES>,
    },
    /// The peer has proved the secret, or needs none.
    Done,
}

impl Proof {
    /// Proceeds as far as the socket permits. Returns whether the exchange of records may begin.
    /// `refusal` is the record for a peer that offers no proof.
    ///
    /// # Errors
    /// The errors of the socket, and refusals, which were sent to the peer.
    pub(crate) fn advance(
        &mut self,
        stream: &mut TcpStream,
        secret: Option<&Secret>,
        refusal: &[u8],
    ) -> io::Result<bool> {
        loop {
            match self {
                Self::Done => return Ok(true),
                Self::Silent => {
                    let mut magic = KIND.magic;
                    let count = match stream.peek(&mut magic) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            return Ok(false);
                        }
                        peeked => peeked?,
                    };
                    *self = match (secret, magic == KIND.magic) {
                        (_, true) if count > 0 => Self::Challenge(Incoming::default()),
                        (Some(_), _) => return refuse(stream, refusal, Refusal::Secret),
                        _ => Self::Done,
                    };
                }
                Self::Challenge(incoming) => {
                    let Some(bytes) = incoming.advance(stream)? else {
                        return Ok(false);
                    };
                    let client = received(bytes).map_err(io::Error::other)?;
                    if secret.is_none() {
                        return refuse(
                            stream,
                            &KIND.refuse::<BYTES>(Refusal::NoSecret),
                            Refusal::NoSecret,
                        );
                    }
                    let server = challenge()?;
                    stream.write_all(&record(&server))?;
                    *self = Self::Response {
                        client,
                        server,
                        incoming: Incoming::default(),
                    };
                }
                Self::Response {
                    client,
                    server,
                    incoming,
                } => {
                    let Some(bytes) = incoming.advance(stream)? else {
                        return Ok(false);
                    };
                    let proof = received(bytes).map_err(io::Error::other)?;
                    let Some(secret) = secret.filter(|secret| {
                        secret
                            .mac(b"client", client, server)
                            .verify_slice(&proof)
                            .is_ok()
                    }) else {
                        return refuse(
                            stream,
                            &KIND.refuse::<BYTES>(Refusal::WrongSecret),
                            Refusal::WrongSecret,
                        );
                    };
                    stream.write_all(&record(
                        &secret
                            .mac(b"server", client, server)
                            .finalize()
                            .into_bytes()
                            .into(),
                    ))?;
                    *self = Self::Done;
                }
            }
        }
    }
}

/// Sends a refusal to a peer, and returns its reason as the error.
fn refuse(stream: &mut (impl Read + Write), record: &[u8], reason: Refusal) -> io::Result<bool> {
    // A peer that cannot take the record at once does not get it. A socket that is closed with
    // unread bytes is reset, and the peer may lose the record. One read takes everything that a
    // client has sent. There is no second read: another peer may send without end.
    let _sent = stream.write(record);
    let _unread = stream.read(&mut [0; DRAINED_BYTES]);
    Err(io::Error::other(reason))
}

fn record(value: &Field) -> [u8; BYTES] {
    let mut bytes = KIND.begin();
    put(&mut bytes, HEAD_BYTES, value);
    bytes
}

fn received(bytes: &[u8; BYTES]) -> Result<Field, RecordError> {
    KIND.check(bytes).map(|()| field(bytes, HEAD_BYTES))
}

fn challenge() -> io::Result<Field> {
    let mut bytes = [0; FIELD_BYTES];
    // One call returns all of the bytes, as they are not more than 256.
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first comparison, with test case 2 of RFC 4231, shows that the MAC is HMAC-SHA256. The
    /// second comparison shows that the MAC covers the end and the challenges, in this order.
    #[test]
    fn proofs_have_the_documented_bytes() {
        let secret = Secret::from(*b"Jefe");
        let mac = Hmac::<Sha256>::new_from_slice(&secret.0)
            .unwrap()
            .chain_update(b"what do ya want for nothing?");
        assert_eq!(
            mac.finalize().into_bytes()[..8],
            [0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e]
        );
        let whole = [&b"client"[..], &[1; 32], &[2; 32]].concat();
        let mac = Hmac::<Sha256>::new_from_slice(&secret.0)
            .unwrap()
            .chain_update(&whole);
        assert_eq!(
            secret
                .mac(b"client", &[1; 32], &[2; 32])
                .finalize()
                .into_bytes(),
            mac.finalize().into_bytes()
        );
        assert_eq!(format!("{secret:?}"), "Secret");
        assert_ne!(challenge().unwrap(), challenge().unwrap());
    }

    #[test]
    fn a_stranger_that_sends_without_end_is_refused_at_once() {
        struct Endless(usize);
        impl Read for Endless {
            fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
                self.0 += bytes.len();
                if self.0 < 1 << 20 {
                    Ok(bytes.len())
                } else {
                    Err(io::ErrorKind::WouldBlock.into())
                }
            }
        }
        impl Write for Endless {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                Ok(bytes.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut stranger = Endless(0);
        refuse(&mut stranger, &[], Refusal::Secret).unwrap_err();
        assert!(
            stranger.0 <= DRAINED_BYTES,
            "{} bytes were read",
            stranger.0
        );
    }

    /// A server that sends a client's own bytes back to it, as a relay would, proves nothing.
    #[test]
    fn a_server_that_reflects_the_client_is_found_out() {
        struct Mirror(Vec<u8>);
        impl Read for Mirror {
            fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
                let count = bytes.len().min(self.0.len());
                bytes[..count].copy_from_slice(&self.0[..count]);
                self.0.drain(..count);
                Ok(count)
            }
        }
        impl Write for Mirror {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.write(bytes)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let proved = Secret::from(*b"key").prove(&mut Mirror(Vec::new()));
        assert!(matches!(
            proved,
            Err(SetupError::Record(RecordError::Unproven))
        ));
    }
}
