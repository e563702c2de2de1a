//! The device of servers and clients by default.

use mlx5::DeviceSpec;

const DEVICE_VARIABLE: &str = "COPYRPC_DEVICE";

/// Returns the device that is given by the environment variable `COPYRPC_DEVICE`, in the form that
/// [`DeviceSpec`]'s `From<&str>` takes; without the variable, the software HCA. Servers and clients
/// use this device by default; a context that connects to them needs the same device.
#[must_use]
pub fn default_device() -> DeviceSpec {
    std::env::var(DEVICE_VARIABLE)
        .map_or_else(|_| DeviceSpec::default(), |name| DeviceSpec::from(&*name))
}
