//! An empty library: its `Cargo.toml` names the packages that cargo is to fetch.
