//! `--check-doorbells`.

use core::ptr;
use std::fs;
use std::os::fd::AsRawFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::abi::verbs::{CreateQpResp, number};
use crate::raw::{Device, Memory, under_the_library_with};
use crate::support::Place;

const CHECKED: (&str, &str) = ("MLX5_PRELOAD_CHECK_DOORBELLS", "1");
const NOP: u32 = 0;

/// A driver with one queue pair, which rings for NOPs.
struct Driver {
    device: Device,
    memory: Memory,
    qp: CreateQpResp,
    register: *mut u32,
    posted: u16,
}

impl Driver {
    fn start() -> Self {
        let (device, memory) = (Device::start(), Memory::new());
        let qp = device.create_ready_qp(&memory);
        let fd = device.file.as_raw_fd();
        // SAFETY: a new mapping of the page of register 24, which is the first of its page.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                6 * 4096,
            )
        };
        assert_ne!(page, libc::MAP_FAILED);
        // SAFETY: inside the page.
        let register = unsafe { page.byte_add(0x800) }.cast();
        Self {
            device,
            memory,
            qp,
            register,
            posted: 0,
        }
    }

    /// Writes a WQE: its index and its words.
    fn write_wqe(&mut self) -> (u16, [u32; 4]) {
        let index = self.posted;
        self.posted += 1;
        (index, self.memory.write_wqe(index, NOP, self.qp.qpn))
    }

    /// Writes the record, and words to the next half of the register.
    fn ring(&self, words: &[u32]) {
        self.memory.announce(self.posted);
        let half = usize::from((self.posted + 1) % 2) * 64;
        for (at, word) in words.iter().enumerate() {
            // SAFETY: inside half the register.
            unsafe { self.register.add(half + at).write_volatile(*word) };
        }
    }

    /// Waits for the completion of all posted WQEs, and until their doorbells have certainly been
    /// checked.
    fn wait(&self) {
        let since = Instant::now();
        // SAFETY: owner and opcode of a CQE of this memory.
        while unsafe {
            ((self.memory.cq() + u64::from(self.posted) * 64 - 1) as *const u8).read_volatile()
        } != 0
        {
            assert!(since.elapsed() < Duration::from_secs(20), "no completion");
        }
        sleep(Duration::from_millis(20));
    }

    fn has_failed(&self) -> bool {
        self.device.query_qp(self.qp.qp_handle).unwrap().qp_state == 6
    }

    fn fails(&self) {
        let since = Instant::now();
        while !self.has_failed() {
            assert!(
                since.elapsed() < Duration::from_secs(20),
                "a wrong doorbell ends nothing"
            );
            sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SAFETY: the page that `start` mapped, to which nothing refers any more.
        let result = unsafe { libc::munmap(self.register.cast::<u8>().sub(0x800).cast(), 4096) };
        assert_eq!(result, 0);
    }
}

#[test]
fn a_device_lives_until_its_descriptor_is_closed_and_its_registers_are_unmapped() {
    under_the_library_with(
        "doorbells::a_device_lives_until_its_descriptor_is_closed_and_its_registers_are_unmapped",
        CHECKED,
        &["doorbells: 1 seen, 1 blocks"],
        || {
            let threads = || fs::read_dir("/proc/self/task").unwrap().count();
            let mut driver = Driver::start();
            let before = threads();
            driver.device.file = fs::File::open("/dev/null").unwrap();
            let (_, wqe) = driver.write_wqe();
            driver.ring(&wqe);
            driver.wait();
            assert_eq!(threads(), before);
            drop(driver);
            let since = Instant::now();
            while threads() == before {
                assert!(
                    since.elapsed() < Duration::from_secs(20),
                    "the thread goes on without a program"
                );
                sleep(Duration::from_millis(10));
            }
        },
    );
}

#[test]
fn registers_that_announce_what_is_posted_are_counted() {
    let counted = "doorbells: 4 seen, 3 blocks, 1 words, 0 overtaken";
    under_the_library_with(
        "doorbells::registers_that_announce_what_is_posted_are_counted",
        CHECKED,
        &[counted],
        || {
            let mut driver = Driver::start();
            for words in [2, 4, 4] {
                let (_, wqe) = driver.write_wqe();
                driver.ring(&wqe[..words]);
                driver.wait();
            }
            // A batch that begins with the first of two WQEBBs.
            let ((_, first), (_, second)) = (driver.write_wqe(), driver.write_wqe());
            let mut batch = [0; 32];
            batch[..4].copy_from_slice(&first);
            batch[16..20].copy_from_slice(&second);
            driver.ring(&batch);
            driver.wait();
            assert!(!driver.has_failed());
            driver
                .device
                .destroy(number::DESTROY_QP, driver.qp.qp_handle)
                .unwrap();
        },
    );
}

#[test]
fn a_register_that_announces_nothing_or_something_else_ends_its_queue_pair() {
    let logged = [
        "index 0: the doorbell record moved and no register was written",
        "index 1: the register does not hold what the send queue holds",
        "index 2: the register announces a WQE that is not the last one the doorbell record covers",
        "index 3: the register names another queue pair than the one it belongs to",
        "index 4: the doorbell record moved and no register was written; found 00 00 04 00",
    ];
    under_the_library_with(
        "doorbells::a_register_that_announces_nothing_or_something_else_ends_its_queue_pair",
        CHECKED,
        &logged,
        || {
            let spoil: [&dyn Fn([u32; 4]) -> Vec<u32>; 4] = [
                &|_| vec![],
                &|mut wqe| {
                    wqe[2] ^= 0x100;
                    wqe.to_vec()
                },
                &|mut wqe| {
                    wqe[0] = (u32::from_be(wqe[0]) - 0x100).to_be();
                    wqe[..2].to_vec()
                },
                &|mut wqe| {
                    wqe[1] = (u32::from_be(wqe[1]) + 0x100).to_be();
                    wqe[..2].to_vec()
                },
            ];
            for (index, spoil) in (0..).zip(spoil) {
                let mut driver = Driver::start();
                while driver.posted < index {
                    let (_, wqe) = driver.write_wqe();
                    driver.ring(&wqe);
                    driver.wait();
                }
                let (_, wqe) = driver.write_wqe();
                driver.ring(&spoil(wqe));
                driver.fails();
            }
            // The last doorbell is checked when the queue pair is destroyed.
            let mut driver = Driver::start();
            for is_announced in [true, true, true, true, false] {
                let (_, wqe) = driver.write_wqe();
                driver.ring(if is_announced { &wqe } else { &[] });
                driver.wait();
            }
            driver
                .device
                .destroy(number::DESTROY_QP, driver.qp.qp_handle)
                .unwrap();
        },
    );
}

/// Returns the outcomes of the doorbells of all processes: seen, blocks, words, overtaken.
fn counts(log: &str) -> [u64; 4] {
    let mut sums = [0; 4];
    for (_, line) in log
        .lines()
        .filter_map(|line| line.split_once("doorbells: "))
    {
        let numbers = line
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|number| number.parse::<u64>().ok());
        sums.iter_mut()
            .zip(numbers)
            .for_each(|(sum, number)| *sum += number);
    }
    sums
}

#[test]
#[ignore = "needs perftest"]
fn doorbells_of_libmlx5_are_found_right() {
    for (test, program, is_block) in [
        (
            "doorbells-lat",
            &["ib_send_lat", "-F", "-n", "300"][..],
            true,
        ),
        (
            "doorbells-inline",
            &["ib_write_lat", "-F", "-n", "300", "-s", "200", "-I", "220"],
            true,
        ),
        (
            "doorbells-list",
            &["ib_write_bw", "-F", "-n", "320", "-l", "8", "-q", "2"],
            false,
        ),
    ] {
        let place = Place::new(test);
        let log = place.file("log");
        for end in place.pair(
            &["--check-doorbells", "--log", log.to_str().unwrap()],
            program,
        ) {
            end.succeeded();
        }
        let log = fs::read_to_string(log).unwrap();
        assert!(!log.contains("index"), "{log}");
        let [seen, blocks, words, overtaken] = counts(&log);
        assert_eq!(seen, blocks + words + overtaken);
        assert!(
            if is_block {
                blocks > 0 && words == 0
            } else {
                words > 0
            },
            "{seen} {blocks} {words} {overtaken}"
        );
    }
}
