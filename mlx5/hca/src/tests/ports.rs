//! Devices with ports for packets.

use std::fs::DirBuilder;
use std::net::{IpAddr, UdpSocket};
use std::os::unix::fs::DirBuilderExt;

use copyrpc_shm::sleep::Watch;
use mlx5_wire::roce::{Headers, Opcode, PacketOpcode, Psn, Transport, UDP_PORT};
use mlx5_wire::{AddressVector, DatagramSegment};

use crate::packets::port::WirePort;
use crate::packets::udp::Receiver;
use crate::shared::layout::QP_INDEX_BITS;
use crate::sleep::Idle;
use crate::types::request::Way;
use crate::{
    Address, BadNetwork, FabricSpec, Hca, LocalFabric, PacketAddress, Port, RoceOptions,
    SoftOptions,
};

/// Returns an address of this host whose ports no other test uses.
fn own_address(test: u8) -> IpAddr {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    [127, 64 + test, high, low].into()
}

/// Opens a virtual function of the port at an address.
fn open_vf(fabric: &FabricSpec, roce: RoceOptions) -> Hca {
    let (port, roce) = (
        Some(Port {
            network: &[],
            index: 0,
        }),
        Some(roce),
    );
    Hca::open(&SoftOptions {
        fabric: fabric.clone(),
        port,
        roce,
        arena_bytes: 1 << 20,
        ..SoftOptions::default()
    })
    .unwrap()
}

/// The port belongs to a program without a device, or to the device of another user, which has a
/// different fabric.
#[test]
fn a_virtual_function_whose_udp_port_is_taken_is_left_for_the_next_one() {
    let address = own_address(0);
    let _taken = UdpSocket::bind((address, UDP_PORT)).unwrap();
    let [one, two] = [(); 2].map(|()| FabricSpec::Local(LocalFabric::new()));
    let devices = [&one, &two, &one].map(|fabric| open_vf(fabric, RoceOptions::new(address)));
    let found = devices.each_ref().map(|device| {
        (
            device.address(0).lid,
            device.wire_address().unwrap().0.port() - UDP_PORT,
        )
    });
    assert_eq!(found, [(2, 1), (3, 2), (4, 3)]);
}

/// Packets for which the kernel has no room are sent without waiting for the peer's repeat.
#[test]
fn a_device_with_packets_to_be_sent_does_not_sleep_long() {
    let hca = open_vf(
        &FabricSpec::Local(LocalFabric::new()),
        RoceOptions::new(own_address(3)),
    );
    let with_wire =
        |f: &dyn Fn(&mut WirePort)| f(hca.state.borrow_mut().wire.port.as_mut().unwrap());
    let mut idle = Idle(&hca);
    let longest = idle.slice();
    assert!(!idle.look(false));
    with_wire(&|wire| wire.active.push(0));
    assert!(idle.look(false), "a queue pair has more");
    let opcode = PacketOpcode {
        transport: Transport::Ud,
        opcode: Opcode::SendOnly,
    };
    with_wire(&|wire| {
        let (socket, class, source) = (wire.own(), 0, 0);
        let (own, headers) = (
            Receiver {
                socket,
                class,
                source,
            },
            Headers::new(opcode, 0, Psn::new(0)),
        );
        wire.send::<()>(&own, &headers, 0, |_| Ok(())).unwrap();
    });
    assert!(
        !idle.look(false) && idle.slice() < longest / 100,
        "the socket has no room"
    );
}

/// Other RoCE devices have queue pair numbers that no virtual function has.
#[test]
fn the_udp_port_of_a_peer_follows_from_its_number_unless_an_option_tells_it() {
    let fabric = FabricSpec::Local(LocalFabric::new());
    let roce = RoceOptions::new(own_address(2));
    let [plain, told] = [
        roce.clone(),
        RoceOptions {
            peers: Some(UDP_PORT),
            ..roce
        },
    ]
    .map(|roce| open_vf(&fabric, roce));
    for (qpn, port) in [
        (0x11, UDP_PORT),
        (0x7fff, UDP_PORT),
        (0x8000, UDP_PORT + 1),
        (0x2_0011, UDP_PORT + 7),
    ] {
        let ports = [&plain, &told].map(|hca| ports_of(hca, qpn));
        assert_eq!(ports, [(port, port), (UDP_PORT, UDP_PORT)], "{qpn:#x}");
    }
}

/// Returns the UDP ports to which the packets of a connection and a datagram are sent.
fn ports_of(hca: &Hca, qpn: u32) -> (u16, u16) {
    let vector = AddressVector {
        rmac: [0x02, 0, 0, 0, 0, 1],
        ..AddressVector::default()
    };
    let state = hca.state.borrow();
    let port = state.wire.port.as_ref().unwrap();
    let by_number = PacketAddress {
        ip: port.own().ip(),
        port: None,
        psn: 0,
        mtu: 1024,
        traffic_class: 0,
    };
    let datagram = DatagramSegment {
        vector,
        qpn,
        qkey: 0,
    };
    (
        port.socket_of(qpn, &by_number).port(),
        port.port_of(&datagram),
    )
}

/// A device that sends packets to all peers is not found by a device that does not. If only one end
/// has a capability, only this end can attach the other.
#[test]
fn both_ends_choose_the_same_way() {
    let dir = std::env::temp_dir().join(format!("copyrpc-ports-{}", std::process::id()));
    DirBuilder::new().mode(0o700).create(&dir).unwrap();
    for fabric in [
        FabricSpec::Local(LocalFabric::new()),
        FabricSpec::Shared {
            dir: Some(dir.clone()),
        },
    ] {
        let address = own_address(1);
        let plain = || open_vf(&fabric, RoceOptions::new(address));
        let lossy = RoceOptions {
            network: BadNetwork {
                loss_permille: 1,
                ..BadNetwork::default()
            },
            ..RoceOptions::new(address)
        };
        let all = RoceOptions {
            is_for_all: true,
            ..RoceOptions::new(address)
        };
        let devices = [
            plain(),
            plain(),
            open_vf(&fabric, all),
            open_vf(&fabric, lossy),
        ];
        for (a, from) in devices.iter().enumerate() {
            for (b, to) in devices.iter().enumerate() {
                let address = to.address(0);
                let expected = if a < 2 && b < 2 {
                    Way::Memory
                } else {
                    Way::Packets
                };
                assert_eq!(from.way_to(&address), expected, "{a} {b}");
                let by_number = Address {
                    packets: address.packets,
                    ..Address::of_number(u32::from(to.lid()) << QP_INDEX_BITS)
                };
                assert_eq!(from.way_to(&by_number), expected, "{a} {b}");
                let of_another = Address {
                    epoch: address.epoch.map(|epoch| epoch ^ 1),
                    ..address
                };
                assert_eq!(from.way_to(&of_another), Way::Packets);
            }
        }
    }
    std::fs::remove_dir_all(dir).unwrap();
}
