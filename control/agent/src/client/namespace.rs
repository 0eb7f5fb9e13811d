//! Namespace: the keys of one tenant, as digests and as puts.

use kvplane_client::{Local, PutBook, Request};
use kvplane_engine::Slice;
use kvplane_proto::digest::{KeysOf, tenant_number};
use kvplane_proto::message::{ObjectName, PutItem, PutOptions};
use kvplane_proto::{Digest, Limits};

use crate::error::{ArgumentError, Error};

/// Namespace of a client's tenant. Both clients build their requests by it.
pub(crate) struct Namespace {
    /// The tenant's name; empty for the default tenant.
    tenant: Vec<u8>,
    /// True if nodes are sent the keys of objects, not only their digests.
    keep_keys: bool,
}

impl Namespace {
    /// Creates the namespace of a tenant.
    ///
    /// # Errors
    /// When the tenant's name is too long.
    pub(crate) fn new(tenant: &str, keep_keys: bool) -> Result<Self, Error> {
        if tenant.len() > Limits::NAME_BYTES {
            return Err(ArgumentError::TenantName { bytes: tenant.len() }.into());
        }
        Ok(Self { tenant: tenant.as_bytes().to_vec(), keep_keys })
    }

    pub(super) fn tenant(&self) -> &[u8] {
        &self.tenant
    }

    pub(super) fn tenant_name(&self) -> String {
        String::from_utf8_lossy(&self.tenant).into_owned()
    }

    pub(super) fn tenant_number(&self) -> u32 {
        tenant_number(&self.tenant)
    }

    /// Returns the digest of a key.
    pub(crate) fn digest(&self, key: &[u8]) -> Result<Digest, Error> {
        digest_of(&self.tenant, key)
    }

    /// Returns the digests of keys.
    pub(super) fn digests(&self, keys: &[impl AsRef<[u8]>]) -> Result<Vec<Digest>, Error> {
        keys.iter().map(|key| self.digest(key.as_ref())).collect()
    }

    /// Returns a hasher for many keys, which have been checked.
    pub(super) fn hasher(&self) -> KeysOf<'_> {
        KeysOf::new(&self.tenant)
    }

    /// Builds one request for each key.
    pub(crate) fn requests(
        &self,
        keys: &[impl AsRef<[u8]>],
        request: impl Fn(Digest) -> Request,
    ) -> Result<Vec<Request>, Error> {
        keys.iter().map(|key| Ok(request(self.digest(key.as_ref())?))).collect()
    }

    /// Builds a get of an object into a slice. Requests at most one payload: longer objects are striped.
    pub(crate) fn get(&self, key: &[u8], slice: Slice) -> Result<Request, Error> {
        let local = Local { bytes: slice.local().bytes.min(Limits::PAYLOAD_BYTES), ..slice.local() };
        Ok(Request::Get(self.digest(key)?, local))
    }

    /// Builds the put of an object and enters its name and options in a book.
    pub(crate) fn put(
        &self,
        book: &mut PutBook,
        key: &[u8],
        local: Local,
        options: &PutOptions,
    ) -> Result<Request, Error> {
        let (digest, number) = self.enter(book, key, local.bytes, options)?;
        Ok(Request::PutAs(digest, local, number))
    }

    /// Enters the name and options of an object in a book. Returns the object's digest and the number of the entry.
    /// The key is sent along if the namespace keeps keys.
    pub(super) fn enter(
        &self,
        book: &mut PutBook,
        key: &[u8],
        bytes: u64,
        options: &PutOptions,
    ) -> Result<(Digest, u32), Error> {
        let digest = self.digest(key)?;
        let options = PutOptions { tenant: self.tenant_number(), ..*options };
        let item = PutItem::plain(digest, bytes).with_options(&options);
        let number = if self.keep_keys {
            let lengths = (key.len() as u16, self.tenant.len() as u8);
            let name = ObjectName { tenant: &self.tenant, key };
            book.push(PutItem { key_bytes: lengths.0, tenant_bytes: lengths.1, ..item }, &name)
        } else {
            book.push(item, &ObjectName::NONE)
        };
        Ok((digest, number))
    }
}

/// Returns the digest of a key of a tenant.
pub(crate) fn digest_of(tenant: &[u8], key: &[u8]) -> Result<Digest, Error> {
    check_key(key)?;
    Ok(Digest::of(tenant, key))
}

/// Rejects a key that is empty or too long.
pub(crate) fn check_key(key: &[u8]) -> Result<(), Error> {
    if key.is_empty() || key.len() > Limits::KEY_BYTES {
        return Err(ArgumentError::Key { bytes: key.len() }.into());
    }
    Ok(())
}

/// Rejects options beyond the limits of the protocol.
pub(crate) fn check_options(options: &PutOptions) -> Result<(), Error> {
    let PutOptions { soft_pin_ms, replicas, wait_replicas, .. } = *options;
    if soft_pin_ms > Limits::SOFT_PIN_MS {
        return Err(ArgumentError::SoftPin { soft_pin_ms }.into());
    }
    if replicas > Limits::REPLICAS {
        return Err(ArgumentError::Replicas { replicas }.into());
    }
    if wait_replicas > replicas.max(1) {
        return Err(ArgumentError::WaitReplicas { wait_replicas, replicas: replicas.max(1) }.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_different_tenants_have_different_digests_and_invalid_ones_none() {
        let (one, other) =
            (Namespace::new("one", true).expect("a name"), Namespace::new("other", true).expect("a name"));
        let digest = one.digest(b"key").expect("a key");
        assert_eq!(digest, one.hasher().digest(b"key"));
        assert_ne!(digest, other.digest(b"key").expect("a key"));
        for key in [&[][..], &[0; Limits::KEY_BYTES + 1]] {
            assert!(one.requests(&[key], Request::Exists).is_err(), "{} bytes", key.len());
        }
        assert!(Namespace::new(&"t".repeat(Limits::NAME_BYTES + 1), true).is_err());
    }

    #[test]
    fn puts_name_their_entry_and_gets_request_one_payload() {
        let (local, options) = (Local { buffer: 1, offset: 2, bytes: 3 }, PutOptions::default());
        for keep_keys in [true, false] {
            let (namespace, mut book) = (Namespace::new("tenant", keep_keys).expect("a name"), PutBook::new());
            let digest = namespace.digest(b"b").expect("a key");
            namespace.put(&mut book, b"a", local, &options).expect("a put");
            let second = namespace.put(&mut book, b"b", local, &options).expect("a put");
            assert_eq!(second, Request::PutAs(digest, local, 1));
        }
        let namespace = Namespace::new("", true).expect("a name");
        let long = Slice::new(Local { bytes: u64::MAX, ..local });
        let get = namespace.get(b"a", long).expect("a get");
        assert!(matches!(get, Request::Get(_, part) if part.bytes == Limits::PAYLOAD_BYTES && part.offset == 2));
    }
}
