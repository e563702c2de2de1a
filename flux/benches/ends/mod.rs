//! The ends of flux under the load of `harness`, for the benchmarks here and in `benchkv/peers`:
//! node 0 calls node 1.

use benchkv_harness::Failure;
use benchkv_harness::load::{Answerer, Caller, Payload};
use flux::{CallError, Config, Node, network};

pub(crate) struct FluxCaller(Node<Payload, u32>);
pub(crate) struct FluxAnswerer(Node<Payload, u32>);

pub(crate) struct Network {
    pub(crate) caller: FluxCaller,
    pub(crate) answerer: FluxAnswerer,
    /// Idle nodes, kept because their drop would be an event for the other nodes.
    _idle: Vec<Node<Payload, u32>>,
}

impl Network {
    pub(crate) fn new(nodes: usize, config: Config) -> Result<Self, Failure> {
        let mut nodes = network(nodes, config)?.into_iter();
        let (caller, answerer) = nodes
            .next()
            .zip(nodes.next())
            .ok_or("a network of fewer than two nodes")?;
        Ok(Self {
            caller: FluxCaller(caller),
            answerer: FluxAnswerer(answerer),
            _idle: nodes.collect(),
        })
    }
}

impl Answerer for FluxAnswerer {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        Ok(self.0.step(|_, _| {}, |_, request| f(request)))
    }
}

impl Caller for FluxCaller {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        match self.0.call(1, request, slot) {
            Ok(_) => Ok(true),
            Err(CallError::Full { .. }) => Ok(false),
            Err(_) => Err("node 1 is gone".into()),
        }
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let mut failed = None;
        let taken = self.0.poll(|slot, outcome| match outcome {
            Ok(reply) => f(slot, reply),
            Err(gone) => failed = Some(gone),
        });
        failed.map_or(Ok(taken), |gone| Err(gone.into()))
    }
}
