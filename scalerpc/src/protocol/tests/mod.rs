//! Real servers and real clients in a world of plain memory, in which every operation is executed when the test says so.

mod bounds;
mod defects;
mod explore;
mod workers;
mod world;
mod worlds;
