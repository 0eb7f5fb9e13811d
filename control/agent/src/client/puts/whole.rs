//! Puts of objects in one piece.

use kvplane_client::PutBook;
use kvplane_engine::Slice;
use kvplane_proto::message::PutOptions;

use crate::client::namespace::{Namespace, check_options};
use crate::client::objects::Objects;
use crate::client::outcome::Put;
use crate::error::Error;

/// Puts of objects in one piece, with the book of their names and options, which is used again for each batch.
pub(in crate::client) struct WholePuts {
    book: PutBook,
}

impl WholePuts {
    pub(super) const fn new() -> Self {
        Self { book: PutBook::new() }
    }

    /// Returns the book, emptied for a new batch.
    pub(in crate::client) fn new_book(&mut self) -> &mut PutBook {
        self.book.clear();
        &mut self.book
    }

    /// Stores objects, each with the owner of its key; one outcome for each.
    pub(super) fn put(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
        namespace: &Namespace,
        objects: &mut Objects,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        check_options(options)?;
        let book = self.new_book();
        let mut requests = Vec::with_capacity(items.len());
        for (key, slice) in items {
            requests.push(namespace.put(book, key.as_ref(), slice.local(), options)?);
        }
        let results = objects.put_new(&requests, book)?;
        let stored = |(result, (_, slice)): (_, &(_, Slice))| objects.requester().stored(result, slice.local().bytes);
        Ok(results.into_iter().zip(items).map(stored).collect())
    }
}
