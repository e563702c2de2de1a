//! Discovery: devices find each other in a directory of control files, or in a table of this
//! process.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use copyrpc_shm::dir::Dir;
use copyrpc_shm::memfd::{MemfdAttachError, pid_namespace};
use copyrpc_shm::region::{CreateError, Region};

use crate::error::{ConnectError, OpenError};
use crate::shared::domain;
use crate::shared::layout::{Publication, REGION_KIND};
use crate::shared::memory::DeviceMemory;
use crate::shared::peer::{LIVES, Life, Peer};
use crate::shared::ports::Port;
use crate::types::request::{Way, Ways};

/// Unicast LIDs are 1..=0xbfff (InfiniBand specification, "Local Identifiers").
pub(crate) const MAX_LID: u16 = 0xbfff;
/// Largest number of a virtual function of a port. The number is the upper 10 bits of a QPN, which
/// must not be all ones.
pub const MAX_VF: u16 = (1 << 10) - 2;

/// The place where a software HCA meets its peers.
#[derive(Clone, Debug)]
pub enum FabricSpec {
    /// All processes of this user on this host, through small control files in a shared-memory
    /// directory. `None`: the default directory.
    Shared {
        /// The directory.
        dir: Option<PathBuf>,
    },
    /// Devices of this process only, for tests and simulations. No file is made.
    Local(LocalFabric),
}

/// A fabric of devices in this process, for tests and simulation. Clones are the same fabric.
#[derive(Clone, Debug, Default)]
pub struct LocalFabric {
    devices: Arc<Mutex<LocalDevices>>,
}

#[derive(Debug, Default)]
struct LocalDevices {
    by_lid: HashMap<u16, LocalDevice>,
    /// Number of devices that have joined since the fabric was made.
    joined: u64,
}

#[derive(Debug)]
struct LocalDevice {
    epoch: u64,
    domain: u64,
    memory: DeviceMemory,
    life: Arc<AtomicU32>,
}

/// A device's own entry in its fabric; dropping it withdraws the device.
pub(crate) struct Membership {
    /// LID, or virtual function of the port.
    pub(crate) lid: u16,
    /// Incarnation of the LID.
    pub(crate) epoch: u64,
    /// Seed of choices, such as keys. The next device of this LID is to choose differently. In a
    /// directory the seed is random. In a local fabric it is the number of devices that have
    /// joined, which is the same in every run of a simulation.
    pub(crate) seed: u64,
    /// Domain of the device: devices with the same domain share memory ([`domain`]).
    domain: u64,
    sends_packets: bool,
    place: Place,
}

enum Place {
    Shared {
        dir: Dir,
        _region: Region,
    },
    Local {
        fabric: LocalFabric,
        life: Arc<AtomicU32>,
    },
}

/// LID, epoch, seed and place of a new device.
type Joined = (u16, u64, u64, Place);

impl Membership {
    /// Publishes `memory` under the first free LID, or as a free virtual function of `port`: the
    /// first free function after `behind`, if that is given. Otherwise a directory chooses the
    /// virtual function at random, so that the queue pair numbers differ from those of a device
    /// that died. Publishes whether the device shares memory.
    pub(crate) fn join(
        spec: &FabricSpec,
        memory: &DeviceMemory,
        port: Option<&Port>,
        behind: Option<u16>,
        ways: Ways,
    ) -> Result<Self, OpenError> {
        let max_lid = if port.is_some() { MAX_VF } else { MAX_LID };
        let (first, before) = match (spec, behind, port) {
            (FabricSpec::Shared { .. }, None, Some(_)) => {
                [(memory.ids()[0].token % u64::from(max_lid)) as u16; 2].into()
            }
            _ => (behind.unwrap_or(0), 0),
        };
        let lids = (first..max_lid).chain(0..before).map(|n| n + 1);
        let lids = lids.filter(|lid| port.is_none_or(|port| port.is_at(port.index, *lid)));
        let shares = |domain| if ways.memory { domain } else { domain::NONE };
        let (domain, joined) = match spec {
            FabricSpec::Shared { dir } => {
                let dir = Dir::open(dir.as_deref())?;
                dir.sweep()?;
                let domain = shares(domain::of_this_process());
                (domain, publish(dir, memory, domain, lids)?)
            }
            FabricSpec::Local(fabric) => {
                let domain = shares(domain::OF_THIS_PROCESS);
                (domain, fabric.join(memory, domain, lids))
            }
        };
        let (lid, epoch, seed, place) = joined.ok_or(OpenError::NoFreeLid(max_lid))?;
        Ok(Self {
            lid,
            epoch,
            seed,
            domain,
            sends_packets: ways.packets,
            place,
        })
    }

    pub(crate) fn is_of(&self, fabric: &LocalFabric) -> bool {
        matches!(&self.place, Place::Local { fabric: own, .. } if Arc::ptr_eq(&own.devices, &fabric.devices))
    }

    pub(crate) fn describe(&self) -> String {
        match &self.place {
            Place::Shared { dir, .. } => {
                format!("sealed memfds, control files in {}", dir.path().display())
            }
            Place::Local { .. } => "sealed memfds, local to the process".to_owned(),
        }
    }

    pub(crate) fn shares_memory(&self) -> bool {
        self.domain != domain::NONE
    }

    /// Returns the way to the device with `lid`, if its incarnation is `epoch`. `has_port` means
    /// that the address of the device has a port for packets. Both ends get the same result, as
    /// each reads the publications of both.
    pub(crate) fn way_to(&self, lid: u16, epoch: Option<u64>, has_port: bool) -> Way {
        let theirs = || match &self.place {
            Place::Shared { dir, .. } => published(dir, lid, epoch)
                .ok()
                .map(|(_, publication)| publication.domain),
            Place::Local { fabric, .. } => {
                let devices = fabric.devices();
                let device = devices.by_lid.get(&lid);
                device
                    .filter(|device| epoch.is_none_or(|epoch| device.epoch == epoch))
                    .map(|device| device.domain)
            }
        };
        match (self.sends_packets, has_port) {
            _ if self.shares_memory() && theirs() == Some(self.domain) => Way::Memory,
            (true, true) => Way::Packets,
            // The device cannot be reached. `Memory` makes the caller try to map it, and so get the
            // reason as an error.
            (false, false) => Way::Memory,
            _ => Way::Nowhere,
        }
    }

    /// Maps the device with `lid`, if its incarnation is `epoch`.
    pub(crate) fn attach(&self, lid: u16, epoch: Option<u64>) -> Result<Peer, ConnectError> {
        let missing = |reason: String| ConnectError::NoSuchDevice { lid, reason };
        let no_access = |reason: String| ConnectError::NoAccess { lid, reason };
        if self.sends_packets && self.way_to(lid, epoch, true) != Way::Memory {
            return Err(no_access("it is reached by packets".to_owned()));
        }
        match &self.place {
            Place::Shared { dir, .. } => {
                let (region, publication) = published(dir, lid, epoch)?;
                if publication.pid_namespace != pid_namespace() {
                    let why = "its process is in another pid namespace: containers need a common one (docker run --pid)";
                    return Err(no_access(why.to_owned()));
                }
                let memory = DeviceMemory::attach(&publication.segments).map_err(|e| match e {
                    MemfdAttachError::Permission(_) => no_access(e.to_string()),
                    _ => missing(e.to_string()),
                })?;
                let epoch = region.epoch();
                Ok(Peer::new(lid, epoch, memory, Life::Shared(region)))
            }
            Place::Local { fabric, .. } => {
                let devices = fabric.devices();
                let device = devices
                    .by_lid
                    .get(&lid)
                    .ok_or_else(|| missing("it is not in this local fabric".to_owned()))?;
                if epoch.is_some_and(|epoch| device.epoch != epoch) {
                    return Err(ConnectError::StaleDevice { lid });
                }
                let life = Life::Local(Arc::clone(&device.life));
                Ok(Peer::new(lid, device.epoch, device.memory.share(), life))
            }
        }
    }
}

/// Opens and reads the control file of the device with `lid`, if its incarnation is `epoch`.
fn published(
    dir: &Dir,
    lid: u16,
    epoch: Option<u64>,
) -> Result<(Region, Publication), ConnectError> {
    let missing = |reason: String| ConnectError::NoSuchDevice { lid, reason };
    let region = Region::open(dir, &file_name(lid), REGION_KIND, size_of::<Publication>())
        .map_err(|e| missing(e.to_string()))?;
    if epoch.is_some_and(|epoch| region.epoch() != epoch) {
        return Err(ConnectError::StaleDevice { lid });
    }
    let at = region
        .view()
        .at::<Publication>(0)
        .ok_or_else(|| missing("its control file is too short".to_owned()))?;
    // SAFETY: `at` is valid and aligned. The publication was written once, before the file got its
    // name. Any bytes are a valid `Publication`.
    let publication = unsafe { at.read() };
    Ok((region, publication))
}

/// Makes the control file of a device under the first of the LIDs that is free.
fn publish(
    dir: Dir,
    memory: &DeviceMemory,
    domain: u64,
    lids: impl Iterator<Item = u16>,
) -> Result<Option<Joined>, OpenError> {
    for lid in lids {
        let publication = Publication {
            lid: u64::from(lid),
            pid_namespace: pid_namespace(),
            domain,
            segments: memory.ids(),
        };
        let bytes = size_of::<Publication>();
        let created = Region::create(&dir, &file_name(lid), REGION_KIND, bytes, |view| {
            if let Some(at) = view.at::<Publication>(0) {
                // SAFETY: the address is valid, aligned and not shared yet.
                unsafe { at.write(publication) };
            }
        });
        match created {
            Ok(_region) => {
                let epoch = _region.epoch();
                return Ok(Some((lid, epoch, epoch, Place::Shared { dir, _region })));
            }
            Err(CreateError::Exists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

fn file_name(lid: u16) -> String {
    format!("dev-{lid}")
}

impl LocalFabric {
    /// Makes an empty fabric.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a device under the first of the LIDs that is free.
    fn join(
        &self,
        memory: &DeviceMemory,
        domain: u64,
        mut lids: impl Iterator<Item = u16>,
    ) -> Option<Joined> {
        let devices = &mut *self.devices();
        let lid = lids.find(|lid| !devices.by_lid.contains_key(lid))?;
        let life = Arc::new(AtomicU32::new(LIVES));
        let epoch = memory.ids()[0].token;
        let device = LocalDevice {
            epoch,
            domain,
            memory: memory.share(),
            life: Arc::clone(&life),
        };
        devices.by_lid.insert(lid, device);
        devices.joined += 1;
        let fabric = self.clone();
        Some((lid, epoch, devices.joined, Place::Local { fabric, life }))
    }

    fn devices(&self) -> MutexGuard<'_, LocalDevices> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Membership {
    /// Withdraws the device from its local fabric. Another device can get its LID afterwards.
    pub(crate) fn leave(&self) {
        if let Place::Local { fabric, life } = &self.place {
            if life.swap(0, Ordering::AcqRel) == LIVES {
                fabric.devices().by_lid.remove(&self.lid);
            }
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{DirBuilder, metadata, read_dir};
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};

    use copyrpc_shm::memfd::MemfdId;

    use super::*;

    const DEVICES: usize = 48;
    const MEMORY: Ways = Ways {
        memory: true,
        packets: false,
    };

    /// Returns the number of descriptors of this process that refer to this memfd.
    fn descriptors(memfd: &MemfdId) -> usize {
        let inode =
            |path: &std::path::Path| metadata(path).ok().map(|file| (file.dev(), file.ino()));
        let own = inode(format!("/proc/self/fd/{}", memfd.fd).as_ref());
        assert!(own.is_some(), "{memfd:?}");
        read_dir("/proc/self/fd")
            .unwrap()
            .filter(|entry| inode(&entry.as_ref().unwrap().path()) == own)
            .count()
    }

    fn is_mapped(memfd: &MemfdId) -> bool {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .contains(&format!("{:016x}", memfd.token))
    }

    /// All devices of a simulation reach all others, so a pair of devices must cost no descriptor.
    #[test]
    fn a_device_of_a_local_fabric_takes_three_descriptors_however_many_peers_map_it() {
        let fabric = FabricSpec::Local(LocalFabric::new());
        let open = |_| {
            let memory = DeviceMemory::create(1 << 20).unwrap();
            let membership = Membership::join(&fabric, &memory, None, None, MEMORY).unwrap();
            (memory, membership)
        };
        let mut devices: Vec<_> = (0..DEVICES).map(open).collect();
        let attach = |(_, to): &(_, Membership), (_, from): &(_, Membership)| {
            to.attach(from.lid, Some(from.epoch)).unwrap()
        };
        let peers: Vec<Peer> = devices
            .iter()
            .flat_map(|to| devices.iter().map(move |from| attach(to, from)))
            .collect();
        let counts = |memory: &DeviceMemory| memory.ids().map(|id| descriptors(&id));
        assert!(
            devices.iter().all(|(memory, _)| counts(memory) == [1; 3]),
            "{:?}",
            counts(&devices[0].0)
        );

        // The death of a device is detected, and its memory stays until its peers have released it.
        let (memory, membership) = devices.swap_remove(0);
        let segments = memory.ids();
        drop((memory, membership));
        let (gone, there): (Vec<_>, Vec<_>) = peers.into_iter().partition(Peer::is_gone);
        assert_eq!(
            (gone.len(), there.len()),
            (DEVICES, DEVICES * (DEVICES - 1))
        );
        assert!(
            gone.iter()
                .all(|peer| peer.lid == 1 && peer.executing() == 0)
        );
        assert!(segments.iter().all(is_mapped));
        drop(gone);
        assert!(!segments.iter().any(is_mapped));
        assert!(devices[0].1.attach(1, None).is_err());
    }

    /// The next process must not get the messages for a dead process.
    #[test]
    fn a_device_in_the_place_of_one_that_is_gone_begins_elsewhere() {
        let dir =
            std::env::temp_dir().join(format!("copyrpc-fabric-places-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&dir).unwrap();
        let memory = || DeviceMemory::create(1 << 20).unwrap();
        let port = Port {
            network: &[],
            index: 0,
        };
        let joined = |fabric: &FabricSpec, is_vf: bool| {
            let membership =
                Membership::join(fabric, &memory(), is_vf.then_some(&port), None, MEMORY).unwrap();
            (membership.lid, membership.seed)
        };
        for fabric in [
            FabricSpec::Shared {
                dir: Some(dir.clone()),
            },
            FabricSpec::Local(LocalFabric::new()),
        ] {
            let [first, second] = [(); 2].map(|()| joined(&fabric, false));
            assert!(
                first.0 == 1 && second.0 == 1 && first.1 != second.1,
                "{first:?} {second:?}"
            );
        }
        let vfs = [(); 8].map(|()| {
            joined(
                &FabricSpec::Shared {
                    dir: Some(dir.clone()),
                },
                true,
            )
            .0
        });
        assert!(
            vfs.iter().any(|&vf| vf != vfs[0]) && vfs.iter().all(|vf| (1..=MAX_VF).contains(vf)),
            "{vfs:?}"
        );
        std::fs::remove_dir_all(dir).unwrap();
        // A local fabric gives the same virtual function and seed in every run of a simulation.
        let of_a_new_one = |_| joined(&FabricSpec::Local(LocalFabric::new()), true);
        assert_eq!(of_a_new_one(1), of_a_new_one(2));
    }

    #[test]
    fn a_device_in_another_pid_namespace_is_refused_with_that_reason() {
        let dir =
            std::env::temp_dir().join(format!("copyrpc-fabric-namespace-{}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&dir).unwrap();
        let fabric = FabricSpec::Shared {
            dir: Some(dir.clone()),
        };
        let open = || {
            let memory = DeviceMemory::create(1 << 20).unwrap();
            Membership::join(&fabric, &memory, None, None, MEMORY)
                .map(|membership| (memory, membership))
                .unwrap()
        };
        let ((_memory, here), (_its_memory, there)) = (open(), open());
        let attach = || here.attach(there.lid, Some(there.epoch));
        assert!(attach().is_ok());
        let Place::Shared {
            _region: region, ..
        } = &there.place
        else {
            panic!("joined to a directory")
        };
        // SAFETY: the publication is valid and aligned, and only this thread accesses it.
        unsafe { (*region.view().at::<Publication>(0).unwrap().as_ptr()).pid_namespace += 1 };
        let refused = attach().err().unwrap().to_string();
        assert!(refused.contains("another pid namespace"), "{refused}");
        drop((here, there));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
