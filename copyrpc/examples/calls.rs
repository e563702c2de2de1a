//! Two threads, a context each: the client keeps calls outstanding, the server echoes. Prints the
//! effect of batching.
//!
//! `cargo run --release -p copyrpc --example calls -- [depth] [calls]`
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints"
)]

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use copyrpc::{
    Context, ContextBuilder, Endpoint, EndpointConfig, ExchangeRecord, RecvBytes, Reply,
    default_device,
};

type AnyError = Box<dyn Error + Send + Sync>;

static DONE: AtomicBool = AtomicBool::new(false);

/// Swaps records with the other thread; between processes, use any channel of bytes.
fn connect(
    context: &Context<u64>,
    to: &Sender<[u8; 128]>,
    from: &Receiver<[u8; 128]>,
) -> Result<Endpoint<u64>, AnyError> {
    let pending = context.create_endpoint(&EndpointConfig::default())?;
    to.send(pending.local_info().encode())?;
    let record = ExchangeRecord::decode(&from.recv()?)?;
    Ok(pending.connect(&record)?)
}

fn serve(
    builder: ContextBuilder,
    to: &Sender<[u8; 128]>,
    from: &Receiver<[u8; 128]>,
) -> Result<(), AnyError> {
    let context = builder.build()?;
    let _endpoint = connect(&context, to, from)?;
    let mut buffer = [0; 32];
    while !DONE.load(Ordering::Relaxed) {
        let on_request = |request: RecvBytes<'_>, reply: Reply<'_, u64>| {
            let len = request.copy_to(&mut buffer);
            // The send fails if the caller has disconnected.
            let _sent = reply.send(&buffer[..len]);
        };
        if context.serve(on_request, |_, _| ())? == 0 {
            thread::yield_now();
        }
    }
    Ok(())
}

fn main() {
    if let Err(error) = run() {
        eprintln!("calls: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), AnyError> {
    let mut args = std::env::args().skip(1);
    let depth: u64 = args.next().map_or(Ok(64), |depth| depth.parse())?;
    let calls: u64 = args.next().map_or(Ok(1_000_000), |calls| calls.parse())?;
    let (to_server, from_client) = channel();
    let (to_client, from_server) = channel();
    let builder = ContextBuilder::new(default_device());
    let server_builder = builder.clone();
    let server = thread::spawn(move || serve(server_builder, &to_client, &from_client));

    let context = builder.build()?;
    println!(
        "device {}, {}",
        context.device_info().name,
        context.device_info().transport
    );
    let endpoint = connect(&context, &to_server, &from_server)?;
    let (mut issued, mut ended) = (0, 0);
    let start = Instant::now();
    while ended < calls {
        // Whatever the error, a later poll ends it: with space, or with the end of the calls.
        while issued < calls
            && issued - ended < depth
            && endpoint.call(&[issued as u8; 32], issued, 32).is_ok()
        {
            issued += 1;
        }
        let mut lost = None;
        let taken = context.poll(|_, outcome| match outcome {
            Ok(_) => ended += 1,
            Err(error) => lost = Some(error),
        })?;
        if let Some(error) = lost {
            return Err(error.into());
        }
        if taken == 0 {
            thread::yield_now();
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    DONE.store(true, Ordering::Relaxed);
    let stats = context.stats();
    println!(
        "{calls} calls at depth {depth}: {:.2} M/s, {:.2} us mean round trip, {:.1} messages per WRITE, {} READs",
        calls as f64 / seconds / 1e6,
        seconds * 1e6 * depth as f64 / calls as f64,
        stats.messages_sent as f64 / stats.batches_sent as f64,
        stats.reads,
    );
    server.join().map_err(|_| "the server thread panicked")??;
    Ok(())
}
