//! Queue pairs are connected by what each end tells the other through some other channel. This crate has what `copyrpc` and `scalerpc` share of
//! that: a server at a TCP address (`Gate`) that no stranger keeps waiting, a client that waits for its server (`reach`), and the records that
//! travel between them (`record`).
//!
//! Nothing here is authenticated or encrypted: who reaches the port can take part.
//!
//! # The files
//! - `gate`: the server's side of the address.
//! - `reach`: the client's.
//! - [`record`]: the bytes that they exchange.

mod gate;
mod reach;
pub mod record;

pub use gate::{Gate, Incoming, Outgoing};
pub use reach::{reach, stream_has_ended};

/// Errors go to other threads, and `?` makes a `Box<dyn Error + Send + Sync>` of each.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::record::RecordError>();
        check::<crate::record::Refusal>();
    }
}
