//! Messages that are structs. A message is the bytes of the struct and nothing else: a typed end works with a peer that makes the same
//! bytes by hand.
//!
//! A type qualifies if every bit pattern is a value and it has no padding; the derives of [`zerocopy`] check that. Its layout must be the
//! same at both ends, so give it `#[repr(C)]`. If the ends may be machines of different byte order, use fields with the byte order in
//! their type ([`little_endian`](zerocopy::little_endian)). Received values are copies, so later writes of the peer do not change them.
//!
//! ```
//! # use copyrpc::mlx5::DeviceSpec;
//! # use copyrpc::{Context, ContextBuilder, EndpointConfig};
//! use copyrpc::typed::zerocopy::little_endian::{U32, U64};
//! use copyrpc::typed::Call;
//! use copyrpc::typed::zerocopy::{FromBytes, Immutable, IntoBytes};
//!
//! #[derive(FromBytes, IntoBytes, Immutable)]
//! #[zerocopy(crate = "copyrpc::typed::zerocopy")]
//! #[repr(C)]
//! struct Area {
//!     width: U32,
//!     height: U32,
//! }
//!
//! impl Call for Area {
//!     type Reply = U64;
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let client: Context<()> = ContextBuilder::new(DeviceSpec::default()).build()?;
//! # let server: Context<()> = ContextBuilder::new(DeviceSpec::default()).build()?;
//! # let (a, b) = (client.create_endpoint(&EndpointConfig::default())?, server.create_endpoint(&EndpointConfig::default())?);
//! # let (record_a, record_b) = (a.local_info(), b.local_info());
//! # let (endpoint, _peer) = (a.connect(&record_b)?, b.connect(&record_a)?);
//! // The reply may have the bytes of a U64.
//! endpoint.call_typed(&Area { width: 6.into(), height: 7.into() }, ())?;
//! let mut product = None;
//! while product.is_none() {
//!     client.poll(|(), outcome| product = Some(outcome.map(|bytes| bytes.read_as::<U64>())))?;
//!     server.poll(|(), _| ())?;
//!     while let Some(request) = server.recv() {
//!         match request.read_as::<Area>() {
//!             Ok(area) => request.reply_typed(&U64::new(u64::from(area.width) * u64::from(area.height)))?,
//!             Err(_) => request.refuse()?,
//!         }
//!     }
//! }
//! assert_eq!(product, Some(Ok(Ok(42.into()))));
//! # Ok(())
//! # }
//! ```

use thiserror::Error;
/// The crate of the derives, for programs that do not depend on it themselves.
pub use zerocopy;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::endpoint::{CallToken, Endpoint};
use crate::error::{CallError, ReplyError};
use crate::recv::RecvHandle;
use crate::ring::RecvBytes;

/// A request with the type of its reply.
pub trait Call: IntoBytes + Immutable {
    /// The type of the reply.
    type Reply: FromBytes + IntoBytes + Immutable;
}

/// The message has another size than the type it was read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a message of {received} bytes, the type has {expected}")]
pub struct SizeError {
    /// Bytes of the message.
    pub received: usize,
    /// Bytes of the type.
    pub expected: usize,
}

impl RecvBytes<'_> {
    /// Returns a copy of the message as a `T`, which has as many bytes. [`RecvBytes::read`] reads the front of a longer one.
    ///
    /// # Errors
    /// [`SizeError`]: the message has more bytes, or fewer.
    pub fn read_as<T: FromBytes + IntoBytes>(&self) -> Result<T, SizeError> {
        let error = SizeError { received: self.len(), expected: size_of::<T>() };
        if error.received == error.expected { self.read().ok_or(error) } else { Err(error) }
    }
}

impl<U> RecvHandle<U> {
    /// Returns a copy of the request as a `T`.
    ///
    /// # Errors
    /// [`SizeError`]: the request has more bytes, or fewer.
    pub fn read_as<T: FromBytes + IntoBytes>(&self) -> Result<T, SizeError> {
        self.data().read_as()
    }

    /// Answers with the bytes of `response`, as [`RecvHandle::reply`] does.
    ///
    /// # Errors
    /// See [`RecvHandle::reply`]; `TooLarge` if the caller expects a smaller type.
    pub fn reply_typed<T: IntoBytes + Immutable>(self, response: &T) -> Result<(), ReplyError<Self>> {
        self.reply(response.as_bytes())
    }
}

impl<U> Endpoint<U> {
    /// Sends the bytes of `request`. The reply may have as many bytes as [`Call::Reply`], which [`RecvBytes::read_as`] reads. Otherwise
    /// like [`Endpoint::call`].
    ///
    /// # Errors
    /// See [`Endpoint::call`].
    pub fn call_typed<C: Call>(&self, request: &C, user_data: U) -> Result<CallToken, CallError<U>> {
        self.call(request.as_bytes(), user_data, size_of::<C::Reply>())
    }
}
