//! copyrpc as a contestant: an endpoint for each client, all of one context at the server.

use bench::load::Failure;
use bench::pattern;
use copyrpc::{
    Context, ContextBuilder, DEFAULT_SRQ_SIZE, EXCHANGE_RECORD_SIZE, Endpoint, EndpointConfig,
    ExchangeRecord, PendingEndpoint,
};
use mlx5::{Device, DeviceInfo, DeviceSpec};

use super::contestant::{Answers, Case, Client, Server, record};

/// Minimum bytes of a ring.
const LEAST_RING_BYTES: usize = 64 << 10;
/// Maximum bytes of a ring that a message takes beside its payload.
const OVERHEAD_BYTES: usize = 44;
/// Maximum receives of a device's queue.
const MOST_RECEIVES: u32 = (1 << 15) - 1;

/// Returns a configuration with rings of four times the unanswered bytes of one client, so that the
/// size of rings does not affect the result. Both ends have as many batches in flight as the
/// server's receives permit.
fn endpoint_config(case: &Case) -> EndpointConfig {
    let unanswered = case.depth * (case.payload_bytes + OVERHEAD_BYTES);
    let ring_size = (4 * unanswered).next_power_of_two().max(LEAST_RING_BYTES) as u64;
    let default = EndpointConfig::default();
    // Two thirds of the receives are for batches in flight.
    let batches_in_flight = default
        .batches_in_flight
        .min(MOST_RECEIVES * 2 / 3 / case.clients as u32);
    EndpointConfig {
        ring_size,
        batches_in_flight,
        raw_operations: 0,
        ..default
    }
}

/// Makes a context for that many endpoints on a device.
fn context<U>(
    device: &Device,
    config: &EndpointConfig,
    endpoints: usize,
) -> Result<Context<U>, Failure> {
    let receives = (endpoints as u32 * config.batches_in_flight * 3)
        .div_ceil(2)
        .max(DEFAULT_SRQ_SIZE);
    let builder = ContextBuilder::new(DeviceSpec::default())
        .endpoints_with(endpoints as u32, config)
        .srq_size(receives);
    Ok(builder.build_on(device.clone())?)
}

fn connect<U>(endpoint: PendingEndpoint<U>, said: &[u8]) -> Result<Endpoint<U>, Failure> {
    let peer = ExchangeRecord::decode(record::<EXCHANGE_RECORD_SIZE>(said)?)?;
    Ok(endpoint.connect(&peer)?)
}

pub(crate) struct CopyServer {
    context: Context<()>,
    pending: Vec<PendingEndpoint<()>>,
    endpoints: Vec<Endpoint<()>>,
    answers: Answers,
    request: Vec<u8>,
    reply: Vec<u8>,
    registered_bytes: u64,
}

impl Server for CopyServer {
    fn open(
        case: &Case,
        device: &DeviceSpec,
        answers: Answers,
    ) -> Result<(Self, Vec<Vec<u8>>), Failure> {
        let config = endpoint_config(case);
        let context = context(&Device::open(device)?, &config, case.clients)?;
        let pending = (0..case.clients)
            .map(|_| context.create_endpoint(&config))
            .collect::<Result<Vec<_>, _>>()?;
        let offers = pending
            .iter()
            .map(|endpoint| endpoint.local_info().encode().to_vec())
            .collect();
        let bytes = answers.payload_bytes();
        let (request, reply) = (vec![0; bytes], vec![0; bytes]);
        // Each client has one ring to send from, and one to receive in.
        let registered_bytes = 2 * config.ring_size * case.clients as u64;
        Ok((
            Self {
                context,
                pending,
                endpoints: Vec::new(),
                answers,
                request,
                reply,
                registered_bytes,
            },
            offers,
        ))
    }

    fn admit(&mut self, said: &[&[u8]]) -> Result<Vec<Vec<u8>>, Failure> {
        self.endpoints = self
            .pending
            .drain(..)
            .zip(said)
            .map(|(endpoint, said)| connect(endpoint, said))
            .collect::<Result<_, _>>()?;
        Ok(vec![Vec::new(); said.len()])
    }

    #[inline]
    fn step(&mut self) -> Result<usize, Failure> {
        let Self {
            context,
            answers,
            request,
            reply,
            ..
        } = self;
        let taken = context.drain(|(), _| ())?;
        while let Some(received) = context.recv() {
            let bytes =
                pattern::copied(received.data(), request).ok_or("a request of another length")?;
            answers.answer(bytes, reply);
            received
                .reply(reply)
                .map_err(|error| format!("a reply was refused: {error}"))?;
        }
        context.flush_endpoints()?;
        Ok(taken)
    }

    fn answers(&self) -> &Answers {
        &self.answers
    }

    fn registered_bytes(&self) -> u64 {
        self.registered_bytes
    }

    fn device_info(&self) -> DeviceInfo {
        self.context.device_info()
    }
}

pub(crate) struct CopyClient {
    context: Context<u32>,
    endpoint: Endpoint<u32>,
    reply: Vec<u8>,
}

impl Client for CopyClient {
    type Pending = (Context<u32>, PendingEndpoint<u32>, Vec<u8>, usize);

    fn open(
        case: &Case,
        device: &Device,
        _: usize,
        offer: &[u8],
    ) -> Result<(Self::Pending, Vec<u8>), Failure> {
        let config = endpoint_config(case);
        let context = context(device, &config, 1)?;
        let endpoint = context.create_endpoint(&config)?;
        let said = endpoint.local_info().encode().to_vec();
        Ok((
            (context, endpoint, offer.to_vec(), case.payload_bytes),
            said,
        ))
    }

    fn admitted(
        (context, endpoint, offer, payload_bytes): Self::Pending,
        _: &[u8],
    ) -> Result<Self, Failure> {
        Ok(Self {
            context,
            endpoint: connect(endpoint, &offer)?,
            reply: vec![0; payload_bytes],
        })
    }

    #[inline]
    fn issue(&mut self, slot: u32, request: &[u8]) -> Result<bool, Failure> {
        match self.endpoint.call(request, slot, request.len()) {
            Ok(_) => Ok(true),
            Err(error) if error.is_retryable() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    #[inline]
    fn poll(&mut self, mut ended: impl FnMut(u32, Option<&[u8]>)) -> Result<(), Failure> {
        let Self { context, reply, .. } = self;
        let mut failed = None;
        context.poll(|slot, outcome| match outcome {
            Ok(bytes) => ended(
                slot,
                Some(pattern::copied(bytes, reply).unwrap_or_default()),
            ),
            Err(failure) => failed = Some(failure),
        })?;
        failed.map_or(Ok(()), |failure| Err(failure.into()))
    }
}
