//! kvplane's side: a node in a process of its own, its clients over TCP or shared memory; and one thread's memcpy.

use std::collections::HashMap;

use kvplane::{Buffer, Client, NodeConfig, Slice};
use serde_json::json;

use super::client::{Key, Objects};
use super::memory::Memory;
use crate::Failure;
use crate::bed::{Bed, client_config};
use crate::peer::say;

/// First word of the server's role.
pub(crate) const ROLE_SERVER: &str = "stores-server";
/// Bytes of the pool for each object of the index: twice as many objects as the smallest size needs.
const OBJECT_BYTES: u64 = 2048;

/// Runs a node with a control plane, until its input ends.
pub(crate) fn serve(pool_bytes: &str) -> Result<(), Failure> {
    let pool_bytes: u64 = pool_bytes.parse()?;
    let bed = Bed::start_with(pool_bytes, "adaptive", |config, _| NodeConfig {
        max_objects: Some(pool_bytes / OBJECT_BYTES),
        // Chosen from the topology: shards that share cores with others park at once.
        pacing: None,
        ..config
    })?;
    let version = format!("kvplane-{}", env!("CARGO_PKG_VERSION"));
    say(&json!({
        "ready": true, "version": version, "said": bed.directory.text(), "pids": [std::process::id()],
    })
    .to_string())?;
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
    Ok(())
}

/// Client of the store.
pub(crate) struct Ours {
    client: Client,
    source: Buffer,
    found: Buffer,
}

impl Ours {
    pub(crate) fn connect(way: &str, directory: &str, memory: &Memory) -> Result<Self, Failure> {
        let mut client = Client::connect(&client_config(way, "adaptive", directory)?)?;
        let source = client.register(std::sync::Arc::clone(&memory.source));
        let found = client.register(std::sync::Arc::clone(&memory.found));
        Ok(Self { client, source, found })
    }
}

impl Objects for Ours {
    fn put(&mut self, memory: &Memory, call: usize, keys: &[Key], size: usize) -> Result<(), Failure> {
        let slice = |item| self.source.slice(memory.source_at(size, call, item), size);
        if let [key] = keys {
            self.client.put_from(key, slice(0))?;
            return Ok(());
        }
        let items: Vec<(&Key, Slice)> = keys.iter().enumerate().map(|(item, key)| (key, slice(item))).collect();
        for outcome in self.client.batch_put_from(&items)? {
            outcome?;
        }
        Ok(())
    }

    fn get(&mut self, _memory: &Memory, keys: &[Key], size: usize) -> Result<(), Failure> {
        let slice = |item| self.found.slice(Memory::found_at(size, item), size);
        if let [key] = keys {
            self.client.get_into(key, slice(0))?.ok_or("an object is missing")?;
            return Ok(());
        }
        let items: Vec<(&Key, Slice)> = keys.iter().enumerate().map(|(item, key)| (key, slice(item))).collect();
        for outcome in self.client.batch_get_into(&items)? {
            outcome?.ok_or("an object is missing")?;
        }
        Ok(())
    }

    fn remove(&mut self, keys: &[Key]) -> Result<(), Failure> {
        self.client.batch_remove(keys)?;
        Ok(())
    }
}

/// Memcpy of the C library to and from memory as large as a store's.
pub(crate) struct Copies {
    memory: Vec<u8>,
    used: usize,
    places: HashMap<Key, usize>,
    source: Vec<u8>,
    found: Vec<u8>,
}

impl Copies {
    /// Uses plain memory instead of regions, whose own copies are not the C library's.
    pub(crate) fn new(bytes: usize, memory: &Memory) -> Self {
        let (mut source, found) = (vec![0; memory.source.bytes()], vec![1; memory.found.bytes()]);
        memory.source.copy_out(0, &mut source);
        Self { memory: vec![1; bytes], used: 0, places: HashMap::new(), source, found }
    }
}

impl Objects for Copies {
    fn put(&mut self, memory: &Memory, call: usize, keys: &[Key], size: usize) -> Result<(), Failure> {
        for (item, key) in keys.iter().enumerate() {
            let from = memory.source_at(size, call, item);
            let to = self.used;
            let room = self.memory.get_mut(to..to + size).ok_or("the memory is full")?;
            std::hint::black_box(room).copy_from_slice(std::hint::black_box(&self.source[from..from + size]));
            self.places.insert(*key, to);
            self.used += size;
        }
        Ok(())
    }

    fn get(&mut self, _memory: &Memory, keys: &[Key], size: usize) -> Result<(), Failure> {
        for (item, key) in keys.iter().enumerate() {
            let (from, to) = (*self.places.get(key).ok_or("no such key")?, Memory::found_at(size, item));
            let target = std::hint::black_box(&mut self.found[to..to + size]);
            target.copy_from_slice(std::hint::black_box(&self.memory[from..from + size]));
        }
        Ok(())
    }

    fn settle(&self, memory: &Memory) {
        memory.found.copy_in(0, &self.found);
    }

    fn remove(&mut self, keys: &[Key]) -> Result<(), Failure> {
        for key in keys {
            self.places.remove(key);
        }
        self.used = 0;
        Ok(())
    }
}
