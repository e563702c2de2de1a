//! Plain types that several modules share.
//!
//! - `info`: the description of a device. `request`: the parameters of commands. `terms`: what both
//!   ends of a connection have to agree in. `outcome`: the results of WQEs. `vendor`, `rule`: the
//!   vendor syndromes, which give the reasons of failures. `watch`: the state of strict mode.

/// Makes enums of vendor syndromes from a table: the number and the meaning of each.
macro_rules! syndromes {
    ($($(#[$of:meta])* $vis:vis enum $name:ident {
        $($(#[$doc:meta])* $variant:ident = $number:literal: $text:literal,)*
    })*) => {$(
        $(#[$of])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        $vis enum $name {
            $($(#[$doc])* $variant = $number,)*
        }

        impl $name {
            pub(crate) const TEXTS: &[(u8, &str)] = &[$(($number, $text)),*];
        }
    )*};
}

pub(crate) mod info;
pub(crate) mod outcome;
pub(crate) mod request;
pub(crate) mod rule;
pub(crate) mod terms;
pub(crate) mod vendor;
pub(crate) mod watch;
