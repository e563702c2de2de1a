//! Framing of the write() commands: header, request, the driver's part, the response's address.
//!
//! A plain command is a `CommandHeader` (lengths in words of 4 bytes, the header included) and the
//! request, which starts with the address of the response if the command has a response. The
//! driver's part of the command follows the request, and the driver's part of the response follows
//! the kernel's part. In an extended command the lengths in the header are in words of 8 bytes and
//! do not include the headers and the driver's parts; `ExtendedHeader` has the address, and the
//! lengths of the driver's parts.

pub(crate) mod methods;

use core::cell::Cell;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::abi::verbs::{CommandHeader, ExtendedHeader};
use crate::options::errno::Errno;
use crate::system::sys;

/// The result of a command that has to wait. The device's thread tries the command again, so the
/// program never gets this result.
pub(crate) const LATER: Errno = Errno(libc::EAGAIN);

/// Error for a GET_CONTEXT that requests DEVX. Other commands are refused with the same number.
pub(crate) const NO_DEVX: Errno = Errno(libc::EOPNOTSUPP);

/// Flag of an extended command in `CommandHeader::command` (`IB_USER_VERBS_CMD_FLAG_EXTENDED`).
const EXTENDED: u32 = 1 << 31;
/// Mask of the command's number in `CommandHeader::command` (`IB_USER_VERBS_CMD_COMMAND_MASK`).
const NUMBER: u32 = 0xff;

/// An upper bound of a command's length in bytes: both headers, the request, and the driver's part.
/// The lengths of the last two are 16-bit numbers of 8-byte words.
const LONGEST: usize = 24 + 2 * 8 * u16::MAX as usize;
/// Maximum length of a response: QUERY_DEVICE with the driver's part, rounded up.
const LONGEST_RESPONSE: usize = 512;

/// A command: a copy of the bytes that the program wrote.
#[derive(Debug)]
pub(crate) struct Call {
    /// The command's number, `IB_USER_VERBS_CMD_*`.
    pub(crate) number: u8,
    pub(crate) is_extended: bool,
    /// The request, followed by the driver's part in a plain command.
    request: Vec<u8>,
    /// The driver's part of an extended command.
    driver: Vec<u8>,
    /// Number of bytes of `request` that are already decoded.
    taken: Cell<usize>,
    response: u64,
    /// Maximum length of the response; in a plain command it includes the driver's part.
    room: usize,
    /// Maximum length of the driver's part of an extended response. This part lies after `room`
    /// bytes.
    driver_room: usize,
}

impl Call {
    /// Reads a command from the program's memory.
    ///
    /// # Errors
    /// `EFAULT`: that memory is not readable. `EINVAL`: see [`parse`](Self::parse).
    pub(crate) fn read(at: u64, len: usize) -> Result<Self, Errno> {
        Errno(libc::EINVAL).when(len > LONGEST)?;
        let mut bytes = vec![0; len];
        sys::copy_in(at, &mut bytes)?;
        Self::parse(&bytes)
    }

    /// Decodes a command.
    ///
    /// # Errors
    /// `EINVAL`: the command is too short, has an unknown flag, or disagrees with the lengths in
    /// its headers.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Errno> {
        const INVALID: Errno = Errno(libc::EINVAL);
        let (header, rest) = CommandHeader::read_from_prefix(bytes).map_err(|_| INVALID)?;
        let (command, in_words, out_words) = (header.command, header.in_words, header.out_words);
        INVALID.when(command & !(EXTENDED | NUMBER) != 0)?;
        let is_extended = command & EXTENDED != 0;
        let word = if is_extended { 8 } else { 4 };
        let mut call = Self {
            number: (command & NUMBER) as u8,
            is_extended,
            request: Vec::new(),
            driver: Vec::new(),
            taken: Cell::new(0),
            response: 0,
            room: usize::from(out_words) * word,
            driver_room: 0,
        };
        let is_legal = if is_extended {
            let (header, rest) = ExtendedHeader::read_from_prefix(rest).map_err(|_| INVALID)?;
            let parts = rest.split_at_checked(usize::from(in_words) * word);
            let (request, driver) = parts.ok_or(INVALID)?;
            (call.request, call.driver) = (request.to_vec(), driver.to_vec());
            call.response = header.response;
            call.driver_room = usize::from(header.provider_out_words) * word;
            driver.len() == usize::from(header.provider_in_words) * word
                && header.cmd_hdr_reserved == 0
                && (call.response == 0) == (call.room + call.driver_room == 0)
        } else {
            if call.room > 0 {
                call.response = u64::from_ne_bytes(*rest.first_chunk().ok_or(INVALID)?);
            }
            call.request = rest.to_vec();
            bytes.len() == usize::from(in_words) * word
        };
        is_legal.then_some(call).ok_or(INVALID)
    }

    /// Decodes the request, and checks that the response `R`, without the driver's part, has room.
    /// Call it once, and before [`driver`](Self::driver).
    ///
    /// # Errors
    /// `EINVAL`: the command is shorter than the request. `ENOSPC`: the response has no room.
    pub(crate) fn request<T: FromBytes, R>(&self) -> Result<T, Errno> {
        let (value, _) = T::read_from_prefix(&self.request).map_err(|_| Errno(libc::EINVAL))?;
        self.taken.set(size_of::<T>());
        self.check_room(size_of::<R>())?;
        Ok(value)
    }

    /// Decodes the driver's part. Fields that an older driver does not send are 0.
    pub(crate) fn driver<T: FromZeros + FromBytes + IntoBytes>(&self) -> T {
        let from = if self.is_extended {
            &self.driver[..]
        } else {
            self.request.get(self.taken.get()..).unwrap_or(&[])
        };
        let mut value = T::new_zeroed();
        let len = from.len().min(size_of::<T>());
        value.as_mut_bytes()[..len].copy_from_slice(&from[..len]);
        value
    }

    pub(crate) fn driver_len(&self) -> usize {
        if self.is_extended {
            self.driver.len()
        } else {
            self.request.len().saturating_sub(self.taken.get())
        }
    }

    /// Returns the maximum length of an extended command's response without the driver's part. The
    /// field `response_length` of that response must not exceed this length.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Checks that a response of `len` bytes, without the driver's part, has room.
    ///
    /// # Errors
    /// `ENOSPC`: the response has no room.
    pub(crate) fn check_room(&self, len: usize) -> Result<(), Errno> {
        Errno(libc::ENOSPC).when(self.room < len)
    }

    /// Checks that the response can be written. Call this before an object is created: without a
    /// response the program would not know the object. A response with more room than the longest
    /// response needs is not checked.
    ///
    /// # Errors
    /// `EFAULT`: the response cannot be written.
    pub(crate) fn check_response(&self) -> Result<(), Errno> {
        let mut bytes = [0; LONGEST_RESPONSE];
        let bytes = bytes
            .get_mut(..self.room + self.driver_room)
            .unwrap_or(&mut []);
        sys::copy_in(self.response, bytes)?;
        sys::copy_out(bytes, self.response)
    }

    /// Writes the response to the address that the program gave, as far as there is room.
    ///
    /// # Errors
    /// `EFAULT`: the response cannot be written.
    pub(crate) fn respond(&self, reply: &Reply) -> Result<(), Errno> {
        let core_len = reply.core.len().min(self.room);
        let (driver_at, driver_room) = if self.is_extended {
            (self.room, self.driver_room)
        } else {
            (core_len, self.room - core_len)
        };
        let driver_len = reply.driver.len().min(driver_room);
        sys::copy_out(&reply.core[..core_len], self.response)?;
        sys::copy_out(
            &reply.driver[..driver_len],
            self.response.wrapping_add(driver_at as u64),
        )
    }
}

#[derive(Debug, Default)]
pub(crate) struct Reply {
    core: Vec<u8>,
    driver: Vec<u8>,
    /// Text for the log: the objects and parameters of the command.
    pub(crate) note: String,
}

impl Reply {
    pub(crate) fn none() -> Self {
        Self::default()
    }

    /// Makes a response of the kernel's part alone.
    pub(crate) fn of(core: &(impl IntoBytes + Immutable)) -> Self {
        Self {
            core: core.as_bytes().to_vec(),
            ..Self::default()
        }
    }

    /// Makes this an extended response, which ends with a mask of 0 and the response's own length.
    pub(crate) fn extended(mut self) -> Self {
        let len = self.core.len() as u32 + 8;
        self.core.extend([0, len].map(u32::to_ne_bytes).concat());
        self
    }

    pub(crate) fn with(mut self, driver: &(impl IntoBytes + Immutable)) -> Self {
        self.driver = driver.as_bytes().to_vec();
        self
    }

    pub(crate) fn note(mut self, note: String) -> Self {
        self.note = note;
        self
    }
}

#[cfg(test)]
mod tests;
