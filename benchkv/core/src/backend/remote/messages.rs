//! Carriers that send each message separately, so that each message takes one receive and one
//! completion. They are the baselines for copyrpc, which writes batches into rings.
//!
//! The carriers have no credits: each end keeps room for every request and every answer that the
//! peer may have under way, a window of each ([`Dialogue`]). A message that its [`Port`] cannot
//! post now waits: a request in the backlog of [`Remote`](super::Remote), an answer in the
//! [`Links`] of this module.

use std::collections::VecDeque;
use std::time::Duration;

use copyrpc_shm::sleep::{Due, Watch};

use super::super::BackendError;
use super::super::plan::{RankPlan, ThreadDevice};
use super::dialogue::{Arrival, Dialogue};
use super::frame::FrameBytes;
use super::{Counter, LinkSet, Polled, Refused, SendError};
use crate::counters::TransportReport;
use crate::message::{Request, Response};
use crate::topology::Peer;
use crate::values::Values;

/// Maximum number of completions that one poll takes from a queue.
pub(super) const POLL_BUDGET: usize = 256;
/// Number of polls between two checks of all links.
const POLLS_PER_CHECK: u32 = 64;

/// The part of a carrier that moves separate messages over the links of a thread. Links are
/// numbered from 0. [`LinkSet`] documents the methods of the same names.
pub(super) trait Port: Sized {
    const COUNTERS: &'static [Counter<Counters>] = &[
        ("writes", |counters| counters.sends),
        ("messages", |counters| counters.sends),
        ("waits", |counters| counters.waits),
    ];

    fn open(
        plan: &RankPlan,
        peers: &[Peer],
        device: &ThreadDevice<'_>,
    ) -> Result<Self, BackendError>;

    fn record(&self, link: usize) -> Option<Vec<u8>>;

    fn connect(&mut self, link: usize, record: &[u8]) -> Result<(), Refused>;

    fn settle(&mut self) -> Result<bool, BackendError> {
        Ok(true)
    }

    /// Posts a message, followed by `tail`. The tail may be empty.
    fn post(&mut self, link: usize, message: &FrameBytes, tail: &[u8]) -> Result<(), Unposted>;

    /// Announces to the device the messages that were posted on a link.
    fn ring(&mut self, _link: usize) {}

    /// Calls `arrived` for each message that has arrived, and for each link that is unusable, with
    /// the reason. Returns the number of completions.
    fn poll(
        &mut self,
        arrived: impl FnMut(usize, Result<&[u8], String>),
    ) -> Result<usize, BackendError>;

    /// Checks the links. For each link, `owes` yields whether the peer owes an answer.
    ///
    /// # Errors
    /// A peer is gone.
    fn check(&mut self, owes: impl Iterator<Item = bool>) -> Result<(), BackendError>;

    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch));

    fn rest(&mut self) -> Option<Duration> {
        None
    }

    fn has_work(&self) -> bool {
        true
    }

    /// Returns the number of messages whose bytes the device put into their CQEs.
    fn scattered(&self) -> u64 {
        0
    }

    fn report(&self) -> TransportReport;
}

#[derive(Debug)]
pub(super) enum Unposted {
    /// No room is left now. A queue that has failed is reported in this way too; a poll then
    /// reports the failure.
    Full,
    Failed(String),
}

/// Numbers of sent messages, of attempts to send a request that failed for lack of room, and of
/// received messages that the device put into their CQEs.
#[derive(Clone, Copy, Default)]
pub(super) struct Counters {
    pub(super) sends: u64,
    pub(super) waits: u64,
    pub(super) scattered: u64,
}

pub(super) struct Links<C, P> {
    pub(super) port: P,
    links: Vec<Link<C>>,
    values: Values,
    /// The tail of a value that is being sent.
    tail: Vec<u8>,
    /// Numbers of the links with messages to post or to announce.
    unflushed: Vec<usize>,
    polls: u32,
    counters: Counters,
}

struct Link<C> {
    peer: Peer,
    dialogue: Dialogue<C>,
    /// Answers for which the port had no room, each with the tail of its value.
    answers: VecDeque<(FrameBytes, Box<[u8]>)>,
    is_unflushed: bool,
    /// The reason why the link is unusable; `None` while it is usable.
    failure: Option<String>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket {
    link: usize,
    call: u32,
}

impl<C, P: Port> LinkSet<C> for Links<C, P> {
    type Handle = Ticket;

    fn open(
        plan: &RankPlan,
        peers: &[Peer],
        device: &ThreadDevice<'_>,
    ) -> Result<Self, BackendError> {
        let tail_bytes = plan.values.tail_bytes();
        let link = |peer: &Peer| Link {
            peer: *peer,
            dialogue: Dialogue::new(plan.job.sizes.window, tail_bytes),
            answers: VecDeque::new(),
            is_unflushed: false,
            failure: None,
        };
        Ok(Self {
            port: P::open(plan, peers, device)?,
            links: peers.iter().map(link).collect(),
            values: plan.values.clone(),
            tail: vec![0; tail_bytes],
            unflushed: Vec::with_capacity(peers.len()),
            polls: 0,
            counters: Counters::default(),
        })
    }

    fn record(&self, link: usize) -> Option<Vec<u8>> {
        self.port.record(link)
    }

    fn connect(&mut self, link: usize, record: &[u8]) -> Result<(), Refused> {
        self.port.connect(link, record)
    }

    fn settle(&mut self) -> Result<bool, BackendError> {
        self.port.settle()
    }

    #[inline]
    fn send(&mut self, number: usize, request: &Request, whom: C) -> Result<(), SendError<C>> {
        let Some(link) = self.links.get_mut(number) else {
            return Err(SendError::Full(whom));
        };
        let (call, message) = match link.dialogue.call(request, whom) {
            Ok(message) => message,
            Err(whom) => {
                self.counters.waits += 1;
                return Err(SendError::Full(whom));
            }
        };
        let tail_bytes = request.bytes_behind(self.tail.len());
        let tail = self.tail.get_mut(..tail_bytes).unwrap_or_default();
        self.values.read(request.place(), tail);
        match self.port.post(number, &message, tail) {
            Ok(()) => {
                self.counters.sends += 1;
                link.note_unflushed(number, &mut self.unflushed);
                Ok(())
            }
            Err(Unposted::Full) => {
                self.counters.waits += 1;
                match link.dialogue.take_back(call) {
                    Some(whom) => Err(SendError::Full(whom)),
                    None => Ok(()),
                }
            }
            Err(Unposted::Failed(why)) => Err(SendError::Down(BackendError::gone(&link.peer, why))),
        }
    }

    fn poll(
        &mut self,
        mut answer: impl FnMut(C, Option<Response>, &[u8]),
        _serve: impl FnMut(&Request, &mut [u8]) -> Option<Response>,
        mut keep: impl FnMut(Request, &[u8], Ticket),
    ) -> Result<Polled, BackendError> {
        let (mut answers, mut has_failed) = (0, false);
        let cqes = self.port.poll(|number, bytes| {
            let Some(link) = self.links.get_mut(number) else {
                return;
            };
            match bytes.and_then(|bytes| link.dialogue.arrive(bytes)) {
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
        })?;
        self.polls = self.polls.wrapping_add(1);
        if self.polls % POLLS_PER_CHECK == 0 {
            let links = self.links.iter();
            self.port
                .check(links.map(|link| link.dialogue.missing() > 0))?;
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
        let behind = response.map_or(0, |response| response.bytes_behind(self.tail.len()));
        let message = link.dialogue.answer(ticket.call, response);
        let tail = tail.get(..behind).unwrap_or_default().into();
        link.answers.push_back((message, tail));
        self.counters.sends += link.post_answers(ticket.link, &mut self.port);
        link.note_unflushed(ticket.link, &mut self.unflushed);
    }

    /// Announces the messages that a step has posted, once for each link.
    fn flush(&mut self) -> Result<(), BackendError> {
        let mut checked = Ok(());
        self.unflushed.retain(|number| {
            let Some(link) = self.links.get_mut(*number) else {
                return false;
            };
            self.counters.sends += link.post_answers(*number, &mut self.port);
            self.port.ring(*number);
            checked = std::mem::replace(&mut checked, Ok(())).and_then(|()| link.check());
            link.is_unflushed = !link.answers.is_empty();
            link.is_unflushed
        });
        checked
    }

    fn missing(&self, link: usize) -> usize {
        let link = self.links.get(link);
        link.map_or(0, |link| link.dialogue.missing())
    }

    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        // Answers that wait for room are sent by a flush, so the thread does not sleep.
        if !self.unflushed.is_empty() {
            return then(&mut Due::now());
        }
        // The time to the next check of links is counted in polls, and a sleep makes none. So the
        // next poll checks.
        self.polls = POLLS_PER_CHECK - 1;
        self.port.with_watch(then);
    }

    fn rest(&mut self) -> Option<Duration> {
        self.polls = POLLS_PER_CHECK - 1;
        self.port.rest().filter(|_| self.unflushed.is_empty())
    }

    fn has_work(&self) -> bool {
        self.port.has_work() || !self.unflushed.is_empty()
    }

    type Stats = Counters;

    const COUNTERS: &'static [Counter<Counters>] = P::COUNTERS;

    fn stats(&self) -> Counters {
        Counters {
            scattered: self.port.scattered(),
            ..self.counters
        }
    }

    fn report(&self) -> TransportReport {
        self.port.report()
    }
}

impl<C> Link<C> {
    /// Posts waiting answers as long as there is room. Returns the number of posted answers.
    #[inline]
    fn post_answers(&mut self, number: usize, port: &mut impl Port) -> u64 {
        let mut posted = 0;
        while let Some((message, tail)) = self.answers.pop_front() {
            match port.post(number, &message, &tail) {
                Ok(()) => posted += 1,
                Err(Unposted::Full) => {
                    self.answers.push_front((message, tail));
                    break;
                }
                Err(Unposted::Failed(why)) => _ = self.failure.get_or_insert(why),
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

    fn check(&self) -> Result<(), BackendError> {
        let failure = self.failure.as_ref();
        failure.map_or(Ok(()), |why| Err(BackendError::gone(&self.peer, why)))
    }
}
