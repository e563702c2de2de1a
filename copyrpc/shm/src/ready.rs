//! Polling many lanes at the price of the busy lanes.
//!
//! A consumer of N lanes polls only the **hot** lanes. A lane that has been idle for about a
//! millisecond is made **cold**: its `armed` flag is raised. The next producer that publishes there
//! sees the flag and sets the lane's bit in [`ReadyWords`]. The consumer drains the bits, which
//! makes the lane hot again. So a busy lane costs one load per pass and no read-modify-write, an
//! idle lane nothing.
//!
//! | word | writer | reader | pairing |
//! |---|---|---|---|
//! | `armed` (one per lane, the user's) | consumer | producer | **R1**: publish, [`LightBarrier`], load `armed` / store `armed`, [`heavy_barrier`], check again: either the producer sees the flag or the consumer sees the message |
//! | bit word | producers `fetch_or` | consumer `swap(0)` | **R2**: AcqRel both, the message published before the bit is visible after the swap |
//! | summary word | producers `fetch_or` after the bit | consumer `swap(0)` before the words | **R3**: AcqRel, as R2 |
//!
//! A producer stopped between any two of these steps delays its own lane only.

use core::ptr::NonNull;

use crate::sync::{AtomicU32, AtomicU64, LightBarrier, Ordering, heavy_barrier};

/// Value of `armed`: the consumer polls the lane, so its producer sets no ready bit.
pub const HOT: u32 = 0;
/// Value of `armed`: the consumer does not poll the lane, and waits for its ready bit.
pub const ARMED: u32 = 1;

/// A bit per lane in words of 64, and a summary word, in memory shared by the consumer and all
/// producers. Bit `b` of the summary word is for the words `b`, `b + 64`, `b + 128` and so on. Zero
/// bytes are "none ready".
#[derive(Debug, Clone, Copy)]
pub struct ReadyWords {
    base: NonNull<AtomicU64>,
    lanes: usize,
}

// SAFETY: a `ReadyWords` is a view of shared atomics, which any thread may use. The memory stays
// mapped as long as the view is used (contract of `new`).
unsafe impl Send for ReadyWords {}

impl ReadyWords {
    /// Returns the number of 64-bit words that `lanes` lanes take: the summary word, then the bit
    /// words.
    #[must_use]
    pub const fn words(lanes: usize) -> usize {
        1 + lanes.div_ceil(64)
    }

    /// Makes a view of the words at `base`.
    ///
    /// # Safety
    /// `base` points to [`words(lanes)`](Self::words) atomics that stay mapped as long as this
    /// value or a copy is used. There is one lane at least.
    #[must_use]
    pub const unsafe fn new(base: NonNull<AtomicU64>, lanes: usize) -> Self {
        Self { base, lanes }
    }

    #[inline(always)]
    fn summary(&self) -> &AtomicU64 {
        // SAFETY: the caller of `new` guaranteed `words(lanes)` words, of which this is the first.
        unsafe { self.base.as_ref() }
    }

    /// Returns the bit word of the lanes from `64 x index` on.
    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: callers pass an index below `words(lanes) - 1`; the caller of `new` guaranteed
        // `words(lanes)` words.
        unsafe { &*self.base.as_ptr().add(1 + index) }
    }

    /// Producer: sets the lane's bit after publishing to `lane`, if the consumer does not poll the
    /// lane (R1, R2, R3). Returns whether the bit was set, so that a sleeping consumer can be
    /// woken.
    #[inline(always)]
    pub fn notify_if_armed(&self, lane: usize, armed: &AtomicU32) -> bool {
        self.notify_if_armed_behind(LightBarrier::of_process(), lane, armed)
    }

    /// Like [`notify_if_armed`](Self::notify_if_armed), for a producer that keeps the
    /// [`LightBarrier`] of its process.
    #[inline(always)]
    pub fn notify_if_armed_behind(
        &self,
        barrier: LightBarrier,
        lane: usize,
        armed: &AtomicU32,
    ) -> bool {
        barrier.execute();
        if armed.load(Ordering::Relaxed) != ARMED {
            return false;
        }
        self.set(lane);
        true
    }

    /// Producer: sets the bit of `lane`, whether the consumer polls the lane or not (R2, R3).
    pub fn notify(&self, lane: usize) {
        if lane < self.lanes {
            self.set(lane);
        }
    }

    /// Consumer: returns whether a lane is ready. After a flag was raised and a [`heavy_barrier`]
    /// executed, `false` means that a producer that notifies from now on sees the flag.
    #[must_use]
    #[inline(always)]
    pub fn any(&self) -> bool {
        self.summary().load(Ordering::Acquire) != 0
    }

    #[cold]
    fn set(&self, lane: usize) {
        debug_assert!(lane < self.lanes);
        let word = lane / 64;
        // R2 then R3: the consumer that drains the summary bit finds the lane's bit.
        self.word(word).fetch_or(1 << (lane % 64), Ordering::AcqRel);
        self.summary().fetch_or(1 << (word % 64), Ordering::AcqRel);
    }

    /// Consumer: takes all set bits and calls `f` with each lane. Bits beyond the number of lanes
    /// (a peer's garbage) are dropped.
    #[inline(always)]
    pub fn drain(&self, mut f: impl FnMut(usize)) {
        // Nearly always no bit is set: then this load is the whole cost.
        if self.summary().load(Ordering::Relaxed) != 0 {
            self.drain_words(&mut f);
        }
    }

    #[cold]
    fn drain_words(&self, f: &mut impl FnMut(usize)) {
        let bit_words = self.lanes.div_ceil(64);
        for word in bits(self.summary().swap(0, Ordering::AcqRel))
            .flat_map(|first| (first..bit_words).step_by(64))
        {
            if self.word(word).load(Ordering::Relaxed) != 0 {
                let set = self.word(word).swap(0, Ordering::AcqRel);
                bits(set)
                    .map(|b| word * 64 + b)
                    .filter(|&lane| lane < self.lanes)
                    .for_each(&mut *f);
            }
        }
    }
}

fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let bit = word
            .checked_sub(1)
            .map(|_| word.trailing_zeros() as usize)?;
        word &= word - 1;
        Some(bit)
    })
}

/// The announcements to a consumer: each identifies a cold lane that may have messages.
pub trait Wakes {
    /// Returns whether there is something to [`drain`](Self::drain). After a flag was raised and a
    /// [`heavy_barrier`] executed, `false` means that a producer that announces from now on sees
    /// the flag.
    fn any(&self) -> bool;
    /// Takes all announcements, and calls `f` with the lane of each. The lane may be empty.
    fn drain(&mut self, f: impl FnMut(usize));
    /// Does work that is due once in 64 passes, if there is nothing to drain.
    #[inline(always)]
    fn rest(&mut self) {}
}

impl Wakes for ReadyWords {
    #[inline(always)]
    fn any(&self) -> bool {
        Self::any(self)
    }

    fn drain(&mut self, f: impl FnMut(usize)) {
        Self::drain(self, f);
    }
}

/// The consumer's lanes, as a [`HotSet`] sees them.
pub trait Lanes {
    /// Returns whether a message waits in `lane`.
    fn is_ready(&self, lane: usize) -> bool;
    /// Returns the lane's `armed` word; `None` if the lane is gone.
    fn armed(&self, lane: usize) -> Option<&AtomicU32>;
}

#[derive(Debug, Clone, Copy)]
struct Hot {
    lane: usize,
    /// Epochs that have ended since a message was last seen.
    idle_epochs: u32,
}

/// The lanes that the consumer polls: its private state. A lane that was never hot must be created
/// with its `armed` word [`ARMED`].
#[derive(Debug)]
pub struct HotSet {
    hot: Vec<Hot>,
    is_hot: Vec<bool>,
    next: usize,
    /// Next lanes that [`mend`](Self::mend) checks: `next_flag` for its flag, `next_look` for
    /// messages.
    next_flag: usize,
    next_look: usize,
    epoch_start_ns: u64,
    passes_to_rest: u32,
    rests_to_clock: u32,
}

/// Maximum number of hot lanes that a pass visits. More lanes take turns.
const LANES_PER_PASS: usize = 8;
/// Maximum number of messages that a visit takes from a lane.
const MESSAGES_PER_LANE: usize = 16;
/// Length of an epoch, in ns. A lane that was idle for one to two epochs becomes cold.
const EPOCH_NS: u64 = 1_000_000;
/// Number of passes between two [rests](Wakes::rest).
const PASSES_PER_REST: u32 = 64;
/// Number of rests between two readings of the clock.
const RESTS_PER_CLOCK: u32 = 4;

impl HotSet {
    /// Number of passes between two reads of the clock.
    pub const PASSES_PER_CLOCK: u32 = PASSES_PER_REST * RESTS_PER_CLOCK;

    /// Makes a set of lanes `0..lanes`, all cold. Later calls do not allocate.
    #[must_use]
    pub fn new(lanes: usize) -> Self {
        Self {
            hot: Vec::with_capacity(lanes),
            is_hot: vec![false; lanes],
            next: 0,
            next_flag: 0,
            next_look: 0,
            epoch_start_ns: 0,
            passes_to_rest: PASSES_PER_REST,
            rests_to_clock: RESTS_PER_CLOCK,
        }
    }

    /// Does one bounded pass: activates the lanes that `wakes` announces, visits some hot lanes,
    /// and sometimes deactivates idle lanes. Returns the number of messages taken. `visit` gets a
    /// lane and a maximum number, takes up to that number of messages of the lane, and returns the
    /// number of messages taken: 0 only if the lane was empty, or is gone. `now_ns` returns the
    /// time of any monotonic clock; few passes call it.
    #[inline(always)]
    pub fn pass<L: Lanes>(
        &mut self,
        wakes: &mut impl Wakes,
        lanes: &mut L,
        mut visit: impl FnMut(&mut L, usize, usize) -> usize,
        now_ns: impl FnOnce() -> u64,
    ) -> usize {
        self.passes_to_rest -= 1;
        let is_odd = self.passes_to_rest == 0 || wakes.any() || self.hot.len() > LANES_PER_PASS;
        let some = if is_odd {
            self.prepare(wakes, lanes, now_ns)
        } else {
            self.hot.as_mut_slice()
        };
        let mut taken = 0;
        for hot in some {
            let n = visit(lanes, hot.lane, MESSAGES_PER_LANE);
            if n > 0 {
                hot.idle_epochs = 0;
                taken += n;
            }
        }
        taken
    }

    /// Does the rare work of a pass, and chooses among many lanes. Returns the lanes to visit.
    #[cold]
    fn prepare(
        &mut self,
        wakes: &mut impl Wakes,
        lanes: &impl Lanes,
        now_ns: impl FnOnce() -> u64,
    ) -> &mut [Hot] {
        if wakes.any() {
            wakes.drain(|lane| self.activate(lane, lanes));
        }
        if self.passes_to_rest == 0 {
            self.rest(wakes, lanes, now_ns);
        }
        if self.hot.len() > LANES_PER_PASS {
            self.some_of_many()
        } else {
            self.hot.as_mut_slice()
        }
    }

    /// Returns the lanes to visit in this pass. The last two passes of a round over all hot lanes
    /// share the lanes that are left evenly, so that no pass visits only a few lanes.
    fn some_of_many(&mut self) -> &mut [Hot] {
        let begin = if self.next < self.hot.len() {
            self.next
        } else {
            0
        };
        let left = self.hot.len() - begin;
        let turn = if left > LANES_PER_PASS {
            left.div_ceil(2).min(LANES_PER_PASS)
        } else {
            left
        };
        self.next = begin + turn;
        self.hot.get_mut(begin..self.next).unwrap_or_default()
    }

    /// Does the work that is due once in [`PASSES_PER_REST`] passes.
    #[cold]
    fn rest(&mut self, wakes: &mut impl Wakes, lanes: &impl Lanes, now_ns: impl FnOnce() -> u64) {
        self.passes_to_rest = PASSES_PER_REST;
        if !wakes.any() {
            wakes.rest();
        }
        self.rests_to_clock -= 1;
        if self.rests_to_clock == 0 {
            self.tick(lanes, now_ns());
        }
    }

    fn activate(&mut self, lane: usize, lanes: &impl Lanes) {
        let (Some(is_hot), Some(armed)) = (self.is_hot.get_mut(lane), lanes.armed(lane)) else {
            return;
        };
        armed.store(HOT, Ordering::Relaxed);
        if !*is_hot {
            *is_hot = true;
            self.hot.push(Hot {
                lane,
                idle_epochs: 0,
            });
        }
    }

    /// R4 (`docs/shm-protocols.md`): activates cold lanes whose announcement was lost, among the
    /// first `count` lanes. Checks the flags of the next `flags` lanes, and activates lanes whose
    /// flag is not [`ARMED`]: a producer may have lowered the flag without an announcement that
    /// arrived, or the flag is garbage. Then checks the next `looks` lanes for messages: the ready
    /// bit may have been overwritten, or a producer in another process did not see the flag
    /// ([`heavy_barrier`]). Each flag and each lane costs the load of a cache line, so do this
    /// rarely.
    pub fn mend(&mut self, lanes: &impl Lanes, count: usize, flags: usize, looks: usize) {
        let count = count.min(self.is_hot.len());
        for _ in 0..flags.min(count) {
            let lane = self.next_flag % count;
            self.next_flag = lane + 1;
            let is_armed = lanes
                .armed(lane)
                .is_none_or(|armed| armed.load(Ordering::Relaxed) == ARMED);
            if !is_armed && self.is_hot.get(lane) == Some(&false) {
                self.activate(lane, lanes);
            }
        }
        for _ in 0..looks.min(count) {
            let lane = self.next_look % count;
            self.next_look = lane + 1;
            if self.is_hot.get(lane) == Some(&false) && lanes.is_ready(lane) {
                self.activate(lane, lanes);
            }
        }
    }

    /// Removes a lane that ends, so that its number can be used again.
    pub fn remove(&mut self, lane: usize) {
        if let Some(is_hot) = self.is_hot.get_mut(lane) {
            *is_hot = false;
            self.hot.retain(|h| h.lane != lane);
        }
    }

    /// Arms every hot lane, before the consumer sleeps. A [`heavy_barrier`] and
    /// [`deactivate`](Self::deactivate) must follow.
    pub fn arm(&self, lanes: &impl Lanes) {
        self.arm_some(lanes, |_| true);
    }

    /// Arms the lanes that are `chosen`. Returns whether at least one lane was armed.
    fn arm_some(&self, lanes: &impl Lanes, chosen: impl Fn(&Hot) -> bool) -> bool {
        let mut any = false;
        for armed in self
            .hot
            .iter()
            .filter(|hot| chosen(hot))
            .filter_map(|hot| lanes.armed(hot.lane))
        {
            armed.store(ARMED, Ordering::Relaxed);
            any = true;
        }
        any
    }

    /// Returns whether all hot lanes are empty. If `may_deactivate`, the empty lanes become cold.
    /// The caller passes `true` only if the lanes were [armed](Self::arm) and a [`heavy_barrier`]
    /// has returned `true` since then (R1), so that a producer that publishes to such a lane from
    /// now on sets its ready bit. All other lanes stay hot.
    #[must_use]
    pub fn deactivate(&mut self, lanes: &impl Lanes, may_deactivate: bool) -> bool {
        self.deactivate_some(lanes, may_deactivate, |_| true)
    }

    /// Like [`deactivate`](Self::deactivate), for the lanes that are `chosen`.
    fn deactivate_some(
        &mut self,
        lanes: &impl Lanes,
        may_deactivate: bool,
        chosen: impl Fn(&Hot) -> bool,
    ) -> bool {
        let (is_hot, mut all_empty) = (&mut self.is_hot, true);
        self.hot.retain(|hot| {
            if !chosen(hot) {
                return true;
            }
            let Some(armed) = lanes.armed(hot.lane) else {
                is_hot[hot.lane] = false;
                return false;
            };
            let is_ready = lanes.is_ready(hot.lane);
            all_empty &= !is_ready;
            let keep = is_ready || !may_deactivate;
            if keep {
                armed.store(HOT, Ordering::Relaxed);
            }
            is_hot[hot.lane] = keep;
            keep
        });
        all_empty
    }

    #[cold]
    fn tick(&mut self, lanes: &impl Lanes, now_ns: u64) {
        self.rests_to_clock = RESTS_PER_CLOCK;
        if now_ns.wrapping_sub(self.epoch_start_ns) < EPOCH_NS {
            return;
        }
        self.epoch_start_ns = now_ns;
        self.hot
            .iter_mut()
            .for_each(|hot| hot.idle_epochs = hot.idle_epochs.saturating_add(1));
        let is_idle = |hot: &Hot| hot.idle_epochs > 1;
        if self.arm_some(lanes, is_idle) {
            // R1: from here a producer sees the flag, or the check below sees its message.
            let may_deactivate = heavy_barrier();
            self.deactivate_some(lanes, may_deactivate, is_idle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(loom))]
    mod real {
        use super::*;

        struct Boxes {
            waiting: Vec<usize>,
            armed: Vec<AtomicU32>,
            visits: Vec<usize>,
        }

        impl Lanes for Boxes {
            fn is_ready(&self, lane: usize) -> bool {
                self.waiting[lane] > 0
            }
            fn armed(&self, lane: usize) -> Option<&AtomicU32> {
                self.armed.get(lane)
            }
        }

        impl Boxes {
            fn visit(&mut self, lane: usize, budget: usize) -> usize {
                self.visits[lane] += 1;
                let n = self.waiting[lane].min(budget);
                self.waiting[lane] -= n;
                n
            }
        }

        fn boxes(n: usize) -> (Boxes, Box<[AtomicU64]>) {
            let b = Boxes {
                waiting: vec![0; n],
                armed: (0..n).map(|_| AtomicU32::new(ARMED)).collect(),
                visits: vec![0; n],
            };
            (
                b,
                (0..ReadyWords::words(n))
                    .map(|_| AtomicU64::new(0))
                    .collect(),
            )
        }

        #[test]
        fn an_idle_lane_is_not_visited_and_wakes_by_its_bit() {
            let n = 5000;
            let (mut lanes, words) = boxes(n);
            // SAFETY: the words outlive the view.
            let mut ready = unsafe { ReadyWords::new(NonNull::from(&*words).cast(), n) };
            let mut set = HotSet::new(n);
            for lane in [0usize, 63, 64, 4095, 4096, n - 1] {
                lanes.waiting[lane] = 3;
                assert!(ready.notify_if_armed(lane, &lanes.armed[lane]));
            }
            let mut clock = 0;
            let mut got = 0;
            for _ in 0..10 * PASSES_PER_REST * RESTS_PER_CLOCK {
                clock += 20_000;
                got += set.pass(&mut ready, &mut lanes, Boxes::visit, || clock);
            }
            assert_eq!(got, 18);
            assert_eq!(
                lanes.visits.iter().filter(|&&v| v > 0).count(),
                6,
                "only notified lanes are visited"
            );
            let before: usize = lanes.visits.iter().sum();
            set.pass(&mut ready, &mut lanes, Boxes::visit, || clock);
            assert_eq!(
                lanes.visits.iter().sum::<usize>(),
                before,
                "cold again after the idle time"
            );
            // A lane in use is not armed, so its producer makes no atomic read-modify-write.
            lanes.waiting[7] = 1;
            assert!(ready.notify_if_armed(7, &lanes.armed[7]));
            assert_eq!(set.pass(&mut ready, &mut lanes, Boxes::visit, || clock), 1);
            assert!(!ready.notify_if_armed(7, &lanes.armed[7]));
        }

        /// A lane without messages that stays hot counts milliseconds; 32 bits suffice for 50 days.
        #[test]
        fn a_lane_that_is_idle_for_months_stays_idle() {
            let (lanes, _) = boxes(1);
            let mut set = HotSet::new(1);
            set.activate(0, &lanes);
            for epoch in 1..4 {
                set.hot
                    .iter_mut()
                    .for_each(|hot| hot.idle_epochs = u32::MAX);
                set.tick(&lanes, epoch * EPOCH_NS);
                assert!(set.hot.iter().all(|hot| hot.idle_epochs > 1));
                set.activate(0, &lanes);
            }
        }

        #[test]
        fn garbage_bits_are_dropped() {
            let (mut lanes, words) = boxes(70);
            for w in &words {
                w.store(u64::MAX, Ordering::Release);
            }
            // SAFETY: the words outlive the view.
            let mut ready = unsafe { ReadyWords::new(NonNull::from(&*words).cast(), 70) };
            let mut seen = vec![];
            ready.drain(|lane| seen.push(lane));
            assert_eq!(seen, (0..70).collect::<Vec<_>>());
            assert_eq!(
                HotSet::new(70).pass(&mut ready, &mut lanes, Boxes::visit, || 0),
                0
            );
        }

        #[test]
        fn many_hot_lanes_are_served_in_turn() {
            let n = 64;
            let (mut lanes, words) = boxes(n);
            // SAFETY: the words outlive the view.
            let mut ready = unsafe { ReadyWords::new(NonNull::from(&*words).cast(), n) };
            let mut set = HotSet::new(n);
            for lane in 0..n {
                lanes.waiting[lane] = 1_000_000;
                ready.notify_if_armed(lane, &lanes.armed[lane]);
            }
            for _ in 0..80 {
                set.pass(&mut ready, &mut lanes, Boxes::visit, || 0);
            }
            assert!(lanes.visits.iter().all(|&v| v == 10), "{:?}", lanes.visits);
        }

        #[test]
        fn a_round_over_any_number_of_hot_lanes_takes_the_fewest_passes_and_none_of_them_is_much_shorter()
         {
            for n in LANES_PER_PASS + 1..=5 * LANES_PER_PASS {
                let (mut lanes, words) = boxes(n);
                // SAFETY: the words outlive the view.
                let mut ready = unsafe { ReadyWords::new(NonNull::from(&*words).cast(), n) };
                let mut set = HotSet::new(n);
                for lane in 0..n {
                    lanes.waiting[lane] = 1_000;
                    ready.notify_if_armed(lane, &lanes.armed[lane]);
                }
                for round in 1..=3 {
                    for _ in 0..n.div_ceil(LANES_PER_PASS) {
                        let looks = set.pass(&mut ready, &mut lanes, Boxes::visit, || 0)
                            / MESSAGES_PER_LANE;
                        assert!(
                            (LANES_PER_PASS / 2..=LANES_PER_PASS).contains(&looks),
                            "{looks} of {n}"
                        );
                    }
                    assert!(
                        lanes.visits.iter().all(|&visits| visits == round),
                        "{n}: {:?}",
                        lanes.visits
                    );
                }
            }
        }
    }

    #[cfg(loom)]
    mod model {
        use super::*;
        use crate::sleep::{Sleep, Sleeper, Watch, Word, wait};
        use loom::sync::Arc;

        struct One {
            message: Arc<AtomicU64>,
            armed: Arc<AtomicU32>,
        }

        impl One {
            fn visit(&mut self, _: usize, _: usize) -> usize {
                self.message.swap(0, Ordering::AcqRel) as usize
            }
        }

        impl Lanes for One {
            fn is_ready(&self, _: usize) -> bool {
                self.message.load(Ordering::Acquire) != 0
            }
            fn armed(&self, _: usize) -> Option<&AtomicU32> {
                Some(&self.armed)
            }
        }

        fn one(armed: u32) -> (ReadyWords, One) {
            let words: &'static [AtomicU64] = Box::leak(
                (0..ReadyWords::words(1))
                    .map(|_| AtomicU64::new(0))
                    .collect(),
            );
            // SAFETY: the words are leaked.
            let ready = unsafe { ReadyWords::new(NonNull::from(&*words).cast(), 1) };
            (
                ready,
                One {
                    message: Arc::new(AtomicU64::new(0)),
                    armed: Arc::new(AtomicU32::new(armed)),
                },
            )
        }

        /// The consumer's second check, or the ready bit, finds the message.
        #[test]
        fn loom_no_wake_up_is_lost_when_a_lane_goes_cold() {
            loom::model(|| {
                let (ready, mut lanes) = one(HOT);
                let (m, a) = (lanes.message.clone(), lanes.armed.clone());
                let producer = loom::thread::spawn(move || {
                    m.store(1, Ordering::Release);
                    ready.notify_if_armed(0, &a);
                });
                let mut set = HotSet::new(1);
                set.activate(0, &lanes);
                set.hot[0].idle_epochs = 1;
                set.tick(&lanes, EPOCH_NS);
                let was_cold = set.hot.is_empty();
                let early = lanes.visit(0, 1);
                producer.join().unwrap();
                let mut woken = false;
                ready.drain(|_| woken = true);
                let waiting = lanes.is_ready(0);
                assert!(
                    early == 1 || !waiting || !was_cold || woken,
                    "a message waits in a cold lane nobody will look at"
                );
            });
        }

        struct Idle<'a> {
            set: &'a mut HotSet,
            lanes: &'a One,
            ready: ReadyWords,
            sleep: &'a Sleep,
        }

        impl Watch for Idle<'_> {
            fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
                show(self.sleep.word());
            }
            fn arm(&mut self) {
                self.set.arm(self.lanes);
            }
            fn look(&mut self, is_told: bool) -> bool {
                !self.set.deactivate(self.lanes, is_told) || self.ready.any()
            }
        }

        /// R1, and W1 and W2 of module `sleep`, together: a consumer that sleeps when its lane is
        /// empty is woken by a message that is published there, and finds it.
        #[test]
        fn loom_no_wake_up_is_lost_when_the_consumer_sleeps() {
            for armed in [HOT, ARMED] {
                loom::model(move || {
                    let (mut ready, mut lanes) = one(armed);
                    let sleep = Arc::new(Sleep::default());
                    let m = lanes.message.clone();
                    let a = lanes.armed.clone();
                    let s = sleep.clone();
                    let producer = loom::thread::spawn(move || {
                        m.store(1, Ordering::Release);
                        if ready.notify_if_armed(0, &a) {
                            s.wake();
                        }
                    });
                    let mut set = HotSet::new(1);
                    if armed == HOT {
                        set.activate(0, &lanes);
                    }
                    let mut idle = Idle {
                        set: &mut set,
                        lanes: &lanes,
                        ready,
                        sleep: &sleep,
                    };
                    assert!(wait([&mut idle as &mut dyn Sleeper], None));
                    // The bit may be set after the message was found in a lane that is polled.
                    let taken = set.pass(&mut ready, &mut lanes, One::visit, || 0);
                    producer.join().unwrap();
                    assert_eq!(taken, 1);
                });
            }
        }
    }
}
