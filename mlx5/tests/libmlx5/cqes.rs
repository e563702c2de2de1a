//! CQEs of the software HCA as libmlx5 and this crate read them, and the doorbell records of
//! completion queues.

use mlx5::wire::*;
use mlx5::*;

use super::libmlx5::{
    Api, IbvPath, IbvSge, IbvWc, Op, QpRequest, SEND_SIGNALED, VerbsCq, VerbsDevice, VerbsQp,
    VerbsSrq, WrOpcode,
};
use super::open;
use crate::null::Plays;

/// Returns the `enum ibv_wc_opcode` of a WQE's opcode.
fn send_opcode(opcode: u8) -> u32 {
    match Opcode::from_repr(opcode).unwrap() {
        Opcode::Send | Opcode::SendImm => 0,
        Opcode::RdmaWrite | Opcode::RdmaWriteImm => 1,
        Opcode::RdmaRead => 2,
        Opcode::AtomicCompareSwap => 3,
        Opcode::AtomicFetchAdd => 4,
        Opcode::Nop => panic!("a NOP is not signaled"),
    }
}

const RECEIVE: u32 = 1 << 7;
const RECEIVE_WRITE_IMM: u32 = RECEIVE + 1;

/// `IBV_WC_GRH` of `enum ibv_wc_flags`.
const GRH: u32 = 1;
const WITH_IMM: u32 = 2;

/// Returns the `enum ibv_wc_status` of an error.
fn status(error: CompletionError) -> u32 {
    match error.syndrome {
        Syndrome::LocalLength => 1,
        Syndrome::LocalQpOperation => 2,
        Syndrome::LocalProtection => 4,
        Syndrome::WorkRequestFlushed => 5,
        Syndrome::MemoryWindowBind => 6,
        Syndrome::BadResponse => 7,
        Syndrome::LocalAccess => 8,
        Syndrome::RemoteInvalidRequest => 9,
        Syndrome::RemoteAccess => 10,
        Syndrome::RemoteOperation => 11,
        Syndrome::TransportRetryExceeded => 12,
        Syndrome::RnrRetryExceeded => 13,
        Syndrome::RemoteAborted => 16,
        Syndrome::Unknown => 21,
    }
}

const SYNDROMES: [Syndrome; 13] = [
    Syndrome::LocalLength,
    Syndrome::LocalQpOperation,
    Syndrome::LocalProtection,
    Syndrome::WorkRequestFlushed,
    Syndrome::MemoryWindowBind,
    Syndrome::BadResponse,
    Syndrome::LocalAccess,
    Syndrome::RemoteInvalidRequest,
    Syndrome::RemoteAccess,
    Syndrome::RemoteOperation,
    Syndrome::TransportRetryExceeded,
    Syndrome::RnrRetryExceeded,
    Syndrome::RemoteAborted,
];

/// Converts our completion to the structure of libibverbs. Its undefined fields are set as in
/// `theirs`.
fn as_wc(cqe: &Cqe<'_>, bytes: &[u8; CQE_BYTES], user: u64, way: Way, theirs: &IbvWc) -> IbvWc {
    let wc = IbvWc {
        wr_id: user,
        qp_num: theirs.qp_num,
        ..IbvWc::default()
    };
    if let Err(error) = cqe.result() {
        let undefined = IbvWc {
            opcode: theirs.opcode,
            byte_len: theirs.byte_len,
            wc_flags: theirs.wc_flags,
            ..wc
        };
        return IbvWc {
            status: status(error),
            vendor_err: error.vendor.into(),
            imm_data: theirs.imm_data,
            ..undefined
        };
    }
    if cqe.opcode() == Some(CqeOpcode::Requester) {
        let opcode = send_opcode(RequesterCqe::parse(bytes).wqe_opcode);
        let byte_len = if opcode >= 2 {
            cqe.byte_count()
        } else {
            theirs.byte_len
        };
        return IbvWc {
            opcode,
            byte_len,
            wc_flags: theirs.wc_flags,
            imm_data: theirs.imm_data,
            ..wc
        };
    }
    // If the CQE holds the received data, the bytes of these fields are data, so the fields are
    // copied from `theirs`.
    let is_scattered = cqe.inline_data().is_some();
    let grh = if is_scattered {
        theirs.wc_flags & GRH
    } else {
        u32::from(cqe.has_grh())
    };
    let (opcode, imm_data, flags) = match cqe.opcode().unwrap() {
        CqeOpcode::ResponderWriteImm => (RECEIVE_WRITE_IMM, cqe.imm().to_be(), WITH_IMM),
        CqeOpcode::ResponderSend => (RECEIVE, theirs.imm_data, 0),
        CqeOpcode::ResponderSendImm => (RECEIVE, cqe.imm().to_be(), WITH_IMM),
        other => panic!("{other:?} is no receive"),
    };
    let src_qp = if is_scattered {
        theirs.src_qp
    } else {
        cqe.source_qpn()
    };
    // `Way::StartPoll` reads neither the sender's LID nor a service level.
    let address = ResponderCqe::parse(bytes);
    let own = if way == Way::PollCq {
        (address.slid, address.sl, 0)
    } else {
        (0, 0, 0)
    };
    let (slid, sl, dlid_path_bits) = if is_scattered {
        (theirs.slid, theirs.sl, theirs.dlid_path_bits)
    } else {
        own
    };
    // The P_Key index takes the place of the immediate: libmlx5 returns half of the immediate then.
    let pkey_index = if cqe.imm() == 0 { 0 } else { theirs.pkey_index };
    IbvWc {
        opcode,
        imm_data,
        pkey_index,
        byte_len: cqe.byte_count(),
        src_qp,
        wc_flags: flags | grh,
        slid,
        sl,
        dlid_path_bits,
        ..wc
    }
}

/// The source of a queue pair's receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Receives {
    Own,
    Shared,
}

/// The way in which libmlx5 polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    PollCq,
    StartPoll,
}

/// A queue pair of this crate.
enum Ours {
    Connected(RcQp),
    Datagrams(UdQp),
}

/// A queue pair of each driver, with one completion queue each.
struct Pair {
    theirs: VerbsQp,
    their_cq: VerbsCq,
    their_srq: VerbsSrq,
    user_index: u32,
    way: Way,
    ours: Ours,
    our_cq: Cq,
    our_srq: Srq,
    null: NullDevice,
    receives: Receives,
    /// Numbers of sends and receives posted.
    sends: u16,
    receives_posted: u16,
    /// The `user` value of the last post.
    user: u64,
    to: *mut std::ffi::c_void,
    compared: usize,
}

impl Pair {
    fn new(
        device: &VerbsDevice,
        user_index: u32,
        cqe_bytes: u32,
        way: Way,
        is_datagram: bool,
        receives: Receives,
    ) -> Self {
        let their_cq = device.create_cq(16, cqe_bytes, way == Way::StartPoll, false);
        let their_srq = device.create_srq(7, 2);
        let is_shared = receives == Receives::Shared;
        let request = QpRequest {
            send_cq: their_cq.parts.cq,
            recv_cq: their_cq.parts.cq,
            srq: if is_shared {
                their_srq.parts.srq
            } else {
                std::ptr::null_mut()
            },
            is_datagram: is_datagram.into(),
            send_wr: 8,
            send_sge: 1,
            inline_bytes: 0,
            recv_wr: if is_shared { 0 } else { 8 },
            recv_sge: if is_shared { 0 } else { 2 },
        };
        let theirs = device.create_qp(&request);
        theirs.to_init();
        theirs.pretend_ready();
        let to = device.create_ah(&IbvPath {
            lid: 1,
            ..IbvPath::default()
        });

        let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
        let null = device.null().unwrap();
        let pd = device.alloc_pd().unwrap();
        let our_cq = device
            .create_cq(CqConfig {
                cqe_bytes,
                ..CqConfig::from(16)
            })
            .unwrap();
        let our_srq = pd.create_srq(7, 2).unwrap();
        let source = if is_shared {
            (&our_srq).into()
        } else {
            ReceiveSource::Own {
                depth: 8,
                max_sge: 2,
            }
        };
        let (config, mut user) = (QpConfig::default(), 0);
        let ours = if is_datagram {
            let mut qp = pd.create_ud_qp(&our_cq, &our_cq, source, &config).unwrap();
            qp.activate(0).unwrap();
            Ours::Datagrams(qp)
        } else {
            let mut qp = pd.create_qp(&our_cq, &our_cq, source, &config).unwrap();
            qp.connect(&qp.address(), &ConnectOptions::default())
                .unwrap();
            Ours::Connected(qp)
        };
        user += u64::from(user_index) << 32;
        let sends = 0;
        let receives_posted = 0;
        let compared = 0;
        Self {
            theirs,
            their_cq,
            their_srq,
            user_index,
            way,
            ours,
            our_cq,
            our_srq,
            null,
            receives,
            sends,
            receives_posted,
            user,
            to,
            compared,
        }
    }

    fn our_qpn(&self) -> u32 {
        match &self.ours {
            Ours::Connected(qp) => qp.qpn(),
            Ours::Datagrams(qp) => qp.qpn(),
        }
    }

    /// Posts a send of any kind to both queue pairs. Returns the index of its WQE.
    fn post_send(&mut self) -> u16 {
        self.user += 1;
        let mut sge = IbvSge {
            addr: 8,
            length: 8,
            lkey: 1,
        };
        let is_datagram = matches!(self.ours, Ours::Datagrams(_));
        let op = Op {
            wr_id: self.user,
            opcode: WrOpcode::Send,
            flags: SEND_SIGNALED,
            imm: 0,
            rkey: 0,
            raddr: 0,
            compare_add: 0,
            swap: 0,
            ah: if is_datagram {
                self.to
            } else {
                std::ptr::null_mut()
            },
            qpn: 1,
            qkey: 1,
            sge: &mut sge,
            sges: 1,
        };
        self.theirs.post(Api::PostSend, &[op]);
        let payload = Sge {
            addr: 8,
            len: 8,
            lkey: 1,
        };
        match &mut self.ours {
            Ours::Connected(qp) => qp
                .post(&Send { payload }, Signal::Always, self.user)
                .unwrap(),
            Ours::Datagrams(qp) => {
                let to = Destination::new(AddressVector::local(1, 0), 1, 1);
                // One WQEBB more than a SEND has, so both queues advance alike.
                qp.post(&UdSend { to: &to, payload }, Signal::Always, self.user)
                    .unwrap();
            }
        }
        let index = self.sends;
        self.sends += if is_datagram { 2 } else { 1 };
        index
    }

    /// Posts a receive to both queue pairs. Returns the index of its WQE.
    fn post_receive(&mut self, buffers: &[Sge]) -> u16 {
        self.user += 1;
        let index = self.receives_posted;
        self.receives_posted = (index + 1) % 8;
        match (self.receives, &mut self.ours) {
            (Receives::Shared, _) => {
                self.their_srq.post(self.user, buffers);
                self.our_srq.post(buffers, self.user).unwrap();
            }
            (Receives::Own, Ours::Connected(qp)) => {
                self.theirs.post_receive(self.user, buffers);
                qp.post_receive(buffers, self.user).unwrap();
            }
            (Receives::Own, Ours::Datagrams(qp)) => {
                self.theirs.post_receive(self.user, buffers);
                qp.post_receive(buffers, self.user).unwrap();
            }
        }
        index
    }

    fn their_poll(&self) -> Option<IbvWc> {
        match self.way {
            Way::PollCq => self.their_cq.poll(1).pop(),
            Way::StartPoll => self.their_cq.start_poll(),
        }
    }

    /// Writes a CQE into both queues, and compares the results of both polls. `make` makes the CQE
    /// for a queue pair number and a user index; `data` is its inline data, if any.
    fn compare(
        &mut self,
        opcode: CqeOpcode,
        make: impl Fn(u32, u32) -> [u8; CQE_BYTES],
        data: &[u8],
    ) {
        assert_eq!(self.their_poll(), None, "an entry that nobody wrote");
        let mut bytes = make(self.theirs.parts.qpn, self.user_index);
        let mut half = [0x5a; CQE_BYTES];
        let format = match data.len() {
            0 => CqeFormat::Plain,
            n if n <= CQE_BYTES / 2 => {
                bytes[..n].copy_from_slice(data);
                CqeFormat::Inline32
            }
            n => {
                half[..n].copy_from_slice(data);
                CqeFormat::Inline64
            }
        };
        bytes[OP_OWN_OFFSET] = op_own_with(
            opcode,
            format,
            is_solicited(bytes[OP_OWN_OFFSET]),
            self.their_cq.owner(),
        );
        self.their_cq.write(&half, &bytes);
        let theirs = self
            .their_poll()
            .unwrap_or_else(|| panic!("libmlx5 does not take {bytes:02x?}"));
        assert_eq!(theirs.qp_num, self.theirs.parts.qpn, "{bytes:02x?}");

        let cqe = make(self.our_qpn(), 0);
        let is_written = if data.is_empty() {
            self.null.write_cqe(self.our_cq.cqn(), &cqe, opcode)
        } else {
            self.null
                .write_scattered(self.our_cq.cqn(), &cqe, opcode, data)
        };
        assert!(is_written);
        let mut ours = None;
        let polled = self.our_cq.poll(2, |cqe| {
            let is_send = matches!(
                cqe.opcode(),
                Some(CqeOpcode::Requester | CqeOpcode::RequesterError)
            );
            let user = match (&mut self.ours, self.receives) {
                (Ours::Connected(qp), _) if is_send => qp.complete(&cqe),
                (Ours::Datagrams(qp), _) if is_send => qp.complete(&cqe),
                (_, Receives::Shared) => self.our_srq.complete_receive(&cqe),
                (Ours::Connected(qp), Receives::Own) => qp.complete_receive(&cqe),
                (Ours::Datagrams(qp), Receives::Own) => qp.complete_receive(&cqe),
            };
            assert_eq!(cqe.inline_data().unwrap_or_default(), data);
            let user = user.unwrap_or_else(|| panic!("{cqe:?} is of no operation"));
            ours = Some(as_wc(&cqe, &bytes, user, self.way, &theirs));
        });
        assert_eq!(
            (polled, ours),
            (1, Some(theirs)),
            "{opcode:?} {:?} {bytes:02x?}",
            self.way
        );
        let [their_consumer, _] = self.their_cq.record();
        assert_eq!(
            their_consumer,
            self.null.cq_record(self.our_cq.cqn()).unwrap()[CQ_DBREC_SET_CI],
            "the consumer record"
        );
        self.compared += 1;
    }

    fn compare_sends(&mut self) {
        let is_datagram = matches!(self.ours, Ours::Datagrams(_));
        let (only_connected, both) = ([0x08, 0x09, 0x10, 0x11, 0x12], [0x0a, 0x0b]);
        for wqe_opcode in both
            .iter()
            .chain(only_connected.iter().filter(|_| !is_datagram))
            .copied()
        {
            let byte_count = match Opcode::from_repr(wqe_opcode) {
                Some(Opcode::RdmaRead) => 0x0012_3456,
                Some(Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd) => ATOMIC_BYTES,
                _ => 0,
            };
            let wqe_counter = self.post_send();
            let make = |qpn, user_index| {
                RequesterCqe {
                    wqe_opcode,
                    qpn,
                    wqe_counter,
                    byte_count,
                    user_index,
                }
                .emit()
            };
            self.compare(CqeOpcode::Requester, make, &[]);
        }
    }

    fn compare_receives(&mut self) {
        let is_datagram = matches!(self.ours, Ours::Datagrams(_));
        let opcodes = [
            CqeOpcode::ResponderSend,
            CqeOpcode::ResponderSendImm,
            CqeOpcode::ResponderWriteImm,
        ];
        for opcode in opcodes.into_iter().take(if is_datagram { 2 } else { 3 }) {
            for bits in 0..8 {
                let solicited = bits & 1 != 0;
                let grh = bits & 2 != 0;
                let has_data = bits & 4 != 0;
                if grh && !is_datagram {
                    continue;
                }
                let source_qpn = if is_datagram { 0x00ab_cdef } else { 0 };
                let buffers = [
                    Sge {
                        addr: 8,
                        len: 4096,
                        lkey: 7,
                    },
                    Sge {
                        addr: 16,
                        len: 4096,
                        lkey: 7,
                    },
                ];
                let wqe_counter = self.post_receive(if has_data { &buffers } else { &[] });
                let byte_count = if has_data { 5_000 } else { 0 };
                let imm = if opcode == CqeOpcode::ResponderSend {
                    0
                } else {
                    0x1234_5678
                };
                let make = |qpn, srqn| {
                    let mut bytes = ResponderCqe {
                        qpn,
                        srqn,
                        imm,
                        byte_count,
                        wqe_counter,
                        source_qpn,
                        slid: 9,
                        grh,
                        sl: bits,
                    }
                    .emit();
                    bytes[OP_OWN_OFFSET] = op_own_with(opcode, CqeFormat::Plain, solicited, false);
                    bytes
                };
                self.compare(opcode, make, &[]);
            }
        }
    }

    /// Errors move our queue pair to the error state, which refuses posts, so all posts come first.
    fn compare_errors(&mut self, syndromes: &[u8]) {
        let sends: Vec<(u16, u8)> = syndromes
            .iter()
            .map(|&raw| (self.post_send(), raw))
            .collect();
        let receives: Vec<(u16, u8)> = syndromes
            .iter()
            .map(|&raw| (self.post_receive(&[]), raw))
            .collect();
        let sends = sends
            .into_iter()
            .map(|one| (CqeOpcode::RequesterError, one));
        let receives = receives
            .into_iter()
            .map(|one| (CqeOpcode::ResponderError, one));
        for ((opcode, (wqe_counter, raw_syndrome)), vendor_syndrome) in
            sends.chain(receives).zip(0x81..)
        {
            let wqe_opcode = if opcode == CqeOpcode::RequesterError {
                0x0a
            } else {
                0
            };
            // The `user` of each completion is the `user` of its own post.
            let make = |qpn, user_index| {
                ErrorCqe {
                    raw_syndrome,
                    vendor_syndrome,
                    wqe_opcode,
                    qpn,
                    wqe_counter,
                    user_index,
                }
                .emit()
            };
            self.compare(opcode, make, &[]);
        }
    }
}

/// Tests every kind of queue pair, receive queue, entry and poll.
fn every_pair(mut exercise: impl FnMut(&VerbsDevice, &mut u32, u32, Way, bool, Receives)) {
    let device = open();
    let mut user_index = 0;
    for (cqe_bytes, way) in [
        (64, Way::PollCq),
        (64, Way::StartPoll),
        (128, Way::PollCq),
        (128, Way::StartPoll),
    ] {
        for is_datagram in [false, true] {
            for receives in [Receives::Own, Receives::Shared] {
                exercise(
                    &device,
                    &mut user_index,
                    cqe_bytes,
                    way,
                    is_datagram,
                    receives,
                );
            }
        }
    }
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn libmlx5_reads_every_cqe_of_ours_as_we_do() {
    let mut compared = 0;
    every_pair(
        |device, user_index, cqe_bytes, way, is_datagram, receives| {
            let mut next = || {
                *user_index += 1;
                Pair::new(
                    device,
                    *user_index - 1,
                    cqe_bytes,
                    way,
                    is_datagram,
                    receives,
                )
            };
            let mut pair = next();
            // More than a lap of the queue.
            for _ in 0..3 {
                pair.compare_sends();
                pair.compare_receives();
            }
            compared += pair.compared;
            let raw: Vec<u8> = SYNDROMES
                .iter()
                .map(|syndrome| *syndrome as u8)
                .chain([0x77])
                .collect();
            for syndromes in raw.chunks(3) {
                let mut pair = next();
                pair.compare_errors(syndromes);
                compared += pair.compared;
            }
        },
    );
    println!("{compared} CQEs read by libmlx5 and by us");
    assert!(compared > 1000);
}

/// The memory of a receive's two buffers, which a driver may copy to.
fn two_buffers(memory: &mut [u8; 128]) -> [Sge; 2] {
    let addr = memory.as_mut_ptr() as u64;
    [
        Sge {
            addr,
            len: 10,
            lkey: 7,
        },
        Sge {
            addr: addr + 10,
            len: 118,
            lkey: 7,
        },
    ]
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn libmlx5_copies_the_data_out_of_our_cqes_into_the_receives_buffers() {
    let mut compared = 0;
    every_pair(
        |device, user_index, cqe_bytes, way, is_datagram, receives| {
            // The software HCA scatters data to CQEs only for connected queue pairs.
            if is_datagram {
                return;
            }
            let mut pair = Pair::new(device, *user_index, cqe_bytes, way, is_datagram, receives);
            *user_index += 1;
            let most = if cqe_bytes == 128 { 64 } else { 32 };
            for len in 1..=most {
                let mut memory = [0xee; 128];
                let data: Vec<u8> = (0..len as u8)
                    .map(|i| i.wrapping_mul(5).wrapping_add(1))
                    .collect();
                let wqe_counter = pair.post_receive(&two_buffers(&mut memory));
                let make = |qpn, srqn| {
                    ResponderCqe {
                        qpn,
                        srqn,
                        byte_count: len as u32,
                        wqe_counter,
                        ..Default::default()
                    }
                    .emit()
                };
                pair.compare(CqeOpcode::ResponderSend, make, &data);
                assert_eq!(
                    (&memory[..len], &memory[len..]),
                    (&data[..], &[0xee; 128][len..]),
                    "{len} bytes"
                );
            }
            compared += pair.compared;
        },
    );
    assert_eq!(compared, 2 * (2 * 32 + 2 * 64));
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn neither_driver_takes_an_entry_as_libmlx5_leaves_it() {
    let device = open();
    for (cqe_bytes, way) in [
        (64, Way::PollCq),
        (64, Way::StartPoll),
        (128, Way::PollCq),
        (128, Way::StartPoll),
    ] {
        let cq = device.create_cq(16, cqe_bytes, way == Way::StartPoll, false);
        let marks: Vec<u8> = (0..cq.parts.entries).map(|i| cq.op_own(i)).collect();
        assert_eq!(
            marks,
            vec![0xf0; cq.parts.entries as usize],
            "opcode 0xf, and the owner bit of the first lap"
        );
        let polled = if way == Way::PollCq {
            cq.poll(1).pop()
        } else {
            cq.start_poll()
        };
        assert_eq!(polled, None);
        // This crate's poll takes no CQE with the invalid opcode either. The unit tests of `Cq`
        // check both marks of untouched entries over whole laps of a queue.
        let mine = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
        let mut ours = mine
            .create_cq(CqConfig {
                cqe_bytes,
                ..CqConfig::from(16)
            })
            .unwrap();
        assert!(mine.null().unwrap().write_cqe(
            ours.cqn(),
            &ResponderCqe::default().emit(),
            CqeOpcode::Invalid
        ));
        assert_eq!(ours.poll(1, |_| ()), 0);
    }
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn both_drivers_arm_a_completion_queue_with_the_same_words() {
    let device = open();
    let mut pair = Pair::new(&device, 0, 64, Way::PollCq, false, Receives::Own);
    for consumed in 0..20u32 {
        for solicited_only in [false, true] {
            pair.their_cq.set_arm_word(u32::MAX);
            pair.their_cq.arm(solicited_only);
            pair.our_cq.arm(solicited_only);
            let arm = CqArm {
                sequence: 0,
                solicited_only,
                consumed,
            };
            let ours = pair.null.cq_record(pair.our_cq.cqn()).unwrap();
            assert_eq!(ours, [cq_consumer_record(consumed), arm.record()]);
            assert_eq!(pair.their_cq.record(), ours, "consumer and arm word");
            let doorbell = pair
                .their_cq
                .arm_register()
                .load(std::sync::atomic::Ordering::Acquire)
                .to_ne_bytes();
            assert_eq!(
                doorbell,
                arm.doorbell(pair.their_cq.parts.cqn),
                "the UAR page"
            );
        }
        let wqe_counter = pair.post_receive(&[]);
        let make = |qpn, srqn| {
            ResponderCqe {
                qpn,
                srqn,
                wqe_counter,
                ..Default::default()
            }
            .emit()
        };
        pair.compare(CqeOpcode::ResponderSend, make, &[]);
    }
}

/// The software HCA compresses a completion queue of libmlx5 only if the program requests that, and
/// unpacks the sessions itself; this test shows the reason.
#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn libmlx5_takes_the_title_of_a_compressed_session_for_one_receive() {
    let device = open();
    let mut pair = Pair::new(&device, 0, 64, Way::PollCq, false, Receives::Own);
    let wqe_counter = pair.post_receive(&[]);
    pair.post_receive(&[]);
    let mut title = ResponderCqe {
        qpn: pair.theirs.parts.qpn,
        wqe_counter,
        ..Default::default()
    }
    .emit();
    TitleCqe {
        count: 2,
        wqe_counter,
    }
    .emit_into(&mut title);
    title[OP_OWN_OFFSET] = op_own_with(
        CqeOpcode::ResponderSend,
        CqeFormat::Compressed,
        false,
        false,
    );
    pair.their_cq.write(&[0; CQE_BYTES], &title);
    let wcs = pair.their_cq.poll(4);
    assert_eq!((wcs.len(), wcs[0].byte_len), (1, 2), "{wcs:?}");
}
