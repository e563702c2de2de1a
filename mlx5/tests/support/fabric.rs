//! Devices of several processes.

use std::path::{Path, PathBuf};

use mlx5::{Device, DeviceSpec, FabricSpec, SoftOptions, Timing};

use super::time::{Mode, mode};

/// Time from the doorbell to the effect, in delay mode.
const DELAY_NS: u64 = 3_000;

/// Makes a directory for a fabric of its own.
pub(crate) fn new_dir(name: &str) -> PathBuf {
    let dir = PathBuf::from(format!("/dev/shm/mlx5-test-{name}-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    dir
}

/// Returns the options of a device of the fabric in `dir`. `MLX5_TEST_TIME=delay` delays it.
/// Processes do not share the clock of virtual time, so that mode is immediate here.
pub(crate) fn options(dir: &Path) -> SoftOptions {
    let timing = if mode() == Mode::Delay {
        Timing::Delay { ns: DELAY_NS }
    } else {
        Timing::Immediate
    };
    SoftOptions {
        fabric: FabricSpec::Shared {
            dir: Some(dir.to_owned()),
        },
        timing,
        ..Default::default()
    }
}

/// Checks that the next device of the fabric cleans up after the killed devices, and that no file
/// is left then.
pub(crate) fn remove_dir(dir: &Path) {
    drop(Device::open(DeviceSpec::Soft(options(dir))).unwrap());
    assert_eq!(
        std::fs::read_dir(dir).unwrap().count(),
        0,
        "nothing is left behind"
    );
    std::fs::remove_dir(dir).unwrap();
}
