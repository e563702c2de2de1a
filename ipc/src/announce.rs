//! Announcements: a client announces a call if the server does not poll the client's lane.

use std::ptr::NonNull;

use copyrpc_shm::ready::{ReadyWords, Wakes};
use copyrpc_shm::sync::AtomicU32;

use crate::limits::LINE;
use copyrpc_calls::OptionError;

/// The announcements of clients to a server that does not poll their lanes. The default is
/// [`ReadyWords`], a bit for each client; `delegationrpc` has a ring of client numbers.
///
/// A client calls [`announce`](Self::announce) after it has published a request, if its flag
/// `armed` is set (R1 of `docs/shm-protocols.md`). The server reads the announcements through the
/// same type, as a [`Wakes`]. Before the first use, the memory is zeroed.
pub trait Announce: Wakes + Send + Sized {
    /// Kind of the server's region.
    const KIND: u64;
    /// First word of the region's header.
    const MAGIC: u64;
    /// Version of the region's layout.
    const VERSION: u32;

    /// Returns the default number of words.
    fn words_for(max_clients: usize) -> usize;

    /// Returns the number of bytes of the announcements in the region, a multiple of 64.
    ///
    /// # Errors
    /// [`OptionError`] if the number of words is not legal.
    fn bytes(max_clients: usize, words: usize) -> Result<usize, OptionError>;

    /// Makes a view of the announcements at `base`.
    ///
    /// # Safety
    /// `base` is aligned to 64. The bytes there, as many as [`bytes`](Self::bytes) returns for
    /// these numbers, were zeroed when the region was created, and stay mapped as long as this
    /// value is used.
    unsafe fn new(base: NonNull<u8>, max_clients: usize, words: usize) -> Self;

    /// Announces a client whose request is published. The caller wakes the server.
    fn announce(&self, client: usize, armed: &AtomicU32);
}

impl Announce for ReadyWords {
    const KIND: u64 = u64::from_be_bytes(*b"ipcLANE\x02");
    const MAGIC: u64 = u64::from_be_bytes(*b"ipcLANES");
    const VERSION: u32 = 4;

    fn words_for(max_clients: usize) -> usize {
        Self::words(max_clients)
    }

    fn bytes(max_clients: usize, words: usize) -> Result<usize, OptionError> {
        if words == Self::words(max_clients) {
            Ok((8 * words).next_multiple_of(LINE))
        } else {
            Err(OptionError::new(
                "words",
                words as u64,
                "as many as the clients need",
            ))
        }
    }

    unsafe fn new(base: NonNull<u8>, max_clients: usize, _: usize) -> Self {
        // SAFETY: `base` points to mapped, zeroed words, as many as the clients need (contract of
        // this function), and zeroed bytes are valid atomics. Every layout has a client, and so a
        // lane.
        unsafe { Self::new(base.cast(), max_clients) }
    }

    fn announce(&self, client: usize, _: &AtomicU32) {
        self.notify(client);
    }
}
