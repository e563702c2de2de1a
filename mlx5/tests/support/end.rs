//! An end of a connection, for tests of verbs, statuses and faults. Its receives are shared or its
//! own.
#![allow(dead_code, reason = "each test uses what it needs")]

use mlx5::*;

/// Bytes of an end's region: sources in the first half, receives and targets in the second.
pub(crate) const BYTES: usize = 1 << 17;
/// Offset of the second half.
pub(crate) const INTO: usize = BYTES / 2;
pub(crate) const ANY: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// The sizes of its queues, and the source of its receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) owns_receives: bool,
    pub(crate) receives: u32,
    pub(crate) sends: u32,
    pub(crate) cqes: u32,
}

pub(crate) const SHARED: Size = Size {
    owns_receives: false,
    receives: 63,
    sends: 64,
    cqes: 256,
};
pub(crate) const OWN: Size = Size {
    owns_receives: true,
    receives: 64,
    ..SHARED
};

pub(crate) struct End {
    pub(crate) qp: RcQp,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
    /// The shared receive queue. `None`: the queue pair has a receive queue of its own.
    pub(crate) srq: Option<Srq>,
    pub(crate) mr: Mr,
    pub(crate) pd: Pd,
    pub(crate) device: Device,
}

/// A message that arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// The user data posted with the receive.
    pub(crate) user: u64,
    pub(crate) opcode: CqeOpcode,
    /// The immediate, or 0.
    pub(crate) imm: u32,
    pub(crate) byte_count: u32,
    pub(crate) is_solicited: bool,
}

/// A completed operation: its `user` value, and the bytes read or the error.
pub(crate) type Sent = (u64, Result<u32, CompletionError>);
/// A completed receive: the message, or the `user` value and the error.
pub(crate) type Received = Result<Arrival, (u64, CompletionError)>;

impl End {
    pub(crate) fn new(device: Device, size: Size) -> Self {
        let pd = device.alloc_pd().unwrap();
        // Any vector is good, so the test does not use the first.
        let cq = CqConfig {
            comp_vector: device.info().comp_vectors - 1,
            ..CqConfig::from(size.cqes)
        };
        let (send_cq, recv_cq) = (device.create_cq(cq).unwrap(), device.create_cq(cq).unwrap());
        let config = QpConfig {
            max_send_wr: size.sends,
            max_inline_data: 220,
            ..QpConfig::default()
        };
        let srq = (!size.owns_receives).then(|| pd.create_srq(size.receives, 3).unwrap());
        let own = ReceiveSource::Own {
            depth: size.receives,
            max_sge: 3,
        };
        let qp = pd
            .create_qp(
                &send_cq,
                &recv_cq,
                srq.as_ref().map_or(own, ReceiveSource::Shared),
                &config,
            )
            .unwrap();
        let mr = pd.alloc(BYTES, ANY).unwrap();
        Self {
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
            pd,
            device,
        }
    }

    /// Posts a receive and rings.
    pub(crate) fn receive(&mut self, buffers: &[Sge], user: u64) {
        match &mut self.srq {
            Some(srq) => {
                srq.post(buffers, user).unwrap();
                srq.ring();
            }
            None => {
                self.qp.post_receive(buffers, user).unwrap();
                self.qp.ring_receives();
            }
        }
    }

    /// Posts `n` receives of `bytes` each, one after the other in the second half; 0 is without a
    /// buffer.
    pub(crate) fn receives(&mut self, n: usize, bytes: u32) {
        for i in 0..n {
            let buffer =
                (bytes > 0).then(|| self.mr.sge(INTO + i * bytes as usize, bytes).unwrap());
            self.receive(buffer.as_slice(), i as u64);
        }
    }

    pub(crate) fn post<O: RcOperation>(&mut self, op: &O, user: u64) {
        self.qp.post(op, Signal::Always, user).unwrap();
        self.qp.ring();
    }

    /// Returns the completed sends.
    pub(crate) fn sent(&mut self) -> Vec<Sent> {
        let mut got = vec![];
        let qp = &mut self.qp;
        self.send_cq.poll(1000, |cqe| {
            got.push((
                qp.complete(&cqe).unwrap(),
                cqe.result().map(|()| cqe.byte_count()),
            ))
        });
        got
    }

    /// Returns the completed receives.
    pub(crate) fn received(&mut self) -> Vec<Received> {
        let mut got = vec![];
        let Self {
            qp, srq, recv_cq, ..
        } = self;
        recv_cq.poll(1000, |cqe| {
            assert_eq!(cqe.qpn(), qp.qpn());
            let user = match srq {
                Some(srq) => srq.complete_receive(&cqe),
                None => qp.complete_receive(&cqe),
            };
            got.push(of_cqe(&cqe, user.unwrap()));
        });
        got
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.mr.read(offset, &mut bytes).unwrap();
        bytes
    }

    /// Returns the 8 bytes at `offset`, as a number of this host.
    pub(crate) fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(offset, 8).try_into().unwrap())
    }
}

/// Decodes the completion of a receive.
pub(crate) fn of_cqe(cqe: &Cqe<'_>, user: u64) -> Received {
    let opcode = cqe.opcode().unwrap();
    let has_imm = matches!(
        opcode,
        CqeOpcode::ResponderSendImm | CqeOpcode::ResponderWriteImm
    );
    let imm = if has_imm { cqe.imm() } else { 0 };
    let arrival = Arrival {
        user,
        opcode,
        imm,
        byte_count: cqe.byte_count(),
        is_solicited: cqe.is_solicited(),
    };
    cqe.result()
        .map(|()| arrival)
        .map_err(|error| (user, error))
}

pub(crate) fn connect(a: &mut End, b: &mut End, options: &ConnectOptions) {
    let (at, bt) = (a.qp.address(), b.qp.address());
    a.qp.connect(&bt, options).unwrap();
    b.qp.connect(&at, options).unwrap();
}

/// Makes two connected ends. `second` is the form of the second end's receives.
pub(crate) fn pair(net: &crate::time::Net, second: Size) -> (End, End) {
    let (mut a, mut b) = (
        End::new(net.device(), SHARED),
        End::new(net.device(), second),
    );
    connect(
        &mut a,
        &mut b,
        &ConnectOptions {
            rnr_timer_ns: 10_000,
            ..ConnectOptions::default()
        },
    );
    (a, b)
}

/// Pauses between two polls of a thread that waits for another. Now and then it yields the core,
/// which costs a turn of the scheduler.
pub(crate) fn pause() {
    thread_local!(static PAUSES: std::cell::Cell<u32> = const { std::cell::Cell::new(0) });
    let n = PAUSES.get();
    PAUSES.set(n.wrapping_add(1));
    if n % 128 == 127 {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}
