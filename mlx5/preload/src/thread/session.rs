//! The state of one open device, and the commands on it.

use std::time::Instant;

use mlx5_hca::Port;

use crate::abi::verbs::number;
use crate::command::{Call, LATER, NO_DEVX, Reply};
use crate::files::jobs::Job;
use crate::objects::Objects;
use crate::objects::doorbells::{Doorbells, Registers};
use crate::options::errno::Errno;
use crate::options::settings::Settings;
use crate::options::{log, names};
use crate::system::sys;

/// An open device, from open(2) to close(2) and munmap(2).
#[derive(Debug)]
pub(crate) struct Session {
    settings: &'static Settings,
    port: Port,
    inode: libc::ino_t,
    /// The registers, if doorbells are checked, until GET_CONTEXT takes the registers.
    registers: Option<Registers>,
    /// Present from GET_CONTEXT on.
    objects: Option<Objects>,
    /// Whether the last GET_CONTEXT was refused because it asked for DEVX.
    wants_context: bool,
    /// The commands that wait for a peer, each with the time at which it began to wait.
    waiting: Vec<(Job, Instant)>,
}

impl Session {
    pub(crate) fn new(
        settings: &'static Settings,
        index: usize,
        inode: libc::ino_t,
        registers: Option<Registers>,
    ) -> Self {
        Self {
            settings,
            port: Port {
                network: settings.network,
                index,
            },
            inode,
            registers,
            objects: None,
            wants_context: false,
            waiting: Vec::new(),
        }
    }

    /// Returns whether the program has a part of the device file mapped.
    pub(crate) fn is_mapped(&self) -> bool {
        let own = usize::from(self.settings.check_doorbells);
        sys::mappings_of(self.inode) > own
    }

    /// Lets the HCA work, sends due events, and tries waiting commands again. Returns whether the
    /// HCA had work, or there was an event.
    pub(crate) fn progress(&mut self) -> bool {
        core::mem::take(&mut self.waiting)
            .into_iter()
            .for_each(|(job, since)| self.attempt(job, since));
        let Some(objects) = &mut self.objects else {
            return false;
        };
        objects.check_doorbells();
        let has_worked = objects.hca.poll();
        let has_events = objects.send_events() | objects.send_async_events();
        has_events || has_worked
    }

    /// Carries out a command, now or in a later [`progress`](Self::progress), and answers it. The
    /// error numbers are the numbers that a kernel returns.
    pub(crate) fn execute(&mut self, job: Job) {
        let refused = self
            .settings
            .command_fault(job.call.number)
            .and_then(|()| job.call.check_response());
        match refused {
            Ok(()) => self.attempt(job, Instant::now()),
            Err(errno) => self.answer(job, Err(errno)),
        }
    }

    fn attempt(&mut self, job: Job, since: Instant) {
        match self.dispatch(&job.call, since) {
            Err(LATER) => self.waiting.push((job, since)),
            done => self.answer(job, done),
        }
    }

    fn answer(&mut self, job: Job, done: Result<Reply, Errno>) {
        let code = job.call.number;
        let name = names::command(code).unwrap_or("unknown command");
        let form = if job.call.is_extended { "ex " } else { "" };
        let result = done.and_then(|reply| job.call.respond(&reply).map(|()| reply));
        if code == number::GET_CONTEXT {
            self.wants_context = matches!(&result, Err(NO_DEVX));
        }
        match &result {
            Ok(reply) => log::command(self.settings, format_args!("{form}{name} {}", reply.note)),
            Err(errno) => {
                // libmlx5 first requests a context with DEVX, and then a context without DEVX.
                log::answered(
                    self.settings,
                    format_args!("{form}{name} ({code})"),
                    *errno,
                    self.wants_context && code == number::GET_CONTEXT,
                );
            }
        }
        job.answer(result.map(drop));
    }

    fn dispatch(&mut self, call: &Call, since: Instant) -> Result<Reply, Errno> {
        if call.number == number::GET_CONTEXT && !call.is_extended {
            Errno(libc::EINVAL).when(self.objects.is_some())?;
            let (mut objects, reply) =
                crate::objects::device::get_context(call, self.settings, self.port)?;
            objects.doorbells = self.registers.take().map(Doorbells::new);
            self.objects = Some(objects);
            return Ok(reply);
        }
        let objects = self.objects.as_mut().ok_or(Errno(libc::EINVAL))?;
        match (call.number, call.is_extended) {
            (number::QUERY_DEVICE, false) => objects.query_device(call),
            (number::QUERY_DEVICE, true) => objects.query_device_extended(call),
            (number::QUERY_PORT, false) => objects.query_port(call),
            (number::ALLOC_PD, false) => objects.alloc_pd(call),
            (number::DEALLOC_PD, false) => objects.dealloc_pd(call),
            (number::CREATE_AH, false) => objects.create_ah(call),
            (number::DESTROY_AH, false) => objects.destroy_ah(call),
            (number::REG_MR, false) => objects.reg_mr(call),
            (number::REREG_MR, false) => objects.rereg_mr(call, since),
            (number::DEREG_MR, false) => objects.dereg_mr(call, since),
            (number::CREATE_COMP_CHANNEL, false) => crate::objects::cq::create_channel(call),
            (number::CREATE_CQ, false) => objects.create_cq(call),
            (number::CREATE_CQ, true) => objects.create_cq_extended(call),
            (number::DESTROY_CQ, false) => objects.destroy_cq(call),
            (number::CREATE_SRQ, false) => objects.create_srq(call),
            (number::CREATE_XSRQ, false) => objects.create_xsrq(call),
            (number::MODIFY_SRQ, false) => objects.modify_srq(call),
            (number::QUERY_SRQ, false) => objects.query_srq(call),
            (number::DESTROY_SRQ, false) => objects.destroy_srq(call),
            (number::CREATE_QP, false) => objects.create_qp(call),
            (number::CREATE_QP, true) => objects.create_qp_extended(call),
            (number::QUERY_QP, false) => objects.query_qp(call),
            (number::MODIFY_QP, false) => objects.modify_qp(call),
            (number::MODIFY_QP, true) => objects.modify_qp_extended(call),
            (number::DESTROY_QP, false) => objects.destroy_qp(call),
            _ => Err(Errno(libc::EOPNOTSUPP)),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.wants_context {
            log::refused(
                self.settings,
                format_args!("the device was opened for DEVX only, and refused: {NO_DEVX}"),
            );
        }
    }
}
