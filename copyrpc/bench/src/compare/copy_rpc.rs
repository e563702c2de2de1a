//! copyrpc as a contestant: a context for each client with its endpoints, and one for the server.

use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::pattern;
use benchkv_harness::range::{RangeError, range};
use copyrpc::ring::{DEFAULT_RING_SIZE, RingSize};
use copyrpc::{
    Context, ContextBuilder, DEFAULT_SRQ_SIZE, EXCHANGE_RECORD_SIZE, Endpoint, EndpointConfig,
    ExchangeRecord, PendingEndpoint, RecvBytes, Reply,
};
use mlx5::{Device, DeviceInfo, DeviceSpec};

use super::calls::{Calls, Content};
use super::case::{Case, MAX_SRQ_SIZE};
use super::contestant::{Answers, Client, Counters, Server, named, record};

/// Maximum length of a sleep, so that the end of a job is detected.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);

/// Returns the number of endpoints of each client: the endpoints that call, and the idle endpoints.
const fn of_client(case: &Case) -> usize {
    case.endpoints + case.settings.connected
}

/// Returns the configuration of all endpoints, with the defaults that the help of the options
/// describes. With the default number of batches, at most two thirds of the receives are for
/// batches in flight, unless one batch for each endpoint needs more.
pub(crate) fn endpoint_config(case: &Case) -> Result<EndpointConfig, RangeError> {
    let all = (case.clients * of_client(case)) as u32;
    let receives = case.settings.srq_size.unwrap_or(MAX_SRQ_SIZE);
    let (default, max) = (EndpointConfig::default(), receives * 2 / 3 / all);
    let fitting = default.batches_in_flight.min(max).max(1);
    let batches = case.settings.batches.unwrap_or(fitting);
    if batches > max {
        let legal = format!("1 to {max} for {all} endpoints and {receives} receives");
        let why = "the shared receive queue cannot hold them";
        return Err(range("--batches", batches, why, legal));
    }
    Ok(EndpointConfig {
        ring_size: ring_size(case)?.bytes(),
        batches_in_flight: batches,
        raw_operations: 0,
        window: case.settings.window.window(),
        ..default
    })
}

/// Returns the ring size as given, or by the rule in the option's help. Checks that messages fit.
fn ring_size(case: &Case) -> Result<RingSize, RangeError> {
    let (payload, reply) = (case.settings.payload_bytes, case.settings.reply_bytes());
    let sizes = || (12..=28).filter_map(|power| RingSize::for_connection(1 << power));
    let fits = |ring: &RingSize| {
        ring.max_payload() >= payload as u64 && ring.max_response_allowance() >= reply as u64
    };
    let padded = (12 + payload.max(reply)).next_multiple_of(32) as u64;
    let wanted = (4 * padded * case.depth as u64).clamp(64 << 10, DEFAULT_RING_SIZE);
    let ring = match case.settings.ring_size {
        Some(bytes) => RingSize::for_connection(bytes),
        // If no ring fits, this returns the largest size, and the code below reports the error.
        None => sizes()
            .find(|ring| ring.bytes() >= wanted && fits(ring))
            .or_else(|| sizes().next_back()),
    };
    let ring = ring.ok_or_else(|| {
        let legal = "a power of two from 4096 to 268435456".to_owned();
        let given = case.settings.ring_size.unwrap_or(0);
        range("--ring-size", given, "not usable", legal)
    })?;
    let limits = [
        ("--payload", payload, ring.max_payload()),
        ("--reply", reply, ring.max_response_allowance()),
    ];
    let mut exceeded = limits
        .into_iter()
        .filter(|(_, given, most)| *given as u64 > *most);
    let Some((flag, given, most)) = exceeded.next() else {
        return Ok(ring);
    };
    let legal = format!("0 to {most} with rings of {} bytes", ring.bytes());
    Err(range(flag, given, "more than a ring can take", legal))
}

/// The endpoints of one context that are not connected yet.
pub(crate) struct Pending<U> {
    context: Context<U>,
    endpoints: Vec<PendingEndpoint<U>>,
}

impl<U> Pending<U> {
    fn open(case: &Case, device: &Device, count: usize) -> Result<Self, Failure> {
        let (config, settings) = (endpoint_config(case)?, &case.settings);
        let needed = (count as u32 * config.batches_in_flight * 3).div_ceil(2);
        let receives = settings.srq_size.unwrap_or(needed.max(DEFAULT_SRQ_SIZE));
        let mut builder = ContextBuilder::new(DeviceSpec::default())
            .endpoints_with(count as u32, &config)
            .srq_size(receives);
        if let Some(entries) = settings.cq_size {
            builder = builder.cq_size(entries);
        }
        let context = builder.build_on(device.clone())?;
        let endpoints = (0..count).map(|_| context.create_endpoint(&config));
        let endpoints = endpoints.collect::<Result<_, _>>()?;
        Ok(Self { context, endpoints })
    }

    fn records(&self) -> Vec<u8> {
        self.endpoints
            .iter()
            .flat_map(|endpoint| endpoint.local_info().encode())
            .collect()
    }

    /// Connects each endpoint to the peer's endpoint at the same position in `records`.
    fn connect(&mut self, records: &[u8]) -> Result<Vec<Endpoint<U>>, Failure> {
        let connect = |(endpoint, said): (PendingEndpoint<U>, &[u8])| -> Result<_, Failure> {
            let peer = ExchangeRecord::decode(record::<EXCHANGE_RECORD_SIZE>(said)?)?;
            Ok(endpoint.connect(&peer)?)
        };
        let records = records.chunks(EXCHANGE_RECORD_SIZE);
        let ends = self.endpoints.drain(..).zip(records);
        ends.map(connect).collect()
    }
}

fn counters<U>(context: &Context<U>) -> Counters {
    let stats = context.stats();
    let counters = [
        ("calls", stats.calls),
        ("replies", stats.replies),
        ("writes", stats.batches_sent),
        ("messages_sent", stats.messages_sent),
        ("bytes_sent", stats.bytes_sent),
        ("wraps", stats.wraps),
        ("metadata_only", stats.metadata_only),
        ("reads", stats.reads),
        ("ring_full", stats.ring_full),
        ("insufficient_credit", stats.insufficient_credit),
        ("batch_stalls", stats.batch_stalls),
        ("window_stalls", stats.window_stalls),
    ];
    // Only some devices count the WRITEs that found no receive posted.
    let naks = context.device_info().rnr_naks;
    let naks = naks.map(|naks| ("rnr_naks", naks));
    named(counters.into_iter().chain(naks))
}

pub(crate) struct CopyServer {
    pending: Pending<()>,
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
        let count = case.clients * of_client(case);
        let pending = Pending::open(case, &Device::open(device)?, count)?;
        let offers = pending
            .records()
            .chunks(EXCHANGE_RECORD_SIZE * of_client(case))
            .map(<[u8]>::to_vec)
            .collect();
        let server = Self {
            pending,
            endpoints: Vec::new(),
            answers,
            request: vec![0; case.settings.payload_bytes],
            reply: vec![0; case.settings.reply_bytes()],
            // Each endpoint has one ring to send from, and one to receive in.
            registered_bytes: 2 * endpoint_config(case)?.ring_size * count as u64,
        };
        Ok((server, offers))
    }

    fn admit(&mut self, said: &[&[u8]]) -> Result<Vec<Vec<u8>>, Failure> {
        self.endpoints = self.pending.connect(&said.concat())?;
        Ok(vec![Vec::new(); said.len()])
    }

    #[inline]
    fn step(&mut self) -> Result<usize, Failure> {
        let Self {
            pending,
            answers,
            request,
            reply,
            ..
        } = self;
        let mut failed = None;
        let on_request = |bytes: RecvBytes<'_>, to: Reply<'_, ()>| {
            if answers.settings.verify {
                answers.answer(pattern::copied(bytes, request).unwrap_or_default(), reply);
            } else {
                pattern::touch(bytes);
                answers.answer(&[], reply);
            }
            if let Err(error) = to.send(reply) {
                failed = Some(format!("a reply was refused: {error}"));
            }
        };
        let taken = pending.context.serve(on_request, |(), _| ())?;
        failed.map_or(Ok(taken), |failure| Err(failure.into()))
    }

    fn sleep(&self) -> Result<(), Failure> {
        self.pending.context.wait(Some(LONGEST_SLEEP))?;
        Ok(())
    }

    fn answers(&self) -> &Answers {
        &self.answers
    }

    fn registered_bytes(&self) -> u64 {
        self.registered_bytes
    }

    fn device_info(&self) -> DeviceInfo {
        self.pending.context.device_info()
    }

    fn counters(&self) -> Counters {
        counters(&self.pending.context)
    }
}

pub(crate) struct CopyClient {
    context: Context<u32>,
    endpoints: Vec<Endpoint<u32>>,
    depth: usize,
    reply: Vec<u8>,
    verify: bool,
}

/// Makes a call by the endpoint of `slot`. Returns `false` if there is no room now.
#[inline]
fn call(
    endpoints: &[Endpoint<u32>],
    depth: usize,
    slot: u32,
    request: &[u8],
    reply_bytes: usize,
) -> Result<bool, Failure> {
    let endpoint = endpoints.get(slot as usize / depth);
    let endpoint = endpoint.ok_or("there is no such slot")?;
    match endpoint.call(request, slot, reply_bytes) {
        Ok(_) => Ok(true),
        Err(error) if error.is_retryable() => Ok(false),
        Err(error) => Err(format!("a call was refused: {error}").into()),
    }
}

impl Client for CopyClient {
    type Pending = (Pending<u32>, Vec<u8>, Case);

    fn open(
        case: &Case,
        device: &Device,
        _: usize,
        offer: &[u8],
    ) -> Result<(Self::Pending, Vec<u8>), Failure> {
        let pending = Pending::open(case, device, of_client(case))?;
        let said = pending.records();
        Ok(((pending, offer.to_vec(), *case), said))
    }

    fn admitted((mut pending, offer, case): Self::Pending, _: &[u8]) -> Result<Self, Failure> {
        Ok(Self {
            endpoints: pending.connect(&offer)?,
            context: pending.context,
            depth: case.depth,
            reply: vec![0; case.settings.reply_bytes()],
            verify: case.settings.verify,
        })
    }

    #[inline]
    fn issue(&mut self, slot: u32, request: &[u8]) -> Result<bool, Failure> {
        call(&self.endpoints, self.depth, slot, request, self.reply.len())
    }

    /// Makes the next call inside the callback of a reply, so that this poll also sends that call.
    #[inline]
    fn poll<W: Content>(&mut self, calls: &mut Calls<'_, W>) -> Result<(), Failure> {
        let Self {
            context,
            endpoints,
            depth,
            reply,
            verify,
        } = self;
        let mut failed = None;
        context.poll(|slot, outcome| {
            match outcome {
                Ok(bytes) if *verify => {
                    let reply = pattern::copied(bytes, reply).unwrap_or_default();
                    calls.ended(slot, Some(reply));
                }
                Ok(bytes) => {
                    pattern::touch(bytes);
                    calls.ended(slot, Some(&[]));
                }
                Err(failure) => failed = Some(format!("a call failed: {failure}").into()),
            }
            let bytes = reply.len();
            let again = calls.again(|slot, request| call(endpoints, *depth, slot, request, bytes));
            failed = failed.take().or(again.err());
        })?;
        failed.map_or(Ok(()), Err)
    }

    fn sleep(&self) -> Result<(), Failure> {
        self.context.wait(Some(LONGEST_SLEEP))?;
        Ok(())
    }

    fn counters(&self) -> Counters {
        counters(&self.context)
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::Kind;
    use super::super::case::tests::case;
    use super::*;

    fn config(clients: usize, depth: usize, args: &str) -> EndpointConfig {
        let case = Case {
            clients,
            ..case(Kind::Copyrpc, depth, args)
        };
        endpoint_config(&case).unwrap()
    }

    #[test]
    fn the_window_is_that_of_the_endpoints() {
        let exempt_bytes = copyrpc::Window::DEFAULT_EXEMPT_BYTES;
        let window = |clients, args| config(clients, 1, args).window;
        assert_eq!(window(1, ""), copyrpc::Window::Off);
        assert_eq!(
            window(1, "--window consumption:3"),
            copyrpc::Window::Consumption {
                batches: 3,
                exempt_bytes
            }
        );
        assert_eq!(
            window(64, "--window completion:256"),
            copyrpc::Window::Completion {
                batches: 256,
                exempt_bytes
            }
        );
    }

    #[test]
    fn automatic_sizes_follow_from_the_load() {
        assert_eq!(config(1, 1, "").ring_size, 64 << 10);
        assert_eq!(config(1, 256, "--payload 1024").ring_size, 1 << 20);
        assert_eq!(config(1, 1, "--payload 1000000").ring_size, 8 << 20);
        assert_eq!(config(1, 1, "--connected 1023").batches_in_flight, 21);
        assert_eq!(config(1000, 1, "").batches_in_flight, 21);
    }
}
