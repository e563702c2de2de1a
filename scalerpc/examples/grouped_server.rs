//! Answers the requests of any number of clients with the same text in upper case.
//!
//! In two terminals: `cargo run -p scalerpc --example grouped_server`, and `grouped_client` in
//! place of `grouped_server`; both take an `ADDRESS:PORT`. With a second argument, the server ends
//! after that number of requests. `COPYRPC_DEVICE=mlx5_0` selects that device instead of the
//! software HCA, in both.
#![allow(clippy::print_stdout, reason = "an example prints")]

use scalerpc::Server;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let mut server = Server::bind(args.next().as_deref().unwrap_or("127.0.0.1:7480"))?;
    let mut to_come = args
        .next()
        .map_or(Ok(u64::MAX), |requests| requests.parse())?;
    println!("listening on {}", server.local_addr()?);
    let stop = server.stop_handle();
    server.serve(|request| {
        let text = String::from_utf8_lossy(request);
        let answer = text.to_uppercase();
        println!("{text:?} -> {answer:?}");
        to_come -= 1;
        if to_come == 0 {
            stop.stop();
        }
        answer
    })?;
    Ok(())
}
