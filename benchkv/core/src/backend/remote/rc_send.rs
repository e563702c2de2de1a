//! Requests carried by SEND ([`messages`](super::messages)).
//!
//! Each end keeps a receive posted for every message that the peer may have under way. It posts the
//! receive of a message again before it answers the message.

use std::time::Duration;

use copyrpc_shm::sleep::{self, Look, Sleeper, Watch};
use mlx5::{
    Access, ConnectOptions, Cq, CqConfig, Cqe, Device, Inline, MonoCq, Mr, QpAddress, QpConfig,
    RcQp, ReceiveSource, Send, Signal, Write,
};

use super::super::plan::{RankPlan, ThreadDevice};
use super::super::{BackendError, OrSetup};
use super::frame::{Frame, FrameBytes};
use super::messages::{self, Counters, POLL_BUDGET, Unposted};
use super::{Counter, Refused};
use crate::carrier::Feature;
use crate::counters::TransportReport;
use crate::topology::Peer;

/// Returns the length of a receive, in bytes: a message and its tail, rounded up to whole cache
/// lines, so that no two receives share a line.
const fn receive_bytes(tail_bytes: usize) -> usize {
    (Frame::MAX_BYTES + tail_bytes).next_multiple_of(64)
}
/// Silence after which a peer that owes an answer is probed with a WRITE of no bytes. The peer's
/// device answers the WRITE without the peer's CPU; if the peer is dead, the WRITE fails.
const PROBE_AFTER: Duration = Duration::from_millis(100);
/// Values that are posted with an operation, and that the completion of the operation returns:
/// `PROBE` for a probe, `MESSAGE` for a message without a tail. For a message with a tail the value
/// is `WITH_TAIL` plus the place of the tail.
const PROBE: u64 = 1;
const MESSAGE: u64 = 0;
const WITH_TAIL: u64 = 2;

pub(super) type Links<C> = messages::Links<C, Port>;

/// A device with a queue pair for each peer, one completion queue for all sends, and one for all
/// receives.
pub(super) struct Port {
    device: Device,
    send_cq: Cq,
    recv_cq: MonoCq<usize>,
    ends: Vec<End>,
    receives: Receives,
    /// Memory from which the device reads the tails of values that are sent; `None` if values have
    /// no tails.
    tails: Option<Mr>,
    message: Vec<u8>,
    scattered: u64,
}

/// The memory of all receives: the receives of a link are adjacent.
struct Receives {
    region: Mr,
    per_link: usize,
    bytes: usize,
}

struct End {
    qp: RcQp,
    /// Places in [`Port::tails`] from which no posted SEND reads.
    places: Vec<u32>,
    /// Whether the peer has sent or answered anything since the last check.
    was_heard: bool,
    /// Time of the last check at which `was_heard` was set or the peer owed no answer, in ns of the
    /// device's clock.
    heard_ns: u64,
    is_probing: bool,
}

impl messages::Port for Port {
    const COUNTERS: &'static [Counter<Counters>] = &[
        ("writes", |counters| counters.sends),
        ("messages", |counters| counters.sends),
        ("waits", |counters| counters.waits),
        ("scattered", |counters| counters.scattered),
    ];

    fn open(
        plan: &RankPlan,
        peers: &[Peer],
        device: &ThreadDevice<'_>,
    ) -> Result<Self, BackendError> {
        let device = device.open()?;
        let pd = device.alloc_pd().or_setup("a protection domain")?;
        let per_link = 2 * plan.job.sizes.window;
        let (tail_bytes, messages) = (plan.values.tail_bytes(), per_link * peers.len());
        // The send completion queue needs one entry for each WQE. The receive completion queue
        // needs one for each receive, and one for each completion of a poll: a poll posts each
        // receive again at once, and the receive can complete before the poll frees its old entry.
        let send_cq = device
            .create_cq(messages as u32)
            .or_setup("the send completion queue")?;
        let scatters = plan.has(Feature::ScatterToCqe);
        let recv_cq = CqConfig {
            cqe_bytes: if scatters { 128 } else { 64 },
            compression: plan.has(Feature::CqeCompression),
            ..CqConfig::from((messages + POLL_BUDGET) as u32)
        };
        let mut recv_cq = device
            .create_mono_cq(recv_cq)
            .or_setup("the receive completion queue")?;
        let bytes = receive_bytes(tail_bytes);
        let receives = Receives {
            region: pd
                .alloc(messages * bytes, Access::LOCAL_WRITE)
                .or_setup("the memory of the receives")?,
            per_link,
            bytes,
        };
        let tails = (tail_bytes > 0)
            .then(|| pd.alloc(messages * tail_bytes, Access::LOCAL_WRITE))
            .transpose()
            .or_setup("the memory of values that are sent")?;
        let config = QpConfig {
            // A message with a tail takes two entries of the queue.
            max_send_wr: (per_link * (1 + usize::from(tail_bytes > 0))) as u32,
            max_inline_data: Frame::MAX_BYTES,
            scatter_to_cqe: scatters,
            ..QpConfig::default()
        };
        let own = ReceiveSource::Own {
            depth: per_link as u32,
            max_sge: 1,
        };
        let mut ends = Vec::with_capacity(peers.len());
        for (number, peer) in peers.iter().enumerate() {
            let what = format!("the queue pair to {peer}");
            let mut qp = pd
                .create_qp(&send_cq, &recv_cq, own, &config)
                .or_setup(&*what)?;
            qp.initialize().or_setup(&*what)?;
            (0..per_link)
                .try_for_each(|place| receives.post(&mut qp, number, place))
                .or_setup(what)?;
            qp.ring_receives();
            recv_cq.register(qp.qpn(), number);
            let first = (number * per_link) as u32;
            let places = tails.iter().flat_map(|_| first..first + per_link as u32);
            ends.push(End {
                qp,
                places: places.collect(),
                was_heard: true,
                heard_ns: device.now_ns(),
                is_probing: false,
            });
        }
        Ok(Self {
            device,
            send_cq,
            recv_cq,
            ends,
            receives,
            tails,
            message: vec![0; bytes],
            scattered: 0,
        })
    }

    fn record(&self, link: usize) -> Option<Vec<u8>> {
        Some(self.ends.get(link)?.qp.address().to_bytes().to_vec())
    }

    fn connect(&mut self, link: usize, record: &[u8]) -> Result<(), Refused> {
        let end = self.ends.get_mut(link);
        let end = end.ok_or("there is no queue pair for it")?;
        let address = record
            .try_into()
            .ok()
            .and_then(QpAddress::from_bytes)
            .ok_or("its record is not the address of a queue pair")?;
        Ok(end.qp.connect(&address, &ConnectOptions::default())?)
    }

    #[inline]
    fn post(&mut self, link: usize, message: &FrameBytes, tail: &[u8]) -> Result<(), Unposted> {
        let Some(end) = self.ends.get_mut(link) else {
            return Err(Unposted::Full);
        };
        let head = Inline(message.as_bytes());
        let Some(tails) = self.tails.as_ref().filter(|_| !tail.is_empty()) else {
            let message = Send { payload: head };
            let posted = end.qp.post(&message, Signal::Reclaim, MESSAGE);
            return posted.map_err(|_| Unposted::Full);
        };
        // The places can run out before the entries of the queue. The message then waits.
        let Some(&place) = end.places.last() else {
            return Err(Unposted::Full);
        };
        let at = place as usize * tail.len();
        let sge = tails
            .write(at, tail)
            .and_then(|()| tails.sge(at, tail.len() as u32))
            .map_err(|error| Unposted::Failed(format!("the tail of a message: {error}")))?;
        let payload = (head, sge);
        let context = WITH_TAIL + u64::from(place);
        let posted = end.qp.post(&Send { payload }, Signal::Reclaim, context);
        posted.map_err(|_| Unposted::Full)?;
        end.places.pop();
        Ok(())
    }

    fn ring(&mut self, link: usize) {
        let end = self.ends.get_mut(link).into_iter();
        end.for_each(|end| end.qp.ring());
    }

    fn poll(
        &mut self,
        mut arrived: impl FnMut(usize, Result<&[u8], String>),
    ) -> Result<usize, BackendError> {
        let mut cqes = self.recv_cq.poll(POLL_BUDGET, |number, cqe| {
            let Some((number, end)) = find(&mut self.ends, number) else {
                return;
            };
            self.scattered += u64::from(cqe.inline_data().is_some());
            let message = end.receive(number, &self.receives, &cqe, &mut self.message);
            arrived(number, message);
        });
        if self.send_cq.has_completion() {
            cqes += self.send_cq.poll(POLL_BUDGET, |cqe| {
                let number = self.recv_cq.queues().get(cqe.qpn());
                let Some((number, end)) = find(&mut self.ends, number) else {
                    return;
                };
                end.complete(&cqe);
                if let Err(error) = cqe.result() {
                    arrived(number, Err(error.to_string()));
                }
            });
        }
        Ok(cqes)
    }

    /// Probes peers that owe an answer and are silent.
    fn check(&mut self, owes: impl Iterator<Item = bool>) -> Result<(), BackendError> {
        let now_ns = self.device.now_ns();
        for (end, owes) in self.ends.iter_mut().zip(owes) {
            if std::mem::take(&mut end.was_heard) || !owes {
                end.heard_ns = now_ns;
            } else if !end.is_probing
                && now_ns.saturating_sub(end.heard_ns) > PROBE_AFTER.as_nanos() as u64
            {
                // A WRITE of no bytes accesses no memory, so address and key are 0. If the queue is
                // full, the probe is not needed: the operations in the queue fail if the peer is
                // dead.
                let probe = Write {
                    addr: 0,
                    rkey: 0,
                    payload: (),
                };
                end.is_probing = end.qp.post(&probe, Signal::Always, PROBE).is_ok();
                end.qp.ring();
            }
        }
        Ok(())
    }

    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        let mut has_something =
            Look(|| self.recv_cq.has_completion() || self.send_cq.has_completion());
        let mut device = &self.device;
        sleep::join([&mut device as &mut dyn Sleeper, &mut has_something], then);
    }

    fn rest(&mut self) -> Option<Duration> {
        (!self.has_work()).then_some(PROBE_AFTER)
    }

    fn has_work(&self) -> bool {
        self.recv_cq.has_completion() || self.send_cq.has_completion()
    }

    fn scattered(&self) -> u64 {
        self.scattered
    }

    fn report(&self) -> TransportReport {
        TransportReport::on(&self.device)
    }
}

#[inline]
fn find<'a>(ends: &'a mut [End], number: Option<&usize>) -> Option<(usize, &'a mut End)> {
    let number = *number?;
    Some((number, ends.get_mut(number)?))
}

impl Receives {
    /// Posts receive number `place` of a link. The queue has one entry for each receive of the
    /// link, so there is always room.
    #[inline]
    fn post(&self, qp: &mut RcQp, link: usize, place: usize) -> Result<(), String> {
        let buffer = self.region.sge(self.offset(link, place), self.bytes as u32);
        let buffer = buffer.map_err(|e| e.to_string())?;
        qp.post_receive(&[buffer], place as u64)
            .map_err(|e| e.to_string())
    }

    #[inline]
    fn offset(&self, link: usize, place: usize) -> usize {
        (link * self.per_link + place) * self.bytes
    }
}

impl End {
    /// Copies the message of a receive of link `number` to `message`, and posts the receive again.
    #[inline]
    fn receive<'a>(
        &mut self,
        number: usize,
        receives: &Receives,
        cqe: &Cqe<'_>,
        message: &'a mut [u8],
    ) -> Result<&'a [u8], String> {
        let place = self
            .qp
            .complete_receive(cqe)
            .ok_or("a receive completed that was not posted")? as usize;
        cqe.result().map_err(|error| error.to_string())?;
        let bytes = message
            .get_mut(..cqe.byte_count() as usize)
            .ok_or("it sent more bytes than a receive holds")?;
        match cqe.inline_data() {
            Some(data) => bytes.copy_from_slice(data),
            None => {
                let read = receives.region.read(receives.offset(number, place), bytes);
                read.map_err(|error| error.to_string())?;
            }
        }
        receives.post(&mut self.qp, number, place)?;
        self.qp.ring_receives();
        self.was_heard = true;
        Ok(bytes)
    }

    fn complete(&mut self, cqe: &Cqe<'_>) {
        self.qp.complete_each(cqe, |what| match what {
            MESSAGE => {}
            PROBE => (self.was_heard, self.is_probing) = (true, false),
            place => self.places.push((place - WITH_TAIL) as u32),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{pair, pair_of};
    use super::super::{LinkSets, Remote};
    use super::*;
    use crate::message::Outcome;
    use crate::message::{Request, Response};
    use crate::tests::Scratch;
    use crate::topology::Carrier;

    fn links(remote: &mut Remote<usize>) -> &mut Links<usize> {
        let LinkSets::RcSend(links) = &mut remote.links else {
            panic!("another carrier")
        };
        links
    }

    /// Sends `bytes`, as an incorrect peer could. Returns the error of the receiving end.
    fn forge(bytes: &[u8]) -> String {
        let scratch = Scratch::new();
        let [mut forging, mut taking] = pair(&scratch, Carrier::RcSend);
        let qp = &mut links(&mut forging).port.ends[0].qp;
        qp.post(
            &Send {
                payload: Inline(bytes),
            },
            Signal::Always,
            MESSAGE,
        )
        .unwrap();
        qp.ring();
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
            links(ends).port.ends[0].places = vec![u32::MAX];
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
