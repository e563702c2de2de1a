//! Limits of the device that are lower than those of the software HCA, `--limit KEY=N`. The keys
//! are names of `struct ibv_device_attr`, and `max_inline_data`.

use strum::VariantNames;

use super::faults::number;

#[derive(
    Clone, Copy, Debug, PartialEq, Eq, strum::EnumString, VariantNames, strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Limit {
    MaxMrSize,
    MaxMr,
    MaxQp,
    MaxQpWr,
    MaxQpRdAtom,
    MaxSge,
    MaxInlineData,
    MaxCq,
    MaxCqe,
    MaxSrq,
    MaxSrqWr,
    MaxSrqSge,
}

/// Parses `KEY=N`.
pub(crate) fn parse(text: &str) -> Result<(Limit, u64), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    let limit = key.parse().map_err(|_| {
        let legal = Limit::VARIANTS.join(", ");
        format!("`{key}` is not a limit; legal are {legal}")
    })?;
    Ok((limit, number(value, "a number")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_the_names_of_verbs() {
        assert_eq!(parse("max_sge=1"), Ok((Limit::MaxSge, 1)));
        assert_eq!(parse("max_qp_rd_atom=4"), Ok((Limit::MaxQpRdAtom, 4)));
        assert!(parse("max=1").unwrap_err().contains("max_inline_data"));
        assert!(parse("max_qp").unwrap_err().contains("``"));
    }
}
