//! The regions of a directory that is in memory.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::lock::LockFile;
use crate::sys::Mapping;

#[derive(Debug, Default)]
pub(crate) struct Memory {
    regions: Mutex<BTreeMap<String, Parts>>,
}

/// Parts of a region: its mapping, and its file. In memory, an owner shares both with its peers.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) map: Mapping,
    pub(crate) file: LockFile,
}

impl Parts {
    fn share(&self) -> Self {
        Self {
            map: self.map.share(),
            file: self.file.clone(),
        }
    }
}

impl Memory {
    fn regions(&self) -> MutexGuard<'_, BTreeMap<String, Parts>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a complete region if the name is free. Returns whether it was free.
    pub(crate) fn add(&self, name: &str, region: &Parts) -> bool {
        match self.regions().entry(name.to_owned()) {
            Entry::Vacant(entry) => {
                entry.insert(region.share());
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<Parts> {
        self.regions().get(name).map(Parts::share)
    }

    /// Removes a name. Only the owner of the region calls this.
    pub(crate) fn remove(&self, name: &str) {
        self.regions().remove(name);
    }
}
