//! A daemon owns a shard and carries requests. Each of its steps is a sequence of bounded phases.
//!
//! No phase waits for another: a request that cannot proceed now joins the queue of its path, and
//! the next steps try again. Answers are never delayed for lack of room, because every transport
//! keeps room for them; a [`Policy`] may hold them for a time.

use std::task::Waker;
use std::time::Duration;

use copyrpc_shm::sleep::{self, Due, Sleeper, Watch};
use mlx5::Device;

use super::plan::{RankPlan, TYPE_TAG};
use super::remote::{Incoming, Remote};
use super::shards::{Hop, ShardNode, Shards};
use super::{BackendError, Daemon, Endpoints, OrSetup, Restful};
use crate::counters::{Round, TransportReport};
use crate::message::{Outcome, Request, Response};
use crate::policy::{Found, Policy, PolicyReport};
use crate::store::{Shard, owner_of};
use crate::topology::Worker;
use crate::trace::Sample;
use crate::values::Tail;
use crate::verify::{fill_tail, first_value};

/// Maximum number of requests in one step of a phase that receives them one by one.
const BUDGET: usize = 256;

type LocalServer = ipc::Server<Request, Response>;
type RingServer = delegationrpc::Server<Request, Response>;

/// The caller of a request to another rank, and the [place](crate::values) of the tail of the
/// request's value.
#[derive(Debug)]
pub(super) enum Caller {
    Ipc(ipc::Token, u32),
    Ring(ipc::Token, u32),
    Daemon(flux::Token, u32),
}

impl Caller {
    const fn place(&self) -> u32 {
        let (Self::Ipc(_, place) | Self::Ring(_, place) | Self::Daemon(_, place)) = self;
        *place
    }
}

/// The caller of a request that another daemon of this rank has not answered yet.
#[derive(Debug)]
enum Waiting {
    Ipc(ipc::Token),
    /// Another rank; the `u32` is the place of the tail of the value.
    Remote(Incoming<Caller>, u32),
}

#[derive(Debug)]
struct Local {
    clients: LocalServer,
    ring: Option<RingServer>,
    shards: Shards<Waiting>,
}

impl Local {
    /// Passes an answer of another rank to its caller; `None` as the response means that the call
    /// failed.
    #[inline(always)]
    fn answer(&mut self, whom: Caller, response: Option<Response>) {
        match whom {
            Caller::Ipc(token, _) => answer_client(&mut self.clients, token, response),
            Caller::Daemon(token, _) => {
                let hop = response.map_or(Hop::Failed, Hop::Response);
                answer_daemon(&mut self.shards, token, hop);
            }
            Caller::Ring(token, _) => {
                if let Some(ring) = &mut self.ring {
                    answer_client(ring, token, response);
                }
            }
        }
    }

    fn sleepers(&mut self) -> impl Iterator<Item = &mut dyn Sleeper> {
        let own = [&mut self.clients as &mut dyn Sleeper, &mut self.shards.node];
        let ring = self.ring.as_mut().map(|ring| ring as &mut dyn Sleeper);
        own.into_iter().chain(ring)
    }
}

/// A daemon of a composed topology.
#[derive(Debug)]
pub struct KvDaemon {
    plan: RankPlan,
    daemon: usize,
    store: Shard,
    local: Local,
    remote: Option<Remote<Caller>>,
    /// The tail of a value on its way to or from another rank.
    tail: Vec<u8>,
    /// [Places](crate::values) of this daemon that hold no tail.
    places: Vec<u32>,
    held: Vec<(Caller, Option<Response>)>,
    policy: Policy,
    /// Whether requests of other ranks for this shard wait because they arrived in a round that
    /// takes no requests. Later requests must not overtake the waiting ones.
    own_wait: bool,
    /// Number of polls of the current round until now; 0 if no round has begun.
    polls: u32,
    /// The findings of these polls.
    polled: Polled,
    backlog_peak: usize,
}

/// The findings of the polls of a round.
#[derive(Debug, Clone, Copy, Default)]
struct Polled {
    cqes: usize,
    /// Answers that arrived, and requests that were served where they arrived.
    moved: usize,
    /// Answers that were delivered at once.
    passed: usize,
}

impl Polled {
    const fn after(self, earlier: Self) -> Self {
        Self {
            cqes: earlier.cqes + self.cqes,
            moved: earlier.moved + self.moved,
            passed: earlier.passed + self.passed,
        }
    }
}

impl KvDaemon {
    pub(super) fn open(
        plan: &RankPlan,
        daemon: usize,
        node: ShardNode,
        device: Option<&Device>,
    ) -> Result<Self, BackendError> {
        let (topology, workload) = (plan.job.topology, plan.job.workload);
        let name = plan.server_name(&format!("ipc{daemon}"));
        let clients =
            LocalServer::bind_in(&plan.dir, &name, topology.clients, plan.depth(), TYPE_TAG)
                .or_setup(format!("the local server of daemon {daemon}"))?;
        let (daemons, tail_bytes) = (topology.daemons, plan.values.tail_bytes());
        let mut store = Shard::with_tails(daemon, daemons, workload.store_keys(), tail_bytes);
        if !workload.empty {
            let first = |key| first_value(plan.rank as u16, key);
            store.fill(workload.key_range, first, fill_tail);
        }
        let ring = if daemon < topology.rings() {
            Some(open_ring(plan, daemon)?)
        } else {
            None
        };
        Ok(Self {
            daemon,
            store,
            local: Local {
                clients,
                ring,
                shards: Shards::new(node, topology.daemons),
            },
            remote: Remote::open(plan, Worker::Daemon(daemon), device)?,
            tail: vec![0; plan.values.tail_bytes()],
            places: if topology.passing_daemons() > 0 {
                plan.values.places().of_daemon(daemon).collect()
            } else {
                Vec::new()
            },
            held: Vec::new(),
            policy: Policy::new(&plan.job.policies, topology.ranks),
            own_wait: false,
            polls: 0,
            polled: Polled::default(),
            backlog_peak: 0,
            plan: plan.clone(),
        })
    }

    /// Switches the policies of this daemon and the batch windows of its connections on or off.
    /// They are on from the start.
    pub fn act_on_policies(&mut self, acts: bool) {
        self.policy.act(acts);
        if let Some(remote) = &mut self.remote {
            remote.suspend_windows(!acts);
        }
        self.pass_held();
    }

    fn pass_held(&mut self) -> usize {
        let passed = self.held.len();
        let held = self.held.drain(..);
        held.for_each(|(whom, response)| self.local.answer(whom, response));
        passed
    }

    /// Ends the daemon. Returns its store.
    pub fn into_store(self) -> Shard {
        self.store
    }

    #[inline(never)]
    fn begin(&mut self, now_ns: u64) {
        self.policy.begin(now_ns, self.outstanding());
    }

    /// Runs all phases; in a round that takes no requests, only the first phase and the flush. If
    /// the policy adds polls to a round, a call runs only the first phase while the polls of the
    /// round have not found enough completions and added polls are left.
    fn round(&mut self) -> Result<Round, BackendError> {
        let mut round = self.take_messages()?;
        if round.is_part {
            return Ok(round);
        }
        if self.policy.plan().takes_requests {
            round.moved += self.serve_ranks()?;
            round.moved += self.serve_ring()?;
            round.moved += self.serve_clients()?;
            round.moved += self.serve_daemons()?;
            round.moved += self.retry_backlogs()?;
        }
        if let Some(remote) = &mut self.remote {
            if self.policy.flushes(round.moved > 0) {
                remote.flush()?;
                self.policy.flushed(remote.sent());
            }
        }
        round.outstanding = self.outstanding();
        Ok(round)
    }

    /// Passes the answers of other ranks to their callers, or holds them for the policy. In rounds
    /// that take requests, also serves the requests of other ranks for this shard on arrival,
    /// unless earlier requests wait.
    fn take_messages(&mut self) -> Result<Round, BackendError> {
        let mut round = Round::default();
        let Some(remote) = &mut self.remote else {
            return Ok(round);
        };
        let (mut served, held_before) = (0, self.held.len());
        let permitted = self.policy.plan();
        let mut room_to_hold = permitted.most_held.saturating_sub(held_before);
        let serves = permitted.takes_requests && !self.own_wait;
        let serve = |request: &Request, tail: &mut [u8]| {
            if request.rank() as usize != self.plan.rank || !self.store.owns(request.key()) {
                return None;
            }
            if !serves {
                self.own_wait = true;
                return None;
            }
            let response = self.store.apply_with(request, || Tail::Bytes(tail));
            served += 1;
            Some(response)
        };
        let answer = |whom: Caller, response, tail: &[u8]| {
            if !tail.is_empty() {
                self.plan.values.write(whom.place(), tail);
            }
            if room_to_hold > 0 {
                room_to_hold -= 1;
                self.held.push((whom, response));
            } else {
                self.local.answer(whom, response);
            }
        };
        let polled = remote.poll(answer, serve)?;
        self.polls += 1;
        let mut found = Polled {
            cqes: polled.cqes,
            moved: polled.answers + served,
            passed: polled.answers - (self.held.len() - held_before),
        };
        if permitted.extra.polls > 0 {
            found = found.after(std::mem::take(&mut self.polled));
            if found.cqes < permitted.extra.cqes && self.polls <= permitted.extra.polls {
                self.polled = found;
                round.is_part = true;
                return Ok(round);
            }
        }
        let Polled {
            cqes,
            moved,
            passed,
        } = found;
        (round.cqes, round.moved) = (cqes, moved);
        let found = Found {
            polls: std::mem::take(&mut self.polls),
            passed,
            held: self.held.len(),
        };
        if self.policy.releases(found) {
            // Answers that exceeded the maximum number of held answers were delivered at once,
            // before the held answers. Each delivery counts as a moved message, in addition to the
            // arrival of the answer.
            round.moved += passed + self.pass_held();
        }
        Ok(round)
    }

    fn serve_ranks(&mut self) -> Result<usize, BackendError> {
        let mut served = 0;
        // A request that is passed on to another daemon needs a place for its tail. The loop ends
        // if there is none: a place becomes free when another daemon answers, which does not depend
        // on this loop.
        while served < BUDGET && !self.lacks_places() {
            let Some(remote) = &mut self.remote else {
                break;
            };
            let Some((request, incoming)) = remote.recv(&mut self.tail) else {
                self.own_wait = false;
                break;
            };
            served += 1;
            self.serve_request_of_rank(request, incoming)?;
        }
        Ok(served)
    }

    /// Returns whether the daemon may have to pass on a request to another daemon of its rank, and
    /// has no free place for the tail of the value.
    fn lacks_places(&self) -> bool {
        self.places.is_empty()
            && !self.tail.is_empty()
            && self.plan.job.topology.passing_daemons() > 0
    }

    fn serve_request_of_rank(
        &mut self,
        request: Request,
        incoming: Incoming<Caller>,
    ) -> Result<(), BackendError> {
        let Some(remote) = &mut self.remote else {
            return Ok(());
        };
        // The request consists of bytes of a peer, so it is refused unless it is for this rank.
        if request.rank() as usize != self.plan.rank {
            remote.answer(incoming, None, &[]);
            return Ok(());
        }
        let owner = owner_of(request.key(), self.plan.job.topology.daemons);
        if owner == self.daemon {
            let response = self
                .store
                .apply_with(&request, || Tail::Bytes(&mut self.tail));
            remote.answer(incoming, Some(response), &self.tail);
            return Ok(());
        }
        let place = self.places.pop().unwrap_or_default();
        if request.bytes_behind(self.tail.len()) > 0 {
            self.plan.values.write(place, &self.tail);
        }
        let waiting = Waiting::Remote(incoming, place);
        self.local.shards.call(owner, request.at(place), waiting)?;
        Ok(())
    }

    fn serve_ring(&mut self) -> Result<usize, BackendError> {
        let Some(ring) = &mut self.local.ring else {
            return Ok(0);
        };
        ring.poll();
        let mut served = 0;
        while served < BUDGET {
            let Some((token, request)) = ring.recv() else {
                break;
            };
            served += 1;
            let remote = self.remote.as_mut();
            match remote.and_then(|remote| Some((remote.link_for(&request)?, remote))) {
                Some((link, remote)) => {
                    remote.call(link, request, Caller::Ring(token, request.place()))?
                }
                // The reply fails only if the client has ended, and then no thread waits for it.
                None => drop(ring.reply(token, Response::new(Outcome::Refused))),
            }
        }
        Ok(served)
    }

    /// Serves requests of clients that arrived through ipc. They are for this shard, and in the
    /// topology meta also for other ranks.
    fn serve_clients(&mut self) -> Result<usize, BackendError> {
        if !self.plan.job.topology.daemons_pass_on() {
            let serve = |request: &Request| serve(&mut self.store, &self.plan, request);
            return Ok(self.local.clients.step(serve));
        }
        self.local.clients.poll();
        let mut served = 0;
        while served < BUDGET {
            let Some((token, request)) = self.local.clients.recv() else {
                break;
            };
            served += 1;
            let rank = request.rank() as usize;
            if rank == self.plan.rank || rank >= self.plan.job.topology.ranks {
                let response = serve(&mut self.store, &self.plan, &request);
                answer_client(&mut self.local.clients, token, Some(response));
                continue;
            }
            let gateway = self.plan.job.topology.gateway_of(rank);
            match (self.link_for(&request), gateway) {
                (Some((link, remote)), _) => {
                    remote.call(link, request, Caller::Ipc(token, request.place()))?
                }
                (None, Some(gateway)) => {
                    let shards = &mut self.local.shards;
                    shards.call(gateway, request, Waiting::Ipc(token))?;
                }
                (None, None) => {
                    let refused = Some(Response::new(Outcome::Refused));
                    answer_client(&mut self.local.clients, token, refused);
                }
            }
        }
        Ok(served)
    }

    /// Passes on the answers of the rank's other daemons to their callers, then serves the requests
    /// of the other daemons.
    fn serve_daemons(&mut self) -> Result<usize, BackendError> {
        let shards = &mut self.local.shards;
        let answer = |waiting, response| match waiting {
            Waiting::Ipc(token) => answer_client(&mut self.local.clients, token, response),
            Waiting::Remote(incoming, place) => {
                if !self.tail.is_empty() {
                    self.plan.values.read(place, &mut self.tail);
                    self.places.push(place);
                }
                if let Some(remote) = &mut self.remote {
                    remote.answer(incoming, response, &self.tail);
                }
            }
        };
        if !self.plan.job.topology.daemons_pass_on() {
            let serve = |request: &Request| serve(&mut self.store, &self.plan, request);
            return Ok(shards.step(answer, serve));
        }
        let taken = shards.poll(answer);
        let mut served = 0;
        while served < BUDGET {
            let Some((_, token, hop)) = self.local.shards.node.recv() else {
                break;
            };
            served += 1;
            let Hop::Request(request) = hop else {
                answer_daemon(&mut self.local.shards, token, Hop::Failed);
                continue;
            };
            match self.link_for(&request) {
                Some((link, remote)) => {
                    remote.call(link, request, Caller::Daemon(token, request.place()))?
                }
                None => {
                    let response = serve(&mut self.store, &self.plan, &request);
                    answer_daemon(&mut self.local.shards, token, Hop::Response(response));
                }
            }
        }
        Ok(taken + served)
    }

    fn backlogged(&self) -> usize {
        self.local.shards.backlogged() + self.remote.as_ref().map_or(0, Remote::backlogged)
    }

    #[inline]
    fn outstanding(&self) -> usize {
        self.remote.as_ref().map_or(0, Remote::outstanding)
    }

    /// Returns the number of the link that carries a request, and the connections of this daemon.
    /// Returns `None` if this daemon does not send the request.
    fn link_for(&mut self, request: &Request) -> Option<(usize, &mut Remote<Caller>)> {
        let remote = self.remote.as_mut()?;
        Some((remote.link_for(request)?, remote))
    }

    fn retry_backlogs(&mut self) -> Result<usize, BackendError> {
        let remote = self.remote.as_mut().map_or(Ok(0), Remote::retry)?;
        let shards = self.local.shards.retry()?;
        self.backlog_peak = self.backlog_peak.max(self.backlogged());
        Ok(remote + shards)
    }
}

/// Executes a request, with the tail of its value in the place that the request contains. Refuses a
/// request for another rank, and a key that the store does not own.
#[inline]
fn serve(store: &mut Shard, plan: &RankPlan, request: &Request) -> Response {
    if request.rank() as usize != plan.rank {
        return Response::new(Outcome::Refused);
    }
    store.apply_with(request, || Tail::Place(&plan.values, request.place()))
}

fn open_ring(plan: &RankPlan, daemon: usize) -> Result<RingServer, BackendError> {
    let name = plan.server_name(&format!("ring{daemon}"));
    let (slots, clients) = (plan.job.sizes.ring_slots, plan.job.topology.clients);
    RingServer::bind_with(&plan.dir, &name, slots, clients, plan.depth(), TYPE_TAG)
        .or_setup(format!("the delegation ring of daemon {daemon}"))
}

/// Answers a client that called this server; sends an error if there is no response. A client that
/// has ended needs no answer.
#[inline(always)]
fn answer_client<W: ipc::Announce>(
    server: &mut ipc::Server<Request, Response, W>,
    token: ipc::Token,
    response: Option<Response>,
) {
    match response {
        Some(response) => drop(server.reply(token, response)),
        None => drop(server.refuse(token)),
    }
}

fn answer_daemon(shards: &mut Shards<Waiting>, token: flux::Token, hop: Hop) {
    // No error matters: a daemon that has ended needs no answer, and the token cannot be of another
    // node, because this node received it.
    drop(shards.node.reply(token, hop));
}

impl Endpoints for KvDaemon {
    fn remote(&mut self) -> Option<&mut dyn Endpoints> {
        self.remote
            .as_mut()
            .map(|remote| remote as &mut dyn Endpoints)
    }

    fn transport(&mut self) -> Option<TransportReport> {
        let backlogged = self.backlogged();
        let backlog_peak = std::mem::replace(&mut self.backlog_peak, backlogged) as u64;
        let report = self.remote.as_mut()?.transport()?;
        Some(TransportReport {
            backlog_peak: report.backlog_peak.max(backlog_peak),
            ..report
        })
    }
}

impl Sleeper for KvDaemon {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        // Requests that wait for room are sent only in steps, and held answers are due sooner than
        // a timer would wake the thread. So the daemon does not sleep.
        if self.backlogged() > 0 || !self.held.is_empty() {
            return then(&mut Due::now());
        }
        let remote = self
            .remote
            .as_mut()
            .map(|remote| remote as &mut dyn Sleeper);
        sleep::join(self.local.sleepers().chain(remote), then);
    }
}

impl Restful for KvDaemon {
    fn rest(&mut self, waker: &Waker) -> Option<Duration> {
        // Another daemon of the rank that makes room in its channel does not wake this daemon. A
        // round that takes no requests has not tried to send those of the backlog.
        let waiting = if self.policy.plan().takes_requests {
            self.local.shards.backlogged()
        } else {
            self.backlogged()
        };
        if waiting + self.held.len() > 0 || self.polls > 0 {
            return None;
        }
        let remote = self.remote.as_mut();
        let remote = remote.map_or(Some(Duration::MAX), Remote::rest)?;
        Some(remote.min(sleep::rest(self.local.sleepers(), waker)?))
    }
}

impl Daemon for KvDaemon {
    fn step(&mut self, now_ns: impl FnOnce() -> u64) -> Result<Round, BackendError> {
        if self.polls == 0 && self.policy.needs_time() {
            self.begin(now_ns());
        }
        self.round()
    }

    fn gauges(&self) -> Sample {
        let remote = self.remote.as_ref();
        Sample {
            outstanding: self.outstanding() as u64,
            backlog: self.backlogged() as u64,
            held: self.held.len() as u64,
            hold_ns: self.policy.hold_ns(),
            ..remote.map_or_else(Sample::default, Remote::counters)
        }
    }

    fn by_endpoint(&self, values: &mut Vec<u32>) {
        let missing = self.remote.iter().flat_map(Remote::by_endpoint);
        values.extend(missing.map(|missing| missing as u32));
    }

    fn policy(&self) -> Option<PolicyReport> {
        self.policy.report()
    }
}

#[cfg(test)]
mod tests;
