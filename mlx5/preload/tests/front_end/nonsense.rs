//! uverbs commands as bytes: valid commands, and invalid commands of every kind.

use std::ffi::CStr;
use std::ptr::null_mut;

use crate::random::Random;

pub(crate) const DEVICE: &CStr = c"/dev/infiniband/uverbs0";

const PAGE: usize = 4096;
const PAGES: usize = 128;
/// Flag in a command's number.
const EXTENDED: u32 = 1 << 31;

/// The errors by which a kernel refuses a command. `EIO` is not among them: it means that the
/// software HCA failed.
pub(crate) const REFUSALS: [i32; 10] = [
    libc::EINVAL,
    libc::EFAULT,
    libc::EOPNOTSUPP,
    libc::ENOSPC,
    libc::EBUSY,
    libc::ENOMEM,
    libc::EMFILE,
    libc::ETIMEDOUT,
    libc::ENETUNREACH,
    libc::EBADF,
];

/// An open device.
pub(crate) struct Device(pub(crate) i32);

impl Device {
    /// Opens a device, without a context.
    pub(crate) fn open() -> Self {
        // SAFETY: a string.
        let fd = unsafe { libc::open(DEVICE.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        Self(fd)
    }

    /// Opens a device, and makes a context.
    pub(crate) fn with_context(memory: &Memory) -> Self {
        let device = Self::open();
        assert_eq!(device.write(&get_context(memory).bytes()), Ok(()));
        device
    }

    /// Writes a command. Returns the error number.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), i32> {
        // SAFETY: every address in a command is in `Memory`, or cannot be written.
        let n = unsafe { libc::write(self.0, bytes.as_ptr().cast(), bytes.len()) };
        if n == bytes.len() as isize {
            Ok(())
        } else {
            Err(std::io::Error::last_os_error().raw_os_error().unwrap())
        }
    }

    /// Returns whether the device can allocate and free a protection domain.
    pub(crate) fn is_well(&self, memory: &Memory) -> bool {
        // SAFETY: in `Memory`; no other code writes there now.
        unsafe { (memory.at(0) as *mut u32).write_volatile(u32::MAX) };
        let made = self.write(&Command::plain(3, 8, memory.at(0)).bytes());
        // SAFETY: the response, in `Memory`; no other code writes there now.
        let handle = unsafe { (memory.at(0) as *const u32).read_volatile() };
        // A command that was written to a file leaves the response unchanged.
        handle != u32::MAX
            && made.and_then(|()| self.write(&Command::plain(4, 0, 0).u32(handle).bytes()))
                == Ok(())
    }

    pub(crate) fn close(self) {
        // SAFETY: the call takes a number. The descriptor is this value's own, and is not used
        // afterwards.
        assert_eq!(unsafe { libc::close(self.0) }, 0);
    }
}

/// Memory that commands name: writable pages and a read-only one, with unmapped pages before and
/// after.
pub(crate) struct Memory(u64);

// SAFETY: an address.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new() -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, kept forever.
        unsafe {
            let start = libc::mmap(
                null_mut(),
                (PAGES + 3) * PAGE,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            );
            assert_ne!(start, libc::MAP_FAILED);
            assert_eq!(
                libc::mprotect(
                    start.byte_add(PAGE),
                    PAGES * PAGE,
                    libc::PROT_READ | libc::PROT_WRITE
                ),
                0
            );
            assert_eq!(
                libc::mprotect(start.byte_add((PAGES + 1) * PAGE), PAGE, libc::PROT_READ),
                0
            );
            Self(start as u64 + PAGE as u64)
        }
    }

    pub(crate) fn at(&self, offset: usize) -> u64 {
        self.0 + offset as u64
    }

    /// Returns the end of the writable pages.
    pub(crate) fn end(&self) -> u64 {
        self.at(PAGES * PAGE)
    }

    fn place(&self, random: &mut Random) -> u64 {
        self.at(random.below((PAGES * PAGE / 64) as u32) as usize * 64)
    }

    fn wild(&self, random: &mut Random) -> u64 {
        let any = [
            0,
            1,
            7,
            0x1000,
            u64::MAX,
            u64::MAX - 7,
            1 << 63,
            0xffff_ffff_8100_0000,
            self.end() - 4,
            self.end(),
            self.end() + PAGE as u64 - 8,
            self.end() + PAGE as u64,
            self.at(0) - 8,
            self.at(0) + 1,
        ];
        any[random.below(any.len() as u32) as usize]
    }

    /// Changes some words of the memory, as drivers change queues and doorbell records.
    pub(crate) fn stir(&self, random: &mut Random) {
        let at = random.below((PAGES * PAGE / 8 - 16) as u32) as usize;
        for i in 0..16 {
            let word = match random.below(4) {
                0 => 0,
                1 => u64::from(random.below(64)).swap_bytes() | u64::from(random.below(16)) << 24,
                2 => self.place(random).swap_bytes(),
                _ => u64::from(random.below(u32::MAX)) << 32 | u64::from(random.below(u32::MAX)),
            };
            // SAFETY: inside; the device reads it as memory that may change.
            unsafe { (self.at((at + i) * 8) as *mut u64).write_volatile(word) };
        }
    }
}

/// A command under construction.
pub(crate) struct Command {
    number: u32,
    body: Vec<u8>,
    /// The driver's part of an extended command.
    driver: Vec<u8>,
    in_driver: bool,
    response: u64,
    room: usize,
    driver_room: usize,
    /// Offsets of the addresses in the bytes.
    addresses: Vec<usize>,
}

impl Command {
    /// Makes a command with a response of `room` bytes; without a response if `room` is 0.
    pub(crate) fn plain(number: u32, room: usize, response: u64) -> Self {
        let new = Self {
            number,
            body: vec![],
            driver: vec![],
            in_driver: false,
            response,
            room,
            driver_room: 0,
            addresses: vec![],
        };
        if room > 0 { new.address(response) } else { new }
    }

    pub(crate) fn extended(number: u32, room: usize, driver_room: usize, response: u64) -> Self {
        let number = number | EXTENDED;
        Self {
            number,
            body: vec![],
            driver: vec![],
            in_driver: false,
            response,
            room,
            driver_room,
            addresses: vec![],
        }
    }

    fn part(&mut self) -> &mut Vec<u8> {
        if self.in_driver {
            &mut self.driver
        } else {
            &mut self.body
        }
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.part().extend(value.to_ne_bytes());
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.part().extend(value.to_ne_bytes());
        self
    }

    pub(crate) fn bytes_of(mut self, bytes: &[u8]) -> Self {
        self.part().extend(bytes);
        self
    }

    pub(crate) fn address(mut self, value: u64) -> Self {
        let at = self.headers() + self.body.len() + self.driver.len();
        self.addresses.push(at);
        self.u64(value)
    }

    /// Begins the driver's part.
    pub(crate) fn driver(mut self) -> Self {
        self.in_driver = self.number & EXTENDED != 0;
        self
    }

    fn headers(&self) -> usize {
        if self.number & EXTENDED == 0 { 8 } else { 24 }
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.number.to_ne_bytes().to_vec();
        let mut halves = |halves: &[usize]| {
            halves
                .iter()
                .for_each(|half| bytes.extend((*half as u16).to_ne_bytes()))
        };
        if self.number & EXTENDED == 0 {
            halves(&[(8 + self.body.len()) / 4, self.room / 4]);
        } else {
            halves(&[self.body.len() / 8, self.room / 8]);
            bytes.extend(self.response.to_ne_bytes());
            let mut halves = |halves: &[usize]| {
                halves
                    .iter()
                    .for_each(|half| bytes.extend((*half as u16).to_ne_bytes()))
            };
            halves(&[self.driver.len() / 8, self.driver_room / 8, 0, 0]);
        }
        [bytes, self.body.clone(), self.driver.clone()].concat()
    }

    /// Returns the bytes with a random fault.
    pub(crate) fn spoilt(&self, memory: &Memory, random: &mut Random) -> Vec<u8> {
        let mut bytes = self.bytes();
        let is_address = |at: usize| {
            (8..16).contains(&at)
                || self
                    .addresses
                    .iter()
                    .any(|&start| (start..start + 8).contains(&at))
        };
        for _ in 0..1 + random.below(2) {
            match random.below(6) {
                0 => {
                    let addresses = [&[8][..], &self.addresses].concat();
                    let at = addresses[random.below(addresses.len() as u32) as usize];
                    if let Some(place) = bytes.get_mut(at..at + 8) {
                        place.copy_from_slice(&memory.wild(random).to_ne_bytes());
                    }
                }
                1 => bytes.truncate(random.below(bytes.len() as u32) as usize),
                2 => bytes.extend((0..random.below(64)).map(|i| i as u8)),
                3 if bytes.len() >= 8 => {
                    let half = 4 + 2 * random.below(2) as usize;
                    let value = if random.one_in(2) {
                        bytes.len() as u16 / 4
                    } else {
                        random.below(1 << 16) as u16
                    };
                    bytes[half..half + 2].copy_from_slice(&value.to_ne_bytes());
                }
                4 if bytes.len() >= 4 => {
                    let number = random.below(256)
                        | if random.one_in(2) { EXTENDED } else { 0 }
                        | if random.one_in(8) { 1 << 12 } else { 0 };
                    bytes[..4].copy_from_slice(&number.to_ne_bytes());
                }
                _ => {
                    let at = random.below(bytes.len().max(1) as u32) as usize;
                    if at < bytes.len() && !is_address(at) {
                        bytes[at] = [0, 1, 0xff, 0x7f, 0x80, random.below(256) as u8]
                            [random.below(6) as usize];
                    }
                }
            }
        }
        bytes
    }
}

/// Makes a GET_CONTEXT.
pub(crate) fn get_context(memory: &Memory) -> Command {
    Command::plain(0, 80, memory.at(0))
        .u32(16)
        .u32(4)
        .u64(0)
        .u64(1)
        .u64(0)
}

/// Makes a command that could be valid, with a few handles.
pub(crate) fn any(memory: &Memory, random: &mut Random) -> Command {
    let handle = random.below(4);
    let response = memory.place(random);
    let buffer = memory.place(random);
    let record = memory.place(random);
    let user = u64::from(random.below(4));
    let of_pd = random.below(2);
    let length = u64::from(1 + random.below(3 * PAGE as u32));
    match random.below(24) {
        0 => get_context(memory),
        1 => Command::plain(1, 176, response),
        2 => Command::extended(1, 304, 104, response).u64(0),
        3 => Command::plain(2, 40, response).u64(1),
        4 => Command::plain(3, 8, response),
        5 => Command::plain(4, 0, 0).u32(handle),
        6 => Command::plain(5, 20, response)
            .u64(user)
            .u32(of_pd)
            .u32(0)
            .bytes_of(&[0; 24])
            .bytes_of(&[1, 0, 0, 0, 0, 0, 1, 0]),
        7 => Command::plain(8, 0, 0).u32(handle),
        8 | 9 => Command::plain(9, 12, response)
            .address(buffer)
            .u64(length)
            .address(buffer)
            .u32(of_pd)
            .u32(random.below(16)),
        10 => Command::plain(11, 8, response)
            .u32(handle)
            .u32(random.below(8))
            .address(buffer)
            .u64(length)
            .address(buffer)
            .u32(of_pd)
            .u32(7),
        11 => Command::plain(13, 0, 0).u32(handle),
        12 => Command::plain(17, 4, response),
        13 | 14 => {
            let (channel, bytes) = (
                u32::MAX.wrapping_add(random.below(20)),
                64 << random.below(2),
            );
            let cq = Command::plain(18, 16, response)
                .u64(user)
                .u32(random.below(64))
                .u32(0)
                .u32(channel)
                .u32(0);
            cq.address(buffer)
                .address(record)
                .u32(bytes)
                .u32(random.below(2))
                .u64(0)
        }
        15 => {
            let cq = Command::extended(18, 16, 8, response)
                .u64(user)
                .u32(random.below(64))
                .u32(0)
                .u32(u32::MAX)
                .u64(0)
                .u32(0);
            cq.driver()
                .address(buffer)
                .address(record)
                .u32(64)
                .u32(0)
                .u64(0)
        }
        16 => Command::plain(20, 8, response).u32(handle).u32(0),
        17 | 18 => create_qp(
            [response, buffer, record],
            of_pd,
            [handle & 1, random.below(2)],
            random,
        ),
        19 => Command::plain(25, 128, response).u32(handle).u32(u32::MAX),
        20 => modify_qp(handle, random),
        21 => Command::plain(27, 4, response).u32(handle).u32(0),
        22 => {
            let srq = Command::plain(32, 24, response)
                .u64(user)
                .u32(of_pd)
                .u32(random.below(64))
                .u32(random.below(8))
                .u32(0);
            srq.address(buffer).address(record).u64(0).u64(0)
        }
        _ => Command::plain([33, 34, 35][random.below(3) as usize], 16, response)
            .u32(handle)
            .u32(random.below(4)),
    }
}

fn create_qp(places: [u64; 3], pd: u32, cqs: [u32; 2], random: &mut Random) -> Command {
    let [response, buffer, record] = places;
    let kind = [2, 2, 4, 8][random.below(4) as usize] << 8 | random.below(2) << 16;
    let qp = Command::plain(24, 72, response)
        .u64(1)
        .u32(pd)
        .u32(cqs[0])
        .u32(cqs[1])
        .u32(random.below(2));
    let qp = qp
        .u32(16)
        .u32(16)
        .u32(1)
        .u32(1)
        .u32(0)
        .u32(kind)
        .address(buffer)
        .address(record);
    let (sends, receives) = (1 << random.below(7), 1 << random.below(7));
    qp.u32(sends)
        .u32(receives)
        .u32(4 + random.below(4))
        .u32(random.below(2) << 1)
        .u32(random.below(8))
        .u32(0)
        .u64(0)
        .u64(0)
}

/// Makes a MODIFY_QP to the next state, or to any state.
fn modify_qp(handle: u32, random: &mut Random) -> Command {
    const STEPS: [(u32, u8); 5] = [(0x39, 1), (0x12_9181, 2), (0x1_2e01, 3), (1, 0), (1, 6)];
    let (mask, state) = STEPS[random.below(5) as usize];
    let mask = if random.one_in(4) {
        random.below(1 << 21)
    } else {
        mask
    };
    // A path to this port.
    let mut path = [0; 32];
    (path[20], path[31]) = (1, 1);
    let to = (1 + random.below(3)) << 14 | random.below(3);
    let tail = [state, 0, 5, 0, 0, 1, 1, 12, 1, 14, 7, 7, 1, 0, 0, 0];
    let qp = Command::plain(26, 0, 0)
        .bytes_of(&path)
        .bytes_of(&path)
        .u32(handle)
        .u32(mask)
        .u32(0x1111)
        .u32(0)
        .u32(0)
        .u32(to);
    qp.u32(0xf).u32(0).bytes_of(&tail)
}
