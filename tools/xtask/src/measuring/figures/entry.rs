//! Reads a table of figures.toml; problems name the table and the key.

use toml::de::{DeTable, DeValue};

/// A table of the source, with the name that problems are reported under.
pub(super) struct Entry<'a> {
    pub(super) name: String,
    pub(super) table: &'a DeTable<'a>,
}

impl<'a> Entry<'a> {
    pub(super) fn check_keys(&self, known: &[&str]) -> Result<(), String> {
        let mut keys = self.table.keys().map(|key| key.get_ref().as_ref());
        keys.find(|key| !known.contains(key)).map_or(Ok(()), |key| Err(format!("{}: unknown key `{key}`", self.name)))
    }

    /// The tables of an array, named by their ids.
    pub(super) fn entries(&self, key: &str) -> Result<Vec<Self>, String> {
        let missing = || format!("{}: no `[[{key}]]`", self.name);
        let array = self.table.get(key).and_then(|value| value.get_ref().as_array()).ok_or_else(missing)?;
        let tables = array.iter().map(|value| value.get_ref().as_table().ok_or_else(missing));
        let named = tables.map(|table| {
            let entry = Entry { name: format!("a {key}"), table: table? };
            Ok(Entry { name: format!("{key} `{}`", entry.text("id")?), ..entry })
        });
        named.collect()
    }

    pub(super) fn text(&self, key: &str) -> Result<String, String> {
        self.optional_text(key)?.ok_or_else(|| format!("{}: no `{key}`", self.name))
    }

    pub(super) fn optional_text(&self, key: &str) -> Result<Option<String>, String> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        let text = value.get_ref().as_str().map(str::trim).filter(|text| !text.is_empty());
        text.map(|text| Some(text.to_string())).ok_or_else(|| format!("{}: `{key}` is no text", self.name))
    }

    pub(super) fn list<T>(
        &self,
        key: &str,
        parse: impl Fn(&DeValue<'_>, &str) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        let missing = || format!("{}: no value, and no list `{key}`", self.name);
        let array = self.table.get(key).and_then(|value| value.get_ref().as_array()).ok_or_else(missing)?;
        array.iter().map(|value| parse(value.get_ref(), &self.name)).collect()
    }

    pub(super) fn cell(value: &DeValue<'_>, name: &str) -> Result<String, String> {
        let is_cell = |text: &&str| !text.contains(['|', '\n']);
        let text = value.as_str().filter(is_cell);
        text.map(str::to_string).ok_or_else(|| format!("{name}: a cell is a string of one line without `|`"))
    }
}
