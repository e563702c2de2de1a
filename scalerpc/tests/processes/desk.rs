//! The server of a test: admits clients, serves them, and records the requests that ran.

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use scalerpc::mlx5::{Device, DeviceSpec, FabricSpec, SoftOptions, Timing};
use scalerpc::rdma::SetupError;
use scalerpc::{Handlers, RdmaServer, ServerConfig};

use crate::guest::Guest;
use crate::support::books::{Books, handlers};
use crate::support::connect;
use crate::support::plan::SLOT_BYTES;
use crate::time::{Mode, Net, mode};
use copyrpc_testing::helpers::Scratch;

/// Maximum number of requests answered in a step.
const BUDGET: usize = 64;

/// Returns the path of the server's socket in the scratch directory, which helpers know.
pub(crate) fn socket_in() -> PathBuf {
    scratch().join("server")
}

/// Memory of a device for one client: small, so that hundreds fit in one process.
pub(crate) const SMALL_ARENA: usize = 16 << 20;
/// Memory of a device for hundreds of clients, or their server.
pub(crate) const LARGE_ARENA: usize = 256 << 20;

/// Returns a device of the test's fabric, in immediate or delayed time, as set by `MLX5_TEST_TIME`.
pub(crate) fn device_in(arena_bytes: usize) -> DeviceSpec {
    device(&scratch(), arena_bytes)
}

fn scratch() -> PathBuf {
    PathBuf::from(std::env::var_os("SHM_TEST_DIR").unwrap())
}

fn device(scratch: &Path, arena_bytes: usize) -> DeviceSpec {
    let fabric = FabricSpec::Shared {
        dir: Some(scratch.join("fabric")),
    };
    let timing = if mode() == Mode::Delay {
        Net::new().options().timing
    } else {
        Timing::Immediate
    };
    DeviceSpec::Soft(SoftOptions {
        fabric,
        timing,
        arena_bytes,
        ..SoftOptions::default()
    })
}

/// A client that is connected, or was when its channel was last read.
struct Present {
    channel: UnixStream,
    name: u64,
}

pub(crate) struct Desk {
    pub(crate) server: RdmaServer,
    handlers: Handlers<'static>,
    books: Rc<RefCell<Books>>,
    device: DeviceSpec,
    listener: UnixListener,
    guests: Vec<Present>,
    named: u64,
    steps: u64,
    /// The client whose channel is read next.
    next: usize,
    /// Number of clients that disconnected when all their calls had been answered, and number of
    /// these calls.
    pub(crate) farewells: u64,
    pub(crate) answered: u64,
    /// Number of clients that were refused, or were gone before they were admitted.
    pub(crate) refused: u64,
}

impl Desk {
    pub(crate) fn new(scratch: &Scratch, config: &ServerConfig) -> Self {
        assert_eq!(config.slot_bytes, SLOT_BYTES);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(scratch.path().join("fabric"))
            .unwrap();
        let listener = UnixListener::bind(scratch.path().join("server")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let device = device(scratch.path(), LARGE_ARENA);
        let server = RdmaServer::new(&device, config).unwrap();
        let (handlers, books) = handlers(&server);
        let guests = Vec::new();
        Self {
            server,
            handlers,
            books,
            device,
            listener,
            guests,
            named: 0,
            steps: 0,
            next: 0,
            farewells: 0,
            answered: 0,
            refused: 0,
        }
    }

    /// Makes a client in this process.
    pub(crate) fn join_here(&mut self) -> Guest {
        let client = connect(&self.device, &mut self.server);
        let (here, there) = UnixStream::pair().unwrap();
        Guest::new(client, here, self.add(there))
    }

    /// Does one step. Returns whether a request was answered or a completion arrived.
    pub(crate) fn step(&mut self) -> bool {
        let moved = self.server.step(&mut self.handlers, BUDGET) > 0;
        self.steps += 1;
        if !moved || self.steps % 16 == 0 {
            self.look();
        }
        moved
    }

    /// Admits one client, and reads the channel of another client.
    fn look(&mut self) {
        if let Ok((channel, _)) = self.listener.accept() {
            self.admit(channel);
        }
        if !self.guests.is_empty() {
            self.next = (self.next + 1) % self.guests.len();
            self.hear(self.next);
        }
    }

    fn admit(&mut self, mut channel: UnixStream) {
        match self.server.accept_over(&mut channel) {
            Ok(_) => {
                // A failure means that the client is gone, which the next read of its channel
                // shows.
                let _sent = channel.write_all(&(self.named + 1).to_le_bytes());
                self.add(channel);
            }
            Err(SetupError::Full(_) | SetupError::Channel(_)) => self.refused += 1,
            Err(error) => panic!("{error}"),
        }
    }

    /// Adds a client that was admitted. Returns its name.
    fn add(&mut self, channel: UnixStream) -> u64 {
        channel.set_nonblocking(true).unwrap();
        self.named += 1;
        self.guests.push(Present {
            channel,
            name: self.named,
        });
        self.named
    }

    fn hear(&mut self, nth: usize) {
        let mut made = [0; 8];
        match self.guests[nth].channel.read(&mut made) {
            Ok(8) => {
                let guest = self.guests.swap_remove(nth);
                self.books
                    .borrow_mut()
                    .close(guest.name, u64::from_le_bytes(made));
                self.farewells += 1;
                self.answered += u64::from_le_bytes(made);
            }
            Ok(0) => drop(self.guests.swap_remove(nth)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                drop(self.guests.swap_remove(nth))
            }
            other => panic!("{other:?}"),
        }
    }

    /// Returns [`Books::bytes`].
    pub(crate) fn bytes_of_books(&self) -> usize {
        self.books.borrow().bytes()
    }

    /// Returns the number of requests that the handler has run for.
    pub(crate) fn executed(&self) -> u64 {
        self.books.borrow().total()
    }

    /// Returns the number of clients whose channels are open.
    pub(crate) fn guests(&self) -> usize {
        self.guests.len()
    }

    /// Asserts, after all clients have disconnected or died, that all their resources are free, and
    /// that everything that arrived was a request.
    pub(crate) fn close(self, scratch: &Scratch) {
        let Self { server, device, .. } = self;
        let (core, layout) = (server.core(), *server.core().layout());
        assert_eq!(
            (
                server.clients(),
                core.queued(),
                core.quarantined(),
                core.stats().garbage
            ),
            (0, 0, 0, 0)
        );
        assert_eq!(core.free_zones(), 2 * layout.zones, "zones");
        assert_eq!(
            core.free_buffers(),
            ServerConfig::default().response_buffers as usize,
            "response buffers"
        );
        drop(server);
        // Opening and closing a device removes the files that dead processes left in the directory.
        drop(Device::open(&device).unwrap());
        std::fs::remove_dir(scratch.path().join("fabric")).expect("nothing is left behind");
    }
}
