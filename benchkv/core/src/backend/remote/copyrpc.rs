//! Requests carried by copyrpc, which writes batches of requests into the peer's ring.

use std::time::Duration;

use copyrpc::{
    CallError, CallFailure, CallToken, CloseReason, Context, ContextBuilder, Endpoint,
    EndpointConfig, ExchangeRecord, PendingEndpoint, RecvBytes, RecvHandle, Reply, Stats,
};
use copyrpc_shm::sleep::{Due, POLL_SLICE, Sleeper, Watch};
use zerocopy::{FromBytes, IntoBytes};

use super::super::plan::{RankPlan, ThreadDevice};
use super::super::{BackendError, OrSetup};
use super::{Counter, LinkSet, Polled, Refused, SendError};
use crate::carrier::Feature;
use crate::counters::TransportReport;
use crate::message::{Request, Response};
use crate::topology::{Backend, Peer};
use crate::values::{Values, copy};

/// Maximum time, in ns of the device's clock, that this end waits after a peer has closed its
/// connection. In this time another connection can report the cause.
const CAUSE_NS: u64 = 500_000_000;

/// Lower bound of the batches in flight that the shared receive queue leaves to a connection of one
/// client, however many connections share the queue.
const FEWEST_BATCHES: u32 = 4;

/// Maximum number of receives that devices permit in one queue. Each batch in flight takes one and
/// a half receives.
const MOST_RECEIVES: usize = 32_767;

fn config(plan: &RankPlan, connections: usize) -> EndpointConfig {
    let job = &plan.job;
    let mut config = EndpointConfig {
        ring_size: job.sizes.ring_bytes,
        window: job.policies.batch_window.window(),
        // One-sided operations are not used.
        raw_operations: 0,
        ..EndpointConfig::default()
    };
    if let Some(batches) = job.policies.batches_in_flight {
        config.batches_in_flight = batches;
        // Many small batches can be in flight, so the send queue has room for the WQEs of all of
        // them.
        config.max_send_wr = Some((4 * batches).max(256));
    }
    // With the backend `direct` a connection carries the operations of one client: requests in one
    // direction, answers in the other direction. So a connection has at most as many batches in
    // flight as the client has operations. A daemon has many such connections, and all their
    // receives are in one queue.
    if job.topology.backend == Backend::Direct {
        let room = (MOST_RECEIVES * 2 / 3 / connections.max(1)) as u32;
        let batches = room.min(plan.depth() as u32).max(FEWEST_BATCHES);
        config.batches_in_flight = config.batches_in_flight.min(batches);
    }
    config
}

pub(super) struct Links<C> {
    context: Context<C>,
    links: Vec<Link<C>>,
    /// Whether a call was lost with its connection or at its peer, or could not be made because the
    /// peer has closed. From then on each poll checks the connections, because a connection may be
    /// reported as closed later than its calls end.
    has_lost_calls: bool,
    /// Time at which a connection was first found closed by its peer, by the device's clock, in ns.
    left_ns: Option<u64>,
    values: Values,
    /// Buffer for a message with the tail of a value, if values have tails.
    message: Vec<u8>,
    /// Buffer for a request that is answered upon its arrival, with the tail of its value.
    asked: Vec<u8>,
}

struct Link<C> {
    peer: Peer,
    /// Connection that is being set up; `None` once the link is connected or has failed to connect.
    pending: Option<PendingEndpoint<C>>,
    endpoint: Option<Endpoint<C>>,
}

impl<C> LinkSet<C> for Links<C> {
    /// Handle that answers with an error when it is dropped.
    type Handle = RecvHandle<C>;

    fn open(
        plan: &RankPlan,
        peers: &[Peer],
        device: &ThreadDevice<'_>,
    ) -> Result<Self, BackendError> {
        let config = config(plan, peers.len());
        let builder = ContextBuilder::new(device.spec.clone())
            .endpoints_with(peers.len() as u32, &config)
            .cqe_compression(plan.has(Feature::CqeCompression))
            .blueflame_batch(plan.has(Feature::BlueflameBatch));
        let context = builder.build_on(device.open()?);
        let context: Context<C> = context.or_setup("the RDMA context")?;
        let link = |peer: &Peer| -> Result<_, BackendError> {
            let pending = context.create_endpoint(&config);
            Ok(Link {
                peer: *peer,
                pending: Some(pending.or_setup(format!("the endpoint to {peer}"))?),
                endpoint: None,
            })
        };
        let links = peers.iter().map(link).collect::<Result<_, _>>()?;
        let message = vec![0; size_of::<Request>() + plan.values.tail_bytes()];
        Ok(Self {
            context,
            links,
            has_lost_calls: false,
            left_ns: None,
            values: plan.values.clone(),
            asked: message.clone(),
            message,
        })
    }

    fn record(&self, link: usize) -> Option<Vec<u8>> {
        let pending = self.links.get(link)?.pending.as_ref()?;
        Some(pending.local_info().encode().to_vec())
    }

    fn connect(&mut self, link: usize, record: &[u8]) -> Result<(), Refused> {
        let record = record
            .try_into()
            .map_err(|_| "its record has another length")?;
        let record = ExchangeRecord::decode(record)?;
        let link = self.links.get_mut(link);
        let link = link.ok_or("there is no endpoint for it")?;
        let pending = link.pending.take().ok_or("it is connected already")?;
        link.endpoint = Some(pending.connect(&record)?);
        Ok(())
    }

    #[inline(always)]
    fn send(&mut self, link: usize, request: &Request, whom: C) -> Result<(), SendError<C>> {
        let Some(Link {
            peer,
            endpoint: Some(endpoint),
            ..
        }) = self.links.get(link)
        else {
            return Err(SendError::Full(whom));
        };
        // Without tails, all lengths are constants, which shortens the code of the call. Each result
        // has a `match` of its own, so that it does not go through memory.
        let lost = &mut self.has_lost_calls;
        if self.values.tail_bytes() == 0 {
            return match endpoint.call(request.as_bytes(), whom, size_of::<Response>()) {
                Ok(_) => Ok(()),
                Err(error) => Err(refused(error, peer, lost)),
            };
        }
        match call_with_tail(endpoint, request, whom, &self.values, &mut self.message) {
            Ok(_) => Ok(()),
            Err(error) => Err(refused(error, peer, lost)),
        }
    }

    fn poll(
        &mut self,
        mut answer: impl FnMut(C, Option<Response>, &[u8]),
        mut serve: impl FnMut(&Request, &mut [u8]) -> Option<Response>,
        mut keep: impl FnMut(Request, &[u8], RecvHandle<C>),
    ) -> Result<Polled, BackendError> {
        let (mut has_lost_calls, mut answers) = (self.has_lost_calls, 0);
        let (message, asked) = (&mut self.message, &mut self.asked);
        let tail_bytes = self.values.tail_bytes();
        let on_request = |bytes: RecvBytes<'_>, reply: Reply<'_, C>| {
            let behind = |request: &Request| request.bytes_behind(tail_bytes);
            let (request, tail) = match tail_bytes {
                0 => (exactly(bytes), &mut [][..]),
                _ => {
                    let request = split(bytes, asked, behind).0;
                    let tail = asked.get_mut(size_of::<Request>()..);
                    (request, tail.unwrap_or_default())
                }
            };
            // Bytes of any other length are not a request, and are refused.
            let Some(request) = request else {
                return drop(reply.refuse());
            };
            match serve(&request, tail) {
                Some(response) if response.bytes_behind(tail_bytes) == 0 => {
                    drop(reply.send(response.as_bytes()));
                }
                Some(response) => reply_with_tail(reply, &response, asked),
                None => {
                    let behind = request.bytes_behind(tail_bytes);
                    keep(
                        request,
                        tail.get(..behind).unwrap_or_default(),
                        reply.hold(),
                    );
                }
            }
        };
        let drained = self.context.drain_serving(on_request, |whom, outcome| {
            answers += 1;
            // Bytes of any other length are not a response, and the call fails.
            let (response, tail) = match outcome {
                Ok(bytes) if tail_bytes == 0 => (exactly(bytes), &[][..]),
                Ok(bytes) => split(bytes, message, |response: &Response| {
                    response.bytes_behind(tail_bytes)
                }),
                Err(failure) => {
                    has_lost_calls |= is_lost(failure);
                    (None, &[][..])
                }
            };
            answer(whom, response, tail);
        });
        let cqes = drained.map_err(|e| BackendError::transport("the RDMA context", e))?;
        self.has_lost_calls = has_lost_calls;
        if has_lost_calls {
            self.check()?;
        }
        Ok(Polled { answers, cqes })
    }

    #[inline]
    fn answer(&mut self, handle: RecvHandle<C>, response: Option<Response>, tail: &[u8]) {
        let Some(response) = response else {
            return drop(handle.refuse());
        };
        if response.bytes_behind(tail.len()) == 0 {
            return drop(handle.reply(response.as_bytes()));
        }
        let fill = |to: &mut [u8]| copy(to, tail);
        drop(handle.reply(with_tail(response.as_bytes(), &mut self.message, fill)));
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.context
            .flush_endpoints()
            .map_err(|e| BackendError::transport("the RDMA context", e))
    }

    fn suspend_windows(&mut self, is_suspended: bool) {
        for (_, endpoint) in self.connected() {
            endpoint.suspend_window(is_suspended);
        }
    }

    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        match self.left_ns {
            None => self.context.with_watch(then),
            Some(_) => then(&mut Due(POLL_SLICE)),
        }
    }

    fn has_work(&self) -> bool {
        self.context.has_work()
    }

    fn abort(&mut self) {
        for (_, endpoint) in self.connected() {
            endpoint.abort();
        }
    }

    fn missing(&self, link: usize) -> usize {
        let endpoint = self.links.get(link).and_then(|link| link.endpoint.as_ref());
        endpoint.map_or(0, Endpoint::outstanding_calls)
    }

    fn credit_used(&self) -> Vec<(Peer, [u64; 2])> {
        self.connected()
            .map(|(peer, endpoint)| (*peer, endpoint.credit_used().into()))
            .collect()
    }

    fn rest(&mut self) -> Option<Duration> {
        let rest = self.context.idle_for()?;
        Some(if self.left_ns.is_some() {
            rest.min(POLL_SLICE)
        } else {
            rest
        })
    }

    type Stats = Stats;

    const COUNTERS: &'static [Counter<Stats>] = &[
        ("writes", |stats| stats.batches_sent),
        ("messages", |stats| stats.messages_sent),
        ("reads", |stats| stats.reads),
        ("waits", |stats| stats.ring_full + stats.insufficient_credit),
        ("credit_waits", |stats| stats.insufficient_credit),
        ("window_stalls", |stats| stats.window_stalls),
        ("blueflame_batches", |stats| stats.blueflame_batches),
    ];

    fn stats(&self) -> Stats {
        self.context.stats()
    }

    fn report(&self) -> TransportReport {
        TransportReport::on(self.context.device())
    }
}

/// Converts the error of a call. Sets `has_lost_calls` if the peer has closed the connection: the
/// request then waits, like a request without room, and the polls determine why the peer closed.
#[cold]
fn refused<C>(error: CallError<C>, peer: &Peer, has_lost_calls: &mut bool) -> SendError<C> {
    match error {
        CallError::RingFull(whom) | CallError::InsufficientCredit(whom) => SendError::Full(whom),
        CallError::Closed {
            reason: CloseReason::ClosedByPeer,
            user_data,
            ..
        } => {
            *has_lost_calls = true;
            SendError::Full(user_data)
        }
        CallError::Closed { reason, .. } => SendError::Down(BackendError::gone(peer, reason)),
        error => {
            let (what, error) = ("a call to another rank", error.to_string());
            SendError::Down(BackendError::transport(what, error))
        }
    }
}

/// Writes `head`, and the tail of a value through `fill`, to the end of `message`, and returns
/// both. The length of `message` must be the length of a request (the longest head) plus the length
/// of a tail.
fn with_tail<'a>(head: &[u8], message: &'a mut [u8], fill: impl FnOnce(&mut [u8])) -> &'a [u8] {
    let surplus = size_of::<Request>() - head.len();
    let message = message.get_mut(surplus..).unwrap_or_default();
    let Some((to, tail)) = message.split_at_mut_checked(head.len()) else {
        return &[];
    };
    to.copy_from_slice(head);
    fill(tail);
    message
}

/// Sends a request to a store whose values have tails: a put with the tail, and a get with room for
/// the tail in its answer.
#[inline(never)]
fn call_with_tail<C>(
    endpoint: &Endpoint<C>,
    request: &Request,
    whom: C,
    values: &Values,
    message: &mut [u8],
) -> Result<CallToken, CallError<C>> {
    let (bytes, answer_bytes) = if request.is_put() {
        let fill = |tail: &mut [u8]| values.read(request.place(), tail);
        let message = with_tail(request.as_bytes(), message, fill);
        (message, size_of::<Response>())
    } else {
        let answer_bytes = size_of::<Response>() + values.tail_bytes();
        (request.as_bytes(), answer_bytes)
    };
    endpoint.call(bytes, whom, answer_bytes)
}

/// Answers a get that has found a value whose tail is at the end of `message`.
#[inline(never)]
fn reply_with_tail<C>(reply: Reply<'_, C>, response: &Response, message: &mut [u8]) {
    drop(reply.send(with_tail(response.as_bytes(), message, |_| ())));
}

/// Returns whether the call of this failure was lost with its connection or at its peer.
#[cold]
const fn is_lost(failure: CallFailure) -> bool {
    matches!(
        failure,
        CallFailure::Closed(_) | CallFailure::NotSent | CallFailure::Dropped
    )
}

/// Decodes a peer's bytes. Returns `None` unless they have the exact length of the type.
#[inline]
fn exactly<Head: FromBytes + IntoBytes>(bytes: RecvBytes<'_>) -> Option<Head> {
    if bytes.len() == size_of::<Head>() {
        bytes.read()
    } else {
        None
    }
}

/// Decodes the head of a peer's bytes, and returns it with the tail that follows. The returned head
/// is `None` if the tail does not have the length that `behind` returns.
#[inline(never)]
fn split<'a, Head: FromBytes + IntoBytes>(
    bytes: RecvBytes<'_>,
    message: &'a mut [u8],
    behind: impl FnOnce(&Head) -> usize,
) -> (Option<Head>, &'a [u8]) {
    let head = bytes.read();
    let head = head.filter(|head| bytes.len() == size_of::<Head>() + behind(head));
    let copied = head.as_ref().map_or(0, |_| bytes.copy_to(message));
    let tail = message.get(size_of::<Head>()..copied);
    (head, tail.unwrap_or_default())
}

impl<C> Links<C> {
    fn connected(&self) -> impl Iterator<Item = (&Peer, &Endpoint<C>)> {
        let links = self.links.iter();
        links.filter_map(|link| Some((&link.peer, link.endpoint.as_ref()?)))
    }

    /// Returns an error if a connection is down. A peer that closes a connection while the job runs
    /// does so because another part of the job failed, most often another peer. So this end waits
    /// up to [`CAUSE_NS`] for a connection that reports the cause, before it returns an error for
    /// the peer that closed.
    fn check(&mut self) -> Result<(), BackendError> {
        let mut left = None;
        for (peer, endpoint) in self.connected() {
            let Some(reason) = endpoint.closed() else {
                continue;
            };
            let gone = BackendError::gone(peer, reason);
            if reason != CloseReason::ClosedByPeer {
                return Err(gone);
            }
            left.get_or_insert(gone);
        }
        let Some(left) = left else { return Ok(()) };
        let now_ns = self.context.device().now_ns();
        if now_ns.saturating_sub(*self.left_ns.get_or_insert(now_ns)) < CAUSE_NS {
            Ok(())
        } else {
            Err(left)
        }
    }
}
