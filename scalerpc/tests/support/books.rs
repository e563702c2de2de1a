//! The requests that a handler has run for.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use scalerpc::{HandlerError, Handlers, RdmaServer};

use super::plan::{WORK, name_and_number, request, response};

#[derive(Debug, Default)]
pub(crate) struct Books {
    /// A bit for each request number, by name of the client.
    executed: HashMap<u64, Vec<u64>>,
    total: u64,
}

/// Returns handlers of a server that answer each request as planned, and the books that they keep.
pub(crate) fn handlers(server: &RdmaServer) -> (Handlers<'static>, Rc<RefCell<Books>>) {
    let mut handlers = Handlers::new(server.max_payload());
    let books = Rc::<RefCell<Books>>::default();
    let kept = Rc::clone(&books);
    handlers.insert(WORK, move |request: &[u8], response: &mut [u8]| {
        let bytes = kept.borrow_mut().execute(request);
        response
            .get_mut(..bytes.len())
            .ok_or(HandlerError)?
            .copy_from_slice(&bytes);
        Ok(bytes.len())
    });
    (handlers, books)
}

impl Books {
    /// Records one run of the handler. Asserts that each request runs once, and nothing else does.
    fn execute(&mut self, bytes: &[u8]) -> Vec<u8> {
        let (name, number) = name_and_number(bytes).expect("a request");
        assert!(
            bytes == request(name, number),
            "request {number} of client {name} came as {bytes:?}"
        );
        let bits = self.executed.entry(name).or_default();
        let (word, bit) = ((number / 64) as usize, 1 << (number % 64));
        bits.resize(bits.len().max(word + 1), 0);
        assert_eq!(
            bits[word] & bit,
            0,
            "request {number} of client {name} ran twice"
        );
        bits[word] |= bit;
        self.total += 1;
        response(name, number)
    }

    /// Returns the number of requests that the handler has run for.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Returns the approximate bytes that the books take. They grow with each call of a client that
    /// stays.
    pub(crate) fn bytes(&self) -> usize {
        let words: usize = self.executed.values().map(Vec::capacity).sum();
        8 * words + self.executed.capacity() * size_of::<(u64, Vec<u64>)>()
    }

    /// Asserts, for a client that has disconnected, that the handler ran for exactly its calls.
    pub(crate) fn close(&mut self, name: u64, made: u64) {
        let executed = self.executed.remove(&name).unwrap_or_default();
        let count: u32 = executed.iter().map(|word| word.count_ones()).sum();
        assert_eq!(
            u64::from(count),
            made,
            "requests of client {name} that ran, and calls that it made"
        );
    }
}
