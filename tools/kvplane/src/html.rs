//! Self-contained HTML pages: one file with inline styles and plots in SVG, without scripts or external resources.
//!
//! [`page::Page`] is the document, [`chart::Chart`] a plot. Text from outside (file names, labels) passes through
//! [`escape`](kvplane_topology::draw::escape). Colours follow the reader's light or dark setting; series differ in dash
//! as well as in colour.

pub mod chart;
pub mod page;
pub mod scale;

/// Stand-in for an XML parser in tests: tags close in order, attributes are quoted, entities are known.
#[cfg(test)]
pub(crate) mod well_formed {
    /// Panics unless `xml` is well-formed in the sense above; the message names the position.
    #[track_caller]
    pub(crate) fn check(xml: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = xml;
        while let Some(at) = rest.find('<') {
            text(&rest[..at]);
            let end = rest[at..].find('>').expect("a tag ends") + at;
            let tag = &rest[at + 1..end];
            rest = &rest[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "before {rest:.80}");
                continue;
            }
            let body = tag.strip_suffix('/').unwrap_or(tag);
            let name = body.split(' ').next().unwrap();
            assert!(!name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric()), "tag {tag}");
            attributes(body[name.len()..].trim());
            if body == tag {
                open.push(name);
            }
        }
        text(rest);
        assert!(open.is_empty(), "left open: {open:?}");
    }

    fn text(text: &str) {
        assert!(!text.contains('>') && !text.contains("NaN") && !text.contains("inf"), "{text}");
        for part in text.split('&').skip(1) {
            let entity = part.split(';').next().unwrap();
            assert!(["amp", "lt", "gt", "quot", "#39"].contains(&entity), "entity {entity}");
        }
    }

    fn attributes(mut rest: &str) {
        while !rest.is_empty() {
            let (name, after) = rest.split_once("=\"").expect("name=\"");
            assert!(!name.trim().contains([' ', '"']), "attribute {name}");
            let (value, after) = after.split_once('"').expect("a closing quote");
            assert!(!value.contains('<') && !value.contains("NaN") && !value.contains("inf"), "{name}={value}");
            text(value);
            rest = after.trim();
        }
    }

    #[test]
    #[should_panic(expected = "before")]
    fn it_notices_crossed_tags() {
        check("<a><b></a></b>");
    }
}

#[cfg(test)]
mod tests {
    use kvplane_topology::draw::escape;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn escaped_text_fits_in_an_attribute(text: String) {
            prop_assume!(!text.contains("NaN") && !text.contains("inf"));
            well_formed::check(&format!("<a title=\"{0}\">{0}</a>", escape(&text)));
        }
    }
}
