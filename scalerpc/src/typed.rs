//! Requests that are structs. A message is the bytes of the struct and nothing else: a typed end works with a peer that makes the same
//! bytes by hand.
//!
//! A type qualifies if every bit pattern is a value and it has no padding; the derives of [`zerocopy`] check that. Its layout must be the
//! same at both ends, so give it `#[repr(C)]`. If the ends may be machines of different byte order, use fields with the byte order in
//! their type ([`little_endian`](zerocopy::little_endian)).
//!
//! ```
//! use scalerpc::typed::Call;
//! use scalerpc::typed::zerocopy::little_endian::{U32, U64};
//! use scalerpc::typed::zerocopy::{FromBytes, Immutable, IntoBytes};
//!
//! #[derive(FromBytes, IntoBytes, Immutable)]
//! #[zerocopy(crate = "scalerpc::typed::zerocopy")]
//! #[repr(C)]
//! struct Area {
//!     width: U32,
//!     height: U32,
//! }
//!
//! impl Call for Area {
//!     const RPC_TYPE: u16 = 3;
//!     type Reply = U64;
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut server = scalerpc::Server::bind("127.0.0.1:0")?;
//! let mut handlers = scalerpc::Handlers::new(server.max_payload());
//! handlers.insert_typed(|area: Area| U64::new(u64::from(area.width) * u64::from(area.height)));
//!
//! let (address, stop) = (server.local_addr()?, server.stop_handle());
//! let client = std::thread::spawn(move || {
//!     let product = scalerpc::Client::connect(address)?.call_typed(&Area { width: 6.into(), height: 7.into() });
//!     stop.stop();
//!     product
//! });
//! server.serve_types(&mut handlers)?;
//! assert_eq!(client.join().unwrap()?, 42);
//! # Ok(())
//! # }
//! ```

use std::time::Duration;

/// The crate of the derives, for programs that do not depend on it themselves.
pub use zerocopy;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::protocol::{HandlerError, Handlers};
use crate::service::{AsyncClient, Client, ClientError};

/// A request with the number of its handler and the type of its response.
pub trait Call: IntoBytes + Immutable {
    /// The `rpc_type` of its handler.
    const RPC_TYPE: u16;
    /// The type of the response.
    type Reply: FromBytes + IntoBytes + Immutable;
}

impl<'h> Handlers<'h> {
    /// Installs `handler` for requests of this type, as [`insert`](Self::insert) does. A request of another size is answered with a
    /// failure.
    pub fn insert_typed<C: Call + FromBytes>(&mut self, mut handler: impl FnMut(C) -> C::Reply + 'h) {
        self.insert(C::RPC_TYPE, move |request: &[u8], place: &mut [u8]| {
            let response = handler(C::read_from_bytes(request).map_err(|_| HandlerError)?);
            let bytes = response.as_bytes();
            // A length that does not fit becomes a failure at the caller.
            if let Some(place) = place.get_mut(..bytes.len()) {
                place.copy_from_slice(bytes);
            }
            Ok(bytes.len())
        });
    }
}

impl Client {
    /// Sends the bytes of `request`, and reads the response as a [`Call::Reply`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_typed<C: Call>(&mut self, request: &C) -> Result<C::Reply, ClientError> {
        read_reply(&self.call_type(C::RPC_TYPE, request.as_bytes())?)
    }

    /// Like [`call_typed`](Self::call_typed), with a timeout of its own: see [`call_within`](Self::call_within).
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_typed_within<C: Call>(&mut self, request: &C, timeout: Duration) -> Result<C::Reply, ClientError> {
        read_reply(&self.call_for(C::RPC_TYPE, request.as_bytes(), timeout)?)
    }
}

impl AsyncClient {
    /// Like [`Client::call_typed`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn call_typed<C: Call + Sync>(&self, request: &C) -> Result<C::Reply, ClientError> {
        read_reply(&self.call_type(C::RPC_TYPE, request.as_bytes()).await?)
    }

    /// Like [`Client::call_typed_within`].
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn call_typed_within<C: Call + Sync>(&self, request: &C, timeout: Duration) -> Result<C::Reply, ClientError> {
        read_reply(&self.call_for(C::RPC_TYPE, request.as_bytes().into(), timeout).await?)
    }
}

fn read_reply<Reply: FromBytes>(response: &[u8]) -> Result<Reply, ClientError> {
    let error = ClientError::Size { received: response.len(), expected: size_of::<Reply>() };
    Reply::read_from_bytes(response).map_err(|_| error)
}
