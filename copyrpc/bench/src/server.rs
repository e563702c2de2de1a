//! The answerer: a thread that polls and answers, while the main thread of its process sleeps in
//! the exchange.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender};

use bench::load::Failure;
use bench::pattern::{self, Tag};
use bench::program::Fault;
use copyrpc::{Context, RecvBytes, Reply};
use harness::affinity::pin_current_thread;

use crate::options::{Job, Options};
use crate::setup::{Counts, Moment, Setup};

/// The main thread's message to the answering thread: the number of phases that are over, or
/// [`STOP`].
#[derive(Debug, Default)]
pub(crate) struct Control(AtomicUsize);

const STOP: usize = usize::MAX;

impl Control {
    /// Asks for what was done since the last phase ended; the caller has nothing outstanding.
    pub(crate) fn end_phase(&self, phase: usize) {
        self.0.store(phase, Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) {
        self.0.store(STOP, Ordering::Relaxed);
    }
}

/// A message of the answering thread to the main thread.
pub(crate) enum News {
    /// The records of its endpoints.
    Open {
        device: String,
        records: Vec<u8>,
    },
    Connected,
    /// A phase is over; what was done in it, and requests that were not the right ones since the
    /// start.
    Phase {
        counts: Counts,
        bad_requests: u64,
    },
}

/// Answers until told to stop.
pub(crate) fn serve(
    options: &Options,
    core: Option<usize>,
    control: &Control,
    tell: &Sender<News>,
    records: &Receiver<Vec<u8>>,
) -> Result<(), Failure> {
    if let Some(core) = core {
        pin_current_thread(core)?;
    }
    let setup = Setup::open(options)?;
    // Whether the main thread still listens shows in `control`.
    let _ = tell.send(News::Open {
        device: setup.device(),
        records: setup.records(),
    });
    let Ok(records) = records.recv() else {
        return Ok(());
    };
    let (context, _endpoints) = setup.connect(&records)?;
    let _ = tell.send(News::Connected);
    let mut answers = Answers::new(&options.job);
    let (mut phase, mut before) = (0, Moment::default());
    loop {
        if answers.step(&context)? {
            continue;
        }
        match control.0.load(Ordering::Relaxed) {
            STOP => return Ok(()),
            now if now != phase => {
                phase = now;
                let after = Moment::now(&context);
                let _ = tell.send(News::Phase {
                    counts: Counts::between(&before, &after),
                    bad_requests: answers.bad_requests,
                });
                before = after;
            }
            _ => {}
        }
        options.job.wait.idle(&context)?;
    }
}

struct Answers<'a> {
    job: &'a Job,
    request: Vec<u8>,
    reply: Vec<u8>,
    /// The number of the next request, by endpoint.
    next: Vec<u64>,
    bad_requests: u64,
}

impl<'a> Answers<'a> {
    fn new(job: &'a Job) -> Self {
        let (request, reply) = (vec![0; job.payload_bytes], vec![0; job.reply_bytes]);
        Self {
            job,
            request,
            reply,
            next: vec![0; job.endpoints],
            bad_requests: 0,
        }
    }

    /// Answers all requests that are there, and sends the answers at once. Returns whether there
    /// were any.
    #[inline]
    fn step(&mut self, context: &Context<u32>) -> Result<bool, Failure> {
        let mut outcome = Ok(());
        let on_request = |request: RecvBytes<'_>, reply: Reply<'_, u32>| {
            if let Err(error) = self.answer(request, reply) {
                outcome = Err(error);
            }
        };
        let taken = context.serve(on_request, |_, _| ())?;
        outcome.map(|()| taken > 0)
    }

    #[inline]
    fn answer(&mut self, bytes: RecvBytes<'_>, reply: Reply<'_, u32>) -> Result<(), Failure> {
        if self.job.verify {
            let tag = pattern::copied(bytes, &mut self.request).map(Tag::of_request);
            let is_right =
                tag.is_some_and(|tag| pattern::is_request(&self.request, tag) && self.is_next(tag));
            self.bad_requests += u64::from(!is_right);
            if let Some(tag) = tag {
                pattern::fill_reply(&mut self.reply, tag);
                Fault::CorruptReply.inject(self.job.fault, tag.number(), &mut self.reply);
            }
        } else {
            pattern::touch(bytes);
        }
        reply
            .send(&self.reply)
            .map_err(|error| format!("a reply was refused: {error}").into())
    }

    /// Returns whether this request is the next in turn. A request shorter than a tag cannot be
    /// told apart.
    fn is_next(&mut self, tag: Tag) -> bool {
        if self.request.len() < 8 {
            return true;
        }
        let Some(next) = self.next.get_mut(tag.endpoint()) else {
            return false;
        };
        let is_next = *next == tag.number();
        *next = tag.number() + 1;
        is_next
    }
}
