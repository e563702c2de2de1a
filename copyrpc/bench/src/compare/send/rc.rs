//! Reliable connections: a queue pair for each peer, all on one shared receive queue.

use benchkv_harness::Failure;
use mlx5::{
    ConnectOptions, Cq, Cqe, Device, MonoCq, Payload, Pd, QpConfig, RcQp, Send, Sge, Signal, Srq,
};

use super::{Arrival, MAX_INLINE_BYTES, POLL_BUDGET, Port, Shape, address, is_posted};

const NO_LINK: &str = "there is no queue pair for it";

/// Maximum WQEBBs of an inline message.
const WQEBBS: usize = 2;

pub(crate) struct RcPort {
    links: Vec<Link>,
    srq: Srq,
    send_cq: Cq,
    /// The completion queue of the receives, which maps each queue pair to its peer.
    recv_cq: MonoCq<usize>,
    /// Peers whose doorbells still have to be rung.
    unrung: Vec<usize>,
}

struct Link {
    qp: RcQp,
    is_unrung: bool,
}

impl Port for RcPort {
    const HEADROOM_BYTES: usize = 0;

    fn open(device: &Device, pd: &Pd, shape: &Shape) -> Result<Self, Failure> {
        // The queue has additional room for messages whose completions have not been taken: up to a
        // quarter of the queue can be posted without a signal.
        let wqebbs = (4 * WQEBBS * shape.depth) as u32;
        let send_cq = device.create_cq(wqebbs * shape.peers as u32)?;
        let mut recv_cq = device.create_mono_cq(2 * shape.messages() as u32)?;
        let srq = pd.create_srq(shape.messages() as u32, 1)?;
        let config = QpConfig {
            max_send_wr: wqebbs,
            max_inline_data: MAX_INLINE_BYTES,
            scatter_to_cqe: false,
            lane_slots: shape.depth as u32,
        };
        let mut links = Vec::with_capacity(shape.peers);
        for peer in 0..shape.peers {
            let qp = pd.create_qp(&send_cq, &recv_cq, &srq, &config)?;
            recv_cq.register(qp.qpn(), peer);
            links.push(Link {
                qp,
                is_unrung: false,
            });
        }
        Ok(Self {
            links,
            srq,
            send_cq,
            recv_cq,
            unrung: Vec::with_capacity(shape.peers),
        })
    }

    fn record(&self, peer: usize) -> Vec<u8> {
        let link = self.links.get(peer);
        link.map_or_else(Vec::new, |link| link.qp.address().to_bytes().to_vec())
    }

    fn connect(&mut self, peer: usize, said: &[u8]) -> Result<(), Failure> {
        let link = self.links.get_mut(peer).ok_or(NO_LINK)?;
        Ok(link
            .qp
            .connect(&address(said)?, &ConnectOptions::default())?)
    }

    #[inline]
    fn post_receive(&mut self, buffer: Sge, place: usize) -> Result<(), Failure> {
        Ok(self.srq.post(&[buffer], place as u64)?)
    }

    #[inline]
    fn post(&mut self, peer: usize, message: impl Payload) -> Result<bool, Failure> {
        let link = self.links.get_mut(peer).ok_or(NO_LINK)?;
        if !is_posted(link.qp.post(&Send { payload: message }, Signal::Reclaim, 0))? {
            return Ok(false);
        }
        if !std::mem::replace(&mut link.is_unrung, true) {
            self.unrung.push(peer);
        }
        Ok(true)
    }

    #[inline]
    fn ring(&mut self) {
        self.srq.ring();
        for peer in self.unrung.drain(..) {
            if let Some(link) = self.links.get_mut(peer) {
                link.is_unrung = false;
                link.qp.ring();
            }
        }
    }

    #[inline]
    fn take(&mut self, arrived: &mut Vec<Arrival>) -> Result<usize, Failure> {
        let Self {
            links,
            srq,
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
        let mut taken = recv_cq.poll(POLL_BUDGET, |peer, cqe| {
            note(&cqe);
            let place = srq.complete_receive(&cqe);
            arrived.extend(place.map(|place| Arrival::of(&cqe, peer.copied(), place)));
        });
        if send_cq.has_completion() {
            taken += send_cq.poll(POLL_BUDGET, |cqe| {
                let peer = recv_cq.queues().get(cqe.qpn());
                let link = peer.and_then(|peer| links.get_mut(*peer));
                link.map(|link| link.qp.complete(&cqe));
                note(&cqe);
            });
        }
        failure.map_or(Ok(taken), |error| Err(error.into()))
    }
}
