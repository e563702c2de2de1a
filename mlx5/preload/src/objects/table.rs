//! A table of objects by handle.

use slab::Slab;

use crate::options::errno::Errno;

/// Objects of one kind, by handle. A handle is reused only after its object was removed.
#[derive(Debug)]
pub(crate) struct Table<T>(Slab<T>);

const NONE: Errno = Errno(libc::EINVAL);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self(Slab::new())
    }
}

impl<T> Table<T> {
    pub(crate) fn insert(&mut self, object: T) -> u32 {
        self.0.insert(object) as u32
    }

    pub(crate) fn get(&self, handle: u32) -> Result<&T, Errno> {
        self.0.get(handle as usize).ok_or(NONE)
    }

    pub(crate) fn get_mut(&mut self, handle: u32) -> Result<&mut T, Errno> {
        self.0.get_mut(handle as usize).ok_or(NONE)
    }

    pub(crate) fn remove(&mut self, handle: u32) -> Result<T, Errno> {
        self.0.try_remove(handle as usize).ok_or(NONE)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|(_, object)| object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_name_objects_until_they_are_removed() {
        let mut table = Table::default();
        assert_eq!((table.insert('a'), table.insert('b')), (0, 1));
        assert_eq!(table.get(1), Ok(&'b'));
        assert_eq!(table.remove(0), Ok('a'));
        assert!(table.get(0).is_err() && table.remove(0).is_err());
        assert!(table.get(7).is_err() && table.get_mut(7).is_err());
        assert_eq!(table.insert('c'), 0);
        *table.get_mut(0).unwrap() = 'd';
        assert_eq!(table.iter().collect::<String>(), "db");
    }
}
