//! Costs of a network of NICs: the times at which each WQE has its effect, and at which its
//! completion is visible.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::network::{Network, Random, ReceiveQueue, Request, Times};
use crate::sim::contexts::ContextCache;

/// Costs of a NIC. All times are in ns, of the clock that the devices share.
///
/// A message posted to an idle NIC has its effect after `doorbell_ns + send_ns + link_ns`, plus
/// `byte_ps` for each byte, plus `receive_ns` if it takes a receive. Its completion is visible
/// `link_ns` later. Each end adds `context_miss_ns` if it does not hold the queue pair's context.
/// The target's NIC sends the response of a READ or an atomic: that takes `send_ns + link_ns`, plus
/// `byte_ps` for each byte.
///
/// A NIC sends one message at a time, and fetches the context for it during that time. It takes one
/// receive at a time, from each queue at its own rate. Later messages wait. A context that is
/// fetched for an arriving message delays only that message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicParameters {
    /// Time from the doorbell to the first WQE read.
    pub doorbell_ns: u64,
    /// Time per WQE sent.
    pub send_ns: u64,
    /// Time per byte sent, in ps.
    pub byte_ps: u64,
    /// Time through the network, one way. The acknowledgement takes the same.
    pub link_ns: u64,
    /// Time per receive taken from a ring, or from a list if its successor is its neighbour in
    /// memory.
    pub receive_ns: u64,
    /// Time per receive whose successor in the list is not its neighbour, so that it cannot be
    /// prefetched.
    pub unordered_receive_ns: u64,
    /// Minimum time between two receives taken from the same queue. Other queues of the NIC supply
    /// receives meanwhile. 0: no minimum.
    pub queue_receive_ns: u64,
    /// Number of queue pair contexts that the NIC holds. The least recently used one is evicted.
    pub context_entries: usize,
    /// Time to fetch a context that the NIC does not hold, at either end.
    pub context_miss_ns: u64,
    /// Maximum random delay added to a message.
    pub jitter_ns: u64,
    /// Seed of the random numbers: the same seed gives the same run.
    pub seed: u64,
}

impl Default for NicParameters {
    /// Makes the parameters of a network with a round trip of about 2 us, 100 Gbit/s, and assumed
    /// receive rates (5.4 and 1.8 million per second).
    fn default() -> Self {
        Self {
            doorbell_ns: 250,
            send_ns: 10,
            byte_ps: 80,
            link_ns: 700,
            receive_ns: 185,
            unordered_receive_ns: 555,
            queue_receive_ns: 0,
            context_entries: 1024,
            context_miss_ns: 400,
            jitter_ns: 0,
            seed: 1,
        }
    }
}

/// The NICs of one network. Clones are the same network: give one to every device that shares its
/// clock.
#[derive(Clone)]
pub struct NicModel {
    parameters: NicParameters,
    nics: Arc<Mutex<Nics>>,
}

impl fmt::Debug for NicModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NicModel")
            .field("parameters", &self.parameters)
            .finish_non_exhaustive()
    }
}

struct Nics {
    by_lid: Vec<Nic>,
    random: Random,
}

/// Counts of a NIC's uses of queue pair contexts, and of its misses.
///
/// Sent messages, including responses to READs and atomics, are counted separately from arrivals. A
/// NIC sends one message at a time, so a context fetched for a sent message delays all later
/// messages. A context fetched for an arrival delays only that message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextUses {
    /// Messages sent.
    pub sends: u64,
    /// Sends whose context had to be fetched.
    pub send_misses: u64,
    /// Messages that arrived.
    pub arrivals: u64,
    /// Arrivals whose context had to be fetched.
    pub arrival_misses: u64,
}

#[derive(Default)]
struct Nic {
    send_free_ns: u64,
    receive_free_ns: u64,
    contexts: ContextCache,
    uses: ContextUses,
    /// The next receives, by receive queue.
    receives: Vec<NextReceive>,
}

/// The receive of a queue that the next message will take.
#[derive(Clone, Copy, Default)]
struct NextReceive {
    count: u32,
    index: u16,
    /// Time at which the queue can supply this receive.
    free_ns: u64,
}

/// Returns the sum of `start_ns` and `costs`, or `u64::MAX` if that is less.
fn sum_ns<const N: usize>(start_ns: u64, costs: [u64; N]) -> u64 {
    costs.into_iter().fold(start_ns, u64::saturating_add)
}

/// Returns the entry with this number, after making the entries up to it.
fn at_number<T: Default>(table: &mut Vec<T>, number: usize) -> &mut T {
    if number >= table.len() {
        table.resize_with(number + 1, T::default);
    }
    &mut table[number]
}

impl Nic {
    /// Uses a context for a message that arrives (`arrives`) or is sent. Returns the cost in ns.
    fn context_ns(&mut self, qpn: u32, arrives: bool, parameters: &NicParameters) -> u64 {
        let is_miss = !self.contexts.holds(qpn, parameters.context_entries);
        let ContextUses {
            sends,
            send_misses,
            arrivals,
            arrival_misses,
        } = &mut self.uses;
        let (uses, misses) = if arrives {
            (arrivals, arrival_misses)
        } else {
            (sends, send_misses)
        };
        *uses += 1;
        *misses += u64::from(is_miss);
        if is_miss {
            parameters.context_miss_ns
        } else {
            0
        }
    }

    /// Sends a message from `start_ns` on. Returns the time at which its last byte is sent.
    fn send(&mut self, start_ns: u64, bytes: u64, qpn: u32, parameters: &NicParameters) -> u64 {
        let bytes_ns = bytes.saturating_mul(parameters.byte_ps) / 1000;
        let costs = [
            parameters.send_ns,
            bytes_ns,
            self.context_ns(qpn, false, parameters),
        ];
        self.send_free_ns = sum_ns(start_ns.max(self.send_free_ns), costs);
        self.send_free_ns
    }

    /// Takes the next receive for a message that came at `came_ns`, and whose queue pair is ready
    /// for it at `at_ns`. Returns the time at which the message has the receive. A message that
    /// waits for earlier messages of its queue pair does not delay other messages.
    fn receive(
        &mut self,
        came_ns: u64,
        at_ns: u64,
        rqn: u32,
        receives: &ReceiveQueue,
        parameters: &NicParameters,
    ) -> u64 {
        let next = at_number(&mut self.receives, rqn as usize);
        let (count, index) = receives.head();
        let ahead = next.count.wrapping_sub(count);
        if ahead == 0 || ahead > u32::from(receives.capacity()) {
            (next.count, next.index) = (count, index);
        }
        let index = next.index;
        (next.count, next.index) = (next.count.wrapping_add(1), receives.successor(index));
        let is_prefetched = receives.are_neighbours(index, next.index);
        let receive_ns = if is_prefetched {
            parameters.receive_ns
        } else {
            parameters.unordered_receive_ns
        };
        self.receive_free_ns = sum_ns(came_ns.max(self.receive_free_ns), [receive_ns]);
        let taken_ns = self
            .receive_free_ns
            .max(sum_ns(at_ns, [receive_ns]))
            .max(next.free_ns);
        next.free_ns = sum_ns(taken_ns, [parameters.queue_receive_ns]);
        taken_ns
    }
}

impl NicModel {
    /// Makes a network of idle NICs, which hold no context of a queue pair yet.
    #[must_use]
    pub fn new(parameters: NicParameters) -> Self {
        let nics = Nics {
            by_lid: Vec::new(),
            random: Random::new(parameters.seed),
        };
        Self {
            parameters,
            nics: Arc::new(Mutex::new(nics)),
        }
    }

    pub(crate) fn context_uses(&self, lid: u16) -> ContextUses {
        let nics = self.nics.lock().unwrap_or_else(PoisonError::into_inner);
        nics.by_lid
            .get(usize::from(lid))
            .map_or_else(ContextUses::default, |nic| nic.uses)
    }
}

impl Network for NicModel {
    fn times(&self, request: &Request<'_>) -> Times {
        let Self { parameters, nics } = self;
        let Nics { by_lid, random } = &mut *nics.lock().unwrap_or_else(PoisonError::into_inner);
        let (lid, qpn) = request.own;
        let left_ns = at_number(by_lid, lid.into()).send(
            sum_ns(request.posted_ns, [parameters.doorbell_ns]),
            request.bytes,
            qpn,
            parameters,
        );
        let jitter_ns = if parameters.jitter_ns == 0 {
            0
        } else {
            random.below(parameters.jitter_ns.saturating_add(1))
        };
        let came_ns = sum_ns(left_ns, [parameters.link_ns, jitter_ns]);
        let arrived_ns = came_ns.max(request.after_ns);
        let Some((lid, qpn)) = request.peer else {
            return Times {
                effect_ns: arrived_ns,
                acknowledged_ns: arrived_ns,
            };
        };
        let target = at_number(by_lid, lid.into());
        let mut effect_ns = sum_ns(arrived_ns, [target.context_ns(qpn, true, parameters)]);
        if let Some((rqn, receives)) = request.receives {
            effect_ns = target.receive(came_ns, effect_ns, rqn, receives, parameters);
        }
        let answered_ns = request.response.map_or(effect_ns, |bytes| {
            target.send(effect_ns, bytes, qpn, parameters)
        });
        Times {
            effect_ns,
            acknowledged_ns: sum_ns(answered_ns, [parameters.link_ns]),
        }
    }
}
