//! JSON writer of the model: members in the order of fields, and control characters that terminals obey escaped (DEL
//! and the C1 range, which `serde_json` writes as they are).
//!
//! Objects are built in a closure, so brackets always match. Whole numbers only: no value here has fractions, so none
//! can be NaN. Numbers above 2^53 lose digits in readers that hold numbers as doubles; no figure of a machine comes
//! near.

use std::collections::BTreeSet;

/// A value that can write itself as JSON.
pub(crate) trait ToJson {
    /// Appends the value to `out`.
    fn write_json(&self, out: &mut String);
}

/// An object under construction; see [`object`].
pub(crate) struct Object<'a> {
    out: &'a mut String,
    empty: bool,
}

impl Object<'_> {
    /// Appends one member. Keys are literals of the caller; each is used once.
    pub(crate) fn field(&mut self, key: &'static str, value: &(impl ToJson + ?Sized)) -> &mut Self {
        if !self.empty {
            self.out.push(',');
        }
        self.empty = false;
        key.write_json(self.out);
        self.out.push(':');
        value.write_json(self.out);
        self
    }
}

/// Appends an object whose members `fill` adds.
pub(crate) fn object(out: &mut String, fill: impl FnOnce(&mut Object<'_>)) {
    out.push('{');
    fill(&mut Object { out, empty: true });
    out.push('}');
}

fn array<'a, T: ToJson + 'a>(out: &mut String, items: impl Iterator<Item = &'a T>) {
    out.push('[');
    for (index, item) in items.enumerate() {
        if index > 0 {
            out.push(',');
        }
        item.write_json(out);
    }
    out.push(']');
}

impl ToJson for str {
    fn write_json(&self, out: &mut String) {
        out.push('"');
        for character in self.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                // JSON forbids raw control characters below 0x20; DEL and the C1 range are legal but control terminals.
                control if control.is_control() => {
                    out.push_str(&format!("\\u{:04x}", u32::from(control)));
                }
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

impl ToJson for String {
    fn write_json(&self, out: &mut String) {
        self.as_str().write_json(out);
    }
}

impl ToJson for bool {
    fn write_json(&self, out: &mut String) {
        out.push_str(if *self { "true" } else { "false" });
    }
}

impl ToJson for u32 {
    fn write_json(&self, out: &mut String) {
        out.push_str(&self.to_string());
    }
}

impl ToJson for u64 {
    fn write_json(&self, out: &mut String) {
        out.push_str(&self.to_string());
    }
}

impl ToJson for usize {
    fn write_json(&self, out: &mut String) {
        out.push_str(&self.to_string());
    }
}

impl<T: ToJson> ToJson for Option<T> {
    fn write_json(&self, out: &mut String) {
        match self {
            Some(value) => value.write_json(out),
            None => out.push_str("null"),
        }
    }
}

impl<T: ToJson> ToJson for Vec<T> {
    fn write_json(&self, out: &mut String) {
        array(out, self.iter());
    }
}

impl<T: ToJson> ToJson for BTreeSet<T> {
    fn write_json(&self, out: &mut String) {
        array(out, self.iter());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(value: &(impl ToJson + ?Sized)) -> String {
        let mut out = String::new();
        value.write_json(&mut out);
        out
    }

    #[test]
    fn strings_are_escaped() {
        assert_eq!(written("a\"b\\c\nd\u{1}\u{7f}\u{1b}é"), r#""a\"b\\c\nd\u0001\u007f\u001bé""#);
    }

    #[test]
    fn values_nest() {
        struct Pair;
        impl ToJson for Pair {
            fn write_json(&self, out: &mut String) {
                object(out, |o| {
                    o.field("some", &Some(7_u64)).field("none", &None::<u32>).field("no", &false);
                });
            }
        }
        assert_eq!(written(&vec![Pair]), r#"[{"some":7,"none":null,"no":false}]"#);
        assert_eq!(written(&Vec::<Pair>::new()), "[]");
        assert_eq!(written(&BTreeSet::from([2_usize, 1])), "[1,2]");
        let mut empty = String::new();
        object(&mut empty, |_| {});
        assert_eq!(empty, "{}");
    }
}
