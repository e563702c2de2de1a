//! Runs a program with the software HCA in place of an mlx5 device: `mlx5-run CMD...`.
#![allow(clippy::print_stderr, reason = "a program")]

mod child;
#[path = "../../options/config.rs"]
mod config;
#[path = "../../options/errno.rs"]
mod errno;
#[path = "../../options/faults.rs"]
#[allow(dead_code, reason = "the library uses the rest")]
mod faults;
mod gate;
mod library;
#[path = "../../options/limits.rs"]
#[allow(dead_code, reason = "the library uses the rest")]
mod limits;
#[path = "../../options/names.rs"]
#[allow(dead_code, reason = "the library uses the rest")]
mod names;
mod private_dir;
mod program;
#[path = "../../cm/sockets.rs"]
#[allow(dead_code, reason = "the library uses the rest")]
mod sockets;
mod sysfs;

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::net::UdpSocket;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use mlx5_hca::RoceOptions;
use rustix::process::geteuid;

use crate::config::Link;
use crate::faults::Fault;
use crate::sysfs::{Tree, TreeOptions};

const MAX_DEVICES: i64 = 8;

/// Runs an unmodified program with a software HCA in place of an mlx5 device. All programs that one
/// user starts in this way on one host reach each other, and share one port of one device, mlx5_0,
/// unless --devices gives another number.
#[derive(Debug, Parser)]
#[command(name = "mlx5-run", version)]
struct Arguments {
    /// Link layer of the port: InfiniBand (addressed by LID) or RoCE (by GID).
    #[arg(long, value_name = "ib|roce", default_value = "ib", value_parser = checked(Link::parse))]
    link: String,
    /// With --link roce: an address of this host, or a network in which this host has an address.
    /// Programs at other addresses, on this host or others, and other RoCE devices are reached by
    /// packets from this address (UDP, ports 4791 and up). Programs of this fabric at the same
    /// address are reached through shared memory, unless packets=all. No rights are needed.
    /// peers=4791: peers elsewhere have this UDP port, as other RoCE devices have, instead of the
    /// port that follows from their queue pair number. source_ports=1: packets leave from the port
    /// of the device, and not also from others, 49152 and up. loss, double, reorder: packets in a
    /// thousand that are lost, sent twice, or late by up to 1 ms. delay_us: time in us, or
    /// MIN..MAX, by which all packets are late. pcap: file to which packets are captured,
    /// FILE.ADDRESS:PORT. Each of the options from loss to pcap implies packets=all.
    #[arg(
        long,
        value_name = "ADDRESS[/BITS][,peers=4791][,mtu=N][,packets=all][,source_ports=1][,loss=N][,double=N][,reorder=N][,delay_us=MIN..MAX][,pcap=FILE]"
    )]
    address: Option<RoceOptions>,
    /// With --link roce: the GID table of the port, up to 8 entries: v1=IP or v2=IP, the version of
    /// RoCE and the address, or - for an entry without a GID. Programs that are started with
    /// different tables do not see each other.
    #[arg(long, value_name = "v1=IP,v2=IP,-,...", default_value = "", hide_default_value = true, value_parser = checked(config::parse_gids))]
    gids: String,
    /// Number of devices, mlx5_0 and so on, with a port each; all ports are on one network.
    /// Programs that are started with different numbers do not see each other.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=MAX_DEVICES))]
    devices: u8,
    /// Directory through which programs find each other; created if missing. Default:
    /// /dev/shm/mlx5-run-UID.
    #[arg(long, value_name = "DIR")]
    fabric: Option<PathBuf>,
    /// A fault. Of the device: devices=none, gid=none, port=down, atomics=none, srq=none,
    /// open=ERRNO. A number of ms after the device was opened: port=down@MS (port=down@MS+MS: and
    /// up again after the second time), device=fatal@MS. Of a uverbs command (reg_mr, create_qp,
    /// modify_qp, ...): COMMAND=ERRNO, or COMMAND=ERRNO@N after N commands that succeed. Of a work
    /// request: wc=STATUS@N, after N work requests that do not fail. Of messages: loss=P%, the lost
    /// share. delay=MIN..MAX: work requests are executed late, and their completions are late again,
    /// each by a random time in us. random=SEED: one work request in a hundred fails. seed=N: other
    /// random times. wc.K and loss.K: only of the queue pair in place K, the lower 14 bits of its number.
    /// May be repeated.
    #[arg(long = "fault", value_name = "KEY=VALUE", value_parser = checked(Fault::parse), value_delimiter = ',')]
    faults: Vec<String>,
    /// A limit of the device that is lower than that of the software HCA: max_sge=1, max_qp_wr=256,
    /// max_inline_data=0, ... May be repeated.
    #[arg(long = "limit", value_name = "KEY=N", value_parser = checked(limits::parse), value_delimiter = ',')]
    limits: Vec<String>,
    /// Log to this file, by name, the commands whose refusal reaches the program; `-` is standard
    /// error.
    #[arg(long, value_name = "FILE|-")]
    log: Option<PathBuf>,
    /// Log successful commands too, and refused commands for which the program's libraries have
    /// another way.
    #[arg(long, requires = "log")]
    log_commands: bool,
    /// Check that each doorbell of a driver announces the WQEs in its send queue, as a NIC
    /// requires. A violation is logged (without a log: to standard error), and fails its queue
    /// pair.
    #[arg(long)]
    check_doorbells: bool,
    /// Check that a program does not write the buffer of a work request between the post and the
    /// completion. A violation is logged. Work requests are late, as with --fault delay=20..200.
    #[arg(long)]
    check_buffers: bool,
    /// The program and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

/// Returns a parser that checks an option, and passes its text on.
fn checked<T>(
    parse: fn(&str) -> Result<T, String>,
) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |text| parse(text).map(|_| text.to_owned())
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("mlx5-run: {error}");
            ExitCode::from(125)
        }
    }
}

/// Returns the text of the link for the library, with the options of --address if that was given.
fn link_text(arguments: &Arguments) -> Result<String, String> {
    let link = &arguments.link;
    match arguments.address.clone() {
        None => Ok(link.clone()),
        Some(_) if link != "roce" || arguments.devices > 1 => Err(
            "--address: one device with --link roce has it; the others have a network of this host"
                .to_owned(),
        ),
        Some(RoceOptions { port: Some(_), .. }) => {
            Err("--address: the UDP port follows from the process; leave port= out".to_owned())
        }
        Some(mut options) => {
            options.pcap = options.pcap.map(|file| absolute(&file)).transpose()?;
            let here = options
                .on_this_host()
                .and_then(|options| UdpSocket::bind((options.address, 0)).map(|_| options));
            here.map(|options| format!("{link}={options}"))
                .map_err(|error| format!("--address: {error}; use an address of this host"))
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let link = link_text(arguments)?;
    let parsed = Link::parse(&link)?;
    if !arguments.gids.is_empty() && (parsed != Link::Ethernet(None) || arguments.devices > 1) {
        return Err(
            "--gids: one device with --link roce, and without --address, has it".to_owned(),
        );
    }
    let fabric = fabric(arguments, parsed)?;
    program::raise_descriptors();
    // Without the gate, the library reports at a connect that rdma_cm reaches no other hosts.
    let gate = match parsed {
        Link::Ethernet(Some(options)) => gate::attach(options.address, &fabric),
        _ => None,
    };
    let faults = arguments
        .faults
        .iter()
        .map(|text| Fault::parse(text))
        .collect::<Result<Vec<_>, _>>()?;
    faults::of_hca(&faults)?;
    let is_there = |fault| faults.contains(&fault);
    let options = TreeOptions {
        link: parsed,
        gids: config::parse_gids(&arguments.gids)?,
        devices: if is_there(Fault::NoDevices) {
            0
        } else {
            arguments.devices.into()
        },
        has_gid: !is_there(Fault::NoGid),
        is_port_up: !is_there(Fault::PortDown),
    };
    let tree = Tree::make(&options)?;
    let library = library::find(tree.path())?;
    library::check_driver()?;
    let [program, rest @ ..] = &arguments.command[..] else {
        return Err("no command".to_owned());
    };
    if let Some(warning) = program::check(program)? {
        eprintln!("mlx5-run: {warning}");
    }
    let mut command = Command::new(program);
    command
        .args(rest)
        .env(config::TREE, tree.path())
        .env("LD_PRELOAD", library::preload(&library))
        .env(
            config::DEVICE,
            format!("{}:{}", sysfs::DEVICE[0], sysfs::DEVICE[1]),
        )
        .env(config::DEVICES, options.devices.to_string())
        .env(config::LINK, &link)
        .env(config::GIDS, &arguments.gids)
        .env(config::FABRIC, fabric)
        .env(config::LIMITS, arguments.limits.join(","))
        .env(config::FAULTS, arguments.faults.join(","));
    let log = arguments.log.as_ref().map(absolute).transpose()?;
    let flag = |is_set: bool| is_set.then(PathBuf::new);
    let optional = [
        (config::LOG, log),
        (config::LOG_COMMANDS, flag(arguments.log_commands)),
        (config::CHECK_DOORBELLS, flag(arguments.check_doorbells)),
        (config::CHECK_BUFFERS, flag(arguments.check_buffers)),
    ];
    for (name, value) in optional {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let status = child::run(&mut command);
    drop((tree, gate));
    match status {
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error) => {
            eprintln!("mlx5-run: {}: {error}", program.to_string_lossy());
            Ok(ExitCode::from(if error.kind() == io::ErrorKind::NotFound {
                127
            } else {
                126
            }))
        }
    }
}

/// Makes a path absolute, because the program may change its directory. `-` stays as it is.
fn absolute(path: &PathBuf) -> Result<PathBuf, String> {
    if path.as_os_str() == "-" {
        Ok(path.clone())
    } else {
        std::path::absolute(path).map_err(|error| format!("{}: {error}", path.display()))
    }
}

/// Returns the directory of the fabric, which it creates if missing.
fn fabric(arguments: &Arguments, link: Link) -> Result<PathBuf, String> {
    let dir = arguments
        .fabric
        .clone()
        .unwrap_or_else(|| format!("/dev/shm/mlx5-run-{}", geteuid().as_raw()).into());
    let mut dir =
        std::path::absolute(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    if arguments.devices > 1 {
        // The number of devices decides which queue pair numbers belong to a port. So programs with
        // different numbers of devices have separate fabrics.
        dir.as_mut_os_string()
            .push(format!("-{}", arguments.devices));
    }
    if !arguments.gids.is_empty() {
        // The directory's name is the table, without the characters of paths.
        let name = arguments.gids.replace(['/', ','], "_");
        dir.as_mut_os_string().push(format!("-{name}"));
    }
    if let Link::Ethernet(Some(options)) = link {
        // Programs at different addresses have separate fabrics, with separate queue pair numbers.
        dir.as_mut_os_string().push(format!("-{}", options.address));
    }
    match DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(format!("the fabric's directory {}: {error}", dir.display()))
        }
        _ => Ok(dir),
    }
}
