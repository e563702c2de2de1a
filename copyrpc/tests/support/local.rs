//! Servers and clients of one process, on a fabric of their own.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use copyrpc::mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use copyrpc::{Client, ClientOptions, EndpointConfig, Server, ServerOptions, StopHandle};
use copyrpc_testing::limits;

/// Time after which a hang ends the process. The tests take far less.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

/// The fabric on which the servers and clients of a test meet.
#[derive(Clone)]
pub(crate) struct Net(LocalFabric);

impl Net {
    pub(crate) fn new() -> Self {
        limits::watchdog(WATCHDOG);
        Self(LocalFabric::new())
    }

    pub(crate) fn device(&self) -> DeviceSpec {
        DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(self.0.clone()),
            ..SoftOptions::default()
        })
    }

    pub(crate) fn server_options(&self) -> ServerOptions {
        ServerOptions {
            device: self.device(),
            endpoint: endpoint(),
            ..ServerOptions::default()
        }
    }

    pub(crate) fn client_options(&self) -> ClientOptions {
        ClientOptions {
            device: self.device(),
            endpoint: endpoint(),
            connect_timeout: Duration::MAX,
            connections: 1,
            ..ClientOptions::default()
        }
    }

    pub(crate) fn client(&self, address: SocketAddr) -> Client {
        Client::with_options(address, &self.client_options()).unwrap()
    }

    /// A server in a thread of its own, which does `run` to it.
    pub(crate) fn serve(
        &self,
        address: &str,
        run: impl FnOnce(&mut Server) + Send + 'static,
    ) -> Served {
        serve(address, self.server_options(), run)
    }
}

/// A server in a thread of its own, which does `run` to it.
pub(crate) fn serve(
    address: &str,
    options: ServerOptions,
    run: impl FnOnce(&mut Server) + Send + 'static,
) -> Served {
    let (address, (told, tell)) = (address.to_owned(), mpsc::channel());
    let thread = thread::spawn(move || {
        let mut server = Server::with_options(address, &options).unwrap();
        told.send((server.local_addr().unwrap(), server.stop_handle()))
            .unwrap();
        run(&mut server);
        assert_eq!(server.device_info().violations, 0);
    });
    let (address, stop) = tell.recv().unwrap();
    Served {
        address,
        stop,
        thread,
    }
}

pub(crate) struct Served {
    pub(crate) address: SocketAddr,
    pub(crate) stop: StopHandle,
    thread: JoinHandle<()>,
}

impl Served {
    pub(crate) fn end(self) -> SocketAddr {
        self.stop.stop();
        self.thread.join().unwrap();
        self.address
    }
}

fn endpoint() -> EndpointConfig {
    EndpointConfig {
        ring_size: 64 << 10,
        ..EndpointConfig::default()
    }
}
