//! The events of the connections of a server.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// A client as its server names it.
pub trait Named: Copy + fmt::Display + Send + Sync + 'static {
    /// Returns the number of the client, which no other client of the server has while this client
    /// is connected.
    fn number(self) -> u64;

    /// Returns the address of the client's socket, if it has one.
    fn address(self) -> Option<SocketAddr>;
}

/// A client without a socket.
impl Named for usize {
    fn number(self) -> u64 {
        self as u64
    }

    fn address(self) -> Option<SocketAddr> {
        None
    }
}

/// An event of a connection. Each `Connected` is followed by a `Disconnected` of the same client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a, P> {
    /// A client has connected. Its first request may arrive before this event.
    Connected(P),
    /// A client was disconnected, for this reason.
    Disconnected(P, &'a str),
    /// A client, or a stranger, was not connected, for this reason.
    Refused(P, &'a str),
}

impl<P: Named> fmt::Display for Event<'_, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected(client) => write!(f, "{client} has connected"),
            Self::Disconnected(client, reason) => write!(f, "{client} is disconnected: {reason}"),
            Self::Refused(client, reason) => write!(f, "{client} was refused: {reason}"),
        }
    }
}

/// A function that is called for each event of a server, in the thread of the server: it must not
/// block. The default value calls no function. With the feature `tracing` every event is also an
/// event of the `tracing` crate, with the target `copyrpc_calls::events`: refusals have level
/// `WARN`, others `INFO`.
#[derive(Clone)]
pub struct Events<P>(Option<Arc<Hear<P>>>);

type Hear<P> = dyn Fn(Event<'_, P>) + Send + Sync;

impl<P> Default for Events<P> {
    fn default() -> Self {
        Self(None)
    }
}

impl<P: Named> Events<P> {
    /// Makes a value that passes each event to `hear`. Clones share the function.
    pub fn new(hear: impl Fn(Event<'_, P>) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(hear)))
    }

    /// Passes an event to the function, but not in a panic: a function that has panicked would abort
    /// the process in the drop of its server.
    pub fn tell(&self, event: Event<'_, P>) {
        #[cfg(feature = "tracing")]
        trace(event);
        if let Some(hear) = self.0.as_ref().filter(|_| !std::thread::panicking()) {
            hear(event);
        }
    }
}

#[cfg(feature = "tracing")]
fn trace<P: Named>(event: Event<'_, P>) {
    let fields = |client: P| {
        let address = client.address().map(tracing::field::display);
        (address, client.number())
    };
    match event {
        Event::Connected(client) => {
            let (address, connection) = fields(client);
            tracing::info!(address, connection, "connected");
        }
        Event::Disconnected(client, reason) => {
            let (address, connection) = fields(client);
            tracing::info!(address, connection, reason, "disconnected");
        }
        Event::Refused(client, reason) => {
            let (address, connection) = fields(client);
            tracing::warn!(address, connection, reason, "refused");
        }
    }
}

impl<P> fmt::Debug for Events<P> {
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

    #[derive(Clone, Copy)]
    struct Client;

    impl fmt::Display for Client {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("client")
        }
    }

    impl Named for Client {
        fn number(self) -> u64 {
            3
        }

        fn address(self) -> Option<SocketAddr> {
            Some(([127, 0, 0, 1], 7).into())
        }
    }

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
        tracing::subscriber::with_default(heard.clone(), || {
            Events::default().tell(Event::Refused(Client, "no"));
            Events::default().tell(Event::Connected(4_usize));
        });
        assert_eq!(
            *heard.text(),
            "WARN message=refused address=127.0.0.1:7 connection=3 reason=\"no\"\
             INFO message=connected connection=4"
        );
    }
}
