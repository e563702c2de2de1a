//! A thread's connections to other ranks, and the requests that wait for room on them.
//!
//! A [`LinkSet`] carries the requests. Each set is a line of the registry `carriers!` in this file:
//! [`copyrpc`], [`rc_send`] or [`ucx_am`]. The last two use the module [`messages`], which sends
//! each message separately, with `frame` (the bytes of a message), `dialogue` (the state of each
//! end) and `calls` (the callers that wait for an answer). A carrier has one link for each peer of
//! the thread, numbered in the order of the topology, and is independent of topologies. [`Remote`]
//! finds the link of a request and queues requests without room, in order.

mod calls;
mod copyrpc;
mod dialogue;
mod frame;
mod messages;
mod rc_send;
#[cfg(test)]
mod tests;
mod ucx_am;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::time::Duration;

use copyrpc_shm::sleep::{Due, Sleeper, Watch};
use mlx5::Device;

use super::backlog::{Backlog, SendError};
use super::plan::{RankPlan, ThreadDevice};
use super::{BackendError, Endpoints, Records};
use crate::counters::{Figures, TransportReport};
use crate::message::{Request, Response};
use crate::store::owner_of;
use crate::topology::{Carrier, Peer, Worker};
use crate::trace::Sample;
use crate::values::copy;

/// The connections of one daemon or client. `C` is the caller to answer, kept per call.
pub(super) struct Remote<C> {
    /// Requests of other ranks, in the order of their arrival. The field is declared before the
    /// carrier, so that a drop ends the requests before the connections.
    arrived: VecDeque<Arrived<C>>,
    links: LinkSets<C>,
    peers: Vec<Peer>,
    /// Numbers of the links, ordered by rank, and by daemon of the rank if the key of a request
    /// decides which daemon gets it.
    routes: Vec<Option<usize>>,
    /// Number of routes to a rank.
    fan: usize,
    backlog: Backlog<C>,
    sent: u64,
    answered: u64,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Polled {
    /// Number of answers. Answers count as work, and completions do not. While credit is missing,
    /// each round gets a completion of a READ that polls for credit. A daemon that counted this
    /// completion as work would not sleep, and would keep the core from the peer whose credit it
    /// needs.
    pub(super) answers: usize,
    pub(super) cqes: usize,
}

/// The reason why a link does not connect with the record of its other end.
type Refused = Box<dyn std::error::Error + Send + Sync>;

/// A counter of a carrier: its name, and the function that reads it.
type Counter<Stats> = (&'static str, fn(&Stats) -> u64);

/// The carrier of the requests and responses of a thread: the thread's links to peers, which are
/// numbered from 0. Default methods fit most carriers. [`Remote`] documents the methods of the same
/// names.
trait LinkSet<C>: Sized {
    /// The handle that answers a request of a peer.
    type Handle;

    /// Opens a link for each of `peers`, not yet connected. A carrier that uses the device of the
    /// job opens the links on `device`.
    fn open(
        plan: &RankPlan,
        peers: &[Peer],
        device: &ThreadDevice<'_>,
    ) -> Result<Self, BackendError>;

    /// Returns the record with which the other end of a link connects. A connected link of copyrpc
    /// has none.
    fn record(&self, link: usize) -> Option<Vec<u8>>;

    /// Connects a link. The bytes of `record` come from a peer, and are untrusted.
    fn connect(&mut self, link: usize, record: &[u8]) -> Result<(), Refused>;

    fn settle(&mut self) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn send(&mut self, link: usize, request: &Request, whom: C) -> Result<(), SendError<C>>;

    /// Takes arrived messages as [`Remote::poll`] does. Calls `keep` with each request that `serve`
    /// does not answer, and with the tail of its value if it is a put. A carrier that sends each
    /// message separately calls `keep` with all requests.
    fn poll(
        &mut self,
        answer: impl FnMut(C, Option<Response>, &[u8]),
        serve: impl FnMut(&Request, &mut [u8]) -> Option<Response>,
        keep: impl FnMut(Request, &[u8], Self::Handle),
    ) -> Result<Polled, BackendError>;

    /// Answers a request. A caller that has ended needs no answer; any other failure is reported by
    /// one of the next polls.
    fn answer(&mut self, handle: Self::Handle, response: Option<Response>, tail: &[u8]);

    fn flush(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn suspend_windows(&mut self, _is_suspended: bool) {}

    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch));

    fn rest(&mut self) -> Option<Duration> {
        None
    }

    /// Returns whether a poll may take something.
    fn has_work(&self) -> bool {
        true
    }

    fn credit_used(&self) -> Vec<(Peer, [u64; 2])> {
        Vec::new()
    }

    /// Returns the number of requests that were sent through a link and are not answered yet.
    fn missing(&self, link: usize) -> usize;

    fn abort(&mut self) {}

    type Stats: 'static;

    /// Counters of the carrier since the start, `writes` and `messages` among them.
    const COUNTERS: &'static [Counter<Self::Stats>];

    fn stats(&self) -> Self::Stats;

    /// Returns the report of the carrier: its device, the modes of the device, the path to the
    /// peers, and the counters of the device if it has any.
    fn report(&self) -> TransportReport;

    /// Returns the carrier's counters as the fields of a daemon's sample.
    fn counters(&self) -> Sample {
        let stats = self.stats();
        let count = |name: &str| {
            let mut counters = Self::COUNTERS.iter();
            let found = counters.find(|(known, _)| *known == name);
            found.map_or(0, |(_, get)| get(&stats))
        };
        Sample {
            messages: count("messages"),
            writes: count("writes"),
            window_stalls: count("window_stalls"),
            ..Sample::default()
        }
    }

    fn counted(&self) -> Figures<u64> {
        let stats = self.stats();
        let counters = Self::COUNTERS.iter();
        counters
            .map(|(name, get)| ((*name).to_owned(), get(&stats)))
            .collect()
    }
}

/// The carriers: each is a value of [`Carrier`], and a module whose `Links` are its [`LinkSet`].
/// The step of a thread chooses between the carriers once for each of its phases and messages. A
/// type parameter for the carrier would spread through daemons, clients and the job, only to save a
/// branch that always takes the same path.
macro_rules! carriers {
    ($d:tt $($kind:ident => $module:ident),+ $(,)?) => {
        enum LinkSets<C> { $($kind(Box<$module::Links<C>>)),+ }

        enum Handle<C> { $($kind(<$module::Links<C> as LinkSet<C>>::Handle)),+ }

        impl<C> LinkSets<C> {
            fn open(plan: &RankPlan, peers: &[Peer], device: &ThreadDevice<'_>) -> Result<Self, BackendError> {
                match plan.job.topology.carrier {
                    $(Carrier::$kind => Ok(Self::$kind(Box::new($module::Links::open(plan, peers, device)?)))),+
                }
            }

            #[inline]
            fn poll(
                &mut self,
                answer: impl FnMut(C, Option<Response>, &[u8]),
                serve: impl FnMut(&Request, &mut [u8]) -> Option<Response>,
                mut keep: impl FnMut(Request, &[u8], Incoming<C>),
            ) -> Result<Polled, BackendError> {
                match self {
                    $(Self::$kind(links) => links.poll(answer, serve, |request, tail, handle| {
                        keep(request, tail, Incoming(Handle::$kind(handle)));
                    })),+
                }
            }

            #[inline]
            fn answer(&mut self, incoming: Incoming<C>, response: Option<Response>, tail: &[u8]) {
                // A handle is given only to the carrier that made it.
                match self {
                    $(Self::$kind(links) => {
                        if let Handle::$kind(handle) = incoming.0 {
                            links.answer(handle, response, tail);
                        }
                    })+
                }
            }
        }

        /// Returns the names of the carriers' counters, each once.
        pub fn counter_names() -> impl Iterator<Item = &'static str> {
            let names = [$(<$module::Links<()> as LinkSet<()>>::COUNTERS.iter().map(|(name, _)| *name).collect::<Vec<_>>()),+];
            let mut known = HashSet::new();
            names.into_iter().flatten().filter(move |name| known.insert(*name))
        }

        /// Evaluates the same expression for any carrier.
        macro_rules! each {
            ($d carriers:expr, $d links:ident => $d what:expr) => { match $d carriers { $(LinkSets::$kind($d links) => $d what),+ } };
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

struct Arrived<C> {
    request: Request,
    incoming: Incoming<C>,
    tail: Box<[u8]>,
}

impl<C> fmt::Debug for Remote<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote")
            .field("peers", &self.peers)
            .field("backlogged", &self.backlogged())
            .finish_non_exhaustive()
    }
}

impl<C> fmt::Debug for Incoming<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Incoming")
    }
}

impl<C> Remote<C> {
    /// Opens the endpoints of `worker` in the topology, on `device`; `None`: on a device of their
    /// own. Returns `None` if the worker has no endpoints.
    pub(super) fn open(
        plan: &RankPlan,
        worker: Worker,
        device: Option<&Device>,
    ) -> Result<Option<Self>, BackendError> {
        let topology = plan.job.topology;
        let peers = topology.peers_of(plan.rank, worker);
        if peers.is_empty() {
            return Ok(None);
        }
        let fan = topology.far_daemons();
        let mut routes = vec![None; topology.ranks * fan];
        for (link, peer) in peers.iter().enumerate() {
            if let Worker::Daemon(daemon) = peer.worker {
                let route = routes.get_mut(peer.rank * fan + daemon % fan);
                route.into_iter().for_each(|route| *route = Some(link));
            }
        }
        Ok(Some(Self {
            links: LinkSets::open(plan, &peers, &plan.device(worker, device)?)?,
            routes,
            fan,
            backlog: Backlog::new(peers.len()),
            peers,
            arrived: VecDeque::new(),
            sent: 0,
            answered: 0,
        }))
    }

    /// Returns the link that carries this request; `None` if this thread does not send it.
    #[inline]
    pub(super) fn link_for(&self, request: &Request) -> Option<usize> {
        let daemon = if self.fan > 1 {
            owner_of(request.key(), self.fan)
        } else {
            0
        };
        self.routes
            .get(request.rank() as usize * self.fan + daemon)
            .copied()
            .flatten()
    }

    pub(super) fn backlogged(&self) -> usize {
        self.backlog.waiting()
    }

    #[inline]
    pub(super) fn outstanding(&self) -> usize {
        (self.sent - self.answered) as usize
    }

    /// Returns the number of unanswered requests on each link to a daemon, in the order of
    /// [`asks`](crate::topology::Topology::asks).
    pub(super) fn by_endpoint(&self) -> impl Iterator<Item = usize> {
        let peers = self.peers.iter().enumerate();
        let to_daemons = peers.filter(|(_, peer)| peer.is_daemon());
        to_daemons.map(|(link, _)| each!(&self.links, links => links.missing(link)))
    }

    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Sends a request through a link. The request waits in the backlog if there is no room, or if
    /// earlier requests wait for the link.
    #[inline(always)]
    pub(super) fn call(
        &mut self,
        link: usize,
        request: Request,
        whom: C,
    ) -> Result<(), Box<BackendError>> {
        let whom = if self.backlog.is_empty(link) {
            // Each carrier has a `match` of its own, so that no result goes through memory.
            each!(&mut self.links, links => match links.send(link, &request, whom) {
                Ok(()) => {
                    self.sent += 1;
                    return Ok(());
                }
                Err(SendError::Full(whom)) => whom,
                Err(SendError::Down(error)) => return Err(Box::new(error)),
            })
        } else {
            whom
        };
        self.backlog.push(link, request, whom)
    }

    /// Tries again to send the waiting requests. Returns the number of requests sent.
    pub(super) fn retry(&mut self) -> Result<usize, BackendError> {
        let sent = self.backlog.retry(
            |link, request, whom| each!(&mut self.links, links => links.send(link, request, whom)),
        )?;
        self.sent += sent as u64;
        Ok(sent)
    }

    /// Takes arrived messages. Calls `answer` with each response, its caller, and the tail of the
    /// value that a get has found. Sends nothing, so the caller has to flush, even after a poll
    /// that found nothing.
    ///
    /// A request of another rank waits for [`recv`](Self::recv) unless `serve` answers it. If
    /// values have tails, `serve` gets a buffer with the tail of a put's value, and writes the tail
    /// of a found value to the same buffer. A carrier that sends each message separately does not
    /// call `serve`.
    #[inline]
    pub(super) fn poll(
        &mut self,
        answer: impl FnMut(C, Option<Response>, &[u8]),
        serve: impl FnMut(&Request, &mut [u8]) -> Option<Response>,
    ) -> Result<Polled, BackendError> {
        let Self { links, arrived, .. } = self;
        let polled = links.poll(answer, serve, |request, tail, incoming| {
            arrived.push_back(Arrived {
                request,
                incoming,
                tail: if tail.is_empty() {
                    Box::default()
                } else {
                    tail.into()
                },
            });
        })?;
        self.answered += polled.answers as u64;
        Ok(polled)
    }

    /// Takes the oldest waiting request of another rank, and copies a put's tail to `tail`.
    #[inline]
    pub(super) fn recv(&mut self, tail: &mut [u8]) -> Option<(Request, Incoming<C>)> {
        let arrived = self.arrived.pop_front()?;
        if !arrived.tail.is_empty() {
            copy(tail, &arrived.tail);
        }
        Some((arrived.request, arrived.incoming))
    }

    /// Answers a request of another rank, with the tail of the value that a get has found, or
    /// refuses it. There is always room for answers. A caller that has ended is not an error.
    #[inline]
    pub(super) fn answer(
        &mut self,
        incoming: Incoming<C>,
        response: Option<Response>,
        tail: &[u8],
    ) {
        self.links.answer(incoming, response, tail);
    }

    /// Posts the messages that this step has gathered, and messages of the connections themselves,
    /// such as returned credit.
    pub(super) fn flush(&mut self) -> Result<(), BackendError> {
        each!(&mut self.links, links => links.flush())
    }

    /// Suspends the batch windows of the connections (`true`), or lets them act again (`false`).
    pub(super) fn suspend_windows(&mut self, is_suspended: bool) {
        each!(&mut self.links, links => links.suspend_windows(is_suspended));
    }

    /// Returns the time for which there is nothing to do unless a completion arrives; `None` if
    /// there is work now. The requests of the backlog are no work, because only a completion makes
    /// room for them. Also posts gathered messages of copyrpc. Only drivers whose devices report
    /// completions may call it; UCX reports none.
    pub(super) fn rest(&mut self) -> Option<Duration> {
        if !self.arrived.is_empty() {
            return None;
        }
        each!(&mut self.links, links => links.rest())
    }

    /// Returns the counters since the start as fields of a daemon's sample: messages, WRITEs, and
    /// flushes that the batch window stopped.
    pub(super) fn counters(&self) -> Sample {
        each!(&self.links, links => links.counters())
    }
}

impl<C> Endpoints for Remote<C> {
    fn records(&mut self) -> Records {
        let record = |(link, peer): (usize, &Peer)| {
            Some((*peer, each!(&self.links, links => links.record(link))?))
        };
        self.peers.iter().enumerate().filter_map(record).collect()
    }

    fn connect(&mut self, records: &[(Peer, Vec<u8>)]) -> Result<(), BackendError> {
        let peers = self.peers.iter().enumerate();
        let links: HashMap<Peer, usize> = peers.map(|(link, peer)| (*peer, link)).collect();
        records.iter().try_for_each(|(peer, record)| {
            let what = || format!("connecting to {peer}");
            let link = links
                .get(peer)
                .ok_or_else(|| BackendError::setup(what(), "there is no endpoint for it"))?;
            let connected = each!(&mut self.links, links => links.connect(*link, record));
            connected.map_err(|source| BackendError::setup(what(), source))
        })
    }

    fn settle(&mut self) -> Result<bool, BackendError> {
        each!(&mut self.links, links => links.settle())
    }

    fn transport(&mut self) -> Option<TransportReport> {
        let mut report = each!(&self.links, links => {
            let mut report = links.report();
            report.counted.add(&links.counted());
            report
        });
        report.backlog_peak = self.backlog.take_peak() as u64;
        Some(report)
    }

    fn credit_used(&mut self) -> Vec<(Peer, [u64; 2])> {
        each!(&self.links, links => links.credit_used())
    }

    fn has_news(&mut self) -> bool {
        each!(&self.links, links => links.has_work())
    }

    fn abort(&mut self) {
        each!(&mut self.links, links => links.abort());
    }
}

/// Ends a sleep when a poll has something to take or to do.
impl<C> Sleeper for Remote<C> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        if !self.arrived.is_empty() {
            return then(&mut Due::now());
        }
        each!(&mut self.links, links => links.with_watch(then));
    }
}
