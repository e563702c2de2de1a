//! Ports for packets: two devices that share no memory, strangers, and what an address can do.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};

use copyrpc_testing::limits;
use mlx5::hca::{ConnectError as HcaConnectError, OpenError as HcaOpenError, gid_of};
use mlx5::wire::AtomicSegment;
use mlx5::wire::roce::{
    AtomicEth, Flow, Headers, Opcode, PacketOpcode, Psn, Reth, Transport, UDP_PORT,
};
use mlx5::*;

use super::endpoint::{Endpoint, EndpointAddress};

const WATCHDOG: Duration = Duration::from_secs(100);
const LOOPBACK: [u8; 4] = [127, 0, 0, 1];

/// Returns the options of a device in a fabric of its own.
fn soft(roce: RoceOptions) -> SoftOptions {
    SoftOptions {
        fabric: FabricSpec::Local(LocalFabric::new()),
        arena_bytes: 1 << 24,
        strict: true,
        roce: Some(roce),
        ..Default::default()
    }
}

fn on(address: impl Into<IpAddr>) -> RoceOptions {
    RoceOptions {
        port: Some(0),
        ..RoceOptions::new(address.into())
    }
}

/// Runs `f` with an endpoint and the address of its peer. The peer, on a second device in a second
/// thread, sends every message back, until it gets an empty message. Returns the bytes of the
/// peer's memory, and the counters of the endpoint's device and of the peer's device.
fn with_echo(
    roce: [RoceOptions; 2],
    f: impl FnOnce(&mut Endpoint, &EndpointAddress),
) -> (Vec<u8>, [PacketCounters; 2]) {
    echo_in([(); 2].map(|()| LocalFabric::new()), roce, f)
}

/// Runs [`with_echo`] with devices of these fabrics.
fn echo_in(
    fabrics: [LocalFabric; 2],
    roce: [RoceOptions; 2],
    f: impl FnOnce(&mut Endpoint, &EndpointAddress),
) -> (Vec<u8>, [PacketCounters; 2]) {
    let ([own, other], [own_fabric, other_fabric]) = (roce, fabrics);
    let options = |roce, fabric| {
        DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(fabric),
            ..soft(roce)
        })
    };
    limits::watchdog(WATCHDOG);
    // A lost tail of a message is sent again soon.
    let connection = ConnectOptions {
        timeout: 10,
        ..ConnectOptions::default()
    };
    let (to_peer, from_here) = mpsc::channel();
    let (to_here, from_peer) = mpsc::channel();
    let peer = std::thread::spawn(move || {
        let device = Device::open(options(other, other_fabric)).unwrap();
        let mut end = Endpoint::with(&device, 1 << 15, connection);
        to_here.send(end.address()).unwrap();
        end.connect(&from_here.recv().unwrap()).unwrap();
        loop {
            let message = end.recv();
            end.send(&message).unwrap();
            if message.is_empty() {
                break;
            }
        }
        // The ACK of the last message may be lost: it is sent again until the other end has it.
        while from_here.try_recv() != Err(TryRecvError::Disconnected) {
            device.progress();
        }
        let mut bytes = vec![0; end.memory.len()];
        end.memory.read(0, &mut bytes).unwrap();
        assert_eq!(device.soft().unwrap().take_violations(), []);
        (bytes, device.info().packets.unwrap())
    });
    let device = Device::open(options(own, own_fabric)).unwrap();
    let mut end = Endpoint::with(&device, 1 << 15, connection);
    let remote = from_peer.recv().unwrap();
    to_peer.send(end.address()).unwrap();
    end.connect(&remote).unwrap();
    f(&mut end, &remote);
    end.send(&[]).unwrap();
    assert!(end.recv().is_empty());
    drop(to_peer);
    // Answers the peer's last packets, whose ACKs may be lost.
    while !peer.is_finished() {
        device.progress();
    }
    assert_eq!(device.soft().unwrap().take_violations(), []);
    let (bytes, theirs) = peer.join().unwrap();
    (bytes, [device.info().packets.unwrap(), theirs])
}

/// Executes every verb, with messages of one byte to many packets. Writes the content that the
/// peer's memory must have then to `expected`.
fn every_verb(end: &mut Endpoint, expected: &mut [u8]) {
    for (nth, len) in (0u8..).zip([1, 64, 255, 256, 257, 1024, 4096, 5000, 1 << 15]) {
        let message: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(nth | 1)).collect();
        end.send(&message).unwrap();
        assert_eq!(end.recv(), message);
        end.write(8 + u64::from(nth), &message);
        expected[8 + usize::from(nth)..][..len].copy_from_slice(&message);
        let mut back = vec![0; len];
        end.read(8 + u64::from(nth), &mut back);
        assert_eq!(back, message);
        assert_eq!(end.fetch_add(0, 3), 3 * u64::from(nth));
    }
    assert_eq!(end.compare_swap(0, 27, 5), 27);
    expected[..8].copy_from_slice(&5u64.to_ne_bytes());
}

#[test]
fn every_verb_reaches_a_device_that_shares_no_memory() {
    for (own, other) in [
        (on(LOOPBACK), on([127, 0, 0, 2])),
        (on(Ipv6Addr::LOCALHOST), on(Ipv6Addr::LOCALHOST)),
        // Both ends use the smaller MTU.
        (
            RoceOptions {
                mtu: Some(256),
                ..on(LOOPBACK)
            },
            on(LOOPBACK),
        ),
    ] {
        let mut expected = vec![0; 1 << 16];
        let (bytes, counters) = with_echo([own, other], |end, _| every_verb(end, &mut expected));
        assert!(bytes == expected);
        for PacketCounters {
            sent,
            received,
            bad_icrc,
            strangers,
            refused,
            ..
        } in counters
        {
            assert!(
                sent > 50 && received > 50 && (bad_icrc, strangers, refused) == (0, 0, 0),
                "{counters:?}"
            );
        }
    }
}

#[test]
fn what_is_lost_is_sent_again_and_arrives_once() {
    let mut expected = vec![0; 1 << 16];
    let lossy = |address| RoceOptions {
        network: BadNetwork {
            loss_permille: 50,
            double_permille: 50,
            reorder_permille: 50,
            delay_us: (0, 100),
        },
        mtu: Some(256),
        ..on(address)
    };
    let (bytes, counters) = with_echo([lossy([127, 0, 0, 1]), lossy([127, 0, 0, 2])], |end, _| {
        every_verb(end, &mut expected)
    });
    assert!(bytes == expected);
    assert!(
        counters[0].retransmitted + counters[1].retransmitted > 0,
        "{counters:?}"
    );
}

/// Returns the bytes of a packet from a socket to a port.
fn packet(headers: &Headers, payload: &[u8], from: &UdpSocket, to: SocketAddr) -> Vec<u8> {
    let flow = Flow {
        source: from.local_addr().unwrap(),
        destination: to,
        identification: 0,
    };
    let mut bytes = headers.emit().to_vec();
    bytes.extend(payload);
    let icrc = flow.icrc(&bytes, &[]);
    bytes.extend(icrc);
    bytes
}

/// Every user of the peer's host can send from the peer's address, so the source port must be right
/// too. The address of a software HCA contains its port, from which its other source ports follow.
/// Any other RoCE device chooses a port for each connection; its first packet shows the port.
#[test]
fn packets_from_another_port_of_the_peers_address_change_nothing() {
    limits::watchdog(WATCHDOG);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let [own, theirs] = [1, 2].map(|host| IpAddr::from([127, 90 + host, high, low]));
    let device = Device::open(DeviceSpec::Soft(soft(RoceOptions {
        port: Some(UDP_PORT),
        ..on(own)
    })))
    .unwrap();
    let sockets = [(); 2].map(|()| UdpSocket::bind((theirs, 0)).unwrap());
    let port = sockets[0].local_addr().unwrap().port();
    // The peer's address has no port in the first case, and a port in the second.
    for (told, mut taken, senders) in [(0, None, [0, 1, 1, 0]), (port, Some(0), [1, 0, 1, 0])] {
        let mut end = Endpoint::new(&device);
        let peer = QpAddress {
            port: told,
            lid: 0,
            epoch: 0,
            gid: gid_of(theirs),
            qpn: 7,
            psn: 100,
            ..end.qp.address()
        };
        end.connect(&EndpointAddress {
            qp: peer,
            ..end.address()
        })
        .unwrap();
        let before = device.info().packets.unwrap();
        let mut psn = Psn::new(peer.psn);
        for (nth, from) in senders.into_iter().enumerate() {
            let opcode = PacketOpcode {
                transport: Transport::Rc,
                opcode: Opcode::WriteOnly,
            };
            let reth = Reth {
                addr: end.memory.addr(),
                rkey: end.memory.rkey(),
                len: 8,
            };
            let headers = Headers {
                reth,
                ..Headers::new(opcode, end.qp.address().qpn, psn)
            };
            let to = SocketAddr::new(own, UDP_PORT);
            sockets[from]
                .send_to(
                    &packet(&headers, &[nth as u8 + 1; 8], &sockets[from], to),
                    to,
                )
                .unwrap();
            while device.info().packets.unwrap().received < before.received + nth as u64 + 1 {
                device.progress();
            }
            let mut written = [0; 8];
            end.memory.read(0, &mut written).unwrap();
            let is_of_peer = *taken.get_or_insert(from) == from;
            assert_eq!(
                written == [nth as u8 + 1; 8],
                is_of_peer,
                "told {told}, packet {nth}"
            );
            psn = if is_of_peer {
                Psn::new(psn.get() + 1)
            } else {
                psn
            };
        }
        assert_eq!(
            device.info().packets.unwrap().strangers - before.strangers,
            2
        );
    }
}

/// Sends two messages over each of sixteen connections from a new device to a peer that answers
/// nothing. Returns the source ports of the packets, by connection.
fn source_ports(roce: RoceOptions, peer: &UdpSocket) -> BTreeMap<u32, BTreeSet<u16>> {
    let to = peer.local_addr().unwrap();
    let own = roce.address;
    let device = Device::open(DeviceSpec::Soft(soft(roce))).unwrap();
    let connect = |qpn| {
        let mut end = Endpoint::new(&device);
        let qp = QpAddress {
            port: to.port(),
            lid: 0,
            epoch: 0,
            gid: gid_of(to.ip()),
            qpn,
            ..end.qp.address()
        };
        let address = EndpointAddress {
            qp,
            ..end.address()
        };
        end.connect(&address).unwrap();
        end
    };
    let mut ends: Vec<_> = (0x4000..0x4010).map(connect).collect();
    let mut ports = BTreeMap::<_, BTreeSet<_>>::new();
    for end in &mut ends {
        for _ in 0..2 {
            let payload = Inline(&[1, 2, 3, 4][..]);
            end.qp.post(&Send { payload }, Signal::Always, 0).unwrap();
        }
        end.qp.ring();
    }
    for _ in 0..2 * ends.len() {
        let mut buffer = [0; 64];
        let (len, from) = peer.recv_from(&mut buffer).unwrap();
        let (headers, _) = Headers::parse(&buffer[..len]).unwrap();
        let flow = Flow {
            source: from,
            destination: to,
            identification: 0,
        };
        assert_eq!((flow.check(&buffer[..len]), from.ip()), (Some(0), own));
        ports
            .entry(headers.bth.qpn)
            .or_default()
            .insert(from.port());
    }
    ports
}

/// Routers and NICs spread packets by the source port, so each connection has its own, as far as a
/// device has any. A connection keeps its port, because packets on two paths overtake each other.
#[test]
fn connections_leave_from_different_ports_and_each_keeps_its_port() {
    limits::watchdog(WATCHDOG);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    // Below the ports that the kernel chooses.
    let port = 10_000 + (std::process::id() % 20_000) as u16;
    for [own, theirs] in [
        [5, 6].map(|host| IpAddr::from([127, 90 + host, high, low])),
        [Ipv6Addr::LOCALHOST.into(); 2],
    ] {
        let peer = UdpSocket::bind((theirs, 0)).unwrap();
        let plain = || RoceOptions {
            port: Some(port),
            ..on(own)
        };
        let spread = source_ports(plain(), &peer);
        let of_one = |ports: &BTreeSet<u16>| ports.first().copied().filter(|_| ports.len() == 1);
        let used: BTreeSet<_> = spread
            .values()
            .map(|ports| of_one(ports).unwrap())
            .collect();
        assert_eq!(spread.len(), 16);
        assert!(
            used.len() > 4 && *used.first().unwrap() >= 0xc000,
            "{spread:?}"
        );
        let alone = RoceOptions {
            has_one_source: true,
            ..plain()
        };
        let ports = source_ports(alone, &peer);
        let all_own = |ports: &BTreeSet<u16>| of_one(ports) == Some(port);
        assert!(ports.values().all(all_own), "{ports:?}");
        // The device is gone, so its ports are free. Connections whose port is taken leave from that
        // of the device.
        let taken = *used.first().unwrap();
        let _socket = UdpSocket::bind((own, taken)).unwrap();
        for (qpn, ports) in source_ports(plain(), &peer) {
            let before = of_one(&spread[&qpn]).unwrap();
            let expected = if before == taken { port } else { before };
            assert_eq!(of_one(&ports), Some(expected), "{qpn:#x}");
        }
    }
}

/// A RoCE device that is no software HCA is notified of marks on its packets, as the standard has
/// it, and may send such notifications.
#[test]
fn a_roce_device_whose_packets_are_marked_gets_a_congestion_notification() {
    limits::watchdog(WATCHDOG);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let [own, theirs] = [3, 4].map(|host| IpAddr::from([127, 90 + host, high, low]));
    let device = Device::open(DeviceSpec::Soft(soft(RoceOptions {
        port: Some(UDP_PORT),
        ..on(own)
    })))
    .unwrap();
    let peer = UdpSocket::bind((theirs, UDP_PORT)).unwrap();
    peer.set_nonblocking(true).unwrap();
    let mut end = Endpoint::new(&device);
    let qp = QpAddress {
        port: 0,
        lid: 0,
        epoch: 0,
        gid: gid_of(theirs),
        qpn: 7,
        psn: 100,
        ..end.qp.address()
    };
    end.connect(&EndpointAddress {
        qp,
        ..end.address()
    })
    .unwrap();
    let to = SocketAddr::new(own, UDP_PORT);
    // A plain packet, a marked one, and a notification.
    for (class, is_notification) in [(2, false), (3, false), (2, true)] {
        rustix::net::sockopt::set_ip_tos(&peer, class).unwrap();
        let write = PacketOpcode {
            transport: Transport::Rc,
            opcode: Opcode::WriteOnly,
        };
        let qpn = end.qp.address().qpn;
        let headers = if is_notification {
            Headers::new(PacketOpcode::CNP, qpn, Psn::new(0))
        } else {
            Headers::new(write, qpn, Psn::new(97 + u32::from(class) + 1))
        };
        let payload: &[u8] = if is_notification { &[0; 16] } else { &[] };
        peer.send_to(&packet(&headers, payload, &peer, to), to)
            .unwrap();
        let received = device.info().packets.unwrap().received;
        while device.info().packets.unwrap().received == received {
            device.progress();
        }
        // The next poll sends what the last one made.
        device.progress();
        let mut buffer = [0; 64];
        let mut notifications = 0;
        while let Ok(len) = peer.recv(&mut buffer) {
            let (headers, reserved) = Headers::parse(&buffer[..len]).unwrap();
            if headers.opcode == PacketOpcode::CNP {
                notifications += 1;
                assert!(headers.bth.has_becn && headers.bth.qpn == 7 && reserved == [0; 16]);
            }
        }
        assert_eq!(notifications, u32::from(class == 3));
    }
    assert_eq!(device.info().packets.unwrap().strangers, 0);
}

/// Packets of hosts that are not the peer, and of a host that forges the peer's address but not its
/// packet numbers, are counted and have no other effect.
#[test]
fn packets_of_strangers_change_nothing() {
    let times = 3_000 * limits::scale_of("MLX5_TEST_SCALE");
    let mut expected = vec![0; 1 << 16];
    let own = IpAddr::from(LOOPBACK);
    let (bytes, counters) = with_echo([on(own), on([127, 0, 0, 2])], |end, remote| {
        let qp = end.qp.address();
        let to = SocketAddr::new(own, qp.port);
        // The second stranger sends from the peer's address, but from a different port, because
        // RoCE devices may choose any source port.
        let strangers = [[127, 0, 0, 9], [127, 0, 0, 2]]
            .map(|from| UdpSocket::bind((IpAddr::from(from), 0)).unwrap());
        let mut random = mlx5::hca::network::Random::new(7);
        end.memory.write(0, &[0x5a; 64]).unwrap();
        let (addr, rkey) = (end.memory.addr(), end.memory.rkey());
        assert_ne!(*remote, end.address());
        for _ in 0..times {
            let from = &strangers[random.below(2) as usize];
            let mut bytes: Vec<u8> = (0..random.below(80))
                .map(|_| random.next_u64() as u8)
                .collect();
            if random.happens(800) {
                let kind = [
                    Opcode::WriteOnly,
                    Opcode::SendOnly,
                    Opcode::ReadRequest,
                    Opcode::FetchAdd,
                    Opcode::Acknowledge,
                ];
                let opcode = PacketOpcode {
                    transport: Transport::Rc,
                    opcode: kind[random.below(5) as usize],
                };
                // Requests outside the window of PSNs: a forger who does not see the packets.
                let psn = Psn::new(random.next_u64() as u32);
                let mut headers = Headers::new(
                    opcode,
                    if random.happens(500) {
                        qp.qpn
                    } else {
                        random.next_u64() as u32
                    },
                    psn,
                );
                headers.reth = Reth {
                    addr,
                    rkey: if random.happens(500) {
                        rkey ^ 1
                    } else {
                        random.next_u64() as u32
                    },
                    len: 8,
                };
                headers.atomic = AtomicEth {
                    addr,
                    rkey: headers.reth.rkey,
                    operands: AtomicSegment {
                        swap_add: 1,
                        compare: 0,
                    },
                };
                bytes = packet(&headers, &[1; 8], from, to);
                if random.happens(300) {
                    let at = random.below(bytes.len() as u64) as usize;
                    bytes[at] ^= 1 << random.below(8);
                }
            }
            from.send_to(&bytes, to).unwrap();
        }
        every_verb(end, &mut expected);
        let mut own = [0; 64];
        end.memory.read(0, &mut own).unwrap();
        assert_eq!(own, [0x5a; 64]);
    });
    assert!(bytes == expected);
    assert!(
        counters[0].strangers > 100 && counters[0].bad_icrc > 100,
        "{counters:?}"
    );
}

#[test]
fn peers_of_one_fabric_share_memory_unless_all_get_packets() {
    let fabric = LocalFabric::new();
    for is_for_all in [false, true] {
        let options = || SoftOptions {
            fabric: FabricSpec::Local(fabric.clone()),
            ..soft(RoceOptions {
                is_for_all,
                ..on(LOOPBACK)
            })
        };
        let devices = [(); 2].map(|()| Device::open(DeviceSpec::Soft(options())).unwrap());
        let [mut a, mut b] = [&devices[0], &devices[1]].map(Endpoint::new);
        a.connect(&b.address()).unwrap();
        b.connect(&a.address()).unwrap();
        if is_for_all {
            assert_eq!(a.qp.address().lid, 0);
            continue;
        }
        a.send(b"hello").unwrap();
        assert_eq!(b.recv(), b"hello");
        assert_eq!(devices[0].info().packets, Some(PacketCounters::default()));
    }
}

/// The options for losses and for a capture concern packets. So each of them makes the device send
/// packets, even to a peer without these options.
#[test]
fn an_end_that_sends_packets_only_gets_packets_from_a_peer_of_its_fabric_too() {
    let (fabric, thread) = (LocalFabric::new(), std::thread::current().id());
    let pcap = std::env::temp_dir().join(format!("copyrpc-ways-{}-{thread:?}", std::process::id()));
    let implied = [
        RoceOptions {
            network: BadNetwork {
                loss_permille: 1,
                ..BadNetwork::default()
            },
            ..on(LOOPBACK)
        },
        RoceOptions {
            pcap: Some(pcap.clone()),
            ..on(LOOPBACK)
        },
    ];
    for options in [RoceOptions {
        is_for_all: true,
        ..on(LOOPBACK)
    }]
    .into_iter()
    .chain(implied)
    {
        for both in [[options.clone(), on(LOOPBACK)], [on(LOOPBACK), options]] {
            let (_, counters) = echo_in([fabric.clone(), fabric.clone()], both, |end, _| {
                end.send(b"hello").unwrap();
                assert_eq!(end.recv(), b"hello");
            });
            assert!(
                counters.iter().all(|counters| counters.received > 0),
                "{counters:?}"
            );
        }
    }
    std::fs::remove_file(pcap).unwrap();
}

#[test]
fn connections_without_messages_send_nothing() {
    let open = || Device::open(DeviceSpec::Soft(soft(on(LOOPBACK)))).unwrap();
    let devices = [open(), open()];
    let queues = |device: &Device| {
        let pd = device.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (device.create_cq(16).unwrap(), device.create_cq(16).unwrap());
        let srq = pd.create_srq(1, 0).unwrap();
        let config = QpConfig {
            max_send_wr: 16,
            ..QpConfig::default()
        };
        (0..1000)
            .map(|_| pd.create_qp(&send_cq, &recv_cq, &srq, &config).unwrap())
            .collect::<Vec<_>>()
    };
    let [mut ours, mut theirs] = [queues(&devices[0]), queues(&devices[1])];
    for (a, b) in ours.iter_mut().zip(&mut theirs) {
        a.connect(&b.address(), &ConnectOptions::default()).unwrap();
        b.connect(&a.address(), &ConnectOptions::default()).unwrap();
    }
    // Longer than the time-out.
    let end = Instant::now() + Duration::from_millis(200);
    while Instant::now() < end {
        for device in &devices {
            device.progress();
        }
    }
    assert_eq!(
        devices.map(|device| device.info().packets),
        [Some(PacketCounters::default()); 2]
    );
}

#[test]
fn addresses_that_cannot_be_are_refused_with_what_to_do() {
    let open = |roce: RoceOptions| {
        Device::open(DeviceSpec::Soft(soft(roce)))
            .map(drop)
            .unwrap_err()
    };
    let device = Device::open(DeviceSpec::Soft(soft(on(LOOPBACK)))).unwrap();
    let mut end = Endpoint::new(&device);
    let taken = end.qp.address().port;
    let refused = open(RoceOptions {
        port: Some(taken),
        ..on(LOOPBACK)
    });
    assert!(
        matches!(&refused, OpenError::Soft(HcaOpenError::Wire { port, .. }) if *port == taken),
        "{refused}"
    );
    assert!(
        refused
            .to_string()
            .contains("use an address of this host, and a free port"),
        "{refused}"
    );
    for roce in [
        on([8, 8, 8, 8]),
        RoceOptions {
            prefix: Some(32),
            ..on([8, 8, 8, 8])
        },
    ] {
        assert!(matches!(
            open(roce),
            OpenError::Soft(HcaOpenError::Wire { .. })
        ));
    }
    let model = SoftOptions {
        timing: Timing::Delay { ns: 1 },
        ..soft(on(LOOPBACK))
    };
    assert!(matches!(
        Device::open(DeviceSpec::Soft(model)),
        Err(OpenError::Soft(HcaOpenError::WireInModel))
    ));
    for (name, remedy) in [
        ("soft:roce=eth0", "10.1.0.0/16"),
        ("soft:roce=fe80:::1", "\"fe80:::1\" is no IP address"),
        (
            "soft:loss=10",
            "\"soft:loss=10\" has no address: use soft alone",
        ),
        ("soft:1", "soft:roce=127.0.0.1,loss=10"),
    ] {
        let refused = Device::open(name).map(drop).unwrap_err().to_string();
        assert!(refused.contains(remedy), "{refused}");
    }
    // A RoCE device that is no software HCA: it sends to port 4791.
    let nic = QpAddress {
        port: 0,
        epoch: 0,
        lid: 0,
        gid: gid_of([127, 0, 0, 3].into()),
        ..end.qp.address()
    };
    let plain = Device::open(DeviceSpec::Soft(SoftOptions {
        roce: None,
        ..soft(on(LOOPBACK))
    }))
    .unwrap();
    let mut plain = Endpoint::new(&plain);
    let address = EndpointAddress {
        qp: nic,
        ..end.address()
    };
    assert!(matches!(
        plain.connect(&address),
        Err(ConnectError::DifferentKinds { .. })
    ));
    let refused = end.connect(&address).unwrap_err();
    let ConnectError::Soft(HcaConnectError::NotTheRocePort { to, own }) = refused else {
        panic!("{refused}")
    };
    assert_eq!(
        (to, own),
        (SocketAddr::from(([127, 0, 0, 3], UDP_PORT)), taken)
    );
}

/// A device that lives reports that a queue pair is destroyed. The kernel reports that a device has
/// ended, to the socket from which the packets left; the third repeat fails.
#[test]
fn the_end_of_a_queue_pair_is_told_and_that_of_a_device_is_noticed() {
    limits::watchdog(WATCHDOG);
    for lives in [true, false] {
        let (to_peer, from_here) = mpsc::channel();
        let (to_here, from_peer) = mpsc::channel();
        let (is_gone, when_gone) = mpsc::channel();
        let peer = std::thread::spawn(move || {
            let device = Device::open(DeviceSpec::Soft(soft(on([127, 0, 0, 2])))).unwrap();
            let mut end = Endpoint::new(&device);
            to_here.send(end.address()).unwrap();
            end.connect(&from_here.recv().unwrap()).unwrap();
            assert_eq!(end.recv(), b"hello");
            drop(end);
            let device = lives.then_some(device);
            is_gone.send(()).unwrap();
            // The device makes progress until the other thread has ended.
            while from_here.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
                device.as_ref().map(Device::progress);
            }
        });
        let device = Device::open(DeviceSpec::Soft(soft(on(LOOPBACK)))).unwrap();
        let mut end = Endpoint::new(&device);
        let remote = from_peer.recv().unwrap();
        to_peer.send(end.address()).unwrap();
        end.connect(&remote).unwrap();
        end.send(b"hello").unwrap();
        when_gone.recv().unwrap();
        let before = device.info().packets.unwrap();
        let error = end.send(b"again").unwrap_err();
        let sent = device.info().packets.unwrap().sent - before.sent;
        assert!(lives || sent == 3, "{sent}");
        assert!(
            matches!(
                error,
                CompletionError {
                    syndrome: Syndrome::TransportRetryExceeded,
                    ..
                }
            ),
            "{error}"
        );
        let reason = if lives {
            "was destroyed"
        } else {
            "no program has"
        };
        assert!(error.to_string().contains(reason), "{error}");
        drop(to_peer);
        peer.join().unwrap();
    }
}

/// Runs ip(8).
fn ip(arguments: &str) {
    let status = Command::new("ip")
        .args(arguments.split(' '))
        .status()
        .unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// The test sets the routes and MTUs of a network namespace. If packets cannot arrive, the
/// connection is refused, or its sends fail with the reason.
#[test]
#[ignore = "needs network namespaces"]
fn what_cannot_arrive_fails_with_the_reason() {
    const NAME: &str = "soft::packets::what_cannot_arrive_fails_with_the_reason";
    const INSIDE: &str = "MLX5_TEST_IN_NAMESPACE";

    limits::watchdog(WATCHDOG);
    if std::env::var_os(INSIDE).is_none() {
        let inside = Command::new("unshare")
            .args(["--user", "--map-root-user", "--net", "--"])
            .arg(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", NAME, "--nocapture"])
            .env(INSIDE, "")
            .status();
        assert!(inside.unwrap().success());
        return;
    }
    ip("link set lo up");
    ip("link add wire type veth peer name end");
    ip("link set end up mtu 9000");
    ip("address add 10.9.0.1/24 dev wire");
    ip("link set wire up mtu 9000");
    ip("neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev wire");
    for route in [
        "prohibit 10.9.0.3",
        "unreachable 10.9.0.4",
        "10.9.0.5 dev wire mtu 1500",
    ] {
        ip(&format!("route add {route}"));
    }
    let device = Device::open(DeviceSpec::Soft(soft(RoceOptions::new(
        [10, 9, 0, 1].into(),
    ))))
    .unwrap();
    let end = || {
        let connection = ConnectOptions {
            timeout: 10,
            ..ConnectOptions::default()
        };
        Endpoint::with(&device, 4096, connection)
    };
    let mut own = end();
    // Returns the address of a queue pair of a software HCA, or, with port 0, of any other RoCE
    // device.
    let address = |host: u8, port: u16| EndpointAddress {
        qp: QpAddress {
            port,
            epoch: 0,
            lid: 0,
            gid: gid_of([10, 9, 0, host].into()),
            ..own.qp.address()
        },
        ..own.address()
    };
    for (host, port, reason) in [
        (2, 0, "no answer and no report"),
        (3, 0, "a firewall refuses"),
        (4, 0, "no route"),
        (1, 9, "no program has the peer's UDP port"),
    ] {
        let mut end = end();
        end.connect(&address(host, port)).unwrap();
        let error = end.send(b"hello").unwrap_err();
        assert!(error.to_string().contains(reason), "{host}: {error}");
    }
    let refused = end().connect(&address(5, 0)).unwrap_err();
    let text = refused.to_string();
    let ConnectError::Soft(HcaConnectError::PathMtu {
        to,
        mtu,
        path,
        fits,
    }) = refused
    else {
        panic!("{text}")
    };
    assert_eq!(
        (to.ip(), mtu, path, fits),
        ([10, 9, 0, 5].into(), 4096, 1500, 1024)
    );
    assert!(text.contains("1500") && text.contains("mtu=1024"), "{text}");
    // The path becomes narrower.
    own.connect(&address(2, 0)).unwrap();
    ip("link set wire mtu 1500");
    let error = own.send(&[0; 4000]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("longer than the MTU of the path"),
        "{error}"
    );
}
