//! HTML document around the charts: header, key figures, tables, styles.

use std::fmt::Write as _;

use kvplane_topology::draw::escape;

use super::chart::Chart;

/// HTML page under construction.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: String,
}

/// Table whose first column names the rows; the other columns hold figures.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Caption of the table.
    pub caption: String,
    /// Headings of the columns.
    pub head: Vec<String>,
    /// Rows, each as long as the head.
    pub rows: Vec<Vec<String>>,
}

impl Page {
    /// Creates a page with a title, and a subtitle that describes the run.
    #[must_use]
    pub fn new(title: &str, subtitle: &str) -> Self {
        let body = format!("<header><h1>{}</h1><p>{}</p></header>\n", escape(title), escape(subtitle));
        Self { title: title.to_owned(), body }
    }

    /// Adds a heading.
    pub fn heading(&mut self, text: &str) {
        let _ = writeln!(self.body, "<h2>{}</h2>", escape(text));
    }

    /// Adds key figures in a row: name, value, and true for an alarm.
    pub fn figures(&mut self, figures: &[(String, String, bool)]) {
        self.body.push_str("<dl class=\"figures\">");
        for (name, value, alarm) in figures {
            let class = if *alarm { " class=\"alarm\"" } else { "" };
            let _ = write!(self.body, "<div{class}><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value));
        }
        self.body.push_str("</dl>\n");
    }

    /// Adds charts side by side, or one below the other where the page is narrow, followed by `note` unless it is
    /// empty.
    pub fn charts(&mut self, charts: &[Chart<'_>], note: &str) {
        self.body.push_str("<div class=\"charts\">");
        for chart in charts {
            self.body.push_str(&chart.to_html());
        }
        if !note.is_empty() {
            let _ = write!(self.body, "<p class=\"note\">{}</p>", escape(note));
        }
        self.body.push_str("</div>\n");
    }

    /// Adds a table that scrolls sideways by itself where the page is narrow.
    pub fn table(&mut self, table: &Table) {
        let _ = write!(
            self.body,
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" \
             aria-label=\"{0}\"><table><caption>{0}</caption><thead><tr>",
            escape(&table.caption)
        );
        for name in &table.head {
            let _ = write!(self.body, "<th scope=\"col\">{}</th>", escape(name));
        }
        self.body.push_str("</tr></thead><tbody>");
        for row in &table.rows {
            self.body.push_str("<tr>");
            for (column, cell) in row.iter().enumerate() {
                let cell = escape(cell);
                let _ = if column == 0 {
                    write!(self.body, "<th scope=\"row\">{cell}</th>")
                } else {
                    write!(self.body, "<td>{cell}</td>")
                };
            }
            self.body.push_str("</tr>");
        }
        self.body.push_str("</tbody></table></div>\n");
    }

    /// Renders the whole document.
    #[must_use]
    pub fn finish(&self) -> String {
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <meta name=\"color-scheme\" content=\"light dark\"><title>{}</title>\
             <style>{STYLE}</style></head>\n<body><main>\n{}</main></body></html>\n",
            escape(&self.title),
            self.body
        )
    }

    /// Returns the content of `<main>`, for tests.
    #[cfg(test)]
    pub(crate) fn body(&self) -> &str {
        &self.body
    }
}

/// Style sheet. The colours are those of Okabe and Ito, which colour-blind readers can tell apart, darkened or
/// lightened for contrast with the background.
const STYLE: &str = "\
:root{--ground:#fff;--panel:#f6f7f9;--ink:#1b1f24;--soft:#59636e;--rule:#d8dde3;--alarm:#b3261e;\
--c0:#0072b2;--c1:#c75300;--c2:#00805f;--c3:#9a4f7f;--c4:#7a6a00;--c5:#2c7da0;--c6:#7a3b00;--c7:#444}\
@media(prefers-color-scheme:dark){:root{--ground:#14171a;--panel:#1d2125;--ink:#e6e9ec;--soft:#a3acb5;--rule:#363c43;\
--alarm:#ff8a80;--c0:#56b4e9;--c1:#f0955a;--c2:#3cc99a;--c3:#e29ac8;--c4:#e5d24a;--c5:#8fd0f0;\
--c6:#d9a066;--c7:#c8c8c8}}\
*{box-sizing:border-box}\
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 \
system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}\
main{max-width:1160px;margin:0 auto;padding:24px 16px 48px}\
h1{font-size:1.6rem;line-height:1.25;margin:0 0 4px}\
h2{font-size:1.15rem;margin:32px 0 12px}\
header p{color:var(--soft);margin:0;overflow-wrap:anywhere}\
p{overflow-wrap:anywhere}\
.note{margin:0;padding:14px;color:var(--soft);align-self:center}\
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(46%,240px),1fr));gap:10px;margin:12px 0 0}\
.figures div{background:var(--panel);border-radius:8px;padding:10px 14px}\
dt{color:var(--soft);font-size:.85rem;line-height:1.3}\
dd{margin:2px 0 0;font-size:1.3rem;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}\
.alarm{outline:2px solid var(--alarm)}.alarm dd{color:var(--alarm)}\
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px}\
figure{margin:0;background:var(--panel);border-radius:8px;padding:14px 14px 8px;display:flex;flex-direction:column}\
figcaption{font-weight:600}\
svg{width:100%;height:auto;display:block;margin-top:auto}\
svg text{font-size:14px;fill:var(--soft)}svg .name{fill:var(--ink)}\
@media(max-width:520px){svg text{font-size:17px}}\
.mid{text-anchor:middle}.end{text-anchor:end}\
.grid{stroke:var(--rule);fill:none;stroke-width:1}.axis{stroke:var(--soft);fill:none;stroke-width:1}\
.line{fill:none;stroke-width:2;stroke-linejoin:round}.line.dashed{stroke-dasharray:6 5}\
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}\
.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}.s6{stroke:var(--c6)}.s7{stroke:var(--c7)}\
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}\
.f4{fill:var(--c4)}.f5{fill:var(--c5)}.f6{fill:var(--c6)}.f7{fill:var(--c7)}\
.legend{list-style:none;display:flex;\
flex-wrap:wrap;gap:2px 14px;margin:4px 0 8px;padding:0;font-size:.85rem;color:var(--soft)}\
.legend li{display:flex;align-items:center;gap:6px}\
.key{width:18px;border-top:3px solid}.key.dashed{border-top-style:dashed}\
.c0{border-color:var(--c0)}.c1{border-color:var(--c1)}.c2{border-color:var(--c2)}.c3{border-color:var(--c3)}\
.c4{border-color:var(--c4)}.c5{border-color:var(--c5)}.c6{border-color:var(--c6)}.c7{border-color:var(--c7)}\
.scroll{overflow-x:auto;margin:12px 0}\
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}\
caption{text-align:left;font-weight:600;padding:0 0 6px}\
th,td{padding:6px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}\
th:first-child{text-align:left;padding-left:0}tbody th{font-weight:400}thead th{color:var(--soft);font-weight:600}";

#[cfg(test)]
mod tests {
    use super::super::well_formed;
    use super::*;

    #[test]
    fn all_input_is_escaped() {
        let bad = "</style><img src=x onerror=\"a\">&";
        let mut page = Page::new(bad, bad);
        page.heading(bad);
        page.charts(&[], bad);
        page.figures(&[(bad.into(), bad.into(), true)]);
        page.table(&Table { caption: bad.into(), head: vec![bad.into()], rows: vec![vec![bad.into()]] });
        well_formed::check(page.body().trim());
        assert!(!page.finish().contains("<img"));
    }

    #[test]
    fn pages_have_no_external_resources_and_no_scripts() {
        let html = Page::new("t", "s").finish();
        for word in ["http:", "https:", "<script", "<link", "url(", "@import"] {
            assert!(!html.contains(word), "{word}");
        }
    }
}
