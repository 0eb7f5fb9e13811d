//! Publication: what peers find under this engine's name, and the notices that they leave there.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvplane_engine::NearDevices;
use kvplane_mooncake::{Buffer, Connector, Daemon, Descriptor, Local, Matrix, Notice, PublishedEngine, keys};

use super::announced::{self, BufferRecord, ToldKeys};
use super::lookup::Lookup;
use super::registry::Registry;
use crate::error::{ArgumentError, Error, LimitError};
use crate::lock;

/// Time for an engine to prove that it lives when another claims its name.
const LIVING: Duration = Duration::from_secs(1);

/// Descriptor of this engine, as its handshake daemon and the metadata store give it to peers.
pub(crate) struct Publication {
    name: String,
    /// Address of the handshake daemon.
    address: SocketAddr,
    registry: Option<Registry>,
    /// Published descriptor, without the buffers.
    template: Descriptor,
    published: Arc<PublishedEngine>,
    /// NUMA distance of the RDMA devices, and the locations of memory.
    near: Arc<NearDevices>,
    /// Set when RDMA is announced to stock engines, with the matrix to announce.
    announced: Mutex<Option<Option<Matrix>>>,
    /// Serializes publications, so that the last one stays.
    publishing: Mutex<()>,
    /// Handshake daemon; it answers until it is dropped.
    _daemon: Mutex<Option<Daemon>>,
}

impl Publication {
    /// Creates the publication of an engine, which `published` gives to peers once [`Self::publish`] was called.
    pub(crate) fn new(
        address: SocketAddr,
        registry: Option<Registry>,
        template: Descriptor,
        published: Arc<PublishedEngine>,
        near: Arc<NearDevices>,
        daemon: Option<Daemon>,
    ) -> Self {
        Self {
            name: template.name.clone(),
            address,
            registry,
            template,
            published,
            near,
            announced: Mutex::default(),
            publishing: Mutex::new(()),
            _daemon: Mutex::new(daemon),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the distances of the RDMA devices to memory.
    pub(crate) fn near(&self) -> &NearDevices {
        &self.near
    }

    /// Returns the address of the daemon, in the form of the metadata store.
    fn meta(&self) -> keys::RpcMeta {
        keys::RpcMeta { host: self.address.ip().to_string(), port: self.address.port() }
    }

    /// Enters the daemon's address in the metadata store, if there is one. A name that a former incarnation left there
    /// is taken over, but not that of a living engine: its peers would find this engine, and its entry would be removed
    /// when this engine ends.
    ///
    /// # Errors
    /// When a living engine has this name, or the store refuses.
    pub(crate) fn enter(&self, lookup: &Lookup) -> Result<(), Error> {
        let Some(registry) = &self.registry else { return Ok(()) };
        let meta = self.meta();
        if let Some(holder) = registry.other_holder(&self.name, &meta)?
            && lookup.ask(&holder, LIVING).is_ok_and(|found| found.name == self.name)
        {
            return Err(ArgumentError::NameTaken { name: self.name.clone(), holder }.into());
        }
        // Any other holder is dead, or another engine has its port by now.
        registry.put_daemon(&self.name, &meta)
    }

    /// Publishes the buffers to peers.
    ///
    /// # Errors
    /// When there are more buffers than a descriptor holds, or the metadata store refuses them.
    pub(crate) fn publish(
        &self,
        buffers: impl FnOnce() -> Result<(Vec<BufferRecord>, Option<ToldKeys>), Error>,
    ) -> Result<(), Error> {
        let _one = lock(&self.publishing);
        // Looked up under the lock: the last publication has the latest buffers.
        let (buffers, keys) = buffers()?;
        let mut descriptor = self.template.clone();
        // For stock engines over TCP, the name of a buffer is the segment's name, not a location.
        descriptor.buffers = buffers.iter().map(|one| Buffer::new(&self.name, one.address, one.bytes)).collect();
        if let Some(native) = &mut descriptor.native {
            native.regions = buffers.iter().map(|one| one.segment.to_bits()).collect();
            if let Some(rails) = &mut native.rails {
                rails.buffers = buffers.iter().map(|one| self.near.place(&one.location).0).collect();
            }
        }
        if let (Some(keys), Some(matrix)) = (&keys, &*lock(&self.announced)) {
            announced::describe(&mut descriptor, &buffers, keys, matrix.as_ref());
        }
        let text = self.published.replace(&descriptor)?;
        match &self.registry {
            Some(registry) => registry.put_descriptor(&self.name, &text),
            None => Ok(()),
        }
    }

    /// Announces RDMA to stock engines from the next publication on, and accepts connections from them.
    pub(crate) fn announce_rdma(&self, matrix: Option<Matrix>, connector: Connector) {
        *lock(&self.announced) = Some(matrix);
        self.published.set_connector(connector);
    }

    pub(crate) fn announces_rdma(&self) -> bool {
        lock(&self.announced).is_some()
    }

    /// Accepts a notice, as from a peer.
    ///
    /// # Errors
    /// When too many notices wait.
    pub(crate) fn accept(&self, notice: &Notice) -> Result<(), Error> {
        Ok(self.published.notified(notice.clone()).map_err(LimitError::NoticesToTake)?)
    }

    pub(crate) fn take_notices(&self) -> Vec<Notice> {
        self.published.take_notices()
    }

    /// Removes this engine from the metadata store, if there is one. An entry that another engine put under this name
    /// meanwhile stays.
    pub(crate) fn withdraw(&self) {
        let Some(registry) = &self.registry else { return };
        if matches!(registry.other_holder(&self.name, &self.meta()), Ok(None)) {
            registry.remove(&self.name);
        }
    }
}
