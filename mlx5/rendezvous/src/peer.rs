//! The clients of a server, and the events of their connections.

use std::fmt;
use std::net::SocketAddr;

use copyrpc_calls::Named;

/// A client of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Address of the client's socket, over which it connected.
    pub address: SocketAddr,
    /// Number of the peer's connection, which no other connection to a server of this process has.
    pub number: u64,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (connection {})", self.address, self.number)
    }
}

impl Named for Peer {
    fn number(self) -> u64 {
        self.number
    }

    fn address(self) -> Option<SocketAddr> {
        Some(self.address)
    }
}

/// The events of the connections of a server.
pub type Events = copyrpc_calls::Events<Peer>;

/// An event of a connection.
pub type Event<'a> = copyrpc_calls::Event<'a, Peer>;
