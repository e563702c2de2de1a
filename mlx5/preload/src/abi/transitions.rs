//! The legal transitions of a queue pair with their attributes: the tables of `ib_modify_qp`
//! (InfiniBand specification, "Queue Pair State Transition Properties").

use mlx5_hca::Service;

/// States, with the numbers of `enum ib_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub(crate) enum State {
    Reset = 0,
    Init = 1,
    ReadyToReceive = 2,
    ReadyToSend = 3,
    SendQueueDrained = 4,
    SendQueueError = 5,
    Error = 6,
}

/// Bits of an attribute mask (`enum ib_qp_attr_mask`).
pub(crate) mod attribute {
    pub(crate) const STATE: u32 = 1 << 0;
    pub(crate) const CUR_STATE: u32 = 1 << 1;
    pub(crate) const ACCESS_FLAGS: u32 = 1 << 3;
    pub(crate) const PKEY_INDEX: u32 = 1 << 4;
    pub(crate) const PORT: u32 = 1 << 5;
    pub(crate) const QKEY: u32 = 1 << 6;
    pub(crate) const AV: u32 = 1 << 7;
    pub(crate) const PATH_MTU: u32 = 1 << 8;
    pub(crate) const TIMEOUT: u32 = 1 << 9;
    pub(crate) const RETRY_CNT: u32 = 1 << 10;
    pub(crate) const RNR_RETRY: u32 = 1 << 11;
    pub(crate) const RQ_PSN: u32 = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub(crate) const ALT_PATH: u32 = 1 << 14;
    pub(crate) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(crate) const SQ_PSN: u32 = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(crate) const PATH_MIG_STATE: u32 = 1 << 18;
    pub(crate) const DEST_QPN: u32 = 1 << 20;
}

/// Returns the service of a queue pair of this type (`enum ib_qp_type`).
pub(crate) fn service(qp_type: u8) -> Option<Service> {
    match qp_type {
        2 => Some(Service::Connected),
        3 => Some(Service::Unreliable),
        4 => Some(Service::Datagram),
        _ => None,
    }
}

/// Returns the attributes, including the state, that a queue pair needs to reach `to` from the
/// state before: INIT from RESET, RTR from INIT, RTS from RTR. Returns `None` for other states.
pub(crate) fn needed(service: Service, to: State) -> Option<u32> {
    let from = match to {
        State::Init => State::Reset,
        State::ReadyToReceive => State::Init,
        State::ReadyToSend => State::ReadyToReceive,
        _ => return None,
    };
    attributes(service, from, to).map(|(needed, _)| attribute::STATE | needed)
}

/// Returns the attributes that a transition requires, and the attributes that it may carry in
/// addition; `None` if there is no such transition.
fn attributes(service: Service, from: State, to: State) -> Option<(u32, u32)> {
    use State::*;
    use attribute::*;
    // `of` selects between the attributes of connections and the attributes of datagrams.
    // `reliable` returns its argument for reliable connections, and no attributes for other
    // services.
    let of = |connected, datagram| {
        if service == Service::Datagram {
            datagram
        } else {
            connected
        }
    };
    let reliable = |attributes| {
        if service == Service::Connected {
            attributes
        } else {
            0
        }
    };
    Some(match (from, to) {
        // A queue pair in RESET has nothing to flush.
        (Reset, Error) => return None,
        (_, Reset | Error) => (0, 0),
        (Reset, Init) => (PKEY_INDEX | PORT | of(ACCESS_FLAGS, QKEY), 0),
        (Init, Init) => (0, PKEY_INDEX | PORT | of(ACCESS_FLAGS, QKEY)),
        (Init, ReadyToReceive) => {
            let needed = of(AV | PATH_MTU | DEST_QPN | RQ_PSN, 0)
                | reliable(MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER);
            (needed, PKEY_INDEX | of(ALT_PATH | ACCESS_FLAGS, QKEY))
        }
        (ReadyToReceive, ReadyToSend) => (
            SQ_PSN | reliable(TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC),
            CUR_STATE
                | of(ALT_PATH | ACCESS_FLAGS | PATH_MIG_STATE, QKEY)
                | reliable(MIN_RNR_TIMER),
        ),
        (ReadyToSend, ReadyToSend) => (
            0,
            CUR_STATE
                | of(ACCESS_FLAGS | ALT_PATH | PATH_MIG_STATE, QKEY)
                | reliable(MIN_RNR_TIMER),
        ),
        _ => return None,
    })
}

pub(crate) fn is_legal(service: Service, from: State, to: State, mask: u32) -> bool {
    attributes(service, from, to).is_some_and(|(needed, optional)| {
        mask & needed == needed && mask & !(needed | optional | attribute::STATE) == 0
    })
}

#[cfg(test)]
mod tests {
    use super::State::*;
    use super::*;

    /// The masks that libibverbs' examples pass.
    const INIT: u32 = 0x39;
    const RTR: u32 = 0x12_9181;
    const RTS: u32 = 0x1_2e01;

    #[test]
    fn a_connection_goes_up_step_by_step() {
        let legal = |from, to, mask| is_legal(Service::Connected, from, to, mask);
        assert!(
            legal(Reset, Init, INIT)
                && legal(Init, ReadyToReceive, RTR)
                && legal(ReadyToReceive, ReadyToSend, RTS)
        );
        assert!(!legal(Reset, ReadyToReceive, RTR));
        assert!(!legal(Init, ReadyToSend, RTS));
        assert!(!legal(ReadyToSend, ReadyToReceive, RTR));
        assert!(!legal(Error, ReadyToSend, RTS) && !legal(Error, Init, INIT));
    }

    #[test]
    fn every_state_leads_to_reset_and_every_other_to_error() {
        for from in (0..7).filter_map(State::from_repr) {
            for service in [Service::Connected, Service::Unreliable, Service::Datagram] {
                assert!(is_legal(service, from, Reset, 1));
                assert_eq!(is_legal(service, from, Error, 1), from != Reset, "{from:?}");
                assert!(!is_legal(service, from, Error, 1 | attribute::QKEY));
            }
        }
    }

    #[test]
    fn attributes_are_needed_allowed_or_neither() {
        let legal = |from, to, mask| is_legal(Service::Connected, from, to, mask);
        for bit in (1..21).map(|bit| 1 << bit) {
            assert_eq!(
                legal(Init, ReadyToReceive, RTR & !bit),
                RTR & bit == 0,
                "without {bit:#x}"
            );
        }
        assert!(legal(Init, ReadyToReceive, RTR | attribute::ALT_PATH));
        assert!(!legal(Init, ReadyToReceive, RTR | attribute::QKEY));
        assert!(legal(ReadyToSend, ReadyToSend, attribute::MIN_RNR_TIMER));
        assert!(!legal(ReadyToSend, ReadyToSend, attribute::AV));
    }

    #[test]
    fn unreliable_connections_have_no_retries() {
        let legal = |from, to, mask| is_legal(Service::Unreliable, from, to, mask);
        let rtr = RTR & !(attribute::MAX_DEST_RD_ATOMIC | attribute::MIN_RNR_TIMER);
        let rts = 1 | attribute::SQ_PSN;
        assert!(
            legal(Reset, Init, INIT)
                && legal(Init, ReadyToReceive, rtr)
                && legal(ReadyToReceive, ReadyToSend, rts)
        );
        assert!(!legal(Init, ReadyToReceive, RTR) && !legal(ReadyToReceive, ReadyToSend, RTS));
        assert!(!legal(ReadyToSend, ReadyToSend, attribute::MIN_RNR_TIMER));
    }

    #[test]
    fn datagrams_need_less() {
        let legal = |from, to, mask| is_legal(Service::Datagram, from, to, mask);
        assert!(legal(Reset, Init, 0x71) && !legal(Reset, Init, INIT));
        assert!(legal(Init, ReadyToReceive, 1));
        assert!(
            legal(ReadyToReceive, ReadyToSend, 1 | attribute::SQ_PSN)
                && !legal(ReadyToReceive, ReadyToSend, 1)
        );
        assert!(legal(ReadyToSend, ReadyToSend, attribute::QKEY));
    }

    #[test]
    fn states_have_numbers() {
        assert_eq!(
            (0..9)
                .filter_map(State::from_repr)
                .map(|state| state as u8)
                .collect::<Vec<_>>(),
            [0, 1, 2, 3, 4, 5, 6]
        );
    }
}
