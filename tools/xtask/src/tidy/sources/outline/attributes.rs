//! Attributes of items, and detection of test-only code.

use syn::{Attribute, ImplItem, Item, Meta};

use super::lines_of;

/// Returns true for the attribute `name(.. word ..)`, with the word at any depth.
pub(super) fn lists(attribute: &Attribute, name: &str, word: &str) -> bool {
    match &attribute.meta {
        Meta::List(list) => list.path.is_ident(name) && !lines_of(list.tokens.clone(), word).is_empty(),
        _ => false,
    }
}

/// Returns true if the attributes mark test-only code: `#[test]`, or `#[cfg(..)]` with `test` and without `not`.
pub(super) fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test") || (lists(attribute, "cfg", "test") && !lists(attribute, "cfg", "not"))
    })
}

/// Returns the attributes of an item.
pub(super) fn of_item(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns the attributes of an item of an impl.
pub(super) fn of_impl_item(item: &ImplItem) -> &[Attribute] {
    match item {
        ImplItem::Const(item) => &item.attrs,
        ImplItem::Fn(item) => &item.attrs,
        ImplItem::Type(item) => &item.attrs,
        ImplItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}
