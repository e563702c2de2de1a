//! libibverbs and libmlx5 for tests and benchmarks: `driver.c`, compiled at run time and loaded. It
//! needs a C compiler, libibverbs-dev, and a device: run it under `mlx5-run`.
#![allow(dead_code, reason = "each program uses a part")]

mod abi;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use mlx5::Sge;
use mlx5::wire::{CQ_DOORBELL_OFFSET, CQE_BYTES, OP_OWN_OFFSET, WQEBB};

#[allow(unused_imports, reason = "each program uses a part")]
pub(crate) use abi::*;

/// The C file, in this package.
pub(crate) const DRIVER: &str = "tests/support/libmlx5/driver.c";

/// Name of `mlx5-run`'s device.
const DEVICE: &CStr = c"mlx5_0";

/// Declares the functions of `driver.c`, and loads them by name.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty;)*) => {
        #[derive(Clone, Copy)]
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            fn find(library: &Library) -> Self {
                Self {
                    // SAFETY: the types are the types of the C file in this folder.
                    $($name: unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(library.symbol(stringify!($name))) },)*
                }
            }
        }
    };
}

functions! {
    lv_problem: fn() -> *const c_char;
    lv_open: fn(*const c_char, c_int) -> *mut c_void;
    lv_create_cq: fn(*mut c_void, u32, u32, c_int, c_int, *mut CqParts) -> c_int;
    lv_create_srq: fn(*mut c_void, u32, u32, *mut SrqParts) -> c_int;
    lv_create_qp: fn(*mut c_void, *const QpRequest, *mut QpParts) -> c_int;
    lv_to_init: fn(*mut c_void) -> c_int;
    lv_pretend_ready: fn(*mut c_void) -> c_int;
    lv_connect: fn(*mut c_void, u32) -> c_int;
    lv_register: fn(*mut c_void, *mut c_void, usize) -> u32;
    lv_create_ah: fn(*mut c_void, *const IbvPath) -> *mut c_void;
    lv_post_send: fn(*mut c_void, *const Op, u32) -> c_int;
    lv_wr: fn(*mut c_void, *const Op, u32) -> c_int;
    lv_post_receive: fn(*mut c_void, *mut c_void, u64, *mut IbvSge, u32) -> c_int;
    lv_poll: fn(*mut c_void, c_int, *mut IbvWc) -> c_int;
    lv_start_poll: fn(*mut c_void, *mut IbvWc) -> c_int;
    lv_arm: fn(*mut c_void, c_int) -> c_int;
    lv_poll_function: fn(*mut c_void) -> *mut c_void;
}

/// A C file, compiled and loaded for the rest of the process.
#[derive(Debug)]
pub(crate) struct Library {
    handle: *mut c_void,
}

// SAFETY: a handle of the dynamic linker, which locks.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Compiles `source`, a file of this package.
    pub(crate) fn load(source: &str) -> Result<Self, String> {
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(source);
        let name = Path::new(source.file_stem().unwrap());
        let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(name)
            .with_extension(format!("{}.so", std::process::id()));
        let mut cc = Command::new("cc");
        cc.args([
            "-std=gnu11",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-o",
        ])
        .arg(&target)
        .arg(&source);
        // Without `mlx5-run`'s preloaded library.
        let output = cc
            .args(["-libverbs", "-lmlx5"])
            .env_remove("LD_PRELOAD")
            .output()
            .map_err(|e| format!("no C compiler: {e}"))?;
        if !output.status.success() {
            return Err(format!(
                "libibverbs-dev is missing, or {} is wrong:\n{}",
                source.display(),
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        let path = CString::new(target.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: a path that ends with a 0; the file's constructors are none.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: after a failure it returns a string.
            return Err(unsafe { CStr::from_ptr(libc::dlerror()) }
                .to_string_lossy()
                .into_owned());
        }
        let _ = std::fs::remove_file(PathBuf::from(path.to_str().unwrap()));
        Ok(Self { handle })
    }

    /// Returns the function `name` of the file.
    pub(crate) fn symbol(&self, name: &str) -> *mut c_void {
        let c_name = CString::new(name).unwrap();
        // SAFETY: an open library and a string.
        let symbol = unsafe { libc::dlsym(self.handle, c_name.as_ptr()) };
        assert!(!symbol.is_null(), "the C file has no {name}");
        symbol
    }
}

/// The way to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Api {
    /// `ibv_post_send`.
    PostSend,
    /// `ibv_wr_start`, ..., `ibv_wr_complete`.
    Wr,
}

// SAFETY: libibverbs locks, and the handle is a pointer to data that never changes.
unsafe impl Send for VerbsDevice {}
// SAFETY: as above.
unsafe impl Sync for VerbsDevice {}

/// A device of libibverbs with its protection domain. The device and its objects live to the end of
/// the process.
#[derive(Clone, Copy)]
pub(crate) struct VerbsDevice {
    functions: Functions,
    device: *mut c_void,
}

impl VerbsDevice {
    /// Opens the device. With `single_threaded` its queues belong to one thread, by a thread
    /// domain.
    pub(crate) fn open(library: &Library, single_threaded: bool) -> Result<Self, String> {
        let functions = Functions::find(library);
        // SAFETY: a string.
        let device = unsafe { (functions.lv_open)(DEVICE.as_ptr(), single_threaded.into()) };
        let opened = Self { functions, device };
        if device.is_null() {
            Err(opened.problem())
        } else {
            Ok(opened)
        }
    }

    fn problem(&self) -> String {
        // SAFETY: a string that stays.
        unsafe { CStr::from_ptr((self.functions.lv_problem)()) }
            .to_string_lossy()
            .into_owned()
    }

    #[track_caller]
    fn check(&self, result: c_int) {
        assert_eq!(result, 0, "{}", self.problem());
    }

    /// Makes a completion queue; for [`VerbsCq::start_poll`] if `extended`, with an event channel
    /// if `with_channel`.
    pub(crate) fn create_cq(
        &self,
        entries: u32,
        cqe_bytes: u32,
        extended: bool,
        with_channel: bool,
    ) -> VerbsCq {
        let mut parts = MaybeUninit::<CqParts>::zeroed();
        let (extended, with_channel) = (extended.into(), with_channel.into());
        // SAFETY: an open device, and the structure of the C file.
        self.check(unsafe {
            (self.functions.lv_create_cq)(
                self.device,
                entries,
                cqe_bytes,
                extended,
                with_channel,
                parts.as_mut_ptr(),
            )
        });
        VerbsCq {
            device: *self,
            // SAFETY: filled.
            parts: unsafe { parts.assume_init() },
            producer: 0,
        }
    }

    /// Creates a shared receive queue.
    pub(crate) fn create_srq(&self, receives: u32, sges: u32) -> VerbsSrq {
        let mut parts = MaybeUninit::<SrqParts>::zeroed();
        // SAFETY: as above.
        self.check(unsafe {
            (self.functions.lv_create_srq)(self.device, receives, sges, parts.as_mut_ptr())
        });
        VerbsSrq {
            device: *self,
            // SAFETY: filled.
            parts: unsafe { parts.assume_init() },
        }
    }

    /// Creates a queue pair, in state RESET.
    pub(crate) fn create_qp(&self, request: &QpRequest) -> VerbsQp {
        let mut parts = MaybeUninit::<QpParts>::zeroed();
        // SAFETY: as above.
        self.check(unsafe {
            (self.functions.lv_create_qp)(self.device, request, parts.as_mut_ptr())
        });
        VerbsQp {
            device: *self,
            // SAFETY: filled.
            parts: unsafe { parts.assume_init() },
        }
    }

    /// Registers memory with all access, to the end of the process. Returns its keys, local and
    /// remote.
    pub(crate) fn register(&self, memory: &'static mut [u64]) -> u32 {
        // SAFETY: as above.
        let key = unsafe {
            (self.functions.lv_register)(
                self.device,
                memory.as_mut_ptr().cast(),
                size_of_val(memory),
            )
        };
        assert_ne!(key, 0, "{}", self.problem());
        key
    }

    /// Creates an address handle.
    pub(crate) fn create_ah(&self, path: &IbvPath) -> *mut c_void {
        // SAFETY: as above.
        let ah = unsafe { (self.functions.lv_create_ah)(self.device, path) };
        assert!(!ah.is_null(), "{}", self.problem());
        ah
    }
}

/// A completion queue of libmlx5, and its device's side.
pub(crate) struct VerbsCq {
    device: VerbsDevice,
    pub(crate) parts: CqParts,
    /// Number of CQEs written by the test.
    producer: u32,
}

impl VerbsCq {
    /// Returns the address of byte `offset` of entry `index`.
    fn at(&self, index: u32, offset: usize) -> *mut u8 {
        assert!(index < self.parts.entries && offset < self.parts.cqe_bytes as usize);
        // SAFETY: inside the buffer.
        unsafe {
            self.parts
                .buffer
                .add(index as usize * self.parts.cqe_bytes as usize + offset)
        }
    }

    /// Returns the op_own byte of entry `index`.
    pub(crate) fn op_own(&self, index: u32) -> u8 {
        let at = self.at(
            index,
            self.parts.cqe_bytes as usize - CQE_BYTES + OP_OWN_OFFSET,
        );
        // SAFETY: inside the buffer.
        unsafe { at.read_volatile() }
    }

    /// Returns the owner bit of the next entry.
    pub(crate) fn owner(&self) -> bool {
        self.producer & self.parts.entries != 0
    }

    /// Writes the next entry as a device would. `half` is the first half of an entry of 128 bytes.
    /// The op_own of `cqe` must be right.
    pub(crate) fn write(&mut self, half: &[u8; CQE_BYTES], cqe: &[u8; CQE_BYTES]) {
        let index = self.producer & (self.parts.entries - 1);
        let cqe_at = self.parts.cqe_bytes as usize - CQE_BYTES;
        if cqe_at != 0 {
            // SAFETY: the first half of an entry.
            unsafe {
                self.at(index, 0)
                    .copy_from_nonoverlapping(half.as_ptr(), CQE_BYTES)
            };
        }
        let at = self.at(index, cqe_at);
        // SAFETY: the entry's CQE.
        unsafe { at.copy_from_nonoverlapping(cqe.as_ptr(), OP_OWN_OFFSET) };
        // SAFETY: its last byte.
        unsafe { &*at.add(OP_OWN_OFFSET).cast::<AtomicU8>() }
            .store(cqe[OP_OWN_OFFSET], Ordering::Release);
        self.producer = self.producer.wrapping_add(1);
    }

    /// Returns the doorbell record: consumer and arm word.
    pub(crate) fn record(&self) -> [u32; 2] {
        // SAFETY: lives as long as the process.
        unsafe { &*self.parts.record }
            .each_ref()
            .map(|word| word.load(Ordering::Acquire))
    }

    /// Sets the arm word, which the driver does not read.
    pub(crate) fn set_arm_word(&self, word: u32) {
        // SAFETY: as above.
        let record = unsafe { &*self.parts.record };
        record[1].store(word, Ordering::Release);
    }

    /// Returns the 8 bytes of the UAR page that take the arm command.
    pub(crate) fn arm_register(&self) -> &AtomicU64 {
        // SAFETY: in the UAR page, which stays mapped.
        unsafe { &*self.parts.uar.add(CQ_DOORBELL_OFFSET).cast::<AtomicU64>() }
    }

    /// Calls `ibv_poll_cq`.
    pub(crate) fn poll(&self, most: usize) -> Vec<IbvWc> {
        let mut wcs = vec![IbvWc::default(); most];
        // SAFETY: a CQ, and room for as many.
        let n = unsafe {
            (self.device.functions.lv_poll)(self.parts.cq, most as c_int, wcs.as_mut_ptr())
        };
        wcs.truncate(usize::try_from(n).unwrap_or_else(|_| panic!("ibv_poll_cq fails: {n}")));
        wcs
    }

    /// Polls one completion through `ibv_start_poll`.
    pub(crate) fn start_poll(&self) -> Option<IbvWc> {
        let mut wc = IbvWc::default();
        // SAFETY: an extended CQ.
        let n = unsafe { (self.device.functions.lv_start_poll)(self.parts.cq, &mut wc) };
        assert!(n >= 0, "ibv_start_poll fails: {n}");
        (n == 1).then_some(wc)
    }

    /// Calls `ibv_req_notify_cq`.
    pub(crate) fn arm(&self, solicited_only: bool) {
        // SAFETY: a CQ.
        self.device
            .check(unsafe { (self.device.functions.lv_arm)(self.parts.cq, solicited_only.into()) });
    }

    /// Returns the function that `ibv_poll_cq` calls.
    pub(crate) fn poll_function(
        &self,
    ) -> unsafe extern "C" fn(*mut c_void, c_int, *mut IbvWc) -> c_int {
        // SAFETY: a CQ.
        let function = unsafe { (self.device.functions.lv_poll_function)(self.parts.cq) };
        // SAFETY: its type in `struct ibv_context_ops`.
        unsafe { std::mem::transmute(function) }
    }
}

/// A shared receive queue of libmlx5.
pub(crate) struct VerbsSrq {
    device: VerbsDevice,
    pub(crate) parts: SrqParts,
}

impl VerbsSrq {
    /// Returns the bytes of WQE `index`.
    pub(crate) fn wqe(&self, index: u32) -> Vec<u8> {
        let stride = self.parts.stride as usize;
        assert!(index <= self.parts.tail, "the free list starts in order");
        // SAFETY: the WQEs 0..=tail are in the buffer.
        unsafe {
            std::slice::from_raw_parts(self.parts.buffer.add(index as usize * stride), stride)
        }
        .to_vec()
    }

    /// Returns the counter in the doorbell record.
    pub(crate) fn record(&self) -> u32 {
        // SAFETY: lives as long as the process.
        unsafe { &*self.parts.record }.load(Ordering::Acquire)
    }

    /// Posts one receive with `ibv_post_srq_recv`.
    pub(crate) fn post(&self, wr_id: u64, buffers: &[Sge]) {
        let mut sges: Vec<IbvSge> = buffers.iter().copied().map(IbvSge::from).collect();
        let (count, sges) = (sges.len() as u32, sges.as_mut_ptr());
        // SAFETY: a queue and `count` buffers.
        self.device.check(unsafe {
            (self.device.functions.lv_post_receive)(null_mut(), self.parts.srq, wr_id, sges, count)
        });
    }
}

/// A queue pair of libmlx5.
pub(crate) struct VerbsQp {
    device: VerbsDevice,
    pub(crate) parts: QpParts,
}

impl VerbsQp {
    /// Moves the queue pair to INIT.
    pub(crate) fn to_init(&self) {
        // SAFETY: a queue pair.
        self.device
            .check(unsafe { (self.device.functions.lv_to_init)(self.parts.qp) });
    }

    /// Moves the queue pair from INIT to RTS, so that its device executes sends. A connection leads
    /// to queue pair `remote_qpn` of the same port.
    pub(crate) fn connect(&self, remote_qpn: u32) {
        // SAFETY: a queue pair.
        self.device
            .check(unsafe { (self.device.functions.lv_connect)(self.parts.qp, remote_qpn) });
    }

    /// Makes libmlx5 accept posts of sends. The state at the device is unchanged, so the device
    /// executes no send.
    pub(crate) fn pretend_ready(&self) {
        // SAFETY: a queue pair.
        self.device
            .check(unsafe { (self.device.functions.lv_pretend_ready)(self.parts.qp) });
    }

    /// Posts all of `ops`, with one doorbell.
    pub(crate) fn post(&self, api: Api, ops: &[Op]) {
        let post = match api {
            Api::PostSend => self.device.functions.lv_post_send,
            Api::Wr => self.device.functions.lv_wr,
        };
        // SAFETY: a queue pair, and operations whose buffers the caller holds.
        self.device
            .check(unsafe { post(self.parts.qp, ops.as_ptr(), ops.len() as u32) });
    }

    /// Posts one receive with `ibv_post_recv`.
    pub(crate) fn post_receive(&self, wr_id: u64, buffers: &[Sge]) {
        let mut sges: Vec<IbvSge> = buffers.iter().copied().map(IbvSge::from).collect();
        let (count, sges) = (sges.len() as u32, sges.as_mut_ptr());
        // SAFETY: a queue pair and `count` buffers.
        self.device.check(unsafe {
            (self.device.functions.lv_post_receive)(self.parts.qp, null_mut(), wr_id, sges, count)
        });
    }

    /// Returns the doorbell record: receives and WQEBBs posted.
    pub(crate) fn record(&self) -> [u32; 2] {
        // SAFETY: lives as long as the process.
        unsafe { &*self.parts.record }
            .each_ref()
            .map(|word| word.load(Ordering::Acquire))
    }

    /// Returns the WQEBB of a counter.
    pub(crate) fn block(&self, counter: u16) -> [u8; WQEBB] {
        let index = u32::from(counter) & (self.parts.sq_blocks - 1);
        // SAFETY: the queue has `sq_blocks` of them.
        unsafe {
            self.parts
                .sq
                .add(index as usize * WQEBB)
                .cast::<[u8; WQEBB]>()
                .read()
        }
    }

    /// Fills `count` free WQEBBs, from the WQEBB with number `counter` on.
    pub(crate) fn fill_blocks(&self, counter: u16, count: u16, byte: u8) {
        for i in 0..count {
            let index = u32::from(counter.wrapping_add(i)) & (self.parts.sq_blocks - 1);
            // SAFETY: as in `block`.
            unsafe {
                self.parts
                    .sq
                    .add(index as usize * WQEBB)
                    .write_bytes(byte, WQEBB)
            };
        }
    }

    /// Returns the bytes of receive WQE `index`.
    pub(crate) fn receive_wqe(&self, index: u32) -> Vec<u8> {
        assert!(index < self.parts.rq_wqes);
        let stride = self.parts.rq_stride as usize;
        // SAFETY: inside the receive queue.
        unsafe { std::slice::from_raw_parts(self.parts.rq.add(index as usize * stride), stride) }
            .to_vec()
    }

    /// Returns the contents of the BlueFlame register, and fills it with `fill`.
    pub(crate) fn take_register(&self, fill: u8) -> [u8; 2 * BF_BYTES] {
        assert_eq!(self.parts.bf_bytes as usize, BF_BYTES);
        let register = self.parts.bf.cast::<u8>();
        std::array::from_fn(|at| {
            // SAFETY: the register has two halves; here it is ordinary memory that only this thread
            // writes.
            unsafe {
                let byte = register.add(at).read_volatile();
                register.add(at).write_volatile(fill);
                byte
            }
        })
    }
}

/// The Q_Key of queue pairs made here.
pub(crate) const QKEY: u32 = 0x1234;

/// Bytes of half a BlueFlame register.
pub(crate) const BF_BYTES: usize = 256;
