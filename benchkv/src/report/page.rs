//! The page: self-contained HTML. It escapes all text of results, and the page may neither run
//! scripts nor load anything.

use std::fmt::Write;

use harness::chart::text::escape;

/// A page under construction.
#[derive(Debug)]
pub(super) struct Page {
    body: String,
}

/// A cell of a table: a text, aligned left, or a figure, aligned right.
#[derive(Debug, Clone)]
pub(super) enum Cell {
    Text(String),
    Figure(String),
}

impl Page {
    pub(super) fn new(title: &str, about: &str) -> Self {
        Self {
            body: format!(
                "<header><h1>{}</h1>\n<p>{}</p></header>\n",
                escape(title),
                escape(about)
            ),
        }
    }

    pub(super) fn heading(&mut self, text: &str, about: &str) {
        let _ = write!(
            self.body,
            "<h2>{}</h2>\n<p>{}</p>\n",
            escape(text),
            escape(about)
        );
    }

    pub(super) fn subheading(&mut self, text: &str, about: &str) {
        let _ = write!(
            self.body,
            "<h3>{}</h3>\n<p>{}</p>\n",
            escape(text),
            escape(about)
        );
    }

    pub(super) fn warnings(&mut self, warnings: &[String]) {
        if !warnings.is_empty() {
            let entries: String = warnings
                .iter()
                .map(|warning| format!("<li>{}</li>", escape(warning)))
                .collect();
            let _ = writeln!(self.body, "<ul class=\"warnings\">{entries}</ul>");
        }
    }

    pub(super) fn conditions(&mut self, conditions: &[(String, String)]) {
        let entry = |(name, value): &(String, String)| {
            format!(
                "<div><dt>{}</dt><dd>{}</dd></div>\n",
                escape(name),
                escape(value)
            )
        };
        let _ = writeln!(
            self.body,
            "<dl class=\"conditions\">\n{}</dl>",
            conditions.iter().map(entry).collect::<String>()
        );
    }

    /// Adds a table, which scrolls by itself where the page is narrow.
    pub(super) fn table(&mut self, header: &[Cell], rows: &[Vec<Cell>]) {
        let row = |tag: &str, cells: &[Cell]| {
            let cell = |cell: &Cell| match cell {
                Cell::Text(text) => format!("<{tag} class=\"text\">{}</{tag}>", escape(text)),
                Cell::Figure(text) => format!("<{tag}>{}</{tag}>", escape(text)),
            };
            format!("<tr>{}</tr>\n", cells.iter().map(cell).collect::<String>())
        };
        let rows: String = rows.iter().map(|cells| row("td", cells)).collect();
        let header = row("th", header);
        let _ = writeln!(
            self.body,
            "<div class=\"scroll\"><table><thead>{header}</thead><tbody>\n{rows}</tbody></table></div>"
        );
    }

    /// Adds charts side by side, as many as fit.
    pub(super) fn charts(&mut self, figures: &[String]) {
        let _ = writeln!(
            self.body,
            "<div class=\"charts\">\n{}</div>",
            figures.concat()
        );
    }

    pub(super) fn end(self, title: &str) -> String {
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <title>{}</title>\n<style>\n{}</style></head>\n<body>\n{}<footer>benchkv {}</footer>\n</body></html>\n",
            escape(title),
            include_str!("style.css"),
            self.body,
            env!("CARGO_PKG_VERSION")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_results_is_only_text() {
        let evil = "</title><script>alert(1)</script>";
        let mut page = Page::new(evil, evil);
        page.heading(evil, evil);
        page.warnings(&[evil.to_owned()]);
        page.conditions(&[(evil.to_owned(), evil.to_owned())]);
        page.table(
            &[Cell::Text(evil.to_owned())],
            &[vec![Cell::Figure(evil.to_owned())]],
        );
        let html = page.end(evil);
        assert!(
            !html.contains("<script") && html.matches("&lt;script").count() == 10,
            "{html}"
        );
    }
}
