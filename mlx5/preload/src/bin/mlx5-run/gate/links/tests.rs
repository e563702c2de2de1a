//! Two gates with a session each, through a network that loses, doubles and delays messages.

use std::collections::BTreeMap;

use mlx5_hca::network::Random;

use super::*;

const SERVICE: u64 = 0x106_1ce8;
/// Time in which all links end, even if most messages are lost.
const END_MS: u64 = 100_000;

fn address(end: usize) -> IpAddr {
    [10, 77, 0, 1 + end as u8].into()
}

/// Behaviour of the two programs: the passive end's answer to a request, and the end that
/// disconnects.
#[derive(Clone, Copy, Debug)]
struct Script {
    is_datagram: bool,
    rejects: bool,
    /// Whether the passive end disconnects.
    passive_ends: bool,
    /// Whether the end that disconnects dies instead, and so sends no message.
    dies: bool,
    answers_after_ms: u64,
}

/// A gate, and its only session.
struct End {
    links: Links,
    id: Option<u32>,
    is_open: bool,
    heard: Vec<CmKind>,
}

impl End {
    fn new() -> Self {
        Self {
            links: Links::new(),
            id: None,
            is_open: true,
            heard: Vec::new(),
        }
    }
}

struct World {
    random: Random,
    ends: [End; 2],
    script: Script,
    loss_percent: u64,
    /// Messages under way, by time and number: the receiver, and the message.
    network: BTreeMap<(u64, u64), (usize, Mad)>,
    /// Messages that sessions will send; `None` if the session ends.
    sayings: BTreeMap<(u64, u64), (usize, Option<Mad>)>,
    events: u64,
}

impl World {
    fn later(&mut self, at_ms: u64) -> (u64, u64) {
        self.events += 1;
        (at_ms, self.events)
    }

    fn says(&mut self, at_ms: u64, end: usize, kind: CmKind) {
        let mut mad = Mad::new(kind);
        if kind == CmKind::ServiceRequest {
            mad.set(field::SIDR_REQ_SERVICE, SERVICE);
        } else if kind == CmKind::Request {
            mad.set(field::REQ_SERVICE, SERVICE);
        }
        let key = self.later(at_ms);
        self.sayings.insert(key, (end, Some(mad)));
    }

    /// Schedules the answers of a session to a message of this kind, as the script determines.
    fn answers(&mut self, now_ms: u64, end: usize, kind: CmKind) {
        let script = self.script;
        let soon = now_ms + script.answers_after_ms;
        let is_first = (end == 1) == script.passive_ends;
        match kind {
            CmKind::Request if script.rejects => self.says(soon, end, CmKind::Reject),
            CmKind::Request => self.says(soon, end, CmKind::Reply),
            CmKind::ServiceRequest => self.says(soon, end, CmKind::ServiceReply),
            CmKind::Reply => self.says(soon, end, CmKind::ReadyToUse),
            CmKind::DisconnectRequest => self.says(soon, end, CmKind::DisconnectReply),
            _ => {}
        }
        let is_established = matches!(kind, CmKind::Reply | CmKind::ReadyToUse);
        if is_established && is_first && script.dies {
            let key = self.later(soon + 1000);
            self.sayings.insert(key, (end, None));
        } else if is_established && is_first {
            self.says(soon + 1000, end, CmKind::DisconnectRequest);
        }
    }

    fn act(&mut self, now_ms: u64, end: usize) {
        for action in std::mem::take(&mut self.ends[end].links.actions) {
            match action {
                Action::Send(to, mad) => {
                    assert_eq!(to, address(1 - end));
                    let copies = match self.random.below(100) {
                        lot if lot < self.loss_percent => 0,
                        lot if lot > 80 => 2,
                        _ => 1,
                    };
                    for _ in 0..copies {
                        let delay_ms = 1 + self.random.below(400);
                        let key = self.later(now_ms + delay_ms);
                        self.network.insert(key, (1 - end, mad));
                    }
                }
                Action::Tell(id, from, mad) => {
                    assert_eq!((Some(id), from), (self.ends[end].id, address(1 - end)));
                    if self.ends[end].is_open {
                        self.ends[end].heard.push(mad.kind());
                        self.answers(now_ms, end, mad.kind());
                    }
                }
                Action::Close(id) => assert_eq!(Some(id), self.ends[end].id),
            }
        }
    }

    /// Returns the time of the next event.
    fn next_ms(&self) -> Option<u64> {
        let network = self.network.keys().map(|key| key.0).next();
        let sayings = self.sayings.keys().map(|key| key.0).next();
        let due = self.ends.iter().filter_map(|end| end.links.due_ms());
        network.into_iter().chain(sayings).chain(due).min()
    }

    /// Runs until nothing is left to do. Returns the kinds of the messages that each of the two
    /// sessions received.
    fn run(mut self) -> [Vec<CmKind>; 2] {
        let kind = if self.script.is_datagram {
            CmKind::ServiceRequest
        } else {
            CmKind::Request
        };
        self.says(0, 0, kind);
        while let Some(now_ms) = self.next_ms() {
            assert!(now_ms < END_MS, "repeats have an end");
            while let Some(entry) = self.sayings.first_entry().filter(|e| e.key().0 <= now_ms) {
                let (end, saying) = entry.remove();
                let one = &mut self.ends[end];
                match (saying, one.id) {
                    _ if !one.is_open => {}
                    (Some(mad), None) => one.id = one.links.ask(now_ms, address(1 - end), mad),
                    (Some(mad), Some(id)) => one.links.say(now_ms, id, mad),
                    (None, Some(id)) => {
                        one.is_open = false;
                        one.links.end(now_ms, id);
                    }
                    (None, None) => unreachable!(),
                }
                self.act(now_ms, end);
            }
            while let Some(entry) = self.network.first_entry().filter(|e| e.key().0 <= now_ms) {
                let (end, mad) = entry.remove();
                let one = &mut self.ends[end];
                let id = &mut one.id;
                one.links
                    .hear(now_ms, address(1 - end), mad, |new, service| {
                        assert_eq!((service, *id), (SERVICE, None), "one connection");
                        *id = Some(new);
                        Opened::Yes
                    });
                self.act(now_ms, end);
            }
            for end in 0..2 {
                if self.ends[end]
                    .links
                    .due_ms()
                    .is_some_and(|due| due <= now_ms)
                {
                    self.ends[end].links.tick(now_ms);
                    self.act(now_ms, end);
                }
            }
        }
        let links = self.ends.each_ref().map(|end| end.links.by_id.len());
        assert_eq!(links, [0, 0], "{:?}", self.script);
        self.ends.map(|end| end.heard)
    }
}

fn world(seed: u64, loss_percent: u64, script: Script) -> World {
    World {
        random: Random::new(seed),
        ends: [End::new(), End::new()],
        script,
        loss_percent,
        network: BTreeMap::new(),
        sayings: BTreeMap::new(),
        events: 0,
    }
}

#[test]
fn each_message_is_passed_on_once_and_in_order_although_many_are_lost_doubled_or_late() {
    use CmKind::*;
    for seed in 0..150 {
        let script = Script {
            is_datagram: seed % 5 == 4,
            rejects: seed % 5 == 3,
            passive_ends: seed % 2 == 0,
            dies: seed % 3 == 0,
            answers_after_ms: [0, 150, 5000][seed as usize % 3],
        };
        let [active, passive] = world(seed, 25, script).run();
        let (first, second): (&[_], &[_]) = match script {
            Script {
                is_datagram: true, ..
            } => (&[ServiceReply], &[ServiceRequest]),
            Script { rejects: true, .. } => (&[Reject], &[Request]),
            Script {
                passive_ends: true,
                dies: true,
                ..
            } => (&[Reply, DisconnectRequest], &[Request, ReadyToUse]),
            Script {
                passive_ends: true, ..
            } => (
                &[Reply, DisconnectRequest],
                &[Request, ReadyToUse, DisconnectReply],
            ),
            Script { dies: true, .. } => (&[Reply], &[Request, ReadyToUse, DisconnectRequest]),
            _ => (
                &[Reply, DisconnectReply],
                &[Request, ReadyToUse, DisconnectRequest],
            ),
        };
        assert_eq!(
            (&active[..], &passive[..]),
            (first, second),
            "{seed}: {script:?}"
        );
    }
}

fn request(id: u64) -> Mad {
    let mut mad = Mad::new(CmKind::Request);
    mad.set(field::LOCAL_ID, id);
    mad.set(field::REQ_SERVICE, SERVICE);
    mad
}

fn sent(links: &mut Links) -> Vec<(CmKind, u64)> {
    let actions = std::mem::take(&mut links.actions);
    let mads = actions.iter().filter_map(|action| match action {
        Action::Send(_, mad) => Some((mad.kind(), mad.get(field::REJ_REASON))),
        _ => None,
    });
    mads.collect()
}

#[test]
fn a_request_is_sent_a_limited_number_of_times_and_its_session_is_left_to_its_own_limit() {
    let mut links = Links::new();
    let id = links.ask(0, address(1), request(0)).unwrap();
    let mut times = vec![0];
    while let Some(due_ms) = links.due_ms() {
        links.tick(due_ms);
        times.push(due_ms);
    }
    assert_eq!(sent(&mut links).len() as u32, SENDS);
    assert_eq!(times[..4], [0, 200, 600, 1400]);
    assert!(times[SENDS as usize - 1] < 60_000, "{times:?}");
    links.end(0, id);
    assert!(links.by_id.is_empty());
}

#[test]
fn a_request_without_a_listener_is_rejected_or_waits_for_one() {
    let mut links = Links::new();
    for (opened, answers) in [
        (Opened::NoService, &[(CmKind::Reject, 8)][..]),
        (Opened::Full, &[(CmKind::Reject, 28)]),
        (Opened::NotYet, &[]),
    ] {
        links.hear(0, address(0), request(7), |_, _| opened);
        assert_eq!(sent(&mut links), answers);
    }
    assert!(links.by_id.is_empty(), "and nothing is kept");
}

/// A stranger does not know the numbers of a connection, or is at another address.
#[test]
fn messages_of_strangers_change_nothing() {
    let mut links = Links::new();
    let own = u64::from(links.ask(0, address(1), request(0)).unwrap());
    links.actions.clear();
    let all = (0x10..=0x18).filter_map(|id| {
        let mut bytes = *Mad::new(CmKind::Wait).bytes();
        bytes[17] = id;
        Mad::parse(&bytes)
    });
    for mut mad in all {
        for (peer, local) in [(address(0), own), (address(1), own ^ 1), (address(0), 0)] {
            if mad.kind() == CmKind::ServiceReply {
                mad.set(field::LOCAL_ID, local);
            } else {
                mad.set(field::REMOTE_ID, local);
            }
            links.hear(0, peer, mad, |_, _| Opened::NoService);
            let told = links.actions.iter();
            assert!(
                told.clone()
                    .all(|action| matches!(action, Action::Send(..)))
            );
            links.actions.clear();
        }
    }
    let states: Vec<_> = links.by_id.values().map(|link| link.state).collect();
    assert_eq!(states, [State::Requesting]);
    // A reply to a datagram's request does not answer the request of a connection, and the reverse.
    let mut reply = Mad::new(CmKind::ServiceReply);
    reply.set(field::LOCAL_ID, own);
    links.hear(0, address(1), reply, |_, _| Opened::NoService);
    assert!(links.actions.is_empty());
}

/// Messages of strangers neither fill the memory nor keep other peers out for long.
#[test]
fn links_have_a_limit_and_random_messages_end_in_no_panic() {
    let mut links = Links::new();
    let mut random = Random::new(1);
    for n in 0..3 * MAX_LINKS as u64 {
        let mut bytes = *request(n).bytes();
        bytes[17] = 0x10 + random.below(9) as u8;
        for byte in &mut bytes[24..60] {
            *byte = if random.below(2) == 0 {
                0
            } else {
                random.below(256) as u8
            };
        }
        let mad = Mad::parse(&bytes).unwrap();
        links.hear(n, address(n as usize % 2), mad, |_, _| Opened::Yes);
        assert!(links.by_id.len() <= MAX_LINKS);
        links.actions.clear();
    }
}
