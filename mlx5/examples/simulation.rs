//! A server and some clients in virtual time: the cost of a round trip, and the added cost of more
//! queue pairs than the NIC's context cache holds. Needs no NIC and no second thread, and prints
//! the same numbers on every machine.
#![allow(clippy::expect_used, clippy::print_stdout, reason = "an example")]

use std::cell::Cell;
use std::error::Error;

use mlx5::*;

/// An end of the connections.
struct End {
    qps: Vec<RcQp>,
    arrivals: MonoCq<usize>,
    receives: Srq,
    region: Mr,
}

/// Makes a device with `peers` queue pairs.
fn end(simulation: &mut Simulation<'_>, peers: usize) -> Result<(Device, End), Box<dyn Error>> {
    let device = Device::simulated(simulation)?;
    let pd = device.alloc_pd()?;
    let mut arrivals = device.create_mono_cq(1024)?;
    let mut receives = pd.create_srq(256, 0)?;
    (0..256).try_for_each(|i| receives.post(&[], i))?;
    receives.ring();
    let mut qps = Vec::new();
    for peer in 0..peers {
        // One CQ for both directions: the reclaiming completions of sends arrive there too.
        let qp = pd.create_qp(&arrivals, &arrivals, &receives, &QpConfig::default())?;
        arrivals.register(qp.qpn(), peer);
        qps.push(qp);
    }
    let region = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
    Ok((
        device,
        End {
            qps,
            arrivals,
            receives,
            region,
        },
    ))
}

impl End {
    /// Sends to `peer`, whose region is at `to`.
    fn send(&mut self, peer: usize, to: (u64, u32)) {
        let op = WriteImm {
            addr: to.0,
            rkey: to.1,
            imm: 1,
            payload: Inline(&[7; 32]),
        };
        self.qps[peer]
            .post(&op, Signal::Reclaim, 0)
            .expect("one message at a time fits");
        self.qps[peer].ring();
    }

    /// Returns the peer of the next message that has arrived. `None` if the queue is empty.
    fn next(&mut self) -> Option<usize> {
        let (
            mut from,
            Self {
                qps,
                arrivals,
                receives,
                ..
            },
        ) = (None, self);
        while from.is_none()
            && arrivals.poll(1, |peer, cqe| {
                let peer = *peer.expect("every queue pair is registered");
                if qps[peer].complete(&cqe).is_none() && receives.complete_receive(&cqe).is_some() {
                    receives.post(&[], 0).expect("one was returned");
                    from = Some(peer);
                }
            }) > 0
        {}
        receives.ring();
        from
    }
}

/// Returns the virtual ns per request with this number of clients.
fn run(clients: usize) -> Result<u64, Box<dyn Error>> {
    let answered = &Cell::new(0u64);
    let mut simulation = Simulation::new(NicParameters {
        context_entries: 32,
        ..NicParameters::default()
    });
    let (device, mut server) = end(&mut simulation, clients)?;
    let to_server = (server.region.addr(), server.region.rkey());
    let mut back = Vec::new();
    for number in 0..clients {
        let (device, mut client) = end(&mut simulation, 1)?;
        let (here, there) = (client.qps[0].address(), server.qps[number].address());
        client.qps[0].connect(&there, &ConnectOptions::default())?;
        server.qps[number].connect(&here, &ConnectOptions::default())?;
        back.push((client.region.addr(), client.region.rkey()));
        let mut is_first = true;
        simulation.spawn(&[&device], move |_| {
            if std::mem::take(&mut is_first)
                || client
                    .next()
                    .is_some_and(|_| answered.replace(answered.get() + 1) < 1000)
            {
                client.send(0, to_server);
            }
            Did::IdleUntil(None)
        })?;
    }
    simulation.spawn(&[&device], move |_| match server.next() {
        Some(client) => {
            server.send(client, back[client]);
            Did::Cost(50)
        }
        None => Did::IdleUntil(None),
    })?;
    simulation.run(u64::MAX);
    Ok(simulation.now_ns() / answered.get())
}

fn main() -> Result<(), Box<dyn Error>> {
    for clients in [1, 8, 32, 64] {
        println!("{clients:3} clients: {:5} ns per request", run(clients)?);
    }
    Ok(())
}
