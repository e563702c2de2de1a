//! Misbehaving peers: malformed records, clients that assume another layout, clients that write
//! where they must not.

use std::io::{self, Cursor, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::support::books::handlers;
use crate::support::caller::Caller;
use crate::support::connect;
use crate::support::plan::SLOT_BYTES;
use scalerpc::mlx5::{
    Access, ConnectOptions, Device, DeviceSpec, FabricSpec, Inline, LocalFabric, MonoCq, Pd,
    QpAddress, QpConfig, RcQp, Read as RdmaRead, ReceiveSource, Sge, Signal, SoftOptions,
    Write as RdmaWrite,
};
use scalerpc::protocol::wire::{Release, Trailer, valid};
use scalerpc::protocol::{ClientRegions, ServerRegions};
use scalerpc::rdma::exchange::{Accept, Admission, Hello, Offer, RecordError, Refusal};
use scalerpc::rdma::{PendingClient, SetupError};
use scalerpc::{CallFailure, Handlers, Layout, RdmaClient, RdmaServer, ServerConfig, State};

const WATCHDOG: Duration = Duration::from_secs(60);

/// Number of well-behaved clients, in groups of two.
const GOOD: u64 = 5;

fn config() -> ServerConfig {
    let base = ServerConfig {
        max_clients: 16,
        depth: 4,
        slot_bytes: SLOT_BYTES,
        ..ServerConfig::default()
    };
    ServerConfig {
        group_size: 2,
        slice_ns: 20_000,
        ..base
    }
}

/// A server, and clients that must not be harmed by any peer.
struct Room {
    device: DeviceSpec,
    server: RdmaServer,
    handlers: Handlers<'static>,
    callers: Vec<Caller>,
    start: Instant,
}

impl Room {
    fn new() -> Self {
        let device = DeviceSpec::default();
        let mut server = RdmaServer::new(&device, &config()).unwrap();
        // The books panic if the handler runs for anything that is not a request of a caller, or
        // twice.
        let (handlers, _books) = handlers(&server);
        let callers = (0..GOOD)
            .map(|name| Caller::new(connect(&device, &mut server), name))
            .collect();
        Self {
            device,
            server,
            handlers,
            callers,
            start: Instant::now(),
        }
    }

    fn step(&mut self) {
        assert!(self.start.elapsed() < WATCHDOG, "{:?}", self.server.stats());
        for caller in &mut self.callers {
            caller.step(u64::MAX);
        }
        self.server.step(&mut self.handlers, 16);
    }

    fn made(&self) -> u64 {
        self.callers.iter().map(Caller::made).sum()
    }

    /// Runs until the well-behaved clients have made `calls` further calls.
    fn go_on(&mut self, calls: u64) {
        let before = self.made();
        while self.made() < before + calls {
            self.step();
        }
    }

    /// Asserts that only the well-behaved clients are left, that none was harmed, and that a
    /// further client can join.
    fn check_unharmed(mut self) {
        while self.server.clients() > self.callers.len() {
            self.step();
        }
        let client = connect(&self.device, &mut self.server);
        self.callers.push(Caller::new(client, GOOD));
        self.go_on(1_000);
        // On a busy machine, some clients may have had few slices until now.
        while self.callers.iter().any(|caller| caller.made() <= 10) {
            self.step();
        }
        for caller in &self.callers {
            assert_eq!(caller.failures, [], "client {}", caller.name);
        }
    }
}

/// A channel whose other end has sent these bytes, and reads nothing.
struct Said(Cursor<Vec<u8>>);

impl Read for Said {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Said {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(from.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn said(bytes: &[u8]) -> Said {
    Said(Cursor::new(bytes.to_vec()))
}

/// Returns a channel with these bytes of a client, after its hello.
fn said_by_client(bytes: &[u8]) -> Said {
    said(&[&Hello.encode()[..], bytes].concat())
}

/// Returns a record of a peer that does not exist.
fn accept_of_nobody() -> Accept {
    let regions = ClientRegions {
        requests_addr: 1 << 20,
        requests_rkey: 1,
        responses_addr: 2 << 20,
        responses_rkey: 2,
    };
    Accept {
        address: QpAddress::soft(65_000, 1, 1),
        regions,
        sleeps: false,
    }
}

#[test]
fn records_that_are_none_are_refused_and_whoever_sent_them_is_not_admitted() {
    let mut room = Room::new();
    let good = accept_of_nobody().encode();
    let mut of_another_version = good;
    of_another_version[8] = 9;
    for _ in 0..3 {
        let refused = room
            .server
            .accept_over(&mut said(&[0xa5; Accept::BYTES]))
            .unwrap_err();
        assert!(
            matches!(
                refused,
                SetupError::Record(RecordError::Magic {
                    name: "scalerpc hello",
                    ..
                })
            ),
            "{refused}"
        );
        let refused = room
            .server
            .accept_over(&mut said_by_client(&[0xa5; Accept::BYTES]))
            .unwrap_err();
        assert!(
            matches!(
                refused,
                SetupError::Record(RecordError::Magic {
                    name: "scalerpc accept",
                    ..
                })
            ),
            "{refused}"
        );
        let refused = room
            .server
            .accept_over(&mut said_by_client(&of_another_version))
            .unwrap_err();
        assert!(
            matches!(
                refused,
                SetupError::Record(RecordError::Version { version: 9, .. })
            ),
            "{refused}"
        );
        let refused = room
            .server
            .accept_over(&mut said_by_client(&good[..Accept::BYTES - 1]))
            .unwrap_err();
        assert!(
            matches!(&refused, SetupError::Channel(error) if error.kind() == ErrorKind::UnexpectedEof),
            "{refused}"
        );
        let refused = room
            .server
            .accept_over(&mut said_by_client(&good))
            .unwrap_err();
        assert!(matches!(refused, SetupError::Connect(_)), "{refused}");
        let (mut here, _silent) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(Duration::from_millis(1)))
            .unwrap();
        let refused = room.server.accept_over(&mut here).unwrap_err();
        assert!(
            matches!(&refused, SetupError::Channel(error) if error.kind() == ErrorKind::TimedOut),
            "{refused}"
        );
        room.go_on(100);
    }
    room.check_unharmed();
}

#[test]
fn a_client_is_not_made_of_a_wrong_offer_or_admission() {
    let device = DeviceSpec::default();
    let layout = config().layout().unwrap();
    let nobody = Offer {
        address: QpAddress::soft(65_000, 1, 1),
        layout,
    }
    .encode();
    let refused = RdmaClient::connect_over(&device, &mut said(&[0xa5; Offer::BYTES])).unwrap_err();
    assert!(
        matches!(
            refused,
            SetupError::Record(RecordError::Magic {
                name: "scalerpc offer",
                ..
            })
        ),
        "{refused}"
    );
    let refused = RdmaClient::connect_over(&device, &mut said(&nobody)).unwrap_err();
    assert!(matches!(refused, SetupError::Connect(_)), "{refused}");

    let room = Room::new();
    let offered = room.server.offer().unwrap();
    let wrong = [&offered.record().encode()[..], &[0xa5; Admission::BYTES]].concat();
    let refused = RdmaClient::connect_over(&device, &mut said(&wrong)).unwrap_err();
    assert!(
        matches!(
            refused,
            SetupError::Record(RecordError::Magic {
                name: "scalerpc admission",
                ..
            })
        ),
        "{refused}"
    );
    drop(offered);
    room.check_unharmed();
}

/// The client without an entry is refused through the channel. It is admitted when another client
/// has disconnected.
#[test]
fn more_clients_than_entries_are_told_so_until_one_leaves() {
    let device = DeviceSpec::default();
    let mut server = RdmaServer::new(
        &device,
        &ServerConfig {
            max_clients: 1,
            ..config()
        },
    )
    .unwrap();
    let (mut handlers, _books) = handlers(&server);
    let first = connect(&device, &mut server);
    let meet = |server: &mut RdmaServer| {
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let other = std::thread::spawn(move || {
            RdmaClient::connect_over(&DeviceSpec::default(), &mut there).map(drop)
        });
        let met = server.accept_over(&mut here);
        drop(here);
        (met, other.join().unwrap())
    };
    for _ in 0..3 {
        let (met, told) = meet(&mut server);
        let is_full =
            |error: &SetupError| matches!(error, SetupError::Full(full) if full.value == 1);
        assert!(met.as_ref().is_err_and(is_full), "{met:?}");
        assert!(
            matches!(
                told,
                Err(SetupError::Record(RecordError::Refused(Refusal::Full)))
            ),
            "{told:?}"
        );
    }
    drop(first);
    let start = Instant::now();
    while server.clients() > 0 {
        assert!(start.elapsed() < WATCHDOG);
        server.step(&mut handlers, 1);
    }
    let (met, told) = meet(&mut server);
    assert!(met.is_ok() && told.is_ok(), "{met:?} {told:?}");
}

/// The client's queue pair cannot be connected: the server gets this error, and not only the end of
/// a stream.
#[test]
fn a_client_that_cannot_connect_tells_the_server() {
    let mut server = RdmaServer::new(&DeviceSpec::default(), &config()).unwrap();
    let (mut here, mut there) = UnixStream::pair().unwrap();
    let elsewhere = DeviceSpec::Soft(SoftOptions {
        fabric: FabricSpec::Local(LocalFabric::new()),
        ..SoftOptions::default()
    });
    let client =
        std::thread::spawn(move || RdmaClient::connect_over(&elsewhere, &mut there).map(drop));
    let met = server.accept_over(&mut here);
    let failed = client.join().unwrap();
    assert!(matches!(failed, Err(SetupError::Connect(_))), "{failed:?}");
    assert!(
        matches!(
            met,
            Err(SetupError::Record(RecordError::Refused(Refusal::Failed)))
        ),
        "{met:?}"
    );
}

/// The client writes into slots of other clients, or outside of the pools. No request of it runs as
/// another client's, and requests of others that it destroys are offered again at the end of their
/// slice (S2, S5).
#[test]
fn a_client_that_knows_another_layout_keeps_nobody_else_from_being_served() {
    let layout = config().layout().unwrap();
    let layouts = [
        Layout { depth: 8, ..layout },
        Layout { depth: 1, ..layout },
        Layout {
            slot_bytes: 2 * layout.slot_bytes,
            ..layout
        },
        Layout {
            slot_bytes: 128,
            ..layout
        },
        Layout {
            zones: layout.zones + 7,
            ..layout
        },
        Layout { zones: 1, ..layout },
    ];
    let mut room = Room::new();
    for layout in layouts {
        let offered = room.server.offer().unwrap();
        let mistaken = PendingClient::new(
            &room.device,
            &Offer {
                layout,
                ..*offered.record()
            },
        )
        .unwrap();
        let admission = room.server.admit(offered, &mistaken.record()).unwrap();
        let mut client = mistaken.admitted(&admission);
        client.set_timeout_ns(2_000_000);
        let before = room.made();
        while room.made() < before + 2_000 && !matches!(client.state(), State::Closed(_)) {
            // A type without a handler, and no bytes: in any slot it arrives in, it is not a
            // request of a caller.
            let _maybe = client.call(u16::MAX, &[]);
            client.poll();
            while let Some(completion) = client.poll_completion(&mut []) {
                assert!(completion.outcome.is_err(), "{layout:?}");
            }
            room.step();
        }
    }
    room.check_unharmed();
}

/// A queue pair that a server takes for a client's, under the control of a test.
struct Wild {
    qp: RcQp,
    cq: MonoCq<()>,
    pd: Pd,
    _device: Device,
    server: ServerRegions,
    is_broken: bool,
}

impl Wild {
    fn new(room: &mut Room) -> Self {
        let device = Device::open(&room.device).unwrap();
        let pd = device.alloc_pd().unwrap();
        let mut cq = device.create_mono_cq(256).unwrap();
        let config = QpConfig {
            max_send_wr: 128,
            max_inline_data: 60,
            ..QpConfig::default()
        };
        let mut qp = pd
            .create_qp(
                &cq,
                &cq,
                ReceiveSource::Own {
                    depth: 1,
                    max_sge: 0,
                },
                &config,
            )
            .unwrap();
        let offered = room.server.offer().unwrap();
        qp.connect(&offered.record().address, &ConnectOptions::default())
            .unwrap();
        let accept = Accept {
            address: qp.address(),
            ..accept_of_nobody()
        };
        let Admission(server) = room.server.admit(offered, &accept).unwrap();
        cq.register(qp.qpn(), ());
        Self {
            qp,
            cq,
            pd,
            _device: device,
            server,
            is_broken: false,
        }
    }

    fn write(&mut self, addr: u64, rkey: u32, bytes: &[u8]) {
        // The queue pair refuses once it is in error.
        let _posted = self.qp.post(
            &RdmaWrite {
                addr,
                rkey,
                payload: Inline(bytes),
            },
            Signal::Always,
            0,
        );
        self.qp.ring();
        self.poll();
    }

    fn poll(&mut self) {
        let Self {
            qp, cq, is_broken, ..
        } = self;
        cq.poll(64, |_, cqe| {
            *is_broken |= cqe.result().is_err();
            if !*is_broken {
                qp.complete_each(&cqe, |_| ());
            }
        });
    }
}

/// Writes random words, and words that look like trailers, into the trailers of all slots and
/// everywhere in all entries. That destroys requests and entries of others, so others may be
/// evicted or not be served. Their calls end anyway, each once, and nothing runs that was not
/// called. (Changes in the rest of a message that has arrived cannot be detected in the message.)
#[test]
fn a_client_that_writes_garbage_has_nothing_executed_and_it_ends_with_its_queue_pair() {
    let mut room = Room::new();
    for caller in &mut room.callers {
        caller.client.set_timeout_ns(50_000_000);
    }
    let mut wild = Wild::new(&mut room);
    let (layout, max_clients) = (
        *room.server.core().layout(),
        u64::from(config().max_clients),
    );
    let first_entry = wild.server.entry_addr - u64::from(wild.server.client.0) * 64;
    let mut rng = fastrand::Rng::with_seed(7);
    let garbage_before = room.server.stats().garbage;
    for _ in 0..20_000 {
        let (addr, rkey) = if rng.bool() {
            let slot = rng.usize(..layout.pools_bytes() / layout.slot_bytes);
            (
                wild.server.pools_addr + (slot * layout.slot_bytes + layout.trailer_at()) as u64,
                wild.server.pools_rkey,
            )
        } else {
            (
                first_entry + rng.u64(..max_clients * 8) * 8,
                wild.server.entry_rkey,
            )
        };
        let epoch = room.server.core().scheduler().epoch() as u32;
        let word = match rng.u8(..4) {
            0 => rng.u64(..),
            1 => Release::trailer(epoch).to_word(),
            2 => u64::from(rng.u32(..8)) | u64::from(epoch) << 32,
            _ => Trailer {
                len: rng.u32(..600),
                valid: valid(rng.u32(..500)),
            }
            .to_word(),
        };
        wild.write(addr, rkey, &word.to_le_bytes());
        room.step();
    }
    assert!(
        !wild.is_broken,
        "it has done nothing that its keys do not allow"
    );
    assert!(
        room.server.stats().garbage > garbage_before + 1_000,
        "{:?}",
        room.server.stats()
    );
    drop(wild);
    // The calls of the harmed clients end too.
    while room.callers.iter().any(|caller| caller.outstanding() > 0) {
        assert!(room.start.elapsed() < WATCHDOG);
        for caller in &mut room.callers {
            caller.poll();
        }
        room.server.step(&mut room.handlers, 16);
    }
    for caller in &room.callers {
        let is_typed = |failure: &CallFailure| {
            matches!(
                failure,
                CallFailure::NotSent | CallFailure::TimedOut | CallFailure::Closed(_)
            )
        };
        assert!(
            caller.failures.iter().all(is_typed),
            "{:?}",
            caller.failures
        );
    }
    // New clients take the places of the harmed clients.
    room.callers.clear();
    while room.server.clients() > 0 {
        room.step();
    }
    let (core, zones) = (room.server.core(), 2 * layout.zones);
    assert_eq!(
        (core.queued(), core.free_zones(), core.free_buffers()),
        (0, zones, config().response_buffers as usize)
    );
    room.callers = (0..GOOD)
        .map(|name| Caller::new(connect(&room.device, &mut room.server), 100 + name))
        .collect();
    room.check_unharmed();
}

/// The keys permit neither to READ requests of others, nor to access memory after the regions. An
/// attempt ends the client that makes it, and no other.
#[test]
fn a_client_that_reaches_beyond_its_rights_loses_its_own_connection() {
    let mut room = Room::new();
    let pools_bytes = room.server.core().layout().pools_bytes() as u64;
    for deed in [
        "reads the pools",
        "writes behind the pools",
        "writes with another key",
    ] {
        let mut wild = Wild::new(&mut room);
        let ServerRegions {
            pools_addr,
            pools_rkey,
            entry_rkey,
            ..
        } = wild.server;
        match deed {
            "reads the pools" => {
                let memory = wild.pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
                let into = Sge {
                    addr: memory.addr(),
                    len: 64,
                    lkey: memory.lkey(),
                };
                wild.qp
                    .post(
                        &RdmaRead {
                            addr: pools_addr,
                            rkey: pools_rkey,
                            into,
                        },
                        Signal::Always,
                        0,
                    )
                    .unwrap();
                wild.qp.ring();
            }
            "writes behind the pools" => {
                wild.write(pools_addr + pools_bytes - 4, pools_rkey, &[0xa5; 8])
            }
            _ => wild.write(pools_addr, entry_rkey, &[0xa5; 8]),
        }
        while !wild.is_broken {
            wild.poll();
            room.step();
        }
        room.go_on(500);
    }
    room.check_unharmed();
}
