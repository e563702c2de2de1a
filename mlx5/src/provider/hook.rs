//! The direct calls to a device without hardware: a doorbell was rung, a completion queue was found empty. Hardware sees the stores itself,
//! and needs no calls.

#[cfg(feature = "soft")]
pub(crate) type Hook = std::rc::Rc<mlx5_hca::Hca>;

#[cfg(not(feature = "soft"))]
pub(crate) use none::Hook;

#[cfg(not(feature = "soft"))]
mod none {
    use shm::sleep::Watch;

    /// No device needs the calls.
    #[derive(Clone)]
    pub(crate) enum Hook {}

    impl Hook {
        pub(crate) fn ring(&self, _offset: usize) {
            match *self {}
        }

        pub(crate) fn empty_poll(&self) -> bool {
            match *self {}
        }

        pub(crate) fn now_ns(&self) -> u64 {
            match *self {}
        }

        pub(crate) fn coarse_now_ns(&self) -> u64 {
            match *self {}
        }

        pub(crate) fn with_watch(&self, _then: &mut dyn FnMut(&mut dyn Watch)) {
            match *self {}
        }
    }
}
