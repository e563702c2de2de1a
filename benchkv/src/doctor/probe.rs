//! Examines this machine. Opens devices and loads libraries. Changes nothing, except that it may
//! create this user's directory in `/dev/shm`.

use std::path::Path;

use benchkv_harness::affinity::{Usable, usable_cores};
use benchkv_harness::environment::Environment;
use benchkv_harness::machine::{self, Library};
use copyrpc_shm::dir::Dir;
use mlx5::DeviceSpec;
use mlx5::verbs::{self, DeviceEntry, PortEntry, PortState, VerbsOptions};

use super::{Device, Machine, Port};

/// Examines the machine. `shm_dir` is the directory that jobs would get. Takes about as long as
/// opening the devices.
pub fn probe(shm_dir: Option<&Path>) -> Machine {
    let environment = Environment::detect();
    Machine {
        // The release follows the name of the system.
        kernel: environment
            .kernel
            .split(' ')
            .nth(1)
            .unwrap_or("unknown")
            .to_owned(),
        usable_cores: usable_cores()
            .map(Usable::on_this_host)
            .map_err(|error| error.to_string()),
        cores_online: environment.cores_online,
        membarrier: copyrpc_shm::sync::heavy_barrier(),
        shm: Dir::open(shm_dir)
            .map_err(|error| error.to_string())
            .and_then(|dir| {
                let space = machine::space(dir.path()).map_err(|error| error.to_string())?;
                Ok((dir.path().display().to_string(), space))
            }),
        open_files: machine::open_files_limit(),
        address_space: machine::address_limit(),
        memlock: machine::memlock_limit(),
        huge_pages: machine::huge_pages(),
        driver: ["libibverbs.so.1", "libmlx5.so.1"]
            .map(|name| (name, Library::load(name).map(|library| library.file_name())))
            .into(),
        devices: verbs::DeviceEntry::all()
            .map(|found| found.iter().map(device).collect())
            .map_err(|error| error.to_string()),
        mpi_library: mpi_library(),
        mpirun: machine::program("mpirun"),
        ucx: ucx(),
    }
}

fn device(entry: &DeviceEntry) -> Device {
    let ports = entry
        .ports
        .as_ref()
        .map(|ports| ports.iter().map(|found| port(&entry.name, found)).collect());
    Device {
        name: entry.name.clone(),
        numa_node: entry.numa_node,
        ports: ports.map_err(ToString::to_string),
    }
}

fn port(device: &str, entry: &PortEntry) -> Port {
    let PortEntry {
        number,
        state,
        link_layer,
        lid,
        mtu,
    } = entry;
    let is_active = *state == PortState::Active;
    Port {
        number: *number,
        is_active,
        text: format!("{state:?}, {link_layer}, LID {lid}, MTU {mtu}"),
        reached_by: is_active.then(|| {
            let options = VerbsOptions {
                device: Some(device.to_owned()),
                port: Some(*number),
                ..VerbsOptions::default()
            };
            let opened = mlx5::Device::open(DeviceSpec::Verbs(options));
            opened
                .map(|device| format!("{}; {}", device.info().transport, device.info().modes))
                .map_err(|error| error.to_string())
        }),
    }
}

#[cfg(feature = "mpi")]
fn mpi_library() -> Option<String> {
    Some(benchkv_harness::launch::exchange::mpi_library())
}

#[cfg(not(feature = "mpi"))]
fn mpi_library() -> Option<String> {
    None
}

fn ucx() -> Result<String, String> {
    let library = Library::load("libucp.so.0")?;
    // SAFETY: the function takes no arguments and returns a constant string of the library: `const
    // char *ucp_get_version_string(void)` in ucp/api/ucp.h.
    let version = unsafe { library.text_of(c"ucp_get_version_string") };
    Ok(format!(
        "{} ({})",
        version.unwrap_or_else(|| "version unknown".to_owned()),
        library.file.display()
    ))
}
