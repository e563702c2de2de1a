//! Messages of the connection manager of Linux 6.1, captured between two devices of rdma_rxe: a
//! connection of rping and its end, a refused one, and a datagram service of udaddy before and
//! after its end. The expected values are the values that tshark shows, except the flow label,
//! which tshark reads from the wrong bits.

use std::vec;

use super::*;

static PCAP: &[u8] = include_bytes!("cm.pcap");

const ONE: u64 = 0x9299_eb6c;
const OTHER: u64 = 0x9199_eb6c;
const TCP_7400: u64 = 0x0106_1ce8;
const UDP_7174: u64 = 0x0111_1c06;

/// A message with these fields and this beginning of its private data, and zeros.
fn message(kind: CmKind, transaction: u64, fields: &[(Field, u64)], private: &[u8]) -> Mad {
    let mut mad = Mad::new(kind);
    mad.set(field::TRANSACTION, transaction);
    for (field, value) in fields {
        mad.set(*field, *value);
        assert_eq!(mad.get(*field), *value);
    }
    mad.private_mut()[..private.len()].copy_from_slice(private);
    mad
}

fn addresses(source_port: u16) -> [u8; IpAddresses::LEN] {
    let [source, destination] = [2, 1].map(|host| IpAddr::from([10, 77, 1, host]));
    let addresses = IpAddresses {
        source_port,
        source,
        destination,
    };
    assert_eq!(IpAddresses::parse(&addresses.emit()), Some(addresses));
    addresses.emit()
}

fn request(local: u64, service: u64, qpn: u64, psn: u64, source_port: u16) -> Mad {
    let [(a, b), (c, d)] = [(0, 0xffff_0a4d_0102), (0, 0xffff_0a4d_0101)];
    let gids = field::REQ_GIDS.into_iter().zip([a, b, c, d]);
    let fields = [
        (field::LOCAL_ID, local),
        (field::REQ_SERVICE, service),
        (field::REQ_GUID, 0x5ce5_85ff_fe14_d340),
        (field::REQ_QPN, qpn),
        (field::REQ_RESPONDER_RESOURCES, 1),
        (field::REQ_INITIATOR_DEPTH, 1),
        (field::REQ_REMOTE_TIMEOUT, 20),
        (field::REQ_SERVICE_TYPE, 0),
        (field::REQ_FLOW_CONTROL, 0),
        (field::REQ_PSN, psn),
        (field::REQ_LOCAL_TIMEOUT, 20),
        (field::REQ_RETRIES, 7),
        (field::REQ_PKEY, 0xffff),
        (field::REQ_MTU, 3),
        (field::REQ_RNR_RETRIES, 7),
        (field::REQ_CM_RETRIES, 15),
        (field::REQ_SRQ, 0),
        (field::REQ_LOCAL_LID, 0xffff),
        (field::REQ_REMOTE_LID, 0xffff),
        (field::REQ_HOP_LIMIT, 64),
        (field::REQ_ACK_TIMEOUT, 0x13),
    ];
    let all = [&fields[..], &gids.collect::<Vec<_>>()].concat();
    message(
        CmKind::Request,
        local.swap_bytes() >> 32 | 6 << 32,
        &all,
        &addresses(source_port),
    )
}

#[test]
fn messages_of_the_kernel_are_decoded_and_encoded_to_the_same_bytes() {
    let transaction = 0x6_6ceb_9992;
    let pair = |local, remote, more: &[(Field, u64)]| {
        [
            &[(field::LOCAL_ID, local), (field::REMOTE_ID, remote)],
            more,
        ]
        .concat()
    };
    let service_request = |id: u64, source_port| {
        let fields = [
            (field::LOCAL_ID, id),
            (field::SIDR_REQ_PKEY, 0xffff),
            (field::SIDR_REQ_SERVICE, UDP_7174),
        ];
        let transaction = id.swap_bytes() >> 32 | 6 << 32;
        let private = addresses(source_port);
        message(CmKind::ServiceRequest, transaction, &fields, &private)
    };
    let service_reply = |id: u64, more: &[(Field, u64)]| {
        let fields = [
            &[(field::LOCAL_ID, id), (field::SIDR_REP_SERVICE, UDP_7174)],
            more,
        ]
        .concat();
        let transaction = id.swap_bytes() >> 32 | 6 << 32;
        message(CmKind::ServiceReply, transaction, &fields, &[])
    };
    let reply = [
        (field::REP_QPN, 0x11),
        (field::REP_PSN, 0xe5_658d),
        (field::REP_RESPONDER_RESOURCES, 1),
        (field::REP_INITIATOR_DEPTH, 1),
        (field::REP_ACK_DELAY, 15),
        (field::REP_FLOW_CONTROL, 0),
        (field::REP_RNR_RETRIES, 7),
        (field::REP_SRQ, 0),
        (field::REP_GUID, 0x08b0_5fff_fecc_c87e),
    ];
    let refused = [(field::REJ_MESSAGE, 0), (field::REJ_REASON, 8)];
    let expected = vec![
        request(ONE, TCP_7400, 0x11, 0xa8_1bc8, 0xc331),
        message(CmKind::Reply, transaction, &pair(OTHER, ONE, &reply), &[]),
        message(CmKind::ReadyToUse, transaction, &pair(ONE, OTHER, &[]), &[]),
        message(
            CmKind::DisconnectRequest,
            transaction,
            &pair(ONE, OTHER, &[(field::DREQ_QPN, 0x11)]),
            &[],
        ),
        message(
            CmKind::DisconnectReply,
            transaction,
            &pair(OTHER, ONE, &[]),
            &[],
        ),
        request(0x9099_eb6c, 0x0106_1f3f, 0x12, 0x81_5c49, 0xd36d),
        message(
            CmKind::Reject,
            0x6_6ceb_9990,
            &pair(0, 0x9099_eb6c, &refused),
            &[],
        ),
        service_request(0x9599_eb6c, 0xad87),
        service_reply(
            0x9599_eb6c,
            &[
                (field::SIDR_REP_STATUS, 0),
                (field::SIDR_REP_QPN, 0x12),
                (field::SIDR_REP_QKEY, 0x0123_4567),
            ],
        ),
        service_request(0x9b99_eb6c, 0xce00),
        service_reply(0x9b99_eb6c, &[(field::SIDR_REP_STATUS, 1)]),
    ];
    let packets = captured(PCAP);
    assert_eq!(packets.len(), expected.len());
    for (nth, (captured, mut expected)) in packets.iter().zip(expected).enumerate() {
        let (headers, payload) = Headers::parse(captured.packet).unwrap();
        let deth = Deth {
            qkey: MAD_QKEY,
            source_qpn: MAD_QPN,
        };
        assert_eq!((headers.bth.qpn, headers.deth), (MAD_QPN, deth));
        let mad = Mad::parse(payload).unwrap();
        if mad.kind() == CmKind::Request {
            // The kernel chooses the flow label at random.
            expected.set(field::REQ_FLOW_LABEL, mad.get(field::REQ_FLOW_LABEL));
        }
        assert_eq!(mad.bytes(), expected.bytes(), "{nth}: {:?}", mad.kind());
    }
}

#[test]
fn what_is_no_message_of_the_connection_manager_is_refused() {
    let good = *Mad::new(CmKind::Wait).bytes();
    assert_eq!(Mad::parse(&good).map(|mad| mad.kind()), Some(CmKind::Wait));
    assert_eq!(Mad::parse(&good[1..]), None);
    for at in [0, 1, 2, 3, 16, 17] {
        let mut other = good;
        other[at] ^= 0x80;
        assert_eq!(Mad::parse(&other), None, "byte {at}");
    }
    assert_eq!(IpAddresses::parse(&[0; 36]), None, "version 0");
    let v6 = IpAddresses {
        source_port: 7,
        source: "fd00::1".parse().unwrap(),
        destination: "fd00::2".parse().unwrap(),
    };
    assert_eq!(IpAddresses::parse(&v6.emit()), Some(v6));
}
