//! Requests carried by SEND: one message, one receive, one completion each. The baseline for
//! copyrpc's batches in rings.
//!
//! No credits travel. Each end keeps a receive posted for every request and every answer that the
//! peer may have under way, a window of each, and posts it again before it answers the message in
//! it. A message that finds no room in the send queue waits: a request in the backlog, an answer
//! here.

use std::collections::VecDeque;
use std::time::Duration;

use copyrpc_shm::sleep::{self, Due, Look, Sleeper, Watch};
use mlx5::{
    Access, ConnectOptions, Cq, CqConfig, Cqe, Device, Inline, MonoCq, Mr, OutOfBounds, PostError,
    QpAddress, QpConfig, RcQp, ReceiveSource, Send, Signal, Write,
};
use thiserror::Error;

use super::super::BackendError;
use super::super::plan::{RankPlan, ThreadDevice};
use super::dialogue::{Arrival, Dialogue};
use super::frame::{Frame, FrameBytes};
use super::{Counter, LinkSet, Polled, SendError, Ticket};
use crate::carrier::Feature;
use crate::counters::TransportReport;
use crate::message::{Request, Response};
use crate::topology::Peer;
use crate::values::Values;

/// Returns the bytes of a receive: a message with a tail, which shares no cache line with another
/// receive.
const fn receive_bytes(tail_bytes: usize) -> usize {
    (Frame::MAX_BYTES + tail_bytes).next_multiple_of(64)
}
/// Maximum number of completions that one poll takes from each queue.
const POLL_BUDGET: usize = 256;
/// Silence after which a peer that owes an answer is probed, with a WRITE of no bytes. Its device
/// answers the WRITE without its CPU; for a dead peer the WRITE fails.
const PROBE_AFTER: Duration = Duration::from_millis(100);
/// Number of polls between two readings of the clock.
const POLLS_PER_LOOK: u32 = 64;
/// User words in the send queue: of a probe, of a message, and of a message with a tail, which is
/// this plus the place of the tail.
const PROBE: u64 = 1;
const MESSAGE: u64 = 0;
const WITH_TAIL: u64 = 2;

/// A device with a queue pair for each peer, and one queue each for all their completions.
pub(super) struct Links<C> {
    device: Device,
    send_cq: Cq,
    recv_cq: MonoCq<usize>,
    links: Vec<Link<C>>,
    receives: Receives,
    /// Memory from which devices read the tails of values that are sent; `None` if values have
    /// none.
    tails: Option<Mr>,
    values: Values,
    /// A message, if values have tails.
    message: Vec<u8>,
    /// Links with something to post or to ring.
    unflushed: Vec<usize>,
    polls: u32,
    counters: Counters,
}

/// Why a message was not posted.
#[derive(Debug, Error)]
enum Unposted {
    #[error(transparent)]
    Queue(#[from] PostError),
    /// Its tail has no memory: it can never be posted.
    #[error("the tail of a message: {0}")]
    Tail(#[from] OutOfBounds),
}

/// The memory of all receives: those of a link are adjacent.
struct Receives {
    region: Mr,
    per_link: usize,
    /// Bytes of each receive.
    bytes: usize,
}

/// Number of SENDs, and of messages that found no room.
#[derive(Clone, Copy, Default)]
pub(super) struct Counters {
    sends: u64,
    waits: u64,
    /// Messages that arrived in their CQEs.
    scattered: u64,
}

struct Link<C> {
    peer: Peer,
    qp: RcQp,
    dialogue: Dialogue<C>,
    /// Answers that found no room in the send queue, each with the tail of a value.
    answers: VecDeque<(FrameBytes, Box<[u8]>)>,
    /// Places in [`Links::tails`] that no SEND reads.
    places: Vec<u32>,
    is_unflushed: bool,
    /// Why the link is unusable.
    failure: Option<String>,
    pulse: Pulse,
}

/// The check whether a silent peer lives.
struct Pulse {
    was_heard: bool,
    /// Time of the last message, in ns of the device's clock.
    heard_ns: u64,
    is_probing: bool,
}

impl<C> LinkSet<C> for Links<C> {
    type Handle = Ticket;

    fn open(
        plan: &RankPlan,
        peers: &[Peer],
        device: &ThreadDevice<'_>,
    ) -> Result<Self, BackendError> {
        let device = device.open()?;
        let pd = device
            .alloc_pd()
            .map_err(|e| BackendError::setup("a protection domain", e))?;
        let per_link = 2 * plan.window;
        // At most one completion for each WQE, and for each receive; receives that are posted again
        // while a poll takes others need places of their own.
        let completions = (per_link * peers.len()) as u32;
        let send_cq = device
            .create_cq(completions)
            .map_err(|e| BackendError::setup("the send completion queue", e))?;
        let recv_cq = CqConfig {
            cqe_bytes: if plan.has(Feature::ScatterToCqe) {
                128
            } else {
                64
            },
            compression: plan.has(Feature::CqeCompression),
            ..CqConfig::from(completions + POLL_BUDGET as u32)
        };
        let recv_cq = device.create_mono_cq(recv_cq);
        let mut recv_cq =
            recv_cq.map_err(|e| BackendError::setup("the receive completion queue", e))?;
        let (tail_bytes, messages) = (plan.values.tail_bytes(), per_link * peers.len());
        let bytes = receive_bytes(tail_bytes);
        let region = pd
            .alloc(messages * bytes, Access::LOCAL_WRITE)
            .map_err(|e| BackendError::setup("the memory of the receives", e))?;
        let receives = Receives {
            region,
            per_link,
            bytes,
        };
        let tails = (tail_bytes > 0)
            .then(|| pd.alloc(messages * tail_bytes, Access::LOCAL_WRITE))
            .transpose();
        let tails =
            tails.map_err(|e| BackendError::setup("the memory of values that are sent", e))?;
        // With a tail a message takes two entries.
        let entries = per_link * (1 + usize::from(tail_bytes > 0));
        let config = QpConfig {
            max_send_wr: entries as u32,
            max_inline_data: Frame::MAX_BYTES,
            scatter_to_cqe: plan.has(Feature::ScatterToCqe),
            ..QpConfig::default()
        };
        let own = ReceiveSource::Own {
            depth: per_link as u32,
            max_sge: 1,
        };
        let mut links = Vec::with_capacity(peers.len());
        for (number, peer) in peers.iter().enumerate() {
            let what = || format!("the queue pair to {peer}");
            let mut qp = pd
                .create_qp(&send_cq, &recv_cq, own, &config)
                .map_err(|e| BackendError::setup(what(), e))?;
            qp.initialize()
                .map_err(|e| BackendError::setup(what(), e))?;
            (0..per_link)
                .try_for_each(|place| receives.post(&mut qp, number, place))
                .map_err(|why| BackendError::setup(what(), why))?;
            qp.ring_receives();
            recv_cq.register(qp.qpn(), number);
            let dialogue = Dialogue::new(plan.window, tail_bytes);
            let first = (number * per_link) as u32;
            let places = if tails.is_some() {
                (first..first + per_link as u32).collect()
            } else {
                Vec::new()
            };
            links.push(Link::new(*peer, qp, dialogue, places, device.now_ns()));
        }
        let unflushed = Vec::with_capacity(links.len());
        let (values, message) = (plan.values.clone(), vec![0; bytes]);
        let counters = Counters::default();
        Ok(Self {
            device,
            send_cq,
            recv_cq,
            links,
            receives,
            tails,
            values,
            message,
            unflushed,
            polls: 0,
            counters,
        })
    }

    fn record(&self, link: usize) -> Option<Vec<u8>> {
        Some(self.links.get(link)?.qp.address().to_bytes().to_vec())
    }

    fn connect(
        &mut self,
        link: usize,
        record: &[u8],
    ) -> Result<(), Box<dyn std::error::Error + std::marker::Send + Sync>> {
        let link = self
            .links
            .get_mut(link)
            .ok_or("there is no queue pair for it")?;
        let address = record
            .try_into()
            .ok()
            .and_then(QpAddress::from_bytes)
            .ok_or("its record is not the address of a queue pair")?;
        Ok(link.qp.connect(&address, &ConnectOptions::default())?)
    }

    #[inline]
    fn send(&mut self, link: usize, request: &Request, whom: C) -> Result<(), SendError<C>> {
        let Self {
            links,
            counters,
            unflushed,
            tails,
            values,
            message: scratch,
            ..
        } = self;
        let Some((number, link)) = links.get_mut(link).map(|found| (link, found)) else {
            return Err(SendError::Full(whom));
        };
        let (call, message) = match link.dialogue.call(request, whom) {
            Ok(message) => message,
            Err(whom) => {
                counters.waits += 1;
                return Err(SendError::Full(whom));
            }
        };
        let tail = scratch
            .get_mut(..request.bytes_behind(values.tail_bytes()))
            .unwrap_or_default();
        values.read(request.place(), tail);
        match link.post(&message, tail, tails.as_ref()) {
            Ok(()) => {
                counters.sends += 1;
                link.note_unflushed(number, unflushed);
                Ok(())
            }
            Err(Unposted::Queue(PostError::QueueFull { .. })) => {
                counters.waits += 1;
                match link.dialogue.take_back(call) {
                    Some(whom) => Err(SendError::Full(whom)),
                    None => Ok(()),
                }
            }
            Err(error) => Err(SendError::Down(BackendError::gone(&link.peer, error))),
        }
    }

    fn poll(
        &mut self,
        mut answer: impl FnMut(C, Option<Response>, &[u8]),
        _serve: impl FnMut(&Request, &mut [u8]) -> Option<Response>,
        mut keep: impl FnMut(Request, &[u8], Ticket),
    ) -> Result<Polled, BackendError> {
        let Self {
            recv_cq,
            send_cq,
            links,
            receives,
            message,
            counters,
            ..
        } = self;
        let (mut answers, mut has_failed) = (0, false);
        let mut cqes = recv_cq.poll(POLL_BUDGET, |number, cqe| {
            let Some((number, link)) =
                number.and_then(|number| Some((*number, links.get_mut(*number)?)))
            else {
                return;
            };
            match link.receive(number, receives, &cqe, message, &mut counters.scattered) {
                Ok((Arrival::Answer(whom, response), tail)) => {
                    answers += 1;
                    answer(whom, response, tail);
                }
                Ok((Arrival::Request(request, call), tail)) => {
                    keep(request, tail, Ticket { link: number, call })
                }
                Err(why) => {
                    link.failure.get_or_insert(why);
                    has_failed = true;
                }
            }
        });
        if send_cq.has_completion() {
            cqes += send_cq.poll(POLL_BUDGET, |cqe| {
                let number = recv_cq.queues().get(cqe.qpn()).copied();
                let Some(link) = number.and_then(|number| links.get_mut(number)) else {
                    return;
                };
                has_failed |= !link.complete(&cqe);
            });
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls % POLLS_PER_LOOK == 0 {
            let now_ns = self.device.now_ns();
            self.links.iter_mut().for_each(|link| link.look(now_ns));
        }
        if has_failed {
            self.links.iter().try_for_each(Link::check)?;
        }
        Ok(Polled { answers, cqes })
    }

    fn answer(&mut self, ticket: Ticket, response: Option<Response>, tail: &[u8]) {
        let Some(link) = self.links.get_mut(ticket.link) else {
            return;
        };
        let behind = response.map_or(0, |response| {
            response.bytes_behind(self.values.tail_bytes())
        });
        let message = link.dialogue.answer(ticket.call, response);
        link.answers
            .push_back((message, tail.get(..behind).unwrap_or_default().into()));
        self.counters.sends += link.post_answers(self.tails.as_ref());
        link.note_unflushed(ticket.link, &mut self.unflushed);
    }

    /// Rings the doorbell of each queue pair once for all messages that a step has posted.
    fn flush(&mut self) -> Result<(), BackendError> {
        let Self {
            links,
            unflushed,
            counters,
            tails,
            ..
        } = self;
        let mut checked = Ok(());
        unflushed.retain(|number| {
            let Some(link) = links.get_mut(*number) else {
                return false;
            };
            counters.sends += link.post_answers(tails.as_ref());
            link.qp.ring();
            checked = std::mem::replace(&mut checked, Ok(())).and_then(|()| link.check());
            link.is_unflushed = !link.answers.is_empty();
            link.is_unflushed
        });
        checked
    }

    fn missing(&self, link: usize) -> usize {
        self.links
            .get(link)
            .map_or(0, |link| link.dialogue.missing())
    }

    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        // A flush sends answers that wait for room.
        if !self.unflushed.is_empty() {
            return then(&mut Due::now());
        }
        // A sleep is long enough for a peer to count as silent.
        self.polls = POLLS_PER_LOOK - 1;
        let Self {
            device,
            recv_cq,
            send_cq,
            ..
        } = self;
        let mut has_something = Look(|| recv_cq.has_completion() || send_cq.has_completion());
        sleep::join(
            [&mut &*device as &mut dyn Sleeper, &mut has_something],
            then,
        );
    }

    fn rest(&mut self) -> Option<Duration> {
        self.polls = POLLS_PER_LOOK - 1;
        (!self.has_work()).then_some(PROBE_AFTER)
    }

    fn has_work(&self) -> bool {
        self.recv_cq.has_completion() || self.send_cq.has_completion() || !self.unflushed.is_empty()
    }

    type Stats = Counters;

    const COUNTERS: &'static [Counter<Counters>] = &[
        ("writes", |counters| counters.sends),
        ("messages", |counters| counters.sends),
        ("waits", |counters| counters.waits),
        ("scattered", |counters| counters.scattered),
    ];

    fn stats(&self) -> Counters {
        self.counters
    }

    fn report(&self) -> TransportReport {
        TransportReport::on(&self.device)
    }
}

impl Receives {
    /// Posts the receive of this place among a link's. The queue has room for each place, so there
    /// is always room.
    #[inline]
    fn post(&self, qp: &mut RcQp, link: usize, place: usize) -> Result<(), String> {
        let sge = self
            .region
            .sge(self.offset(link, place), self.bytes as u32)
            .map_err(|e| e.to_string())?;
        qp.post_receive(&[sge], place as u64)
            .map_err(|e| e.to_string())
    }

    #[inline]
    fn offset(&self, link: usize, place: usize) -> usize {
        (link * self.per_link + place) * self.bytes
    }
}

impl<C> Link<C> {
    fn new(peer: Peer, qp: RcQp, dialogue: Dialogue<C>, places: Vec<u32>, now_ns: u64) -> Self {
        Self {
            peer,
            qp,
            dialogue,
            answers: VecDeque::new(),
            places,
            is_unflushed: false,
            failure: None,
            pulse: Pulse {
                was_heard: true,
                heard_ns: now_ns,
                is_probing: false,
            },
        }
    }

    /// Posts a message, with a tail after it if there is one.
    #[inline]
    fn post(
        &mut self,
        message: &FrameBytes,
        tail: &[u8],
        tails: Option<&Mr>,
    ) -> Result<(), Unposted> {
        let head = Inline(message.as_bytes());
        let Some(tails) = tails.filter(|_| !tail.is_empty()) else {
            return Ok(self
                .qp
                .post(&Send { payload: head }, Signal::Reclaim, MESSAGE)?);
        };
        // If there are fewer places than entries of the queue, the places run out first.
        let Some(&place) = self.places.last() else {
            return Err(PostError::QueueFull {
                free: 0,
                needed: 1,
                capacity: self.qp.send_capacity(),
            }
            .into());
        };
        let at = place as usize * tail.len();
        tails.write(at, tail)?;
        let payload = (head, tails.sge(at, tail.len() as u32)?);
        self.qp.post(
            &Send { payload },
            Signal::Reclaim,
            WITH_TAIL + u64::from(place),
        )?;
        self.places.pop();
        Ok(())
    }

    /// Copies the message of one receive to `message`, and posts the receive again.
    #[inline]
    fn receive<'a>(
        &mut self,
        number: usize,
        receives: &Receives,
        cqe: &Cqe<'_>,
        message: &'a mut [u8],
        scattered: &mut u64,
    ) -> Result<(Arrival<C>, &'a [u8]), String> {
        let place = self
            .qp
            .complete_receive(cqe)
            .ok_or("a receive completed that was not posted")? as usize;
        cqe.result().map_err(|error| error.to_string())?;
        let bytes = message
            .get_mut(..cqe.byte_count() as usize)
            .ok_or("it sent more bytes than a receive holds")?;
        match cqe.inline_data() {
            Some(data) => {
                bytes.copy_from_slice(data);
                *scattered += 1;
            }
            None => receives
                .region
                .read(receives.offset(number, place), bytes)
                .map_err(|error| error.to_string())?,
        }
        receives.post(&mut self.qp, number, place)?;
        self.qp.ring_receives();
        self.pulse.was_heard = true;
        self.dialogue
            .arrive(bytes)
            .map_err(|violation| violation.to_string())
    }

    /// Takes a completion of the send queue. Returns `false` if the link has failed.
    fn complete(&mut self, cqe: &Cqe<'_>) -> bool {
        let Self { pulse, places, .. } = self;
        self.qp.complete_each(cqe, |what| match what {
            MESSAGE => {}
            PROBE => (pulse.was_heard, pulse.is_probing) = (true, false),
            place => places.push((place - WITH_TAIL) as u32),
        });
        let Err(error) = cqe.result() else {
            return true;
        };
        self.failure.get_or_insert(error.to_string());
        false
    }

    /// Posts waiting answers, as long as there is room. Returns their number. A queue that fails
    /// shows as a completion.
    #[inline]
    fn post_answers(&mut self, tails: Option<&Mr>) -> u64 {
        let mut posted = 0;
        while let Some((message, tail)) = self.answers.pop_front() {
            match self.post(&message, &tail, tails) {
                Ok(()) => posted += 1,
                Err(Unposted::Queue(_)) => {
                    self.answers.push_front((message, tail));
                    break;
                }
                Err(lost) => _ = self.failure.get_or_insert(lost.to_string()),
            }
        }
        posted
    }

    #[inline]
    fn note_unflushed(&mut self, number: usize, unflushed: &mut Vec<usize>) {
        if !self.is_unflushed {
            self.is_unflushed = true;
            unflushed.push(number);
        }
    }

    /// Probes a peer that owes an answer and is silent.
    fn look(&mut self, now_ns: u64) {
        if std::mem::take(&mut self.pulse.was_heard) || self.dialogue.missing() == 0 {
            self.pulse.heard_ns = now_ns;
        } else if !self.pulse.is_probing
            && now_ns.saturating_sub(self.pulse.heard_ns) > PROBE_AFTER.as_nanos() as u64
        {
            // A WRITE of no bytes names no memory. If the queue is full, its operations prove as
            // much.
            let probe = Write {
                addr: 0,
                rkey: 0,
                payload: (),
            };
            self.pulse.is_probing = self.qp.post(&probe, Signal::Always, PROBE).is_ok();
            self.qp.ring();
        }
    }

    /// Checks whether the link is usable.
    fn check(&self) -> Result<(), BackendError> {
        self.failure
            .as_ref()
            .map_or(Ok(()), |why| Err(BackendError::gone(&self.peer, why)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{pair, pair_of};
    use super::super::{LinkSets, Remote};
    use super::*;
    use crate::message::Outcome;
    use crate::tests::Scratch;
    use crate::topology::Carrier;

    fn links(remote: &mut Remote<usize>) -> &mut Links<usize> {
        let LinkSets::RcSend(links) = &mut remote.links else {
            panic!("another carrier")
        };
        links
    }

    /// Sends `bytes` as an unsound peer. Returns the other end's error.
    fn forge(bytes: &[u8]) -> String {
        let scratch = Scratch::new();
        let [mut forging, mut taking] = pair(&scratch, Carrier::RcSend);
        let link = &mut links(&mut forging).links[0];
        link.qp
            .post(
                &Send {
                    payload: Inline(bytes),
                },
                Signal::Always,
                MESSAGE,
            )
            .unwrap();
        link.qp.ring();
        for _ in 0..1000 {
            if let Err(gone) = taking.poll(|_, _, _| (), |_, _| None) {
                assert!(matches!(gone, BackendError::PeerGone { rank: 0, .. }));
                return gone.to_string();
            }
        }
        panic!("it was taken for sound");
    }

    #[test]
    fn a_message_whose_tail_has_no_memory_ends_the_connection() {
        let scratch = Scratch::new();
        let [mut asking, mut answering] = pair_of(&scratch, Carrier::RcSend, [40, 40]);
        let get = Request::get(1, 1);
        asking.call(asking.link_for(&get).unwrap(), get, 0).unwrap();
        asking.flush().unwrap();
        let mut find = || {
            answering.poll(|_, _, _| (), |_, _| None).unwrap();
            answering.recv(&mut [0; 32])
        };
        let (_, incoming) = (0..1000).find_map(|_| find()).unwrap();
        for ends in [&mut asking, &mut answering] {
            links(ends).links[0].places = vec![u32::MAX];
        }
        answering.answer(
            incoming,
            Some(Response::new(Outcome::GetOk { value: 7 })),
            &[0; 32],
        );
        let error = answering.flush().unwrap_err().to_string();
        assert!(
            error.starts_with("rank 0 is lost: the tail of a message: "),
            "{error}"
        );
        let put = Request::put(1, 1, 7);
        let error = asking
            .call(asking.link_for(&put).unwrap(), put, 1)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("rank 1 is lost: the tail of a message: "),
            "{error}"
        );
    }

    #[test]
    fn what_is_no_message_ends_the_connection() {
        assert!(forge(&[1; 9]).ends_with("it sent 9 bytes that are not a message"));
        assert!(forge(&[]).ends_with("it sent 0 bytes that are not a message"));
        assert!(
            forge(&[[7, 0, 0, 0, 3, 0, 0, 0]].concat())
                .ends_with("it answered call 0x7, which does not wait for an answer")
        );
    }
}
