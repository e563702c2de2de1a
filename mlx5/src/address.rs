//! The address of a queue pair, and its encoding for the exchange with the peer.

/// Kinds of devices. Queue pairs whose addresses have different kinds never connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DeviceKind {
    /// The software HCA of this crate; in an address, a software HCA without a port for packets.
    Soft = 1,
    /// A device that libibverbs finds; in an address, also a software HCA with a port for packets.
    Hardware = 2,
}

/// The address of a queue pair: all that its peer needs to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpAddress {
    /// Kind of device.
    pub kind: DeviceKind,
    /// Largest payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096. A connection uses the
    /// smaller MTU of its two ends.
    pub mtu: u16,
    /// Local identifier of the port; 0 on RoCE.
    pub lid: u16,
    /// UDP port of a software HCA that sends RoCE packets. 0 for all other devices: RoCE hardware
    /// always has port 4791.
    pub port: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// Sequence number of the first packet that the queue pair sends, 24 bits; a software HCA
    /// without packets ignores it.
    pub psn: u32,
    /// Incarnation of the device, on the software HCA: a later process may get the LID of an ended
    /// process, but never the same incarnation. 0 on hardware.
    pub epoch: u64,
    /// Global identifier of the port, the only identifier of a RoCE port. In an address of kind
    /// `Soft` the field identifies the user of the process instead, for the error that reports a
    /// peer of another user: the last four bytes are the user id plus 1, the others zero.
    pub gid: [u8; 16],
}

impl QpAddress {
    /// Length of the encoding ([`to_bytes`](Self::to_bytes)), in bytes.
    pub const LEN: usize = 40;

    /// Returns the address of a queue pair of a software HCA.
    #[must_use]
    pub const fn soft(lid: u16, qpn: u32, epoch: u64) -> Self {
        Self {
            kind: DeviceKind::Soft,
            mtu: 4096,
            lid,
            port: 0,
            qpn,
            psn: 0,
            epoch,
            gid: [0; 16],
        }
    }

    pub(crate) fn of_user(mut self, user: u32) -> Self {
        self.gid[12..].copy_from_slice(&user.wrapping_add(1).to_le_bytes());
        self
    }

    pub(crate) fn user(&self) -> Option<u32> {
        let user = self
            .gid
            .last_chunk()
            .filter(|_| self.kind == DeviceKind::Soft);
        user.and_then(|user| u32::from_le_bytes(*user).checked_sub(1))
    }

    /// Encodes the address, for any transport to the peer: kind, a zero byte, MTU, LID, UDP port,
    /// QPN, PSN, epoch, GID; little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0] = self.kind as u8;
        b[2..4].copy_from_slice(&self.mtu.to_le_bytes());
        b[4..6].copy_from_slice(&self.lid.to_le_bytes());
        b[6..8].copy_from_slice(&self.port.to_le_bytes());
        b[8..12].copy_from_slice(&self.qpn.to_le_bytes());
        b[12..16].copy_from_slice(&self.psn.to_le_bytes());
        b[16..24].copy_from_slice(&self.epoch.to_le_bytes());
        b[24..40].copy_from_slice(&self.gid);
        b
    }

    /// Decodes the bytes of [`to_bytes`](Self::to_bytes). Returns `None` for bytes that `to_bytes`
    /// never makes.
    #[must_use]
    pub fn from_bytes(b: &[u8; Self::LEN]) -> Option<Self> {
        let kind = match b[0] {
            1 => DeviceKind::Soft,
            2 => DeviceKind::Hardware,
            _ => return None,
        };
        let mut gid = [0; 16];
        gid.copy_from_slice(&b[24..40]);
        let address = Self {
            kind,
            mtu: u16::from_le_bytes([b[2], b[3]]),
            lid: u16::from_le_bytes([b[4], b[5]]),
            port: u16::from_le_bytes([b[6], b[7]]),
            qpn: u32::from_le_bytes([b[8], b[9], b[10], b[11]]),
            psn: u32::from_le_bytes([b[12], b[13], b[14], b[15]]),
            epoch: u64::from_le_bytes([b[16], b[17], b[18], b[19], b[20], b[21], b[22], b[23]]),
            gid,
        };
        let is_mtu = address.mtu.is_power_of_two() && (256..=4096).contains(&address.mtu);
        (address.to_bytes() == *b && is_mtu && address.qpn < 1 << 24 && address.psn < 1 << 24)
            .then_some(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_the_way_to_the_peer_and_other_bytes_are_none() {
        let gid = core::array::from_fn(|i| i as u8 + 1);
        let kind = DeviceKind::Hardware;
        let address = QpAddress {
            kind,
            mtu: 1024,
            lid: 0x1234,
            port: 0x4321,
            qpn: 0xabcdef,
            psn: 0x654321,
            epoch: 1 << 60 | 7,
            gid,
        };
        let bytes = address.to_bytes();
        assert_eq!(QpAddress::from_bytes(&bytes), Some(address));
        let soft = QpAddress::soft(7, 8, 9);
        assert_eq!(QpAddress::from_bytes(&soft.to_bytes()), Some(soft));
        // Each of these values is illegal at its offset: kind, padding, MTU, the upper bytes of QPN
        // and PSN.
        for (at, value) in [
            (0, 0),
            (0, 3),
            (1, 1),
            (2, 1),
            (3, 0),
            (3, 32),
            (11, 1),
            (15, 1),
        ] {
            let mut bad = bytes;
            bad[at] = value;
            assert_eq!(QpAddress::from_bytes(&bad), None, "byte {at} is {value}");
        }
    }
}
