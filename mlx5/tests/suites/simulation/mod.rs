//! Simulations in virtual time, and operations that are executed after a delay.

mod nic_model;
mod simulated;
mod virtual_time;
