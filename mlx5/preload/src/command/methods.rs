//! Names of the ioctl(RDMA_VERBS_IOCTL) methods, for the log: `rdma/ib_user_ioctl_cmds.h` and
//! `rdma/mlx5_user_ioctl_cmds.h`, without their prefixes. All of them are refused.

use std::fmt;

use crate::options::errno::Errno;

/// Objects of every driver with their methods, a line each. The lines, and the methods of a line,
/// are in the order of their numbers.
const COMMON: &str = "\
DEVICE: INVOKE_WRITE INFO_HANDLES QUERY_PORT GET_CONTEXT QUERY_CONTEXT QUERY_GID_TABLE QUERY_GID_ENTRY
PD: PD_DESTROY
COMP_CHANNEL:
CQ: CQ_CREATE CQ_DESTROY
QP: QP_CREATE QP_DESTROY
SRQ: SRQ_CREATE SRQ_DESTROY
AH: AH_DESTROY
MR: DM_MR_REG MR_DESTROY ADVISE_MR QUERY_MR REG_DMABUF_MR
MW: MW_DESTROY
FLOW: FLOW_DESTROY
XRCD: XRCD_DESTROY
RWQ_IND_TBL: RWQ_IND_TBL_DESTROY
WQ: WQ_CREATE WQ_DESTROY
FLOW_ACTION: FLOW_ACTION_ESP_CREATE FLOW_ACTION_DESTROY FLOW_ACTION_ESP_MODIFY
DM: DM_ALLOC DM_FREE
COUNTERS: COUNTERS_CREATE COUNTERS_DESTROY COUNTERS_READ
ASYNC_EVENT: ASYNC_EVENT_ALLOC";

/// First number of the driver's own objects and methods (`UVERBS_ID_NS_SHIFT`).
const DRIVER: u16 = 1 << 12;

/// The objects of mlx5 with their methods.
const MLX5: &str = "\
DEVX: DEVX_OTHER DEVX_QUERY_UAR DEVX_QUERY_EQN DEVX_SUBSCRIBE_EVENT
DEVX_OBJ: DEVX_OBJ_CREATE DEVX_OBJ_DESTROY DEVX_OBJ_MODIFY DEVX_OBJ_QUERY DEVX_OBJ_ASYNC_QUERY
DEVX_UMEM: DEVX_UMEM_REG DEVX_UMEM_DEREG
FLOW_MATCHER: FLOW_MATCHER_CREATE FLOW_MATCHER_DESTROY
DEVX_ASYNC_CMD_FD: DEVX_ASYNC_CMD_FD_ALLOC
DEVX_ASYNC_EVENT_FD: DEVX_ASYNC_EVENT_FD_ALLOC
VAR: VAR_OBJ_ALLOC VAR_OBJ_DESTROY
PP: PP_OBJ_ALLOC PP_OBJ_DESTROY
UAR: UAR_OBJ_ALLOC UAR_OBJ_DESTROY
STEERING_ANCHOR: STEERING_ANCHOR_CREATE STEERING_ANCHOR_DESTROY";

/// Methods that mlx5 adds to objects of every driver.
const MLX5_OF_COMMON: &str = "\
DEVICE: QUERY_PORT
PD: PD_QUERY
FLOW: CREATE_FLOW DESTROY_FLOW
FLOW_ACTION: FLOW_ACTION_CREATE_MODIFY_HEADER FLOW_ACTION_CREATE_PACKET_REFORMAT
DM: DM_MAP_OP_ADDR DM_QUERY";

fn method_of(line: &str, number: usize) -> Option<&str> {
    line.split(' ').nth(number + 1)
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Method {
    /// `ib_uverbs_ioctl_hdr.object_id`.
    pub(crate) object: u16,
    /// `ib_uverbs_ioctl_hdr.method_id`.
    pub(crate) method: u16,
}

impl Method {
    /// Returns whether a library hides the refusal of the method from the program. For most of
    /// these methods libibverbs writes a command, or reads the launcher's copy of `/sys`, instead.
    /// The remaining methods are `DEVX_OTHER` methods, by which libmlx5 requests capabilities that
    /// it does not need when it opens a device.
    pub(crate) fn falls_back(self) -> bool {
        const METHODS: &str = "DEVICE.INVOKE_WRITE DEVICE.GET_CONTEXT DEVICE.QUERY_PORT DEVICE.QUERY_GID_TABLE DEVICE.QUERY_GID_ENTRY \
            CQ.CQ_CREATE QP.QP_CREATE SRQ.SRQ_CREATE WQ.WQ_CREATE DEVX.DEVX_OTHER";
        let name = self.to_string();
        METHODS.split(' ').any(|known| known == name)
            || name.ends_with("_DESTROY") && self.object < DRIVER
    }

    /// Returns the errno of the method's refusal. `EPROTONOSUPPORT` is the errno of a kernel
    /// without the method; libibverbs then writes the command. Methods of regions and of device
    /// memory that have no command get `EOPNOTSUPP`, as from a kernel whose driver does not support
    /// them: manual pages document this errno, and programs check for it.
    pub(crate) fn refusal(self) -> Errno {
        const MR: u16 = 7;
        const MR_DESTROY: u16 = 1;
        const DM: u16 = 14;
        match (self.object, self.method) {
            (MR, method) if method != MR_DESTROY => Errno(libc::EOPNOTSUPP),
            (DM, _) => Errno(libc::EOPNOTSUPP),
            _ => Errno(libc::EPROTONOSUPPORT),
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (object, method) = (usize::from(self.object), usize::from(self.method));
        let driver = usize::from(DRIVER);
        let line = match object.checked_sub(driver) {
            Some(number) => MLX5.lines().nth(number),
            None => COMMON.lines().nth(object),
        };
        let Some((object, _)) = line.and_then(|line| line.split_once(':')) else {
            return write!(f, "object {:#x} method {:#x}", self.object, self.method);
        };
        let of = |lines: &'static str| {
            lines
                .lines()
                .find(|line| line.starts_with(&format!("{object}:")))
        };
        let method = match method.checked_sub(driver) {
            Some(number) if self.object < DRIVER => {
                of(MLX5_OF_COMMON).and_then(|line| method_of(line, number))
            }
            number => line.and_then(|line| method_of(line, number.unwrap_or(method))),
        };
        match method {
            Some(method) => write!(f, "{object}.{method}"),
            None => write!(f, "{object} method {:#x}", self.method),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_have_names() {
        let name = |object, method| Method { object, method }.to_string();
        assert_eq!(name(0, 0), "DEVICE.INVOKE_WRITE");
        assert_eq!(name(7, 2), "MR.ADVISE_MR");
        assert_eq!(name(0x1000, 0x1001), "DEVX.DEVX_QUERY_UAR");
        assert_eq!(name(0x1008, 0x1000), "UAR.UAR_OBJ_ALLOC");
        assert_eq!(name(1, 0x1000), "PD.PD_QUERY");
        assert_eq!(name(0, 0x1000), "DEVICE.QUERY_PORT");
        assert_eq!(name(99, 1), "object 0x63 method 0x1");
        assert_eq!(name(1, 9), "PD method 0x9");
    }

    #[test]
    fn only_methods_with_a_command_or_a_substitute_fall_back() {
        let falls_back = |object, method| Method { object, method }.falls_back();
        assert!(
            falls_back(0, 0) && falls_back(3, 0) && falls_back(7, 1) && falls_back(0x1000, 0x1000)
        );
        assert!(
            !falls_back(7, 2)
                && !falls_back(14, 0)
                && !falls_back(0x1001, 0x1001)
                && !falls_back(99, 1)
        );
    }
}
