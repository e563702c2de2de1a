//! A thread's connections to other ranks: copyrpc, and the requests that wait for ring space or credit.

use std::collections::{HashMap, VecDeque};
use std::fmt;

use copyrpc::{CallError, CallFailure, Context, ContextBuilder, Endpoint, EndpointConfig, ExchangeRecord, PendingEndpoint, RecvHandle};
use zerocopy::IntoBytes;

use super::plan::{Plan, Topology};
use super::{BackendError, Peer, Records, Worker};
use crate::activity::TransportReport;
use crate::message::{Request, Response};

/// Receives per endpoint: what it grants its peer in batches, and half of that again.
const RECEIVES_PER_ENDPOINT: u32 = 48;
/// Send completions per endpoint: those batches, and 8.
const SEND_COMPLETIONS_PER_ENDPOINT: u32 = 40;

/// The connections of one daemon or client. `C` is whom to answer, kept per call.
pub(super) struct Remote<C> {
    context: Context<C>,
    topology: Topology,
    rank: usize,
    links: Vec<Link<C>>,
    /// By daemon of the job, rank after rank: the link to it.
    routes: Vec<Option<usize>>,
    backlogged: usize,
    /// Most that was backlogged since somebody asked.
    backlog_peak: usize,
}

struct Link<C> {
    peer: Peer,
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
    /// Opens a device with the endpoints that `worker` has in the topology; `None` if it has none.
    pub(super) fn open(plan: &Plan, worker: Worker) -> Result<Option<Self>, BackendError> {
        let topology = plan.topology;
        let peers = topology.peers_of(plan.rank, worker);
        if peers.is_empty() {
            return Ok(None);
        }
        let count = peers.len() as u32;
        let receives = copyrpc::DEFAULT_SRQ_SIZE.max(count * RECEIVES_PER_ENDPOINT);
        let completions = copyrpc::DEFAULT_CQ_SIZE.max((receives + 1).next_power_of_two()).max(count * SEND_COMPLETIONS_PER_ENDPOINT);
        let context = ContextBuilder::new(plan.device.clone()).srq_size(receives).cq_size(completions).build();
        let context: Context<C> = context.map_err(|e| BackendError::setup("the RDMA context", e))?;
        let config = EndpointConfig { ring_size: plan.ring_bytes, ..EndpointConfig::default() };
        let mut routes = vec![None; topology.ranks * topology.daemons];
        let mut links = Vec::with_capacity(peers.len());
        for peer in peers {
            let pending = context.create_endpoint(&config).map_err(|e| BackendError::setup(format!("the endpoint to {peer}"), e))?;
            if let Worker::Daemon(daemon) = peer.worker {
                routes.get_mut(peer.rank * topology.daemons + daemon).into_iter().for_each(|route| *route = Some(links.len()));
            }
            links.push(Link { peer, end: End::Pending(pending), backlog: VecDeque::new() });
        }
        Ok(Some(Self { context, topology, rank: plan.rank, links, routes, backlogged: 0, backlog_peak: 0 }))
    }

    /// Connection records, each with whom it is for.
    pub(super) fn records(&self) -> Records {
        let record = |link: &Link<C>| match &link.end {
            End::Pending(pending) => Some((link.peer, pending.local_info().encode().to_vec())),
            End::Connected(_) | End::Broken => None,
        };
        self.links.iter().filter_map(record).collect()
    }

    /// Connects each endpoint with the record that its other end made for it.
    pub(super) fn connect(&mut self, records: &[(Peer, Vec<u8>)]) -> Result<(), BackendError> {
        let mut links: HashMap<Peer, &mut Link<C>> = self.links.iter_mut().map(|link| (link.peer, link)).collect();
        records.iter().try_for_each(|(peer, record)| {
            let link =
                links.get_mut(peer).ok_or_else(|| BackendError::setup(format!("connecting to {peer}"), "there is no endpoint for it"))?;
            link.connect(record)
        })
    }

    /// The link through which this request goes, if it goes from here.
    pub(super) fn link_for(&self, request: &Request) -> Option<usize> {
        let far_daemon = self.topology.far_daemon(self.rank, request.key());
        self.routes.get(request.rank() as usize * self.topology.daemons + far_daemon).copied().flatten()
    }

    /// Requests that wait for ring space or credit.
    pub(super) fn backlogged(&self) -> usize {
        self.backlogged
    }

    /// Sends a request through a link, behind those that wait.
    pub(super) fn call(&mut self, link: usize, request: Request, whom: C) -> Result<(), BackendError> {
        let Some(link) = self.links.get_mut(link) else {
            return Err(BackendError::transport("a call to another rank", format!("there is no link {link}")));
        };
        link.backlog.push_back((request, whom));
        self.backlogged += 1;
        link.send(&mut self.backlogged)?;
        self.backlog_peak = self.backlog_peak.max(self.backlogged);
        Ok(())
    }

    /// Tries again what waits. Returns how much of it was sent.
    pub(super) fn retry(&mut self) -> Result<usize, BackendError> {
        let before = self.backlogged;
        if before > 0 {
            for link in &mut self.links {
                link.send(&mut self.backlogged)?;
            }
        }
        Ok(before - self.backlogged)
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
            self.links.iter().try_for_each(Link::check)?;
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

    /// Counters since the start, and the most that waited since the last report.
    pub(super) fn report(&mut self) -> TransportReport {
        let backlog_peak = std::mem::replace(&mut self.backlog_peak, self.backlogged) as u64;
        let (info, stats) = (self.context.device_info(), self.context.stats());
        TransportReport {
            device: info.name,
            reached_by: info.transport,
            writes: stats.batches_sent,
            messages: stats.messages_sent,
            reads: stats.reads,
            waits: stats.ring_full + stats.insufficient_credit,
            backlog_peak,
        }
    }
}

impl<C> Link<C> {
    fn connect(&mut self, record: &[u8]) -> Result<(), BackendError> {
        let what = || format!("connecting to {}", self.peer);
        let record = record.try_into().map_err(|_| BackendError::setup(what(), "its record has another length"))?;
        let record = ExchangeRecord::decode(record).map_err(|e| BackendError::setup(what(), e))?;
        let End::Pending(pending) = std::mem::replace(&mut self.end, End::Broken) else {
            return Err(BackendError::setup(what(), "it is connected already"));
        };
        self.end = End::Connected(pending.connect(&record).map_err(|e| BackendError::setup(what(), e.reason))?);
        Ok(())
    }

    /// Whether the connection still stands.
    fn check(&self) -> Result<(), BackendError> {
        match &self.end {
            End::Connected(endpoint) => match endpoint.closed() {
                Some(reason) => Err(BackendError::PeerGone { rank: self.peer.rank, how: reason.to_string() }),
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
                    return Err(BackendError::PeerGone { rank: self.peer.rank, how: reason.to_string() });
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
                topology: Topology { kind: BackendKind::Delegation, ranks: 2, daemons: 1, clients: 1 },
                rank,
                depth: 32,
                ring_slots: 1024,
                ring_bytes: 4096,
                store_keys: 1,
                device: DeviceChoice::Soft.spec(Some(dir.path())),
                dir: dir.clone(),
            };
            Remote::open(&plan, Worker::Daemon(0)).unwrap().unwrap()
        };
        let mut pair = [open(0), open(1)];
        let records = [0, 1].map(|rank: usize| pair[rank].records());
        for rank in [0, 1] {
            let far_end = Peer { rank: 1 - rank, worker: Worker::Daemon(0) };
            pair[rank].connect(&[(far_end, records[1 - rank][0].1.clone())]).unwrap();
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
            let request = Request::put(1, number as u64, 7);
            asking.call(asking.link_for(&request).unwrap(), request, number).unwrap();
        }
        let rounds = |asking: &mut Remote<usize>| {
            let moved = (0..100).filter(|_| asking.retry().unwrap() + asking.poll(|_, _| ()).unwrap() > 0);
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
