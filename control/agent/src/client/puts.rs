//! Puts with options: replicas, pins, and replacement of an existing object.

use kvplane_client::{Local, PutBook, Request, TaskResult};
use kvplane_proto::digest::tenant_number;
use kvplane_proto::message::{ObjectName, PutItem, PutOptions};
use kvplane_proto::{Digest, Limits, Status, Version};

use super::stripes::STRIPE_LEAST_BYTES;
use super::{Client, Put, Slice, digest_of};
use crate::error::Error;

impl Client {
    /// Like [`Self::put_from`], with options.
    ///
    /// # Errors
    /// When it cannot be stored: the status says why.
    pub fn put_from_with(&mut self, key: &[u8], slice: Slice, options: &PutOptions) -> Result<Put, Error> {
        let mut outcomes = self.batch_put_from_with(&[(key, slice)], options)?;
        outcomes.pop().unwrap_or(Ok(Put::Exists))
    }

    /// Like [`Self::batch_put_from`], with options.
    ///
    /// # Errors
    /// When the batch as a whole is malformed: an invalid key or option. Then nothing of it is stored.
    pub fn batch_put_from_with(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        check_options(options)?;
        // Parts of a batch are stored before later items are examined, so all items are validated first.
        items.iter().try_for_each(|(key, _)| super::check_key(key.as_ref()))?;
        if !self.near.is_empty() {
            return self.batch_put_near(items, options);
        }
        self.batch_put_anywhere(items, options)
    }

    /// Like [`Self::batch_put_from_with`], each object with the owner of its key.
    pub(super) fn batch_put_anywhere(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        // Decided once for each object: an object that a shard refuses as too long changes the decision for the
        // next.
        let striped: Vec<bool> = items.iter().map(|(_, slice)| self.is_striped(slice.local().bytes)).collect();
        let short: Vec<(&[u8], Slice)> = items
            .iter()
            .zip(&striped)
            .filter(|(_, striped)| !**striped)
            .map(|((key, slice), _)| (key.as_ref(), *slice))
            .collect();
        let mut outcomes =
            if short.is_empty() { Vec::new() } else { self.batch_put_whole(&short, options)? }.into_iter();
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
                        self.striping.refused(slice.local().bytes);
                    }
                    match (refused, self.put_striped(key.as_ref(), *slice, options)) {
                        // No shard takes it whole, and its stripes do not fit either.
                        (Some(first), Err(error)) if error.status() == Some(Status::NoSpace) => first,
                        (_, striped) => striped,
                    }
                }
            });
        }
        Ok(all)
    }

    /// Like [`Self::batch_put_from_with`], each object in one piece.
    pub(super) fn batch_put_whole(
        &mut self,
        items: &[(impl AsRef<[u8]>, Slice)],
        options: &PutOptions,
    ) -> Result<Vec<Result<Put, Error>>, Error> {
        check_options(options)?;
        self.puts.clear();
        let mut requests = Vec::with_capacity(items.len());
        for (key, slice) in items {
            let name = ObjectName { tenant: &self.tenant, key: key.as_ref() };
            requests.push(put_request(&mut self.puts, &name, self.keep_keys, slice.local(), options)?);
        }
        let results = self.run_new_puts(&requests)?;
        Ok(results.into_iter().zip(items).map(|(result, (_, slice))| self.stored(result, *slice)).collect())
    }

    /// Stores a copy of these bytes under a key and replaces an existing object; gets in flight complete with the old
    /// object.
    ///
    /// # Errors
    /// When the bytes cannot be stored: the status says why. The old object is then unchanged, or may have been
    /// evicted.
    pub fn upsert(&mut self, key: &[u8], value: &[u8]) -> Result<Version, Error> {
        match self.put_with(key, value, &PutOptions { replace: true, ..PutOptions::default() })? {
            Put::Stored(version) => Ok(version),
            Put::Exists => Err(self.problem("upsert".to_owned(), Status::Exists)),
        }
    }

    /// Like [`Self::put`], with options.
    ///
    /// # Errors
    /// When the bytes cannot be stored: the status says why.
    pub fn put_with(&mut self, key: &[u8], value: &[u8], options: &PutOptions) -> Result<Put, Error> {
        if value.is_empty() {
            return Err(Error::Status { what: "put of 0 bytes".to_owned(), status: Status::Empty, cause: None });
        }
        let bounce = self.bounce(value.len())?;
        bounce.region().copy_in(0, value);
        self.put_from_with(key, bounce.slice(0, value.len()), options)
    }
}

impl Client {
    pub(super) fn stored(&self, result: TaskResult, slice: Slice) -> Result<Put, Error> {
        match result.status {
            Status::Ok => Ok(Put::Stored(result.version)),
            Status::Exists => Ok(Put::Exists),
            status => Err(self.problem(format!("put of {} bytes", slice.local().bytes), status)),
        }
    }

    /// Enters a put's options in the client's book. Returns the object's digest and the number of the entry.
    pub(super) fn enter_put(&mut self, key: &[u8], bytes: u64, options: &PutOptions) -> Result<(Digest, u32), Error> {
        check_options(options)?;
        let local = Local { buffer: 0, offset: 0, bytes };
        let name = ObjectName { tenant: &self.tenant, key };
        match put_request(&mut self.puts, &name, self.keep_keys, local, options)? {
            Request::PutAs(digest, _, number) => Ok((digest, number)),
            _ => unreachable!("a put with an entry is one"),
        }
    }
}

/// Builds the put of an object and enters its options in a book. The key is sent along if `keep_key` is set.
pub(crate) fn put_request(
    puts: &mut PutBook,
    name: &ObjectName<'_>,
    keep_key: bool,
    local: Local,
    options: &PutOptions,
) -> Result<Request, Error> {
    let ObjectName { tenant, key } = *name;
    let digest = digest_of(tenant, key)?;
    let options = PutOptions { tenant: tenant_number(tenant), ..*options };
    let item = PutItem::plain(digest, local.bytes).with_options(&options);
    let number = if keep_key {
        let lengths = (key.len() as u16, tenant.len() as u8);
        puts.push(PutItem { key_bytes: lengths.0, tenant_bytes: lengths.1, ..item }, name)
    } else {
        puts.push(item, &ObjectName::NONE)
    };
    Ok(Request::PutAs(digest, local, number))
}

pub(crate) fn check_options(options: &PutOptions) -> Result<(), Error> {
    if options.soft_pin_ms <= Limits::SOFT_PIN_MS {
        return Ok(());
    }
    let (given, most) = (options.soft_pin_ms, Limits::SOFT_PIN_MS);
    Err(Error::Argument(format!("a soft pin of {given} ms is over the limit of {most} ms")))
}
