//! The objects of an open device, and the commands on them.

mod asynchronous;
mod bfregs;
pub(crate) mod cq;
pub(crate) mod device;
pub(crate) mod doorbells;
mod modify;
mod paths;
mod qp;
mod regions;
mod srq;
mod table;

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use mlx5_hca::{
    CreateError, FabricSpec, Hca, OpenError, Port, Queue, Service, SoftOptions, Violation,
};

use crate::abi::transitions::State;
use crate::abi::verbs::QueryQpResp;
use crate::files::channel::Channel;
use crate::files::counters;
use crate::objects::bfregs::Bfregs;
use crate::objects::doorbells::Doorbells;
use crate::objects::table::Table;
use crate::options::config::Link;
use crate::options::errno::Errno;
use crate::options::limits::Limit;
use crate::options::log;
use crate::options::settings::Settings;

/// Time for which operations towards a dead process are retried, in ns.
const DEAD_PEER_TIMEOUT_NS: u64 = 10_000_000;

/// The HCA and its objects, indexed by the handles in commands.
#[derive(Debug)]
pub(crate) struct Objects {
    pub(crate) settings: &'static Settings,
    pub(crate) port: Port,
    pub(crate) hca: Hca,
    pub(crate) bfregs: Bfregs,
    /// Numbers of the protection domains.
    pub(crate) pds: Table<u32>,
    /// Protection domain of each address handle, by handle; libmlx5 makes the address vectors.
    pub(crate) ahs: Table<u32>,
    pub(crate) mrs: Table<Mr>,
    pub(crate) cqs: Table<Cq>,
    pub(crate) srqs: Table<Srq>,
    pub(crate) qps: Table<Qp>,
    /// Channel of asynchronous events. Its writing end stays open as long as the device, so that a
    /// read of the empty channel blocks.
    pub(crate) async_events: Arc<Channel>,
    pub(crate) opened: Instant,
    /// The queue pairs whose doorbells are checked, if the launcher requests the check.
    pub(crate) doorbells: Option<Doorbells>,
    /// Number of changes in the settings that the device has already made.
    pub(crate) changes_made: usize,
}

impl Objects {
    /// Joins the fabric.
    ///
    /// # Errors
    /// Joining failed; the log gives the reason. If the port for packets could not be bound, the
    /// error number is from bind(2) (`EADDRINUSE` if all ports are taken), otherwise `ENOMEM`.
    pub(crate) fn new(
        settings: &'static Settings,
        port: Port,
        bfregs: Bfregs,
        async_events: Arc<Channel>,
    ) -> Result<Self, Errno> {
        let options = SoftOptions {
            fabric: FabricSpec::Shared {
                dir: Some(settings.fabric.clone()),
            },
            port: Some(port),
            roce: if let Link::Ethernet(options) = settings.link {
                options.cloned()
            } else {
                None
            },
            // The arena is small, because regions are memory of the program.
            arena_bytes: 4096,
            dead_peer_timeout_ns: DEAD_PEER_TIMEOUT_NS,
            faults: settings.of_hca.clone(),
            timing: settings.timing.clone(),
            check_buffers: settings.check_buffers,
            counters: counters::of_ports(settings),
            ..SoftOptions::default()
        };
        let hca = Hca::open(&options).map_err(|error| {
            log::error(
                settings,
                format_args!("the device cannot be opened: {error}"),
            );
            match &error {
                OpenError::Wire { source, .. } => {
                    Errno(source.raw_os_error().unwrap_or(libc::EADDRNOTAVAIL))
                }
                _ => Errno(libc::ENOMEM),
            }
        })?;
        Ok(Self {
            settings,
            port,
            hca,
            bfregs,
            pds: Table::default(),
            ahs: Table::default(),
            mrs: Table::default(),
            cqs: Table::default(),
            srqs: Table::default(),
            qps: Table::default(),
            async_events,
            opened: Instant::now(),
            doorbells: None,
            changes_made: 0,
        })
    }

    /// Refuses a value above a limit of the launcher (`EINVAL`).
    pub(crate) fn within(&self, limit: Limit, value: impl Into<u64>) -> Result<(), Errno> {
        let (value, legal) = (value.into(), self.settings.limit(limit, u64::MAX));
        if value > legal {
            let name: &str = limit.into();
            log::refused(
                self.settings,
                format_args!("{value} is above --limit max_{name}={legal}"),
            );
        }
        Errno(libc::EINVAL).when(value > legal)
    }

    /// Refuses another object if as many exist as a limit of the launcher allows (`ENOMEM`).
    pub(crate) fn has_room(&self, limit: Limit, objects: usize) -> Result<(), Errno> {
        self.within(limit, objects as u64 + 1)
            .map_err(|_| Errno(libc::ENOMEM))
    }

    pub(crate) fn check_doorbells(&mut self) {
        if let Some(broken) = self.doorbells.as_mut().and_then(Doorbells::check) {
            self.end_by(&broken);
        }
    }

    /// Logs a violation of a rule, and fails the queue pair. A NIC would not report the violation,
    /// or would give a wrong result.
    pub(crate) fn end_by(&self, broken: &Violation) {
        log::error(self.settings, format_args!("{broken}"));
        if let Queue::Send(qpn) = broken.queue {
            self.hca.fail_qp(qpn);
        }
    }

    /// Returns the error number for a queue that could not be created.
    pub(crate) fn refused(&self, error: &CreateError) -> Errno {
        log::refused(self.settings, format_args!("{error}"));
        match error {
            CreateError::OutOfRange { .. } | CreateError::Illegal { .. } => Errno(libc::EINVAL),
            _ => Errno(libc::ENOMEM),
        }
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        if let Some(doorbells) = &self.doorbells {
            let counts = doorbells.counts();
            log::refused(self.settings, format_args!("doorbells: {counts}"));
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Mr {
    pub(crate) pd: u32,
    /// The key; `None` if REREG_MR was to replace the memory, and the new memory was refused.
    pub(crate) key: Option<u32>,
    pub(crate) start: u64,
    pub(crate) length: u64,
    pub(crate) access_flags: u32,
}

#[derive(Debug)]
pub(crate) struct Qp {
    /// The program's name for the queue pair, in events.
    pub(crate) user_handle: u64,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) srq: Option<u32>,
    pub(crate) qpn: u32,
    pub(crate) service: Service,
    /// The state that the driver set; the HCA may since have failed the queue pair.
    pub(crate) state: State,
    /// The attributes that QUERY_QP returns, except the state: the attributes that MODIFY_QP set,
    /// and the capacities.
    pub(crate) attributes: QueryQpResp,
    /// The attributes that QUERY_QP returns in RESET: only the capacities.
    pub(crate) in_reset: QueryQpResp,
    /// Number of the BlueFlame register from [`Bfregs`]; `None` if the driver chose a register.
    pub(crate) bfreg: Option<u32>,
}

#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) cqn: u32,
    pub(crate) channel: Option<Arc<Channel>>,
    /// The program's name for the completion queue, in events.
    pub(crate) user_handle: u64,
}

#[derive(Debug)]
pub(crate) struct Srq {
    pub(crate) pd: u32,
    pub(crate) srqn: u32,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    /// The program's name for the queue, in events.
    pub(crate) user_handle: u64,
    pub(crate) limit: u32,
    /// Whether there is an event when fewer receives than `limit` are posted.
    pub(crate) is_armed: Cell<bool>,
}
