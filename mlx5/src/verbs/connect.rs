//! Transitions of queue pairs, their addresses, and the path to a peer.

use core::ffi::c_int;
use core::mem::zeroed;
use core::ptr::NonNull;

use super::abi::*;
use super::context::Context;
use super::device::{Port, bytes_of, gid_of, mtu_code};
use super::numbers::*;
use super::tables::foreign;
use super::{LinkLayer, VerbsOptions};
use crate::address::{DeviceKind, QpAddress};
use crate::error::ConnectError;
use crate::error::verbs::CallError;
use crate::provider::Connections;
use crate::wire::{Access, AddressVector, ConnectOptions, DatagramSegment, rnr_timer_code};

/// Maximum number of retries, on a relay, towards a peer that does not answer. `rdma_rxe` takes 7,
/// the highest legal number, for retries without end. The maximum applies to every device on a
/// relay, because no call distinguishes `rdma_rxe` from other devices, and an operation that fails
/// one retry early is better than an operation that never ends.
const MAX_RETRIES: u8 = 6;

/// Returns the remote access that queue pairs allow: all that regions may allow, but no atomics on
/// a device without atomics, because the kernel would refuse them.
fn remote_access(has_atomics: bool) -> Access {
    let always = Access::REMOTE_WRITE | Access::REMOTE_READ;
    if has_atomics {
        always | Access::REMOTE_ATOMIC
    } else {
        always
    }
}

impl Context {
    /// Moves a queue pair to the state of `attr`, with the other attributes that `mask` selects.
    fn modify(&self, qpn: u32, mut attr: ibv_qp_attr, mask: c_int) -> Result<(), ConnectError> {
        let objects = self.objects.borrow();
        let qp = objects.qps.get(&qpn).ok_or_else(foreign)?.qp.as_ptr();
        let what = match attr.qp_state {
            IBV_QPS_INIT => "ibv_modify_qp (to INIT)",
            IBV_QPS_RTR => "ibv_modify_qp (to RTR)",
            IBV_QPS_RTS => "ibv_modify_qp (to RTS)",
            _ => "ibv_modify_qp (to ERR)",
        };
        // SAFETY: `qp` is a queue pair of this device, and the attributes live through the call.
        let result =
            unsafe { (self.verbs().ibv_modify_qp)(qp, &raw mut attr, IBV_QP_STATE | mask) };
        CallError::check(what, result).map_err(|error| advise(error).into())
    }

    /// Moves a queue pair to INIT, with the attributes of its port and the attributes that `mask`
    /// selects.
    fn modify_to_init(&self, qpn: u32, attr: ibv_qp_attr, mask: c_int) -> Result<(), ConnectError> {
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: self.options.pkey_index,
            port_num: self.port.number,
            ..attr
        };
        self.modify(qpn, attr, IBV_QP_PKEY_INDEX | IBV_QP_PORT | mask)
    }

    /// Returns the maximum number of READs and atomics in flight.
    fn rd_atomic(&self) -> u8 {
        let most = self
            .attr
            .max_qp_rd_atom
            .min(self.attr.max_qp_init_rd_atom)
            .clamp(0, 255) as u8;
        self.options.max_rd_atomic.min(most)
    }
}

impl Context {
    /// Creates the address handle of a path. On RoCE the kernel resolves the MAC address.
    pub(super) fn create_ah(
        &self,
        pdn: u32,
        mut route: ibv_ah_attr,
    ) -> Result<NonNull<ibv_ah>, ConnectError> {
        let pd = self.objects.borrow().pd(pdn)?;
        // SAFETY: `pd` is a domain of this device, and the attributes live through the call.
        let ah = NonNull::new(unsafe { (self.verbs().ibv_create_ah)(pd, &raw mut route) });
        Ok(ah.ok_or_else(|| advise(CallError::last("ibv_create_ah")))?)
    }

    /// Returns the address handle of a path on a relay, and creates the handle at its first use.
    /// Fails if the device refuses the path.
    pub(super) fn handle(
        &self,
        pdn: u32,
        path: &AddressVector,
    ) -> Result<NonNull<ibv_ah>, ConnectError> {
        let known = self.objects.borrow().handles.get(&(pdn, *path)).copied();
        if let Some(known) = known {
            return Ok(known);
        }
        let handle = self.create_ah(pdn, route_of(path, &self.port))?;
        self.objects
            .borrow_mut()
            .handles
            .insert((pdn, *path), handle);
        Ok(handle)
    }
}

impl Connections for Context {
    fn address(&self, qpn: u32) -> QpAddress {
        QpAddress {
            kind: DeviceKind::Hardware,
            mtu: self.port.mtu,
            lid: self.port.lid,
            port: 0,
            qpn,
            psn: self
                .objects
                .borrow()
                .qps
                .get(&qpn)
                .map_or(0, |object| object.psn),
            epoch: 0,
            gid: self.port.gid.as_ref().map_or([0; 16], |gid| gid.bytes),
        }
    }

    fn initialize(&self, qpn: u32) -> Result<(), ConnectError> {
        let attr = ibv_qp_attr {
            qp_access_flags: remote_access(self.has_atomics()).bits(),
            ..ibv_qp_attr::default()
        };
        self.modify_to_init(qpn, attr, IBV_QP_ACCESS_FLAGS)
    }

    fn connect(
        &self,
        qpn: u32,
        remote: &QpAddress,
        options: &ConnectOptions,
    ) -> Result<(), ConnectError> {
        let attr = ready_to_receive(&self.port, &self.options, self.rd_atomic(), remote, options)?;
        let mask = IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(qpn, attr, mask)?;
        if let Some(object) = self.objects.borrow_mut().qps.get_mut(&qpn) {
            object.options = *options;
            if !self.is_direct {
                object.options.retry_count = options.retry_count.min(MAX_RETRIES);
            }
        }
        Ok(())
    }

    fn ready_to_send(&self, qpn: u32) -> Result<(), ConnectError> {
        let found = self
            .objects
            .borrow()
            .qps
            .get(&qpn)
            .map(|object| (object.psn, object.options));
        let (sq_psn, options) = found.unwrap_or_default();
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            sq_psn,
            max_rd_atomic: self.rd_atomic(),
            timeout: options.timeout,
            retry_cnt: options.retry_count,
            rnr_retry: options.rnr_retry,
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(qpn, attr, mask)
    }

    fn activate_datagrams(&self, qpn: u32, qkey: u32) -> Result<(), ConnectError> {
        let to = |qp_state| ibv_qp_attr {
            qp_state,
            qkey,
            sq_psn: self.address(qpn).psn,
            ..ibv_qp_attr::default()
        };
        self.modify_to_init(qpn, to(IBV_QPS_INIT), IBV_QP_QKEY)?;
        self.modify(qpn, to(IBV_QPS_RTR), 0)?;
        self.modify(qpn, to(IBV_QPS_RTS), IBV_QP_SQ_PSN)
    }

    /// Moves the queue pair to the error state. An error is ignored: a queue pair that the kernel
    /// does not move is in that state already, or enters that state when it is destroyed.
    #[cold]
    #[inline(never)]
    fn fail_qp(&self, qpn: u32) {
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_ERR,
            ..ibv_qp_attr::default()
        };
        drop(self.modify(qpn, attr, 0));
    }

    fn address_vector(&self, pdn: u32, remote: &QpAddress) -> Result<AddressVector, ConnectError> {
        let route = route(&self.port, &self.options, remote)?;
        if !self.is_direct {
            let vector = vector_of(&route);
            return self.handle(pdn, &vector).map(|_| vector);
        }
        let ah = self.create_ah(pdn, route)?;
        // SAFETY: the address handle was just created. Its type and the type of the answer belong
        // to `MLX5DV_OBJ_AH`. The answer holds a pointer and a number, for which zero is a valid
        // value.
        let dv: Result<mlx5dv_ah, _> = unsafe { self.init_obj(MLX5DV_OBJ_AH, ah, zeroed()) };
        // SAFETY: `av` is null or points to 48 bytes that live as long as the handle.
        let bytes = dv.map(|dv| unsafe { dv.av.as_ref() }.copied());
        // The handle is not needed any more, because the device itself has no address handles: WQEs
        // carry the bytes.
        // SAFETY: the handle was just created, and this is its last use.
        unsafe { (self.verbs().ibv_destroy_ah)(ah.as_ptr()) };
        let bytes = bytes?.ok_or_else(|| CallError::new("mlx5dv_init_obj", libc::EINVAL))?;
        Ok(DatagramSegment::parse(&bytes).vector)
    }
}

/// Returns a path as the address vector of an InfiniBand WQE.
pub(super) fn vector_of(route: &ibv_ah_attr) -> AddressVector {
    let ibv_ah_attr {
        grh,
        dlid,
        sl,
        is_global,
        ..
    } = *route;
    let local = AddressVector::local(dlid, sl);
    if is_global == 0 {
        local
    } else {
        local.with_grh(
            grh.sgid_index,
            grh.flow_label,
            grh.hop_limit,
            grh.traffic_class,
            bytes_of(grh.dgid),
        )
    }
}

/// Returns the path from `port` that `vector` encodes: the reverse of [`vector_of`].
pub(super) fn route_of(vector: &AddressVector, port: &Port) -> ibv_ah_attr {
    let &AddressVector {
        stat_rate_sl,
        rlid: dlid,
        tclass,
        hop_limit,
        grh_gid_fl,
        rgid,
        ..
    } = vector;
    let (sgid_index, flow_label) = (vector.source_gid_index(), grh_gid_fl & 0xf_ffff);
    let grh = ibv_global_route {
        dgid: gid_of(rgid),
        flow_label,
        sgid_index,
        hop_limit,
        traffic_class: tclass,
    };
    ibv_ah_attr {
        grh,
        dlid,
        sl: stat_rate_sl & 0xf,
        is_global: vector.has_grh().into(),
        port_num: port.number,
        ..ibv_ah_attr::default()
    }
}

pub(super) fn route(
    port: &Port,
    options: &VerbsOptions,
    remote: &QpAddress,
) -> Result<ibv_ah_attr, ConnectError> {
    let mut route = ibv_ah_attr {
        sl: options.service_level,
        port_num: port.number,
        ..ibv_ah_attr::default()
    };
    if port.link_layer == LinkLayer::InfiniBand {
        route.dlid = remote.lid;
    }
    if port.has_grh {
        if remote.gid == [0; 16] {
            return Err(ConnectError::NoGid);
        }
        route.is_global = 1;
        route.grh = ibv_global_route {
            dgid: gid_of(remote.gid),
            flow_label: 0,
            sgid_index: port.gid.as_ref().map_or(0, |gid| gid.index),
            hop_limit: options.hop_limit,
            traffic_class: options.traffic_class,
        };
    }
    Ok(route)
}

fn ready_to_receive(
    port: &Port,
    options: &VerbsOptions,
    max_dest_rd_atomic: u8,
    remote: &QpAddress,
    connection: &ConnectOptions,
) -> Result<ibv_qp_attr, ConnectError> {
    Ok(ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: mtu_code(port.mtu.min(remote.mtu)),
        rq_psn: remote.psn,
        dest_qp_num: remote.qpn,
        ah_attr: route(port, options, remote)?,
        max_dest_rd_atomic,
        min_rnr_timer: rnr_timer_code(connection.rnr_timer_ns),
        ..ibv_qp_attr::default()
    })
}

pub(super) fn advise(error: CallError) -> CallError {
    let advice = match error.errno {
        libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH => {
            "the peer's GID is not reachable from here: try to ping its address"
        }
        libc::EINVAL => {
            "the kernel takes no such attribute: look at the GID and P_Key index, the service level and the peer's address"
        }
        _ => return error,
    };
    error.advise(advice)
}

#[cfg(test)]
mod tests {
    use super::super::device::Gid;
    use super::*;

    const GID: [u8; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];

    fn port(link_layer: LinkLayer, has_grh: bool) -> Port {
        let gid = Some(Gid {
            index: 3,
            kind: IBV_GID_TYPE_ROCE_V2,
            bytes: [9; 16],
        });
        Port {
            number: 2,
            link_layer,
            lid: 5,
            mtu: 2048,
            gid,
            has_grh,
        }
    }

    fn attributes(
        port: &Port,
        max_dest_rd_atomic: u8,
        gid: [u8; 16],
        mtu: u16,
    ) -> Result<ibv_qp_attr, ConnectError> {
        let remote = QpAddress {
            kind: DeviceKind::Hardware,
            mtu,
            lid: 0x77,
            port: 0,
            qpn: 0x1234,
            psn: 0xabcdef,
            epoch: 0,
            gid,
        };
        let options = VerbsOptions {
            service_level: 6,
            traffic_class: 96,
            hop_limit: 12,
            ..VerbsOptions::default()
        };
        let connection = ConnectOptions {
            rnr_timer_ns: 640_000,
            ..ConnectOptions::default()
        };
        ready_to_receive(port, &options, max_dest_rd_atomic, &remote, &connection)
    }

    #[test]
    fn a_peer_is_named_by_its_lid_on_infiniband_and_by_its_gid_on_roce() {
        for (link_layer, has_grh, dlid) in [
            (LinkLayer::InfiniBand, false, 0x77),
            (LinkLayer::InfiniBand, true, 0x77),
            (LinkLayer::Ethernet, true, 0),
        ] {
            let attr = attributes(&port(link_layer, has_grh), 9, GID, 1024).unwrap();
            assert_eq!(
                (attr.qp_state, attr.path_mtu, attr.rq_psn, attr.dest_qp_num),
                (2, 3, 0xabcdef, 0x1234)
            );
            assert_eq!((attr.max_dest_rd_atomic, attr.min_rnr_timer), (9, 12));
            let ibv_ah_attr {
                dlid: to,
                sl,
                port_num,
                is_global,
                grh,
                ..
            } = attr.ah_attr;
            assert_eq!(
                (to, sl, port_num, is_global),
                (dlid, 6, 2, u8::from(has_grh))
            );
            let global = (
                bytes_of(grh.dgid),
                grh.sgid_index,
                grh.hop_limit,
                grh.traffic_class,
            );
            assert_eq!(
                global,
                if has_grh {
                    (GID, 3, 12, 96)
                } else {
                    ([0; 16], 0, 0, 0)
                }
            );
        }
        let larger = attributes(&port(LinkLayer::InfiniBand, false), 1, [0; 16], 4096).unwrap();
        assert_eq!(larger.path_mtu, 4, "the smaller of both ends'");
        let nameless = attributes(&port(LinkLayer::Ethernet, true), 1, [0; 16], 4096);
        assert!(matches!(nameless, Err(ConnectError::NoGid)));
    }
}
