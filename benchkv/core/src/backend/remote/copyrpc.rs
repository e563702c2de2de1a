//! Requests carried by copyrpc: batches of them, written into the peer's ring.

use std::time::Duration;

use copyrpc::{CallError, CallFailure, Context, ContextBuilder, Endpoint, EndpointConfig, ExchangeRecord, PendingEndpoint};
use mlx5::Device;
use shm::sleep::{Sleeper, Watch};
use zerocopy::IntoBytes;

use super::super::BackendError;
use super::super::plan::Plan;
use super::{Polled, SendError};
use crate::counters::TransportReport;
use crate::message::{Request, Response};
use crate::topology::{Peer, Routing};
use crate::trace::Sample;

/// Batches in flight of a connection that carries those of one client only, at least.
const FEWEST_BATCHES: u32 = 4;

/// Receives that devices have in one queue, which each batch in flight takes one and a half of.
const MOST_RECEIVES: usize = 32_767;

/// What all `connections` of a thread are.
fn config(plan: &Plan, connections: usize) -> EndpointConfig {
    let default = EndpointConfig { ring_size: plan.ring_bytes, window: plan.policies.batch_window.window(), ..EndpointConfig::default() };
    match plan.topology.routing {
        // One client's operations: requests this way and their answers that way are no more batches than that, and a daemon has very many of
        // these connections, whose receives are in one queue. No use is made of one-sided operations.
        Routing::Direct => {
            let room = (MOST_RECEIVES * 2 / 3 / connections.max(1)) as u32;
            let batches = room.min(plan.depth as u32).clamp(FEWEST_BATCHES, default.batches_in_flight);
            EndpointConfig { batches_in_flight: batches, raw_operations: 0, ..default }
        }
        Routing::Meta | Routing::Delegation | Routing::Sharded => EndpointConfig { raw_operations: 0, ..default },
    }
}

/// A request of another rank. Dropped, it answers with an error.
pub(super) type Handle<C> = copyrpc::RecvHandle<C>;

/// A copyrpc context and its endpoints.
pub(super) struct Links<C> {
    context: Context<C>,
    links: Vec<Link<C>>,
    /// A peer that leaves in order ends calls before the connection.
    has_lost_calls: bool,
}

struct Link<C> {
    peer: Peer,
    end: End<C>,
}

enum End<C> {
    Pending(PendingEndpoint<C>),
    Connected(Endpoint<C>),
    /// Connecting failed; the daemon ends.
    Broken,
}

impl<C> Links<C> {
    pub(super) fn open(plan: &Plan, peers: &[Peer], device: Device) -> Result<Self, BackendError> {
        let config = config(plan, peers.len());
        let context = ContextBuilder::new(plan.device.clone()).endpoints_with(peers.len() as u32, &config).build_on(device);
        let context: Context<C> = context.map_err(|e| BackendError::setup("the RDMA context", e))?;
        let link = |peer: &Peer| match context.create_endpoint(&config) {
            Ok(pending) => Ok(Link { peer: *peer, end: End::Pending(pending) }),
            Err(error) => Err(BackendError::setup(format!("the endpoint to {peer}"), error)),
        };
        let links = peers.iter().map(link).collect::<Result<_, _>>()?;
        Ok(Self { context, links, has_lost_calls: false })
    }

    pub(super) fn record(&self, link: usize) -> Option<Vec<u8>> {
        match &self.links.get(link)?.end {
            End::Pending(pending) => Some(pending.local_info().encode().to_vec()),
            End::Connected(_) | End::Broken => None,
        }
    }

    pub(super) fn connect(&mut self, link: usize, record: &[u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let record = record.try_into().map_err(|_| "its record has another length")?;
        let record = ExchangeRecord::decode(record)?;
        let link = self.links.get_mut(link).ok_or("there is no endpoint for it")?;
        let End::Pending(pending) = std::mem::replace(&mut link.end, End::Broken) else {
            return Err("it is connected already".into());
        };
        link.end = End::Connected(pending.connect(&record).map_err(|e| e.reason)?);
        Ok(())
    }

    #[inline]
    pub(super) fn send(&mut self, link: usize, request: &Request, whom: C) -> Result<(), SendError<C>> {
        let Some(Link { peer, end: End::Connected(endpoint) }) = self.links.get(link) else { return Err(SendError::Full(whom)) };
        match endpoint.call(request.as_bytes(), whom, size_of::<Response>()) {
            Ok(_) => Ok(()),
            Err(CallError::RingFull(whom) | CallError::InsufficientCredit(whom)) => Err(SendError::Full(whom)),
            Err(CallError::Closed { reason, .. }) => {
                Err(SendError::Down(BackendError::PeerGone { rank: peer.rank, how: reason.to_string() }))
            }
            Err(error) => Err(SendError::Down(BackendError::transport("a call to another rank", error.to_string()))),
        }
    }

    pub(super) fn poll(&mut self, mut answer: impl FnMut(C, Option<Response>)) -> Result<Polled, BackendError> {
        let (mut has_lost_calls, mut answers) = (self.has_lost_calls, 0);
        let drained = self.context.drain(|whom, outcome| {
            answers += 1;
            has_lost_calls |= matches!(outcome, Err(CallFailure::Closed(_)));
            // A response of another length is no response.
            answer(whom, outcome.ok().filter(|bytes| bytes.len() == size_of::<Response>()).and_then(|bytes| bytes.read()));
        });
        let cqes = drained.map_err(|e| BackendError::transport("the RDMA context", e))?;
        self.has_lost_calls = has_lost_calls;
        if has_lost_calls {
            self.links.iter().try_for_each(Link::check)?;
        }
        Ok(Polled { answers, cqes })
    }

    pub(super) fn recv(&self) -> Option<(Option<Request>, Handle<C>)> {
        let handle = self.context.recv()?;
        let bytes = handle.data();
        let request = if bytes.len() == size_of::<Request>() { bytes.read() } else { None };
        Some((request, handle))
    }

    pub(super) fn flush(&self) -> Result<(), BackendError> {
        self.context.flush_endpoints().map_err(|e| BackendError::transport("the RDMA context", e))
    }

    pub(super) fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.context.with_watch(then);
    }

    pub(super) fn has_work(&self) -> bool {
        self.context.has_work()
    }

    pub(super) fn abort(&self) {
        for link in &self.links {
            if let End::Connected(endpoint) = &link.end {
                endpoint.abort();
            }
        }
    }

    /// See [`Remote::rest`](super::Remote::rest).
    pub(super) fn rest(&self) -> Option<Duration> {
        self.context.idle_for()
    }

    pub(super) fn counters(&self) -> Sample {
        let stats = self.context.stats();
        let (messages, writes, window_stalls) = (stats.messages_sent, stats.batches_sent, stats.window_stalls);
        Sample { messages, writes, window_stalls, ..Sample::default() }
    }

    pub(super) fn report(&self) -> TransportReport {
        let (info, stats) = (self.context.device_info(), self.context.stats());
        TransportReport {
            device: info.name,
            modes: info.modes,
            reached_by: info.transport,
            writes: stats.batches_sent,
            messages: stats.messages_sent,
            reads: stats.reads,
            waits: stats.ring_full + stats.insufficient_credit,
            credit_waits: stats.insufficient_credit,
            window_stalls: stats.window_stalls,
            rnr_naks: info.rnr_naks,
            backlog_peak: 0,
        }
    }
}

/// Answers a request. Whoever is gone needs no answer.
pub(super) fn answer<C>(handle: Handle<C>, response: Option<Response>) {
    match response {
        Some(response) => drop(handle.reply(response.as_bytes())),
        None => drop(handle.refuse()),
    }
}

impl<C> Link<C> {
    /// Whether the connection still stands.
    fn check(&self) -> Result<(), BackendError> {
        match &self.end {
            End::Connected(endpoint) => match endpoint.closed() {
                Some(reason) => Err(BackendError::PeerGone { rank: self.peer.rank, how: reason.to_string() }),
                None => Ok(()),
            },
            End::Pending(_) | End::Broken => Ok(()),
        }
    }
}
