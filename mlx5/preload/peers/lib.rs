//! Only names what cargo is to fetch: see `Cargo.toml`.
