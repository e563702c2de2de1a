//! Completion queues and their event channels.

use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::Arc;

use mlx5_hca::CqMemory;
use zerocopy::FromZeros;

use crate::abi::mlx5::{CreateCq as DriverCq, CreateCqResp as DriverCqResp};
use crate::abi::verbs::{
    CompEvent, CreateCompChannel, CreateCompChannelResp, CreateCq, CreateCqResp, DestroyCq,
    DestroyCqResp, ExCreateCq, ExCreateCqResp,
};
use crate::command::{Call, Reply};
use crate::files::channel::Channel;
use crate::files::fds::{self, File};
use crate::objects::device::{COMP_VECTORS, MAX_CQE};
use crate::objects::regions::place;
use crate::objects::{Cq, Objects, Qp};
use crate::options::errno::Errno;
use crate::options::limits::Limit;
use crate::options::log;
use crate::system::sys;
use crate::system::sys::Use;

/// `IB_UVERBS_CQ_FLAGS_IGNORE_OVERRUN`: the program itself prevents overruns.
const IGNORE_OVERRUN: u32 = 1 << 1;

pub(crate) fn create_channel(call: &Call) -> Result<Reply, Errno> {
    let CreateCompChannel { .. } = call.request::<_, CreateCompChannelResp>()?;
    let (reader, writer) = sys::pipe()?;
    fds::insert(
        reader.as_raw_fd(),
        File::Channel(Arc::new(Channel::new::<CompEvent>(writer))),
    )?;
    // From here on the program owns the descriptor.
    let fd = reader.into_raw_fd();
    Ok(Reply::of(&CreateCompChannelResp { fd: fd as u32 }).note(format!("-> fd={fd}")))
}

impl Objects {
    pub(crate) fn create_cq(&mut self, call: &Call) -> Result<Reply, Errno> {
        let request: CreateCq = call.request::<_, CreateCqResp>()?;
        self.make_cq(call, &request)
    }

    pub(crate) fn create_cq_extended(&mut self, call: &Call) -> Result<Reply, Errno> {
        let asked: ExCreateCq = call.request::<_, ExCreateCqResp>()?;
        Errno(libc::EOPNOTSUPP).when(asked.comp_mask != 0 || asked.flags & !IGNORE_OVERRUN != 0)?;
        let request = CreateCq {
            user_handle: asked.user_handle,
            cqe: asked.cqe,
            comp_vector: asked.comp_vector,
            comp_channel: asked.comp_channel,
            ..CreateCq::new_zeroed()
        };
        Ok(self.make_cq(call, &request)?.extended())
    }

    fn make_cq(&mut self, call: &Call, asked: &CreateCq) -> Result<Reply, Errno> {
        let request: DriverCq = call.driver();
        let is_legal = asked.cqe <= MAX_CQE && asked.comp_vector < COMP_VECTORS;
        Errno(libc::EINVAL).when(!is_legal || !matches!(request.cqe_size, 64 | 128))?;
        self.within(Limit::Cqe, asked.cqe)?;
        self.has_room(Limit::Cq, self.cqs.len())?;
        let entries = (asked.cqe + 1).next_power_of_two();
        let channel = match asked.comp_channel {
            ..0 => None,
            fd => Some(fds::channel(fd).ok_or(Errno(libc::EINVAL))?),
        };
        let memory = CqMemory {
            buffer: place(
                request.buf_addr,
                u64::from(entries) * u64::from(request.cqe_size),
                Use::Write,
            )?,
            entries,
            cqe_bytes: request.cqe_size,
            compression: request.cqe_comp_en != 0,
            record: place(request.db_addr, 8, Use::Write)?,
        };
        // SAFETY: `place` has checked the buffer and the record. libmlx5 keeps both until the queue
        // is destroyed, and accesses them as the queue of a device.
        let cqn = unsafe { self.hca.create_cq(&memory) }.map_err(|error| self.refused(&error))?;
        let cq_handle = self.cqs.insert(Cq {
            cqn,
            channel,
            user_handle: asked.user_handle,
        });
        let note = format!(
            "entries={entries}x{} -> cq={cq_handle} cqn={cqn:#x}",
            request.cqe_size
        );
        let response = CreateCqResp {
            cq_handle,
            cqe: entries - 1,
        };
        let driver = DriverCqResp { cqn, reserved: 0 };
        Ok(Reply::of(&response).with(&driver).note(note))
    }

    pub(crate) fn destroy_cq(&mut self, call: &Call) -> Result<Reply, Errno> {
        let DestroyCq { cq_handle, .. } = call.request::<_, DestroyCqResp>()?;
        self.cqs.get(cq_handle)?;
        let is_of = |qp: &Qp| qp.send_cq == cq_handle || qp.recv_cq == cq_handle;
        Errno(libc::EBUSY).when(self.qps.iter().any(is_of))?;
        let cq = self.cqs.remove(cq_handle)?;
        self.hca.destroy_cq(cq.cqn);
        let comp_events_reported = cq
            .channel
            .map_or(0, |channel| channel.forget(cq.user_handle));
        let note = format!("cq={cq_handle} events={comp_events_reported}");
        let async_events_reported = self.async_events.forget(cq.user_handle);
        Ok(Reply::of(&DestroyCqResp {
            comp_events_reported,
            async_events_reported,
        })
        .note(note))
    }

    /// Sends an event for each armed queue that holds a completion of the kind for which the queue
    /// was armed. Returns whether there was such a queue.
    pub(crate) fn send_events(&self) -> bool {
        let mut any = false;
        for cq in self.cqs.iter() {
            let Some(channel) = &cq.channel else { continue };
            if self.hca.take_event(cq.cqn) {
                any = true;
                if let Err(errno) = channel.send(&CompEvent {
                    cq_handle: cq.user_handle,
                }) {
                    log::error(
                        self.settings,
                        format_args!(
                            "an event of completion queue {:#x} is lost: {errno}",
                            cq.cqn
                        ),
                    );
                }
            }
        }
        any
    }
}
