//! Messages to and from other hosts: the messages of the InfiniBand Architecture Specification, in
//! place of [`Message`]. The gate adds what belongs to its own exchange: the numbers of the
//! connection and of the transaction, the GUID, and which message a rejection is for.

use std::net::IpAddr;

use mlx5_hca::gid_of;
use mlx5_hca::wire::roce::{CmKind, Field, IpAddresses, Mad, field};
use zerocopy::FromZeros;

use crate::abi::cm::ConnParam;
use crate::cm::address;
use crate::cm::machine::Kind;
use crate::cm::message::{LONGEST_PACKET, Message, private_bytes};

/// N of the time within which this end answers, and expects an answer: 4.096 us * 2^N, with the
/// kernel's N.
const RESPONSE_TIMEOUT: u64 = 20;
/// Number of times that the peer may repeat a message, the same as the kernel's.
const RETRIES: u64 = 15;
/// The default partition key.
const PKEY: u64 = 0xffff;
/// The LID in messages between ports without LIDs (`IB_LID_PERMISSIVE`).
const NO_LID: u64 = 0xffff;
const HOPS: u64 = 64;

/// Returns the ID of the service at a port of a port space (annex A11).
pub(crate) fn service(space: u16, port: u16) -> u64 {
    u64::from(space) << 16 | u64::from(port)
}

/// Encodes a message about a service, with N of the sender's acknowledge timeout.
pub(crate) fn encode(
    kind: Kind,
    is_datagram: bool,
    service: u64,
    message: &Message,
    ack_timeout: u8,
) -> Mad {
    let mut mad = Mad::new(match (kind, is_datagram) {
        (Kind::Request, false) => CmKind::Request,
        (Kind::Request, true) => CmKind::ServiceRequest,
        (Kind::Reply, false) => CmKind::Reply,
        (Kind::Reply | Kind::Reject, true) => CmKind::ServiceReply,
        (Kind::Reject, false) => CmKind::Reject,
        (Kind::ReadyToUse, _) => CmKind::ReadyToUse,
        (Kind::DisconnectRequest, _) => CmKind::DisconnectRequest,
        (Kind::DisconnectReply, _) => CmKind::DisconnectReply,
    });
    let param = &message.param;
    let mut private = &param.private_data[..private_bytes(kind, is_datagram)];
    let with_addresses;
    let mut set = |fields: &[(Field, u64)]| {
        for (field, value) in fields {
            mad.set(*field, *value);
        }
    };
    match (kind, is_datagram) {
        (Kind::Request, false) => {
            set(&[
                (field::REQ_SERVICE, service),
                (field::REQ_QPN, param.qp_num.into()),
                (
                    field::REQ_RESPONDER_RESOURCES,
                    param.responder_resources.into(),
                ),
                (field::REQ_INITIATOR_DEPTH, param.initiator_depth.into()),
                (field::REQ_REMOTE_TIMEOUT, RESPONSE_TIMEOUT),
                (field::REQ_FLOW_CONTROL, param.flow_control.into()),
                (field::REQ_PSN, message.psn.into()),
                (field::REQ_LOCAL_TIMEOUT, RESPONSE_TIMEOUT),
                (field::REQ_RETRIES, param.retry_count.into()),
                (field::REQ_PKEY, PKEY),
                (field::REQ_MTU, message.mtu.into()),
                (field::REQ_RNR_RETRIES, param.rnr_retry_count.into()),
                (field::REQ_CM_RETRIES, RETRIES),
                (field::REQ_SRQ, param.srq.into()),
                (field::REQ_LOCAL_LID, NO_LID),
                (field::REQ_REMOTE_LID, NO_LID),
                (field::REQ_HOP_LIMIT, HOPS),
                (field::REQ_ACK_TIMEOUT, ack_timeout.into()),
            ]);
        }
        (Kind::Request, true) => set(&[
            (field::SIDR_REQ_PKEY, PKEY),
            (field::SIDR_REQ_SERVICE, service),
        ]),
        (Kind::Reply, false) => set(&[
            (field::REP_QPN, param.qp_num.into()),
            (field::REP_PSN, message.psn.into()),
            (
                field::REP_RESPONDER_RESOURCES,
                param.responder_resources.into(),
            ),
            (field::REP_INITIATOR_DEPTH, param.initiator_depth.into()),
            (field::REP_FLOW_CONTROL, param.flow_control.into()),
            (field::REP_RNR_RETRIES, param.rnr_retry_count.into()),
            (field::REP_SRQ, param.srq.into()),
        ]),
        (Kind::Reply, true) => set(&[
            (field::SIDR_REP_SERVICE, service),
            (field::SIDR_REP_QPN, param.qp_num.into()),
            (field::SIDR_REP_QKEY, param.qkey.into()),
        ]),
        (Kind::Reject, true) => set(&[
            (field::SIDR_REP_SERVICE, service),
            (field::SIDR_REP_STATUS, message.reason as u64),
        ]),
        (Kind::Reject, false) => set(&[(field::REJ_REASON, message.reason as u64)]),
        _ => {}
    }
    if let (Kind::Request, Some(source), Some(destination)) = (
        kind,
        address::parse(&message.source),
        address::parse(&message.destination),
    ) {
        if !is_datagram {
            let gids = [source, destination].map(|end| u128::from_be_bytes(gid_of(end.ip())));
            let halves = gids
                .iter()
                .flat_map(|gid| [(gid >> 64) as u64, *gid as u64]);
            for (field, half) in field::REQ_GIDS.into_iter().zip(halves) {
                mad.set(field, half);
            }
        }
        let addresses = IpAddresses {
            source_port: source.port(),
            source: source.ip(),
            destination: destination.ip(),
        };
        with_addresses = [&addresses.emit()[..], private].concat();
        private = &with_addresses;
    }
    mad.private_mut()[..private.len()].copy_from_slice(private);
    mad
}

/// Decodes a message of `peer` to `own`. Returns `None` for a message that no id awaits, or if a
/// number is out of range for a queue pair.
pub(crate) fn decode(mad: &Mad, peer: IpAddr, own: IpAddr) -> Option<(Kind, Message)> {
    let get = |field| mad.get(field);
    let (mut param, mut private) = (ConnParam::new_zeroed(), mad.private());
    let (mut psn, mut mtu, mut reason) = (0, LONGEST_PACKET, 0);
    let mut ends = None;
    let mut from = |service: u64| {
        let addresses = IpAddresses::parse(private)?;
        private = &private[IpAddresses::LEN..];
        ends = Some([(peer, addresses.source_port), (own, service as u16)]);
        Some(())
    };
    let (kind, is_datagram) = match mad.kind() {
        CmKind::Request => {
            from(get(field::REQ_SERVICE))?;
            param.qp_num = get(field::REQ_QPN) as u32;
            param.responder_resources = get(field::REQ_RESPONDER_RESOURCES) as u8;
            param.initiator_depth = get(field::REQ_INITIATOR_DEPTH) as u8;
            param.flow_control = get(field::REQ_FLOW_CONTROL) as u8;
            param.retry_count = get(field::REQ_RETRIES) as u8;
            param.rnr_retry_count = get(field::REQ_RNR_RETRIES) as u8;
            param.srq = get(field::REQ_SRQ) as u8;
            (psn, mtu) = (get(field::REQ_PSN) as u32, get(field::REQ_MTU) as u32);
            (Kind::Request, false)
        }
        CmKind::ServiceRequest => {
            from(get(field::SIDR_REQ_SERVICE))?;
            (Kind::Request, true)
        }
        CmKind::Reply => {
            param.qp_num = get(field::REP_QPN) as u32;
            param.responder_resources = get(field::REP_RESPONDER_RESOURCES) as u8;
            param.initiator_depth = get(field::REP_INITIATOR_DEPTH) as u8;
            param.flow_control = get(field::REP_FLOW_CONTROL) as u8;
            param.rnr_retry_count = get(field::REP_RNR_RETRIES) as u8;
            param.srq = get(field::REP_SRQ) as u8;
            psn = get(field::REP_PSN) as u32;
            (Kind::Reply, false)
        }
        CmKind::ServiceReply => {
            param.qp_num = get(field::SIDR_REP_QPN) as u32;
            param.qkey = get(field::SIDR_REP_QKEY) as u32;
            reason = get(field::SIDR_REP_STATUS) as i32;
            let is_accepted = reason == 0;
            let kind = if is_accepted {
                Kind::Reply
            } else {
                Kind::Reject
            };
            (kind, true)
        }
        CmKind::Reject => {
            reason = get(field::REJ_REASON) as i32;
            (Kind::Reject, false)
        }
        CmKind::ReadyToUse => (Kind::ReadyToUse, false),
        CmKind::DisconnectRequest => (Kind::DisconnectRequest, false),
        CmKind::DisconnectReply => (Kind::DisconnectReply, false),
        CmKind::Wait => return None,
    };
    let len = private_bytes(kind, is_datagram).min(private.len());
    param.private_data[..len].copy_from_slice(&private[..len]);
    param.private_data_len = len as u8;
    let mut message = Message::new(kind, is_datagram, &param).ok()?;
    (message.psn, message.mtu, message.reason) = (psn, mtu, reason);
    if let Some(ends) = ends {
        [message.source, message.destination] = ends.map(|end| address::bytes(end.into()));
    }
    (1..=LONGEST_PACKET)
        .contains(&mtu)
        .then_some((kind, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_end_encodes_the_other_end_decodes() {
        let [own, peer] = ["10.77.0.1:4000", "10.77.0.2:7471"].map(|at| at.parse().unwrap());
        let param = ConnParam {
            qp_num: 0x12_3456,
            qkey: 0x0123_4567,
            private_data: [7; 256],
            private_data_len: 56,
            srq: 1,
            responder_resources: 4,
            initiator_depth: 16,
            flow_control: 1,
            retry_count: 6,
            rnr_retry_count: 7,
            valid: 0,
        };
        for is_datagram in [false, true] {
            let mut kinds = vec![Kind::Request, Kind::Reply, Kind::Reject];
            if !is_datagram {
                kinds.extend([
                    Kind::ReadyToUse,
                    Kind::DisconnectRequest,
                    Kind::DisconnectReply,
                ]);
            }
            for kind in kinds {
                let len = private_bytes(kind, is_datagram);
                let param = ConnParam {
                    private_data_len: len.min(56) as u8,
                    ..param
                };
                let mut sent = Message::new(kind, is_datagram, &param).unwrap();
                (sent.psn, sent.mtu) = (0xab_cdef, 3);
                if kind == Kind::Reject {
                    sent.reason = 28;
                }
                if kind == Kind::Request {
                    (sent.source, sent.destination) = (address::bytes(own), address::bytes(peer));
                }
                let mad = encode(kind, is_datagram, service(0x106, 7471), &sent, 18);
                let (as_kind, got) = decode(&mad, own.ip(), peer.ip()).unwrap();
                assert_eq!(as_kind, kind);
                assert_eq!(got.param.private_data, sent.param.private_data, "{kind:?}");
                assert_eq!(got.reason, sent.reason);
                assert_eq!(
                    (got.source, got.destination),
                    (sent.source, sent.destination)
                );
                if kind == Kind::Request && !is_datagram {
                    assert_eq!((got.psn, got.mtu), (sent.psn, sent.mtu));
                    assert_eq!(got.param.retry_count, 6);
                }
                if matches!((kind, is_datagram), (Kind::Request | Kind::Reply, false)) {
                    let of = |message: &Message| {
                        let p = message.param;
                        let depths = (p.responder_resources, p.initiator_depth);
                        (p.qp_num, depths, p.rnr_retry_count, p.srq, p.flow_control)
                    };
                    assert_eq!((of(&got), got.psn), (of(&sent), sent.psn));
                }
                if let (Kind::Reply, true) = (kind, is_datagram) {
                    assert_eq!(
                        (got.param.qp_num, got.param.qkey),
                        (param.qp_num, param.qkey)
                    );
                }
            }
        }
    }

    /// Each field of a peer may have any value.
    #[test]
    fn values_that_no_queue_pair_has_are_refused_or_limited() {
        let own = "10.77.0.1".parse().unwrap();
        let mut request = Mad::new(CmKind::Request);
        assert!(decode(&request, own, own).is_none(), "no addresses");
        request.private_mut()[1] = 4 << 4;
        assert!(decode(&request, own, own).is_none(), "path MTU 0");
        request.set(field::REQ_MTU, 6);
        assert!(decode(&request, own, own).is_none(), "path MTU 8 KiB");
        request.set(field::REQ_MTU, 5);
        request.set(field::REQ_INITIATOR_DEPTH, 255);
        let (_, message) = decode(&request, own, own).unwrap();
        assert_eq!(message.param.initiator_depth, 16);
        assert!(decode(&Mad::new(CmKind::Wait), own, own).is_none());
    }
}
