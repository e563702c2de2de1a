//! A kernel before Linux 5.16, or a sandbox that refuses the system call: a thread that sleeps on
//! several words is woken nevertheless.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use copyrpc_shm::sleep::{self, Sleep, Sleeper, Watch, Word};
use copyrpc_testing::helpers::alone;

const ROUNDS: u64 = 200;
const WATCHDOG: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Mail {
    sleep: Sleep,
    published: AtomicU64,
}

impl Mail {
    fn publish(&self) {
        self.published.fetch_add(1, Ordering::Release);
        self.sleep.wake();
    }
}

/// The condition that more than this number of messages have arrived. Without a wake-up, the
/// sleeper checks only after an hour.
struct Beyond<'a>(&'a Mail, u64);

impl Watch for Beyond<'_> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.0.sleep.word());
    }
    fn look(&mut self, _: bool) -> bool {
        self.0.published.load(Ordering::Acquire) > self.1
    }
    fn slice(&mut self) -> Duration {
        Duration::from_secs(3600)
    }
}

/// Makes futex_waitv(2) fail with ENOSYS in the calling thread.
fn refuse_the_call() {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let mut filter = [
        statement(
            libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
            std::mem::offset_of!(libc::seccomp_data, nr) as u32,
        ),
        libc::sock_filter {
            jf: 1,
            ..statement(
                libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
                libc::SYS_futex_waitv as u32,
            )
        },
        statement(
            libc::BPF_RET | libc::BPF_K,
            libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        ),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the kernel reads the program, which lives through the calls.
    let results = unsafe {
        [
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
                0,
                0,
            ),
        ]
    };
    assert_eq!(results, [0, 0], "{}", io::Error::last_os_error());
    // SAFETY: the kernel gets no words, and so accesses no memory.
    let ended = unsafe { libc::syscall(libc::SYS_futex_waitv, 0, 0, 0, 0, 0) };
    assert_eq!(
        (ended, io::Error::last_os_error().raw_os_error()),
        (-1, Some(libc::ENOSYS))
    );
}

/// The test runs in a process of its own, because a process stores that it lacks the system call.
#[test]
fn several_words_can_be_slept_on_without_the_call_for_it() {
    alone(
        "no_futex_waitv::several_words_can_be_slept_on_without_the_call_for_it",
        1,
        sleep_on_several_words,
    );
}

fn sleep_on_several_words() {
    let mails: Arc<[Mail; 3]> = Arc::default();
    let also_mails = Arc::clone(&mails);
    let sleeper = std::thread::spawn(move || {
        refuse_the_call();
        for round in 0..ROUNDS {
            // The messages come through the first two words in turn; the third word is for the
            // answers.
            let [mut one, mut other] = [
                Beyond(&mails[0], round.div_ceil(2)),
                Beyond(&mails[1], round / 2),
            ];
            assert!(sleep::wait(
                [&mut one as &mut dyn Sleeper, &mut other],
                None
            ));
            mails[2].publish();
        }
    });
    let producer = std::thread::spawn(move || {
        for round in 0..ROUNDS {
            also_mails[(round % 2) as usize].publish();
            assert!(sleep::wait(
                [&mut Beyond(&also_mails[2], round) as &mut dyn Sleeper],
                None
            ));
        }
    });
    let start = Instant::now();
    while !(sleeper.is_finished() && producer.is_finished()) {
        assert!(start.elapsed() < WATCHDOG, "a wake-up was lost");
        std::thread::sleep(Duration::from_millis(1));
    }
    sleeper.join().unwrap();
    producer.join().unwrap();
}
