//! An empty library: its `Cargo.toml` lists the packages that cargo is to fetch.
