//! Two-sided verbs: SEND and SEND with immediate. The receiver chooses the destination of the bytes
//! by the receives that it posts.
//!
//! One queue pair takes its receives from a queue of its own, the other from a shared receive queue
//! (SRQ). A message may be gathered from bytes in the WQE and from registered memory, and scattered
//! over several buffers.
//!
//! `cargo run --release -p mlx5 --example send [DEVICE]`: on the software HCA, or on DEVICE, for
//! example `mlx5_0`.
#![allow(clippy::print_stdout, reason = "an example")]

use std::error::Error;

use mlx5::{
    Access, ConnectOptions, CqeOpcode, Device, DeviceSpec, Inline, QpConfig, ReceiveSource, Send,
    SendImm, Signal,
};

const HEADER: u32 = 8;
const BODY: u32 = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let spec = DeviceSpec::from(std::env::args().nth(1).as_deref().unwrap_or("soft"));
    let (client, server) = (Device::open(&spec)?, Device::open(&spec)?);
    let (client_pd, server_pd) = (client.alloc_pd()?, server.alloc_pd()?);

    // The server: 8 receives of its own, of two buffers each.
    let (mut server_sends, mut server_receives) = (server.create_cq(16)?, server.create_cq(16)?);
    let own = ReceiveSource::Own {
        depth: 8,
        max_sge: 2,
    };
    let mut server_qp =
        server_pd.create_qp(&server_sends, &server_receives, own, &QpConfig::default())?;
    let server_mr = server_pd.alloc(65_536, Access::LOCAL_WRITE)?;
    // The client: a shared receive queue, which may serve many queue pairs.
    let (mut client_sends, mut client_receives) = (client.create_cq(16)?, client.create_cq(16)?);
    let mut srq = client_pd.create_srq(7, 1)?;
    let mut client_qp =
        client_pd.create_qp(&client_sends, &client_receives, &srq, &QpConfig::default())?;
    let client_mr = client_pd.alloc(65_536, Access::LOCAL_WRITE)?;

    let (client_address, server_address) = (client_qp.address(), server_qp.address());
    client_qp.connect(&server_address, &ConnectOptions::default())?;
    server_qp.connect(&client_address, &ConnectOptions::default())?;

    // Headers are next to each other in one buffer, bodies in another. The value posted with a
    // receive is returned with its completion.
    for i in 0..8 {
        let header = server_mr.sge(i * HEADER as usize, HEADER)?;
        let body = server_mr.sge(4096 + i * BODY as usize, BODY)?;
        server_qp.post_receive(&[header, body], i as u64)?;
    }
    server_qp.ring_receives();
    for i in 0..srq.free() {
        srq.post(&[client_mr.sge(32_768 + i * 64, 64)?], i as u64)?;
    }
    srq.ring();

    // The header is copied into the WQE and may be reused at once. The body is gathered, and
    // belongs to the device until the completion.
    client_mr.write(0, &[b'x'; 1000])?;
    client_qp.post(
        &Send {
            payload: (Inline(b"request "), client_mr.sge(0, 1000)?),
        },
        Signal::Always,
        0,
    )?;
    client_qp.ring();
    let mut requests = Vec::new();
    while requests.is_empty() {
        server_receives.poll(8, |cqe| {
            requests.push((
                cqe.result(),
                cqe.opcode(),
                cqe.byte_count(),
                server_qp.complete_receive(&cqe),
            ))
        });
    }
    let [(Ok(()), Some(CqeOpcode::ResponderSend), bytes, Some(receive))] = requests[..] else {
        return Err("a bad completion".into());
    };
    let (mut header, mut body) = (
        [0; HEADER as usize],
        vec![0; bytes as usize - HEADER as usize],
    );
    server_mr.read(receive as usize * header.len(), &mut header)?;
    server_mr.read(4096 + receive as usize * BODY as usize, &mut body)?;
    println!(
        "the server received {bytes} bytes: {:?}, then {} in the second buffer",
        String::from_utf8_lossy(&header),
        body.len()
    );
    if &header != b"request " || body != [b'x'; 1000] {
        return Err("the request is not what was sent".into());
    }

    // Answers: bytes, and an immediate without bytes.
    server_qp.post(
        &Send {
            payload: Inline(b"thank you"),
        },
        Signal::Reclaim,
        0,
    )?;
    server_qp.post(
        &SendImm {
            imm: 1000,
            payload: (),
        },
        Signal::Always,
        1,
    )?;
    server_qp.ring();
    let mut answers = Vec::new();
    while answers.len() < 2 {
        client_receives.poll(8, |cqe| {
            answers.push((
                cqe.opcode(),
                cqe.imm(),
                cqe.byte_count(),
                srq.complete_receive(&cqe),
            ))
        });
    }
    let [
        (Some(CqeOpcode::ResponderSend), _, 9, Some(receive)),
        (Some(CqeOpcode::ResponderSendImm), 1000, 0, Some(_)),
    ] = answers[..]
    else {
        return Err(format!("the answers are {answers:?}").into());
    };
    let mut text = [0; 9];
    client_mr.read(32_768 + receive as usize * 64, &mut text)?;
    println!(
        "the client received {:?}, and the number {}",
        String::from_utf8_lossy(&text),
        answers[1].1
    );

    // The senders' completions: one for the request, one for both answers.
    let (mut sent, mut answered) = (0, 0);
    while (sent, answered) != (1, 2) {
        client_sends.poll(8, |cqe| sent += client_qp.complete_each(&cqe, |_| ()));
        server_sends.poll(8, |cqe| answered += server_qp.complete_each(&cqe, |_| ()));
    }
    if &text == b"thank you" {
        Ok(())
    } else {
        Err("the answer is not what was sent".into())
    }
}
