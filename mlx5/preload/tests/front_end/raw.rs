//! The device file without a driver: a test runs itself again, under the library, and writes
//! commands.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::Command;
use std::{env, io, slice};

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::abi::verbs::{CommandHeader, GetContext, GetContextResp, number};
use crate::abi::{mlx5, verbs};
use crate::support::{Place, built};

/// Variable that is set in a test that runs under the library.
const UNDER: &str = "MLX5_FRONT_END_TEST";

pub(crate) const DEVICE: &CStr = c"/dev/infiniband/uverbs0";

/// States of a queue pair, with the attributes that lead to them.
pub(crate) const INIT: (u8, u32) = (1, 0x39);
pub(crate) const RTR: (u8, u32) = (2, 0x12_9181);
pub(crate) const RTS: (u8, u32) = (3, 0x1_2e01);

/// Runs `body` in a process of its own, under the library. `test` is the name of the test; the log
/// must contain `logged`.
pub(crate) fn under_the_library(test: &str, faults: &str, logged: &[&str], body: impl FnOnce()) {
    under_the_library_with(test, ("MLX5_PRELOAD_FAULTS", faults), logged, body);
}

/// Like [`under_the_library`], with any setting of the launcher instead of the faults.
pub(crate) fn under_the_library_with(
    test: &str,
    (setting, value): (&str, &str),
    logged: &[&str],
    body: impl FnOnce(),
) {
    if env::var_os(UNDER).is_some() {
        return body();
    }
    let place = Place::new(&test.replace("::", "-"));
    let log = place.file("log");
    let fabric = place.file("fabric");
    fs::create_dir(&fabric).unwrap();
    fs::set_permissions(&fabric, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let libraries =
        [built().join("deps"), built().to_owned()].map(|dir| dir.join("libmlx5_preload.so"));
    let library: &PathBuf = libraries.iter().find(|library| library.exists()).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(UNDER, "1")
        .env("LD_PRELOAD", library);
    command
        .env("MLX5_PRELOAD_DEVICE", "231:192")
        .env("MLX5_PRELOAD_LINK", "ib")
        .env("MLX5_PRELOAD_FABRIC", fabric);
    command
        .env("MLX5_PRELOAD_DEVICES", "1")
        .env("SYSFS_PATH", "/no-tree")
        .env(setting, value)
        .env("MLX5_PRELOAD_LOG", &log);
    place
        .start(&mut command)
        .finish()
        .succeeded()
        .said("1 passed");
    let log = fs::read_to_string(log).unwrap_or_default();
    for part in logged {
        assert!(log.contains(part), "{part:?} is not in the log:\n{log}");
    }
}

/// Returns the error number.
pub(crate) fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// An open device.
pub(crate) struct Device {
    pub(crate) file: File,
}

impl Device {
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self {
            file: File::options()
                .read(true)
                .write(true)
                .open(DEVICE.to_str().unwrap())?,
        })
    }

    /// Opens a device with a context.
    pub(crate) fn start() -> Self {
        let device = Self::open().unwrap();
        device.get_context().unwrap();
        device
    }

    pub(crate) fn get_context(&self) -> io::Result<mlx5::AllocUcontextResp> {
        let driver = mlx5::AllocUcontextReq {
            total_num_bfregs: 16,
            num_low_latency_bfregs: 4,
            max_cqe_version: 1,
            ..mlx5::AllocUcontextReq::new_zeroed()
        };
        let (_, driver): (GetContextResp, _) =
            self.ask(number::GET_CONTEXT, &GetContext { response: 0 }, &driver)?;
        Ok(driver)
    }

    /// Makes a command with a response. Both structures start with the response's address.
    pub(crate) fn ask<R, D>(
        &self,
        number: u8,
        request: &(impl IntoBytes + Immutable),
        driver: &(impl IntoBytes + Immutable),
    ) -> io::Result<(R, D)>
    where
        R: FromBytes + FromZeros + IntoBytes + Copy,
        D: FromBytes + FromZeros + IntoBytes + Copy,
    {
        let mut response = vec![0xa5; size_of::<R>() + size_of::<D>()];
        let mut request = request.as_bytes().to_vec();
        request[..8].copy_from_slice(&(response.as_mut_ptr() as u64).to_ne_bytes());
        self.write(
            number,
            &[&request, driver.as_bytes()].concat(),
            response.len(),
        )?;
        assert!(
            response.iter().any(|byte| *byte != 0xa5),
            "there is no response: a file took it for bytes"
        );
        let (core, driver) = response.split_at(size_of::<R>());
        Ok((
            R::read_from_bytes(core).unwrap(),
            D::read_from_bytes(driver).unwrap(),
        ))
    }

    /// Makes a command without a response.
    pub(crate) fn tell(
        &self,
        number: u8,
        request: &(impl IntoBytes + Immutable),
    ) -> io::Result<()> {
        self.write(number, request.as_bytes(), 0)
    }

    pub(crate) fn write(&self, number: u8, request: &[u8], response: usize) -> io::Result<()> {
        let in_words = (size_of::<CommandHeader>() + request.len()) / 4;
        let header = CommandHeader {
            command: number.into(),
            in_words: in_words as u16,
            out_words: (response / 4) as u16,
        };
        let bytes = [header.as_bytes(), request].concat();
        let n = (&self.file).write(&bytes)?;
        assert_eq!(n, bytes.len(), "a command is written whole");
        Ok(())
    }

    /// Calls a method. Returns the errno.
    pub(crate) fn ioctl(&self, object: u16, method: u16) -> i32 {
        let header = [24u16, object, method, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        // SAFETY: a header with no attributes.
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), 0xc018_1b01, header.as_ptr()) };
        assert_eq!(result, -1);
        io::Error::last_os_error().raw_os_error().unwrap()
    }
}

/// Objects, by their commands.
impl Device {
    pub(crate) fn alloc_pd(&self) -> io::Result<u32> {
        let (response, _): (verbs::AllocPdResp, mlx5::AllocPdResp) =
            self.ask(number::ALLOC_PD, &verbs::AllocPd { response: 0 }, &[0u8; 0])?;
        Ok(response.pd_handle)
    }

    pub(crate) fn reg_mr(
        &self,
        pd_handle: u32,
        start: u64,
        length: u64,
        hca_va: u64,
        access_flags: u32,
    ) -> io::Result<verbs::RegMrResp> {
        let request = verbs::RegMr {
            response: 0,
            start,
            length,
            hca_va,
            pd_handle,
            access_flags,
        };
        Ok(self
            .ask::<_, [u8; 0]>(number::REG_MR, &request, &[0u8; 0])?
            .0)
    }

    /// Changes the access of a region.
    pub(crate) fn rereg_access(
        &self,
        mr_handle: u32,
        access_flags: u32,
    ) -> io::Result<verbs::ReregMrResp> {
        let request = verbs::ReregMr {
            mr_handle,
            flags: 4,
            access_flags,
            ..verbs::ReregMr::new_zeroed()
        };
        Ok(self
            .ask::<_, [u8; 0]>(number::REREG_MR, &request, &[0u8; 0])?
            .0)
    }

    pub(crate) fn create_cq(&self, memory: &Memory, entries: u32) -> io::Result<u32> {
        self.create_cq_on(memory, entries, 0)
    }

    /// Makes a completion queue on a completion vector.
    pub(crate) fn create_cq_on(
        &self,
        memory: &Memory,
        entries: u32,
        comp_vector: u32,
    ) -> io::Result<u32> {
        let request = verbs::CreateCq {
            cqe: entries - 1,
            comp_vector,
            comp_channel: -1,
            ..verbs::CreateCq::new_zeroed()
        };
        let driver = mlx5::CreateCq {
            buf_addr: memory.cq(),
            db_addr: memory.record(0),
            cqe_size: 64,
            ..mlx5::CreateCq::new_zeroed()
        };
        let (response, _): (verbs::CreateCqResp, mlx5::CreateCqResp) =
            self.ask(number::CREATE_CQ, &request, &driver)?;
        assert_eq!(response.cqe, entries - 1);
        Ok(response.cq_handle)
    }

    pub(crate) fn create_srq(&self, memory: &Memory, pd_handle: u32) -> io::Result<u32> {
        let request = verbs::CreateSrq {
            pd_handle,
            max_wr: 15,
            max_sge: 1,
            ..verbs::CreateSrq::new_zeroed()
        };
        let driver = mlx5::CreateSrq {
            buf_addr: memory.srq(),
            db_addr: memory.record(2),
            ..mlx5::CreateSrq::new_zeroed()
        };
        let (response, _): (verbs::CreateSrqResp, mlx5::CreateSrqResp) =
            self.ask(number::CREATE_SRQ, &request, &driver)?;
        Ok(response.srq_handle)
    }

    /// Makes a reliable connection with a send queue of 4 WQEBBs, and receives from a shared queue.
    pub(crate) fn create_qp(
        &self,
        memory: &Memory,
        pd_handle: u32,
        cq: u32,
        srq: Option<u32>,
    ) -> io::Result<verbs::CreateQpResp> {
        self.create_qp_with(memory, pd_handle, cq, srq, 0)
    }

    /// Makes a reliable connection like [`create_qp`](Self::create_qp), with a receive queue of its
    /// own of `rq_wqe_count` WQEs of 64 bytes. The program requested one receive less, with a
    /// single buffer each.
    pub(crate) fn create_qp_with(
        &self,
        memory: &Memory,
        pd_handle: u32,
        cq: u32,
        srq: Option<u32>,
        rq_wqe_count: u32,
    ) -> io::Result<verbs::CreateQpResp> {
        let request = verbs::CreateQp {
            pd_handle,
            send_cq_handle: cq,
            recv_cq_handle: cq,
            srq_handle: srq.unwrap_or(0),
            is_srq: srq.is_some().into(),
            qp_type: 2,
            max_send_wr: 3,
            max_recv_wr: rq_wqe_count.saturating_sub(1),
            max_recv_sge: u32::from(rq_wqe_count > 0),
            ..verbs::CreateQp::new_zeroed()
        };
        let driver = mlx5::CreateQp {
            buf_addr: memory.sq(),
            db_addr: memory.record(4),
            sq_wqe_count: 4,
            rq_wqe_count,
            rq_wqe_shift: 6,
            ..mlx5::CreateQp::new_zeroed()
        };
        let (response, driver): (_, mlx5::CreateQpResp) =
            self.ask(number::CREATE_QP, &request, &driver)?;
        assert_eq!(
            driver.bfreg_index, 24,
            "the first register for one queue pair"
        );
        Ok(response)
    }

    /// Makes a MODIFY_QP to `state`, on the way to queue pair `qpn` at LID `dlid`.
    pub(crate) fn modify_qp(
        &self,
        qp_handle: u32,
        to: (u8, u32),
        path: (u16, u32),
    ) -> io::Result<()> {
        self.modify_qp_with(qp_handle, to, path, |_| ())
    }

    /// Makes a MODIFY_QP like [`modify_qp`](Self::modify_qp), with a change to the command.
    pub(crate) fn modify_qp_with(
        &self,
        qp_handle: u32,
        (qp_state, attr_mask): (u8, u32),
        (dlid, qpn): (u16, u32),
        change: impl FnOnce(&mut verbs::ModifyQp),
    ) -> io::Result<()> {
        let mut request = verbs::ModifyQp {
            qp_handle,
            qp_state,
            attr_mask,
            port_num: 1,
            path_mtu: 3,
            ..verbs::ModifyQp::new_zeroed()
        };
        (request.dest.dlid, request.dest.port_num) = (dlid, 1);
        // The shortest times.
        (request.timeout, request.min_rnr_timer) = (1, 1);
        request.dest_qp_num = qpn;
        change(&mut request);
        self.tell(number::MODIFY_QP, &request)
    }

    /// Makes a queue pair in RTS that is connected to itself.
    pub(crate) fn create_ready_qp(&self, memory: &Memory) -> verbs::CreateQpResp {
        let pd = self.alloc_pd().unwrap();
        let cq = self.create_cq(memory, 16).unwrap();
        let made = self.create_qp(memory, pd, cq, None).unwrap();
        for to in [INIT, RTR, RTS] {
            self.modify_qp(made.qp_handle, to, (1, made.qpn)).unwrap();
        }
        made
    }

    pub(crate) fn query_qp(&self, qp_handle: u32) -> io::Result<verbs::QueryQpResp> {
        Ok(self
            .ask::<_, [u8; 0]>(
                number::QUERY_QP,
                &verbs::QueryQp {
                    response: 0,
                    qp_handle,
                    attr_mask: 0,
                },
                &[0u8; 0],
            )?
            .0)
    }

    /// Writes a command that consists of the response's address and a handle, like the commands
    /// that destroy CQs, SRQs and queue pairs.
    pub(crate) fn destroy(&self, number: u8, handle: u32) -> io::Result<u32> {
        let request = verbs::DestroyQp {
            response: 0,
            qp_handle: handle,
            reserved: 0,
        };
        Ok(self
            .ask::<[u32; 2], [u8; 0]>(number, &request, &[0u8; 0])?
            .0[0])
    }
}

/// Pages for queues and doorbell records.
pub(crate) struct Memory(*mut u8);

const PAGE: usize = 4096;

impl Memory {
    pub(crate) fn new() -> Self {
        // SAFETY: a new mapping, never unmapped.
        let start = unsafe {
            let (protection, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            libc::mmap(core::ptr::null_mut(), 4 * PAGE, protection, flags, -1, 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        let memory = Self(start.cast());
        // SAFETY: inside the first page: a CQ whose entries are not valid.
        unsafe { slice::from_raw_parts_mut(memory.0, PAGE) }
            .iter_mut()
            .skip(63)
            .step_by(64)
            .for_each(|op_own| *op_own = 0xf0);
        memory
    }

    pub(crate) fn cq(&self) -> u64 {
        self.0 as u64
    }

    pub(crate) fn srq(&self) -> u64 {
        self.cq() + PAGE as u64
    }

    pub(crate) fn sq(&self) -> u64 {
        self.cq() + 2 * PAGE as u64
    }

    /// Returns word `index` of the doorbell records.
    pub(crate) fn record(&self, index: u64) -> u64 {
        self.cq() + 3 * PAGE as u64 + 4 * index
    }

    /// Posts an empty SEND to the send queue of `create_qp`, and rings.
    pub(crate) fn post_send(&self, qpn: u32) {
        self.write_wqe(0, 0x0a, qpn);
        self.announce(1);
    }

    /// Writes a signaled WQE without data to place `index` of the send queue of `create_qp`.
    /// Returns its words.
    pub(crate) fn write_wqe(&self, index: u16, opcode: u32, qpn: u32) -> [u32; 4] {
        let words = [u32::from(index) << 8 | opcode, qpn << 8 | 1, 0x0000_0008, 0].map(u32::to_be);
        // SAFETY: a place in this memory, aligned.
        unsafe { ((self.sq() + u64::from(index % 4) * 64) as *mut [u32; 4]).write(words) };
        words
    }

    /// Writes the doorbell record.
    pub(crate) fn announce(&self, producer: u16) {
        core::sync::atomic::fence(core::sync::atomic::Ordering::Release);
        // SAFETY: a place in this memory, aligned.
        unsafe { (self.record(5) as *mut u32).write_volatile(u32::from(producer).to_be()) };
    }
}
