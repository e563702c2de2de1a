//! Devices of a simulation with all objects of an RC connection, and a model of NICs with
//! distinguishable costs.

use mlx5::*;

pub(crate) const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);
pub(crate) const SIZE: usize = 1 << 16;

/// Costs that can be distinguished after they are added up.
pub(crate) const NIC: NicParameters = NicParameters {
    doorbell_ns: 1_000_000,
    send_ns: 100_000,
    byte_ps: 1_000,
    link_ns: 10_000_000,
    receive_ns: 20_000,
    unordered_receive_ns: 50_000,
    queue_receive_ns: 0,
    context_entries: 8,
    context_miss_ns: 100_000_000,
    jitter_ns: 0,
    seed: 1,
};
/// Time from the doorbell to the effect of an empty WRITE, with contexts held.
pub(crate) const WAY: u64 = NIC.doorbell_ns + NIC.send_ns + NIC.link_ns;

pub(crate) struct End {
    pub(crate) qp: RcQp,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
    pub(crate) srq: Srq,
    pub(crate) mr: Mr,
    pub(crate) pd: Pd,
    pub(crate) device: Device,
}

impl End {
    pub(crate) fn new(device: &Device) -> Self {
        let pd = device.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (
            device.create_cq(256).unwrap(),
            device.create_cq(256).unwrap(),
        );
        let srq = pd.create_srq(255, 0).unwrap();
        let qp = pd
            .create_qp(
                &send_cq,
                &recv_cq,
                &srq,
                &QpConfig {
                    max_send_wr: 256,
                    max_inline_data: 220,
                    ..QpConfig::default()
                },
            )
            .unwrap();
        let mr = pd.alloc(SIZE, RIGHTS).unwrap();
        Self {
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
            pd,
            device: device.clone(),
        }
    }

    pub(crate) fn receives(&mut self, n: u64) {
        (0..n).for_each(|i| self.srq.post(&[], i).unwrap());
        self.srq.ring();
    }

    /// Returns the `user` values of the completed sends, and whether they succeeded.
    pub(crate) fn sent(&mut self) -> Vec<(Option<u64>, Result<(), Syndrome>)> {
        let mut got = vec![];
        self.send_cq.poll(256, |cqe| {
            got.push((self.qp.complete(&cqe), cqe.result().map_err(|e| e.syndrome)))
        });
        got
    }

    /// Returns the immediates that have arrived.
    pub(crate) fn arrived(&mut self) -> Vec<u32> {
        let mut got = vec![];
        self.recv_cq.poll(256, |cqe| {
            cqe.result().unwrap();
            self.srq.complete_receive(&cqe);
            got.push(cqe.imm());
        });
        got
    }
}

pub(crate) fn connect(a: &mut RcQp, b: &mut RcQp, options: &ConnectOptions) {
    a.connect(&b.address(), options).unwrap();
    b.connect(&a.address(), options).unwrap();
}

pub(crate) fn pair(simulation: &mut Simulation<'_>, options: &ConnectOptions) -> (End, End) {
    let (mut a, mut b) = (
        End::new(&Device::simulated(simulation).unwrap()),
        End::new(&Device::simulated(simulation).unwrap()),
    );
    connect(&mut a.qp, &mut b.qp, options);
    (a, b)
}

pub(crate) fn imm(to: &End, imm: u32) -> WriteImm<()> {
    WriteImm {
        addr: to.mr.addr(),
        rkey: to.mr.rkey(),
        imm,
        payload: (),
    }
}

/// Makes two connected ends, and does a WRITE, after which both NICs hold the contexts. Returns the
/// ends and the time after the WRITE.
pub(crate) fn warm_pair(simulation: &mut Simulation<'_>) -> (End, End, u64) {
    let (mut a, b) = pair(simulation, &ConnectOptions::default());
    a.qp.post(
        &Write {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            payload: (),
        },
        Signal::Always,
        0,
    )
    .unwrap();
    a.qp.ring();
    simulation.run(u64::MAX);
    assert_eq!(a.sent(), [(Some(0), Ok(()))]);
    assert_eq!(
        simulation.now_ns(),
        WAY + NIC.link_ns + 2 * NIC.context_miss_ns,
        "a miss at either end"
    );
    (a, b, simulation.now_ns())
}

/// An immediate or a `user` value, and the time at which it was seen.
pub(crate) type Seen = Vec<(u64, u64)>;

/// Returns the times at which each immediate arrives and each send completes, from now on.
pub(crate) fn times(simulation: &mut Simulation<'_>, a: &mut End, b: &mut End) -> (Seen, Seen) {
    let start_ns = simulation.now_ns();
    let (mut arrivals, mut completions) = (vec![], vec![]);
    while let Some(at_ns) = simulation.step() {
        arrivals.extend(
            b.arrived()
                .into_iter()
                .map(|imm| (imm.into(), at_ns - start_ns)),
        );
        completions.extend(a.sent().into_iter().map(|(user, result)| {
            result.unwrap();
            (user.unwrap(), at_ns - start_ns)
        }));
    }
    (arrivals, completions)
}
