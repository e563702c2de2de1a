//! A forked child does not keep a context of its parent alive.

use copyrpc::{CallFailure, CloseReason, Context};
use mlx5::LocalFabric;

use super::{builder, connect, next_request, small, step_until};

#[test]
fn a_forked_child_neither_disturbs_its_parent_nor_keeps_it_alive() {
    let fabric = LocalFabric::new();
    let (near, far): (Context<u64>, Context<u64>) = (
        builder(&fabric).build().unwrap(),
        builder(&fabric).build().unwrap(),
    );
    let (endpoint, peer) = connect(&near, &far, &small());
    endpoint.call(b"before", 1, 8).unwrap();
    // SAFETY: the child calls nothing but `pause` and `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; both may be called in the child of a process with threads.
        unsafe {
            libc::pause();
            libc::_exit(0)
        }
    }
    assert!(child > 0);
    let mut ended = Vec::new();
    near.flush_endpoints().unwrap();
    next_request(&far).reply(b"after").unwrap();
    step_until(|| {
        far.poll(|_, _| ()).unwrap();
        near.poll(|user, outcome| ended.push((user, outcome.map(|bytes| bytes.to_vec()))))
            .unwrap();
        !ended.is_empty()
    });
    assert_eq!(ended, [(1, Ok(b"after".to_vec()))]);
    drop((far, peer));
    endpoint.call(b"gone", 2, 8).unwrap();
    step_until(|| {
        near.poll(|user, outcome| ended.push((user, outcome.map(|bytes| bytes.to_vec()))))
            .unwrap();
        ended.len() == 2 && endpoint.closed().is_some()
    });
    // The call was made after the goodbye, so no handler executed it (G5).
    assert_eq!(ended[1], (2, Err(CallFailure::NotSent)));
    assert_eq!(
        endpoint.closed(),
        Some(CloseReason::Disconnected),
        "the other end is gone, though a child has its memory"
    );
    let mut status = 0;
    // SAFETY: the child is ours and not waited for; `status` is writable.
    let waited = unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &raw mut status, 0)
    };
    assert_eq!(
        (waited, libc::WTERMSIG(status)),
        (child, libc::SIGKILL),
        "it was there all the time"
    );
}
