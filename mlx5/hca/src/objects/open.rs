//! Opening a device, and its description.

use core::sync::atomic::Ordering;
use std::cell::{Cell, RefCell};
use std::io;

use copyrpc_shm::sync::{FIRST, LightBarrier};
use mlx5_wire::{MAX_CQE, MAX_INLINE, MAX_RECV_SGE, MAX_RECV_WR, MAX_SEND_WR};

use crate::debug::faults;
use crate::debug::trace::Trace;
use crate::deferred::LANE_RETRY_NS;
use crate::error::OpenError;
use crate::options::SoftOptions;
use crate::packets::port::WirePort;
use crate::queues::qp::Mode;
use crate::random::Random;
use crate::shared::arena::PAGE;
use crate::shared::fabric::Membership;
use crate::shared::memory::{DeviceMemory, commit, ready_words};
use crate::types::request::Ways;
use crate::{COMP_VECTORS, DeviceInfo, Engine, Hca, State};

/// Joins the fabric and opens the port for packets. If the UDP port of a virtual function is taken,
/// by a device of another fabric, user or kind, tries the next virtual function.
fn join(
    options: &SoftOptions,
    memory: &DeviceMemory,
) -> Result<(Membership, Option<Box<WirePort>>), OpenError> {
    let port = options.port.as_ref();
    let join = |behind, ways| Membership::join(&options.fabric, memory, port, behind, ways);
    let Some(roce) = &options.roce else {
        let ways = Ways {
            memory: true,
            packets: false,
        };
        return Ok((join(None, ways)?, None));
    };
    if !options.timing.is_immediate() {
        return Err(OpenError::WireInModel);
    }
    let ways = Ways {
        memory: !roce.sends_packets_only(),
        packets: true,
    };
    let (mut behind, mut taken) = (0, None);
    loop {
        let membership = match (join(Some(behind), ways), taken) {
            (Err(OpenError::NoFreeLid(_)), Some(taken)) => return Err(taken),
            (joined, _) => joined?,
        };
        // The secret of the port is a random number that only this user's processes can read.
        match WirePort::open(
            roce,
            port.map(|_| membership.lid),
            memory.ids()[2].token,
            (membership.seed, &options.clock),
        ) {
            Err(error) if port.is_some() && error.is_taken() => {
                (behind, taken) = (membership.lid, Some(error))
            }
            port => {
                let mut port = port?;
                port.traffic = options.counters.and_then(<[_]>::first);
                return Ok((membership, Some(Box::new(port))));
            }
        }
    }
}

impl Hca {
    /// Opens a device and joins its fabric.
    ///
    /// # Errors
    /// See [`OpenError`]. [`OpenError::NoFreeLid`] if all LIDs are taken, or all
    /// [`MAX_VF`](crate::MAX_VF) virtual functions of the port. After an error, nothing of the
    /// device is left behind.
    pub fn open(options: &SoftOptions) -> Result<Self, OpenError> {
        let arena_bytes = options
            .arena_bytes
            .checked_next_multiple_of(PAGE)
            .unwrap_or(options.arena_bytes);
        let memory =
            DeviceMemory::create(arena_bytes).map_err(|(what, source)| OpenError::Memory {
                what,
                source: io::Error::other(source),
            })?;
        let pages = commit(&memory.control_memfd, &memory.control().header)
            .and_then(|()| commit(&memory.lanes_memfd, &memory.lanes().ready))
            .and_then(|()| commit(&memory.lanes_memfd, &memory.lanes().datagram_ready))
            .and_then(|()| commit(&memory.lanes_memfd, &memory.lanes().sleep));
        pages.map_err(|source| OpenError::Memory {
            what: "the device's tables",
            source: io::Error::other(source),
        })?;
        // The stamp of a free entry is 0, which would match key 0. So entry 0 gets another stamp.
        memory.mr(0).stamp.store(u64::MAX, Ordering::Relaxed);
        // The first barrier in a process registers it with the kernel, which waits for all CPUs if
        // the process has several threads: up to seconds on a busy machine. So it is not done in
        // the first doorbell, where a peer would consider this process stopped.
        let barrier = LightBarrier::of_process();
        memory
            .control()
            .header
            .has_fences
            .store(barrier.is_fence().into(), Ordering::Relaxed);
        let (membership, port) = join(options, &memory)?;
        let random = &mut Random::new(membership.seed);
        let mut state = State::new(arena_bytes, &options.faults, ready_words(&memory), random);
        let is_plain = options.timing.is_immediate()
            && !options.strict
            && !options.trace
            && options.counters.is_none();
        let counters = options.counters.filter(|_| membership.shares_memory());
        if !is_plain || port.is_some() || options.clock.steps() || state.queues.injector.is_some() {
            state.deferred.add_extras();
        }
        state.wire.port = port;
        Ok(Self {
            membership,
            memory,
            dead_peer_timeout_ns: options.dead_peer_timeout_ns,
            clock: options.clock.clone(),
            timing: options.timing.clone(),
            strict: options.strict,
            checks_buffers: options.strict || options.check_buffers,
            barrier,
            mode: if is_plain {
                Mode::Plain
            } else {
                Mode::Ordinary
            },
            trace: options.trace.then(|| Trace::new(options.clock.clone())),
            is_watched: options.trace || !options.timing.is_immediate() || counters.is_some(),
            counters,
            has_exact_lanes: options.trace || options.timing.is_model(),
            port: options.port,
            has_chores: Cell::new(false),
            failed: RefCell::default(),
            is_port_up: Cell::new(true),
            events: RefCell::default(),
            differences: RefCell::default(),
            rnr_naks: Cell::new(0),
            compressed: Cell::new(0),
            sends: Cell::new(0),
            registrations: Cell::new(FIRST),
            state: RefCell::new(state),
        })
    }

    /// Returns the device's description and its counters.
    #[must_use]
    pub fn info(&self) -> DeviceInfo {
        let state = self.state.borrow();
        DeviceInfo {
            name: format!("soft:lid={}", self.membership.lid),
            engine: Engine::Software,
            transport: self.membership.describe(),
            max_send_wr: MAX_SEND_WR,
            max_recv_wr: MAX_RECV_WR,
            max_recv_sge: MAX_RECV_SGE,
            max_inline_data: MAX_INLINE as u32,
            max_cqe: MAX_CQE,
            comp_vectors: COMP_VECTORS,
            max_srq_wr: MAX_RECV_WR,
            has_atomics: true,
            numa_node: None,
            modes: faults::modes(self, state.queues.injector.as_deref()),
            dead_peer_timeout_ns: self.dead_peer_timeout_ns,
            quarantined: state.quarantined,
            violations: state.violations.len() as u64,
            rnr_naks: Some(self.rnr_naks.get()),
            packets: state.wire.port.as_ref().map(|port| port.counters),
        }
    }

    /// Returns the number of receive completions that were written into compressed sessions.
    #[must_use]
    pub fn compressed(&self) -> u64 {
        self.compressed.get()
    }

    /// Returns the hash over all events of this device since it was opened. `None` if it is not
    /// traced.
    #[must_use]
    pub fn trace_hash(&self) -> Option<u64> {
        self.trace.as_ref().map(Trace::hash)
    }

    /// Returns the time of the next event that the device has to handle by itself (a retry or a
    /// delayed operation), in ns of its clock.
    #[must_use]
    pub fn next_event_ns(&self) -> Option<u64> {
        // A ready bit that is still set belongs to a lane that a fault skipped.
        let is_ready = self.has_exact_lanes && ready_words(&self.memory).any();
        let again_ns = is_ready.then(|| self.clock.now_ns().saturating_add(LANE_RETRY_NS));
        [self.state.borrow().next_event_ns(), again_ns]
            .into_iter()
            .flatten()
            .min()
    }
}
