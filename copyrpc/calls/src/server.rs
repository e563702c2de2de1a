//! The server with one handler, in the thread of its owner.

use std::io;
use std::ops::{Deref, DerefMut};

use crate::serving::{Bind, Serving, Share, SharedAddress, StopHandle};

/// A server over a transport. It belongs to one thread, and serves all its clients in that thread:
/// bind the server in that thread, and send its address and its stop handle to the threads that
/// need them. It dereferences to the transport's own server, which has the functions for a loop
/// that its owner writes.
#[derive(Debug)]
pub struct Server<S> {
    serving: S,
}

impl<S: Serving> Server<S> {
    /// Makes the server at `address`.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub fn bind<A>(address: A) -> Result<Self, S::Error>
    where
        S: Bind<A>,
    {
        Self::with_options(address, &S::Options::default())
    }

    /// Like [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub fn with_options<A>(address: A, options: &S::Options) -> Result<Self, S::Error>
    where
        S: Bind<A>,
    {
        S::bind_with(address, options).map(|serving| Self { serving })
    }

    /// Makes a further server at the address of an existing server, for another thread. Each of them
    /// has a device, memory and clients of its own; a client that connects comes to the server that
    /// accepts it first.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub fn beside(other: SharedAddress<S::Options>) -> Result<Self, S::Error>
    where
        S: Share,
    {
        S::beside(other).map(|serving| Self { serving })
    }

    /// Shares the address, for [`beside`](Self::beside). All servers at the address have one stop
    /// handle; the others notice the stop within 10 ms.
    ///
    /// # Errors
    /// No descriptor is free, or the server was closed.
    pub fn share(&mut self) -> io::Result<SharedAddress<S::Options>>
    where
        S: Share,
    {
        self.serving.share()
    }

    /// Returns the address of the server, whose text a client can connect to.
    ///
    /// # Errors
    /// The system does not return the address, or the server was closed.
    pub fn local_addr(&self) -> io::Result<S::Address> {
        self.serving.address()
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> S::Device {
        self.serving.device()
    }

    /// Returns the number of connected clients.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.serving.clients()
    }

    /// Returns the counters of all clients since the server was made.
    #[must_use]
    pub fn stats(&self) -> S::Stats {
        self.serving.stats()
    }

    /// Returns a handle that makes [`serve`](Self::serve) return as soon as its handler has
    /// returned, from any thread. Requests that have arrived by then are answered; later requests
    /// are for another server: no handler gets them.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.serving.stop_handle()
    }

    /// Answers each request with the return value of `handler`, until the server is stopped. Sleeps
    /// while there is nothing to do. A reply longer than the client accepts ends the call as
    /// [`ReplyTooLong`](crate::ClientError::ReplyTooLong).
    ///
    /// All clients wait while a handler runs. Do long work in other threads, with an
    /// [`AsyncServer`](crate::AsyncServer) or the functions of the transport's own server.
    ///
    /// # Errors
    /// The server cannot continue.
    pub fn serve<R: AsRef<[u8]>>(
        &mut self,
        handler: impl FnMut(S::Request<'_>) -> R,
    ) -> Result<(), S::Error> {
        self.serving.serve(handler)
    }
}

impl<S> Deref for Server<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.serving
    }
}

impl<S> DerefMut for Server<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.serving
    }
}
