//! The resources of a machine for a job: libraries, limits, memory, programs. This module judges
//! nothing that it finds, and changes only the limit of open files.

use std::ffi::{CStr, CString, OsStr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::{fs, io};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A shared library that could be loaded. It stays loaded to the end of the process.
#[derive(Debug)]
pub struct Library {
    handle: *mut libc::c_void,
    /// File of the library, with links resolved, so that the name ends with the version.
    pub file: PathBuf,
}

impl Library {
    /// Loads the library called `name`, by the loader's rules, and runs its initializers.
    ///
    /// # Errors
    /// The loader's reason.
    pub fn load(name: &str) -> Result<Self, String> {
        let c_name = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: the name is a live string. A system library's initializers have no precondition.
        let handle = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlerror returns null or a string that lives until the thread's next call of
            // this family.
            let text = unsafe { libc::dlerror().as_ref().map(|text| CStr::from_ptr(text)) };
            let reason = text.map(|text| text.to_string_lossy().into_owned());
            return Err(reason.unwrap_or_else(|| format!("{name} cannot be loaded")));
        }
        Ok(Self {
            handle,
            file: mapped_file(name).unwrap_or_else(|| PathBuf::from(name)),
        })
    }

    /// Returns the address of a function or object of the library, or of one of its dependencies.
    pub fn symbol(&self, symbol: &CStr) -> Option<NonNull<libc::c_void>> {
        // SAFETY: the handle belongs to a loaded library, and the name is a live string.
        NonNull::new(unsafe { libc::dlsym(self.handle, symbol.as_ptr()) })
    }

    /// Returns the text that the library's function `symbol` returns; `None` if the library has no
    /// such function, or the function returns null.
    ///
    /// # Safety
    /// `symbol` must be a function without arguments that returns null or a string that lives as
    /// long as the library.
    pub unsafe fn text_of(&self, symbol: &CStr) -> Option<String> {
        // SAFETY: the caller guarantees that `symbol` is a function of this type.
        let function: unsafe extern "C" fn() -> *const libc::c_char =
            unsafe { std::mem::transmute(self.symbol(symbol)?) };
        // SAFETY: the caller guarantees the type of the function, and that its return value is null
        // or a string that lives as long as the library.
        let text = unsafe { function().as_ref().map(|text| CStr::from_ptr(text)) };
        text.map(|text| text.to_string_lossy().into_owned())
    }

    /// Returns the name of the library's file.
    pub fn file_name(&self) -> String {
        let name = self.file.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }
}

/// Returns the file mapped into this process whose name begins with `name`, with links resolved.
fn mapped_file(name: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let path = |line: &'_ str| Some(Path::new(line.get(line.find('/')?..)?).to_owned());
    let is_it = |path: &PathBuf| {
        let file = path.file_name().map(|file| file.to_string_lossy());
        file.is_some_and(|file| file.starts_with(name))
    };
    let path = maps.lines().filter_map(path).find(is_it)?;
    Some(fs::canonicalize(&path).unwrap_or(path))
}

/// Returns the bytes of memory that this process may lock (`RLIMIT_MEMLOCK`); `None` without limit.
pub fn memlock_limit() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// Returns the bytes of address space that this process may have (`RLIMIT_AS`); `None`: no limit.
pub fn address_limit() -> Option<u64> {
    getrlimit(Resource::As).current
}

/// Returns the maximum number of open files that this process may request (`RLIMIT_NOFILE`, the
/// hard limit); `None` without limit.
pub fn open_files_limit() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// The limit of open descriptors is too low.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{needed} open files are needed and at most {limit} are allowed: raise the hard limit (ulimit -Hn)"
)]
pub struct TooFewFiles {
    /// Number of descriptors needed.
    pub needed: u64,
    /// `RLIMIT_NOFILE`, the hard limit.
    pub limit: u64,
}

/// Raises the soft limit of open files, which is 1,024 on many systems, to `needed` or the hard
/// limit, for this process and its children. Never lowers it.
///
/// # Errors
/// The hard limit is lower than `needed`.
pub fn allow_open_files(needed: u64) -> Result<(), TooFewFiles> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let limit = maximum.unwrap_or(u64::MAX);
    if current.unwrap_or(u64::MAX) >= needed {
        return Ok(());
    }
    let current = Some(needed.min(limit));
    let raised = setrlimit(Resource::Nofile, Rlimit { current, maximum });
    if raised.is_ok() && needed <= limit {
        Ok(())
    } else {
        Err(TooFewFiles { needed, limit })
    }
}

/// The size of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// Size of the file system, in bytes.
    pub size_bytes: u64,
    /// Bytes that this user may still use.
    pub free_bytes: u64,
    /// Whether the file system is a tmpfs: files in memory.
    pub is_memory: bool,
}

/// Returns the size of the file system that contains `path`.
///
/// # Errors
/// The system's reason.
pub fn space(path: &Path) -> io::Result<Space> {
    let found = rustix::fs::statfs(path)?;
    let block = found.f_bsize as u64;
    // The types of the two numbers depend on the C library, so both are converted.
    let is_memory = i128::from(found.f_type) == i128::from(libc::TMPFS_MAGIC);
    Ok(Space {
        size_bytes: found.f_blocks * block,
        free_bytes: found.f_bavail * block,
        is_memory,
    })
}

/// Huge pages of the default size, and the kernel's setting for transparent huge pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HugePages {
    /// Size of a page, in bytes; 0 if the kernel has no huge pages.
    pub page_bytes: u64,
    /// Number of reserved pages.
    pub reserved: u64,
    /// The setting for transparent huge pages in shared memory: `never`, `advise`, ...; empty if
    /// the kernel has no such setting.
    pub shared: String,
}

/// Reads the state of huge pages.
pub fn huge_pages() -> HugePages {
    let choices =
        fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    HugePages {
        page_bytes: memory_info("Hugepagesize:").unwrap_or(0) * 1024,
        reserved: memory_info("HugePages_Total:").unwrap_or(0),
        shared: chosen(&choices).to_owned(),
    }
}

fn memory_info(field: &str) -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let rest = info.lines().find_map(|line| line.strip_prefix(field))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Returns the kernel's estimate of the bytes that new processes can use without swapping.
pub fn available_memory() -> Option<u64> {
    memory_info("MemAvailable:").map(|kib| kib * 1024)
}

/// Returns the word in brackets of the kernel's `always [advise] never`.
fn chosen(choices: &str) -> &str {
    let rest = choices
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    rest.map_or("", |(word, _)| word)
}

/// A program of the search path, and the first line it prints for `--version`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Path of the program.
    pub path: PathBuf,
    /// Version that the program prints, or the reason why it prints none.
    pub version: Result<String, String>,
}

/// Searches the search path for `name` and runs it with `--version`.
pub fn program(name: &str) -> Option<Program> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let path = find_program(name, &search)?;
    let mut command = Command::new(&path);
    let output = command.arg("--version").stdin(Stdio::null()).output();
    let version = output
        .map_err(|error| error.to_string())
        .and_then(|output| {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let line = text.lines().map(str::trim).find(|line| !line.is_empty());
            line.map(str::to_owned)
                .ok_or_else(|| output.status.to_string())
        });
    Some(Program { path, version })
}

fn find_program(name: &str, search: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(search)
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_loaded_with_the_file_it_is_or_the_loaders_reason() {
        let libc = Library::load("libc.so.6").unwrap();
        assert!(
            libc.file.is_absolute() && libc.file_name().starts_with("libc"),
            "{libc:?}"
        );
        // SAFETY: gnu_get_libc_version(3) has that type.
        let version = unsafe { libc.text_of(c"gnu_get_libc_version") };
        assert!(version.is_some_and(|version| version.starts_with("2.")));
        // SAFETY: libc has no such function, so no function is called.
        assert_eq!(unsafe { libc.text_of(c"no_such_function") }, None);
        assert!(
            Library::load("libnonesuch.so.7")
                .unwrap_err()
                .contains("libnonesuch.so.7")
        );
    }

    #[test]
    fn more_open_files_than_the_system_has_are_refused_with_both_numbers() {
        assert_eq!(allow_open_files(1), Ok(()));
        let error = allow_open_files(u64::MAX - 1).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with(&format!("{} open files", u64::MAX - 1))
                && error.limit > 0,
            "{error}"
        );
    }

    #[test]
    fn room_and_limits_are_those_of_the_kernel() {
        let shm = space(Path::new("/dev/shm")).unwrap();
        assert!(
            shm.size_bytes >= shm.free_bytes && shm.size_bytes > 0,
            "{shm:?}"
        );
        assert!(!space(Path::new("/proc")).unwrap().is_memory);
        assert_eq!(
            space(Path::new("/nonexistent")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
        let limits = fs::read_to_string("/proc/self/limits").unwrap();
        let line = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max locked memory"))
            .unwrap();
        let soft = line.split_whitespace().next().unwrap();
        let text = |limit: Option<u64>| {
            limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string())
        };
        assert_eq!(text(memlock_limit()), soft);
        for (name, column, limit) in [
            ("Max address space", 0, address_limit()),
            ("Max open files", 1, open_files_limit()),
        ] {
            let line = limits
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap();
            assert_eq!(
                Some(&*text(limit)),
                line.split_whitespace().nth(column),
                "{name}"
            );
        }
    }

    #[test]
    fn the_chosen_word_is_the_one_in_brackets() {
        assert_eq!(
            (
                chosen("always within_size [advise] never deny force\n"),
                chosen("")
            ),
            ("advise", "")
        );
    }

    #[test]
    fn programs_are_found_in_the_search_path_and_asked() {
        let found = program("cargo").or_else(|| program("cat")).unwrap();
        assert!(found.version.is_ok_and(|version| !version.is_empty()));
        assert_eq!(find_program("cat", OsStr::new("/nonexistent:/proc")), None);
        assert_eq!(program("no-such-program"), None);
    }
}
