//! Names of the write() commands (`enum ib_uverbs_write_cmds`), for the log and for `--fault`.

/// Names of the commands from number 0 on, separated by spaces.
const WRITE: &str = "\
    get_context query_device query_port alloc_pd dealloc_pd create_ah modify_ah query_ah destroy_ah reg_mr reg_smr rereg_mr query_mr \
    dereg_mr alloc_mw bind_mw dealloc_mw create_comp_channel create_cq resize_cq destroy_cq poll_cq peek_cq req_notify_cq create_qp \
    query_qp modify_qp destroy_qp post_send post_recv attach_mcast detach_mcast create_srq modify_srq query_srq destroy_srq \
    post_srq_recv open_xrcd close_xrcd create_xsrq open_qp";

/// Number of the first command that exists only in the extended form
/// (`IB_USER_VERBS_CMD_THRESHOLD`), and the names from there on.
const THRESHOLD: usize = 50;
const EXTENDED: &str = "create_flow destroy_flow create_wq modify_wq destroy_wq create_rwq_ind_tbl destroy_rwq_ind_tbl modify_cq";

fn commands() -> impl Iterator<Item = (usize, &'static str)> {
    WRITE
        .split(' ')
        .enumerate()
        .chain((THRESHOLD..).zip(EXTENDED.split(' ')))
}

/// Returns the name of a command. An extended command has the number and the name of the plain
/// command.
pub(crate) fn command(number: u8) -> Option<&'static str> {
    commands()
        .find(|&(of, _)| of == usize::from(number))
        .map(|(_, name)| name)
}

pub(crate) fn number(name: &str) -> Option<u8> {
    commands()
        .find(|&(_, known)| known == name)
        .map(|(number, _)| number as u8)
}

pub(crate) fn all() -> impl Iterator<Item = &'static str> {
    commands().map(|(_, name)| name)
}
