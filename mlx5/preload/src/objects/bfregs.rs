//! BlueFlame registers, assigned to queue pairs as the kernel's mlx5 driver does.
//!
//! A page has four registers. Only the first two are assigned, but libmlx5 numbers all four. Number
//! 0 means no BlueFlame. Each of the last assigned registers is dedicated to one queue pair, and
//! libmlx5 takes no lock for it. The other registers are shared.

use crate::options::errno::Errno;

/// Number of registers of a page that are assigned (`MLX5_NON_FP_BFREGS_PER_UAR`), and number of
/// all registers of a page (`MLX5_BFREGS_PER_UAR`).
const USED: u32 = 2;
const PER_PAGE: u32 = 4;
/// Maximum number of registers of a context (`MLX5_MAX_BFREGS`).
const MAX: u32 = 512;

#[derive(Debug)]
pub(crate) struct Bfregs {
    /// Number of queue pairs of each register that can be assigned.
    users: Vec<u32>,
    /// Index of the first dedicated register. This register and all later registers have at most
    /// one queue pair each.
    first_dedicated: usize,
}

impl Bfregs {
    /// Makes as many registers as a driver requests, rounded up to whole pages. `dedicated` of them
    /// are for one queue pair each.
    ///
    /// # Errors
    /// The same as the kernel's: `EINVAL` if no register is requested, or if no register would be
    /// shared; `ENOMEM` if too many are requested.
    pub(crate) fn new(total: u32, dedicated: u32) -> Result<Self, Errno> {
        Errno(libc::EINVAL).when(total == 0)?;
        Errno(libc::ENOMEM).when(total > MAX)?;
        let total = total.next_multiple_of(USED);
        Errno(libc::EINVAL).when(dedicated > total - 1)?;
        Ok(Self {
            users: vec![0; total as usize],
            first_dedicated: (total - dedicated) as usize,
        })
    }

    pub(crate) fn total(&self) -> u32 {
        self.users.len() as u32
    }

    /// Assigns a register to a queue pair: a free dedicated register if there is one, else the
    /// shared register with the fewest users. Returns the register's number in libmlx5's numbering.
    pub(crate) fn take(&mut self) -> u32 {
        let own = (self.first_dedicated..self.users.len()).find(|&index| self.users[index] == 0);
        let shared = || (1..self.first_dedicated).min_by_key(|&index| self.users[index]);
        let index = own.or_else(shared).unwrap_or(0);
        self.users[index] += 1;
        let index = index as u32;
        index / USED * PER_PAGE + index % USED
    }

    pub(crate) fn give_back(&mut self, register: u32) {
        let index = register / PER_PAGE * USED + register % PER_PAGE;
        if let Some(users) = self.users.get_mut(index as usize) {
            *users = users.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_pairs_get_registers_of_their_own_first_and_then_share_the_others() {
        let mut registers = Bfregs::new(16, 4).unwrap();
        let taken: Vec<_> = (0..17).map(|_| registers.take()).collect();
        assert_eq!(taken[..4], [24, 25, 28, 29]);
        assert_eq!(taken[4..15], [1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21]);
        assert_eq!(taken[15..], [1, 4]);
        registers.give_back(25);
        registers.give_back(9);
        assert_eq!((registers.take(), registers.take()), (25, 9));
    }

    #[test]
    fn as_many_as_the_kernel_allows() {
        assert_eq!(Bfregs::new(15, 4).unwrap().total(), 16);
        assert_eq!(Bfregs::new(0, 0).unwrap_err(), Errno(libc::EINVAL));
        assert_eq!(Bfregs::new(4, 4).unwrap_err(), Errno(libc::EINVAL));
        assert_eq!(Bfregs::new(513, 4).unwrap_err(), Errno(libc::ENOMEM));
    }
}
