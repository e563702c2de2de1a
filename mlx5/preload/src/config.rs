//! What the launcher tells the library, and how: environment variables.

/// Major and minor number of the device file, `MAJOR:MINOR`. Without it the library does nothing.
pub(crate) const DEVICE: &str = "MLX5_PRELOAD_DEVICE";
/// `ib` or `roce`.
pub(crate) const LINK: &str = "MLX5_PRELOAD_LINK";
/// The directory in which processes meet.
pub(crate) const FABRIC: &str = "MLX5_PRELOAD_FABRIC";
/// Faults, separated by commas.
pub(crate) const FAULTS: &str = "MLX5_PRELOAD_FAULTS";
/// Where the log goes: a file, or `-` for standard error.
pub(crate) const LOG: &str = "MLX5_PRELOAD_LOG";
/// Set: commands that succeed are logged too.
pub(crate) const LOG_COMMANDS: &str = "MLX5_PRELOAD_LOG_COMMANDS";

/// LID of the port.
pub(crate) const LID: u16 = 1;
/// GID of the port, and in its upper half GUIDs: fe80::200:ff:fe00:1.
pub(crate) const GID: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, 1];
/// `vendor_part_id`: ConnectX-6.
pub(crate) const DEVICE_ID: u16 = 0x101b;
/// Firmware version: major, minor, sub-minor.
pub(crate) const FIRMWARE: [u16; 3] = [20, 35, 1012];

/// Link layer of the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// InfiniBand: addressed by LID.
    InfiniBand,
    /// RoCE: addressed by GID.
    Ethernet,
}

impl Link {
    /// `ib` or `roce`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "ib" => Ok(Self::InfiniBand),
            "roce" => Ok(Self::Ethernet),
            _ => Err(format!("`{text}` is no link; legal are ib and roce")),
        }
    }
}
