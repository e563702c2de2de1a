//! Compares [`ffi`](super::ffi) with `ucp/api/ucp.h`: a C program compiled here prints the values
//! of the header.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::PathBuf;
use std::process::Command;

use super::ffi::*;

/// An expression of C, and its value in this crate.
type Fact = (&'static str, i64);

/// Returns the expressions whose values must be equal in the header and in this crate.
fn facts() -> Vec<Fact> {
    let mut facts: Vec<Fact> = vec![
        ("sizeof(ucs_status_t)", size_of::<Status>() as i64),
        ("UCS_OK", UCS_OK.into()),
        ("UCS_INPROGRESS", UCS_INPROGRESS.into()),
        ("UCS_ERR_LAST", UCS_ERR_LAST as i64),
        (
            "UCP_ERR_HANDLING_MODE_NONE",
            UCP_ERR_HANDLING_MODE_NONE.into(),
        ),
        (
            "UCP_ERR_HANDLING_MODE_PEER",
            UCP_ERR_HANDLING_MODE_PEER.into(),
        ),
        ("UCP_OP_ATTR_FIELD_FLAGS", UCP_OP_ATTR_FIELD_FLAGS.into()),
        ("UCP_AM_SEND_FLAG_EAGER", UCP_AM_SEND_FLAG_EAGER.into()),
        ("UCP_EP_CLOSE_FLAG_FORCE", UCP_EP_CLOSE_FLAG_FORCE.into()),
        ("sizeof(ucp_err_handling_mode_t)", 4),
        (
            "sizeof(ucp_am_recv_param_t)",
            size_of::<ReceiveParams>() as i64,
        ),
        (
            "sizeof(ucp_am_handler_param_t)",
            size_of::<HandlerParams>() as i64,
        ),
    ];
    macro_rules! masks {
        ($($name:ident)*) => { $(facts.push((stringify!($name), $name as i64));)* };
    }
    masks!(UCP_PARAM_FIELD_FEATURES UCP_FEATURE_AM UCP_EP_PARAM_FIELD_REMOTE_ADDRESS UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
    masks!(UCP_EP_PARAM_FIELD_ERR_HANDLER UCP_AM_HANDLER_PARAM_FIELD_ID UCP_AM_HANDLER_PARAM_FIELD_CB UCP_AM_HANDLER_PARAM_FIELD_ARG);
    masks!(UCP_AM_RECV_ATTR_FLAG_RNDV);
    macro_rules! offsets {
        ($($ours:ident as $theirs:literal { $($field:ident as $member:literal)* })*) => {
            $($(facts.push((concat!("offsetof(", $theirs, ", ", $member, ")"), offset_of!($ours, $field) as i64));)*)*
        };
    }
    offsets! {
        Params as "ucp_params_t" { field_mask as "field_mask" features as "features" unused as "request_size" }
        WorkerParams as "ucp_worker_params_t" { field_mask as "field_mask" unused as "thread_mode" }
        EndpointParams as "ucp_ep_params_t" {
            field_mask as "field_mask" address as "address" err_mode as "err_mode" err_handler_cb as "err_handler.cb"
            err_handler_arg as "err_handler.arg" unused as "user_data"
        }
        ReceiveParams as "ucp_am_recv_param_t" { recv_attr as "recv_attr" reply_ep as "reply_ep" }
        HandlerParams as "ucp_am_handler_param_t" { field_mask as "field_mask" id as "id" flags as "flags" cb as "cb" arg as "arg" }
        RequestParams as "ucp_request_param_t" { op_attr_mask as "op_attr_mask" flags as "flags" unused as "request" }
    }
    facts
}

/// Sizes that are at least as large in this crate as in the header: the bytes after the fields in
/// use are padding.
const PADDED: [Fact; 4] = [
    ("sizeof(ucp_params_t)", size_of::<Params>() as i64),
    (
        "sizeof(ucp_worker_params_t)",
        size_of::<WorkerParams>() as i64,
    ),
    (
        "sizeof(ucp_ep_params_t)",
        size_of::<EndpointParams>() as i64,
    ),
    (
        "sizeof(ucp_request_param_t)",
        size_of::<RequestParams>() as i64,
    ),
];

/// Returns the header's value of each expression. The compiler checks the types of [`Functions`] in
/// the same program.
fn ask(facts: &[Fact]) -> Vec<i64> {
    let dir = std::env::temp_dir().join(format!("benchkv-ucp-oracle-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (source, program): (PathBuf, PathBuf) = (dir.join("oracle.c"), dir.join("oracle"));
    let mut text = include_str!("oracle.c").to_owned();
    text.push_str("int main(void)\n{\n");
    for (expression, _) in facts {
        writeln!(text, "    printf(\"%lld\\n\", (long long)({expression}));").unwrap();
    }
    text.push_str("    return 0;\n}\n");
    std::fs::write(&source, text).unwrap();
    let status = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(&source)
        .status()
        .unwrap();
    assert!(
        status.success(),
        "the oracle needs ucp/api/ucp.h (package libucx-dev)"
    );
    let output = Command::new(&program).output().unwrap();
    std::fs::remove_dir_all(dir).unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| line.parse().unwrap())
        .collect()
}

#[test]
#[ignore = "needs libucx-dev"]
fn structs_and_constants_are_those_of_the_header() {
    let facts = facts();
    let theirs = ask(&[&facts[..], &PADDED].concat());
    assert_eq!(theirs.len(), facts.len() + PADDED.len());
    for ((expression, ours), theirs) in facts.iter().zip(&theirs) {
        assert_eq!(ours, theirs, "{expression}");
    }
    for ((expression, ours), theirs) in PADDED.iter().zip(&theirs[facts.len()..]) {
        assert!(
            ours >= theirs,
            "{expression}: {ours} here, {theirs} in the header"
        );
    }
}
