//! A thread's connections to other ranks, and the requests that wait for room on them.
//!
//! What carries a request is a [`Carrier`], a line of the registry here: [`copyrpc`], or [`rc_send`] or [`ucx_am`], which send each message by itself (`frame`: its bytes, `dialogue`: what
//! each end keeps of it, `calls`: who waits for an answer). A carrier has one link for each peer of the thread, numbered as the
//! topology lists them, and knows nothing of topologies; [`Remote`] finds the link of a request and keeps what finds no room, in order.

mod calls;
mod copyrpc;
mod dialogue;
mod frame;
mod rc_send;
#[cfg(test)]
mod tests;
mod ucx_am;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::time::Duration;

use mlx5::Device;
use shm::sleep::{Sleeper, Watch};

use super::plan::Plan;
use super::{BackendError, Records};
use crate::counters::{Figures, TransportReport};
use crate::message::{Request, Response};
use crate::topology::{Peer, Worker};
use crate::topology::{Topology, Transport};
use crate::trace::Sample;
use crate::values::copy;

/// The connections of one daemon or client. `C` is whom to answer, kept per call.
pub(super) struct Remote<C> {
    carrier: Carriers<C>,
    topology: Topology,
    rank: usize,
    /// By link: who is at its other end.
    peers: Vec<Peer>,
    /// By daemon of the job, rank after rank: the link to it.
    routes: Vec<Option<usize>>,
    /// By link, in order: requests for which it had no room.
    backlogs: Vec<VecDeque<(Request, C)>>,
    backlogged: usize,
    /// Most that was backlogged since somebody asked.
    backlog_peak: usize,
    /// Requests sent since the start, and answers to them.
    sent: u64,
    answered: u64,
    /// Links numbered below this may send; requests for the others wait.
    open_links: usize,
}

/// What a poll found.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Polled {
    /// Answers. They count as work, and completions do not: while credit is missing each round brings one, of a READ that looks for it, and a
    /// daemon that took that for work would keep the core from the peer it waits for.
    pub(super) answers: usize,
    /// Completions.
    pub(super) cqes: usize,
}

/// A counter of a carrier: its name, and how it is read.
type Counter<Stats> = (&'static str, fn(&Stats) -> u64);

/// What carries the requests and responses of a thread: its links to peers, by number. What has no body here has a meaning that fits most.
trait Carrier<C>: Sized {
    /// What answers a request of a peer.
    type Handle;

    /// A link for each of `peers`, not yet connected; on `device`, or one of its own, where it uses the job's.
    fn open(plan: &Plan, peers: &[Peer], device: Option<&Device>) -> Result<Self, BackendError>;

    /// What the other end of a link needs to connect; `None` if it is connected.
    fn record(&self, link: usize) -> Option<Vec<u8>>;

    /// Connects a link. Bytes of a peer: untrusted.
    fn connect(&mut self, link: usize, record: &[u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

    /// See [`Remote::settle`].
    fn settle(&mut self) -> Result<bool, BackendError> {
        Ok(true)
    }

    /// Sends a request.
    fn send(&mut self, link: usize, request: &Request, whom: C) -> Result<(), SendError<C>>;

    /// See [`Remote::poll`].
    fn poll(&mut self, answer: impl FnMut(C, Option<Response>, &[u8])) -> Result<Polled, BackendError>;

    /// See [`Remote::recv`].
    fn recv(&mut self, tail: &mut [u8]) -> Option<(Option<Request>, Self::Handle)>;

    /// Answers a request. A caller that is gone needs no answer; another failure shows at one of the next polls.
    fn answer(&mut self, handle: Self::Handle, response: Option<Response>, tail: &[u8]);

    /// Posts what was gathered.
    fn flush(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// See [`Sleeper`].
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch));

    /// See [`Remote::rest`].
    fn rest(&mut self) -> Option<Duration> {
        None
    }

    /// See [`Remote::has_work`].
    fn has_work(&self) -> bool {
        true
    }

    /// See [`Endpoints::credit_used`](super::Endpoints::credit_used).
    fn credit_used(&self) -> Vec<(Peer, [u64; 2])> {
        Vec::new()
    }

    /// See [`Remote::abort`].
    fn abort(&mut self) {}

    /// What its counters are read from.
    type Stats: 'static;

    /// Its counters since the start, `writes` and `messages` among them.
    const COUNTERS: &'static [Counter<Self::Stats>];

    /// The counters as they stand.
    fn stats(&self) -> Self::Stats;

    /// Device, modes and way to the peers, and what the device counts, if it does.
    fn report(&self) -> TransportReport;

    /// The counters that the series of a daemon has.
    fn counters(&self) -> Sample {
        let stats = self.stats();
        let count = |name: &str| Self::COUNTERS.iter().find(|(known, _)| *known == name).map_or(0, |(_, get)| get(&stats));
        Sample { messages: count("messages"), writes: count("writes"), window_stalls: count("window_stalls"), ..Sample::default() }
    }

    /// All counters.
    fn counted(&self) -> Figures<u64> {
        let stats = self.stats();
        Self::COUNTERS.iter().map(|(name, get)| ((*name).to_owned(), get(&stats))).collect()
    }
}

/// The carriers, each a value of [`Transport`] and the module whose `Links` are its [`Carrier`]. The step of a thread chooses between them once for each
/// of its phases and messages; a type parameter would go through daemons, clients and the job for the sake of a branch that always goes the same way.
macro_rules! carriers {
    ($d:tt $($kind:ident => $module:ident),+ $(,)?) => {
        enum Carriers<C> { $($kind(Box<$module::Links<C>>)),+ }

        enum Handle<C> { $($kind(<$module::Links<C> as Carrier<C>>::Handle)),+ }

        impl<C> Carriers<C> {
            fn open(plan: &Plan, peers: &[Peer], device: Option<&Device>) -> Result<Self, BackendError> {
                match plan.topology.transport {
                    $(Transport::$kind => Ok(Self::$kind(Box::new($module::Links::open(plan, peers, device)?)))),+
                }
            }

            #[inline]
            fn recv(&mut self, tail: &mut [u8]) -> Option<(Option<Request>, Incoming<C>)> {
                match self {
                    $(Self::$kind(links) => links.recv(tail).map(|(request, handle)| (request, Incoming(Handle::$kind(handle))))),+
                }
            }

            #[inline]
            fn answer(&mut self, incoming: Incoming<C>, response: Option<Response>, tail: &[u8]) {
                match (self, incoming.0) {
                    $((Self::$kind(links), Handle::$kind(handle)) => links.answer(handle, response, tail),)+
                    // A handle is of the carrier that made it.
                    _ => {}
                }
            }
        }

        /// The names of what carriers count, each once.
        pub fn counter_names() -> impl Iterator<Item = &'static str> {
            let names = [$(<$module::Links<()> as Carrier<()>>::COUNTERS.iter().map(|(name, _)| *name).collect::<Vec<_>>()),+];
            let mut known = HashSet::new();
            names.into_iter().flatten().filter(move |name| known.insert(*name))
        }

        /// The same for whichever carrier it is.
        macro_rules! each {
            ($d carriers:expr, $d links:ident => $d what:expr) => { match $d carriers { $(Carriers::$kind($d links) => $d what),+ } };
        }
    };
}

carriers! { $
    Copyrpc => copyrpc,
    RcSend => rc_send,
    UcxAm => ucx_am,
}

/// A request of another rank, to be answered once, at any time, with [`Remote::answer`].
pub(super) struct Incoming<C>(Handle<C>);

/// Where an answer goes, and the id it has to bring back.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket {
    link: usize,
    call: u32,
}

/// A request of a link that carries each message by itself, with the tail of its value.
struct Arrived {
    request: Request,
    ticket: Ticket,
    tail: Box<[u8]>,
}

impl Arrived {
    /// Returns the request and the ticket as [`Carrier::recv`] does.
    fn unpack(self, tail: &mut [u8]) -> (Option<Request>, Ticket) {
        copy(tail, &self.tail);
        (Some(self.request), self.ticket)
    }
}

/// A link did not take a request.
enum SendError<C> {
    /// No room or credit now: try again, with what it was given, after a poll.
    Full(C),
    /// Never again.
    Down(BackendError),
}

impl<C> fmt::Debug for Remote<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("peers", &self.peers).field("backlogged", &self.backlogged).finish_non_exhaustive()
    }
}

impl<C> fmt::Debug for Incoming<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Incoming")
    }
}

impl<C> Remote<C> {
    /// Makes the endpoints that `worker` has in the topology, on `device` or one of their own; `None` if it has none.
    pub(super) fn open(plan: &Plan, worker: Worker, device: Option<&Device>) -> Result<Option<Self>, BackendError> {
        let topology = plan.topology;
        let peers = topology.peers_of(plan.rank, worker);
        if peers.is_empty() {
            return Ok(None);
        }
        let mut routes = vec![None; topology.ranks * topology.daemons];
        for (link, peer) in peers.iter().enumerate() {
            if let Worker::Daemon(daemon) = peer.worker {
                routes.get_mut(peer.rank * topology.daemons + daemon).into_iter().for_each(|route| *route = Some(link));
            }
        }
        Ok(Some(Self {
            carrier: Carriers::open(plan, &peers, device)?,
            topology,
            rank: plan.rank,
            routes,
            backlogs: peers.iter().map(|_| VecDeque::new()).collect(),
            open_links: peers.len(),
            peers,
            backlogged: 0,
            backlog_peak: 0,
            sent: 0,
            answered: 0,
        }))
    }

    /// Connection records, each with whom it is for.
    pub(super) fn records(&self) -> Records {
        let record = |(link, peer): (usize, &Peer)| Some((*peer, each!(&self.carrier, links => links.record(link))?));
        self.peers.iter().enumerate().filter_map(record).collect()
    }

    /// Connects each link with the record that its other end made for it.
    pub(super) fn connect(&mut self, records: &[(Peer, Vec<u8>)]) -> Result<(), BackendError> {
        let links: HashMap<Peer, usize> = self.peers.iter().enumerate().map(|(link, peer)| (*peer, link)).collect();
        records.iter().try_for_each(|(peer, record)| {
            let what = || format!("connecting to {peer}");
            let link = links.get(peer).ok_or_else(|| BackendError::setup(what(), "there is no endpoint for it"))?;
            each!(&mut self.carrier, links => links.connect(*link, record)).map_err(|source| BackendError::Setup { what: what(), source })
        })
    }

    /// Lets connections come about that take both ends. Returns whether all stand.
    pub(super) fn settle(&mut self) -> Result<bool, BackendError> {
        each!(&mut self.carrier, links => links.settle())
    }

    /// The link through which this request goes, if it goes from here.
    #[inline]
    pub(super) fn link_for(&self, request: &Request) -> Option<usize> {
        let far_daemon = self.topology.far_daemon(self.rank, request.key());
        self.routes.get(request.rank() as usize * self.topology.daemons + far_daemon).copied().flatten()
    }

    /// Requests that wait for room.
    pub(super) fn backlogged(&self) -> usize {
        self.backlogged
    }

    /// Requests that were sent and are not answered yet.
    #[inline]
    pub(super) fn outstanding(&self) -> usize {
        (self.sent - self.answered) as usize
    }

    /// Requests sent since the start.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Links, open or not.
    pub(super) fn links(&self) -> usize {
        self.peers.len()
    }

    /// Lets the first `count` links send, and no others. What waits for one is sent by the next [`retry`](Self::retry).
    pub(super) fn open_links(&mut self, count: usize) {
        self.open_links = count;
    }

    /// Sends a request through a link, behind those that wait.
    #[inline]
    pub(super) fn call(&mut self, link: usize, request: Request, whom: C) -> Result<(), BackendError> {
        let Some(backlog) = self.backlogs.get_mut(link) else {
            return Err(BackendError::transport("a call to another rank", format!("there is no link {link}")));
        };
        let whom = if backlog.is_empty() && link < self.open_links {
            match each!(&mut self.carrier, links => links.send(link, &request, whom)) {
                Ok(()) => {
                    self.sent += 1;
                    return Ok(());
                }
                Err(SendError::Full(whom)) => whom,
                Err(SendError::Down(error)) => return Err(error),
            }
        } else {
            whom
        };
        backlog.push_back((request, whom));
        self.backlogged += 1;
        self.backlog_peak = self.backlog_peak.max(self.backlogged);
        Ok(())
    }

    /// Tries again what waits. Returns how much of it was sent.
    pub(super) fn retry(&mut self) -> Result<usize, BackendError> {
        let before = self.backlogged;
        if before > 0 {
            (0..self.backlogs.len().min(self.open_links)).try_for_each(|link| self.send(link))?;
        }
        Ok(before - self.backlogged)
    }

    /// Sends as much of a link's backlog as there is room for.
    fn send(&mut self, link: usize) -> Result<(), BackendError> {
        let Some(backlog) = self.backlogs.get_mut(link) else { return Ok(()) };
        while let Some((request, whom)) = backlog.pop_front() {
            match each!(&mut self.carrier, links => links.send(link, &request, whom)) {
                Ok(()) => {
                    self.backlogged -= 1;
                    self.sent += 1;
                }
                Err(SendError::Full(whom)) => {
                    backlog.push_front((request, whom));
                    return Ok(());
                }
                Err(SendError::Down(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes in what arrived, and hands responses to `answer` with whom they are for, and the tail of a value that was found. Sends nothing:
    /// the poller flushes as well, work or not.
    #[inline]
    pub(super) fn poll(&mut self, answer: impl FnMut(C, Option<Response>, &[u8])) -> Result<Polled, BackendError> {
        let polled = each!(&mut self.carrier, links => links.poll(answer))?;
        self.answered += polled.answers as u64;
        Ok(polled)
    }

    /// The oldest request of another rank; the tail of the value of a put is copied to `tail`, which has its length. `None` in its place: bytes
    /// that are no request, to be refused.
    #[inline]
    pub(super) fn recv(&mut self, tail: &mut [u8]) -> Option<(Option<Request>, Incoming<C>)> {
        self.carrier.recv(tail)
    }

    /// Answers a request of another rank, with the tail of a value that was found, or refuses it. There is always room for answers; that nobody
    /// waits any more is no error here.
    #[inline]
    pub(super) fn answer(&mut self, incoming: Incoming<C>, response: Option<Response>, tail: &[u8]) {
        self.carrier.answer(incoming, response, tail);
    }

    /// Posts what the phases of this step have gathered, and what connections have to tell by themselves.
    pub(super) fn flush(&mut self) -> Result<(), BackendError> {
        each!(&mut self.carrier, links => links.flush())
    }

    /// How long there is nothing to do unless a completion comes; `None`: there is something now. For drivers whose devices tell them of
    /// completions, which UCX does not.
    pub(super) fn rest(&mut self) -> Option<Duration> {
        if self.backlogged > 0 {
            return None;
        }
        each!(&mut self.carrier, links => links.rest())
    }

    /// Whether a poll has something to take in.
    pub(super) fn has_work(&self) -> bool {
        each!(&self.carrier, links => links.has_work())
    }

    /// See [`Endpoints::credit_used`](super::Endpoints::credit_used).
    pub(super) fn credit_used(&self) -> Vec<(Peer, [u64; 2])> {
        each!(&self.carrier, links => links.credit_used())
    }

    /// Ends every connection without a goodbye.
    pub(super) fn abort(&mut self) {
        each!(&mut self.carrier, links => links.abort());
    }

    /// Counters since the start, for the series of a daemon: messages, WRITEs, and flushes that the batch window stopped.
    pub(super) fn counters(&self) -> Sample {
        each!(&self.carrier, links => links.counters())
    }

    /// Counters since the start, and the most that waited since the last report.
    pub(super) fn report(&mut self) -> TransportReport {
        let backlog_peak = std::mem::replace(&mut self.backlog_peak, self.backlogged) as u64;
        let mut report = each!(&self.carrier, links => {
            let mut report = links.report();
            report.counted.add(&links.counted());
            report
        });
        report.backlog_peak = backlog_peak;
        report
    }
}

/// A sleep ends at what a poll takes in, or has to see to.
impl<C> Sleeper for Remote<C> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        each!(&mut self.carrier, links => links.with_watch(then));
    }
}
