#![doc = include_str!("../README.md")]
//!
//! # The files, in the order a call passes them
//! - `mesh`: the memory that all nodes share, and its sizes.
//! - `node`: calls, received calls, replies; why the lanes never overflow.
//! - `error`: what can go wrong, one type per verb.

mod error;
mod mesh;
mod node;

pub use error::{CallError, CallFailed, ConfigError, ForeignToken};
pub use mesh::{Config, NODES_MAX};
pub use node::{Node, Token, network};
