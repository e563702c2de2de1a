//! MODIFY_QP: the attributes of a transition, its legality, and the HCA's part in it.

use mlx5_hca::wire::rnr_timer_ns;
use mlx5_hca::{
    Access, Address, ConnectError, ConnectOptions, GidKind, PacketAddress, Service, Terms,
};
use zerocopy::FromZeros;

use crate::abi::MAX_RD_ATOMIC;
use crate::abi::mlx5::ModifyQpResp as DriverResp;
use crate::abi::transitions::{State, attribute, is_legal};
use crate::abi::verbs::{ExModifyQp, ExModifyQpResp, ModifyQp, QueryQpResp};
use crate::command::{Call, Reply};
use crate::objects::paths::{Way, resolve};
use crate::objects::{Objects, Qp};
use crate::options::errno::Errno;
use crate::options::faults::Fault;
use crate::options::limits::Limit;
use crate::options::log;

/// The attributes that a mask selects from a request.
struct Selected<'a> {
    request: &'a ModifyQp,
    mask: u32,
}

impl Selected<'_> {
    fn has(&self, bit: u32) -> bool {
        self.mask & bit != 0
    }

    fn are_valid(&self) -> bool {
        use attribute::*;
        let at = self.request;
        let is_resource = |number: u8| u32::from(number) <= MAX_RD_ATOMIC;
        !(self.has(PORT) && at.port_num != 1
            || self.has(PKEY_INDEX) && at.pkey_index != 0
            || self.has(PATH_MTU) && !(1..=5).contains(&at.path_mtu)
            || self.has(TIMEOUT) && at.timeout > 31
            || self.has(RETRY_CNT) && at.retry_cnt > 7
            || self.has(RNR_RETRY) && at.rnr_retry > 7
            || self.has(MIN_RNR_TIMER) && at.min_rnr_timer > 31
            || self.has(MAX_QP_RD_ATOMIC) && !is_resource(at.max_rd_atomic)
            || self.has(MAX_DEST_RD_ATOMIC) && !is_resource(at.max_dest_rd_atomic)
            || self.has(AV) && at.dest.port_num != 1
            || self.has(ALT_PATH) && (at.alt_port_num, at.alt_dest.port_num) != (1, 1))
    }

    /// Copies the selected attributes to `kept`, which QUERY_QP returns.
    fn keep(&self, kept: &mut QueryQpResp) {
        use attribute::*;
        let new = self.request;
        let mut keep = |bit, copy: &dyn Fn(&mut QueryQpResp)| {
            if self.has(bit) {
                copy(kept);
            }
        };
        keep(ACCESS_FLAGS, &|at| at.qp_access_flags = new.qp_access_flags);
        keep(PKEY_INDEX, &|at| at.pkey_index = new.pkey_index);
        keep(PORT, &|at| at.port_num = new.port_num);
        keep(QKEY, &|at| at.qkey = new.qkey);
        keep(AV, &|at| at.dest = new.dest);
        keep(PATH_MTU, &|at| at.path_mtu = new.path_mtu);
        keep(TIMEOUT, &|at| at.timeout = new.timeout);
        keep(RETRY_CNT, &|at| at.retry_cnt = new.retry_cnt);
        keep(RNR_RETRY, &|at| at.rnr_retry = new.rnr_retry);
        keep(RQ_PSN, &|at| at.rq_psn = new.rq_psn);
        keep(MAX_QP_RD_ATOMIC, &|at| at.max_rd_atomic = new.max_rd_atomic);
        keep(ALT_PATH, &|at| {
            (at.alt_dest, at.alt_port_num) = (new.alt_dest, new.alt_port_num);
            (at.alt_timeout, at.alt_pkey_index) = (new.alt_timeout, new.alt_pkey_index);
        });
        keep(MIN_RNR_TIMER, &|at| at.min_rnr_timer = new.min_rnr_timer);
        keep(SQ_PSN, &|at| at.sq_psn = new.sq_psn);
        keep(MAX_DEST_RD_ATOMIC, &|at| {
            at.max_dest_rd_atomic = new.max_dest_rd_atomic
        });
        keep(PATH_MIG_STATE, &|at| at.path_mig_state = new.path_mig_state);
        keep(DEST_QPN, &|at| at.dest_qp_num = new.dest_qp_num);
    }
}

/// Returns the access that the attributes give the peer. A queue pair without resources for READs
/// and atomics (`max_dest_rd_atomic` is 0) answers neither of the two, so the kernel's mlx5 driver
/// (`set_qpc_atomic_flags`) removes both rights.
fn rights(at: &QueryQpResp) -> Access {
    let asked = Access::from_bits_truncate(at.qp_access_flags);
    if at.max_dest_rd_atomic == 0 {
        asked & Access::REMOTE_WRITE
    } else {
        asked
    }
}

/// Returns the terms of a connection that the attributes set, on a port whose source GID has this
/// format.
fn terms(at: &QueryQpResp, service: Service, format: GidKind) -> Terms {
    let is_reliable = service == Service::Connected;
    let psn = |psn: u32| if is_reliable { psn & 0xff_ffff } else { 0 };
    let reads = |count: u8| if is_reliable { count } else { 0 };
    Terms {
        format,
        mtu: 128 << at.path_mtu,
        sq_psn: psn(at.sq_psn),
        rq_psn: psn(at.rq_psn),
        max_rd_atomic: reads(at.max_rd_atomic),
        max_dest_rd_atomic: reads(at.max_dest_rd_atomic),
    }
}

fn options(at: &QueryQpResp) -> ConnectOptions {
    ConnectOptions {
        timeout: at.timeout,
        retry_count: at.retry_cnt,
        rnr_retry: at.rnr_retry,
        rnr_timer_ns: rnr_timer_ns(at.min_rnr_timer),
    }
}

impl Objects {
    pub(crate) fn modify_qp(&mut self, call: &Call) -> Result<Reply, Errno> {
        let request: ModifyQp = call.request::<_, ()>()?;
        let note = self.modify(&request)?;
        Ok(Reply::none().note(note))
    }

    /// Carries out the extended MODIFY_QP. A request that sets a rate limit is refused.
    pub(crate) fn modify_qp_extended(&mut self, call: &Call) -> Result<Reply, Errno> {
        let request: ExModifyQp = call.request::<_, ()>()?;
        let note = self.modify(&request.base)?;
        let response = ExModifyQpResp {
            comp_mask: 0,
            response_length: size_of::<ExModifyQpResp>() as u32,
        };
        let driver = DriverResp {
            response_length: size_of::<DriverResp>() as u32,
            ..DriverResp::new_zeroed()
        };
        Ok(Reply::of(&response).with(&driver).note(note))
    }

    fn modify(&mut self, request: &ModifyQp) -> Result<String, Errno> {
        const INVALID: Errno = Errno(libc::EINVAL);
        let (handle, mask) = (request.qp_handle, request.attr_mask);
        let qp = self.qps.get(handle)?;
        let selected = Selected { request, mask };
        let from = self.state(qp);
        let to = if selected.has(attribute::STATE) {
            State::from_repr(request.qp_state).ok_or(INVALID)?
        } else {
            from
        };
        INVALID.when(selected.has(attribute::CUR_STATE) && request.cur_qp_state != from as u8)?;
        Errno(libc::EOPNOTSUPP).when(to == State::SendQueueDrained)?;
        INVALID.when(!is_legal(qp.service, from, to, mask) || !selected.are_valid())?;
        let mut attributes = qp.attributes;
        selected.keep(&mut attributes);
        let reads = attributes.max_rd_atomic.max(attributes.max_dest_rd_atomic);
        self.within(Limit::QpRdAtom, reads)?;
        let has_atomics = rights(&attributes).contains(Access::REMOTE_ATOMIC);
        Errno(libc::EOPNOTSUPP).when(has_atomics && self.settings.has(Fault::NoAtomics))?;
        self.carry_out(qp, from, to, &attributes)?;
        match (&mut self.doorbells, to) {
            (Some(doorbells), State::ReadyToSend) => doorbells.start(qp.qpn),
            (Some(doorbells), State::Reset) => doorbells.stop(qp.qpn),
            _ => {}
        }
        let qp = self.qps.get_mut(handle)?;
        qp.state = to;
        qp.attributes = if to == State::Reset {
            qp.in_reset
        } else {
            attributes
        };
        let peer = match to {
            State::ReadyToReceive if qp.service != Service::Datagram => {
                format!(" remote_qpn={:#x}", attributes.dest_qp_num)
            }
            _ => String::new(),
        };
        Ok(format!(
            "qp={handle} {from:?} -> {to:?} mask={mask:#x}{peer}"
        ))
    }

    /// Makes the HCA perform the transition.
    fn carry_out(&self, qp: &Qp, from: State, to: State, at: &QueryQpResp) -> Result<(), Errno> {
        let is_connected = qp.service != Service::Datagram;
        if is_connected && matches!(to, State::ReadyToReceive | State::ReadyToSend) {
            let own = self.port.address();
            let source = own.and_then(|own| own.gids.get(usize::from(at.dest.sgid_index)));
            let format = source.map_or(GidKind::InfiniBand, |gid| gid.kind);
            self.hca.set_terms(qp.qpn, terms(at, qp.service, format));
        }
        match (from, to) {
            (_, State::Reset) => {
                return Errno(libc::EBUSY).when(!self.hca.reset_qp(qp.qpn));
            }
            (_, State::Error) => self.hca.fail_qp(qp.qpn),
            (State::Reset, State::Init) => self.hca.initialize(qp.qpn),
            (State::Init, State::ReadyToReceive) if is_connected => {
                let source = (at.dest.is_global != 0).then_some(at.dest.sgid_index);
                let way = resolve(
                    self.settings.link,
                    &self.port,
                    source,
                    &at.dest.dgid,
                    at.dest.dlid,
                )?;
                let remote = self.peer(way, at);
                let (qpn, remote_qpn) = (qp.qpn, remote.qpn);
                let connected = self.hca.connect(qpn, &remote, &options(at), rights(at));
                if let Err(error) = connected {
                    let is_forbidden = matches!(error, ConnectError::NoAccess { .. });
                    let log = if is_forbidden {
                        log::error
                    } else {
                        log::refused
                    };
                    let what = format_args!(
                        "no peer will answer queue pair {qpn:#x} at remote_qpn={remote_qpn:#x}: {error}"
                    );
                    log(self.settings, what);
                    Errno(libc::EPERM).when(is_forbidden)?;
                }
            }
            (
                State::Init | State::ReadyToReceive | State::ReadyToSend,
                State::ReadyToReceive | State::ReadyToSend,
            ) if !is_connected => {
                self.hca.activate_datagrams(qp.qpn, at.qkey);
                if to == State::ReadyToSend {
                    self.hca.start_sending(qp.qpn, &options(at));
                }
            }
            (_, State::ReadyToSend) => {
                self.hca.allow(qp.qpn, rights(at));
                if from == State::ReadyToReceive {
                    self.hca
                        .start_packets(qp.qpn, &options(at), at.sq_psn, at.max_rd_atomic);
                }
                self.hca.start_sending(qp.qpn, &options(at));
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the address of the peer's queue pair, which the attributes contain.
    fn peer(&self, way: Way, at: &QueryQpResp) -> Address {
        let of_number = Address::of_number(at.dest_qp_num);
        // LID 0 belongs to no device, so with it the HCA never chooses shared memory. A queue pair
        // that this fabric does not have may belong to a program of another fabric or user at this
        // port's IP address, so packets to that address are tried.
        let (lid, ip) = match way {
            Way::Port(index) => (
                if self.port.has(index, of_number.qpn) {
                    of_number.lid
                } else {
                    0
                },
                self.hca.wire_address().map(|(own, _)| own.ip()),
            ),
            Way::Packets(ip) => (0, Some(ip)),
            Way::Nowhere => (0, None),
        };
        let packets = ip.map(|ip| PacketAddress {
            ip,
            port: None,
            psn: at.rq_psn,
            mtu: 128 << at.path_mtu,
            traffic_class: at.dest.traffic_class,
        });
        Address {
            lid,
            packets,
            ..of_number
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_without_resources_for_them_allows_no_reads_and_no_atomics() {
        let all = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        for (max_dest_rd_atomic, allowed) in [(0, Access::REMOTE_WRITE), (1, all)] {
            let at = QueryQpResp {
                qp_access_flags: all.bits(),
                max_dest_rd_atomic,
                ..QueryQpResp::new_zeroed()
            };
            assert_eq!(rights(&at), allowed);
        }
        assert_eq!(
            rights(&QueryQpResp {
                max_dest_rd_atomic: 16,
                ..QueryQpResp::new_zeroed()
            }),
            Access::empty()
        );
    }
}
