//! The contestants by name, one load, and the interface that makes each of them a server and its
//! clients. One loop puts all of them under load ([`super::load`]), and one check verifies all
//! payloads ([`bench::pattern`]).

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

use bench::load::Failure;
use bench::pattern::{self, Tag};
use bench::program::Fault;
use clap::ValueEnum;
use mlx5::{Device, DeviceInfo, DeviceSpec};
use serde::Serialize;

/// The transport of the calls. The command line's help, tables and documents use these names and
/// descriptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Kind {
    /// ScaleRPC: groups and time slices; the server WRITEs replies.
    Scalerpc,
    /// ScaleRPC without groups: all clients at once.
    ScalerpcOff,
    /// WRITE with immediate into a ring for each client, several messages in one.
    Copyrpc,
    /// A SEND for each message, a reliable connection for each client, one shared receive queue.
    RcSend,
    /// A SEND for each message, datagrams, as eRPC uses them; not eRPC.
    UdSend,
}

impl Kind {
    pub(crate) const ALL: [Self; 5] = [
        Self::Scalerpc,
        Self::ScalerpcOff,
        Self::Copyrpc,
        Self::RcSend,
        Self::UdSend,
    ];

    /// Returns the maximum number of clients. All clients share a device, but for `ud-send`: the
    /// software HCA keeps the datagrams of only one session from one device to another without
    /// loss. A device takes 8 descriptors of the usual limit of 1,024 for a process.
    pub(crate) const fn max_clients(self) -> usize {
        if self.has_devices() { 112 } else { 1000 }
    }

    /// Returns whether each client has a device of its own.
    pub(crate) const fn has_devices(self) -> bool {
        matches!(self, Self::UdSend)
    }

    /// Returns the description, for the reader of a table.
    pub(crate) fn what(self) -> String {
        self.to_possible_value()
            .and_then(|value| Some(value.get_help()?.to_string()))
            .unwrap_or_default()
    }
}

/// Formats the name as it is typed.
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value()
            .map_or(Ok(()), |value| f.pad(value.get_name()))
    }
}

impl Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The parameters of one measurement, which both processes know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) clients: usize,
    /// Calls that each client keeps unanswered.
    pub(crate) depth: usize,
    /// Bytes of a request, and of its reply.
    pub(crate) payload_bytes: usize,
    /// Group size of ScaleRPC.
    pub(crate) group_size: u32,
    pub(crate) fault: Option<Fault>,
}

/// Counters of only one contestant, by name.
pub(crate) type Counters = BTreeMap<String, u64>;

/// The answering side: one device, and its resources for each client.
pub(crate) trait Server: Sized {
    /// Makes everything but the connections. Returns the first record for each client, by client.
    fn open(
        case: &Case,
        device: &DeviceSpec,
        answers: Answers,
    ) -> Result<(Self, Vec<Vec<u8>>), Failure>;
    /// Connects to the clients, which sent `said`. Returns the last record for each client.
    fn admit(&mut self, said: &[&[u8]]) -> Result<Vec<Vec<u8>>, Failure>;
    /// Does one bounded step: answers requests that have arrived. Returns 0 if nothing moved.
    fn step(&mut self) -> Result<usize, Failure>;
    fn answers(&self) -> &Answers;
    /// Returns the bytes of memory that it has registered with the device.
    fn registered_bytes(&self) -> u64;
    fn device_info(&self) -> DeviceInfo;
    fn counters(&self) -> Counters {
        Counters::new()
    }
}

/// One client.
pub(crate) trait Client: Sized {
    /// A client before it is admitted.
    type Pending;

    /// Makes everything for client `number`, with the server's `offer`. Returns the record for the
    /// server.
    fn open(
        case: &Case,
        device: &Device,
        number: usize,
        offer: &[u8],
    ) -> Result<(Self::Pending, Vec<u8>), Failure>;
    /// Completes the client with the server's admission.
    fn admitted(pending: Self::Pending, admission: &[u8]) -> Result<Self, Failure>;
    /// Makes a call from `slot`, below the depth, which has no unanswered call. The call is sent
    /// with the next poll. Returns `false` if there is no room now.
    fn issue(&mut self, slot: u32, request: &[u8]) -> Result<bool, Failure>;
    /// Does one bounded step: gives the calls that have ended to `ended`, by slot, with their
    /// replies. The reply is `None` if the server did not execute the call, which is to be made
    /// again.
    fn poll(&mut self, ended: impl FnMut(u32, Option<&[u8]>)) -> Result<(), Failure>;
}

/// The server's answers to requests, and its counters.
#[derive(Debug)]
pub(crate) struct Answers {
    clients: usize,
    payload_bytes: usize,
    fault: Option<Fault>,
    answered: Cell<u64>,
    bad_requests: Cell<u64>,
}

impl Answers {
    pub(crate) const fn new(case: &Case) -> Self {
        let Case {
            clients,
            payload_bytes,
            fault,
            ..
        } = *case;
        Self {
            clients,
            payload_bytes,
            fault,
            answered: Cell::new(0),
            bad_requests: Cell::new(0),
        }
    }

    /// Checks a request, and makes its reply, which has as many bytes.
    #[inline]
    pub(crate) fn answer(&self, request: &[u8], reply: &mut [u8]) {
        let tag = Tag::of_request(request);
        let is_right = request.len() == self.payload_bytes
            && tag.endpoint() < self.clients
            && pattern::is_request(request, tag);
        self.bad_requests
            .set(self.bad_requests.get() + u64::from(!is_right));
        pattern::fill_reply(reply, tag);
        Fault::CorruptReply.inject(self.fault, tag.number(), reply);
        self.answered.set(self.answered.get() + 1);
    }

    /// Returns the bytes of every request and reply.
    pub(crate) const fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    pub(crate) fn answered(&self) -> u64 {
        self.answered.get()
    }

    pub(crate) fn bad_requests(&self) -> u64 {
        self.bad_requests.get()
    }
}

/// Returns the bytes of a record of fixed size.
pub(crate) fn record<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], Failure> {
    bytes
        .try_into()
        .map_err(|_| format!("record of {} bytes; {N} are expected", bytes.len()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_contestant_has_a_name_and_says_what_it_is() {
        assert_eq!(
            Kind::ALL.map(|kind| kind.to_string()),
            ["scalerpc", "scalerpc-off", "copyrpc", "rc-send", "ud-send"]
        );
        assert!(Kind::ALL.iter().all(|kind| !kind.what().is_empty()));
        assert!(Kind::UdSend.what().ends_with("not eRPC"));
    }

    #[test]
    fn a_request_that_is_not_the_clients_own_is_counted() {
        let case = Case {
            kind: Kind::RcSend,
            clients: 2,
            depth: 1,
            payload_bytes: 32,
            group_size: 1,
            fault: None,
        };
        let answers = Answers::new(&case);
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
}
