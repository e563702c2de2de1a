//! Requests carried by UCX active messages ([`messages`](super::messages)).
//!
//! A connection record contains a key and the address of a worker. Each message begins with the key
//! of its receiver's record, which identifies the link; a frame follows.

use copyrpc_shm::sleep::{Due, POLL_SLICE, Watch};

use super::super::plan::{RankPlan, ThreadDevice};
use super::super::{BackendError, OrSetup};
use super::Refused;
use super::frame::{Frame, FrameBytes};
use super::messages::{self, POLL_BUDGET, Unposted};
use crate::counters::TransportReport;
use crate::topology::Peer;
use crate::ucx::PeerErrors;
use crate::ucx::worker::{Message, Worker};

const KEY_BYTES: usize = 8;
const _: () = assert!(KEY_BYTES + Frame::MAX_BYTES <= Message::SHORT_BYTES);

pub(super) type Links<C> = messages::Links<C, Port>;

pub(super) struct Port {
    worker: Worker,
    address: Vec<u8>,
    ends: Vec<End>,
}

struct End {
    peer: Peer,
    /// The first bytes of the peer's messages: the number of the link in the lower half, and a
    /// number that other processes do not know in the upper half.
    key: u64,
    /// The endpoint, and the first bytes of messages to the peer.
    to: Option<(usize, [u8; KEY_BYTES])>,
}

impl messages::Port for Port {
    fn open(plan: &RankPlan, peers: &[Peer], _: &ThreadDevice<'_>) -> Result<Self, BackendError> {
        let longest = Message::SHORT_BYTES + plan.values.tail_bytes();
        let worker = Worker::open(plan.job.ucx_errors.unwrap_or(PeerErrors::None), longest)
            .or_setup("the UCX worker")?;
        let address = worker.address().or_setup("the UCX worker")?;
        let mut random = fastrand::Rng::new();
        let end = |(number, peer): (usize, &Peer)| End {
            peer: *peer,
            key: u64::from(random.u32(..)) << 32 | number as u64,
            to: None,
        };
        Ok(Self {
            worker,
            address,
            ends: peers.iter().enumerate().map(end).collect(),
        })
    }

    fn record(&self, link: usize) -> Option<Vec<u8>> {
        Some([&self.ends.get(link)?.key.to_le_bytes(), &self.address[..]].concat())
    }

    fn connect(&mut self, link: usize, record: &[u8]) -> Result<(), Refused> {
        let end = self.ends.get_mut(link).ok_or("there is no link for it")?;
        let (key, address) = record
            .split_first_chunk()
            .filter(|(_, address)| !address.is_empty())
            .ok_or("its record is not the address of a worker")?;
        // SAFETY: `address` is the address in the peer's `record`, unchanged. The record arrived by
        // the exchange of the job, whose ranks UCX has to trust: the library checks no address, and
        // cannot be given its length.
        let endpoint = unsafe { self.worker.connect(address) }?;
        end.to = Some((endpoint, *key));
        Ok(())
    }

    fn settle(&mut self) -> Result<bool, BackendError> {
        self.worker.settle().or_else(|error| {
            self.check(std::iter::empty())?;
            Err(BackendError::transport("UCX", error))
        })
    }

    #[inline]
    fn post(&mut self, link: usize, message: &FrameBytes, tail: &[u8]) -> Result<(), Unposted> {
        let Some((endpoint, key)) = self.ends.get(link).and_then(|end| end.to) else {
            return Ok(());
        };
        let sent = self
            .worker
            .send(endpoint, &[&key, message.as_bytes(), tail]);
        sent.map_err(|error| Unposted::Failed(error.to_string()))
    }

    fn poll(
        &mut self,
        mut arrived: impl FnMut(usize, Result<&[u8], String>),
    ) -> Result<usize, BackendError> {
        self.worker.progress();
        let mut cqes = 0;
        for message in std::iter::from_fn(|| self.worker.next_message()).take(POLL_BUDGET) {
            cqes += 1;
            let key = message.head().first_chunk();
            let key = key.map_or(0, |key| u64::from_le_bytes(*key));
            let number = key as u32 as usize;
            if self.ends.get(number).is_none_or(|end| end.key != key) {
                let why = "a message came that is of no connection of this rank";
                return Err(BackendError::transport("UCX", why));
            }
            let bytes = message.bytes();
            let bytes = bytes.map(|bytes| bytes.get(KEY_BYTES..).unwrap_or_default());
            let said = |length| format!("it sent {length} bytes that are not a message");
            arrived(number, bytes.map_err(said));
        }
        Ok(cqes)
    }

    fn check(&mut self, _owes: impl Iterator<Item = bool>) -> Result<(), BackendError> {
        self.ends.iter().try_for_each(|end| {
            let checked = end
                .to
                .map_or(Ok(()), |(endpoint, _)| self.worker.check(endpoint));
            checked.map_err(|error| BackendError::gone(&end.peer, error))
        })
    }

    /// Limits the sleep to one interval of polling. UCX can wake a thread only through a file
    /// descriptor; the thread sleeps until memory changes, and cannot wait for a descriptor too.
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        then(&mut Due(POLL_SLICE));
    }

    fn report(&self) -> TransportReport {
        let setting = |name: &str| match std::env::var(name) {
            Ok(value) => format!("{name}={value}"),
            Err(_) => format!("{name} unset"),
        };
        let transports = self.worker.transports().join(", ");
        let version = self.worker.version();
        let (tls, devices) = (setting("UCX_TLS"), setting("UCX_NET_DEVICES"));
        TransportReport {
            device: format!("ucx:{version}"),
            reached_by: format!("UCX {version} by {transports}; {tls}, {devices}"),
            ..TransportReport::default()
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

    /// Sends `bytes`, as an incorrect peer could, after the key if `has_key`. Returns the error of
    /// the receiving end.
    fn forge(has_key: bool, bytes: &[u8]) -> String {
        let scratch = Scratch::new();
        let [mut forging, mut taking] = pair(&scratch, Carrier::UcxAm);
        let links = links(&mut forging);
        let (endpoint, key) = links.port.ends[0].to.unwrap();
        links
            .port
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
