//! Clients and servers as the README of copyrpc shows them, compared with tarpc and gRPC (tonic)
//! over TCP on the loopback interface: calls of 32 bytes, each reply checked.
//! `scripts/peers copyrpc` runs it.
//!
//! Both ends are in one process, each in a thread of its own; with futures, each has a runtime of
//! one thread. The blocking pair has a core for each end; the threads of the other pairs share both
//! cores, because copyrpc's clients and servers with futures have one more thread each.

use std::fmt;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use benchkv_harness::Failure;
use benchkv_harness::affinity::pin_current_thread;
use benchkv_harness::launch::program::Program;
use benchkv_harness::report::JsonSink;
use bytes::{Buf, BufMut, Bytes};
use clap::{Parser, ValueEnum};
use futures::StreamExt;
use serde::Serialize;
use tarpc::tokio_serde::formats::Bincode;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::task::LocalSet;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{Body, BoxFuture, Service, StdError, http};
use tonic::server::{NamedService, UnaryService};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

const REQUEST_BYTES: usize = 32;

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Mode {
    /// `copyrpc::Client` and `copyrpc::Server`.
    Blocking,
    /// `copyrpc::AsyncClient` and `copyrpc::AsyncServer`.
    Async,
    Tarpc,
    Tonic,
}

#[derive(Debug, Parser)]
struct Cli {
    #[arg(long)]
    mode: Mode,
    /// Calls under way; the blocking client has one.
    #[arg(long, default_value_t = 1)]
    depth: u32,
    /// Length of the measurement in seconds.
    #[arg(long, default_value_t = 0.4)]
    duration: f64,
    /// The cores of client and server of the blocking pair.
    #[arg(long, value_delimiter = ',')]
    cores: Vec<usize>,
    #[arg(long)]
    json: Option<JsonSink>,
    /// Given by `cargo bench` to each benchmark, and ignored.
    #[arg(long, hide = true)]
    bench: bool,
}

fn request(number: u64) -> Vec<u8> {
    let mut request = vec![0x5a; REQUEST_BYTES];
    request[..8].copy_from_slice(&number.to_le_bytes());
    request
}

fn check(request: &[u8], reply: &[u8]) -> Result<(), Failure> {
    if request == reply {
        Ok(())
    } else {
        Err("a reply is wrong".into())
    }
}

fn runtime() -> Result<Runtime, Failure> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Keeps `depth` calls under way for the whole time. Returns the number of calls that have ended.
async fn load<F: Future<Output = Result<Vec<u8>, Failure>> + 'static>(
    cli: &Cli,
    call: impl Fn(Vec<u8>) -> F + Clone + 'static,
) -> Result<u64, Failure> {
    let (tasks, end) = (
        LocalSet::new(),
        Instant::now() + Duration::from_secs_f64(cli.duration),
    );
    let caller = |first: u32| {
        let call = call.clone();
        async move {
            let mut count = 0;
            while Instant::now() < end {
                let request = request(u64::from(first) << 32 | count);
                check(&request, &call(request.clone()).await?)?;
                count += 1;
            }
            Ok::<u64, Failure>(count)
        }
    };
    let callers: Vec<_> = (0..cli.depth)
        .map(|first| tasks.spawn_local(caller(first)))
        .collect();
    tasks.await;
    let mut sum = 0;
    for caller in callers {
        sum += caller.await??;
    }
    Ok(sum)
}

fn blocking(cli: &Cli) -> Result<u64, Failure> {
    let (tell, told) = mpsc::channel();
    let core = cli.cores.get(1).copied();
    let server = thread::spawn(move || -> Result<(), Failure> {
        core.map_or(Ok(()), pin_current_thread)?;
        let mut server = copyrpc::Server::bind("127.0.0.1:0")?;
        tell.send((server.local_addr()?, server.stop_handle()))?;
        Ok(server.serve(|request| request.to_vec())?)
    });
    cli.cores
        .first()
        .copied()
        .map_or(Ok(()), pin_current_thread)?;
    let (address, stop) = told.recv()?;
    let mut client = copyrpc::Client::connect(address)?;
    let (end, mut count) = (Instant::now() + Duration::from_secs_f64(cli.duration), 0);
    let mut request = request(0);
    while Instant::now() < end {
        for _ in 0..64 {
            request[..8].copy_from_slice(&u64::to_le_bytes(count));
            check(&request, &client.call(&request)?)?;
            count += 1;
        }
    }
    drop(client);
    stop.stop();
    server.join().map_err(|_| "the server panicked")??;
    Ok(count)
}

fn of_futures(cli: &Cli) -> Result<u64, Failure> {
    let (tell, told) = mpsc::channel();
    let server = async move {
        let server = copyrpc::AsyncServer::bind("127.0.0.1:0").await?;
        tell.send((server.local_addr(), server.stop_handle()))?;
        while let Some(request) = server.recv().await? {
            let reply = request.data().to_vec();
            request.reply(reply);
        }
        Ok::<(), Failure>(())
    };
    let server = thread::spawn(move || runtime()?.block_on(server));
    let (address, stop) = told.recv()?;
    let count = runtime()?.block_on(async {
        let client = copyrpc::AsyncClient::connect(address).await?;
        load(cli, move |request| {
            let client = client.clone();
            async move { Ok(client.call(request).await?) }
        })
        .await
    })?;
    stop.stop();
    server.join().map_err(|_| "the server panicked")??;
    Ok(count)
}

#[tarpc::service]
trait Echo {
    async fn echo(request: Vec<u8>) -> Vec<u8>;
}

#[derive(Clone)]
struct Answers;

impl Echo for Answers {
    async fn echo(self, _: tarpc::context::Context, request: Vec<u8>) -> Vec<u8> {
        request
    }
}

/// Runs the server of another library in its own thread, which ends with the process.
fn serve<F: Future<Output = Result<(), Failure>>>(
    server: impl FnOnce(Sender<SocketAddr>) -> F + Send + 'static,
) -> Result<SocketAddr, Failure> {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || runtime()?.block_on(server(tell)));
    Ok(told.recv()?)
}

fn of_tarpc(cli: &Cli) -> Result<u64, Failure> {
    use tarpc::server::{BaseChannel, Channel};

    let address = serve(|tell| async move {
        let mut listener =
            tarpc::serde_transport::tcp::listen(("127.0.0.1", 0), Bincode::default).await?;
        tell.send(listener.local_addr())?;
        let transport = listener.next().await.ok_or("no client")??;
        transport.get_ref().set_nodelay(true)?;
        let answers = BaseChannel::with_defaults(transport).execute(Answers.serve());
        answers
            .for_each(|answer| async { drop(tokio::spawn(answer)) })
            .await;
        Ok(())
    })?;
    runtime()?.block_on(async {
        let transport = tarpc::serde_transport::tcp::connect(address, Bincode::default).await?;
        transport.get_ref().set_nodelay(true)?;
        let client = EchoClient::new(tarpc::client::Config::default(), transport).spawn();
        load(cli, move |request| {
            let client = client.clone();
            async move { Ok(client.echo(tarpc::context::current(), request).await?) }
        })
        .await
    })
}

/// A codec that leaves the bytes of messages unchanged.
#[derive(Debug, Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(message);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

impl NamedService for Answers {
    const NAME: &'static str = "bench.Echo";
}

impl UnaryService<Bytes> for Answers {
    type Response = Bytes;
    type Future = std::future::Ready<Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        std::future::ready(Ok(Response::new(request.into_inner())))
    }
}

impl<B: Body<Error: Into<StdError> + Send> + Send + 'static> Service<http::Request<B>> for Answers {
    type Response = http::Response<tonic::body::Body>;
    type Error = std::convert::Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Self::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        Box::pin(async move { Ok(tonic::server::Grpc::new(Raw).unary(Answers, request).await) })
    }
}

fn of_tonic(cli: &Cli) -> Result<u64, Failure> {
    let address = serve(|tell| async move {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        tell.send(listener.local_addr()?)?;
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        Ok(tonic::transport::Server::builder()
            .add_service(Answers)
            .serve_with_incoming(incoming)
            .await?)
    })?;
    runtime()?.block_on(async {
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}"))?
            .tcp_nodelay(true)
            .connect()
            .await?;
        let client = tonic::client::Grpc::new(channel);
        load(cli, move |request| {
            let mut client = client.clone();
            async move {
                client.ready().await?;
                let path = PathAndQuery::from_static("/bench.Echo/Echo");
                Ok(client
                    .unary(Request::new(Bytes::from(request)), path, Raw)
                    .await?
                    .into_inner()
                    .to_vec())
            }
        })
        .await
    })
}

#[derive(Debug, Serialize)]
struct Measured {
    per_s: f64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.0} calls/s, {:.0} ns each",
            self.per_s,
            1e9 / self.per_s
        )
    }
}

fn main() -> ExitCode {
    let (program, cli) = (Program("services"), Cli::parse());
    let count = match cli.mode {
        Mode::Blocking => blocking(&cli),
        Mode::Async => of_futures(&cli),
        Mode::Tarpc => of_tarpc(&cli),
        Mode::Tonic => of_tonic(&cli),
    };
    let shown = count.map(|count| {
        program.show(
            &Measured {
                per_s: count as f64 / cli.duration,
            },
            cli.json.as_ref(),
            None,
        )
    });
    shown.unwrap_or_else(|error| program.fail(1, &error))
}
