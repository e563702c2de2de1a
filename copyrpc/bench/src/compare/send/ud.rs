//! Datagrams: one queue pair for all peers.

use benchkv_harness::Failure;
use mlx5::{
    Cq, Cqe, Destination, Device, GRH_BYTES, Payload, Pd, QpConfig, ReceiveSource, Sge, Signal,
    UdQp, UdSend,
};

use super::{Arrival, MAX_INLINE_BYTES, POLL_BUDGET, Port, Shape, address, is_posted};

const QKEY: u32 = 0x5ca1e;
/// Maximum WQEBBs of an inline message with the address of its destination.
const WQEBBS: usize = 3;
/// Maximum WQEBBs of the send queue. Messages that find no room wait.
const MAX_WQEBBS: usize = 16_384;

pub(crate) struct UdPort {
    qp: UdQp,
    send_cq: Cq,
    recv_cq: Cq,
    /// Destinations of the peers, by number.
    destinations: Vec<Destination>,
}

impl Port for UdPort {
    const HEADROOM_BYTES: usize = GRH_BYTES;

    fn open(device: &Device, pd: &Pd, shape: &Shape) -> Result<Self, Failure> {
        let wqebbs = (4 * WQEBBS * shape.messages()).min(MAX_WQEBBS) as u32;
        let messages = shape.messages() as u32;
        let (send_cq, recv_cq) = (device.create_cq(wqebbs)?, device.create_cq(2 * messages)?);
        let own = ReceiveSource::Own {
            depth: messages,
            max_sge: 1,
        };
        let config = QpConfig {
            max_send_wr: wqebbs,
            max_inline_data: MAX_INLINE_BYTES,
            ..QpConfig::default()
        };
        let mut qp = pd.create_ud_qp(&send_cq, &recv_cq, own, &config)?;
        qp.activate(QKEY)?;
        Ok(Self {
            qp,
            send_cq,
            recv_cq,
            destinations: Vec::with_capacity(shape.peers),
        })
    }

    fn record(&self, _: usize) -> Vec<u8> {
        self.qp.address().to_bytes().to_vec()
    }

    /// Connects a peer. Peers connect in the order of their numbers.
    fn connect(&mut self, peer: usize, said: &[u8]) -> Result<(), Failure> {
        let next = self.destinations.len();
        if peer != next {
            return Err(format!("peer {peer} is not the next one, which is {next}").into());
        }
        let destination = self.qp.destination_of(&address(said)?, QKEY)?;
        self.destinations.push(destination);
        Ok(())
    }

    #[inline]
    fn post_receive(&mut self, buffer: Sge, place: usize) -> Result<(), Failure> {
        Ok(self.qp.post_receive(&[buffer], place as u64)?)
    }

    #[inline]
    fn post(&mut self, peer: usize, message: impl Payload) -> Result<bool, Failure> {
        let to = self
            .destinations
            .get(peer)
            .ok_or("a peer that is not known")?;
        let payload = message;
        is_posted(self.qp.post(&UdSend { to, payload }, Signal::Reclaim, 0))
    }

    #[inline]
    fn ring(&mut self) {
        self.qp.ring_receives();
        self.qp.ring();
    }

    #[inline]
    fn take(&mut self, arrived: &mut Vec<Arrival>) -> Result<usize, Failure> {
        let Self {
            qp,
            send_cq,
            recv_cq,
            ..
        } = self;
        let mut failure = None;
        let mut note = |cqe: &Cqe<'_>| {
            if let Err(error) = cqe.result() {
                failure.get_or_insert(error);
            }
        };
        let mut taken = recv_cq.poll(POLL_BUDGET, |cqe| {
            note(&cqe);
            let place = qp.complete_receive(&cqe);
            arrived.extend(place.map(|place| Arrival::of(&cqe, None, place)));
        });
        if send_cq.has_completion() {
            taken += send_cq.poll(POLL_BUDGET, |cqe| {
                qp.complete(&cqe);
                note(&cqe);
            });
        }
        failure.map_or(Ok(taken), |error| Err(error.into()))
    }
}
