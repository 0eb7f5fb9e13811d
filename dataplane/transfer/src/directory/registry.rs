//! Registry: the entries of engines in a metadata store, each a descriptor and the address of a handshake daemon.

use std::sync::Arc;
use std::time::Duration;

use kvplane_mooncake::{MetadataStore, StoreError, keys};

use crate::error::{Error, PublishedError};

/// Entries of engines in a metadata store, by the names of their segments.
#[derive(Clone)]
pub(crate) struct Registry {
    store: Arc<dyn MetadataStore>,
    /// Prefix of the keys.
    prefix: String,
}

impl Registry {
    pub(crate) fn new(store: Arc<dyn MetadataStore>, prefix: &str) -> Self {
        Self { store, prefix: prefix.to_owned() }
    }

    /// Returns the address of the daemon of the engine with this name.
    ///
    /// # Errors
    /// When the store does not answer, has no entry, or has a malformed one.
    pub(crate) fn daemon_of(&self, name: &str) -> Result<String, Error> {
        let text = self.meta_of(name)?.ok_or_else(|| nobody(name))?;
        let meta = keys::RpcMeta::decode(text.as_bytes()).map_err(PublishedError::Daemon)?;
        Ok(daemon_at(&meta))
    }

    /// Returns the daemon's address of another engine that has this name, if any; `own` is this engine's.
    ///
    /// # Errors
    /// When the store does not answer.
    pub(crate) fn other_holder(&self, name: &str, own: &keys::RpcMeta) -> Result<Option<String>, Error> {
        // A malformed entry counts as none.
        let meta = self.meta_of(name)?.and_then(|text| keys::RpcMeta::decode(text.as_bytes()).ok());
        Ok(meta.filter(|meta| meta != own).map(|meta| daemon_at(&meta)))
    }

    fn meta_of(&self, name: &str) -> Result<Option<String>, StoreError> {
        self.store.get(&keys::rpc_meta(&self.prefix, name))
    }

    /// Returns the encoded descriptor of the engine with this name, within `limit`.
    ///
    /// # Errors
    /// When the store does not answer in time, or has no entry.
    pub(crate) fn descriptor_of(&self, name: &str, limit: Duration) -> Result<String, Error> {
        self.store.get_within(&keys::segment(&self.prefix, name), limit)?.ok_or_else(|| nobody(name))
    }

    /// Enters the address of the daemon of the engine with this name.
    ///
    /// # Errors
    /// When the store refuses it.
    pub(crate) fn put_daemon(&self, name: &str, meta: &keys::RpcMeta) -> Result<(), Error> {
        let key = keys::rpc_meta(&self.prefix, name);
        // Some servers do not replace a key that a former incarnation left there.
        self.store.remove(&key)?;
        Ok(self.store.put(&key, &meta.encode())?)
    }

    /// Enters the encoded descriptor of the engine with this name.
    ///
    /// # Errors
    /// When the store refuses it.
    pub(crate) fn put_descriptor(&self, name: &str, text: &str) -> Result<(), Error> {
        Ok(self.store.put(&keys::segment(&self.prefix, name), text)?)
    }

    /// Removes the engine with this name.
    pub(crate) fn remove(&self, name: &str) {
        for key in [keys::segment(&self.prefix, name), keys::rpc_meta(&self.prefix, name)] {
            // An entry that stays leads to an engine that does not answer, which peers have to handle anyway.
            let _ = self.store.remove(&key);
        }
    }
}

fn daemon_at(meta: &keys::RpcMeta) -> String {
    match meta.host.contains(':') {
        true => format!("[{}]:{}", meta.host, meta.port),
        false => format!("{}:{}", meta.host, meta.port),
    }
}

fn nobody(name: &str) -> Error {
    Error::Status { what: format!("segment {name}"), status: kvplane_proto::Status::NotFound, cause: None }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;
    use crate::lock;

    #[derive(Default)]
    struct InMemory(Mutex<BTreeMap<String, String>>);

    impl MetadataStore for InMemory {
        fn get_within(&self, key: &str, _limit: Duration) -> Result<Option<String>, StoreError> {
            Ok(lock(&self.0).get(key).cloned())
        }

        fn put(&self, key: &str, value: &str) -> Result<(), StoreError> {
            lock(&self.0).insert(key.to_owned(), value.to_owned());
            Ok(())
        }

        fn remove(&self, key: &str) -> Result<bool, StoreError> {
            Ok(lock(&self.0).remove(key).is_some())
        }
    }

    #[test]
    fn entries_are_found_by_name_until_they_are_removed() {
        let store = Arc::new(InMemory::default());
        let registry = Registry::new(Arc::clone(&store) as Arc<dyn MetadataStore>, "");
        let own = keys::RpcMeta { host: "fd00::1".to_owned(), port: 7 };
        assert_eq!(registry.other_holder("a", &own).unwrap(), None);
        assert!(registry.daemon_of("a").unwrap_err().to_string().contains("segment a"));
        registry.put_daemon("a", &own).unwrap();
        registry.put_descriptor("a", "{}").unwrap();
        assert_eq!(registry.daemon_of("a").unwrap(), "[fd00::1]:7");
        assert_eq!(registry.descriptor_of("a", Duration::ZERO).unwrap(), "{}");
        assert_eq!(registry.other_holder("a", &own).unwrap(), None, "the entry is its own");
        let other = keys::RpcMeta { host: "10.0.0.1".to_owned(), port: 8 };
        assert_eq!(registry.other_holder("a", &other).unwrap().as_deref(), Some("[fd00::1]:7"));
        lock(&store.0).insert(keys::rpc_meta("", "b"), "?".to_owned());
        assert!(matches!(registry.daemon_of("b"), Err(Error::Malformed(_))));
        assert_eq!(registry.other_holder("b", &own).unwrap(), None, "a malformed entry holds no name");
        registry.remove("a");
        assert!(registry.descriptor_of("a", Duration::ZERO).is_err() && registry.daemon_of("a").is_err());
    }
}
