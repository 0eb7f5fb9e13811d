//! Puts: each object whole, in stripes, or on a preferred node.

mod capacity;
mod near;
mod striped;
mod striping;

use kvplane_client::PutBook;
use kvplane_engine::Slice;
use kvplane_proto::message::PutOptions;
use kvplane_proto::{Digest, Status};

use super::namespace::{Namespace, check_key, check_options};
use super::objects::{Objects, STRIPE_LEAST_BYTES};
use super::outcome::Put;
use crate::error::Error;
pub use near::Near;
use striped::{ObjectPut, StripedPuts};
pub(crate) use striping::Striping;

/// Length from which objects are put on preferred nodes; shorter objects stay with the owner of their key.
const NEAR_LEAST_BYTES: u64 = STRIPE_LEAST_BYTES;

/// Puts of objects in one piece, with the book of their names and options, which is used again for each batch.
pub(super) struct WholePuts {
    book: PutBook,
}

impl WholePuts {
    const fn new() -> Self {
        Self { book: PutBook::new() }
    }

    /// Returns the book, emptied for a new batch.
    pub(super) fn new_book(&mut self) -> &mut PutBook {
        self.book.clear();
        &mut self.book
    }

    /// Stores objects, each with the owner of its key; one outcome for each.
    fn put(
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

/// Decides how each object is put, and puts it.
pub(super) struct Puts {
    whole: WholePuts,
    striped: StripedPuts,
    near: Near,
}

impl Puts {
    /// Creates puts with a stripe size.
    pub(super) fn new(stripe_bytes: u64) -> Self {
        Self { whole: WholePuts::new(), striped: StripedPuts::new(stripe_bytes), near: Near::default() }
    }

    /// Sets the preferred nodes of later puts.
    pub(super) fn prefer(&mut self, near: Near) {
        self.near = near;
    }

    pub(super) const fn whole(&mut self) -> &mut WholePuts {
        &mut self.whole
    }

    /// Stores objects; one outcome for each.
    pub(super) fn put(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
        namespace: &Namespace,
        objects: &mut Objects,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        check_options(options)?;
        // Parts of a batch are stored before later items are examined, so all items are validated first.
        items.iter().try_for_each(|(key, _)| check_key(key.as_ref()))?;
        if !self.near.is_empty() {
            return self.put_near(items, options, namespace, objects);
        }
        self.put_anywhere(items, options, namespace, objects)
    }

    /// Stores objects, each with the owner of its key.
    fn put_anywhere(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
        namespace: &Namespace,
        objects: &mut Objects,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        // Decided once for each object: an object that a shard refuses as too long changes the decision for the
        // next.
        let striping = self.striped.striping();
        let striped: Vec<bool> = items.iter().map(|(_, slice)| striping.is_striped(slice.local().bytes)).collect();
        let short: Vec<(&[u8], Slice)> = items
            .iter()
            .zip(&striped)
            .filter(|(_, striped)| !**striped)
            .map(|((key, slice), _)| (key.as_ref(), *slice))
            .collect();
        let outcomes =
            if short.is_empty() { Vec::new() } else { self.whole.put(&short, options, namespace, objects)? };
        let mut outcomes = outcomes.into_iter();
        let mut all = Vec::with_capacity(items.len());
        for ((key, slice), striped) in items.iter().zip(striped) {
            let whole = if striped { None } else { outcomes.next() };
            let too_large = |put: &Result<Put, Error>| {
                matches!(put, Err(error) if error.status() == Some(Status::TooLarge))
                    && slice.local().bytes > STRIPE_LEAST_BYTES
            };
            all.push(match whole {
                Some(put) if !too_large(&put) => put,
                refused => {
                    if refused.is_some() {
                        self.striped.striping().refuse(slice.local().bytes);
                    }
                    let put = ObjectPut::new(namespace, key.as_ref(), *slice, options)?;
                    match (refused, self.striped.put(&put, &mut self.whole, objects)) {
                        // No shard takes it whole, and its stripes do not fit either.
                        (Some(first), Err(error)) if error.status() == Some(Status::NoSpace) => first,
                        (_, striped) => striped,
                    }
                }
            });
        }
        Ok(all)
    }

    /// Stores objects on preferred nodes. Objects whose owner is preferred already, and short or striped ones, are put
    /// the usual way.
    fn put_near(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
        namespace: &Namespace,
        objects: &mut Objects,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        let requester = objects.requester_mut();
        requester.follow_map();
        let owners = requester.owners()?;
        let first = items.first().map(|(key, _)| namespace.digest(key.as_ref())).transpose()?;
        let silent = requester.silent_nodes();
        let mut nodes = self.near.nodes(first, &owners);
        nodes.retain(|node| !silent.contains(node));
        let mut placed: Vec<Option<Result<Put, Error>>> = Vec::with_capacity(items.len());
        for (key, slice) in items {
            let put = ObjectPut::new(namespace, key.as_ref(), *slice, options)?;
            let is_there = owners.node_of(put.digest()).is_none_or(|node| nodes.contains(&node));
            let bytes = slice.local().bytes;
            if is_there || nodes.is_empty() || bytes < NEAR_LEAST_BYTES || self.striped.striping().is_striped(bytes) {
                placed.push(None);
                continue;
            }
            let mut outcome = Ok(None);
            for node in &nodes {
                let is_there = |digest: Digest| owners.node_of(digest) == Some(*node);
                outcome = self.striped.put_at(&put, is_there, &mut self.whole, objects);
                if !matches!(outcome, Ok(None)) {
                    break;
                }
            }
            placed.push(outcome.transpose());
        }
        let rest: Vec<(&[u8], Slice)> = items
            .iter()
            .zip(&placed)
            .filter(|(_, placed)| placed.is_none())
            .map(|((key, slice), _)| (key.as_ref(), *slice))
            .collect();
        let rest = if rest.is_empty() { Vec::new() } else { self.put_anywhere(&rest, options, namespace, objects)? };
        let mut rest = rest.into_iter();
        Ok(placed.into_iter().map(|placed| placed.or_else(|| rest.next()).unwrap_or(Ok(Put::Exists))).collect())
    }
}
