//! Store of a C program: a cluster's clients, the memory that it registered, and the memory that it provides.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvplane::setup::{Setup, served_on};
use kvplane::{Buffer, Client, ClientConfig, Control, Error, Got, Node, NodeConfig, Pacing, PutOptions, Slice};

use super::clients::Clients;
use super::memory::{Entry, Member, Memory, adopt_source};
use super::outcome::{INTERNAL, INVALID, NOT_FOUND, UNREACHABLE};

/// Maximum length of a key.
const KEY_BYTES: usize = 4096;
/// Longest wait of a setup for the control plane.
const CONNECT: Duration = Duration::from_millis(4_500);
/// Longest drain of the memory that a store provides, when it is destroyed.
const CLOSE: Duration = Duration::from_secs(4);
/// Longest wait without progress for migrations in flight then.
const MOVES_PATIENCE: Duration = Duration::from_secs(2);
/// Minimum memory of a node.
const LEAST_BYTES: u64 = 2 << 20;
/// Protocols that stand for what is there: shared memory, TCP and RDMA.
const PROTOCOLS: [&str; 5] = ["", "tcp", "rdma", "shm", "rpc_only"];

/// Options of puts, and the preferred segments.
#[derive(Default)]
pub(crate) struct PutConfig {
    pub(crate) options: PutOptions,
    pub(crate) segments: Vec<String>,
}

/// Store after its setup.
struct Open {
    clients: Clients,
    /// Name of this process.
    name: String,
    node: Option<Node>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let Some(node) = self.node.take() else { return };
        // Without a control plane nobody learns of new owners, so nothing migrates.
        if node.trouble().is_some() {
            return;
        }
        let begun = Instant::now();
        // What is left is waited for next, whatever the reason.
        let _ = node.drain(CLOSE);
        let left = CLOSE.saturating_sub(begun.elapsed());
        if !left.is_zero() {
            // Migrations in flight are waited for, as long as they make progress.
            let _ = node.finish_moves(MOVES_PATIENCE, left);
        }
    }
}

/// Store, before and after its setup.
#[derive(Default)]
pub(crate) struct Store {
    // Dropped first: its clients refer to the memory.
    open: OnceLock<Open>,
    memory: Memory,
}

/// Operation on valid items.
#[derive(Clone, Copy)]
enum Work<'a> {
    Put(&'a PutConfig),
    Get,
}

/// Memory of a call's items: registered ranges, which stay registered until this is dropped, and others that are
/// registered for the call.
#[derive(Default)]
struct CallMemory {
    entries: Vec<Arc<Entry>>,
    lent: Vec<Buffer>,
}

impl Store {
    /// Connects to a cluster, and provides it with memory. Returns 0 or an error; a second setup is one.
    pub(crate) fn set_up(&self, host: &str, segment_bytes: u64, protocol: &str, master: &str) -> i64 {
        if self.open.get().is_some() {
            return refused("setup: this store was set up already", INTERNAL);
        }
        if !PROTOCOLS.contains(&protocol.to_lowercase().as_str()) {
            return refused(
                format!("setup: the protocol {protocol:?} is not supported here; use tcp or rdma"),
                INVALID,
            );
        }
        match open(host, segment_bytes, master, &self.memory) {
            Ok(open) => match self.open.set(open) {
                Ok(()) => 0,
                Err(_) => refused("setup: this store was set up already", INTERNAL),
            },
            Err((why, code)) => refused(format!("setup: {why}"), code),
        }
    }

    /// Returns the name of this process; empty before the setup.
    pub(crate) fn name(&self) -> String {
        self.open.get().map(|open| open.name.clone()).unwrap_or_default()
    }

    /// Returns 0 when the cluster answers, 1 before the setup, 2 when it does not answer.
    pub(crate) fn check(&self) -> i32 {
        let Some(open) = self.open.get() else { return 1 };
        let answered = open.clients.is_served() && self.exist(&[b"kvplane:health"]).iter().all(|code| *code >= 0);
        if answered { 0 } else { 2 }
    }

    /// Runs a call with a client. Returns its result, or the number of an error.
    pub(crate) fn with(&self, call: impl FnOnce(&mut Client) -> Result<i64, Error>) -> i64 {
        let Some(open) = self.open.get() else { return INTERNAL };
        let done = open.clients.with(&self.memory, |member| call(&mut member.client));
        done.map_or_else(|code| code, |done| done.unwrap_or_else(|error| error.store_code()))
    }

    /// Returns for each key 1 if there is an object, 0 if not, or an error.
    pub(crate) fn exist(&self, keys: &[&[u8]]) -> Vec<i64> {
        let mut codes: Vec<i64> = keys.iter().map(|key| check_key(key)).collect();
        let good: Vec<usize> = (0..keys.len()).filter(|index| codes[*index] == 0).collect();
        let names: Vec<&[u8]> = good.iter().map(|index| keys[*index]).collect();
        let mut found = Vec::new();
        let code = if names.is_empty() {
            0
        } else {
            self.with(|client| {
                found = client.batch_exists(&names)?;
                Ok(0)
            })
        };
        for (place, index) in good.into_iter().enumerate() {
            codes[index] = if code == 0 { i64::from(found[place]) } else { code };
        }
        codes
    }

    /// Returns true after the setup.
    pub(crate) fn is_set_up(&self) -> bool {
        self.open.get().is_some()
    }

    /// Registers memory.
    ///
    /// # Safety
    /// That of [`Memory::register`].
    pub(crate) unsafe fn register(&self, address: u64, bytes: u64) -> i64 {
        if self.open.get().is_none() {
            return INTERNAL;
        }
        // SAFETY: by the caller's promise.
        unsafe { self.memory.register(address, bytes) }
    }

    /// Unregisters memory.
    pub(crate) fn unregister(&self, address: u64) -> i64 {
        let Some(open) = self.open.get() else { return INTERNAL };
        let code = self.memory.unregister(address);
        open.clients.sweep(&self.memory);
        code
    }

    /// Stores objects from places, address and length. Returns 0 for each that exists afterwards, or an error.
    pub(crate) fn put(&self, keys: &[&[u8]], places: &[(u64, u64)], config: &PutConfig) -> Vec<i64> {
        self.run(keys, places, Work::Put(config))
    }

    /// Reads objects into registered places. Returns the length of each, or an error.
    pub(crate) fn get(&self, keys: &[&[u8]], places: &[(u64, u64)]) -> Vec<i64> {
        self.run(keys, places, Work::Get)
    }

    fn run(&self, keys: &[&[u8]], places: &[(u64, u64)], work: Work<'_>) -> Vec<i64> {
        let Some(open) = self.open.get() else { return vec![INTERNAL; keys.len()] };
        let done = open.clients.with(&self.memory, |member| {
            let (mut codes, mut items, mut held) = (vec![0; keys.len()], Vec::new(), CallMemory::default());
            for (index, (key, place)) in keys.iter().zip(places).enumerate() {
                match self.slice(member, *place, work, &mut held) {
                    _ if check_key(key) != 0 => codes[index] = INVALID,
                    Some(slice) => items.push((index, *key, slice)),
                    None => codes[index] = INVALID,
                }
            }
            for (index, code) in outcomes(member, &items, work) {
                codes[index] = code;
            }
            held.lent.into_iter().for_each(|buffer| member.client.unregister(buffer));
            codes
        });
        done.unwrap_or_else(|code| vec![code; keys.len()])
    }

    /// Returns a place as a slice of a client; `None` if it is empty or not mapped, or to be read into and not
    /// registered or read-only.
    fn slice(&self, member: &mut Member, place: (u64, u64), work: Work<'_>, held: &mut CallMemory) -> Option<Slice> {
        let (address, bytes) = place;
        if bytes == 0 {
            return None;
        }
        if let Some(entry) = self.memory.find(address, bytes) {
            if matches!(work, Work::Get) && !entry.is_writable() {
                return None;
            }
            let slice = member.slice(&entry, address, bytes);
            held.entries.push(entry);
            return Some(slice);
        }
        if matches!(work, Work::Get) {
            return None;
        }
        // SAFETY: the header's condition: the bytes are readable during the call, which unregisters them at its end.
        let buffer = member.client.register(unsafe { adopt_source(address, bytes) }?);
        let slice = buffer.slice(0, bytes as usize);
        held.lent.push(buffer);
        Some(slice)
    }
}

/// Reports why a setup failed, as the original does by its log, and returns its code.
fn refused(why: impl std::fmt::Display, code: i64) -> i64 {
    #[allow(clippy::print_stderr, reason = "C has no other way to learn the reason")]
    {
        eprintln!("kvplane: {why}");
    }
    code
}

fn check_key(key: &[u8]) -> i64 {
    if (1..=KEY_BYTES).contains(&key.len()) { 0 } else { INVALID }
}

fn open(host: &str, segment_bytes: u64, master: &str, memory: &Memory) -> Result<Open, (String, i64)> {
    let setup = Setup { master: Some(master.to_owned()), ..Setup::default() }.completed();
    let control = setup.find().map_err(|error| (error.to_string(), UNREACHABLE))?;
    let config = ClientConfig { control: control.clone(), connect: CONNECT, ..ClientConfig::local("") };
    let failed = |error: Error| (error.to_string(), error.store_code());
    let first = Client::connect(&config).map_err(failed)?;
    let node = match segment_bytes {
        0 => None,
        bytes => Some(provide(&control, bytes, host)?),
    };
    let served = node.as_ref().and_then(|node| node.addresses().first().map(ToString::to_string));
    let name = served.unwrap_or_else(|| host.to_owned());
    Ok(Open { clients: Clients::new(config, first, memory), name, node })
}

/// Joins the cluster with memory of this process, as a node of one shard.
fn provide(control: &Control, bytes: u64, host: &str) -> Result<Node, (String, i64)> {
    let listen = served_on(control, host).map_err(|error| (error.to_string(), UNREACHABLE))?;
    let config = NodeConfig {
        listen,
        control: control.clone(),
        shards: Some(1),
        // It shares its cores with the program.
        pacing: Some(Pacing::Park),
        ..NodeConfig::local("", bytes.max(LEAST_BYTES))
    };
    Node::start(&config).map_err(|error| (error.to_string(), error.store_code()))
}

/// Carries out items in one batch; if that is refused because of one of them, or of a conflict of two, one by one.
fn outcomes(member: &mut Member, items: &[(usize, &[u8], Slice)], work: Work<'_>) -> Vec<(usize, i64)> {
    let pairs: Vec<(&[u8], Slice)> = items.iter().map(|(_, key, slice)| (*key, *slice)).collect();
    if pairs.is_empty() {
        return Vec::new();
    }
    let codes = match batch(&mut member.client, &pairs, work) {
        Ok(codes) => codes,
        Err(error) if pairs.len() == 1 => vec![error.store_code()],
        Err(_) => {
            let each = pairs.iter().map(|pair| batch(&mut member.client, std::slice::from_ref(pair), work));
            each.map(|done| done.map_or_else(|error| error.store_code(), |codes| codes[0])).collect()
        }
    };
    items.iter().map(|(index, ..)| *index).zip(codes).collect()
}

fn batch(client: &mut Client, pairs: &[(&[u8], Slice)], work: Work<'_>) -> Result<Vec<i64>, Error> {
    let got = |got: Result<Option<Got>, Error>| match got {
        Ok(Some(got)) => got.bytes as i64,
        Ok(None) => NOT_FOUND,
        Err(error) => error.store_code(),
    };
    Ok(match work {
        Work::Put(config) => {
            let options = config.with(client);
            let puts = client.batch_put_from_with(pairs, options)?;
            puts.into_iter().map(|put| put.map_or_else(|error| error.store_code(), |_| 0)).collect()
        }
        Work::Get => client.batch_get_into(pairs)?.into_iter().map(got).collect(),
    })
}
