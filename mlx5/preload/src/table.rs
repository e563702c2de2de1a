//! A table of objects by handle.

use crate::errno::Errno;

/// Objects of one kind. A handle is reused only when it is free.
#[derive(Debug)]
pub(crate) struct Table<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

/// `EINVAL`: there is no such object.
const NONE: Errno = Errno(libc::EINVAL);

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    /// Inserts an object. Returns its handle.
    pub(crate) fn insert(&mut self, object: T) -> u32 {
        match self.free.pop() {
            Some(handle) => {
                self.slots[handle as usize] = Some(object);
                handle
            }
            None => {
                self.slots.push(Some(object));
                self.slots.len() as u32 - 1
            }
        }
    }

    /// Returns the object with this handle.
    pub(crate) fn get(&self, handle: u32) -> Result<&T, Errno> {
        self.slots.get(handle as usize).and_then(Option::as_ref).ok_or(NONE)
    }

    /// Returns the object with this handle.
    pub(crate) fn get_mut(&mut self, handle: u32) -> Result<&mut T, Errno> {
        self.slots.get_mut(handle as usize).and_then(Option::as_mut).ok_or(NONE)
    }

    /// Removes the object with this handle, and returns it.
    pub(crate) fn remove(&mut self, handle: u32) -> Result<T, Errno> {
        let object = self.slots.get_mut(handle as usize).and_then(Option::take).ok_or(NONE)?;
        self.free.push(handle);
        Ok(object)
    }

    /// Returns all objects.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten()
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
