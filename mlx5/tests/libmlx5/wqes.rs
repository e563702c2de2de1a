//! Send WQEs, doorbell records and BlueFlame registers.

use mlx5::wire::*;
use mlx5::*;

use super::differences::Differences;
use super::fields::fields;
use super::libmlx5::{
    Api, BF_BYTES, IbvPath, IbvSge, Op, QpRequest, VerbsCq, VerbsDevice, VerbsQp, WrOpcode,
};
use super::operations::{Address, Case, Content, IMM, Ours, RADDR, RKEY, SGE, flags};
use super::random::Random;
use super::{open, requester_cqe};
use crate::null::Plays;

/// Byte that registers are filled with.
const FILL: u8 = 0xee;
/// Byte that fills libmlx5's send queue where the next WQEs go. A byte that still has it afterwards
/// was not written.
const LEFT: u8 = 0xd7;
const INLINE: usize = 220;
/// Maximum number of buffers for libmlx5's queue pairs; ours gathers from one.
const SGES: usize = 6;

/// A WQE in a queue: its index, and the bytes of its `ds` segments.
#[derive(Debug)]
struct Wqe {
    index: u16,
    bytes: Vec<u8>,
}

/// The bytes that one doorbell stored to a BlueFlame register.
#[derive(Debug, PartialEq, Eq)]
struct Stored {
    half: usize,
    bytes: Vec<u8>,
}

/// Returns the bytes of a register that differ from [`FILL`]. Stores are of 8 bytes or multiples of
/// 64, and no WQE here has 8 bytes of [`FILL`].
fn stored(register: &[u8; 2 * BF_BYTES]) -> Stored {
    let words = register
        .chunks(8)
        .map(|word| word != [FILL; 8])
        .collect::<Vec<_>>();
    let first = words
        .iter()
        .position(|&is_stored| is_stored)
        .expect("nothing was stored to the register");
    let last = words.iter().rposition(|&is_stored| is_stored).unwrap();
    assert_eq!(
        first / 32,
        last / 32,
        "both halves of the register were stored to"
    );
    assert_eq!(first % 32, 0, "a store into the middle of a half");
    Stored {
        half: first / 32,
        bytes: register[8 * first..8 * (last + 1)].to_vec(),
    }
}

/// Returns the WQE at `index`. `block` returns its WQEBBs.
fn wqe(index: u16, block: impl Fn(u16) -> [u8; WQEBB]) -> (Wqe, u16) {
    let bytes = usize::from(block(index)[7] & 0x3f) * SEGMENT;
    let blocks = bytes.div_ceil(WQEBB) as u16;
    let mut all: Vec<u8> = (0..blocks)
        .flat_map(|i| block(index.wrapping_add(i)))
        .collect();
    all.truncate(bytes);
    (Wqe { index, bytes: all }, index.wrapping_add(blocks))
}

/// A queue pair of libmlx5 that never leaves RESET, so that posted operations are not executed.
struct Theirs {
    qp: VerbsQp,
    cq: VerbsCq,
    user_index: u32,
    producer: u16,
}

impl Theirs {
    fn new(device: &VerbsDevice, user_index: u32, is_datagram: bool, send_wr: u32) -> Self {
        let cq = device.create_cq(64, 64, false, false);
        let srq = device.create_srq(1, 1);
        let request = QpRequest {
            send_cq: cq.parts.cq,
            recv_cq: cq.parts.cq,
            srq: srq.parts.srq,
            is_datagram: is_datagram.into(),
            send_wr,
            send_sge: SGES as u32,
            inline_bytes: INLINE as u32,
            recv_wr: 0,
            recv_sge: 0,
        };
        let qp = device.create_qp(&request);
        assert!(qp.parts.max_inline as usize >= INLINE && qp.parts.bf_bytes as usize == BF_BYTES);
        qp.pretend_ready();
        qp.take_register(FILL);
        Self {
            qp,
            cq,
            user_index,
            producer: 0,
        }
    }

    /// Posts all `cases` with one doorbell. Returns the WQEs, and the bytes stored to the register.
    fn post(&mut self, api: Api, cases: &[Case], split: bool) -> (Vec<Wqe>, Stored) {
        let mut sges: Vec<Vec<IbvSge>> = cases.iter().map(|case| case.sges(split)).collect();
        let ops: Vec<Op> = cases
            .iter()
            .zip(&mut sges)
            .map(|(case, sges)| case.op(7, sges))
            .collect();
        self.qp
            .fill_blocks(self.producer, 5 * cases.len() as u16, LEFT);
        self.qp.post(api, &ops);
        let wqes = cases
            .iter()
            .map(|_| {
                let (wqe, next) = wqe(self.producer, |counter| self.qp.block(counter));
                self.producer = next;
                wqe
            })
            .collect();
        assert_eq!(
            self.qp.record()[QP_DBREC_SEND],
            queue_record(self.producer),
            "the doorbell record"
        );
        (wqes, stored(&self.qp.take_register(FILL)))
    }

    /// Completes all WQEs up to `wqe`.
    fn complete(&mut self, wqe: &Wqe) {
        let cqe = requester_cqe(self.qp.parts.qpn, self.user_index, wqe.bytes[3], wqe.index);
        let mut bytes = cqe.emit();
        bytes[OP_OWN_OFFSET] = op_own(CqeOpcode::Requester, self.cq.owner());
        self.cq.write(&[0; 64], &bytes);
        let wcs = self.cq.poll(2);
        assert!(
            wcs.len() == 1 && wcs[0].wr_id == 7 && wcs[0].status == 0,
            "{wcs:?}"
        );
    }
}

/// A queue pair of a null device.
struct Mine {
    qp: Ours,
    cq: Cq,
    null: NullDevice,
    producer: u16,
    /// Number of NOPs seen.
    padding: usize,
    /// Whether the last doorbell announced NOPs.
    is_behind_nops: bool,
}

impl Mine {
    fn new(is_datagram: bool, send_wr: u32) -> Self {
        let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64).unwrap();
        let srq = pd.create_srq(1, 0).unwrap();
        let config = QpConfig {
            max_send_wr: send_wr,
            max_inline_data: INLINE,
            ..QpConfig::default()
        };
        let qp = if is_datagram {
            let mut qp = pd.create_ud_qp(&cq, &cq, &srq, &config).unwrap();
            qp.activate(0).unwrap();
            Ours::Datagrams(qp)
        } else {
            let mut qp = pd.create_qp(&cq, &cq, &srq, &config).unwrap();
            qp.connect(&qp.address(), &ConnectOptions::default())
                .unwrap();
            Ours::Connected(qp)
        };
        let null = device.null().unwrap();
        null.take_register(qp.qpn(), FILL).unwrap();
        Self {
            qp,
            cq,
            null,
            producer: 0,
            padding: 0,
            is_behind_nops: false,
        }
    }

    fn block(&self, counter: u16) -> [u8; WQEBB] {
        self.null.send_queue(self.qp.qpn(), counter).unwrap().1
    }

    /// Posts all `cases` with one doorbell. Returns `None` if this crate's queue pair does not take
    /// one of them.
    fn post(&mut self, cases: &[Case]) -> Option<(Vec<Wqe>, Stored)> {
        if !cases.iter().all(|case| case.post(&mut self.qp)) {
            return None;
        }
        self.qp.ring();
        let mut wqes = Vec::new();
        let padding = self.padding;
        for _ in cases {
            // NOPs may have filled the end of the ring.
            while self.block(self.producer)[3] == Opcode::Nop as u8 {
                self.producer = self.producer.wrapping_add(1);
                self.padding += 1;
            }
            let (wqe, next) = wqe(self.producer, |counter| self.block(counter));
            self.producer = next;
            wqes.push(wqe);
        }
        self.is_behind_nops = self.padding != padding;
        assert_eq!(
            self.null.send_queue(self.qp.qpn(), 0).unwrap().0,
            self.producer,
            "the doorbell record"
        );
        Some((
            wqes,
            stored(&self.null.take_register(self.qp.qpn(), FILL).unwrap()),
        ))
    }

    fn complete(&mut self, wqe: &Wqe) {
        let cqe = requester_cqe(self.qp.qpn(), 0, wqe.bytes[3], wqe.index);
        assert!(
            self.null
                .write_cqe(self.cq.cqn(), &cqe.emit(), CqeOpcode::Requester)
        );
        assert_eq!(
            self.cq
                .poll(2, |cqe| assert_eq!(self.qp.complete(&cqe), Some(7))),
            1
        );
    }
}

/// Makes the WQE of an operation that gathers from any number of buffers, with the formats of
/// `mlx5::wire`.
fn composed(case: &Case, index: u16, qpn: u32) -> Wqe {
    let Content::Gathered(sges) = &case.content else {
        panic!("the data path has this one")
    };
    let remote = RaddrSegment {
        addr: RADDR,
        rkey: RKEY,
    }
    .emit();
    let datagram = |to: &Address| {
        DatagramSegment {
            vector: to.ours.vector(),
            qpn: to.qpn,
            qkey: to.qkey,
        }
        .emit()
        .to_vec()
    };
    let datagram = case.to.as_ref().map_or(vec![], datagram);
    let (opcode, mut segments) = match case.verb {
        WrOpcode::Send => (Opcode::Send, datagram),
        WrOpcode::SendImm => (Opcode::SendImm, datagram),
        WrOpcode::Write => (Opcode::RdmaWrite, remote.to_vec()),
        WrOpcode::WriteImm => (Opcode::RdmaWriteImm, remote.to_vec()),
        WrOpcode::Read => (Opcode::RdmaRead, remote.to_vec()),
        WrOpcode::CompareSwap | WrOpcode::FetchAdd => panic!("an atomic has one buffer"),
    };
    for sge in sges.iter().filter(|sge| sge.len != 0) {
        segments.extend(
            DataSegment {
                byte_count: sge.len,
                lkey: sge.lkey,
                addr: sge.addr,
            }
            .emit(),
        );
    }
    let has_imm = matches!(case.verb, WrOpcode::SendImm | WrOpcode::WriteImm);
    let ctrl = CtrlSegment {
        opcode: opcode as u8,
        wqe_index: index,
        qpn,
        ds: (1 + segments.len() / SEGMENT) as u8,
        signaled: case.flags.signal == Signal::Always,
        fence: if case.flags.fence {
            FenceMode::SmallAndFence
        } else {
            FenceMode::None
        },
        solicited: case.flags.solicited,
        imm: if has_imm { IMM } else { 0 },
    };
    Wqe {
        index,
        bytes: [&ctrl.emit()[..], &segments].concat(),
    }
}

/// Both drivers, and their differences.
struct Pair {
    theirs: Theirs,
    ours: Mine,
    differences: Differences,
    compared: usize,
}

impl Pair {
    fn new(device: &VerbsDevice, user_index: u32, is_datagram: bool, send_wr: u32) -> Self {
        let (theirs, ours) = (
            Theirs::new(device, user_index, is_datagram, send_wr),
            Mine::new(is_datagram, send_wr),
        );
        Self {
            theirs,
            ours,
            differences: Differences::default(),
            compared: 0,
        }
    }

    /// Posts `cases` through both, with one doorbell each, and compares WQEs and doorbells.
    fn compare(&mut self, api: Api, cases: &[Case], split: bool) {
        let (theirs, their_doorbell) = self.theirs.post(api, cases, split);
        let their_qpn = self.theirs.qp.parts.qpn;
        let Some((ours, our_doorbell)) = self.ours.post(cases) else {
            for (case, theirs) in cases.iter().zip(&theirs) {
                self.compare_wqe(
                    api,
                    case,
                    theirs,
                    &composed(case, theirs.index, their_qpn),
                    their_qpn,
                );
            }
            return self.theirs.complete(theirs.last().unwrap());
        };
        for ((case, theirs), ours) in cases.iter().zip(&theirs).zip(&ours) {
            self.compare_wqe(api, case, theirs, ours, self.ours.qp.qpn());
        }
        let (theirs, ours) = (theirs.last().unwrap(), ours.last().unwrap());
        self.compare_doorbell(api, cases, (theirs, &their_doorbell), (ours, &our_doorbell));
        self.theirs.complete(theirs);
        self.ours.complete(ours);
    }

    fn compare_wqe(&mut self, api: Api, case: &Case, theirs: &Wqe, ours: &Wqe, our_qpn: u32) {
        self.compared += 1;
        let their_qpn = self.theirs.qp.parts.qpn;
        let fields = fields(&case.segments());
        assert_eq!(fields.last().unwrap().1.end, ours.bytes.len(), "{case:?}");
        for (name, range) in fields {
            let (their_field, our_field) = (
                theirs.bytes.get(range.clone()).unwrap_or(&[]),
                &ours.bytes[range],
            );
            let is_same = match name.as_str() {
                "ctrl.wqe_index" => {
                    their_field == theirs.index.to_be_bytes()
                        && our_field == ours.index.to_be_bytes()
                }
                "ctrl.qpn" => {
                    their_field == &their_qpn.to_be_bytes()[1..]
                        && our_field == &our_qpn.to_be_bytes()[1..]
                }
                _ => their_field == our_field,
            };
            if !is_same {
                let key = key(api, case, &name, their_field, our_field);
                let example = || {
                    format!(
                        "{api:?} {case:?}\n  libmlx5 {their_field:02x?}\n  ours    {our_field:02x?}"
                    )
                };
                self.differences.add(&key, example);
            }
        }
    }

    /// Checks that each driver's register holds the start of its last WQE, and that both store the
    /// same number of bytes, to the same half.
    fn compare_doorbell(
        &mut self,
        api: Api,
        cases: &[Case],
        theirs: (&Wqe, &Stored),
        ours: (&Wqe, &Stored),
    ) {
        for (wqe, stored) in [theirs, ours] {
            let both = wqe.bytes.len().min(stored.bytes.len());
            assert_eq!(
                wqe.bytes[..both],
                stored.bytes[..both],
                "the register holds the WQE: {cases:?}"
            );
        }
        let ((wqe, theirs), (_, ours)) = (theirs, ours);
        assert_eq!(
            theirs.half, ours.half,
            "the halves of the register take turns: {cases:?}"
        );
        let whole = wqe.bytes.len().next_multiple_of(WQEBB);
        let key = match (theirs.bytes.len(), ours.bytes.len()) {
            (n, m) if n == m => None,
            (8, 64) if wqe.bytes.len() == SEGMENT => Some("register of one segment".to_owned()),
            (n, 8) if n == whole && self.ours.is_behind_nops => {
                Some("register behind NOPs".to_owned())
            }
            (n, m) => Some(format!("register {n} {m}")),
        };
        if let Some(key) = key {
            self.differences.add(&key, || format!("{api:?} {cases:?}"));
        }
        if self.ours.is_behind_nops {
            self.differences
                .add("ctrl.opcode at the end of the queue", || {
                    "libmlx5 goes on at the start".to_owned()
                });
        }
    }
}

/// Returns the document's name for a difference in `field`, if the difference may be a known one.
fn key(api: Api, case: &Case, field: &str, theirs: &[u8], ours: &[u8]) -> String {
    let was_left = theirs.iter().all(|&byte| byte == LEFT) && ours.iter().all(|&byte| byte == 0);
    let has_imm = matches!(case.verb, WrOpcode::SendImm | WrOpcode::WriteImm);
    let is_known = match field {
        "inline.padding" => was_left,
        "atomic.compare" => was_left && case.verb == WrOpcode::FetchAdd,
        "ctrl.imm" => was_left && api == Api::Wr && !has_imm,
        "ctrl.fm_ce_se" => {
            case.flags.signal == Signal::Reclaim
                && ours[0] == theirs[0] | (CompletionMode::Always as u8) << 2
        }
        _ => false,
    };
    if is_known {
        field.to_owned()
    } else {
        format!("{field}: {theirs:02x?}, ours {ours:02x?}")
    }
}

const APIS: [Api; 2] = [Api::PostSend, Api::Wr];

/// Returns every content that a verb may carry to the peer.
fn contents() -> Vec<Content> {
    let data: Vec<u8> = (0..INLINE as u8)
        .map(|i| i.wrapping_mul(7).wrapping_add(1))
        .collect();
    let sge = |len| Sge {
        len,
        addr: SGE.addr + u64::from(len),
        ..SGE
    };
    let mut contents = vec![Content::Nothing];
    contents.extend([0, 1, 0x0009_8765, 1 << 30].map(|len| Content::Gathered(vec![sge(len)])));
    contents.extend((2..=SGES).map(|n| Content::Gathered((1..=n as u32).map(sge).collect())));
    contents.push(Content::Gathered(vec![sge(3), sge(0), sge(5)]));
    contents.extend((0..=INLINE).map(|n| Content::Inline(data[..n].to_vec())));
    contents
}

/// Returns every operation of a reliable connection.
fn connected_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for flags in flags() {
        for verb in [
            WrOpcode::Send,
            WrOpcode::SendImm,
            WrOpcode::Write,
            WrOpcode::WriteImm,
        ] {
            cases.extend(contents().into_iter().map(|content| Case {
                verb,
                content,
                flags,
                to: None,
            }));
        }
        let mut into = |verb, content| {
            cases.push(Case {
                verb,
                content,
                flags,
                to: None,
            })
        };
        for content in contents()
            .into_iter()
            .filter(|content| matches!(content, Content::Gathered(_)))
        {
            into(WrOpcode::Read, content);
        }
        for verb in [WrOpcode::CompareSwap, WrOpcode::FetchAdd] {
            into(verb, Content::Gathered(vec![Sge { len: 8, ..SGE }]));
        }
    }
    cases
}

/// Returns every datagram, to an address in the subnet and to an address beyond a router.
fn datagram_cases(device: &VerbsDevice) -> Vec<Case> {
    let gid = *b"\xfe\x80\x01\x02\x03\x04\x05\x06the gid.";
    let (qpn, qkey) = (0x00c0_ffee, 0x0123_4567);
    let local = IbvPath {
        lid: 0xabcd,
        service_level: 5,
        path_bits: 0x7e,
        static_rate: 3,
        ..IbvPath::default()
    };
    let routed = IbvPath {
        gid,
        flow_label: 0x000b_cdef,
        is_global: 1,
        hop_limit: 64,
        traffic_class: 0x5c,
        ..local
    };
    // libmlx5 adds 5 to a rate of `enum ibv_rate`.
    let vector = AddressVector {
        stat_rate_sl: (3 + 5) << 4 | 5,
        fl_mlid: 0x7e,
        ..AddressVector::local(0xabcd, 0)
    };
    let paths = [
        (local, vector),
        (routed, vector.with_grh(0, 0x000b_cdef, 64, 0x5c, gid)),
    ];
    let to = paths.map(|(path, vector)| Address {
        ah: device.create_ah(&path),
        qpn,
        qkey,
        ours: Destination::new(vector, qpn, qkey),
    });
    let mut cases = Vec::new();
    for to in to {
        for flags in flags() {
            for verb in [WrOpcode::Send, WrOpcode::SendImm] {
                cases.extend(contents().into_iter().map(|content| Case {
                    verb,
                    content,
                    flags,
                    to: Some(to),
                }));
            }
        }
    }
    cases
}

/// Returns the cases that this crate's queue pair takes, in random groups of 2 to 8.
fn groups(cases: &[Case]) -> Vec<Vec<Case>> {
    let mut random = Random::new(4);
    let mut cases: Vec<Case> = cases
        .iter()
        .filter(|case| !matches!(&case.content, Content::Gathered(s) if s.len() != 1))
        .cloned()
        .collect();
    let mut groups = Vec::new();
    while cases.len() > 8 {
        let count = 2 + random.below(7) as usize;
        groups.push(
            (0..count)
                .map(|_| cases.swap_remove(random.below(cases.len() as u32) as usize))
                .collect(),
        );
    }
    groups
}

impl Pair {
    /// Posts all of `cases`, one and several to a doorbell, through both ways to post.
    fn compare_all(&mut self, cases: &[Case]) {
        for api in APIS {
            for case in cases {
                self.compare(api, std::slice::from_ref(case), false);
                if matches!(case.content, Content::Inline(_)) {
                    self.compare(api, std::slice::from_ref(case), true);
                }
            }
            for group in groups(cases) {
                self.compare(api, &group, false);
            }
        }
        assert!(self.ours.padding > 0 && self.compared >= 2 * cases.len());
        println!(
            "{} WQEs and their doorbells compared with libmlx5's",
            self.compared
        );
    }
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn send_wqes_and_doorbells_are_those_of_libmlx5_but_for_the_known_differences() {
    let device = open();
    let mut pair = Pair::new(&device, 0, false, 256);
    pair.compare_all(&connected_cases());
    let connected = pair.differences;
    let mut pair = Pair {
        differences: connected,
        ..Pair::new(&device, 1, true, 256)
    };
    pair.compare_all(&datagram_cases(&device));
    pair.differences.check("Send WQEs and doorbells");
}
