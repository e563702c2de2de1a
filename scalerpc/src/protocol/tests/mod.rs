//! Real servers and real clients in a world of plain memory, in which the test decides when every
//! operation is executed.

mod bounds;
mod defects;
mod explore;
pub(crate) mod memory;
mod stops;
mod workers;
mod world;
mod worlds;
