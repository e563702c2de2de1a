//! Receiving records from streams.

use std::io::{self, ErrorKind, Read};

use crate::pieces::Incoming;
use crate::record::Kind;
use crate::setup::SetupError;

impl Kind {
    /// Receives the bytes of a record that are available. Returns `None` if some bytes are still
    /// missing and the stream would block. Of a record that is not complete the magic is checked as
    /// soon as it is there, because an end of another kind may never send as many bytes as the
    /// record has. A complete record is not checked.
    ///
    /// # Errors
    /// The errors of the stream; [`RecordError::Magic`](crate::record::RecordError::Magic).
    pub fn advance<'a, const N: usize>(
        &self,
        incoming: &'a mut Incoming<N>,
        stream: &mut impl Read,
    ) -> Result<Option<&'a [u8; N]>, SetupError> {
        while incoming.whole().is_none() {
            let Some(bytes) = incoming.step(stream)? else {
                return Ok(None);
            };
            if bytes.len() < N {
                self.check_magic(bytes)?;
            }
        }
        Ok(incoming.whole())
    }

    /// Receives a record from a stream that blocks, like [`advance`](Self::advance).
    ///
    /// # Errors
    /// The errors of the stream; [`RecordError::Magic`](crate::record::RecordError::Magic).
    pub fn receive<const N: usize>(&self, stream: &mut impl Read) -> Result<[u8; N], SetupError> {
        let mut incoming = Incoming::default();
        // The time limit of a socket is reported as an operation that would block, so `None` means
        // that the limit has passed.
        self.advance(&mut incoming, stream)?
            .copied()
            .ok_or_else(|| io::Error::from(ErrorKind::TimedOut).into())
    }
}
