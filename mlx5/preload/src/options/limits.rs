//! Limits of the device that are lower than those of the software HCA, `--limit KEY=N`. The keys
//! are names of `struct ibv_device_attr`, and `max_inline_data`.

use strum::VariantNames;

use super::faults::number;

#[derive(
    Clone, Copy, Debug, PartialEq, Eq, strum::EnumString, VariantNames, strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Limit {
    MrSize,
    Mr,
    Qp,
    QpWr,
    QpRdAtom,
    Sge,
    InlineData,
    Cq,
    Cqe,
    Srq,
    SrqWr,
    SrqSge,
}

/// Parses `max_…=N`.
pub(crate) fn parse(text: &str) -> Result<(Limit, u64), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    let limit = key.strip_prefix("max_").and_then(|name| name.parse().ok());
    let limit = limit.ok_or_else(|| {
        let legal = Limit::VARIANTS.join(", max_");
        format!("`{key}` is not a limit; legal are max_{legal}")
    })?;
    Ok((limit, number(value, "a number")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_the_names_of_verbs() {
        assert_eq!(parse("max_sge=1"), Ok((Limit::Sge, 1)));
        assert_eq!(parse("max_qp_rd_atom=4"), Ok((Limit::QpRdAtom, 4)));
        assert!(parse("max=1").unwrap_err().contains("max_inline_data"));
        assert!(parse("max_qp").unwrap_err().contains("``"));
    }
}
