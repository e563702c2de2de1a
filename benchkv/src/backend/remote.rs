//! A daemon's connections to other ranks: copyrpc, and the requests that wait for ring space or credit.

use std::collections::VecDeque;
use std::fmt;

use copyrpc::{CallError, CallFailure, Context, ContextBuilder, Endpoint, EndpointConfig, ExchangeRecord, PendingEndpoint, RecvHandle};
use zerocopy::IntoBytes;

use super::BackendError;
use super::composed::Plan;
use crate::message::{Request, Response};
use crate::result::TransportReport;

/// Receives per endpoint: what it grants its peer in batches, and half of that again.
const RECEIVES_PER_ENDPOINT: u32 = 48;
/// Send completions per endpoint: those batches, and 8.
const SEND_COMPLETIONS_PER_ENDPOINT: u32 = 40;

/// The connections of one daemon. `C` is whom to answer, kept per call.
pub(super) struct Remote<C> {
    context: Context<C>,
    /// By rank; `None` for ranks that another daemon carries, and for this one.
    links: Vec<Option<Link<C>>>,
    backlogged: usize,
}

struct Link<C> {
    rank: usize,
    end: End<C>,
    /// In order: requests for which there was no ring space or credit.
    backlog: VecDeque<(Request, C)>,
}

enum End<C> {
    Pending(PendingEndpoint<C>),
    Connected(Endpoint<C>),
    /// Connecting failed; the daemon ends.
    Broken,
}

impl<C> fmt::Debug for Remote<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("context", &self.context).field("backlogged", &self.backlogged).finish_non_exhaustive()
    }
}

impl<C> Remote<C> {
    /// Opens a device with an endpoint for each rank of `remotes`; `None` if there is none.
    pub(super) fn open(plan: &Plan, remotes: impl Iterator<Item = usize>) -> Result<Option<Self>, BackendError> {
        let remotes: Vec<usize> = remotes.collect();
        if remotes.is_empty() {
            return Ok(None);
        }
        let count = remotes.len() as u32;
        let receives = copyrpc::DEFAULT_SRQ_SIZE.max(count * RECEIVES_PER_ENDPOINT);
        let completions = copyrpc::DEFAULT_CQ_SIZE.max((receives + 1).next_power_of_two()).max(count * SEND_COMPLETIONS_PER_ENDPOINT);
        let context = ContextBuilder::new(plan.device.spec(Some(plan.dir.path()))).srq_size(receives).cq_size(completions).build();
        let context: Context<C> = context.map_err(|e| BackendError::setup("the RDMA context", e))?;
        let config = EndpointConfig { ring_size: plan.ring_bytes, ..EndpointConfig::default() };
        let mut links: Vec<Option<Link<C>>> = (0..plan.ranks).map(|_| None).collect();
        for rank in remotes {
            let pending = context.create_endpoint(&config).map_err(|e| BackendError::setup(format!("the endpoint to rank {rank}"), e))?;
            if let Some(link) = links.get_mut(rank) {
                *link = Some(Link { rank, end: End::Pending(pending), backlog: VecDeque::new() });
            }
        }
        Ok(Some(Self { context, links, backlogged: 0 }))
    }

    /// Connection records by remote rank.
    pub(super) fn records(&self) -> Vec<(usize, Vec<u8>)> {
        let record = |link: &Link<C>| match &link.end {
            End::Pending(pending) => Some((link.rank, pending.local_info().encode().to_vec())),
            End::Connected(_) | End::Broken => None,
        };
        self.links.iter().flatten().filter_map(record).collect()
    }

    /// Connects the endpoint to `rank` with the record that rank made for this one.
    pub(super) fn connect(&mut self, rank: usize, record: &[u8]) -> Result<(), BackendError> {
        let what = || format!("connecting to rank {rank}");
        let record = record.try_into().map_err(|_| BackendError::setup(what(), "its record has another length"))?;
        let record = ExchangeRecord::decode(record).map_err(|e| BackendError::setup(what(), e))?;
        let link = self.links.get_mut(rank).and_then(Option::as_mut);
        let link = link.ok_or_else(|| BackendError::setup(what(), "another daemon carries that rank"))?;
        let End::Pending(pending) = std::mem::replace(&mut link.end, End::Broken) else {
            return Err(BackendError::setup(what(), "it is connected already"));
        };
        link.end = End::Connected(pending.connect(&record).map_err(|e| BackendError::setup(what(), e.reason))?);
        Ok(())
    }

    /// Whether requests to `rank` go through here.
    pub(super) fn carries(&self, rank: usize) -> bool {
        matches!(self.links.get(rank), Some(Some(_)))
    }

    /// Requests that wait for ring space or credit.
    pub(super) fn backlogged(&self) -> usize {
        self.backlogged
    }

    /// Sends a request to a rank that is carried, behind those that wait.
    pub(super) fn call(&mut self, rank: usize, request: Request, whom: C) -> Result<(), BackendError> {
        let Some(Some(link)) = self.links.get_mut(rank) else {
            return Err(BackendError::transport("a call to another rank", format!("rank {rank} is not carried here")));
        };
        link.backlog.push_back((request, whom));
        self.backlogged += 1;
        link.send(&mut self.backlogged)
    }

    /// Tries again what waits. Whether something was sent.
    pub(super) fn retry(&mut self) -> Result<bool, BackendError> {
        let before = self.backlogged;
        if before > 0 {
            for link in self.links.iter_mut().flatten() {
                link.send(&mut self.backlogged)?;
            }
        }
        Ok(self.backlogged < before)
    }

    /// Takes in what arrived, and hands responses to `answer` with whom they are for. Returns how many there were.
    ///
    /// Completions do not count: while credit is missing each round brings one, of a READ that looks for it, and a daemon that took that
    /// for work would keep the core from the peer it waits for.
    pub(super) fn poll(&mut self, mut answer: impl FnMut(C, Option<Response>)) -> Result<usize, BackendError> {
        let (mut is_closed, mut answers) = (false, 0);
        let polled = self.context.poll(|whom, outcome| {
            answers += 1;
            is_closed |= matches!(outcome, Err(CallFailure::Closed(_)));
            // A response of another length is no response.
            answer(whom, outcome.ok().filter(|bytes| bytes.len() == size_of::<Response>()).and_then(|bytes| bytes.read()));
        });
        polled.map_err(|e| BackendError::transport("the RDMA context", e))?;
        if is_closed {
            self.links.iter().flatten().try_for_each(Link::check)?;
        }
        Ok(answers)
    }

    /// The oldest request of another rank.
    pub(super) fn recv(&self) -> Option<RecvHandle<C>> {
        self.context.recv()
    }

    /// Posts what the phases of this step have gathered.
    pub(super) fn flush(&self) -> Result<(), BackendError> {
        self.context.flush_endpoints().map_err(|e| BackendError::transport("the RDMA context", e))
    }

    pub(super) fn report(&self) -> TransportReport {
        let (info, stats) = (self.context.device_info(), self.context.stats());
        TransportReport {
            device: info.name,
            reached_by: info.transport,
            writes: stats.batches_sent,
            messages: stats.messages_sent,
            reads: stats.reads,
            waits: stats.ring_full + stats.insufficient_credit,
            backlog_peak: 0,
        }
    }
}

impl<C> Link<C> {
    /// Whether the connection still stands.
    fn check(&self) -> Result<(), BackendError> {
        match &self.end {
            End::Connected(endpoint) => match endpoint.closed() {
                Some(reason) => Err(BackendError::PeerGone { rank: self.rank, how: reason.to_string() }),
                None => Ok(()),
            },
            End::Pending(_) | End::Broken => Ok(()),
        }
    }

    /// Sends as much of the queue as there is ring space and credit for.
    fn send(&mut self, backlogged: &mut usize) -> Result<(), BackendError> {
        let End::Connected(endpoint) = &self.end else { return Ok(()) };
        while let Some((request, whom)) = self.backlog.pop_front() {
            match endpoint.call(request.as_bytes(), whom, size_of::<Response>()) {
                Ok(_) => *backlogged -= 1,
                Err(CallError::RingFull(whom) | CallError::InsufficientCredit(whom)) => {
                    self.backlog.push_front((request, whom));
                    return Ok(());
                }
                Err(CallError::Closed { reason, .. }) => {
                    return Err(BackendError::PeerGone { rank: self.rank, how: reason.to_string() });
                }
                Err(error) => return Err(BackendError::transport("a call to another rank", error.to_string())),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use harness::device::DeviceChoice;
    use shm::dir::Dir;

    use super::*;
    use crate::cli::BackendKind;
    use crate::message::Outcome;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new() -> Self {
            let path = Path::new("/dev/shm").join(format!("benchkv-remote-{}", std::process::id()));
            std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// The connection of each of two ranks to the other, with the smallest ring.
    fn pair(dir: &Dir) -> [Remote<usize>; 2] {
        let open = |rank| {
            let plan = Plan {
                topology: BackendKind::Delegation,
                rank,
                ranks: 2,
                daemons: 1,
                clients: 1,
                depth: 32,
                ring_slots: 1024,
                ring_bytes: 4096,
                store_keys: 1,
                device: DeviceChoice::Soft,
                dir: dir.clone(),
            };
            Remote::open(&plan, plan.remotes_of(0)).unwrap().unwrap()
        };
        let mut pair = [open(0), open(1)];
        let records = [0, 1].map(|rank: usize| pair[rank].records());
        for rank in [0, 1] {
            pair[rank].connect(1 - rank, &records[1 - rank][0].1).unwrap();
        }
        pair
    }

    /// With more threads than cores a daemon that thinks it has work keeps its core from the peer that could give it credit: jobs became
    /// a hundred times slower.
    #[test]
    fn waiting_for_credit_is_not_work_and_ends_with_it() {
        const REQUESTS: usize = 1000;
        let scratch = Scratch::new();
        let [mut asking, mut answering] = pair(&Dir::open(Some(&scratch.0)).unwrap());
        for number in 0..REQUESTS {
            asking.call(1, Request::put(1, number as u64, 7), number).unwrap();
        }
        let rounds = |asking: &mut Remote<usize>| {
            let moved = (0..100).filter(|_| asking.retry().unwrap() | (asking.poll(|_, _| ()).unwrap() > 0));
            moved.count()
        };
        rounds(&mut asking);
        let (waiting, reads) = (asking.backlogged(), asking.report().reads);
        assert_eq!((rounds(&mut asking), asking.backlogged()), (0, waiting), "nobody answers, so nothing moves");
        assert!(waiting > 0 && asking.report().reads > reads, "it went on looking for credit");

        let mut answered = Vec::new();
        // Bounded: a round carries several requests.
        for _ in 0..10 * REQUESTS {
            answering.poll(|_, _| ()).unwrap();
            while let Some(request) = answering.recv() {
                request.reply(Response::new(Outcome::PutOk).as_bytes()).unwrap();
            }
            answering.flush().unwrap();
            asking.poll(|number, response| answered.push((number, response.is_some()))).unwrap();
            asking.retry().unwrap();
            asking.flush().unwrap();
        }
        assert_eq!(answered, (0..REQUESTS).map(|number| (number, true)).collect::<Vec<_>>(), "each once, in order");
        assert_eq!(asking.backlogged(), 0);
    }
}
