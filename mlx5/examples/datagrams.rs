//! Unreliable datagrams: one queue pair talks to many, without connections. A datagram that a peer
//! cannot take is lost silently.
//!
//! `cargo run --release -p mlx5 --example datagrams [DEVICE]`: on the software HCA, or on DEVICE,
//! for example `mlx5_0`.
#![allow(clippy::print_stdout, reason = "an example")]

use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

use mlx5::{
    Access, Cq, Destination, Device, DeviceSpec, GRH_BYTES, Inline, Mr, Pd, QpConfig, ReceiveSource,
};
use mlx5::{Signal, UdQp, UdSend, UdSendImm};

const QKEY: u32 = 0x1111;
const RECEIVES: usize = 8;
/// Bytes of a receive: room for the header of the network layer (GRH), then the payload.
const SLOT: usize = GRH_BYTES + 88;

/// An arrived message: QPN of the sender, immediate (0 if there is none), text.
type Message = (u32, u32, String);

/// A datagram queue pair with posted receives.
struct Post {
    qp: UdQp,
    send_cq: Cq,
    recv_cq: Cq,
    mr: Mr,
}

impl Post {
    fn new(device: &Device, pd: &Pd) -> Result<Self, Box<dyn Error>> {
        let (send_cq, recv_cq) = (device.create_cq(16)?, device.create_cq(16)?);
        let own = ReceiveSource::Own {
            depth: RECEIVES as u32,
            max_sge: 1,
        };
        let mut qp = pd.create_ud_qp(&send_cq, &recv_cq, own, &QpConfig::default())?;
        qp.activate(QKEY)?;
        let mr = pd.alloc(RECEIVES * SLOT, Access::LOCAL_WRITE)?;
        for i in 0..RECEIVES {
            qp.post_receive(&[mr.sge(i * SLOT, SLOT as u32)?], i as u64)?;
        }
        qp.ring_receives();
        Ok(Self {
            qp,
            send_cq,
            recv_cq,
            mr,
        })
    }

    /// Returns the datagrams that have arrived, and posts their receives again.
    fn receive(&mut self) -> Result<Vec<Message>, Box<dyn Error>> {
        let mut arrived = Vec::new();
        let Self { qp, recv_cq, .. } = self;
        recv_cq.poll(RECEIVES, |cqe| {
            arrived.push((
                cqe.result(),
                cqe.source_qpn(),
                cqe.imm(),
                cqe.byte_count(),
                qp.complete_receive(&cqe),
            ))
        });
        let mut messages = Vec::new();
        for (result, source, imm, bytes, receive) in arrived {
            result?;
            let at = receive.ok_or("not one of these receives")? as usize * SLOT;
            // The byte count includes the bytes of the GRH, even if there is none.
            let mut text = vec![0; bytes as usize - GRH_BYTES];
            self.mr.read(at + GRH_BYTES, &mut text)?;
            self.qp
                .post_receive(&[self.mr.sge(at, SLOT as u32)?], (at / SLOT) as u64)?;
            messages.push((source, imm, String::from_utf8(text)?));
        }
        self.qp.ring_receives();
        Ok(messages)
    }

    /// Waits for this number of datagrams.
    fn receive_some(&mut self, count: usize) -> Result<Vec<Message>, Box<dyn Error>> {
        let (mut messages, start) = (Vec::new(), Instant::now());
        while messages.len() < count {
            messages.extend(self.receive()?);
            if start.elapsed() > Duration::from_secs(10) {
                return Err("a datagram is lost".into());
            }
        }
        Ok(messages)
    }

    /// Waits for this number of completions of sends. They prove only that the datagrams were sent.
    fn sent(&mut self, count: usize) -> Result<(), Box<dyn Error>> {
        let mut sent = 0;
        let mut failed = None;
        let qp = &mut self.qp;
        while sent < count && failed.is_none() {
            self.send_cq.poll(16, |cqe| {
                failed = cqe.result().err();
                sent += usize::from(qp.complete(&cqe).is_some());
            });
        }
        failed.map_or(Ok(()), |error| Err(error.into()))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let spec = DeviceSpec::from(std::env::args().nth(1).as_deref().unwrap_or("soft"));
    let (one, two) = (Device::open(&spec)?, Device::open(&spec)?);
    let (one_pd, two_pd) = (one.alloc_pd()?, two.alloc_pd()?);
    let mut server = Post::new(&one, &one_pd)?;
    let mut alice = Post::new(&two, &two_pd)?;
    let mut bob = Post::new(&two, &two_pd)?;

    // A destination is a port, a QPN and a Q_Key; processes exchange the three.
    let to = alice.qp.destination_of(&server.qp.address(), QKEY)?;
    let wrong = Destination::new(to.vector(), to.qpn(), QKEY + 1);
    alice.qp.post(
        &UdSend {
            to: &to,
            payload: Inline(b"it is Alice"),
        },
        Signal::Always,
        0,
    )?;
    bob.qp.post(
        &UdSendImm {
            to: &to,
            imm: 7,
            payload: Inline(b"it is Bob"),
        },
        Signal::Always,
        0,
    )?;
    bob.qp.post(
        &UdSend {
            to: &wrong,
            payload: Inline(b"nobody reads this"),
        },
        Signal::Always,
        1,
    )?;
    alice.qp.ring();
    bob.qp.ring();

    // A completion has the sender's QPN. The server must know the port of that queue pair.
    let mut known = HashMap::new();
    for post in [&alice, &bob] {
        known.insert(
            post.qp.qpn(),
            server.qp.destination_of(&post.qp.address(), QKEY)?,
        );
    }
    let mut messages = server.receive_some(2)?;
    messages.sort_by(|one, other| one.2.cmp(&other.2));
    println!("the server received {messages:?}");
    for (source, imm, text) in &messages {
        let answer = UdSendImm {
            to: known.get(source).ok_or("an unknown sender")?,
            imm: imm + 1,
            payload: Inline(text.as_bytes()),
        };
        server.qp.post(&answer, Signal::Always, 0)?;
    }
    server.qp.ring();
    let (to_alice, to_bob) = (alice.receive_some(1)?, bob.receive_some(1)?);
    println!(
        "the answers are {to_alice:?} and {to_bob:?}; the datagram with the wrong Q_Key was sent, and is lost"
    );
    let is_right = to_alice == [(to.qpn(), 1, "it is Alice".into())]
        && to_bob == [(to.qpn(), 8, "it is Bob".into())];
    [(&mut server, 2), (&mut alice, 1), (&mut bob, 2)]
        .into_iter()
        .try_for_each(|(post, count)| post.sent(count))?;
    if is_right {
        Ok(())
    } else {
        Err("not what was sent".into())
    }
}
