//! The way of a control plane's HTTP paths to the objects: a client of the process, made when it is first asked.

use std::path::PathBuf;

use kvplane::{Client, ClientConfig, Control};
use kvplane_server::Objects;

use super::keys::name_of;

/// Where the cluster is found.
pub(super) struct Asked {
    pub(super) cluster: String,
    pub(super) runtime_directory: Option<PathBuf>,
}

impl Asked {
    fn client(&self, tenant: &str) -> Result<Client, String> {
        let control =
            Control::Local { cluster: self.cluster.clone(), runtime_directory: self.runtime_directory.clone() };
        let config = ClientConfig { control, tenant: tenant.to_owned(), ..ClientConfig::local(&self.cluster) };
        Client::connect(&config).map_err(|error| error.to_string())
    }
}

impl Objects for Asked {
    fn keys(&self, tenant: &str, most: usize) -> Result<(Vec<String>, bool), String> {
        let mut client = self.client(tenant)?;
        let (mut cursor, mut keys) = (None, Vec::new());
        loop {
            let page = client.list(cursor).map_err(|error| error.to_string())?;
            keys.extend(page.keys.iter().filter(|key| !key.key.is_empty()).map(name_of));
            if keys.len() > most {
                return Ok((keys, true));
            }
            match page.next {
                Some(next) => cursor = Some(next),
                None => return Ok((keys, false)),
            }
        }
    }

    fn remove_all(&self, tenant: Option<&str>) -> Result<u64, String> {
        let removed = self.client(tenant.unwrap_or_default())?.remove_all(tenant.is_none());
        removed.map_err(|error| error.to_string())
    }
}
