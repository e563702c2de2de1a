//! The messages that the two ends of a connection, each an id (`struct rdma_cm_id`), send to each
//! other. A peer's bytes are checked here, before they are used.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::abi::MAX_RD_ATOMIC;
use crate::abi::cm::{ConnParam, SockAddr};
use crate::cm::machine::Kind;
use crate::options::errno::Errno;

/// Version of the message format, the first number of each message.
const VERSION: u32 = 0x636d_0002;

/// N of the longest packet that a queue pair sends, 128 B * 2^N: 4 KiB.
pub(crate) const LONGEST_PACKET: u32 = 5;

/// A message, in the byte order of the host: the peer is on the same host.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Message {
    version: u32,
    kind: u32,
    /// Reason of a rejection.
    pub(crate) reason: i32,
    /// First packet number that the sender expects.
    pub(crate) psn: u32,
    /// N of the longest packet that the sender can send and receive, 128 B * 2^N.
    pub(crate) mtu: u32,
    /// The addresses of a request.
    pub(crate) source: SockAddr,
    pub(crate) destination: SockAddr,
    pub(crate) param: ConnParam,
}

/// Returns the maximum length of the private data that a message carries (IBTA 12.6 and 12.11,
/// minus the part that contains the addresses).
pub(crate) const fn private_bytes(kind: Kind, is_datagram: bool) -> usize {
    match (kind, is_datagram) {
        (Kind::Request, false) => 56,
        (Kind::Request, true) => 180,
        (Kind::Reply, false) => 196,
        (Kind::Reply | Kind::Reject, true) => 136,
        (Kind::Reject, false) => 148,
        _ => 0,
    }
}

impl Message {
    /// Makes a message with the program's parameters.
    ///
    /// # Errors
    /// `EINVAL`: the private data is longer than a message of this kind carries.
    pub(crate) fn new(kind: Kind, is_datagram: bool, param: &ConnParam) -> Result<Self, Errno> {
        let len = usize::from(param.private_data_len);
        Errno(libc::EINVAL).when(len > private_bytes(kind, is_datagram))?;
        let mut message = Self {
            version: VERSION,
            kind: kind as u32,
            mtu: LONGEST_PACKET,
            param: *param,
            ..Self::new_zeroed()
        };
        let param = &mut message.param;
        param.private_data[len..].fill(0);
        param.qp_num &= (1 << 24) - 1;
        param.retry_count = param.retry_count.min(7);
        param.rnr_retry_count = param.rnr_retry_count.min(7);
        param.responder_resources = param.responder_resources.min(MAX_RD_ATOMIC as u8);
        param.initiator_depth = param.initiator_depth.min(MAX_RD_ATOMIC as u8);
        Ok(message)
    }

    /// Decodes a peer's message. Returns `None` if the bytes are not a message of this version, or
    /// if a number is out of range for a queue pair.
    pub(crate) fn parse(bytes: &[u8]) -> Option<(Kind, Self)> {
        let message = Self::read_from_bytes(bytes)
            .ok()
            .filter(|message| message.version == VERSION)?;
        let param = &message.param;
        let resources = param.responder_resources.max(param.initiator_depth);
        let is_legal = message.psn < 1 << 24
            && (1..=LONGEST_PACKET).contains(&message.mtu)
            && param.qp_num < 1 << 24
            && param.retry_count.max(param.rnr_retry_count) < 8
            && u32::from(resources) <= MAX_RD_ATOMIC;
        Kind::from_repr(message.kind)
            .filter(|_| is_legal)
            .map(|kind| (kind, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_fits_its_message_and_nothing_else_of_the_program_leaks() {
        let mut param = ConnParam {
            private_data: [7; 256],
            private_data_len: 56,
            ..ConnParam::new_zeroed()
        };
        let (kind, message) = Message::parse(
            Message::new(Kind::Request, false, &param)
                .unwrap()
                .as_bytes(),
        )
        .unwrap();
        assert_eq!(
            (
                kind,
                message.param.private_data[55],
                message.param.private_data[56]
            ),
            (Kind::Request, 7, 0)
        );
        param.private_data_len = 57;
        assert_eq!(
            Message::new(Kind::Request, false, &param).err(),
            Some(Errno(libc::EINVAL))
        );
    }

    #[test]
    fn what_no_peer_of_this_version_sends_is_refused() {
        let good = Message::new(Kind::Reply, false, &ConnParam::new_zeroed()).unwrap();
        let bytes = good.as_bytes();
        assert!(Message::parse(bytes).is_some());
        assert!(
            Message::parse(&bytes[1..]).is_none()
                && Message::parse(&[bytes, &[0]].concat()).is_none()
                && Message::parse(&[]).is_none()
        );
        let changed = |change: &dyn Fn(&mut Message)| {
            let mut message = good;
            change(&mut message);
            Message::parse(message.as_bytes()).is_none()
        };
        assert!(changed(&|message| message.version += 1));
        assert!(changed(&|message| message.kind = 99));
        assert!(changed(&|message| message.psn = 1 << 24));
        assert!(changed(&|message| message.mtu = 0));
        assert!(changed(&|message| message.mtu = 6));
        assert!(changed(&|message| message.param.qp_num = u32::MAX));
        assert!(changed(&|message| message.param.retry_count = 8));
        assert!(changed(&|message| message.param.rnr_retry_count = 8));
        assert!(changed(&|message| message.param.initiator_depth = 200));
    }
}
