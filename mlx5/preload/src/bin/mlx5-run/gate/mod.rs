//! The gate of an IP address: the process that exchanges messages of the connection manager with
//! other hosts, for all programs of one user at this address.
//!
//! The first launcher at an address forks it; it ends when no launcher is connected to it. The
//! first message of a launcher names the fabric of its programs, and the gate answers with one
//! byte. A session, the id of a program, sends a [`Parcel`] for each of its messages. For a request
//! of a peer, the gate connects to the listener of the service, in any of the fabrics. The states
//! of the connections are in [`links`].

mod links;

use std::collections::HashMap;
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use mlx5_hca::MadPort;
use mlx5_hca::wire::roce::Mad;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags};

use crate::gate::links::{Action, Links, Opened};
use crate::sockets::{self, PARCEL_BYTES, Parcel};

/// Time limit of three waits: of a new gate for its first launcher, of a launcher for the answer of
/// the gate, and of a gate without launchers for peers to confirm the ends of connections.
const LINGER: Duration = Duration::from_secs(2);
/// Time for which a request waits for a listener, if its service has had one before: some programs
/// make a new listener for each connection.
const PATIENCE: Duration = Duration::from_secs(2);
/// Number of attempts to find or become the gate, and the time between them: another launcher may
/// be about to become the gate.
const ATTEMPTS: u32 = 100;
const AGAIN: Duration = Duration::from_millis(10);
/// Number of connections that wait for the gate.
const BACKLOG: i32 = 1024;
/// The longest message: a parcel, or the path of a fabric.
const LONGEST: usize = libc::PATH_MAX as usize;
const _: () = assert!(PARCEL_BYTES <= LONGEST);

/// Connects to the gate of an address, for programs of this fabric; makes the gate if there is
/// none. The gate stays at least as long as the returned connection. Returns `None` if there is no
/// gate, for example because another program or user has the UDP port. Then programs reach no other
/// hosts by rdma_cm.
pub(crate) fn attach(ip: IpAddr, fabric: &Path) -> Option<OwnedFd> {
    for _ in 0..ATTEMPTS {
        let socket = sockets::socket().ok()?;
        match sockets::connect_gate(&socket, ip) {
            Ok(()) if is_welcome(&socket, fabric) => return Some(socket),
            Err(Errno::CONNREFUSED) => found(ip)?,
            Err(Errno::PERM) => return None,
            // The gate is about to end, or too many launchers are connecting to it.
            _ => sleep(AGAIN),
        }
    }
    None
}

/// Introduces a launcher. Returns whether the gate has answered.
fn is_welcome(socket: &OwnedFd, fabric: &Path) -> bool {
    let hello = fabric.as_os_str().as_bytes();
    let limit = Timespec::try_from(LINGER).ok();
    net::send(socket, hello, SendFlags::NOSIGNAL).is_ok()
        && poll(&mut [PollFd::new(socket, PollFlags::IN)], limit.as_ref()) == Ok(1)
        && net::recv(socket, &mut [0; 1], RecvFlags::empty()).is_ok_and(|(_, len)| len == 1)
}

/// Forks the gate, unless another launcher is about to do so. Returns `None` if the gate cannot be
/// made, for example because the UDP port is taken.
fn found(ip: IpAddr) -> Option<()> {
    let listener = sockets::socket().ok()?;
    if net::bind(&listener, &sockets::gate(ip).ok()?).is_err() {
        sleep(AGAIN);
        return Some(());
    }
    let port = MadPort::open(ip).ok()?;
    net::listen(&listener, BACKLOG).ok()?;
    // SAFETY: this process has one thread, so the child may continue as this process does.
    if unsafe { libc::fork() } == 0 {
        detach();
        Gate::new(ip, port, listener).serve();
        // SAFETY: the child has nothing that must be dropped.
        unsafe { libc::_exit(0) };
    }
    Some(())
}

/// Makes the child independent of the launcher. Signals of the terminal do not reach the child. The
/// child closes the files that the launcher was started with, such as pipes whose readers wait
/// until the last writer has closed them. These are the files that an exec(2) would keep open.
fn detach() {
    let _ = std::env::set_current_dir("/");
    let nothing = File::options().read(true).write(true).open("/dev/null");
    // SAFETY: all arguments are plain numbers. The child uses only files of its own.
    unsafe {
        libc::setsid();
        let limit = libc::sysconf(libc::_SC_OPEN_MAX) as RawFd;
        for fd in 3..limit.min(1 << 16) {
            if libc::fcntl(fd, libc::F_GETFD) == 0 {
                libc::close(fd);
            }
        }
        for standard in 0..=2 {
            if let Ok(nothing) = &nothing {
                libc::dup2(nothing.as_raw_fd(), standard);
            }
        }
    }
}

/// The sockets of a gate.
struct Sockets {
    ip: IpAddr,
    /// The launchers, with the directories of their fabrics.
    launchers: Vec<(OwnedFd, File)>,
    /// Connections on which no message has arrived yet.
    unknown: Vec<OwnedFd>,
    /// The sessions, by the numbers of their links.
    sessions: HashMap<u32, OwnedFd>,
    /// The services to which a peer has connected. The value is set if a later request found no
    /// listener: requests to the service then wait for a new listener until this time.
    services: HashMap<u64, Option<Instant>>,
}

struct Gate {
    port: MadPort,
    listener: OwnedFd,
    links: Links,
    sockets: Sockets,
    started: Instant,
}

/// A file of the gate that is ready.
#[derive(Clone, Copy)]
enum Ready {
    Port,
    Listener,
    Launcher(usize),
    Unknown(usize),
    Session(u32),
}

impl Gate {
    fn new(ip: IpAddr, port: MadPort, listener: OwnedFd) -> Self {
        Self {
            port,
            listener,
            links: Links::new(),
            sockets: Sockets {
                ip,
                launchers: Vec::new(),
                unknown: Vec::new(),
                sessions: HashMap::new(),
                services: HashMap::new(),
            },
            started: Instant::now(),
        }
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Returns whether the end of a session still has to reach its peer, or may still end: a
    /// program may end a moment after its launcher.
    fn has_work(&self) -> bool {
        !self.sockets.sessions.is_empty() || self.links.has_ends()
    }

    /// Works until no launcher is connected and no work is left, or until [`LINGER`] after the last
    /// launcher.
    fn serve(mut self) {
        let mut ends = Instant::now() + LINGER;
        let mut is_new = true;
        loop {
            let has_launchers = !self.sockets.launchers.is_empty();
            is_new &= !has_launchers;
            if has_launchers {
                ends = Instant::now() + LINGER;
            } else if Instant::now() >= ends || !is_new && !self.has_work() {
                return;
            }
            for ready in self.wait((!has_launchers).then_some(ends)) {
                self.take(ready);
            }
            let now_ms = self.now_ms();
            self.links.tick(now_ms);
            self.act();
        }
    }

    /// Waits for files that are ready, until the next message is due or until `ends`.
    fn wait(&self, ends: Option<Instant>) -> Vec<Ready> {
        let Sockets {
            launchers,
            unknown,
            sessions,
            ..
        } = &self.sockets;
        let of_sockets = [
            (Ready::Port, self.port.as_fd()),
            (Ready::Listener, self.listener.as_fd()),
        ];
        let launchers = launchers.iter().enumerate();
        let unknown = unknown.iter().enumerate();
        // Each list is in reverse order, so that the indices of its entries stay valid while `take`
        // removes entries that have ended.
        let (files, mut polled): (Vec<_>, Vec<_>) = of_sockets
            .into_iter()
            .chain(
                launchers
                    .map(|(at, (fd, _))| (Ready::Launcher(at), fd.as_fd()))
                    .rev(),
            )
            .chain(
                unknown
                    .map(|(at, fd)| (Ready::Unknown(at), fd.as_fd()))
                    .rev(),
            )
            .chain(
                sessions
                    .iter()
                    .map(|(id, fd)| (Ready::Session(*id), fd.as_fd())),
            )
            .map(|(file, fd): (Ready, BorrowedFd<'_>)| {
                (file, PollFd::from_borrowed_fd(fd, PollFlags::IN))
            })
            .unzip();
        let due = self
            .links
            .due_ms()
            .map(|due_ms| Duration::from_millis(due_ms.saturating_sub(self.now_ms()).max(1)));
        let left = ends.map(|ends| ends.saturating_duration_since(Instant::now()));
        let limit = due.into_iter().chain(left).min();
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        if poll(&mut polled, limit.as_ref()).is_err() {
            return Vec::new();
        }
        let ready = files.into_iter().zip(&polled);
        ready
            .filter(|(_, polled)| !polled.revents().is_empty())
            .map(|(file, _)| file)
            .collect()
    }

    fn take(&mut self, ready: Ready) {
        let now_ms = self.now_ms();
        let sockets = &mut self.sockets;
        match ready {
            Ready::Port => {
                while let Some((peer, mad)) = self.port.receive() {
                    let open = |id, service| sockets.open(id, service);
                    self.links.hear(now_ms, peer, mad, open);
                }
            }
            Ready::Listener => {
                let new = net::accept_with(&self.listener, sockets::FLAGS);
                sockets.unknown.extend(new.ok().filter(sockets::is_own));
            }
            // A launcher sends only its first message, so its connection is readable now because
            // the launcher has ended.
            Ready::Launcher(at) => drop(sockets.launchers.swap_remove(at)),
            Ready::Unknown(at) => {
                let socket = sockets.unknown.swap_remove(at);
                let mut buffer = [0; LONGEST];
                let said = receive(&socket, &mut buffer);
                if let Some(Parcel { peer, mad }) = Parcel::parse(said) {
                    let id = self.links.ask(now_ms, peer, mad);
                    sockets.sessions.extend(id.map(|id| (id, socket)));
                } else if let Some(fabric) = Sockets::fabric(said) {
                    // A launcher that does not read its answer ends.
                    let _ = net::send(&socket, &[0], SendFlags::NOSIGNAL);
                    sockets.launchers.push((socket, fabric));
                }
            }
            Ready::Session(id) => {
                let mut buffer = [0; LONGEST];
                let Some(socket) = sockets.sessions.get(&id) else {
                    return;
                };
                match Parcel::parse(receive(socket, &mut buffer)) {
                    Some(parcel) => self.links.say(now_ms, id, parcel.mad),
                    None => {
                        sockets.sessions.remove(&id);
                        self.links.end(now_ms, id);
                    }
                }
            }
        }
        self.act();
    }

    fn act(&mut self) {
        for action in self.links.actions.drain(..) {
            match action {
                Action::Send(to, mad) => self.port.send(to, &mad),
                Action::Tell(id, peer, mad) => self.sockets.tell(id, peer, mad),
                Action::Close(id) => drop(self.sockets.sessions.remove(&id)),
            }
        }
    }
}

impl Sockets {
    /// Opens the directory of a fabric that a launcher names.
    fn fabric(path: &[u8]) -> Option<File> {
        let path = Path::new(std::ffi::OsStr::from_bytes(path));
        path.is_absolute()
            .then(|| sockets::open(path).ok())
            .flatten()
    }

    fn tell(&self, id: u32, peer: IpAddr, mad: Mad) {
        if let Some(socket) = self.sessions.get(&id) {
            // An error means that the session has ended, which the next receive shows, or that the
            // program does not read and its socket is full; then it loses the message.
            let _ = net::send(socket, &Parcel { peer, mad }.emit(), SendFlags::NOSIGNAL);
        }
    }

    /// Connects link `id` to the listener of a service: a port of a port space (annex A11).
    fn open(&mut self, id: u32, service: u64) -> Opened {
        let (Ok(space), port) = (u16::try_from(service >> 16), service as u16) else {
            return Opened::NoService;
        };
        let to = SocketAddr::new(self.ip, port);
        for (_, fabric) in &self.launchers {
            let Ok(socket) = sockets::socket() else {
                return Opened::Full;
            };
            match sockets::connect(&socket, fabric, space, to) {
                Ok(()) => {
                    self.sessions.insert(id, socket);
                    self.services.insert(service, None);
                    return Opened::Yes;
                }
                Err(Errno::AGAIN) => return Opened::Full,
                Err(_) => {}
            }
        }
        let Some(until) = self.services.get_mut(&service) else {
            return Opened::NoService;
        };
        if Instant::now() < *until.get_or_insert_with(|| Instant::now() + PATIENCE) {
            return Opened::NotYet;
        }
        self.services.remove(&service);
        Opened::NoService
    }
}

/// Receives a message. Returns no bytes if the other end is gone.
fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> &'a [u8] {
    let len = net::recv(socket, &mut *buffer, RecvFlags::empty()).map_or(0, |(_, len)| len);
    &buffer[..len]
}
