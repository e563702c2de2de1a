//! The machine and the build, recorded in every result so that its figures can be judged later.

use std::fs;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

/// The machine and build of a result. An unknown value is `unknown`, never left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// Kernel release and version.
    pub kernel: String,
    /// Machine type: `x86_64`, `aarch64`.
    pub machine: String,
    /// CPU model name.
    pub cpu_model: String,
    /// Cores online on the host.
    pub cores_online: usize,
    /// Memory of the host in bytes.
    pub memory_bytes: u64,
    /// Commit that the binary was built from.
    pub git_commit: String,
    /// `release` or `debug`. Figures of a debug build are meaningless.
    pub build_profile: String,
    /// Time at which these values were read, in seconds since 1970.
    pub unix_s: u64,
}

impl Environment {
    /// Reads all values; takes about 1 ms.
    pub fn detect() -> Self {
        let ((kernel, machine), system) = (kernel(), rustix::system::sysinfo());
        Self {
            kernel,
            machine,
            cpu_model: cpu_model().unwrap_or_else(unknown),
            cores_online: cores_online(),
            memory_bytes: system.totalram * u64::from(system.mem_unit),
            git_commit: option_env!("HARNESS_GIT_COMMIT").map_or_else(unknown, str::to_owned),
            build_profile: if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            }
            .to_owned(),
            unix_s: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
        }
    }
}

/// Returns the CPU time of all threads of this process together, in seconds.
pub fn cpu_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is live and writable, and the call writes one timespec to it.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the CPU time of all programs and of the kernel since the host was started, in seconds;
/// `None` if the kernel does not report it. The kernel counts it in hundredths of a second.
pub fn host_cpu_seconds() -> Option<f64> {
    busy_seconds(&fs::read_to_string("/proc/stat").ok()?)
}

/// Returns the sum of the times in the first line of `/proc/stat`, in seconds, without the times in
/// which cores were idle, or idle and waited for a disk. The time of guests is part of other times.
fn busy_seconds(stat: &str) -> Option<f64> {
    let times = stat.lines().next()?.strip_prefix("cpu ")?;
    let times: Vec<u64> = times
        .split_whitespace()
        .map_while(|time| time.parse().ok())
        .collect();
    let [
        user,
        nice,
        system,
        _idle,
        _disk,
        interrupts,
        soft,
        stolen,
        ..,
    ] = *times.as_slice()
    else {
        return None;
    };
    Some(
        [user, nice, system, interrupts, soft, stolen]
            .iter()
            .sum::<u64>() as f64
            / 100.0,
    )
}

/// Returns the maximum resident bytes of this process; 0 if the kernel does not report them.
pub fn peak_rss_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .unwrap_or(0)
        * 1024
}

fn unknown() -> String {
    "unknown".to_owned()
}

fn cores_online() -> usize {
    // SAFETY: sysconf takes any name and only returns a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(0)
}

fn kernel() -> (String, String) {
    let names = rustix::system::uname();
    let [name, release, version, machine] = [
        names.sysname(),
        names.release(),
        names.version(),
        names.machine(),
    ]
    .map(|text| text.to_string_lossy().into_owned());
    (format!("{name} {release} {version}"), machine)
}

fn cpu_model() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info
        .lines()
        .find(|line| line.starts_with("model name") || line.starts_with("CPU part"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_times_are_those_in_which_cores_did_something() {
        let stat = "cpu  100 20 300 7000 80 5 6 9 1000 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        assert_eq!(busy_seconds(stat), Some(4.4));
        assert_eq!(busy_seconds("cpu  1 2 3\n"), None);
        let own_s = cpu_seconds();
        assert!(host_cpu_seconds().is_some_and(|host_s| host_s > own_s / 2.0));
    }

    #[test]
    fn this_machine_is_described() {
        let environment = Environment::detect();
        assert!(environment.kernel.starts_with("Linux "), "{environment:?}");
        assert!(
            environment.cores_online > 0 && environment.memory_bytes > 1 << 20,
            "{environment:?}"
        );
        assert_eq!(environment.machine, std::env::consts::ARCH);
        assert!(peak_rss_bytes() > 1 << 16);
    }
}
