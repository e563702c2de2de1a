//! The connections between programs of an address and other hosts, pure: no socket, no clock.
//!
//! A *session* is an id of a program. Its messages arrive here in order and once. The messages of a
//! peer may be lost, doubled or late, and a stranger may send messages too. A [`Link`] is one
//! connection, or one request for a datagram service. It sends a message again until the answer
//! arrives, answers a message that arrives again, and passes each message on once. The states
//! follow the InfiniBand Architecture Specification, volume 1, 12.9.7.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;

use mlx5_hca::wire::roce::{CmKind, Mad, field};

/// Time before a message is sent again for the first time, in ms. Each further wait is twice as
/// long as the wait before it, up to [`LONGEST_WAIT_MS`].
const FIRST_WAIT_MS: u64 = 200;
/// The longest wait, in ms: 4.096 us * 2^20, as in the kernel.
const LONGEST_WAIT_MS: u64 = 4_295;
/// Maximum number of times that a message is sent.
const SENDS: u32 = 16;
/// Time for which an answer is kept, in ms: the message that it answers may arrive again.
const KEPT_MS: u64 = 20_000;
/// N of the time that a program is given to answer, 4.096 us * 2^N: 17 s, and again that time when
/// the message arrives again.
const PROGRAM_TIME: u64 = 22;
/// The longest wait that a peer can ask for, in ms.
const PEER_TIME_MS: u64 = 70_000;
/// Maximum number of links.
const MAX_LINKS: usize = 4096;

/// Reasons of a rejection. A pair has the reason for a connection, and the status of a datagram
/// service.
mod reason {
    pub(super) const INVALID_ID: u64 = 6;
    pub(super) const NO_SERVICE: (u64, u64) = (8, 1);
    pub(super) const PROGRAM: (u64, u64) = (28, 2);
}

/// An action of the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Sends a message to an address.
    Send(IpAddr, Mad),
    /// Passes a message of this address on to the session of a link.
    Tell(u32, IpAddr, Mad),
    /// Closes the session of a link, after the messages that were passed on to it.
    Close(u32),
}

/// The answer to an attempt to reach the listener of a service for a new link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    /// The link has a session.
    Yes,
    /// The service has no listener now, but may have one when the peer sends its request again.
    NotYet,
    /// The service has no listener.
    NoService,
    /// The listener takes no more requests.
    Full,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The session's request was sent.
    Requesting,
    /// A peer's request was passed on.
    Requested,
    /// The session's reply was sent.
    Replied,
    /// The peer's reply was passed on.
    Answered,
    Established,
    /// A request to disconnect was sent.
    Disconnecting,
    /// The peer's request to disconnect was passed on.
    Disconnected,
    /// The last message was sent, and is kept.
    Over,
}

#[derive(Debug)]
struct Link {
    peer: IpAddr,
    state: State,
    /// Whether the link has a session.
    is_open: bool,
    /// Whether the session sent the request.
    is_active: bool,
    /// The peer's number of the connection or of the request; 0 until it is known.
    remote: u32,
    /// The peer's queue pair.
    qpn: u64,
    transaction: u64,
    /// The message that was sent last.
    last: Mad,
    /// Number of times that the last message was sent.
    sends: u32,
    /// Time at which the last message is sent again, or, in the state `Over`, at which the link is
    /// removed.
    due_ms: Option<u64>,
}

/// The links, by the number that this end gave them.
#[derive(Debug)]
pub(crate) struct Links {
    by_id: HashMap<u32, Link>,
    next: u32,
    /// A random number that is sent in place of the device's GUID, which is the same on all hosts.
    guid: u64,
    /// Actions to be done, in this order.
    pub(crate) actions: Vec<Action>,
}

const fn is_datagram(kind: CmKind) -> bool {
    matches!(kind, CmKind::ServiceRequest | CmKind::ServiceReply)
}

/// Returns the rejection of a request, or of a later message of a connection.
fn rejection(of: &Mad, (reason, status): (u64, u64)) -> Mad {
    let peer = of.get(field::LOCAL_ID);
    let mut rejected = if of.kind() == CmKind::ServiceRequest {
        let mut rejected = Mad::new(CmKind::ServiceReply);
        let service = of.get(field::SIDR_REQ_SERVICE);
        rejected.set(field::LOCAL_ID, peer);
        rejected.set(field::SIDR_REP_SERVICE, service);
        rejected.set(field::SIDR_REP_STATUS, status);
        rejected
    } else {
        let mut rejected = Mad::new(CmKind::Reject);
        rejected.set(field::REMOTE_ID, peer);
        rejected.set(field::REJ_REASON, reason);
        rejected
    };
    rejected.set(field::TRANSACTION, of.get(field::TRANSACTION));
    rejected
}

impl Links {
    pub(crate) fn new() -> Self {
        let random = RandomState::new().hash_one(0);
        Self {
            by_id: HashMap::new(),
            next: random as u32,
            guid: random,
            actions: Vec::new(),
        }
    }

    fn new_id(&mut self) -> u32 {
        loop {
            self.next = self.next.wrapping_add(1);
            if self.next != 0 && !self.by_id.contains_key(&self.next) {
                return self.next;
            }
        }
    }

    fn insert(&mut self, id: u32, peer: IpAddr, state: State, remote: u32, last: Mad) {
        let is_active = state == State::Requesting;
        let link = Link {
            peer,
            state,
            is_open: true,
            is_active,
            remote,
            qpn: last.get(field::REQ_QPN),
            transaction: if is_active {
                self.guid << 32 | u64::from(id)
            } else {
                last.get(field::TRANSACTION)
            },
            last,
            sends: 0,
            due_ms: None,
        };
        self.by_id.insert(id, link);
    }

    /// Takes the request of a new session. Returns the session's number; `None` if the message is
    /// no request.
    pub(crate) fn ask(&mut self, now_ms: u64, peer: IpAddr, mad: Mad) -> Option<u32> {
        if !matches!(mad.kind(), CmKind::Request | CmKind::ServiceRequest) {
            return None;
        }
        let id = self.new_id();
        self.insert(id, peer, State::Requesting, 0, mad);
        self.send(now_ms, id, State::Requesting, mad);
        Some(id)
    }

    /// Takes a further message of a session. Drops a message that the state does not allow: the
    /// session sent it before it had received the last message of the peer.
    pub(crate) fn say(&mut self, now_ms: u64, id: u32, mad: Mad) {
        use State::*;
        let Some(link) = self.by_id.get(&id) else {
            return;
        };
        let next = match (mad.kind(), link.state) {
            (CmKind::Reply, Requested) => Replied,
            (CmKind::ReadyToUse, Answered) => Established,
            (CmKind::DisconnectRequest, Established) => Disconnecting,
            (CmKind::DisconnectRequest, Disconnected) => {
                return self.send(now_ms, id, Over, Mad::new(CmKind::DisconnectReply));
            }
            (CmKind::ServiceReply, Requested)
            | (CmKind::Reject, Requested | Answered)
            | (CmKind::DisconnectReply, Disconnected) => Over,
            _ => return,
        };
        self.send(now_ms, id, next, mad);
    }

    /// Handles the end of a session.
    pub(crate) fn end(&mut self, now_ms: u64, id: u32) {
        let Some(link) = self.by_id.get_mut(&id) else {
            return;
        };
        link.is_open = false;
        match link.state {
            State::Requesting => drop(self.by_id.remove(&id)),
            State::Requested | State::Replied | State::Answered => {
                let rejected = rejection(&link.last, reason::PROGRAM);
                self.send(now_ms, id, State::Over, rejected);
            }
            State::Established => {
                let asked = Mad::new(CmKind::DisconnectRequest);
                self.send(now_ms, id, State::Disconnecting, asked);
            }
            State::Disconnected => {
                let confirmed = Mad::new(CmKind::DisconnectReply);
                self.send(now_ms, id, State::Over, confirmed);
            }
            State::Disconnecting | State::Over => {}
        }
    }

    /// Sends a message of a link, which changes to the state `next`.
    fn send(&mut self, now_ms: u64, id: u32, next: State, mut mad: Mad) {
        let Some(link) = self.by_id.get_mut(&id) else {
            return;
        };
        let kind = mad.kind();
        if kind == CmKind::Reject {
            let of = match link.state {
                State::Requested => 0,
                State::Answered => 1,
                _ => 2,
            };
            mad.set(field::REJ_MESSAGE, of);
        }
        mad.set(field::TRANSACTION, link.transaction);
        if kind == CmKind::ServiceReply {
            mad.set(field::LOCAL_ID, link.remote.into());
        } else {
            mad.set(field::LOCAL_ID, id.into());
        }
        match kind {
            CmKind::Request => mad.set(field::REQ_GUID, self.guid),
            CmKind::ServiceRequest | CmKind::ServiceReply => {}
            _ => mad.set(field::REMOTE_ID, link.remote.into()),
        }
        match kind {
            CmKind::Reply => mad.set(field::REP_GUID, self.guid),
            CmKind::DisconnectRequest => mad.set(field::DREQ_QPN, link.qpn),
            _ => {}
        }
        (link.state, link.last, link.sends) = (next, mad, 0);
        self.send_again(now_ms, id);
    }

    /// Sends the last message of a link, and sets the time until it is due again.
    fn send_again(&mut self, now_ms: u64, id: u32) {
        let Some(link) = self.by_id.get_mut(&id) else {
            return;
        };
        self.actions.push(Action::Send(link.peer, link.last));
        let wait = match link.state {
            State::Requesting | State::Replied | State::Disconnecting => {
                Some((FIRST_WAIT_MS << link.sends.min(8)).min(LONGEST_WAIT_MS))
            }
            State::Over => Some(KEPT_MS),
            _ => None,
        };
        link.sends += 1;
        link.due_ms = wait.map(|wait| now_ms + wait);
    }

    /// Handles a message of a peer. `open` connects the link with a given number to the listener of
    /// a service.
    pub(crate) fn hear(
        &mut self,
        now_ms: u64,
        peer: IpAddr,
        mad: Mad,
        open: impl FnOnce(u32, u64) -> Opened,
    ) {
        use State::*;
        if let CmKind::Request | CmKind::ServiceRequest = mad.kind() {
            return self.hear_request(now_ms, peer, mad, open);
        }
        let Some(id) = self.link_of(peer, &mad) else {
            return self.answer_unknown(peer, &mad);
        };
        let Some(link) = self.by_id.get_mut(&id) else {
            return;
        };
        let tell = Action::Tell(id, peer, mad);
        match (mad.kind(), link.state) {
            (CmKind::Reply, Requesting) if link.last.kind() == CmKind::Request => {
                (link.state, link.due_ms) = (Answered, None);
                link.remote = mad.get(field::LOCAL_ID) as u32;
                link.qpn = mad.get(field::REP_QPN);
                self.actions.push(tell);
            }
            (CmKind::Reply, Answered) => self.ask_for_time(id, 1),
            // The confirmation was lost.
            (CmKind::Reply, Established) if link.is_active => self.send_again(now_ms, id),
            (CmKind::ReadyToUse, Replied) => {
                (link.state, link.due_ms) = (Established, None);
                self.actions.push(tell);
            }
            (CmKind::Wait, Requesting | Replied) => {
                let asked_ms = (4_096 << mad.get(field::MRA_TIMEOUT)) / 1_000_000;
                link.due_ms = Some(now_ms + PEER_TIME_MS.min(asked_ms).max(FIRST_WAIT_MS));
            }
            (CmKind::ServiceReply, Requesting) if is_datagram(link.last.kind()) => {
                self.close(id, tell);
            }
            (CmKind::Reject, Over) => {}
            (CmKind::Reject, _) | (CmKind::DisconnectReply, Disconnecting) => self.close(id, tell),
            (CmKind::DisconnectRequest, Replied | Established) => {
                if link.state == Replied {
                    // The confirmation was lost, or is late.
                    let confirmed = Mad::new(CmKind::ReadyToUse);
                    self.actions.push(Action::Tell(id, peer, confirmed));
                }
                (link.state, link.due_ms) = (Disconnected, None);
                link.transaction = mad.get(field::TRANSACTION);
                self.actions.push(tell);
            }
            (CmKind::DisconnectRequest, Disconnecting | Answered) => {
                link.transaction = mad.get(field::TRANSACTION);
                self.actions.push(tell);
                self.send(now_ms, id, Over, Mad::new(CmKind::DisconnectReply));
            }
            (CmKind::DisconnectRequest, Over) => self.send_again(now_ms, id),
            _ => {}
        }
    }

    /// Passes the last message on, and forgets the link.
    fn close(&mut self, id: u32, tell: Action) {
        self.by_id.remove(&id);
        self.actions.extend([tell, Action::Close(id)]);
    }

    /// Returns the link to which a message belongs: it has the same peer, and at both ends the same
    /// numbers of the connection. The peer's number is not compared if the link or the message does
    /// not have it.
    fn link_of(&self, peer: IpAddr, mad: &Mad) -> Option<u32> {
        let (local, is_service) = match mad.kind() {
            CmKind::ServiceReply => (mad.get(field::LOCAL_ID) as u32, true),
            _ => (mad.get(field::REMOTE_ID) as u32, false),
        };
        let remote = mad.get(field::LOCAL_ID) as u32;
        // A rejection may come before the peer has a number, or before the peer knows this end's
        // number.
        if local == 0 && mad.kind() == CmKind::Reject {
            return self.find(|link| {
                link.peer == peer && link.remote == remote && !link.is_active && remote != 0
            });
        }
        let link = self.by_id.get(&local).filter(|link| link.peer == peer)?;
        let is_its = is_service || link.remote == 0 || remote == 0 || link.remote == remote;
        is_its.then_some(local)
    }

    fn find(&self, is_it: impl Fn(&Link) -> bool) -> Option<u32> {
        let mut all = self.by_id.iter();
        all.find(|(_, link)| is_it(link)).map(|(id, _)| *id)
    }

    fn hear_request(
        &mut self,
        now_ms: u64,
        peer: IpAddr,
        mad: Mad,
        open: impl FnOnce(u32, u64) -> Opened,
    ) {
        let remote = mad.get(field::LOCAL_ID) as u32;
        let known =
            self.find(|link| (link.peer, link.remote, link.is_active) == (peer, remote, false));
        if let Some(id) = known {
            return match self.by_id[&id].state {
                State::Requested if mad.kind() == CmKind::Request => self.ask_for_time(id, 0),
                State::Replied | State::Over => self.send_again(now_ms, id),
                _ => {}
            };
        }
        if self.by_id.len() >= MAX_LINKS {
            return;
        }
        let service = mad.get(if mad.kind() == CmKind::ServiceRequest {
            field::SIDR_REQ_SERVICE
        } else {
            field::REQ_SERVICE
        });
        let id = self.new_id();
        let why = match open(id, service) {
            Opened::Yes => {
                self.insert(id, peer, State::Requested, remote, mad);
                return self.actions.push(Action::Tell(id, peer, mad));
            }
            Opened::NotYet => return,
            Opened::NoService => reason::NO_SERVICE,
            Opened::Full => reason::PROGRAM,
        };
        self.actions.push(Action::Send(peer, rejection(&mad, why)));
    }

    /// Asks the peer of a link to wait for the program's answer to its message, 0 for REQ and 1 for
    /// REP.
    fn ask_for_time(&mut self, id: u32, message: u64) {
        let link = &self.by_id[&id];
        let mut wait = Mad::new(CmKind::Wait);
        for (field, value) in [
            (field::TRANSACTION, link.transaction),
            (field::LOCAL_ID, id.into()),
            (field::REMOTE_ID, link.remote.into()),
            (field::MRA_MESSAGE, message),
            (field::MRA_TIMEOUT, PROGRAM_TIME),
        ] {
            wait.set(field, value);
        }
        self.actions.push(Action::Send(link.peer, wait));
    }

    /// Answers a message of no link: the end of a connection is confirmed, since the confirmation
    /// may have been lost, and a reply is rejected.
    fn answer_unknown(&mut self, peer: IpAddr, mad: &Mad) {
        let mut answer = match mad.kind() {
            CmKind::DisconnectRequest => Mad::new(CmKind::DisconnectReply),
            CmKind::Reply => {
                let mut rejected = Mad::new(CmKind::Reject);
                rejected.set(field::REJ_MESSAGE, 1);
                rejected.set(field::REJ_REASON, reason::INVALID_ID);
                rejected
            }
            _ => return,
        };
        answer.set(field::TRANSACTION, mad.get(field::TRANSACTION));
        answer.set(field::LOCAL_ID, mad.get(field::REMOTE_ID));
        answer.set(field::REMOTE_ID, mad.get(field::LOCAL_ID));
        self.actions.push(Action::Send(peer, answer));
    }

    /// Sends the messages that are due again, and removes the links that have ended.
    pub(crate) fn tick(&mut self, now_ms: u64) {
        let is_due = |link: &Link| link.due_ms.is_some_and(|due_ms| due_ms <= now_ms);
        while let Some(id) = self.find(is_due) {
            let link = &self.by_id[&id];
            if link.state != State::Over && link.sends < SENDS {
                self.send_again(now_ms, id);
            } else if link.is_open && link.state != State::Over {
                // The session has a time limit of its own.
                self.by_id.entry(id).and_modify(|link| link.due_ms = None);
            } else {
                self.by_id.remove(&id);
            }
        }
    }

    /// Returns the time of the next [`tick`](Self::tick), in ms.
    pub(crate) fn due_ms(&self) -> Option<u64> {
        self.by_id.values().filter_map(|link| link.due_ms).min()
    }

    /// Returns whether the end of a session still has to reach its peer.
    pub(crate) fn has_ends(&self) -> bool {
        self.find(|link| link.state == State::Disconnecting && !link.is_open)
            .is_some()
    }
}

#[cfg(test)]
mod tests;
