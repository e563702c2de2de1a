//! The device and its port: GET_CONTEXT and the queries.

use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::Arc;

use mlx5_hca::{MAX_REGIONS, Port};
use zerocopy::FromZeros;

use crate::abi::MAX_RD_ATOMIC;
use crate::abi::mlx5::{
    ALLOC_UCTX_DEVX, AllocUcontextReq, AllocUcontextResp, QueryDeviceResp as DriverResp,
};
use crate::abi::verbs::{
    AsyncEventDesc, ExQueryDevice, ExQueryDeviceResp, GetContext, GetContextResp, QueryDevice,
    QueryDeviceResp, QueryPort, QueryPortResp,
};
use crate::command::{Call, NO_DEVX, Reply};
use crate::files::channel::Channel;
use crate::files::fds::{self, File};
use crate::objects::Objects;
use crate::objects::bfregs::Bfregs;
use crate::options::config::{DEVICE_ID, FIRMWARE, GID_ENTRIES, Link, guid};
use crate::options::errno::Errno;
use crate::options::faults::Fault;
use crate::options::limits::Limit;
use crate::options::settings::Settings;
use crate::system::sys;

/// Maximum size of a send queue, in WQEBBs, and of a receive queue, in WQEs.
pub(crate) const MAX_WQES: u32 = 1 << 15;
/// Maximum size of a completion queue, minus one.
pub(crate) const MAX_CQE: u32 = (1 << 22) - 1;
/// Maximum number of buffers of a receive: the segments of a WQE of 512 bytes, minus a next segment
/// and a terminator.
pub(crate) const MAX_SGE: u32 = 30;
/// Maximum length of a message, in bytes.
const MAX_MESSAGE: u32 = 1 << 30;
pub(crate) const COMP_VECTORS: u32 = 4;
/// Length of a BlueFlame register with its two buffers, in bytes.
const BF_REG_BYTES: u32 = 512;

/// Capability flags: `IB_DEVICE_BAD_PKEY_CNTR`, `_PORT_ACTIVE_EVENT`, `_SYS_IMAGE_GUID`,
/// `_RC_RNR_NAK_GEN`.
const CAPABILITIES: u32 = 1 << 1 | 1 << 10 | 1 << 11 | 1 << 12;

/// Commands whose responses have a driver's part (`MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE`,
/// `_CREATE_AH`).
const DRIVER_RESPONSES: u8 = 1 << 0 | 1 << 1;

/// Carries out GET_CONTEXT: opens the HCA, and describes the doorbell registers to libmlx5.
pub(crate) fn get_context(
    call: &Call,
    settings: &'static Settings,
    port: Port,
) -> Result<(Objects, Reply), Errno> {
    let GetContext { .. } = call.request::<_, GetContextResp>()?;
    let request: AllocUcontextReq = call.driver();
    if request.flags & ALLOC_UCTX_DEVX != 0 {
        // libmlx5 requests DEVX first, and then repeats the request without it.
        return Err(NO_DEVX);
    }
    let bfregs = Bfregs::new(request.total_num_bfregs, request.num_low_latency_bfregs)?;
    let (reader, writer) = sys::pipe()?;
    let async_events = Arc::new(Channel::new::<AsyncEventDesc>(writer));
    fds::insert(reader.as_raw_fd(), File::Channel(Arc::clone(&async_events)))?;
    let response = AllocUcontextResp {
        qp_tab_size: 1 << 18,
        bf_reg_size: BF_REG_BYTES,
        // libmlx5 maps all of these registers at once, and identifies each by its number.
        tot_bfregs: bfregs.total(),
        // The distance between two doorbell records.
        cache_line_size: 64,
        max_sq_desc_sz: 1008,
        max_rq_desc_sz: 512,
        max_send_wqebb: MAX_WQES,
        max_recv_wr: MAX_WQES,
        max_srq_recv_wr: MAX_WQES,
        num_ports: 1,
        response_length: size_of::<AllocUcontextResp>() as u32,
        // In version 1, a CQE identifies its queue pair by the user index of CREATE_QP.
        cqe_version: request.max_cqe_version.min(1),
        cmds_supp_uhw: DRIVER_RESPONSES,
        // `MLX5_USER_INLINE_MODE_NONE`: no inline header is needed.
        eth_min_inline: 1,
        log_uar_size: 12,
        num_uars_per_page: 1,
        num_dyn_bfregs: 1024,
        ..AllocUcontextResp::new_zeroed()
    };
    let objects = Objects::new(settings, port, bfregs, async_events)?;
    let note = format!(
        "bfregs={}/{} lid={}",
        request.total_num_bfregs,
        request.num_low_latency_bfregs,
        objects.hca.lid()
    );
    let async_fd = reader.as_raw_fd() as u32;
    // From here on the program owns the descriptor.
    let _ = reader.into_raw_fd();
    Ok((
        objects,
        Reply::of(&GetContextResp {
            async_fd,
            num_comp_vectors: COMP_VECTORS,
        })
        .with(&response)
        .note(note),
    ))
}

impl Objects {
    fn capabilities(&self) -> QueryDeviceResp {
        let [major, minor, sub_minor] = FIRMWARE.map(u64::from);
        let has_srqs = !self.settings.has(Fault::NoSrqs);
        let of = |limit, of_hca: u32| self.settings.limit(limit, of_hca.into()) as u32;
        let of_srqs = |limit, of_hca| if has_srqs { of(limit, of_hca) } else { 0 };
        QueryDeviceResp {
            fw_ver: major << 32 | minor << 16 | sub_minor,
            node_guid: guid(self.port.index),
            sys_image_guid: guid(self.port.index),
            max_mr_size: self.settings.limit(Limit::MrSize, u64::MAX),
            page_size_cap: !0xfff,
            vendor_id: 0x2c9,
            vendor_part_id: DEVICE_ID.into(),
            max_qp: of(Limit::Qp, 1 << 14),
            max_qp_wr: of(Limit::QpWr, MAX_WQES),
            device_cap_flags: CAPABILITIES,
            max_sge: of(Limit::Sge, MAX_SGE),
            max_sge_rd: of(Limit::Sge, MAX_SGE),
            max_cq: of(Limit::Cq, 1 << 16),
            max_cqe: of(Limit::Cqe, MAX_CQE),
            max_mr: of(Limit::Mr, MAX_REGIONS),
            max_pd: 1 << 24,
            max_qp_rd_atom: of(Limit::QpRdAtom, MAX_RD_ATOMIC),
            max_res_rd_atom: MAX_RD_ATOMIC << 14,
            max_qp_init_rd_atom: of(Limit::QpRdAtom, MAX_RD_ATOMIC),
            // IB_ATOMIC_HCA: an operation is atomic only with respect to this device's atomics.
            atomic_cap: (!self.settings.has(Fault::NoAtomics)).into(),
            max_ah: i32::MAX as u32,
            max_srq: of_srqs(Limit::Srq, 1 << 15),
            max_srq_wr: of_srqs(Limit::SrqWr, MAX_WQES - 1),
            max_srq_sge: of_srqs(Limit::SrqSge, MAX_SGE),
            max_pkeys: 1,
            local_ca_ack_delay: 16,
            phys_port_cnt: 1,
            ..QueryDeviceResp::new_zeroed()
        }
    }

    pub(crate) fn query_device(&self, call: &Call) -> Result<Reply, Errno> {
        let QueryDevice { .. } = call.request::<_, QueryDeviceResp>()?;
        Ok(Reply::of(&self.capabilities()))
    }

    pub(crate) fn query_device_extended(&self, call: &Call) -> Result<Reply, Errno> {
        let ExQueryDevice { comp_mask, .. } = call.request::<_, ()>()?;
        Errno(libc::EINVAL).when(comp_mask != 0)?;
        call.check_room(size_of::<QueryDeviceResp>() + 8)?;
        let response = ExQueryDeviceResp {
            base: self.capabilities(),
            response_length: call.room().min(size_of::<ExQueryDeviceResp>()) as u32,
            device_cap_flags_ex: CAPABILITIES.into(),
            ..ExQueryDeviceResp::new_zeroed()
        };
        let driver = DriverResp {
            response_length: size_of::<DriverResp>() as u32,
            ..DriverResp::new_zeroed()
        };
        Ok(Reply::of(&response).with(&driver))
    }

    pub(crate) fn query_port(&self, call: &Call) -> Result<Reply, Errno> {
        let settings = self.settings;
        let is_up = !settings.has(Fault::PortDown) && self.hca.is_port_up();
        let QueryPort { port_num, .. } = call.request::<_, QueryPortResp>()?;
        Errno(libc::EINVAL).when(port_num != 1)?;
        let is_ethernet = matches!(settings.link, Link::Ethernet(_));
        // IB_PORT_CM_SUP, and for RoCE IB_PORT_IP_BASED_GIDS.
        let port_cap_flags = 1 << 16 | if is_ethernet { 1 << 26 } else { 0 };
        let lid = self.port.address().map_or(0, |address| address.lid);
        let response = QueryPortResp {
            port_cap_flags,
            max_msg_sz: MAX_MESSAGE,
            gid_tbl_len: GID_ENTRIES as u32,
            pkey_tbl_len: 1,
            lid,
            sm_lid: lid,
            // IB_PORT_ACTIVE or _DOWN.
            state: if is_up { 4 } else { 1 },
            // 4096 bytes.
            max_mtu: 5,
            active_mtu: self
                .hca
                .wire_address()
                .map_or(5, |(_, mtu)| (mtu.ilog2() - 7) as u8),
            max_vl_num: 1,
            subnet_timeout: 18,
            // 4X HDR: 200 Gb/s.
            active_width: 2,
            active_speed: 64,
            // LinkUp or Disabled.
            phys_state: if is_up { 5 } else { 3 },
            link_layer: if is_ethernet { 2 } else { 1 },
            // IB_UVERBS_QPF_GRH_REQUIRED.
            flags: u8::from(is_ethernet),
            ..QueryPortResp::new_zeroed()
        };
        Ok(Reply::of(&response))
    }
}
