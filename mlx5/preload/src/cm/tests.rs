//! Commands of two openings of the device.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::abi::cm::{QpAttr, SockAddr};
use crate::options::config::{DEVICE, DEVICES, FABRIC, LINK, TREE};

/// Port space TCP.
const TCP: u16 = 0x0106;
const NOBODY: Find = |_| None;

/// The fabric of one test.
struct Fabric {
    dir: PathBuf,
    settings: &'static Settings,
}

/// Returns the settings of a program of a fabric.
pub(super) fn settings(dir: &std::path::Path, link: &str) -> &'static Settings {
    let variables = [
        (DEVICE, "1:2"),
        (DEVICES, "1"),
        (TREE, "/t"),
        (LINK, link),
        (FABRIC, dir.to_str().unwrap()),
    ];
    let variable = |name: &str| {
        variables
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| value.into())
    };
    Box::leak(Box::new(Settings::new(variable).unwrap()))
}

impl Fabric {
    fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("mlx5-cm-{test}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        Self {
            settings: settings(&dir, "ib"),
            dir,
        }
    }

    fn open(&self, answer_time: Duration) -> Session {
        let (session, _) = Session::open(self.settings).unwrap();
        Session {
            answer_time,
            ..session
        }
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.dir).unwrap();
    }
}

impl Session {
    fn command(&self, number: u32, request: &(impl IntoBytes + Immutable)) -> Result<bool, Errno> {
        let request = request.as_bytes();
        let (len, room) = (request.len() as u16, 512u16);
        let bytes = [
            &number.to_ne_bytes()[..],
            &len.to_ne_bytes(),
            &room.to_ne_bytes(),
            request,
        ]
        .concat();
        self.execute(bytes.as_ptr() as u64, bytes.len(), NOBODY)
    }

    fn create(&self) -> u32 {
        let mut made = CreateIdResp { id: 0 };
        let request = CreateId {
            uid: 7,
            response: &raw mut made as u64,
            ps: TCP,
            ..CreateId::new_zeroed()
        };
        self.command(number::CREATE_ID, &request).unwrap();
        made.id
    }

    fn listen(&self, port: u16) -> u32 {
        let id = self.create();
        self.command(
            number::BIND_IP,
            &BindIp {
                addr: loopback(port),
                id,
                ..BindIp::new_zeroed()
            },
        )
        .unwrap();
        self.command(number::LISTEN, &Listen { id, backlog: 0 })
            .unwrap();
        id
    }

    fn connect(&self, port: u16) -> u32 {
        let id = self.resolve(port);
        self.ask(id);
        id
    }

    /// Returns an id with the route to a service.
    fn resolve(&self, port: u16) -> u32 {
        let id = self.create();
        self.command(
            number::RESOLVE_IP,
            &ResolveIp {
                dst_addr: loopback(port),
                id,
                ..ResolveIp::new_zeroed()
            },
        )
        .unwrap();
        self.command(number::RESOLVE_ROUTE, &ResolveRoute { id, timeout_ms: 0 })
            .unwrap();
        assert_eq!([self.event(), self.event()], [Some((0, 0)), Some((2, 0))]);
        id
    }

    /// Connects an id with a route.
    fn ask(&self, id: u32) {
        self.command(
            number::CONNECT,
            &Connect {
                conn_param: parameters(),
                id,
                ..Connect::new_zeroed()
            },
        )
        .unwrap();
    }

    fn accept(&self, id: u32) {
        self.command(
            number::ACCEPT,
            &Accept {
                uid: 8,
                conn_param: parameters(),
                id,
                ..Accept::new_zeroed()
            },
        )
        .unwrap();
    }

    /// Returns the path MTU of the queue pair that receives.
    fn path_mtu(&self, id: u32) -> u32 {
        let mut attributes = QpAttr::new_zeroed();
        let request = InitQpAttr {
            response: &raw mut attributes as u64,
            id,
            qp_state: 2,
        };
        self.command(number::INIT_QP_ATTR, &request).unwrap();
        attributes.path_mtu
    }

    /// Returns the type and the status of the next event, if any.
    fn event(&self) -> Option<(u32, i32)> {
        self.next().map(|event| (event.event, event.status))
    }

    fn next(&self) -> Option<EventResp> {
        let mut event = EventResp::new_zeroed();
        let request = GetEvent {
            response: &raw mut event as u64,
        };
        self.command(number::GET_EVENT, &request)
            .unwrap()
            .then_some(event)
    }

    /// Waits as a program does, and returns the event.
    fn wait(&self) -> (u32, i32) {
        let mut readable = libc::pollfd {
            fd: self.readable(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry.
        assert_eq!(unsafe { libc::poll(&raw mut readable, 1, 60_000) }, 1);
        self.event().unwrap()
    }
}

fn loopback(port: u16) -> SockAddr {
    address::bytes((std::net::Ipv4Addr::LOCALHOST, port).into())
}

fn parameters() -> ConnParam {
    ConnParam {
        qp_num: 1,
        valid: 1,
        ..ConnParam::new_zeroed()
    }
}

#[test]
fn a_peer_that_lives_and_never_answers_is_an_event_when_its_time_is_over() {
    let fabric = Fabric::new("silence");
    let [patient, hasty] = [ANSWER_TIME, Duration::from_millis(5)].map(|time| fabric.open(time));
    patient.listen(1);
    hasty.connect(1);
    assert_eq!(hasty.wait(), (Event::Unreachable as u32, -libc::ETIMEDOUT));
    assert_eq!(hasty.event(), None, "once");
    // The passive end accepts too late.
    let request = Accept {
        uid: 8,
        conn_param: parameters(),
        id: patient.next().unwrap().id,
        ..Accept::new_zeroed()
    };
    assert_eq!(patient.command(number::ACCEPT, &request), Err(INVALID));

    // The peer sends its request, and never confirms that it received the reply.
    drop(patient);
    let patient = fabric.open(ANSWER_TIME);
    hasty.listen(1);
    patient.connect(1);
    hasty.accept(hasty.next().unwrap().id);
    assert_eq!(hasty.wait(), (Event::Unreachable as u32, -libc::ETIMEDOUT));
}

/// perftest 25.01 disconnects without asking for the event of the connection first.
#[test]
fn messages_of_a_peer_take_effect_before_the_program_asks_for_events() {
    let fabric = Fabric::new("order");
    let [server, client] = [(), ()].map(|()| fabric.open(Duration::from_millis(200)));
    server.listen(1);
    let id = client.connect(1);
    let served = server.next().unwrap().id;
    server.accept(served);
    assert_eq!(client.event(), Some((Event::ConnectResponse as u32, 0)));
    client
        .command(
            number::ACCEPT,
            &Accept {
                id,
                ..Accept::new_zeroed()
            },
        )
        .unwrap();
    server
        .command(number::DISCONNECT, &Disconnect { id: served })
        .unwrap();
    assert_eq!(client.event(), Some((Event::Disconnected as u32, 0)));
    client
        .command(number::DISCONNECT, &Disconnect { id })
        .unwrap();
    assert_eq!(
        [server.event(), server.event()],
        [
            Some((Event::Established as u32, 0)),
            Some((Event::Disconnected as u32, 0))
        ]
    );
    for end in [&server, &client] {
        assert_eq!(end.wait(), (Event::TimewaitExit as u32, 0));
        assert_eq!(end.event(), None, "once");
    }
}

#[test]
fn the_ids_of_a_device_that_fails_have_an_event_and_no_others() {
    let fabric = Fabric::new("removal");
    let end = fabric.open(ANSWER_TIME);
    let id = end.resolve(1);
    end.create();
    end.lose(1);
    assert_eq!(end.event(), None, "another device");
    end.lose(0);
    let event = end.next().unwrap();
    assert_eq!((event.id, event.event), (id, Event::DeviceRemoval as u32));
    end.lose(0);
    assert_eq!(end.event(), None, "once");
}

/// The port is the same for all tests here, because a process waits only for the service that it
/// reached last.
#[test]
fn a_connect_that_waits_for_its_service_keeps_no_thread_from_opening_it() {
    let fabric = Fabric::new("patience");
    let [server, client] = [(), ()].map(|()| fabric.open(ANSWER_TIME));
    server.listen(1);
    client.connect(1);
    drop(server);
    assert_eq!(client.wait().0, Event::Rejected as u32);
    let id = client.resolve(1);
    std::thread::scope(|scope| {
        scope.spawn(|| client.ask(id));
        // The other thread waits by now, unless the machine is busy.
        sleep(Duration::from_millis(20));
        client.listen(1);
        assert_eq!(client.wait(), (Event::ConnectRequest as u32, 0));
    });
}

#[test]
fn both_ends_send_packets_of_the_lesser_of_their_mtus() {
    let fabric = Fabric::new("mtu");
    for (server_mtu, client_mtu, agreed) in [(4096, 512, 2), (2048, 4096, 4)] {
        let [server, client] = [server_mtu, client_mtu].map(|mtu| {
            let link = format!("roce=127.0.0.1,packets=all,mtu={mtu}");
            Session::open(settings(&fabric.dir, &link)).unwrap().0
        });
        server.listen(1);
        let id = client.connect(1);
        let served = server.next().unwrap().id;
        assert_eq!(server.path_mtu(served), agreed);
        server.accept(served);
        assert_eq!(client.event(), Some((Event::ConnectResponse as u32, 0)));
        assert_eq!(client.path_mtu(id), agreed);
    }
}

/// The test runs in a child process that has no free descriptor.
#[test]
fn a_connection_without_a_descriptor_for_it_is_rejected() {
    let fabric = Fabric::new("descriptors");
    let [server, client] = [(), ()].map(|()| fabric.open(ANSWER_TIME));
    server.listen(1);
    client.connect(1);
    // SAFETY: the child uses only what it has, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let few = libc::rlimit {
            rlim_cur: 512,
            rlim_max: 512,
        };
        // SAFETY: a live structure, and plain numbers.
        unsafe {
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few);
            while libc::dup(server.readable()) >= 0 {}
        }
        let is_quiet = server.event().is_none() && {
            let mut readable = libc::pollfd {
                fd: server.readable(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one entry.
            unsafe { libc::poll(&raw mut readable, 1, 0) == 0 }
        };
        // SAFETY: plain numbers.
        unsafe { libc::_exit(i32::from(!is_quiet)) };
    }
    let mut status = 0;
    // SAFETY: a place for the status.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0);
    assert_eq!(
        client.wait(),
        (Event::Rejected as u32, reason::CONSUMER_DEFINED)
    );
}
