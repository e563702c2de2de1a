#![doc = include_str!("../README.md")]
//!
//! # The files, in the order a call passes them
//! - `config`: the sizes of a network. `mesh`: the memory that all its nodes share.
//! - `node`: calls, received calls, replies; why the lanes never overflow.
//! - `token`: the duty to answer. `error`: what can go wrong, one type per verb.

mod config;
mod error;
mod mesh;
mod node;
mod token;

pub use calls::{CallFailed, SessionEnd};
pub use config::{Config, ConfigError, NODES_MAX};
pub use error::{CallError, ForeignToken};
pub use node::{Node, network, network_by};
pub use shm::wait::WaitStrategy;
pub use token::{CallToken, Token};
