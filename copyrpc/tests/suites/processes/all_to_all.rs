//! Every node calls every other node.

use super::job::{Job, scale};

/// 4 processes of 4 contexts, each with an endpoint to the 15 others: 64 calls wanted of each at
/// once, where the credit (1 KiB) pays for three of the middle size. Both directions, sizes from 0
/// to the largest, answers in no order; some calls are cancelled or have a short deadline.
#[test]
fn sixteen_nodes_in_four_processes_lose_nothing_at_a_depth_far_above_the_credit() {
    let quota = 150 * scale();
    let job = Job::start("all", 4, 4, quota);
    let pairs: Vec<_> = (0..16)
        .flat_map(|a| (0..16).filter(move |b| *b != a).map(move |b| (a, b)))
        .collect();
    let said = job.wait_until("for the quota", &pairs, |said| said.issued == quota);
    assert_eq!(said.len(), 240);
    let totals = job.finish();
    println!("{} calls, {totals:?}", quota * 240);
    assert_eq!(totals.contexts, 16);
    // The load took all these paths of the protocol.
    assert!(
        totals.wraps > 1_000
            && totals.reads > 1_000
            && totals.metadata_only > 0
            && totals.late_responses > 100,
        "{totals:?}"
    );
}
