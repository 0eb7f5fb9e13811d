//! Reads a table of figures.toml; problems name the table and the key.

use toml::de::{DeTable, DeValue};

use super::error::{Fault, SourceError};

/// A table of the source, with the name that problems are reported under.
pub(super) struct Entry<'a> {
    pub(super) name: String,
    pub(super) table: &'a DeTable<'a>,
}

impl<'a> Entry<'a> {
    /// Returns the error of this fault of the table.
    pub(super) fn error(&self, fault: Fault) -> SourceError {
        SourceError::Table { name: self.name.clone(), fault }
    }

    pub(super) fn check_keys(&self, known: &[&str]) -> Result<(), SourceError> {
        let mut keys = self.table.keys().map(|key| key.get_ref().as_ref());
        let unknown = keys.find(|key| !known.contains(key));
        unknown.map_or(Ok(()), |key| Err(self.error(Fault::UnknownKey(key.to_string()))))
    }

    /// The tables of an array, named by their ids.
    pub(super) fn entries(&self, key: &str) -> Result<Vec<Self>, SourceError> {
        let missing = || self.error(Fault::NoTables(key.to_string()));
        let array = self.table.get(key).and_then(|value| value.get_ref().as_array()).ok_or_else(missing)?;
        let tables = array.iter().map(|value| value.get_ref().as_table().ok_or_else(missing));
        let named = tables.map(|table| {
            let entry = Entry { name: format!("a {key}"), table: table? };
            Ok(Entry { name: format!("{key} `{}`", entry.text("id")?), ..entry })
        });
        named.collect()
    }

    pub(super) fn text(&self, key: &str) -> Result<String, SourceError> {
        self.optional_text(key)?.ok_or_else(|| self.error(Fault::NoText(key.to_string())))
    }

    pub(super) fn optional_text(&self, key: &str) -> Result<Option<String>, SourceError> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        let text = value.get_ref().as_str().map(str::trim).filter(|text| !text.is_empty());
        text.map(|text| Some(text.to_string())).ok_or_else(|| self.error(Fault::NotText(key.to_string())))
    }

    pub(super) fn list<T>(
        &self,
        key: &str,
        parse: impl Fn(&DeValue<'_>) -> Result<T, Fault>,
    ) -> Result<Vec<T>, SourceError> {
        let missing = || self.error(Fault::NoList(key.to_string()));
        let array = self.table.get(key).and_then(|value| value.get_ref().as_array()).ok_or_else(missing)?;
        array.iter().map(|value| parse(value.get_ref()).map_err(|fault| self.error(fault))).collect()
    }

    pub(super) fn cell(value: &DeValue<'_>) -> Result<String, Fault> {
        let is_cell = |text: &&str| !text.contains(['|', '\n']);
        let text = value.as_str().filter(is_cell);
        text.map(str::to_string).ok_or(Fault::NotCell)
    }
}
