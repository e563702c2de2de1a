//! Datagram segment (`struct mlx5_wqe_datagram_seg`, which is a `struct mlx5_wqe_av`), after the
//! control segment of a UD WQE: 48 bytes.
//!
//! | bytes | field | InfiniBand | RoCE |
//! |---|---|---|---|
//! | 0..4 | Q_Key (4..8 are reserved on UD) | | |
//! | 8..12 | bit 31: the segment has all 48 bytes (`MLX5_EXTENDED_UD_AV`, always set here); 24-bit QPN | | |
//! | 12 | static rate (bits 4..8; `enum ibv_rate` plus 5, or 0), service level | bits 0..4 | bits 1..4 |
//! | 13 | fl_mlid: source path bits | 7 bits | 0 |
//! | 14..16 | rlid | LID | UDP source port |
//! | 20..26 | rmac | 0 | MAC address |
//! | 26 | traffic class | | |
//! | 27 | hop limit | | |
//! | 28..32 | GRH present (bit 30), index of the source GID (20..28), flow label (0..20) | | bit 30 clear: there is always a GRH |
//! | 32..48 | rgid | GID | IP address |
//!
//! Sources of the fields: libmlx5 `mlx5_create_ah`, the kernel's `create_ib_ah`.

use super::{be16, be32};

const QPN_EXTENDED: u32 = 1 << 31;
const GRH_PRESENT: u32 = 1 << 30;

/// The path of a datagram to a port: all fields of the segment except the number and the Q_Key of
/// the queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct AddressVector {
    /// Static rate in the upper 4 bits, service level in the lower.
    pub stat_rate_sl: u8,
    /// Source path bits.
    pub fl_mlid: u8,
    /// LID of the port (InfiniBand), UDP source port (RoCE).
    pub rlid: u16,
    /// MAC address (RoCE).
    pub rmac: [u8; 6],
    /// Traffic class of the GRH.
    pub tclass: u8,
    /// Hop limit of the GRH.
    pub hop_limit: u8,
    /// GRH present, index of the source GID, flow label.
    pub grh_gid_fl: u32,
    /// GID of the port.
    pub rgid: [u8; 16],
}

impl AddressVector {
    /// Makes the vector of a port of this InfiniBand subnet: LID and service level (0..=15), no
    /// GRH.
    #[must_use]
    pub const fn local(lid: u16, service_level: u8) -> Self {
        let (rmac, rgid) = ([0; 6], [0; 16]);
        Self {
            stat_rate_sl: service_level & 0xf,
            fl_mlid: 0,
            rlid: lid,
            rmac,
            tclass: 0,
            hop_limit: 0,
            grh_gid_fl: 0,
            rgid,
        }
    }

    /// Adds a GRH (InfiniBand): index of the source GID, flow label (20 bits), hop limit, traffic
    /// class, GID of the port.
    #[must_use]
    pub const fn with_grh(
        self,
        source_gid_index: u8,
        flow_label: u32,
        hop_limit: u8,
        tclass: u8,
        gid: [u8; 16],
    ) -> Self {
        let grh_gid_fl = GRH_PRESENT | (source_gid_index as u32) << 20 | flow_label & 0xf_ffff;
        Self {
            grh_gid_fl,
            hop_limit,
            tclass,
            rgid: gid,
            ..self
        }
    }

    /// Returns whether the message carries a GRH, on InfiniBand.
    #[must_use]
    pub const fn has_grh(&self) -> bool {
        self.grh_gid_fl & GRH_PRESENT != 0
    }

    /// Returns the index of the source GID in the table of the sender's port.
    #[must_use]
    pub const fn source_gid_index(&self) -> u8 {
        (self.grh_gid_fl >> 20) as u8
    }
}

/// Datagram segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramSegment {
    /// Path to the port.
    pub vector: AddressVector,
    /// Queue pair at that port, 24 bits.
    pub qpn: u32,
    /// Q_Key of that queue pair.
    pub qkey: u32,
}

impl DatagramSegment {
    /// Length of the segment in bytes.
    pub const LEN: usize = 48;

    /// Encodes the segment.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let vector = &self.vector;
        let mut b = [0; Self::LEN];
        b[0..4].copy_from_slice(&self.qkey.to_be_bytes());
        b[8..12].copy_from_slice(&(QPN_EXTENDED | self.qpn & 0xff_ffff).to_be_bytes());
        b[12] = vector.stat_rate_sl;
        b[13] = vector.fl_mlid;
        b[14..16].copy_from_slice(&vector.rlid.to_be_bytes());
        b[20..26].copy_from_slice(&vector.rmac);
        b[26] = vector.tclass;
        b[27] = vector.hop_limit;
        b[28..32].copy_from_slice(&vector.grh_gid_fl.to_be_bytes());
        b[32..48].copy_from_slice(&vector.rgid);
        b
    }

    /// Decodes the segment; any bytes are accepted. The short form, which has bit 31 of the QPN
    /// clear and only the first 16 bytes, is not recognised: no known driver emits it.
    #[must_use]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        let mut vector = AddressVector {
            stat_rate_sl: b[12],
            fl_mlid: b[13],
            rlid: be16(b, 14),
            tclass: b[26],
            hop_limit: b[27],
            grh_gid_fl: be32(b, 28),
            ..AddressVector::default()
        };
        vector.rmac.copy_from_slice(&b[20..26]);
        vector.rgid.copy_from_slice(&b[32..48]);
        Self {
            vector,
            qpn: be32(b, 8) & 0xff_ffff,
            qkey: be32(b, 0),
        }
    }
}
