//! When things happen: at once, later by a constant, or as a model of a NIC says. Whatever is later is gathered later, so a source buffer
//! that is reused too early is sent wrongly, as it would be by a NIC.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use super::deferred::Deferred;
use super::queues::SoftQp;
use super::random::Random;
use crate::wire::{CtrlSegment, DataSegment, InlineHeader, Opcode, SEGMENT, WQEBB};

/// When a software HCA executes what a doorbell announced. The times are those of the device's [`Clock`](crate::Clock).
#[derive(Clone, Debug, Default)]
pub enum Timing {
    /// In the doorbell.
    #[default]
    Immediate,
    /// This many ns after the doorbell, in the first progress of the device from then on: a fabric of 2 to 6 us on one host.
    Delay {
        /// Nanoseconds.
        ns: u64,
    },
    /// As a model of a network of NICs says; for virtual time.
    Model(NicModel),
}

/// What a NIC costs. All times in ns, of the clock that the devices share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicParameters {
    /// From the doorbell to the first WQE read.
    pub doorbell_ns: u64,
    /// Per WQE sent.
    pub send_ns: u64,
    /// Per byte sent, in ps.
    pub byte_ps: u64,
    /// One way through the network. The acknowledgement takes the same.
    pub link_ns: u64,
    /// Per receive taken from a ring, or from a list whose next WQE is the neighbour.
    pub receive_ns: u64,
    /// Per receive whose successor in the list is not its neighbour, so that it cannot be prefetched.
    pub unordered_receive_ns: u64,
    /// Queue pairs whose context the NIC holds; the least recently used goes.
    pub context_entries: usize,
    /// For fetching a context it does not hold, at either end.
    pub context_miss_ns: u64,
    /// Up to this much more, at random, per message.
    pub jitter_ns: u64,
    /// Of the random numbers: the same seed gives the same run.
    pub seed: u64,
}

impl Default for NicParameters {
    /// A round trip of about 2 us, 100 Gbit/s, and the receive rates that are public for this family (5.4 and 1.8 million per second).
    fn default() -> Self {
        Self {
            doorbell_ns: 250,
            send_ns: 10,
            byte_ps: 80,
            link_ns: 700,
            receive_ns: 185,
            unordered_receive_ns: 555,
            context_entries: 1024,
            context_miss_ns: 400,
            jitter_ns: 0,
            seed: 1,
        }
    }
}

/// The NICs of one network. Clones are the same network: give one to every device that shares its clock.
#[derive(Clone, Debug)]
pub struct NicModel {
    parameters: NicParameters,
    nics: Arc<Mutex<Nics>>,
}

#[derive(Debug)]
struct Nics {
    by_lid: HashMap<u16, Nic>,
    random: Random,
}

#[derive(Debug, Default)]
struct Nic {
    send_free_ns: u64,
    receive_free_ns: u64,
    /// QPNs, most recently used last.
    contexts: VecDeque<u32>,
}

impl Nic {
    /// What looking at the context of `qpn` costs.
    fn context_ns(&mut self, qpn: u32, parameters: &NicParameters) -> u64 {
        if let Some(at) = self.contexts.iter().rposition(|&q| q == qpn) {
            self.contexts.remove(at);
            self.contexts.push_back(qpn);
            return 0;
        }
        self.contexts.push_back(qpn);
        if self.contexts.len() > parameters.context_entries {
            self.contexts.pop_front();
        }
        parameters.context_miss_ns
    }
}

/// One WQE, as the model sees it.
struct Load {
    bytes: u64,
    takes_receive: bool,
    /// The receiver cannot prefetch the one after it.
    is_unordered: bool,
}

impl NicModel {
    /// A network of NICs that have just been switched on.
    #[must_use]
    pub fn new(parameters: NicParameters) -> Self {
        let nics = Nics { by_lid: HashMap::new(), random: Random::new(parameters.seed) };
        Self { parameters, nics: Arc::new(Mutex::new(nics)) }
    }

    /// When a WQE has its effect at the peer.
    fn arrival_ns(&self, now_ns: u64, (lid, qpn): (u16, u32), peer: Option<(u16, u32)>, load: &Load) -> u64 {
        let Self { parameters, nics } = self;
        let Nics { by_lid, random } = &mut *nics.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = by_lid.entry(lid).or_default();
        let start_ns = (now_ns + parameters.doorbell_ns).max(sender.send_free_ns);
        sender.send_free_ns = start_ns + parameters.send_ns + load.bytes * parameters.byte_ps / 1000 + sender.context_ns(qpn, parameters);
        let jitter_ns = if parameters.jitter_ns == 0 { 0 } else { random.below(parameters.jitter_ns + 1) };
        let at_ns = sender.send_free_ns + parameters.link_ns + jitter_ns;
        let Some((lid, qpn)) = peer else { return at_ns };
        let receiver = by_lid.entry(lid).or_default();
        let receive_ns = match (load.takes_receive, load.is_unordered) {
            (false, _) => 0,
            (true, false) => parameters.receive_ns,
            (true, true) => parameters.unordered_receive_ns,
        };
        receiver.receive_free_ns = at_ns.max(receiver.receive_free_ns) + receive_ns + receiver.context_ns(qpn, parameters);
        receiver.receive_free_ns
    }
}

impl Timing {
    pub(crate) fn is_immediate(&self) -> bool {
        matches!(self, Self::Immediate)
    }

    /// How long after its effect an operation's completion is seen by who posted it.
    pub(crate) fn acknowledge_ns(&self) -> u64 {
        match self {
            Self::Immediate | Self::Delay { .. } => 0,
            Self::Model(model) => model.parameters.link_ns,
        }
    }

    /// The doorbell of `qp` rang: says when what it announced is to be executed. `lid` is this device's.
    #[cold]
    pub(crate) fn announce(&self, qp: &mut SoftQp, lid: u16, now_ns: u64, deferred: &mut Deferred) {
        let producer = qp.sq_producer();
        let mut counter = qp.announced.back().map_or(qp.sq_limit, |&(_, end)| end);
        let last_ns = qp.announced.back().map_or(0, |&(at_ns, _)| at_ns);
        match self {
            Self::Immediate => {}
            Self::Delay { ns } => {
                let at_ns = now_ns.saturating_add(*ns);
                qp.announced.push_back((at_ns, producer));
                deferred.schedule(at_ns, qp.qpn);
            }
            Self::Model(model) => {
                let peer = qp.remote().map(|r| (r.peer.lid, r.qpn()));
                let mut last_ns = last_ns;
                while counter != producer {
                    let (blocks, load) = load(qp, counter, producer.wrapping_sub(counter));
                    counter = counter.wrapping_add(blocks);
                    // In order, whatever the jitter says.
                    last_ns = model.arrival_ns(now_ns, (lid, qp.qpn), peer, &load).max(last_ns);
                    qp.announced.push_back((last_ns, counter));
                    deferred.schedule(last_ns, qp.qpn);
                }
            }
        }
    }
}

/// WQEBBs and weight of the WQE at `counter`; `outstanding` WQEBBs at most.
fn load(qp: &SoftQp, counter: u16, outstanding: u16) -> (u16, Load) {
    // SAFETY: a WQEBB inside the SQ, which the driver does not touch between the doorbell and the completion.
    let block = |at: u16| unsafe { qp.wqebb(counter.wrapping_add(at)).cast::<[u8; WQEBB]>().read() };
    let first = block(0);
    let ctrl = CtrlSegment::parse(first.first_chunk().unwrap_or(&[0; SEGMENT]));
    let blocks = usize::from(ctrl.ds).div_ceil(WQEBB / SEGMENT).clamp(1, usize::from(outstanding).max(1));
    let opcode = Opcode::from_wire(ctrl.opcode);
    let takes_receive = matches!(opcode, Some(Opcode::RdmaWriteImm | Opcode::Send | Opcode::SendImm));
    let header = if matches!(opcode, Some(Opcode::Send | Opcode::SendImm)) { 1 } else { 2 };
    let mut bytes = 0;
    let mut segment = header;
    while segment < usize::from(ctrl.ds) && segment < blocks * (WQEBB / SEGMENT) {
        let block = block((segment * SEGMENT / WQEBB) as u16);
        let Some(data) = block[segment * SEGMENT % WQEBB..].first_chunk::<SEGMENT>() else { break };
        let inline = InlineHeader::parse(&[data[0], data[1], data[2], data[3]]);
        bytes += inline.map_or_else(|| DataSegment::parse(data).byte_count, |header| header.byte_count);
        segment += inline.map_or(1, |header| InlineHeader::segments(header.byte_count as usize));
    }
    let is_unordered = takes_receive && qp.remote().is_some_and(|r| r.receives.is_unordered());
    (blocks as u16, Load { bytes: u64::from(bytes), takes_receive, is_unordered })
}
