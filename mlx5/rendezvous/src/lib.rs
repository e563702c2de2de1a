//! The exchange of records by which two processes connect their queue pairs, over TCP. `copyrpc`
//! and `scalerpc` share this crate:
//!
//! - `gate`: a server at a TCP address, where no peer delays another;
//! - `device`: the device of servers and clients by default;
//! - `peer`: the peers of a server, and the events of their connections;
//! - `secret`: a secret that both ends prove to each other;
//! - `record`, `receive`: the records, and how they are received from a stream;
//! - `pieces`: records that cross a stream in pieces;
//! - `reach`: a client that waits for its server;
//! - `names`: the addresses of a server's name, which may change;
//! - `route`: connects a client to its server, and again after the end of a connection;
//! - `setup`: the reason why an end could not be made;
//! - `lifelines`: the sockets over which peers have connected; the end of a socket reports the
//!   death of its peer;
//! - `grace`: the time for which a server waits at its end.
//!
//! Without a [`Secret`] nothing here is authenticated: any process that reaches the port can take
//! part. Nothing is encrypted.
//!
//! ```
//! use mlx5_rendezvous::record::{HEAD_BYTES, Kind, RecordError, Refusal, field, put};
//!
//! const HELLO: Kind = Kind { name: "hello", magic: *b"examplHL", version: 1 };
//!
//! // 16 bytes of head and a queue pair number.
//! let mut record: [u8; 20] = HELLO.begin();
//! put(&mut record, HEAD_BYTES, &77_u32.to_le_bytes());
//! HELLO.check(&record)?;
//! assert_eq!(u32::from_le_bytes(field(&record, HEAD_BYTES)), 77);
//!
//! // A server without room answers with a refusal in place of its record.
//! let refusal: [u8; 20] = HELLO.refuse(Refusal::Full);
//! assert_eq!(HELLO.check(&refusal), Err(RecordError::Refused(Refusal::Full)));
//! # Ok::<(), RecordError>(())
//! ```

mod device;
mod gate;
mod grace;
mod lifelines;
mod names;
mod peer;
mod pieces;
mod reach;
mod receive;
pub mod record;
mod route;
mod secret;
mod setup;

pub use device::default_device;
pub use gate::{Gate, GateOptions};
pub use grace::GracePeriod;
pub use names::name_of;
pub use peer::{Event, Events, Peer};
pub use pieces::{Incoming, Outgoing};
pub use reach::{LIFELINE_INTERVAL, Meeting};
pub use route::Route;
pub use secret::Secret;
pub use setup::SetupError;

/// Every error can cross threads, and `?` converts it to `Box<dyn Error + Send + Sync>`.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::record::RecordError>();
        check::<crate::record::Refusal>();
        check::<crate::SetupError>();
    }
}
