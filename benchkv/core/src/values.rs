//! [`Values`]: where the tail of a value is, what it has beyond the 8 bytes that a [message](crate::message) holds, while a request is within a rank.
//!
//! A rank has a place for each operation that its clients can have outstanding, in memory that its threads and the processes of its clients map. A
//! client puts the tail of a value there before it issues a put, and finds there what a get has found. Messages name the place and nothing else,
//! so they stay as small as those of values without a tail, on every path. Daemons that pass requests of other ranks on to each other have places
//! of their own.
//!
//! Who may touch a place follows from the message that names it: its sender before it is sent, its receiver until it is answered. The queues
//! that carry messages order the two.

use std::sync::Arc;

use shm::dir::Dir;
use shm::region::Region;

/// Least and most bytes of a value.
pub const VALUE_BYTES: std::ops::RangeInclusive<usize> = HEAD_BYTES..=65_536;
/// Bytes of a value that messages hold.
pub const HEAD_BYTES: usize = size_of::<u64>();
/// Kind of the region: changes with what is in it.
const KIND: u64 = u64::from_be_bytes(*b"BKVALUE1");
/// Memory of the places of a daemon, unless [`LEAST_HOPS`] take more.
const HOP_BYTES: usize = 4 << 20;
/// Requests of other ranks that a daemon can have passed on to others of its rank, at least.
const LEAST_HOPS: usize = 16;

/// How many places a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Places {
    /// Bytes of a tail; 0: there are no places.
    pub tail_bytes: usize,
    /// Of each client: operations that it can have outstanding.
    of_client: usize,
    clients: usize,
    /// Of each daemon: requests of other ranks that wait for others of its rank.
    of_daemon: usize,
    daemons: usize,
}

impl Places {
    /// Of a rank with so many `clients`, each with `of_client` values of `value_bytes` under way, which are [`VALUE_BYTES`], and so many `daemons` that
    /// pass requests of other ranks on.
    #[must_use]
    pub fn new(value_bytes: usize, clients: usize, of_client: usize, daemons: usize) -> Self {
        let tail_bytes = value_bytes - HEAD_BYTES;
        Self { tail_bytes, of_client, clients, of_daemon: (HOP_BYTES / tail_bytes.max(64)).max(LEAST_HOPS), daemons }
    }

    /// From one place to the next: no two share a cache line.
    const fn stride(&self) -> usize {
        self.tail_bytes.next_multiple_of(64)
    }

    const fn count(&self) -> usize {
        self.clients * self.of_client + self.daemons * self.of_daemon
    }

    /// Memory they take.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.count() * self.stride()
    }

    /// The first place of a client.
    #[must_use]
    pub const fn first_of_client(&self, client: usize) -> u32 {
        (client * self.of_client) as u32
    }

    /// The places of a daemon.
    #[must_use]
    pub const fn of_daemon(&self, daemon: usize) -> std::ops::Range<u32> {
        let first = self.clients * self.of_client + daemon * self.of_daemon;
        first as u32..(first + self.of_daemon) as u32
    }
}

/// The places of a rank; of values without a tail there are none.
#[derive(Debug, Clone)]
pub struct Values {
    places: Places,
    region: Option<Arc<Region>>,
}

impl Values {
    /// Makes the places of a rank, where others of it find them by `name`.
    ///
    /// # Errors
    /// Why there is no such memory.
    pub fn create(places: Places, dir: &Dir, name: &str) -> Result<Self, shm::region::CreateError> {
        let create = || Region::create(dir, name, KIND, places.bytes(), |_| ()).map(Arc::new);
        Ok(Self { places, region: (places.tail_bytes > 0).then(create).transpose()? })
    }

    /// Those that another process of the rank has made.
    ///
    /// # Errors
    /// Why they cannot be mapped.
    pub fn open(places: Places, dir: &Dir, name: &str) -> Result<Self, shm::region::OpenError> {
        let open = || Region::open(dir, name, KIND, places.bytes()).map(Arc::new);
        Ok(Self { places, region: (places.tail_bytes > 0).then(open).transpose()? })
    }

    /// How many there are.
    #[must_use]
    pub const fn places(&self) -> &Places {
        &self.places
    }

    /// Bytes of a tail.
    #[must_use]
    #[inline]
    pub const fn tail_bytes(&self) -> usize {
        self.places.tail_bytes
    }

    /// The address of a place; `None`: there is no such place, or it has no room for `bytes`.
    fn at(&self, place: u32, bytes: usize) -> Option<*mut u8> {
        let region = self.region.as_ref().filter(|_| bytes <= self.places.tail_bytes)?;
        let offset = (place as usize).checked_mul(self.places.stride())?;
        region.view().array_at::<u8>(offset, bytes).map(std::ptr::NonNull::as_ptr)
    }

    /// Copies the tail at `place` out. A place that does not exist, of a client that is not sound, leaves `tail` as it is.
    pub fn read(&self, place: u32, tail: &mut [u8]) {
        if let Some(from) = self.at(place, tail.len()) {
            // SAFETY: inside the region, which lives as long as `self`; other memory than `tail`. A process that is not sound may write there
            // meanwhile: any bytes are legal.
            unsafe { from.copy_to_nonoverlapping(tail.as_mut_ptr(), tail.len()) };
        }
    }

    /// Copies `tail` to `place`, if that exists.
    pub fn write(&self, place: u32, tail: &[u8]) {
        if let Some(to) = self.at(place, tail.len()) {
            // SAFETY: as in `read`.
            unsafe { to.copy_from_nonoverlapping(tail.as_ptr(), tail.len()) };
        }
    }
}

/// The places of one client: its operation `token` has the one of that number.
#[derive(Debug, Clone)]
pub struct ClientValues {
    pub(crate) values: Values,
    pub(crate) first: u32,
}

impl ClientValues {
    /// Bytes of a tail.
    #[must_use]
    pub const fn tail_bytes(&self) -> usize {
        self.values.tail_bytes()
    }

    /// The place of an operation.
    #[must_use]
    pub const fn place(&self, token: u32) -> u32 {
        self.first + token
    }

    /// Copies the tail of an operation out.
    pub fn read(&self, token: u32, tail: &mut [u8]) {
        self.values.read(self.place(token), tail);
    }

    /// Copies `tail` to the place of an operation.
    pub fn write(&self, token: u32, tail: &[u8]) {
        self.values.write(self.place(token), tail);
    }
}

/// Where the tail of a request's value is, or is to be put.
#[derive(Debug)]
pub enum Tail<'a> {
    /// In memory of this thread.
    Bytes(&'a mut [u8]),
    /// At a place of the rank.
    Place(&'a Values, u32),
}

impl Tail<'_> {
    /// Copies it to `to`, which has its length.
    pub fn read(&self, to: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => copy(to, bytes),
            Self::Place(values, place) => values.read(*place, to),
        }
    }

    /// Makes it a copy of `from`.
    pub fn write(self, from: &[u8]) {
        match self {
            Self::Bytes(bytes) => copy(bytes, from),
            Self::Place(values, place) => values.write(place, from),
        }
    }
}

/// Copies as much as both have.
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    let len = to.len().min(from.len());
    if let (Some(to), Some(from)) = (to.get_mut(..len), from.get(..len)) {
        to.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    fn places(value_bytes: usize) -> Places {
        Places::new(value_bytes, 3, 32, 2)
    }

    #[test]
    fn no_two_places_overlap_and_a_tail_is_found_through_every_mapping() {
        let (scratch, places) = (Scratch::new(), places(21));
        let made = Values::create(places, &scratch.dir(), "places").unwrap();
        let opened = Values::open(places, &scratch.dir(), "places").unwrap();
        let all = || {
            (0..3)
                .flat_map(|client| (0..32).map(move |at| places.first_of_client(client) + at))
                .chain((0..2).flat_map(|d| places.of_daemon(d)))
        };
        assert_eq!((all().count(), all().max()), (places.count(), Some(places.count() as u32 - 1)));
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
        let (scratch, places) = (Scratch::new(), places(21));
        let made = Values::create(places, &scratch.dir(), "places").unwrap();
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
        let (scratch, places) = (Scratch::new(), places(8));
        let made = Values::create(places, &scratch.dir(), "places").unwrap();
        assert_eq!((places.bytes(), made.region.is_none()), (0, true));
    }
}
