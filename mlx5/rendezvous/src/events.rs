//! The clients of a server, and the events of their connections.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

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

/// An event of a connection. Each `Connected` is followed by a `Disconnected` of the same peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A client has connected. Its first request may arrive before this event.
    Connected(Peer),
    /// A client was disconnected, for this reason.
    Disconnected(Peer, &'a str),
    /// A client, or a stranger, was not connected, for this reason.
    Refused(Peer, &'a str),
}

impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected(peer) => write!(f, "{peer} has connected"),
            Self::Disconnected(peer, reason) => write!(f, "{peer} is disconnected: {reason}"),
            Self::Refused(peer, reason) => write!(f, "{peer} was refused: {reason}"),
        }
    }
}

/// A function that is called for each event of a server, in the thread of the server: it must not
/// block. The default value calls no function. With the feature `tracing` every event is also an
/// event of the `tracing` crate, with the target `rendezvous`: refusals have level `WARN`, others
/// `INFO`.
#[derive(Clone, Default)]
pub struct Events(Option<Arc<Hear>>);

type Hear = dyn Fn(Event<'_>) + Send + Sync;

impl Events {
    /// Makes a value that passes each event to `hear`. Clones share the function.
    pub fn new(hear: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(hear)))
    }

    /// Passes an event to the function, but not in a panic: a function that has panicked would abort
    /// the process in the drop of its server.
    pub fn tell(&self, event: Event<'_>) {
        #[cfg(feature = "tracing")]
        match event {
            Event::Connected(peer) => {
                tracing::info!(address = %peer.address, connection = peer.number, "connected")
            }
            Event::Disconnected(peer, reason) => {
                tracing::info!(address = %peer.address, connection = peer.number, reason, "disconnected");
            }
            Event::Refused(peer, reason) => {
                tracing::warn!(address = %peer.address, connection = peer.number, reason, "refused")
            }
        }
        if let Some(hear) = self.0.as_ref().filter(|_| !std::thread::panicking()) {
            hear(event);
        }
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Events").field(&self.0.is_some()).finish()
    }
}

#[cfg(all(test, feature = "tracing"))]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Metadata, Subscriber};

    use super::*;

    #[derive(Clone, Default)]
    struct Heard(Arc<Mutex<String>>);

    impl Heard {
        fn text(&self) -> MutexGuard<'_, String> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl Visit for Heard {
        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            *self.text() += &format!(" {}={value:?}", field.name());
        }
    }

    impl Subscriber for Heard {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &tracing::Event<'_>) {
            *self.text() += event.metadata().level().as_str();
            event.record(&mut self.clone());
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn events_are_those_of_tracing_too() {
        let heard = Heard::default();
        let peer = Peer {
            address: ([127, 0, 0, 1], 7).into(),
            number: 3,
        };
        tracing::subscriber::with_default(heard.clone(), || {
            Events::default().tell(Event::Refused(peer, "no"))
        });
        assert_eq!(
            *heard.text(),
            "WARN message=refused address=127.0.0.1:7 connection=3 reason=\"no\""
        );
    }
}
