//! Counters of the ports in `/sys`. They count for all programs of the fabric, which share its
//! ports. A file of the tree gets the present number when a program opens it, and when the program
//! reads it again.

use std::ffi::{OsStr, c_int};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

use memmap2::MmapOptions;
use mlx5_hca::PortCounters;

use crate::options::config::PCI_BUS;
use crate::options::errno::Errno;
use crate::options::log;
use crate::options::settings::{self, Settings};
use crate::system::sys;

/// Returns the counters of the ports, one [`PortCounters`] each; `None` without memory for them.
pub(crate) fn of_ports(settings: &Settings) -> Option<&'static [PortCounters]> {
    static PORTS: OnceLock<Option<&'static [PortCounters]>> = OnceLock::new();
    *PORTS.get_or_init(|| {
        map(settings)
            .inspect_err(|errno| log::error(settings, format_args!("no counters: {errno}")))
            .ok()
    })
}

fn map(settings: &Settings) -> Result<&'static [PortCounters], Errno> {
    let (path, ports) = (settings.fabric.join("counters"), settings.network.len());
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    let bytes = ports * size_of::<PortCounters>();
    // SAFETY: the descriptor is open. The call allocates the file's blocks; without them, the first
    // access to the mapping would cause a signal if the file system is full.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) } {
        0 => {}
        errno => return Err(Errno(errno)),
    }
    let counters = MmapOptions::new().len(bytes).map_raw(&file)?;
    let at = counters.as_mut_ptr().cast();
    core::mem::forget(counters);
    // SAFETY: `at` is the start of a mapping of `ports` counters. No process shrinks the file, the
    // mapping is never removed, and zero bytes are valid counters.
    Ok(unsafe { core::slice::from_raw_parts(at, ports) })
}

#[derive(Debug)]
pub(crate) struct Counter {
    place: usize,
    port: &'static PortCounters,
}

impl Counter {
    /// Returns the counter if the descriptor is of a counter's file, opened by a `path` such as
    /// `.../mlx5_0/ports/1/counters/port_xmit_data`.
    pub(crate) fn of(fd: c_int, path: &[u8]) -> Option<Self> {
        let place = PortCounters::NAMES
            .split(' ')
            .position(|name| path.ends_with(name.as_bytes()))?;
        let path = sys::directory(fd).ok()?;
        let path = Path::new(OsStr::from_bytes(&path));
        let mut names = path.iter().rev().filter_map(OsStr::to_str);
        let is_counters = names.nth(1).is_some_and(|dir| dir.ends_with("counters"))
            && path.iter().any(|dir| *dir == *format!("pci{PCI_BUS}"));
        let device = names
            .nth(2)
            .filter(|_| is_counters)?
            .strip_prefix("mlx5_")?
            .parse::<usize>()
            .ok()?;
        let port = of_ports(settings::get()?)?.get(device)?;
        Some(Self { place, port })
    }

    /// Writes the value of the counter to the file of the descriptor. The value never decreases, so
    /// the text never gets shorter, and the file need not be truncated.
    pub(crate) fn show(&self, fd: c_int) {
        let text = format!("{}\n", self.port.get(self.place));
        let _ = File::options()
            .write(true)
            .open(format!("/proc/self/fd/{fd}"))
            .and_then(|file| file.write_all_at(text.as_bytes(), 0));
    }
}
