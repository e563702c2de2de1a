//! The interface of a contestant: a server and its clients. One loop puts all contestants under
//! load, and one check verifies all payloads ([`pattern`]).

use std::cell::Cell;
use std::collections::BTreeMap;

use benchkv_harness::Failure;
use benchkv_harness::pattern::{self, Tag};
use mlx5::{Device, DeviceInfo, DeviceSpec};

use super::calls::{Calls, Content};
use super::case::{Case, Fault, Kind, Settings};

/// Counters that only one contestant has, by name.
pub(crate) type Counters = BTreeMap<String, u64>;

pub(crate) fn named(counters: impl IntoIterator<Item = (&'static str, u64)>) -> Counters {
    let counters = counters.into_iter();
    counters
        .map(|(name, count)| (name.to_owned(), count))
        .collect()
}

/// The answering side: one device, and its resources for each client.
pub(crate) trait Server: Sized {
    /// Opens the device and makes the server's resources, without the connections. Returns each
    /// client's offer, its first record, in the order of the clients.
    fn open(
        case: &Case,
        device: &DeviceSpec,
        answers: Answers,
    ) -> Result<(Self, Vec<Vec<u8>>), Failure>;
    /// Connects to the clients, which sent the records `said`. Returns each client's admission, its
    /// last record, in the order of the clients.
    fn admit(&mut self, said: &[&[u8]]) -> Result<Vec<Vec<u8>>, Failure>;
    /// Does one bounded step: answers requests that have arrived. Returns 0 if there was nothing to
    /// do.
    fn step(&mut self) -> Result<usize, Failure>;
    /// Sleeps until there is something to do, for a short time at most.
    fn sleep(&self) -> Result<(), Failure> {
        Ok(())
    }
    fn answers(&self) -> &Answers;
    fn registered_bytes(&self) -> u64;
    fn device_info(&self) -> DeviceInfo;
    fn counters(&self) -> Counters {
        Counters::new()
    }
}

/// The calling side: one client of the server.
pub(crate) trait Client: Sized {
    /// A client before it is admitted.
    type Pending;

    /// Makes the resources of client `number` from the server's `offer`. Returns the record for the
    /// server.
    fn open(
        case: &Case,
        device: &Device,
        number: usize,
        offer: &[u8],
    ) -> Result<(Self::Pending, Vec<u8>), Failure>;
    /// Completes the client with the server's admission.
    fn admitted(pending: Self::Pending, admission: &[u8]) -> Result<Self, Failure>;
    /// Makes a call from `slot`, which has no unanswered call. The call is sent with the next poll.
    /// Returns `false` if there is no room now.
    fn issue(&mut self, slot: u32, request: &[u8]) -> Result<bool, Failure>;
    /// Does one bounded step: gives the calls that have ended to `calls`.
    fn poll<W: Content>(&mut self, calls: &mut Calls<'_, W>) -> Result<(), Failure>;
    /// Sleeps until there is something to do, for a short time at most.
    fn sleep(&self) -> Result<(), Failure> {
        Ok(())
    }
    fn counters(&self) -> Counters {
        Counters::new()
    }
}

/// The server's answers to requests, and its counters.
#[derive(Debug)]
pub(crate) struct Answers {
    pub(crate) settings: Settings,
    /// The number of the next request of each endpoint.
    next: Vec<Cell<u64>>,
    /// Whether the transport keeps the order of an endpoint's requests.
    is_in_order: bool,
    answered: Cell<u64>,
    bad_requests: Cell<u64>,
}

impl Answers {
    pub(crate) fn new(case: &Case) -> Self {
        Self {
            settings: case.settings,
            next: vec![Cell::new(0); case.clients * case.endpoints],
            is_in_order: case.kind == Kind::Copyrpc,
            answered: Cell::new(0),
            bad_requests: Cell::new(0),
        }
    }

    /// Counts a request. If payloads are verified, also checks the request and makes its reply.
    #[inline]
    pub(crate) fn answer(&self, request: &[u8], reply: &mut [u8]) {
        self.answered.set(self.answered.get() + 1);
        if !self.settings.verify {
            return;
        }
        let tag = Tag::of_request(request);
        let is_right = request.len() == self.settings.payload_bytes
            && pattern::is_request(request, tag)
            && self.is_due(tag);
        let bad = self.bad_requests.get() + u64::from(!is_right);
        self.bad_requests.set(bad);
        pattern::fill_reply(reply, tag);
        Fault::CorruptReply.inject(self.settings.fault, tag.number(), reply);
    }

    /// Returns whether a request with this tag may arrive now, and sets the number of the
    /// endpoint's next request. The endpoint must exist, and if the transport keeps the order, the
    /// request must be the endpoint's next one. A request that is too short for its whole tag may
    /// always arrive.
    fn is_due(&self, tag: Tag) -> bool {
        if self.settings.payload_bytes < 8 {
            return true;
        }
        let next = self.next.get(tag.endpoint());
        next.is_some_and(|next| next.replace(tag.number() + 1) == tag.number() || !self.is_in_order)
    }

    pub(crate) fn answered(&self) -> u64 {
        self.answered.get()
    }

    pub(crate) fn bad_requests(&self) -> u64 {
        self.bad_requests.get()
    }
}

pub(crate) fn record<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], Failure> {
    bytes
        .try_into()
        .map_err(|_| format!("record of {} bytes; {N} are expected", bytes.len()).into())
}

#[cfg(test)]
mod tests {
    use super::super::case::tests::case;
    use super::*;

    #[test]
    fn a_request_that_is_not_the_clients_own_is_counted() {
        let answers = Answers::new(&case(Kind::RcSend, 1, ""));
        let (mut request, mut reply) = ([0; 32], [0; 32]);
        for (tag, spoilt, bad) in [
            (Tag::new(1, 5), 0, 0),
            (Tag::new(2, 5), 0, 1),
            (Tag::new(0, 5), 1, 2),
        ] {
            pattern::fill_request(&mut request, tag);
            request[31] ^= spoilt;
            answers.answer(&request, &mut reply);
            assert_eq!(answers.bad_requests(), bad);
            assert!(pattern::is_reply(&reply, tag));
        }
        answers.answer(&request[..31], &mut reply);
        assert_eq!((answers.bad_requests(), answers.answered()), (3, 4));
    }

    #[test]
    fn a_request_out_of_turn_is_counted_where_the_transport_keeps_the_order() {
        for (kind, bad) in [(Kind::Copyrpc, 2), (Kind::Scalerpc, 0)] {
            let answers = Answers::new(&case(kind, 1, ""));
            let (mut request, mut reply) = ([0; 32], [0; 32]);
            for number in [0, 1, 3, 4, 4] {
                pattern::fill_request(&mut request, Tag::new(1, number));
                answers.answer(&request, &mut reply);
            }
            assert_eq!(answers.bad_requests(), bad, "{kind}");
        }
    }
}
