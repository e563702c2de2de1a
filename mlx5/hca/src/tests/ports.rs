//! Devices with ports for packets.

use std::net::{IpAddr, UdpSocket};

use mlx5_wire::roce::UDP_PORT;

use crate::{FabricSpec, Hca, LocalFabric, Port, RoceOptions, SoftOptions};

/// Returns an address of this host whose ports no other test uses.
fn own_address(test: u8) -> IpAddr {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    [127, 64 + test, high, low].into()
}

/// Opens a virtual function of the port at an address.
fn open_vf(fabric: &LocalFabric, address: IpAddr) -> Hca {
    let (port, roce) = (
        Some(Port {
            network: &[],
            index: 0,
        }),
        Some(RoceOptions::new(address)),
    );
    let fabric = FabricSpec::Local(fabric.clone());
    Hca::open(&SoftOptions {
        fabric,
        port,
        roce,
        arena_bytes: 1 << 20,
        ..SoftOptions::default()
    })
    .unwrap()
}

/// The port belongs to a program that is no device, or to a device of another user, whose fabric is
/// another one.
#[test]
fn a_virtual_function_whose_udp_port_is_taken_is_left_for_the_next_one() {
    let address = own_address(0);
    let _taken = UdpSocket::bind((address, UDP_PORT)).unwrap();
    let [one, two] = [(); 2].map(|()| LocalFabric::new());
    let devices = [&one, &two, &one].map(|fabric| open_vf(fabric, address));
    let found = devices.each_ref().map(|device| {
        (
            device.address(0).lid,
            device.wire_address().unwrap().0.port() - UDP_PORT,
        )
    });
    assert_eq!(found, [(2, 1), (3, 2), (4, 3)]);
}
