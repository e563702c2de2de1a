//! Opcodes of packets: the transport in the upper 3 bits, the kind of packet in the lower 5.

/// The transport service of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Transport {
    /// Reliable connection.
    Rc = 0,
    /// Unreliable connection.
    Uc = 1,
    /// Unreliable datagram.
    Ud = 3,
    /// Notifications of congestion, of any service: [`PacketOpcode::CNP`].
    Congestion = 4,
}

/// The kind of a packet.
#[allow(
    missing_docs,
    reason = "the names are those of the specification, table \"OpCode Encoding\""
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum Opcode {
    SendFirst = 0,
    SendMiddle = 1,
    SendLast = 2,
    SendLastImm = 3,
    SendOnly = 4,
    SendOnlyImm = 5,
    WriteFirst = 6,
    WriteMiddle = 7,
    WriteLast = 8,
    WriteLastImm = 9,
    WriteOnly = 10,
    WriteOnlyImm = 11,
    ReadRequest = 12,
    ReadResponseFirst = 13,
    ReadResponseMiddle = 14,
    ReadResponseLast = 15,
    ReadResponseOnly = 16,
    Acknowledge = 17,
    AtomicAcknowledge = 18,
    CompareSwap = 19,
    FetchAdd = 20,
    SendLastInvalidate = 22,
    SendOnlyInvalidate = 23,
}

impl Opcode {
    /// Returns the kind of a packet of a SEND or of a WRITE.
    #[must_use]
    pub const fn of_message(is_write: bool, is_first: bool, is_last: bool, has_imm: bool) -> Self {
        use Opcode::*;
        let [send, write] = match (is_first, is_last, has_imm) {
            (true, false, _) => [SendFirst, WriteFirst],
            (false, false, _) => [SendMiddle, WriteMiddle],
            (false, true, false) => [SendLast, WriteLast],
            (false, true, true) => [SendLastImm, WriteLastImm],
            (true, true, false) => [SendOnly, WriteOnly],
            (true, true, true) => [SendOnlyImm, WriteOnlyImm],
        };
        if is_write { write } else { send }
    }

    /// Returns whether the packet is the first, or the only one, of a SEND or WRITE.
    #[must_use]
    pub const fn begins_message(self) -> bool {
        use Opcode::*;
        matches!(
            self,
            SendFirst
                | SendOnly
                | SendOnlyImm
                | SendOnlyInvalidate
                | WriteFirst
                | WriteOnly
                | WriteOnlyImm
        )
    }

    /// Returns whether the packet is the last, or the only one, of a SEND or WRITE with immediate.
    #[must_use]
    pub const fn has_imm(self) -> bool {
        matches!(
            self,
            Self::SendLastImm | Self::SendOnlyImm | Self::WriteLastImm | Self::WriteOnlyImm
        )
    }

    /// Returns whether the packet contains the rkey to be invalidated.
    #[must_use]
    pub const fn has_invalidate(self) -> bool {
        matches!(self, Self::SendLastInvalidate | Self::SendOnlyInvalidate)
    }

    /// Returns whether the packet has a RETH, the address of remote memory: the first packet of a
    /// WRITE, and a READ request.
    #[must_use]
    pub const fn has_reth(self) -> bool {
        matches!(
            self,
            Self::WriteFirst | Self::WriteOnly | Self::WriteOnlyImm | Self::ReadRequest
        )
    }

    /// Returns whether the packet has an AtomicETH: the request of an atomic operation.
    #[must_use]
    pub const fn has_atomic(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd)
    }

    /// Returns whether the packet answers a request.
    #[must_use]
    pub const fn is_response(self) -> bool {
        self.has_aeth() || matches!(self, Self::ReadResponseMiddle)
    }

    /// Returns whether the packet has an AETH, which acknowledges requests. Of the responses, only
    /// the middle packets of READ responses have none.
    #[must_use]
    pub const fn has_aeth(self) -> bool {
        matches!(
            self,
            Self::ReadResponseFirst
                | Self::ReadResponseLast
                | Self::ReadResponseOnly
                | Self::Acknowledge
                | Self::AtomicAcknowledge
        )
    }
}

/// The opcode of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketOpcode {
    /// The transport service.
    pub transport: Transport,
    /// The kind of packet.
    pub opcode: Opcode,
}

impl PacketOpcode {
    /// A congestion notification (annex A17): a BTH with BECN and 16 reserved bytes, to a sender
    /// whose packets the network marks.
    pub const CNP: Self = Self {
        transport: Transport::Congestion,
        opcode: Opcode::SendMiddle,
    };

    /// Encodes the opcode.
    #[must_use]
    pub const fn to_byte(self) -> u8 {
        (self.transport as u8) << 5 | self.opcode as u8
    }

    /// Decodes the opcode. Returns `None` if this crate does not know it, or its transport has no
    /// such packets: UC has neither READs nor atomics, UD only whole SENDs.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        let opcode = Opcode::from_repr(byte & 31)?;
        let (transport, is_legal) = match byte >> 5 {
            0 => (Transport::Rc, true),
            1 => (Transport::Uc, opcode as u8 <= Opcode::WriteOnlyImm as u8),
            3 => (
                Transport::Ud,
                matches!(opcode, Opcode::SendOnly | Opcode::SendOnlyImm),
            ),
            4 => (Transport::Congestion, opcode == Opcode::SendMiddle),
            _ => return None,
        };
        is_legal.then_some(Self { transport, opcode })
    }
}
