//! Golden bytes. None comes from this crate's own emitters. Some WQEs were read from a send queue
//! that NVIDIA's libmlx5 (rdma-core 44) had filled. The others follow the structs of
//! `infiniband/mlx5dv.h` and, for fields that it does not define, the Linux kernel. All are emitted
//! over memory filled with 0xa5, so that a missing byte is detected. `tests/mlx5dv_oracle` compares
//! with the header itself.

mod cqe;
mod records;
mod ring;
mod wqe;

/// Parses hexadecimal digits; blanks are for the reader.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| b.is_ascii_hexdigit()).collect();
    digits
        .chunks(2)
        .map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap())
        .collect()
}
