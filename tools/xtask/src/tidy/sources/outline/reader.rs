//! Walk over the syntax tree of one source.

use proc_macro2::Ident;
use syn::visit::{self, Visit};
use syn::{
    Attribute, Block, FnArg, GenericArgument, ImplItem, Item, Pat, PathArguments, Receiver, ReceiverKind, Signature,
    TraitItem, Type, UseTree,
};

use super::{Call, Definition, Function, ImplBlock, Import, Kind, MacroWord, Mention, ModuleDeclaration, Outline};
use super::{attributes, line, macros};

/// Adds the content of `file` to the outline.
pub(super) fn read(file: &syn::File, outline: Outline) -> Outline {
    let mut reader = Reader { outline, scope: String::new(), owner: None, in_test: false };
    reader.visit_file(file);
    reader.outline
}

fn joined(path: &syn::Path) -> String {
    let mut text = String::new();
    for segment in &path.segments {
        if !text.is_empty() {
            text += "::";
        }
        text += &segment.ident.to_string();
    }
    text
}

fn joined_with(scope: &str, name: &str) -> String {
    if scope.is_empty() { name.to_string() } else { format!("{scope}::{name}") }
}

/// Returns the path of a type without references; empty if it has none.
fn target(ty: &Type) -> String {
    match ty {
        Type::Path(path) => joined(&path.path),
        Type::Reference(reference) => target(&reference.elem),
        Type::Paren(inner) => target(&inner.elem),
        Type::Group(inner) => target(&inner.elem),
        _ => String::new(),
    }
}

fn is_mutating(receiver: &Receiver) -> bool {
    match &receiver.kind {
        ReceiverKind::Reference(_, _, mutability) => mutability.is_some(),
        // `self: Pin<&mut Self>` and its like.
        ReceiverKind::Typed(_, ty) => holds_mutable_reference(ty),
        _ => false,
    }
}

fn holds_mutable_reference(ty: &Type) -> bool {
    let Type::Path(path) = ty else {
        return matches!(ty, Type::Reference(reference) if reference.mutability.is_some());
    };
    path.path.segments.iter().any(|segment| match &segment.arguments {
        PathArguments::AngleBracketed(list) => list.args.iter().any(|argument| match argument {
            GenericArgument::Type(ty) => holds_mutable_reference(ty),
            _ => false,
        }),
        _ => false,
    })
}

/// Returns true for `String`, `str` and references to them.
fn is_text(ty: &Type) -> bool {
    target(ty).rsplit("::").next().is_some_and(|name| matches!(name, "String" | "str"))
}

/// Returns true for a result whose error is a text, or a value of one: `Result<_, String>`, `Ok::<_, String>`.
fn has_text_error(path: &syn::Path) -> bool {
    let Some(last) = path.segments.last() else { return false };
    let PathArguments::AngleBracketed(list) = &last.arguments else { return false };
    let is_result = ["Result", "Ok", "Err"].iter().any(|name| last.ident == name);
    is_result && matches!(list.args.iter().nth(1), Some(GenericArgument::Type(ty)) if is_text(ty))
}

/// Returns true if the pattern destructures its value.
fn takes_apart(pattern: &Pat) -> bool {
    match pattern {
        Pat::Tuple(_) | Pat::Struct(_) | Pat::TupleStruct(_) | Pat::Slice(_) => true,
        Pat::Reference(reference) => takes_apart(&reference.pat),
        Pat::Paren(inner) => takes_apart(&inner.pat),
        Pat::Ident(name) => name.subpat.as_ref().is_some_and(|(_, inner)| takes_apart(inner)),
        _ => false,
    }
}

/// Walk over one source.
struct Reader {
    outline: Outline,
    /// Scope at the present position of the walk.
    scope: String,
    /// Type or trait whose block contains the present position.
    owner: Option<String>,
    in_test: bool,
}

impl Reader {
    /// Walks an item that has these attributes.
    fn attributed(&mut self, attributes: &[Attribute], inside: impl FnOnce(&mut Self)) {
        let before = self.in_test;
        self.in_test |= attributes::is_test_only(attributes);
        inside(self);
        self.in_test = before;
    }

    /// Walks the scope `name` below the present one, outside any type's block.
    fn scoped(&mut self, name: &str, inside: impl FnOnce(&mut Self)) {
        let length = self.scope.len();
        self.scope = joined_with(&self.scope, name);
        let owner = self.owner.take();
        inside(self);
        self.owner = owner;
        self.scope.truncate(length);
    }

    /// Walks the block of a type or trait.
    fn owned(&mut self, owner: String, inside: impl FnOnce(&mut Self)) {
        let before = self.owner.replace(owner);
        inside(self);
        self.owner = before;
    }

    fn define(&mut self, name: &Ident, kind: Kind) {
        let (scope, in_test) = (self.scope.clone(), self.in_test);
        self.outline.definitions.push(Definition {
            scope,
            name: name.to_string(),
            line: line(name.span()),
            kind,
            in_test,
        });
    }

    fn define_struct<'a>(&mut self, name: &Ident, fields: impl Iterator<Item = &'a syn::Field>) {
        let fields = fields.filter(|field| !attributes::is_test_only(&field.attrs)).count();
        self.define(name, Kind::Struct { fields });
    }

    fn function(&mut self, signature: &Signature, body: Option<&Block>) {
        let takes = |argument: &FnArg| match argument {
            FnArg::Typed(argument) => takes_apart(&argument.pat),
            FnArg::Receiver(_) => false,
        };
        let first_line = line(signature.fn_token.span);
        self.outline.functions.push(Function {
            name: signature.ident.to_string(),
            owner: self.owner.clone(),
            first_line,
            last_line: body.map_or(first_line, |body| line(body.brace_token.span.close())),
            takes_apart: signature.inputs.iter().any(takes),
            in_test: self.in_test,
        });
        let name = format!("fn {}", signature.ident);
        self.scoped(&name, |this| {
            visit::visit_signature(this, signature);
            if let Some(body) = body {
                visit::visit_block(this, body);
            }
        });
    }

    fn mention(&mut self, path: String, line: usize) {
        let (scope, in_test) = (self.scope.clone(), self.in_test);
        self.outline.mentions.push(Mention { scope, path, line, in_test });
    }

    fn call(&mut self, name: &Ident) {
        if !self.in_test {
            self.outline.calls.push(Call { name: name.to_string(), line: line(name.span()) });
        }
    }

    fn text_error(&mut self, line: usize) {
        if !self.in_test {
            self.outline.text_errors.push(line);
        }
    }

    /// Adds the imports of a `use` below `prefix`.
    fn import(&mut self, tree: &UseTree, prefix: &str, is_public: bool) {
        let (word, name, span) = match tree {
            UseTree::Path(path) => {
                let prefix = joined_with(prefix, &path.ident.to_string());
                return self.import(&path.tree, &prefix, is_public);
            }
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.import(tree, prefix, is_public));
            }
            UseTree::Name(name) => (name.ident.to_string(), name.ident.to_string(), name.ident.span()),
            UseTree::Rename(rename) => (rename.ident.to_string(), rename.rename.to_string(), rename.ident.span()),
            UseTree::Glob(glob) => ("*".to_string(), "*".to_string(), glob.star_token.spans[0]),
        };
        let is_itself = word == "self" && !prefix.is_empty();
        let path = if is_itself { prefix.to_string() } else { joined_with(prefix, &word) };
        let last = |path: &str| path.rsplit("::").next().unwrap_or_default().to_string();
        let name = if is_itself && name == "self" { last(&path) } else { name };
        let (scope, in_test) = (self.scope.clone(), self.in_test);
        self.outline.imports.push(Import { scope, path, name, is_public, line: line(span), in_test });
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        self.attributed(attributes::of_item(item), |this| visit::visit_item(this, item));
    }

    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        let name = module.ident.to_string();
        match &module.content {
            Some((_, items)) => {
                self.scoped(&name, |this| items.iter().for_each(|item| this.visit_item(item)));
            }
            None => {
                let path = joined_with(&self.scope, &name);
                self.outline.modules.push(ModuleDeclaration { path, in_test: self.in_test });
            }
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.define_struct(&item.ident, item.fields.iter());
        visit::visit_item_struct(self, item);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.define_struct(&item.ident, item.fields.named.iter());
        visit::visit_item_union(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.define(&item.ident, Kind::Enum);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.define(&item.ident, Kind::Alias(target(&item.ty)));
        visit::visit_item_type(self, item);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.define(&item.ident, Kind::Constant);
        visit::visit_item_const(self, item);
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.define(&item.ident, Kind::Constant);
        visit::visit_item_static(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.define(&item.ident, Kind::Trait);
        self.owned(item.ident.to_string(), |this| visit::visit_item_trait(this, item));
    }

    fn visit_item_macro(&mut self, item: &'ast syn::ItemMacro) {
        // The item of `macro_rules!` is a macro itself.
        if item.ident.is_none() && !self.in_test {
            let words = macros::read(item.mac.tokens.clone()).paths.into_iter().map(|(path, _)| path);
            // Only types, traits and constants are both named from elsewhere and defined by macros of the workspace.
            for word in words.filter(|word| word.starts_with(char::is_uppercase) && !word.contains(':')) {
                self.outline.macro_words.push(MacroWord { scope: self.scope.clone(), word });
            }
        }
        visit::visit_item_macro(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.define(&item.sig.ident, Kind::Function);
        self.function(&item.sig, Some(&item.block));
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let mut methods = 0;
        let mut has_mutating = false;
        for item in &item.items {
            if let ImplItem::Fn(method) = item
                && !attributes::is_test_only(&method.attrs)
            {
                methods += 1;
                has_mutating |= method.sig.receiver().is_some_and(is_mutating);
            }
        }
        let target = target(&item.self_ty);
        self.outline.impls.push(ImplBlock {
            scope: self.scope.clone(),
            target: target.clone(),
            of_trait: item.trait_.is_some(),
            methods,
            has_mutating,
            line: line(item.impl_token.span),
            in_test: self.in_test,
        });
        let owner = target.rsplit("::").next().unwrap_or_default().to_string();
        self.owned(owner, |this| visit::visit_item_impl(this, item));
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        self.attributed(attributes::of_impl_item(item), |this| visit::visit_impl_item(this, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig, Some(&item.block));
    }

    fn visit_impl_item_type(&mut self, item: &'ast syn::ImplItemType) {
        self.define(&item.ident, Kind::AssociatedType);
        if (item.ident == "Err" || item.ident == "Error") && is_text(&item.ty) {
            self.text_error(line(item.ident.span()));
        }
        visit::visit_impl_item_type(self, item);
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        match item {
            TraitItem::Fn(method) => {
                self.attributed(&method.attrs, |this| this.function(&method.sig, method.default.as_ref()));
            }
            TraitItem::Type(ty) => {
                self.define(&ty.ident, Kind::AssociatedType);
                visit::visit_trait_item(self, item);
            }
            _ => visit::visit_trait_item(self, item),
        }
    }

    fn visit_foreign_item_fn(&mut self, item: &'ast syn::ForeignItemFn) {
        self.function(&item.sig, None);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let is_public = !matches!(item.vis, syn::Visibility::Inherited);
        self.import(&item.tree, "", is_public);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if let Some(first) = path.segments.first() {
            self.mention(joined(path), line(first.ident.span()));
            if has_text_error(path) {
                self.text_error(line(first.ident.span()));
            }
        }
        visit::visit_path(self, path);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(function) = &*call.func
            && let Some(name) = function.path.get_ident()
        {
            self.call(name);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.call(&call.method);
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        // A single word may be a variable; a longer path is a function, or names no function of a walk.
        if path.path.segments.len() > 1
            && let Some(last) = path.path.segments.last()
        {
            self.call(&last.ident);
        }
        visit::visit_expr_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        if let Some(first) = called.path.segments.first() {
            self.mention(joined(&called.path) + "!", line(first.ident.span()));
        }
        let found = macros::read(called.tokens.clone());
        for (path, line) in found.paths {
            self.mention(path, line);
        }
        for (name, kind) in found.definitions {
            self.define(&name, kind);
        }
        for (name, first_line, last_line) in found.functions {
            self.outline.functions.push(Function {
                name,
                owner: None,
                first_line,
                last_line,
                takes_apart: false,
                in_test: self.in_test,
            });
        }
    }

    // The words of an attribute are not code, and those of `pub(in path)` not a use of the path.
    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}
