//! The number of words that a poll reads (S19).

use std::cell::Cell;
use std::rc::Rc;

use super::world::small;
use crate::protocol::memory::Memory;
use crate::protocol::tests::memory::HeapMemory;
use crate::protocol::{ClientRegions, Server, ServerConfig, ServerMemory};

/// Memory that counts the words that are read.
#[derive(Debug)]
struct Counting {
    memory: HeapMemory,
    loads: Rc<Cell<usize>>,
}

impl Memory for Counting {
    fn len(&self) -> usize {
        self.memory.len()
    }

    fn load(&self, offset: usize) -> u64 {
        self.loads.set(self.loads.get() + 1);
        self.memory.load(offset)
    }

    fn store(&self, offset: usize, value: u64) {
        self.memory.store(offset, value);
    }

    fn exchange(&self, offset: usize, old: u64, new: u64) -> bool {
        self.memory.exchange(offset, old, new)
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.memory.read(offset, into);
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.memory.write(offset, from);
    }
}

/// Returns the number of words that a single poll of an idle server reads.
fn loads_of_a_poll(clients: u32, group_size: u32) -> usize {
    let config = ServerConfig {
        max_clients: clients,
        group_size,
        ..small()
    };
    let layout = config.layout().unwrap();
    let loads = Rc::<Cell<usize>>::default();
    let region = |bytes| Counting {
        memory: HeapMemory::new(bytes),
        loads: Rc::clone(&loads),
    };
    let memory = ServerMemory {
        entries: region(config.entries_bytes()),
        pools: region(layout.pools_bytes()),
        responses: region(config.responses_bytes()),
    };
    let mut server = Server::new(&config, memory).unwrap();
    for client in 0..u64::from(clients) {
        let regions = ClientRegions {
            requests_addr: client,
            requests_rkey: 1,
            responses_addr: client,
            responses_rkey: 2,
        };
        server.join(regions).unwrap();
    }
    loads.set(0);
    server.poll(0, &mut Vec::new());
    loads.get()
}

/// Two words of each entry of the current group, and of 64 others: there is no next group while no
/// client waits.
#[test]
fn an_idle_poll_costs_the_same_with_any_number_of_clients() {
    let (group_size, largest_group) = (40, 60);
    for clients in [200, 2_000, 20_000] {
        let loads = loads_of_a_poll(clients, group_size);
        assert!(
            (2 * 64..=2 * (64 + largest_group)).contains(&loads),
            "{loads} with {clients} clients"
        );
    }
}
