//! ScaleRPC as a contestant.

use std::rc::Rc;

use benchkv_harness::Failure;
use mlx5::{Device, DeviceInfo, DeviceSpec};
use scalerpc::protocol::wire::{HEADER_BYTES, TRAILER_BYTES};
use scalerpc::rdma::exchange::{Accept, Admission, Offer};
use scalerpc::rdma::{PendingClient, PendingPeer, RdmaOptions};
use scalerpc::{CallToken, Grouping, HandlerError, Handlers, RdmaClient, RdmaServer, ServerConfig};

use super::calls::{Calls, Content};
use super::case::{Case, Kind};
use super::contestant::{Answers, Client, Counters, Server, named, record};

/// The only type of request.
const ECHO: u16 = 1;
/// Maximum number of requests that one step of the server executes.
const BUDGET: usize = 64;

/// Returns the server's configuration: the case's parameters, the smallest slots that hold its
/// messages, and scalerpc's defaults for everything else.
pub(crate) fn config(case: &Case) -> ServerConfig {
    ServerConfig {
        max_clients: case.clients as u32,
        depth: case.depth as u32,
        slot_bytes: slot_bytes(case.settings.payload_bytes.max(case.settings.reply_bytes())),
        group_size: case.settings.group_size,
        grouping: if case.kind == Kind::ScalerpcOff {
            Grouping::Off
        } else {
            Grouping::On
        },
        ..ServerConfig::default()
    }
}

/// Returns the minimum number of bytes of a slot for messages with a payload of up to `bytes`.
pub(crate) fn slot_bytes(bytes: usize) -> u32 {
    (HEADER_BYTES + bytes + TRAILER_BYTES)
        .next_multiple_of(64)
        .max(128) as u32
}

pub(crate) struct ScaleServer {
    server: RdmaServer,
    handlers: Handlers<'static>,
    /// Clients with an offer that they have not accepted yet.
    pending: Vec<PendingPeer>,
    answers: Rc<Answers>,
}

impl Server for ScaleServer {
    fn open(
        case: &Case,
        device: &DeviceSpec,
        answers: Answers,
    ) -> Result<(Self, Vec<Vec<u8>>), Failure> {
        let server = RdmaServer::new(device, &config(case))?;
        let answers = Rc::new(answers);
        let mut handlers = Handlers::new(server.max_payload());
        let (of_handler, reply_bytes) = (Rc::clone(&answers), case.settings.reply_bytes());
        handlers.insert(ECHO, move |request: &[u8], reply: &mut [u8]| {
            let reply = reply.get_mut(..reply_bytes).ok_or(HandlerError)?;
            of_handler.answer(request, reply);
            Ok(reply_bytes)
        });
        let pending = (0..case.clients).map(|_| server.offer());
        let pending = pending.collect::<Result<Vec<_>, _>>()?;
        let offers = pending.iter().map(|peer| peer.record().encode().to_vec());
        let offers = offers.collect();
        let server = Self {
            server,
            handlers,
            pending,
            answers,
        };
        Ok((server, offers))
    }

    fn admit(&mut self, said: &[&[u8]]) -> Result<Vec<Vec<u8>>, Failure> {
        let Self {
            server, pending, ..
        } = self;
        let admit = |(peer, said): (PendingPeer, &&[u8])| -> Result<Vec<u8>, Failure> {
            let accept = Accept::decode(record(said)?)?;
            Ok(server.admit(peer, &accept)?.encode().to_vec())
        };
        pending.drain(..).zip(said).map(admit).collect()
    }

    fn step(&mut self) -> Result<usize, Failure> {
        Ok(self.server.step(&mut self.handlers, BUDGET))
    }

    fn answers(&self) -> &Answers {
        &self.answers
    }

    fn registered_bytes(&self) -> u64 {
        let memory = self.server.core().memory();
        let regions = [&memory.entries, &memory.pools, &memory.responses];
        regions.iter().map(|region| region.len() as u64).sum()
    }

    fn device_info(&self) -> DeviceInfo {
        self.server.device().info()
    }

    fn counters(&self) -> Counters {
        let stats = self.server.stats();
        named([
            ("groups", self.server.groups() as u64),
            ("slices", stats.slices),
            ("fetched", stats.reads),
        ])
    }
}

pub(crate) struct ScaleClient {
    pub(crate) client: RdmaClient,
    /// Calls that have not ended, with their slots: at most the depth.
    calls: Vec<(CallToken, u32)>,
    reply: Vec<u8>,
}

impl ScaleClient {
    pub(crate) fn new(client: RdmaClient) -> Self {
        let layout = *client.core().layout();
        Self {
            client,
            calls: Vec::with_capacity(layout.depth),
            reply: vec![0; layout.max_payload()],
        }
    }
}

impl Client for ScaleClient {
    type Pending = PendingClient;

    fn open(
        _: &Case,
        device: &Device,
        _: usize,
        offer: &[u8],
    ) -> Result<(Self::Pending, Vec<u8>), Failure> {
        let offer = Offer::decode(record(offer)?)?;
        let pending = PendingClient::on(device, &offer, &RdmaOptions::default())?;
        let accept = pending.record().encode().to_vec();
        Ok((pending, accept))
    }

    fn admitted(pending: Self::Pending, admission: &[u8]) -> Result<Self, Failure> {
        let admission = Admission::decode(record(admission)?)?;
        Ok(Self::new(pending.admitted(&admission)))
    }

    #[inline]
    fn issue(&mut self, slot: u32, request: &[u8]) -> Result<bool, Failure> {
        match self.client.call(ECHO, request) {
            Ok(token) => {
                self.calls.push((token, slot));
                Ok(true)
            }
            Err(error) if error.is_retryable() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    #[inline]
    fn poll<W: Content>(&mut self, calls: &mut Calls<'_, W>) -> Result<(), Failure> {
        self.client.poll();
        while let Some(completion) = self.client.poll_completion(&mut self.reply) {
            let mut under_way = self.calls.iter();
            let found = under_way.position(|(token, _)| *token == completion.call);
            let found = found.ok_or("a call has ended that was not under way")?;
            let (_, slot) = self.calls.swap_remove(found);
            match completion.outcome {
                Ok(bytes) => calls.ended(slot, self.reply.get(..bytes)),
                Err(failure) if failure.is_retryable() => calls.ended(slot, None),
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(())
    }
}
