//! Reliable connections: a queue pair for each peer, all on one shared receive queue.

use benchkv_harness::Failure;
use mlx5::{
    ConnectOptions, Cq, Cqe, Device, MonoCq, Payload, Pd, PostError, QpAddress, QpConfig, RcQp,
    Send, Sge, Signal, Srq,
};

use super::super::contestant::record;
use super::{Arrival, MAX_INLINE_BYTES, POLL_BUDGET, Port, Shape};

/// Maximum WQEBBs of an inline message.
const WQEBBS: usize = 2;

pub(crate) struct RcPort {
    links: Vec<Link>,
    srq: Srq,
    send_cq: Cq,
    /// The receive completions, each with its peer.
    recv_cq: MonoCq<usize>,
    /// Peers whose doorbells are to be rung.
    unrung: Vec<usize>,
}

struct Link {
    qp: RcQp,
    is_unrung: bool,
}

impl Port for RcPort {
    const HEADROOM_BYTES: usize = 0;

    fn open(device: &Device, pd: &Pd, shape: &Shape) -> Result<Self, Failure> {
        // Room for messages whose completions have not been taken: those of a quarter of the queue
        // are not signalled.
        let wqebbs = (4 * WQEBBS * shape.depth) as u32;
        let (send_cq, mut recv_cq) = (
            device.create_cq(wqebbs * shape.peers as u32)?,
            device.create_mono_cq(2 * shape.messages() as u32)?,
        );
        let srq = pd.create_srq(shape.messages() as u32, 1)?;
        let lane_slots = shape.depth as u32;
        let config = QpConfig {
            max_send_wr: wqebbs,
            max_inline_data: MAX_INLINE_BYTES,
            scatter_to_cqe: false,
            lane_slots,
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
        self.links
            .get(peer)
            .map(|link| link.qp.address().to_bytes().to_vec())
            .unwrap_or_default()
    }

    fn connect(&mut self, peer: usize, said: &[u8]) -> Result<(), Failure> {
        let address = QpAddress::from_bytes(record(said)?)
            .ok_or("the record is not the address of a queue pair")?;
        let link = self
            .links
            .get_mut(peer)
            .ok_or("there is no queue pair for it")?;
        Ok(link.qp.connect(&address, &ConnectOptions::default())?)
    }

    #[inline]
    fn post_receive(&mut self, buffer: Sge, place: usize) -> Result<(), Failure> {
        Ok(self.srq.post(&[buffer], place as u64)?)
    }

    #[inline]
    fn post(&mut self, peer: usize, message: impl Payload) -> Result<bool, Failure> {
        let link = self
            .links
            .get_mut(peer)
            .ok_or("there is no queue pair for it")?;
        match link.qp.post(&Send { payload: message }, Signal::Reclaim, 0) {
            Ok(()) => {}
            Err(PostError::QueueFull { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
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
            if let Some(place) = srq.complete_receive(&cqe) {
                arrived.push(Arrival {
                    peer: peer.copied(),
                    place: place as usize,
                    bytes: cqe.byte_count() as usize,
                });
            }
        });
        if send_cq.has_completion() {
            taken += send_cq.poll(POLL_BUDGET, |cqe| {
                let link = recv_cq
                    .queues()
                    .get(cqe.qpn())
                    .and_then(|peer| links.get_mut(*peer));
                link.map(|link| link.qp.complete(&cqe));
                note(&cqe);
            });
        }
        failure.map_or(Ok(taken), |error| Err(error.into()))
    }
}
