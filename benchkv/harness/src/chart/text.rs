//! Text in SVG and HTML.

/// Escapes text for use between tags and in attributes. Characters that are illegal in a page
/// become U+FFFD.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\'' => safe += "&#39;",
            '\n' | '\t' => safe.push(' '),
            control if control.is_control() => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_only_text() {
        assert_eq!(
            escape("<b a=\"1\" c='&'>\u{0}\n\u{b5}"),
            "&lt;b a=&quot;1&quot; c=&#39;&amp;&#39;&gt;\u{fffd} \u{b5}"
        );
    }
}
