//! Requests carried by UCX active messages, one each.
//!
//! A record is a key and the address of a worker. A message is a frame after the key that its
//! receiver gave to its sender; the key identifies the link.

use copyrpc_shm::sleep::{Due, POLL_SLICE, Watch};

use super::super::BackendError;
use super::super::plan::{RankPlan, ThreadDevice};
use super::dialogue::{Arrival, Dialogue};
use super::frame::{Frame, FrameBytes};
use super::{Counter, LinkSet, Polled, SendError, Ticket};
use crate::counters::TransportReport;
use crate::message::{Request, Response};
use crate::topology::Peer;
use crate::ucx::UcxError;
use crate::ucx::worker::{Message, Worker};
use crate::values::Values;

const KEY_BYTES: usize = 8;
const _: () = assert!(KEY_BYTES + Frame::MAX_BYTES <= Message::SHORT_BYTES);
/// Maximum number of messages that one poll takes.
const POLL_BUDGET: usize = 256;
/// Number of polls between two checks of all links.
const POLLS_PER_LOOK: u32 = 64;

/// A worker and its endpoints.
pub(super) struct Links<C> {
    worker: Worker,
    address: Vec<u8>,
    links: Vec<Link<C>>,
    values: Values,
    /// The tail of a value that is being sent.
    tail: Vec<u8>,
    polls: u32,
    messages: u64,
    waits: u64,
}

struct Link<C> {
    peer: Peer,
    /// The first bytes of the peer's messages: the number of the link, and a number that others do
    /// not know.
    key: u64,
    end: Option<End>,
    dialogue: Dialogue<C>,
    /// Why the link is unusable.
    failure: Option<String>,
}

/// A connection: its endpoint, and the first bytes of messages to the peer.
#[derive(Clone, Copy)]
struct End {
    endpoint: usize,
    key: [u8; KEY_BYTES],
}

impl<C> LinkSet<C> for Links<C> {
    type Handle = Ticket;

    fn open(plan: &RankPlan, peers: &[Peer], _: &ThreadDevice<'_>) -> Result<Self, BackendError> {
        let failed = |error: UcxError| BackendError::setup("the UCX worker", error);
        let tail_bytes = plan.values.tail_bytes();
        let worker =
            Worker::open(plan.ucx_errors, Message::SHORT_BYTES + tail_bytes).map_err(failed)?;
        let address = worker.address().map_err(failed)?;
        let mut random = fastrand::Rng::new();
        let link = |(number, peer): (usize, &Peer)| Link {
            peer: *peer,
            key: u64::from(random.u32(..)) << 32 | number as u64,
            end: None,
            dialogue: Dialogue::new(plan.window, tail_bytes),
            failure: None,
        };
        let links = peers.iter().enumerate().map(link).collect();
        let (values, tail) = (plan.values.clone(), vec![0; tail_bytes]);
        Ok(Self {
            worker,
            address,
            links,
            values,
            tail,
            polls: 0,
            messages: 0,
            waits: 0,
        })
    }

    fn record(&self, link: usize) -> Option<Vec<u8>> {
        Some([&self.links.get(link)?.key.to_le_bytes(), &self.address[..]].concat())
    }

    fn connect(
        &mut self,
        link: usize,
        record: &[u8],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let link = self.links.get_mut(link).ok_or("there is no link for it")?;
        let (key, address) = record
            .split_first_chunk()
            .filter(|(_, address)| !address.is_empty())
            .ok_or("its record is not the address of a worker")?;
        // SAFETY: the peer's `record`, unchanged. It arrived by the exchange of the job, whose
        // ranks UCX has to trust: the library checks no address, and cannot be given its length.
        let endpoint = unsafe { self.worker.connect(address) }?;
        link.end = Some(End {
            endpoint,
            key: *key,
        });
        Ok(())
    }

    fn settle(&mut self) -> Result<bool, BackendError> {
        match self.worker.settle() {
            Ok(is_settled) => Ok(is_settled),
            Err(error) => {
                self.links
                    .iter()
                    .try_for_each(|link| link.check(&self.worker))?;
                Err(BackendError::transport("UCX", error))
            }
        }
    }

    #[inline]
    fn send(&mut self, link: usize, request: &Request, whom: C) -> Result<(), SendError<C>> {
        let Some(link) = self.links.get_mut(link) else {
            return Err(SendError::Full(whom));
        };
        let (_, message) = match link.dialogue.call(request, whom) {
            Ok(message) => message,
            Err(whom) => {
                self.waits += 1;
                return Err(SendError::Full(whom));
            }
        };
        self.messages += 1;
        let tail = self
            .tail
            .get_mut(..request.bytes_behind(self.values.tail_bytes()))
            .unwrap_or_default();
        self.values.read(request.place(), tail);
        link.post(&mut self.worker, &message, tail)
            .map_err(|error| SendError::Down(BackendError::gone(&link.peer, error)))
    }

    fn poll(
        &mut self,
        mut answer: impl FnMut(C, Option<Response>, &[u8]),
        _serve: impl FnMut(&Request, &mut [u8]) -> Option<Response>,
        mut keep: impl FnMut(Request, &[u8], Ticket),
    ) -> Result<Polled, BackendError> {
        self.worker.progress();
        let mut found = Polled::default();
        for _ in 0..POLL_BUDGET {
            let Some(message) = self.worker.next_message() else {
                break;
            };
            found.cqes += 1;
            let Some((number, link)) = find(&mut self.links, &message) else {
                return Err(BackendError::transport(
                    "UCX",
                    "a message came that is of no connection of this rank",
                ));
            };
            match link.take(&message) {
                Ok((Arrival::Answer(whom, response), tail)) => {
                    found.answers += 1;
                    answer(whom, response, tail);
                }
                Ok((Arrival::Request(request, call), tail)) => {
                    keep(request, tail, Ticket { link: number, call })
                }
                Err(why) => return Err(BackendError::gone(&link.peer, why)),
            }
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls % POLLS_PER_LOOK == 0 {
            self.links
                .iter()
                .try_for_each(|link| link.check(&self.worker))?;
        }
        Ok(found)
    }

    fn answer(&mut self, ticket: Ticket, response: Option<Response>, tail: &[u8]) {
        let Some(link) = self.links.get_mut(ticket.link) else {
            return;
        };
        let behind = response.map_or(0, |response| {
            response.bytes_behind(self.values.tail_bytes())
        });
        let message = link.dialogue.answer(ticket.call, response);
        self.messages += 1;
        if let Err(error) = link.post(
            &mut self.worker,
            &message,
            tail.get(..behind).unwrap_or_default(),
        ) {
            link.failure.get_or_insert(error.to_string());
        }
    }

    /// The library wakes through a descriptor at most, which cannot be waited for together with
    /// words.
    fn missing(&self, link: usize) -> usize {
        self.links
            .get(link)
            .map_or(0, |link| link.dialogue.missing())
    }

    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        then(&mut Due(POLL_SLICE));
    }

    /// Number of messages sent, and number of those that found no room.
    type Stats = (u64, u64);

    const COUNTERS: &'static [Counter<(u64, u64)>] = &[
        ("writes", |(messages, _)| *messages),
        ("messages", |(messages, _)| *messages),
        ("waits", |(_, waits)| *waits),
    ];

    fn stats(&self) -> (u64, u64) {
        (self.messages, self.waits)
    }

    fn report(&self) -> TransportReport {
        let setting = |name: &str| {
            std::env::var(name).map_or_else(
                |_| format!("{name} unset"),
                |value| format!("{name}={value}"),
            )
        };
        let transports = self.worker.transports().join(", ");
        TransportReport {
            device: format!("ucx:{}", self.worker.version()),
            reached_by: format!(
                "UCX {} by {transports}; {}, {}",
                self.worker.version(),
                setting("UCX_TLS"),
                setting("UCX_NET_DEVICES")
            ),
            ..TransportReport::default()
        }
    }
}

/// Returns the link of a message, by its key.
#[inline]
fn find<'a, C>(links: &'a mut [Link<C>], message: &Message) -> Option<(usize, &'a mut Link<C>)> {
    let key = u64::from_le_bytes(*message.head().first_chunk()?);
    let number = key as u32 as usize;
    links
        .get_mut(number)
        .filter(|link| link.key == key)
        .map(|link| (number, link))
}

impl<C> Link<C> {
    #[inline]
    fn post(&self, worker: &mut Worker, message: &FrameBytes, tail: &[u8]) -> Result<(), UcxError> {
        let Some(End { endpoint, key }) = self.end else {
            return Ok(());
        };
        worker.send(endpoint, &[&key, message.as_bytes(), tail])
    }

    #[inline]
    fn take<'a>(&mut self, message: &'a Message) -> Result<(Arrival<C>, &'a [u8]), String> {
        let bytes = message
            .bytes()
            .map_err(|length| format!("it sent {length} bytes that are not a message"))?;
        self.dialogue
            .arrive(bytes.get(KEY_BYTES..).unwrap_or_default())
            .map_err(|violation| violation.to_string())
    }

    /// Checks whether the link is usable.
    fn check(&self, worker: &Worker) -> Result<(), BackendError> {
        match (
            &self.failure,
            self.end.map_or(Ok(()), |end| worker.check(end.endpoint)),
        ) {
            (Some(why), _) => Err(BackendError::gone(&self.peer, why)),
            (None, Err(error)) => Err(BackendError::gone(&self.peer, error)),
            (None, Ok(())) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::pair;
    use super::super::{LinkSets, Remote};
    use super::*;
    use crate::tests::Scratch;
    use crate::topology::Carrier;

    fn links(remote: &mut Remote<usize>) -> &mut Links<usize> {
        let LinkSets::UcxAm(links) = &mut remote.links else {
            panic!("another carrier")
        };
        links
    }

    /// Sends `bytes` as an unsound peer, after the key if `has_key`. Returns the other end's error.
    fn forge(has_key: bool, bytes: &[u8]) -> String {
        let scratch = Scratch::new();
        let [mut forging, mut taking] = pair(&scratch, Carrier::UcxAm);
        let links = links(&mut forging);
        let End { endpoint, key } = links.links[0].end.unwrap();
        links
            .worker
            .send(endpoint, &[if has_key { &key } else { &[] }, bytes])
            .unwrap();
        for _ in 0..100_000 {
            forging.poll(|_, _, _| (), |_, _| None).unwrap();
            if let Err(gone) = taking.poll(|_, _, _| (), |_, _| None) {
                return gone.to_string();
            }
        }
        panic!("it was taken for sound");
    }

    #[test]
    #[ignore = "needs libucx0"]
    fn what_is_no_message_ends_the_connection() {
        assert_eq!(
            forge(true, &[1; 9]),
            "rank 0 is lost: it sent 9 bytes that are not a message"
        );
        assert_eq!(
            forge(true, &[7, 0, 0, 0, 3, 0, 0, 0]),
            "rank 0 is lost: it answered call 0x7, which does not wait for an answer"
        );
        for stray in [&[][..], &[0; 8], &[0; 40]] {
            assert_eq!(
                forge(false, stray),
                "UCX failed: a message came that is of no connection of this rank"
            );
        }
    }
}
