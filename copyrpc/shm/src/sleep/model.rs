//! W1, W2 and W4 of module `sleep`: a consumer is woken by each publication, at whatever point it
//! falls asleep, and falls asleep again.

use loom::sync::Arc;

use super::*;

#[derive(Default)]
struct Shared {
    sleeps: [Sleep; 2],
    published: [Count; 2],
    bell: Bell,
}

struct Count(AtomicU32);

impl Default for Count {
    fn default() -> Self {
        Self(AtomicU32::new(0))
    }
}

impl Shared {
    fn publish(&self, which: usize) {
        self.published[which].0.fetch_add(1, Ordering::Release);
        self.sleeps[which].wake();
    }
}

/// Waits for a number of messages through one of the sleeps.
struct Wanted<'a>(&'a Shared, usize, u32);

impl Watch for Wanted<'_> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.0.sleeps[self.1].word());
    }

    fn look(&mut self, _: bool) -> bool {
        self.0.published[self.1].0.load(Ordering::Acquire) >= self.2
    }
}

fn model(check: impl Fn(Arc<Shared>) + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || check(Arc::default()));
}

#[test]
fn loom_a_sleeper_is_woken_by_what_is_published() {
    model(|shared| {
        let also_shared = Arc::clone(&shared);
        let producer = loom::thread::spawn(move || (0..2).for_each(|_| also_shared.publish(0)));
        for wanted in 1..=2 {
            assert!(wait(
                [&mut Wanted(&shared, 0, wanted) as &mut dyn Sleeper],
                None
            ));
        }
        producer.join().unwrap();
    });
}

/// Each of two producers wakes the sleeper through a word of its own. The sleeper takes one message
/// after the other, from any producer that has sent one.
#[test]
fn loom_a_sleeper_on_two_words_is_woken_through_either() {
    model(|shared| {
        let producers = [0, 1].map(|which| {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || shared.publish(which))
        });
        let mut taken = [0; 2];
        while taken != [1; 2] {
            let [mut one, mut other] = [0, 1].map(|which| Wanted(&shared, which, taken[which] + 1));
            assert!(wait([&mut one as &mut dyn Sleeper, &mut other], None));
            for (which, taken) in taken.iter_mut().enumerate() {
                *taken = shared.published[which].0.load(Ordering::Acquire);
            }
        }
        producers
            .into_iter()
            .for_each(|producer| producer.join().unwrap());
    });
}

/// The listener begins to listen before it reads the data for which the bell is rung.
#[test]
fn loom_a_listener_is_woken_by_a_ring_and_sees_what_was_published_before_it() {
    model(|shared| {
        let also_shared = Arc::clone(&shared);
        let ringer = loom::thread::spawn(move || {
            also_shared.published[0].0.store(1, Ordering::Release);
            also_shared.bell.ring();
        });
        loop {
            let mut heard = shared.bell.listen();
            if shared.published[0].0.load(Ordering::Relaxed) == 1 {
                break;
            }
            assert!(wait(
                [&mut heard as &mut dyn Sleeper, &mut Wanted(&shared, 1, 1)],
                None
            ));
        }
        ringer.join().unwrap();
    });
}
