//! Packets of RoCEv2, the payload of UDP datagrams to port [`UDP_PORT`] (InfiniBand Architecture
//! Specification, volume 1, "Transport Layer"; annex A17, "RoCEv2").
//!
//! | bytes | part |
//! |---|---|
//! | 12 | base transport header: [`Bth`] |
//! | 0 to 28 | extended headers, which the [`Opcode`] determines: [`Headers`] |
//! | n | payload, and 0 to 3 pad bytes after it |
//! | 4 | invariant CRC: [`Flow::icrc`] |
//!
//! The payload of a packet to queue pair 1 is a management datagram: [`Mad`].
//!
//! ```
//! use mlx5_wire::roce::{Aeth, Bth, Flow, Headers, Opcode, PacketOpcode, Psn, Transport, UDP_PORT};
//!
//! let opcode = PacketOpcode { transport: Transport::Rc, opcode: Opcode::Acknowledge };
//! let headers = Headers { aeth: Aeth::ack(1), ..Headers::new(opcode, 0x11, Psn::new(0xff_fffe)) };
//! let mut packet = headers.emit().to_vec();
//! let (source, destination) = (([10, 9, 1, 2], 0xc121).into(), ([10, 9, 1, 1], UDP_PORT).into());
//! let flow = Flow { source, destination, identification: 0xd7a0 };
//! packet.extend(flow.icrc(&packet, &[]));
//! assert_eq!(packet[16..], [0xf4, 0xae, 0xa4, 0xb7]);
//! assert_eq!(Headers::parse(&packet).unwrap(), (headers, &[][..]));
//! assert_eq!(flow.check(&packet), Some(0xd7a0));
//! ```

mod aeth;
mod bth;
mod headers;
mod icrc;
mod mad;
mod opcode;
mod psn;

pub use aeth::{Aeth, Nak, Syndrome};
pub use bth::Bth;
pub use headers::{AtomicEth, Deth, HeaderBytes, Headers, MAX_HEADER_BYTES, PacketError, Reth};
pub use icrc::{Flow, ICRC_BYTES};
pub use mad::{CmKind, Field, IpAddresses, MAD_BYTES, MAD_QKEY, MAD_QPN, Mad, field};
pub use opcode::{Opcode, PacketOpcode, Transport};
pub use psn::Psn;

/// The UDP destination port of RoCEv2 (IANA: `roce`).
pub const UDP_PORT: u16 = 4791;

#[cfg(test)]
mod tests;
