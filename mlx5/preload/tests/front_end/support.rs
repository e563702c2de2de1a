//! Programs under the front end, each with a deadline.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time after which a program is taken for hung.
const DEADLINE: Duration = Duration::from_secs(90);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Returns the directory with `mlx5-run` and the library. A test depends on the binaries of its
/// package, but not on a library that no binary links, so the library is built here, with the
/// features that its dependencies have in the workspace (benchkv-harness enables all of these
/// features).
pub(crate) fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "build",
            "--quiet",
            "--locked",
            "-p",
            env!("CARGO_PKG_NAME"),
            "-p",
            "benchkv-harness",
            "--features",
            "benchkv-harness/launch",
            "--lib",
        ]);
        let program = Path::new(env!("CARGO_BIN_EXE_mlx5-run"));
        let dir = program.parent().unwrap();
        if dir.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.arg("--target-dir").arg(dir.parent().unwrap());
        assert!(cargo.status().expect("cargo").success());
        dir.to_owned()
    })
}

/// The directory of one test, with its own fabric.
pub(crate) struct Place {
    dir: PathBuf,
    programs: AtomicU32,
}

impl Place {
    pub(crate) fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("mlx5-preload-{test}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        Self {
            dir,
            programs: AtomicU32::new(0),
        }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the names of files that programs left in the fabrics, one for each address, other
    /// than their counters, which stay.
    pub(crate) fn left(&self) -> Vec<std::ffi::OsString> {
        let entries = |dir: &Path| {
            fs::read_dir(dir)
                .unwrap()
                .map(|entry| entry.unwrap().path())
        };
        let fabrics = entries(&self.dir).filter(|path| {
            path.file_name()
                .unwrap()
                .to_string_lossy()
                .starts_with("fabric")
        });
        fabrics
            .flat_map(|fabric| entries(&fabric))
            .filter_map(|path| path.file_name().map(Into::into))
            .filter(|name| name != "counters")
            .collect()
    }

    /// Makes `mlx5-run` with these options.
    pub(crate) fn mlx5_run(&self, options: &[&str]) -> Command {
        let mut command = Command::new(built().join("mlx5-run"));
        command
            .arg("--fabric")
            .arg(self.file("fabric"))
            .args(options);
        command
    }

    /// Starts a program with its output in a file.
    pub(crate) fn start(&self, command: &mut Command) -> Program {
        let output = self.file(&format!(
            "output-{}",
            self.programs.fetch_add(1, Ordering::Relaxed)
        ));
        let file = File::create(&output).unwrap();
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file);
        Program {
            what: format!("{command:?}"),
            child: command.spawn().unwrap(),
            output,
            deadline: Instant::now() + DEADLINE,
        }
    }

    /// Runs a program to its end.
    pub(crate) fn run(&self, options: &[&str], program: &[&str]) -> Finished {
        self.start(self.mlx5_run(options).args(program)).finish()
    }

    /// Runs a server, and a client: the same program with the server's host as its last argument.
    /// Returns server and client.
    pub(crate) fn pair(&self, options: &[&str], program: &[&str]) -> [Finished; 2] {
        let port = free_port();
        let command = |more: &[&str]| {
            let mut command = self.mlx5_run(options);
            command
                .args(program)
                .args(["-p", &port.to_string()])
                .args(more);
            command
        };
        let mut server = self.start(&mut command(&[]));
        server.wait_for(|| is_listening(port));
        let client = self.start(&mut command(&["localhost"]));
        [server.finish(), client.finish()]
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A running program; killed if dropped.
pub(crate) struct Program {
    what: String,
    child: Child,
    output: PathBuf,
    deadline: Instant,
}

/// A program that ended.
#[derive(Debug)]
pub(crate) struct Finished {
    #[allow(dead_code, reason = "shown when a test fails")]
    what: String,
    pub(crate) status: ExitStatus,
    pub(crate) output: String,
}

impl Program {
    pub(crate) fn id(&self) -> libc::pid_t {
        self.child.id() as libc::pid_t
    }

    /// Returns the path of the program's output.
    pub(crate) fn output_path(&self) -> PathBuf {
        self.output.clone()
    }

    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap()).into_owned()
    }

    /// Waits until `is_so`, while the program runs.
    pub(crate) fn wait_for(&mut self, mut is_so: impl FnMut() -> bool) {
        while !is_so() {
            let ended = self.child.try_wait().unwrap();
            assert!(
                ended.is_none(),
                "{} ended too early:\n{}",
                self.what,
                self.output()
            );
            assert!(
                Instant::now() < self.deadline,
                "{} hangs:\n{}",
                self.what,
                self.output()
            );
            sleep(LOOK_AGAIN);
        }
    }

    /// Waits until `is_so`, whether the program runs or not.
    pub(crate) fn wait_for_all(&mut self, mut is_so: impl FnMut() -> bool) {
        while !is_so() {
            assert!(
                Instant::now() < self.deadline,
                "{} and others hang:\n{}",
                self.what,
                self.output()
            );
            sleep(LOOK_AGAIN);
        }
    }

    pub(crate) fn finish(mut self) -> Finished {
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return Finished {
                    what: self.what.clone(),
                    status,
                    output: self.output(),
                };
            }
            assert!(
                Instant::now() < self.deadline,
                "{} hangs:\n{}",
                self.what,
                self.output()
            );
            sleep(LOOK_AGAIN);
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Finished {
    /// Checks that the program succeeded.
    #[track_caller]
    pub(crate) fn succeeded(&self) -> &Self {
        assert!(self.status.success(), "{self:#?}");
        self
    }

    /// Checks that the program's output contains `text`.
    #[track_caller]
    pub(crate) fn said(&self, text: &str) -> &Self {
        assert!(self.output.contains(text), "{text:?} is not in {self:#?}");
        self
    }
}

/// Returns a port without a listener, each port only once. The port is below the ports that the
/// system gives to connections (32768 and more, by default).
pub(crate) fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(64);
    let port =
        || (20_000 + first.wrapping_add(CALLS.fetch_add(1, Ordering::Relaxed)) % 12_000) as u16;
    std::iter::repeat_with(port)
        .find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok())
        .unwrap()
}

/// Returns whether a server listens at the port. Does not connect, because a server would take the
/// connection for its client.
pub(crate) fn is_listening(port: u16) -> bool {
    let port = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let lines = fs::read_to_string(table).unwrap_or_default();
        lines.lines().any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            fields.next().is_some_and(|local| local.ends_with(&port)) && fields.nth(1) == Some("0A")
        })
    })
}

/// Returns the factor for the duration of long tests.
pub(crate) fn scale() -> u32 {
    std::env::var("MLX5_TEST_SCALE").map_or(1, |scale| scale.parse().unwrap())
}
