//! `/dev/infiniband/rdma_cm`, the kernel's connection manager, which librdmacm uses.
//!
//! The program's descriptor is an epoll instance. It watches the sockets of all ids, an eventfd
//! that is readable while there are events to read, and a timer that expires when the earliest wait
//! for an answer ends. So `poll` finds the descriptor readable whenever the program may have an
//! event to read, and no thread is needed: each command first handles the messages that have
//! arrived from peers. Each connection of an id with its peer has a socket of its own; the end of
//! the socket shows that the peer is gone. If the peer is on another host, the socket leads to the
//! gate: a process of the launcher that exchanges messages with other hosts.

mod address;
mod far;
mod identifier;
mod machine;
mod message;
mod service;
mod sockets;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::fcntl_dupfd_cloexec;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::abi::cm::{
    Accept, BindIp, ConnParam, Connect, CreateId, CreateIdResp, DestroyId, DestroyIdResp,
    Disconnect, EventResp, GetEvent, InitQpAttr, Listen, MigrateId, NAMES, Notify, Query, Reject,
    ResolveIp, ResolveRoute, SetOption, number,
};
use crate::cm::identifier::{Id, LATER};
use crate::cm::machine::{Event, Heard, Kind, State, Step, reason};
use crate::cm::message::Message;
use crate::options::errno::Errno;
use crate::options::log;
use crate::options::settings::Settings;
use crate::system::sys;

const INVALID: Errno = Errno(libc::EINVAL);

/// Maximum length of a command in bytes, rounded up.
const LONGEST: usize = 512;
/// Number of the eventfd in the epoll instance. The number of an id's socket is the id's handle.
const EVENTS: u64 = u64::MAX;
/// Number of the timer in the epoll instance.
const TIMER: u64 = EVENTS - 1;
/// Time within which a peer must answer, the same as the kernel's: 16 times 4.096 us * 2^20.
const ANSWER_TIME: Duration = Duration::from_nanos(16 * (4096 << 20));
/// Time for which packets of a connection that has ended may be on the way, as a kernel computes it
/// for the paths of this library: 1 ms * 2^10.
const TIME_WAIT: Duration = Duration::from_millis(1 << 10);
/// Time between two attempts to reach a service that does not listen yet.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// The shortest time to which the timer is set: 0 would stop it.
const AT_ONCE: Duration = Duration::from_nanos(1);
/// Maximum number of readable files that one call of `epoll_wait` returns.
const TOGETHER: usize = 64;

/// A command. Its header has the number of the command (32 bits), the length of the request, which
/// follows the header, and the maximum length of the response (16 bits each).
#[derive(Debug)]
struct Call {
    number: u32,
    request: Vec<u8>,
    room: usize,
}

impl Call {
    fn read(at: u64, len: usize) -> Result<Self, Errno> {
        INVALID.when(len > LONGEST)?;
        let mut bytes = vec![0; len];
        sys::copy_in(at, &mut bytes)?;
        let Some((&[a, b, c, d, e, f, g, h], request)) = bytes.split_first_chunk() else {
            return Err(INVALID);
        };
        INVALID.when(usize::from(u16::from_ne_bytes([e, f])) > request.len())?;
        Ok(Self {
            number: u32::from_ne_bytes([a, b, c, d]),
            request: request.to_vec(),
            room: u16::from_ne_bytes([g, h]).into(),
        })
    }

    fn request<T: FromBytes>(&self) -> Result<T, Errno> {
        T::read_from_prefix(&self.request)
            .map(|(request, _)| request)
            .map_err(|_| INVALID)
    }

    /// Writes the response as far as there is room: an older library expects a shorter response.
    fn respond(&self, at: u64, response: &(impl IntoBytes + Immutable)) -> Result<(), Errno> {
        let bytes = response.as_bytes();
        sys::copy_out(&bytes[..bytes.len().min(self.room)], at)
    }
}

/// An event that the program has not read.
#[derive(Debug)]
struct Unread {
    /// Handle of the id that counts the event when it is read: the listener for a connection
    /// request, otherwise the event's own id.
    owner: u32,
    response: EventResp,
}

/// Function that returns the session of a descriptor.
pub(crate) type Find = fn(c_int) -> Option<Arc<Session>>;

/// A session with the connection manager, from open(2) to the close of the last descriptor.
#[derive(Debug)]
pub(crate) struct Session {
    settings: &'static Settings,
    epoll: OwnedFd,
    /// An eventfd whose value is not 0 while there are unread events.
    has_events: OwnedFd,
    /// A timer that expires when the earliest wait for an answer ends.
    timer: OwnedFd,
    answer_time: Duration,
    ids: Mutex<Ids>,
}

#[derive(Debug, Default)]
struct Ids {
    by_handle: HashMap<u32, Id>,
    unread: VecDeque<Unread>,
    /// The times at which waits for answers end, each with the handle of its id. An id that has
    /// received its answer, or was destroyed, may still be in the set.
    answers: BTreeSet<(Instant, u32)>,
    /// A spare descriptor. If the process has no free descriptor for a connection that arrives, the
    /// spare descriptor is closed, and the connection is accepted with the freed number and
    /// rejected.
    spare: Option<OwnedFd>,
}

impl Ids {
    fn get(&mut self, handle: u32) -> Result<&mut Id, Errno> {
        self.by_handle.get_mut(&handle).ok_or(Errno(libc::ENOENT))
    }

    /// Adds an event. Until the program has accepted the id, every event except the request itself
    /// is dropped: the program does not know the id yet, and its answer to the request will fail.
    fn push(&mut self, handle: u32, event: Event, status: i32, param: [u8; 304]) {
        let Ok(id) = self.get(handle) else { return };
        let owner = if event == Event::ConnectRequest {
            id.parent
        } else {
            Some(handle).filter(|_| id.uid != 0)
        };
        let response = EventResp {
            id: handle,
            event: event as u32,
            status,
            param,
            ..EventResp::new_zeroed()
        };
        self.unread
            .extend(owner.map(|owner| Unread { owner, response }));
    }

    /// Removes an id and, if it listens, the ids of its unread requests. Returns all of these ids.
    fn remove(&mut self, handle: u32) -> Result<Vec<Id>, Errno> {
        self.get(handle)?;
        let gone = |id: &Id| id.handle.0 == handle || id.parent == Some(handle);
        let handles: Vec<_> = self
            .by_handle
            .values()
            .filter(|id| gone(id))
            .map(|id| id.handle.0)
            .collect();
        Ok(handles
            .iter()
            .filter_map(|handle| self.by_handle.remove(handle))
            .collect())
    }
}

impl Session {
    /// Opens the connection manager. Returns the session and the program's descriptor.
    pub(crate) fn open(settings: &'static Settings) -> Result<(Self, OwnedFd), Errno> {
        let epoll = service::hold(epoll::create(CreateFlags::CLOEXEC)?);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let has_events = service::hold(eventfd(0, flags)?);
        // SAFETY: all arguments are plain numbers, and no other code has the new descriptor.
        let timer = service::hold(unsafe {
            let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
            let timer = libc::timerfd_create(libc::CLOCK_MONOTONIC, flags);
            OwnedFd::from_raw_fd(sys::checked(timer.into())? as c_int)
        });
        let of_program = fcntl_dupfd_cloexec(&epoll, 0)?;
        let session = Self {
            settings,
            epoll,
            has_events,
            timer,
            answer_time: ANSWER_TIME,
            ids: Mutex::default(),
        };
        session.watch(&session.has_events, EVENTS)?;
        session.watch(&session.timer, TIMER)?;
        Ok((session, of_program))
    }

    fn watch(&self, file: &OwnedFd, token: u64) -> Result<(), Errno> {
        let data = EventData::new_u64(token);
        Ok(epoll::add(&self.epoll, file, data, EventFlags::IN)?)
    }

    /// Removes sockets from the watched files. A close is not enough if a child of fork has the
    /// sockets too.
    fn unwatch<'a>(&self, sockets: impl IntoIterator<Item = &'a OwnedFd>) {
        for socket in sockets {
            // The error for a socket that is not watched is ignored.
            let _ = epoll::delete(&self.epoll, socket);
        }
    }

    fn ids(&self) -> MutexGuard<'_, Ids> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds to each id of a device the event that the device has failed, as a kernel does when it
    /// removes a device.
    pub(crate) fn lose(&self, device: usize) {
        let mut ids = self.ids();
        let handles: Vec<_> = ids
            .by_handle
            .values_mut()
            .filter(|id| id.device == Some(device) && !id.is_told)
            .map(|id| {
                id.is_told = true;
                id.handle.0
            })
            .collect();
        for handle in handles {
            ids.push(handle, Event::DeviceRemoval, 0, [0; 304]);
        }
        self.signal(&ids);
    }

    /// Returns the descriptor that is readable while there may be an event.
    pub(crate) fn readable(&self) -> c_int {
        self.epoll.as_raw_fd()
    }

    /// Executes a command. Returns `false` if the command asks for an event and there is none.
    pub(crate) fn execute(&self, at: u64, len: usize, find: Find) -> Result<bool, Errno> {
        let call = Call::read(at, len)?;
        let done = if call.number == number::MIGRATE_ID {
            self.migrate(&call, find)
        } else {
            self.dispatch(&call)
        };
        let name = NAMES
            .split(' ')
            .nth(call.number as usize)
            .unwrap_or("unknown command");
        match done {
            Err(Errno(libc::EAGAIN)) if call.number == number::GET_EVENT => return Ok(false),
            Ok(()) => log::command(self.settings, format_args!("rdma_cm {name}")),
            // librdmacm sends `BIND` only to determine whether InfiniBand's own addresses are
            // supported, so no program gets this refusal.
            Err(errno) => log::answered(
                self.settings,
                format_args!("rdma_cm {name}"),
                errno,
                call.number == number::BIND,
            ),
        }
        done.map(|()| true)
    }

    fn dispatch(&self, call: &Call) -> Result<(), Errno> {
        loop {
            let mut ids = self.ids();
            // A kernel handles the messages of peers when they arrive. Here they are handled at the
            // next command, before the command itself.
            self.progress(&mut ids);
            let done = self.carry_out(&mut ids, call);
            self.signal(&ids);
            if done != Err(LATER) {
                return done;
            }
            // The sleep is outside the lock: the service may belong to another thread of the
            // program, whose command to listen needs the lock.
            drop(ids);
            sleep(LOOK_AGAIN);
        }
    }

    /// Makes the program's descriptor readable if there are unread events, and sets the timer to
    /// the end of the earliest wait for an answer.
    fn signal(&self, ids: &Ids) {
        let left = ids.answers.first().map_or(Duration::ZERO, |(at, _)| {
            at.saturating_duration_since(Instant::now()).max(AT_ONCE)
        });
        // SAFETY: the structure consists of plain numbers, for which 0 is valid.
        let mut at: libc::itimerspec = unsafe { core::mem::zeroed() };
        (at.it_value.tv_sec, at.it_value.tv_nsec) =
            (left.as_secs() as libc::time_t, left.subsec_nanos().into());
        // SAFETY: the descriptor is open, `at` is an initialized structure, and the old value is
        // not requested. A time of 0 stops the timer.
        unsafe {
            libc::timerfd_settime(
                self.timer.as_raw_fd(),
                0,
                &raw const at,
                core::ptr::null_mut(),
            )
        };
        let has_events = u64::from(!ids.unread.is_empty());
        // The read sets the eventfd to 0, and the write sets it to `has_events`. Neither can block.
        let _ = rustix::io::read(&self.has_events, &mut [0; 8]);
        let _ = rustix::io::write(&self.has_events, &has_events.to_ne_bytes());
    }

    /// Moves an id and its unread events from another session to this session.
    fn migrate(&self, call: &Call, find: Find) -> Result<(), Errno> {
        let asked: MigrateId = call.request()?;
        let handle = asked.id;
        let from = find(asked.fd as c_int).ok_or(INVALID)?;
        let (moved, unread) = {
            let mut ids = from.ids();
            let moved = ids.remove(handle)?;
            from.unwatch(moved.iter().flat_map(Id::watched));
            let (unread, others) = ids
                .unread
                .drain(..)
                .partition(|event| moved.iter().any(|id| id.handle.0 == event.response.id));
            ids.unread = others;
            from.signal(&ids);
            (moved, unread)
        };
        let mut ids = self.ids();
        ids.unread.extend::<VecDeque<_>>(unread);
        for id in moved {
            if id.handle.0 == handle {
                let events_reported = id.reported;
                call.respond(asked.response, &DestroyIdResp { events_reported })?;
            }
            id.watched()
                .try_for_each(|socket| self.watch(socket, id.handle.0.into()))?;
            ids.answers
                .extend(id.answer_until.map(|until| (until, id.handle.0)));
            ids.by_handle.insert(id.handle.0, id);
        }
        self.signal(&ids);
        Ok(())
    }

    fn carry_out(&self, ids: &mut Ids, call: &Call) -> Result<(), Errno> {
        match call.number {
            number::CREATE_ID => {
                let asked: CreateId = call.request()?;
                let id = Id::new(asked.uid, asked.ps, asked.qp_type)?;
                call.respond(asked.response, &CreateIdResp { id: id.handle.0 })?;
                ids.by_handle.insert(id.handle.0, id);
                Ok(())
            }
            number::DESTROY_ID => {
                let asked: DestroyId = call.request()?;
                let gone = ids.remove(asked.id)?;
                let id = gone.iter().find(|id| id.handle.0 == asked.id);
                let events_reported = id.map_or(0, |id| id.reported);
                ids.unread
                    .retain(|event| !gone.iter().any(|id| id.handle.0 == event.response.id));
                self.unwatch(gone.iter().flat_map(Id::watched));
                call.respond(asked.response, &DestroyIdResp { events_reported })
            }
            number::BIND_IP => {
                let BindIp { addr, id, .. } = call.request()?;
                ids.get(id)?.bind(
                    self.settings,
                    address::parse(&addr).ok_or(Errno(libc::EAFNOSUPPORT))?,
                )
            }
            number::RESOLVE_IP => {
                let asked: ResolveIp = call.request()?;
                let to = address::parse(&asked.dst_addr).ok_or(Errno(libc::EAFNOSUPPORT))?;
                let from = address::parse(&asked.src_addr);
                let mut found = (Event::AddressResolved, 0);
                if !ids.get(asked.id)?.resolve(self.settings, from, to)? {
                    found = (Event::AddressError, -libc::ENODEV);
                    // The program gets only the status ENODEV. The log gives the user the reason.
                    let why = "no device of this host has the address, or the source address; with --address there is no route to it";
                    log::error(
                        self.settings,
                        format_args!("rdma_cm resolve_ip {}: {why}", to.ip()),
                    );
                }
                ids.push(asked.id, found.0, found.1, [0; 304]);
                Ok(())
            }
            number::RESOLVE_ROUTE => {
                let ResolveRoute { id: handle, .. } = call.request()?;
                ids.get(handle)?.machine.take(Step::ResolveRoute)?;
                ids.push(handle, Event::RouteResolved, 0, [0; 304]);
                Ok(())
            }
            number::QUERY_ROUTE => {
                let Query { response, id, .. } = call.request()?;
                call.respond(response, &ids.get(id)?.route(self.settings))
            }
            number::LISTEN => {
                let asked: Listen = call.request()?;
                let id = ids.get(asked.id)?;
                if id.machine.state == State::New {
                    id.bind(self.settings, id.local)?;
                }
                id.machine.take(Step::Listen)?;
                let Some(port) = &id.port else {
                    return Err(INVALID);
                };
                port.listen(asked.backlog)
                    .inspect_err(|_| id.machine.state = State::Bound)?;
                self.watch(&port.socket, asked.id.into())
            }
            number::CONNECT => {
                let Connect { conn_param, id, .. } = call.request()?;
                self.say(ids, id, Step::Connect, &conn_param, 0)
            }
            number::ACCEPT => {
                let asked: Accept = call.request()?;
                self.say(ids, asked.id, Step::Accept, &asked.conn_param, 0)?;
                if asked.conn_param.valid != 0 {
                    ids.get(asked.id)?.uid = asked.uid;
                }
                Ok(())
            }
            number::REJECT => {
                let asked: Reject = call.request()?;
                let param = ConnParam {
                    private_data: asked.private_data,
                    private_data_len: asked.private_data_len,
                    ..ConnParam::new_zeroed()
                };
                let reason = if asked.reason == 0 {
                    reason::by_program(ids.get(asked.id)?.machine.is_datagram)
                } else {
                    asked.reason.into()
                };
                self.say(ids, asked.id, Step::Reject, &param, reason)
            }
            number::DISCONNECT => self.say(
                ids,
                call.request::<Disconnect>()?.id,
                Step::Disconnect,
                &ConnParam::new_zeroed(),
                0,
            ),
            number::INIT_QP_ATTR => {
                let asked: InitQpAttr = call.request()?;
                let id = ids.get(asked.id)?;
                let attributes = id.attributes(self.settings, asked.qp_state)?;
                call.respond(asked.response, &attributes)
            }
            number::GET_EVENT => {
                let GetEvent { response } = call.request()?;
                self.deliver(ids, call, response)
            }
            number::SET_OPTION => {
                // The type of service of an id has no effect here.
                const OF_ID: u32 = 0;
                const TYPE_OF_SERVICE: u32 = 0;
                const REUSE_ADDRESS: u32 = 1;
                const ONLY_OWN_FAMILY: u32 = 2;
                const ACK_TIMEOUT: u32 = 3;
                let asked: SetOption = call.request()?;
                let id = ids.get(asked.id)?;
                let mut value = [0; 1];
                if asked.level == OF_ID && asked.optname > TYPE_OF_SERVICE {
                    sys::copy_in(asked.optval, &mut value)?;
                }
                match (asked.level, asked.optname) {
                    (OF_ID, REUSE_ADDRESS) => id.sharing.reuse = value[0] != 0,
                    (OF_ID, ONLY_OWN_FAMILY) => id.sharing.only_own_family = value[0] != 0,
                    (OF_ID, ACK_TIMEOUT) => id.ack_timeout = value[0] & 31,
                    _ => {}
                }
                Errno(libc::EOPNOTSUPP).when(asked.level != OF_ID)
            }
            // By this command a program reports that a message arrived before the connection was
            // established. The program does so after an asynchronous event that the software HCA
            // never reports.
            number::NOTIFY => ids.get(call.request::<Notify>()?.id).map(drop),
            _ => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    fn say(
        &self,
        ids: &mut Ids,
        handle: u32,
        step: Step,
        param: &ConnParam,
        reason: i32,
    ) -> Result<(), Errno> {
        let id = ids.get(handle)?;
        let failed = id.say(self.settings, step, param, reason)?;
        if let (Step::Connect, Some(socket)) = (step, &id.socket) {
            self.watch(socket, handle.into())?;
        }
        let answer = self.begin_wait(id);
        self.settle(id, false);
        ids.answers.extend(answer);
        failed
            .into_iter()
            .for_each(|(event, status)| ids.push(handle, event, status, [0; 304]));
        Ok(())
    }

    /// Sets the time at which an id's wait ends, if it waits. Returns its entry in
    /// [`Ids::answers`].
    fn begin_wait(&self, id: &mut Id) -> Option<(Instant, u32)> {
        let time = match id.machine.state {
            State::TimeWait => TIME_WAIT.min(self.answer_time),
            _ => self.answer_time,
        };
        id.answer_until = id.machine.waits().then(|| Instant::now() + time);
        id.answer_until.map(|until| (until, id.handle.0))
    }

    /// Closes the socket of an id whose connection has ended, or whose peer has ended (`is_gone`).
    fn settle(&self, id: &mut Id, is_gone: bool) {
        if is_gone || matches!(id.machine.state, State::TimeWait | State::Ended) {
            self.unwatch(&id.socket.take());
        }
    }

    /// Handles all messages that have arrived from peers, and ends overdue waits for answers.
    fn progress(&self, ids: &mut Ids) {
        let nothing = epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        };
        let mut ready = [nothing; TOGETHER];
        loop {
            let now = Some(&Timespec::default());
            let count = epoll::wait(&self.epoll, &mut ready, now).unwrap_or(0);
            let mut has_worked = false;
            for event in &ready[..count] {
                let handle = u32::try_from(event.data.u64());
                has_worked |= handle.is_ok_and(|handle| self.look(ids, handle));
            }
            if !has_worked {
                break;
            }
        }
        let now = Instant::now();
        while let Some(&(until, handle)) = ids.answers.first() {
            let waits = |id: &&mut Id| id.answer_until == Some(until) && id.machine.waits();
            if let Some(id) = ids.get(handle).ok().filter(waits) {
                if until > now {
                    break;
                }
                if id.machine.state != State::TimeWait {
                    log::refused(
                        self.settings,
                        format_args!(
                            "rdma_cm: the peer of id {handle} has not answered in {:?}",
                            self.answer_time
                        ),
                    );
                }
                self.hear(ids, handle, Heard::Silence, None);
            }
            ids.answers.pop_first();
        }
        if ids.spare.is_none() {
            ids.spare = fcntl_dupfd_cloexec(&self.epoll, 0).ok().map(service::hold);
        }
    }

    /// Accepts a connection if the id is a listener; otherwise receives a message from the id's
    /// peer. Returns whether a connection or a message was waiting.
    fn look(&self, ids: &mut Ids, handle: u32) -> bool {
        let Ids {
            by_handle, spare, ..
        } = ids;
        let Some(id) = by_handle.get_mut(&handle) else {
            return false;
        };
        if let (State::Listening, Some(port)) = (id.machine.state, &id.port) {
            let socket = match service::accept(&port.socket) {
                Ok(socket) => socket,
                Err(Errno(libc::EMFILE | libc::ENFILE)) if spare.take().is_some() => {
                    let rejected = service::accept(&port.socket);
                    let why = log::NO_FILE;
                    log::error(
                        self.settings,
                        format_args!("rdma_cm: a connection is rejected, as {why}"),
                    );
                    return rejected.is_ok();
                }
                Err(_) => return false,
            };
            if let Ok(taken) = Id::taken(id, socket) {
                let watch = |socket| self.watch(socket, taken.handle.0.into());
                if taken.watched().try_for_each(watch).is_ok() {
                    ids.by_handle.insert(taken.handle.0, taken);
                }
            }
            return true;
        }
        let mut buffer = [0; size_of::<Message>()];
        let Some(Ok(bytes)) = id
            .socket
            .as_ref()
            .map(|socket| service::receive(socket, &mut buffer))
        else {
            return false;
        };
        match id.parse(self.settings, bytes) {
            Some((kind, message)) => self.hear(
                ids,
                handle,
                Heard::Message(kind, message.reason),
                Some((kind, message)),
            ),
            None => self.hear(ids, handle, Heard::End, None),
        }
        true
    }

    fn hear(&self, ids: &mut Ids, handle: u32, mut heard: Heard, message: Option<(Kind, Message)>) {
        let Ok(id) = ids.get(handle) else { return };
        match &message {
            Some((Kind::Request, message))
                if id.machine.state == State::Arriving && !id.arrive(self.settings, message) =>
            {
                heard = Heard::End
            }
            Some((Kind::Request | Kind::Reply | Kind::Reject, message)) => id.learn(message),
            _ => {}
        }
        let was_unknown = id.machine.state == State::Arriving;
        let was_time_wait = id.machine.state == State::TimeWait;
        let event = id.machine.hear(heard);
        self.settle(id, heard == Heard::End);
        let param = message.map_or([0; 304], |(kind, _)| id.param(self.settings, kind));
        let begins = id.machine.state == State::TimeWait && !was_time_wait;
        let end = begins.then(|| self.begin_wait(id)).flatten();
        ids.answers.extend(end);
        match event {
            Some((event, status)) => ids.push(handle, event, status, param),
            None if was_unknown => drop(ids.by_handle.remove(&handle)),
            None => {}
        }
    }

    /// Writes the next unread event to the program's memory.
    ///
    /// # Errors
    /// `EAGAIN`: no event is unread.
    fn deliver(&self, ids: &mut Ids, call: &Call, at: u64) -> Result<(), Errno> {
        let Some(unread) = ids.unread.front() else {
            return Err(Errno(libc::EAGAIN));
        };
        let Unread { owner, response } = *unread;
        let uid = ids.get(owner)?.uid;
        call.respond(at, &EventResp { uid, ..response })?;
        ids.unread.pop_front();
        ids.get(owner)?.reported += 1;
        ids.get(response.id)?.parent = None;
        Ok(())
    }
}
