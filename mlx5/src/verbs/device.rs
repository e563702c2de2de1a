//! Finding devices, opening one, and choosing its port and GID.

use core::ffi::{CStr, c_char, c_int};
use core::ptr::NonNull;
use std::net::Ipv6Addr;
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{Access, OFlags, access, fcntl_getfl, fcntl_setfl};

use super::abi::*;
use super::library::Api;
use super::numbers::*;
use super::{LinkLayer, PortEntry, VerbsOptions};
use crate::error::verbs::{CallError, PortState, VerbsError};

/// The devices that libibverbs finds. Devices opened from the list stay open when the list is
/// dropped.
pub(crate) struct List {
    api: &'static Api,
    list: NonNull<*mut ibv_device>,
    count: usize,
}

impl List {
    pub(crate) fn get(api: &'static Api) -> Result<Self, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: the call writes only the count. It returns null or an array, which `drop` frees.
        let list = NonNull::new(unsafe { (api.verbs.ibv_get_device_list)(&raw mut count) });
        let count = usize::try_from(count).unwrap_or(0);
        match list {
            Some(list) if count > 0 => Ok(Self { api, list, count }),
            list => {
                drop(list.map(|list| Self {
                    api,
                    list,
                    count: 0,
                }));
                Err(VerbsError::NoDevice {
                    hint: why_there_is_none(Path::new("/sys/class/infiniband_verbs")),
                })
            }
        }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Found<'_>> {
        (0..self.count).map(|i| {
            Found {
                api: self.api,
                // SAFETY: `i` is less than `count`, and the array holds `count` pointers to devices
                // that live as long as the list.
                device: unsafe { &**self.list.add(i).as_ref() },
            }
        })
    }

    /// Returns the devices that the options allow, in the order in which they are tried. Without a
    /// name these are all devices except iWARP devices: first mlx5 devices, then devices that need
    /// a relay.
    pub(crate) fn candidates(&self, options: &VerbsOptions) -> Result<Vec<Found<'_>>, VerbsError> {
        let mut devices = self
            .all()
            .filter(|found| !found.is_iwarp())
            .collect::<Vec<_>>();
        devices.sort_by_key(|found| !found.is_mlx5());
        let Some(wanted) = &options.device else {
            let hint = || {
                "those that it lists are iWARP devices, whose connections need rdma_cm".to_owned()
            };
            return if devices.is_empty() {
                Err(VerbsError::NoDevice { hint: hint() })
            } else {
                Ok(devices)
            };
        };
        if let Some(found) = wanted
            .parse::<usize>()
            .ok()
            .and_then(|place| devices.get(place))
        {
            return Ok(vec![*found]);
        }
        match self.all().find(|found| found.name() == *wanted) {
            Some(found) if found.is_iwarp() => Err(VerbsError::Iwarp { name: found.name() }),
            Some(found) => Ok(vec![found]),
            None => Err(VerbsError::NoSuchDevice {
                name: wanted.clone(),
                there: devices.iter().map(Found::name).collect(),
            }),
        }
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the array came from `ibv_get_device_list`, and nothing of it is used after this
        // call.
        unsafe { (self.api.verbs.ibv_free_device_list)(self.list.as_ptr()) };
    }
}

/// Returns the likely reason why libibverbs lists no device, from the kernel's files.
fn why_there_is_none(class: &Path) -> String {
    let Ok(mut entries) = std::fs::read_dir(class) else {
        return "there is no NIC, or the kernel module ib_uverbs is not loaded (lspci -d 15b3:; modprobe mlx5_ib ib_uverbs)".to_owned();
    };
    if entries.any(|entry| {
        entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("uverbs"))
    }) {
        return "the kernel has some, but their files /dev/infiniband/uverbsN are missing here; give them to this container".to_owned();
    }
    "no NIC has an RDMA driver (lspci -d 15b3:; modprobe mlx5_ib)".to_owned()
}

/// Returns the text of a C array, up to its NUL.
fn text(chars: &[c_char]) -> String {
    // SAFETY: the slice covers exactly the bytes of `chars`; a byte is valid as a signed and as an
    // unsigned char.
    let bytes = unsafe { core::slice::from_raw_parts(chars.as_ptr().cast::<u8>(), chars.len()) };
    CStr::from_bytes_until_nul(bytes)
        .map(|s| s.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// Returns whether the file exists, but this process lacks the permission to read and write it.
fn is_forbidden(path: &str) -> bool {
    let checked = access(path, Access::READ_OK | Access::WRITE_OK);
    checked.is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

/// Returns whether the file exists but cannot be opened for lack of permission, including a refusal
/// by a security module or a device cgroup.
fn is_refused(path: &str) -> bool {
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path);
    opened.is_err_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied)
}

#[derive(Clone, Copy)]
pub(crate) struct Found<'a> {
    api: &'static Api,
    device: &'a ibv_device,
}

impl Found<'_> {
    fn pointer(&self) -> *mut ibv_device {
        core::ptr::from_ref(self.device).cast_mut()
    }

    pub(crate) fn name(&self) -> String {
        text(&self.device.name)
    }

    pub(crate) fn is_mlx5(&self) -> bool {
        // SAFETY: the device belongs to a list that is alive.
        unsafe { (self.api.mlx5.mlx5dv_is_supported)(self.pointer()) }
    }

    fn is_iwarp(&self) -> bool {
        self.device.transport_type == IBV_TRANSPORT_IWARP
    }

    /// Returns the node GUID, an EUI-64.
    pub(crate) fn node_guid(&self) -> u64 {
        // SAFETY: the device belongs to a list that is alive.
        u64::from_be(unsafe { (self.api.verbs.ibv_get_device_guid)(self.pointer()) })
    }

    pub(crate) fn numa_node(&self) -> Option<u32> {
        // A negative number, which does not parse, means that the system has only one node, or does
        // not know the node.
        std::fs::read_to_string(Path::new(&text(&self.device.ibdev_path)).join("device/numa_node"))
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    pub(crate) fn open(&self) -> Result<Opened, VerbsError> {
        let (name, path) = (
            self.name(),
            format!("/dev/infiniband/{}", text(&self.device.dev_name)),
        );
        // The permission is checked first: without it, libibverbs tries other ways for seconds.
        if is_forbidden(&path) {
            return Err(VerbsError::Permission { name, path });
        }
        // SAFETY: the device belongs to a list that is alive.
        let context = NonNull::new(unsafe { (self.api.verbs.ibv_open_device)(self.pointer()) });
        match context.ok_or_else(|| CallError::last("ibv_open_device")) {
            Ok(context) => Ok(Opened {
                api: self.api,
                context,
                name,
                numa_node: self.numa_node(),
            }),
            // The `errno` is from the last of the ways to open the device, so it need not report a
            // missing permission; `is_refused` does.
            Err(_) if is_refused(&path) => Err(VerbsError::Permission { name, path }),
            Err(error) => Err(error
                .advise(format!("{name} cannot be opened; dmesg may say more"))
                .into()),
        }
    }
}

/// An open device. Every object made from the device must be destroyed before the device is
/// dropped.
pub(crate) struct Opened {
    pub(crate) api: &'static Api,
    pub(crate) context: NonNull<ibv_context>,
    pub(crate) name: String,
    pub(crate) numa_node: Option<u32>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: the device is open, and is closed only here.
        unsafe { (self.api.verbs.ibv_close_device)(self.context.as_ptr()) };
    }
}

impl Opened {
    pub(crate) fn context(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    pub(crate) fn attributes(&self) -> Result<ibv_device_attr, CallError> {
        // SAFETY: the struct holds numbers and characters, for which zero is a valid value.
        let mut attr: ibv_device_attr = unsafe { core::mem::zeroed() };
        // SAFETY: the device is open, and `attr` has room for the answer.
        CallError::check("ibv_query_device", unsafe {
            (self.api.verbs.ibv_query_device)(self.context(), &raw mut attr)
        })?;
        Ok(attr)
    }

    pub(crate) fn query_mlx5(&self) -> Result<mlx5dv_context, VerbsError> {
        let mut dv = mlx5dv_context {
            comp_mask: MLX5DV_CONTEXT_MASK_CQE_COMPRESION,
            ..mlx5dv_context::default()
        };
        // SAFETY: the device is an open mlx5 device, and `dv` has room for the fields that the mask
        // requests.
        let result = unsafe { (self.api.mlx5.mlx5dv_query_device)(self.context(), &raw mut dv) };
        CallError::check("mlx5dv_query_device", result)?;
        if dv.flags & MLX5DV_CONTEXT_FLAGS_CQE_V1 == 0 {
            Err(VerbsError::OldCqes {
                name: self.name.clone(),
            })
        } else {
            Ok(dv)
        }
    }

    pub(crate) fn port(&self, number: u8) -> Result<ibv_port_attr, CallError> {
        let mut attr = ibv_port_attr::default();
        // SAFETY: the device is open, and `attr` has room for the answer. The call fills the struct
        // up to `flags`; the rest stays 0.
        CallError::check("ibv_query_port", unsafe {
            (self.api.verbs.ibv_query_port)(self.context(), number, &raw mut attr)
        })?;
        Ok(attr)
    }

    pub(crate) fn ports(&self) -> Result<Vec<PortEntry>, VerbsError> {
        let entry = |number| {
            let attr = self.port(number)?;
            let (state, link_layer) = (PortState::of(attr.state), LinkLayer::of(attr.link_layer));
            Ok(PortEntry {
                number,
                state,
                link_layer,
                lid: attr.lid,
                mtu: mtu_bytes(attr.active_mtu),
            })
        };
        (1..=self.attributes()?.phys_port_cnt).map(entry).collect()
    }

    /// Makes `ibv_get_async_event` fail, instead of waiting, if there is no asynchronous event.
    pub(crate) fn never_wait_for_async_events(&self) -> Result<(), CallError> {
        // SAFETY: the device is open, and so is its descriptor.
        let fd = unsafe { BorrowedFd::borrow_raw((*self.context()).async_fd) };
        let set = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
        set.map_err(|errno| CallError::new("fcntl, of asynchronous events", errno.raw_os_error()))
    }

    /// Returns the number of completion vectors; a device has at least one.
    pub(crate) fn comp_vectors(&self) -> u32 {
        // SAFETY: the device is open, and the number never changes.
        let vectors = unsafe { (*self.context()).num_comp_vectors };
        u32::try_from(vectors).unwrap_or(0).max(1)
    }

    /// Returns type and value of the GID at `index`; `None` if the table has no GID there.
    fn gid(&self, port: u8, index: u8) -> Option<Gid> {
        let mut entry = ibv_gid_entry::default();
        let size = size_of::<ibv_gid_entry>();
        // SAFETY: the device is open, and `entry` has room for an answer of `size` bytes.
        let result = unsafe {
            (self.api.verbs._ibv_query_gid_ex)(
                self.context(),
                port.into(),
                index.into(),
                &raw mut entry,
                0,
                size,
            )
        };
        (result == 0 && entry.gid != [0; 2]).then(|| Gid {
            index,
            kind: entry.gid_type,
            bytes: bytes_of(entry.gid),
        })
    }

    fn gids(&self, port: u8, attr: &ibv_port_attr) -> impl Iterator<Item = Gid> {
        (0..attr.gid_tbl_len.clamp(0, 256)).filter_map(move |index| self.gid(port, index as u8))
    }

    /// Returns the port that the options select; by default the first active port.
    pub(crate) fn choose_port(&self, options: &VerbsOptions) -> Result<Port, VerbsError> {
        let ports = self.attributes()?.phys_port_cnt;
        let number = match options.port {
            Some(port) if !(1..=ports).contains(&port) => {
                return Err(VerbsError::NoSuchPort {
                    name: self.name.clone(),
                    port,
                    ports,
                });
            }
            Some(port) => port,
            None => (1..=ports)
                .find(|&port| {
                    self.port(port)
                        .is_ok_and(|attr| attr.state == IBV_PORT_ACTIVE)
                })
                .unwrap_or(1),
        };
        let attr = self.port(number)?;
        let state = PortState::of(attr.state);
        if state != PortState::Active {
            return Err(VerbsError::PortDown {
                name: self.name.clone(),
                port: number,
                state,
                hint: state.hint(),
            });
        }
        if options.pkey_index >= attr.pkey_tbl_len {
            return Err(VerbsError::NoPkey {
                name: self.name.clone(),
                port: number,
                index: options.pkey_index,
                entries: attr.pkey_tbl_len,
            });
        }
        self.choose_gid(options, number, attr)
    }

    /// Returns the port with the GID that the options select; by default with the GID of the
    /// highest preference on RoCE, and with the GID at index 0, if there is one, on InfiniBand.
    fn choose_gid(
        &self,
        options: &VerbsOptions,
        number: u8,
        attr: ibv_port_attr,
    ) -> Result<Port, VerbsError> {
        let link_layer = LinkLayer::of(attr.link_layer);
        let is_roce = link_layer == LinkLayer::Ethernet;
        let gid = match options.gid_index {
            Some(index) => self.gid(number, index),
            None if is_roce => self.gids(number, &attr).max_by_key(Gid::preference),
            None => self.gid(number, 0),
        };
        let needs_grh =
            is_roce || options.gid_index.is_some() || attr.flags & IBV_QPF_GRH_REQUIRED != 0;
        if gid.is_none() && needs_grh {
            let there = self
                .gids(number, &attr)
                .map(|gid| gid.to_string())
                .collect();
            return Err(VerbsError::NoGid {
                name: self.name.clone(),
                port: number,
                index: options.gid_index.unwrap_or(0),
                there,
            });
        }
        let mtu = mtu_bytes(attr.active_mtu).min(options.mtu.unwrap_or(u16::MAX));
        Ok(Port {
            number,
            link_layer,
            lid: attr.lid,
            mtu,
            gid,
            has_grh: needs_grh,
        })
    }
}

pub(crate) struct Port {
    pub(crate) number: u8,
    pub(crate) link_layer: LinkLayer,
    pub(crate) lid: u16,
    /// MTU of the port in bytes.
    pub(crate) mtu: u16,
    pub(crate) gid: Option<Gid>,
    /// Whether packets carry a GRH, made from the GID.
    pub(crate) has_grh: bool,
}

impl Port {
    pub(crate) fn describe(&self) -> String {
        match (&self.gid, self.link_layer) {
            (Some(gid), LinkLayer::Ethernet) => format!(
                "{}, GID index {} ({})",
                gid.kind_text(),
                gid.index,
                gid.address()
            ),
            (Some(gid), _) if self.has_grh => {
                format!("InfiniBand, LID {}, GID index {}", self.lid, gid.index)
            }
            _ => format!("InfiniBand, LID {}", self.lid),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Gid {
    pub(crate) index: u8,
    pub(crate) kind: u32,
    pub(crate) bytes: [u8; 16],
}

impl Gid {
    fn address(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.bytes)
    }

    fn kind_text(&self) -> &'static str {
        match self.kind {
            IBV_GID_TYPE_IB => "InfiniBand",
            IBV_GID_TYPE_ROCE_V1 => "RoCE v1",
            IBV_GID_TYPE_ROCE_V2 => "RoCE v2",
            _ => "of another type",
        }
    }

    /// Returns the sort key of this GID; the GID with the largest key is chosen. RoCE v2 comes
    /// first, because it is routed. Then IPv4 comes before IPv6, and any other address before the
    /// interface's link-local address, which may not be reachable. Among equal GIDs the lowest
    /// index is chosen.
    fn preference(&self) -> (bool, bool, bool, u8) {
        let address = self.address();
        let is_link_local = address.segments()[0] & 0xffc0 == 0xfe80;
        (
            self.kind == IBV_GID_TYPE_ROCE_V2,
            address.to_ipv4_mapped().is_some(),
            !is_link_local,
            u8::MAX - self.index,
        )
    }
}

impl std::fmt::Display for Gid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} {}", self.index, self.kind_text(), self.address())
    }
}

pub(crate) fn bytes_of(gid: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&gid[0].to_ne_bytes());
    bytes[8..].copy_from_slice(&gid[1].to_ne_bytes());
    bytes
}

pub(crate) fn gid_of(bytes: [u8; 16]) -> [u64; 2] {
    [0, 8].map(|at| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_ne_bytes(word)
    })
}

fn mtu_bytes(mtu: c_int) -> u16 {
    128 << mtu.clamp(IBV_MTU_256, IBV_MTU_4096)
}

/// Returns the code (`enum ibv_mtu`) of the largest MTU that is at most `bytes`; at least 256.
pub(crate) fn mtu_code(bytes: u16) -> c_int {
    (IBV_MTU_256..=IBV_MTU_4096)
        .rev()
        .find(|&code| mtu_bytes(code) <= bytes)
        .unwrap_or(IBV_MTU_256)
}
