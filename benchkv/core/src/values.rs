//! [`Values`]: the memory for the tails of values while a request is within a rank. The tail of a
//! value is its bytes after the first 8, which a [message](crate::message) holds.
//!
//! A rank has a place for each operation that its clients can have outstanding. A client writes the
//! tail of a value to the place before it issues a put, and reads the tail that a get has found
//! from the place. Messages only name the place, so they are as small as messages of values without
//! a tail, on every path. Daemons that pass requests of other ranks to each other have places of
//! their own.
//!
//! The message that names a place decides which thread may access the place: the sender before it
//! sends the message, the receiver until it answers. The queues of messages order these accesses.

use std::sync::Arc;

use copyrpc_shm::memfd::{Memfd, MemfdCreateError};

/// Minimum and maximum bytes of a value.
pub const VALUE_BYTES: std::ops::RangeInclusive<usize> = HEAD_BYTES..=16 << 20;
/// Bytes of a value that messages hold.
pub const HEAD_BYTES: usize = size_of::<u64>();
/// A size that is a multiple of every page size.
const LARGEST_PAGE_BYTES: usize = 64 << 10;
/// Memory of the places of a daemon, in bytes, unless [`LEAST_HOPS`] places take more.
const HOP_BYTES: usize = 4 << 20;
/// Minimum number of places of a daemon for the requests of other ranks that it passes to other
/// daemons of its rank.
const LEAST_HOPS: usize = 16;

/// The numbers of places that a rank has for its clients and daemons, and their size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Length of a tail, in bytes; 0: there are no places.
    pub tail_bytes: usize,
    /// Number of operations that each client can have outstanding.
    of_client: usize,
    clients: usize,
    /// Places of each daemon, for requests of other ranks that it passes to other daemons.
    of_daemon: usize,
    daemons: usize,
}

impl Places {
    /// Returns the places of a rank with `clients` clients, each with `of_client` values of
    /// `value_bytes` under way, and with `daemons` daemons that pass on requests of other ranks.
    /// `value_bytes` must be in [`VALUE_BYTES`].
    pub fn new(value_bytes: usize, clients: usize, of_client: usize, daemons: usize) -> Self {
        let tail_bytes = value_bytes - HEAD_BYTES;
        Self {
            tail_bytes,
            of_client,
            clients,
            of_daemon: (HOP_BYTES / tail_bytes.max(64)).max(LEAST_HOPS),
            daemons,
        }
    }

    /// Returns the distance between neighbouring places, in bytes: whole cache lines, so that no
    /// two places share one.
    const fn stride(&self) -> usize {
        self.tail_bytes.next_multiple_of(64)
    }

    const fn count(&self) -> usize {
        self.clients * self.of_client + self.daemons * self.of_daemon
    }

    /// Returns the size of the memory of all places, in bytes.
    pub const fn bytes(&self) -> usize {
        self.count() * self.stride()
    }

    /// Returns the first place of a client.
    pub const fn first_of_client(&self, client: usize) -> u32 {
        (client * self.of_client) as u32
    }

    /// Returns the places of a daemon.
    pub const fn of_daemon(&self, daemon: usize) -> std::ops::Range<u32> {
        let first = self.clients * self.of_client + daemon * self.of_daemon;
        first as u32..(first + self.of_daemon) as u32
    }
}

/// The places of a rank. Values without a tail have no places.
#[derive(Debug, Clone)]
pub struct Values {
    places: Places,
    memory: Option<Arc<Memfd>>,
}

impl Values {
    /// Makes the places of a rank.
    ///
    /// # Errors
    /// The system's reason why the memory could not be created.
    pub fn new(places: Places) -> Result<Self, MemfdCreateError> {
        let bytes = places.bytes().next_multiple_of(LARGEST_PAGE_BYTES);
        let create = || Memfd::create("benchkv-values", bytes).map(Arc::new);
        Ok(Self {
            places,
            memory: (places.tail_bytes > 0).then(create).transpose()?,
        })
    }

    /// Returns the numbers of places, and their size.
    pub const fn places(&self) -> &Places {
        &self.places
    }

    /// Returns the length of a tail, in bytes.
    #[inline]
    pub const fn tail_bytes(&self) -> usize {
        self.places.tail_bytes
    }

    /// Returns the address of a place; `None` if there is no such place, or if `bytes` bytes do not
    /// fit into it.
    fn at(&self, place: u32, bytes: usize) -> Option<*mut u8> {
        let fits = bytes <= self.places.tail_bytes && (place as usize) < self.places.count();
        let memory = self.memory.as_ref().filter(|_| fits)?;
        let offset = place as usize * self.places.stride();
        // SAFETY: `place` is below the number of places, so the offset is inside the memory.
        Some(unsafe { memory.base().as_ptr().add(offset) })
    }

    /// Copies the tail at `place` to `tail`, which is unchanged if there is no such place or if it
    /// is longer than the place.
    pub fn read(&self, place: u32, tail: &mut [u8]) {
        if let Some(from) = self.at(place, tail.len()) {
            // SAFETY: the bytes at `from` are inside the memory, which lives as long as `self` and
            // does not overlap `tail`. The message that contains the place gives this thread access
            // to it; any bytes are legal.
            unsafe { from.copy_to_nonoverlapping(tail.as_mut_ptr(), tail.len()) };
        }
    }

    /// Copies `tail` to `place`, if there is such a place and `tail` fits.
    pub fn write(&self, place: u32, tail: &[u8]) {
        if let Some(to) = self.at(place, tail.len()) {
            // SAFETY: the bytes at `to` are inside the memory, which lives as long as `self` and
            // does not overlap `tail`. The message that contains the place gives this thread access
            // to it.
            unsafe { to.copy_from_nonoverlapping(tail.as_ptr(), tail.len()) };
        }
    }
}

/// The places of one client, numbered from 0. The client gives one place to each outstanding
/// operation.
#[derive(Debug, Clone)]
pub struct ClientValues {
    pub(crate) values: Values,
    pub(crate) first: u32,
}

impl ClientValues {
    /// Returns the length of a tail, in bytes.
    pub const fn tail_bytes(&self) -> usize {
        self.values.tail_bytes()
    }

    /// Converts the client's number of a place to the rank's number of this place.
    pub const fn place(&self, number: u32) -> u32 {
        self.first + number
    }

    /// Copies the tail at place `number` to `tail`.
    pub fn read(&self, number: u32, tail: &mut [u8]) {
        self.values.read(self.place(number), tail);
    }

    /// Copies `tail` to place `number`.
    pub fn write(&self, number: u32, tail: &[u8]) {
        self.values.write(self.place(number), tail);
    }
}

/// The source or destination of the tail of a request's value.
#[derive(Debug)]
pub enum Tail<'a> {
    /// In memory of this thread.
    Bytes(&'a mut [u8]),
    /// At a place of the rank.
    Place(&'a Values, u32),
}

impl Tail<'_> {
    /// Copies the tail to `to`, whose length is the length of a tail.
    pub fn read(&self, to: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => copy(to, bytes),
            Self::Place(values, place) => values.read(*place, to),
        }
    }

    /// Replaces the tail by a copy of `from`.
    pub fn write(self, from: &[u8]) {
        match self {
            Self::Bytes(bytes) => copy(bytes, from),
            Self::Place(values, place) => values.write(place, from),
        }
    }
}

/// Copies bytes up to the length of the shorter slice.
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    let len = to.len().min(from.len());
    if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
        to.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(value_bytes: usize) -> Places {
        Places::new(value_bytes, 3, 32, 2)
    }

    #[test]
    fn no_two_places_overlap_and_a_tail_is_found_through_every_clone() {
        let places = places(21);
        let made = Values::new(places).unwrap();
        let opened = made.clone();
        let all = || {
            (0..3)
                .flat_map(|client| (0..32).map(move |at| places.first_of_client(client) + at))
                .chain((0..2).flat_map(|d| places.of_daemon(d)))
        };
        assert_eq!(
            (all().count(), all().max()),
            (places.count(), Some(places.count() as u32 - 1))
        );
        all().for_each(|place| made.write(place, &[&place.to_le_bytes()[..], &[7; 9]].concat()));
        for place in all() {
            let mut tail = [0; 13];
            opened.read(place, &mut tail);
            assert_eq!(tail[..4], place.to_le_bytes());
            assert_eq!(tail[4..], [7; 9]);
        }
    }

    #[test]
    fn a_place_that_is_none_is_left_alone() {
        let places = places(21);
        let made = Values::new(places).unwrap();
        for place in [places.count() as u32 + 64, (1 << 24) - 1, u32::MAX] {
            made.write(place, &[1; 13]);
            let mut tail = [9; 13];
            made.read(place, &mut tail);
            assert_eq!(tail, [9; 13], "{place}");
        }
        let mut long = [9; 14];
        made.read(0, &mut long);
        assert_eq!(long, [9; 14], "longer than a tail");
    }

    #[test]
    fn values_of_8_bytes_take_no_memory() {
        let made = Values::new(places(8)).unwrap();
        assert_eq!((made.places.bytes(), made.memory.is_none()), (0, true));
    }
}
