//! ZeroMQ publisher of the store's events, in the format of Mooncake's master (its RFC 1527).
//!
//! A message has three parts: an empty topic, a sequence number (8 bytes, big-endian, from 1 on), and MessagePack: the
//! time in milliseconds, up to [`BATCH`] events as maps, and 0. A gap in the numbers means that events are missing;
//! then a snapshot follows. Every new subscriber also causes a snapshot, as `stored` events.
//!
//! Differences to Mooncake: `backend_id` names the shard, as `cluster/node/shard`, since order and `cleared` are per
//! shard; and an object is also named by its digest (`object_digest`, in hexadecimal), as not every key is known: it is
//! missing for an object that is only on an SSD, was put without its key, or is removed long after it was published.
//! Events are not requested from nodes while there are no subscribers. A subscriber that does not keep up misses
//! messages, and notices it by their numbers.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvplane_conductor::engine::msgpack::Writer;
use kvplane_proto::Digest;
use kvplane_proto::events::{ObjectChange, ObjectEvent, ObjectMedium};
use kvplane_rpc::codec::decode;
use kvplane_rpc::message::{EventReport, Events, NodeEvents};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::cluster::ClusterHost;
use crate::events::zmtp::{Subscriber, SubscriberInput, hello, message};

/// Most events in a message.
const BATCH: usize = 64;
/// Most subscribers at a time.
const SUBSCRIBERS: usize = 64;
/// Most messages queued for a subscriber; it misses further ones.
const MESSAGES: usize = 4096;
/// Deadlines of the handshake, and of writing a message.
const HANDSHAKE: Duration = Duration::from_secs(5);
const WRITE: Duration = Duration::from_secs(10);
/// Wait before the subscription to events is retried.
const RETRY: Duration = Duration::from_secs(1);
const READ_BYTES: usize = 1024;
const TOPIC: &[u8] = b"";

/// Bytes of names that are remembered for removals, whose events carry no name.
const NAMES_BYTES: usize = 64 << 20;
/// Approximate bytes of a name beside the text.
const NAME_BYTES: usize = 200;

/// A tenant and a key, as texts.
type Name = (String, String);

/// Names of objects by their digests, the latest ones.
#[derive(Default)]
struct Names {
    names: HashMap<Digest, Name>,
    order: VecDeque<Digest>,
    bytes: usize,
}

impl Names {
    fn note(&mut self, digest: Digest, name: Name) {
        let bytes = |name: &Name| NAME_BYTES + name.0.len() + name.1.len();
        self.bytes += bytes(&name);
        match self.names.insert(digest, name) {
            Some(former) => self.bytes -= bytes(&former),
            None => self.order.push_back(digest),
        }
        while self.bytes > NAMES_BYTES {
            let Some(oldest) = self.order.pop_front() else { return };
            if let Some(former) = self.names.remove(&oldest) {
                self.bytes -= bytes(&former);
            }
        }
    }
}

/// Converts bytes to text; escapes them if they are not UTF-8.
fn as_text(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| bytes.escape_ascii().to_string(), str::to_owned)
}

/// Encoder of messages, which numbers them without gaps except for missing events.
struct Publisher {
    backend: String,
    sequence: u64,
    event_id: u64,
    names: Names,
}

impl Publisher {
    fn new(backend: String) -> Self {
        Self { backend, sequence: 0, event_id: 0, names: Names::default() }
    }

    /// Encodes a report as messages.
    fn messages(&mut self, report: &NodeEvents, now_ms: u64) -> Vec<Arc<[u8]>> {
        if report.lost > 0 {
            self.sequence += 1;
        }
        for name in &report.names {
            if let Some(event) = report.events.get(name.at as usize) {
                let tenant = if name.tenant.is_empty() { "default".to_owned() } else { as_text(&name.tenant) };
                self.names.note(event.digest, (tenant, as_text(&name.key)));
            }
        }
        let cleared = |medium| ObjectEvent { change: ObjectChange::Cleared, medium, digest: Digest(0), bytes: 0 };
        let mut events = Vec::new();
        if report.part == EventReport::SnapshotBegins {
            events.extend([cleared(ObjectMedium::Memory), cleared(ObjectMedium::Ssd)]);
        }
        events.extend_from_slice(&report.events);
        let backend = format!("{}/{}/{}", self.backend, report.node, report.shard);
        events.chunks(BATCH).map(|batch| self.message(&backend, batch, now_ms)).collect()
    }

    fn message(&mut self, backend: &str, batch: &[ObjectEvent], now_ms: u64) -> Arc<[u8]> {
        let mut out = Writer::default();
        out.array(3);
        out.uint(now_ms);
        out.array(batch.len() as u32);
        for event in batch {
            self.event_id += 1;
            let name = self.names.names.get(&event.digest);
            write_event(&mut out, backend, event, name, self.event_id, now_ms);
        }
        out.uint(0);
        self.sequence += 1;
        message(&[TOPIC, &self.sequence.to_be_bytes(), &out.finish()]).into()
    }
}

fn write_event(out: &mut Writer, backend: &str, event: &ObjectEvent, name: Option<&Name>, event_id: u64, now_ms: u64) {
    let (tenant, key) = name.map_or(("default", None), |(tenant, key)| (tenant.as_str(), Some(key)));
    let (kind, legacy) = match event.change {
        ObjectChange::Stored => ("stored", "BlockStored"),
        ObjectChange::Removed => ("removed", "BlockRemoved"),
        ObjectChange::Cleared => ("cleared", "AllBlocksCleared"),
    };
    let stored = event.change == ObjectChange::Stored;
    out.map(if stored { 21 } else { 18 });
    for (name, value) in [("event_id", event_id), ("timestamp", now_ms)] {
        out.text(name);
        out.uint(value);
    }
    let medium = match event.medium {
        ObjectMedium::Memory => "cpu",
        ObjectMedium::Ssd => "disk",
    };
    let texts =
        [("event_type", kind), ("type", legacy), ("tenant_id", tenant), ("backend_id", backend), ("medium", medium)];
    for (name, value) in texts {
        out.text(name);
        out.text(value);
    }
    for name in ["model_name", "block_size", "additional_salt", "lora_name", "group_id", "dp_rank"] {
        out.text(name);
        out.nil();
    }
    for name in ["seq_hashes", "block_hashes"] {
        out.text(name);
        out.array(0);
    }
    out.text("object_key");
    match key {
        Some(key) => out.text(key),
        None => out.nil(),
    }
    out.text("object_digest");
    out.text(&format!("{:032x}", event.digest.0));
    out.text("base_block_idx");
    if stored {
        out.uint(0);
        for name in ["parent_hash", "token_ids", "parent_block_hash"] {
            out.text(name);
            out.nil();
        }
    } else {
        out.nil();
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Listens on `address`; needs a runtime.
pub(crate) async fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Serves until it is dropped.
pub(crate) async fn serve(listener: Arc<TcpListener>, cluster: Arc<ClusterHost>, backend: String) {
    let (messages, _) = broadcast::channel(MESSAGES);
    let (count, counted) = watch::channel(0usize);
    let (fresh, wanted) = mpsc::channel(1);
    let publishing = publish(cluster, backend, messages.clone(), counted, wanted);
    let serving = accept(listener, messages, count, fresh);
    tokio::join!(publishing, serving);
}

async fn accept(
    listener: Arc<TcpListener>,
    messages: broadcast::Sender<Arc<[u8]>>,
    count: watch::Sender<usize>,
    fresh: mpsc::Sender<()>,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                // A connection beyond the limit is closed at once.
                Ok(_) if connections.len() >= SUBSCRIBERS => {}
                Ok((stream, _)) => {
                    connections.spawn(subscriber(stream, messages.clone(), fresh.clone()));
                }
                // Mostly out of file descriptors: accepting at once again would spin.
                Err(_) => sleep(Duration::from_millis(100)).await,
            },
            Some(_) = connections.join_next() => {}
        }
        count.send_if_modified(|count| core::mem::replace(count, connections.len()) != connections.len());
    }
}

/// Publishes events while there are subscribers.
async fn publish(
    cluster: Arc<ClusterHost>,
    backend: String,
    messages: broadcast::Sender<Arc<[u8]>>,
    mut counted: watch::Receiver<usize>,
    mut wanted: mpsc::Receiver<()>,
) {
    let mut publisher = Publisher::new(backend);
    loop {
        // The other half of the server, which lives as long.
        if counted.wait_for(|count| *count > 0).await.is_err() {
            return;
        }
        let Ok(mut events) = cluster.watch_events() else {
            sleep(RETRY).await;
            continue;
        };
        loop {
            tokio::select! {
                item = events.recv() => match item {
                    Some(frame) => {
                        // The frame was encoded by this process.
                        let Ok(Events { events }) = decode::<Events>(&frame) else { continue };
                        for message in publisher.messages(&events, now_ms()) {
                            // An error means that there is no subscriber.
                            let _ = messages.send(message);
                        }
                    }
                    // The publisher did not keep up: a snapshot follows.
                    None => {
                        publisher.sequence += 1;
                        break;
                    }
                },
                Some(()) = wanted.recv() => cluster.want_snapshot(),
                changed = counted.changed() => {
                    if changed.is_err() || *counted.borrow() == 0 {
                        break;
                    }
                }
            }
        }
    }
}

async fn subscriber(stream: TcpStream, messages: broadcast::Sender<Arc<[u8]>>, fresh: mpsc::Sender<()>) {
    let (mut read, mut write) = stream.into_split();
    let mut peer = Subscriber::default();
    let mut all = messages.subscribe();
    // A peer that breaks the protocol, is slow or disconnects harms only itself.
    let greeted = async {
        send(&mut write, &hello()).await?;
        while !peer.is_ready() {
            let mut bytes = [0; READ_BYTES];
            let count = read.read(&mut bytes).await?;
            take(&bytes[..count], &mut write, &mut peer, &fresh).await?;
        }
        io::Result::Ok(())
    };
    if !matches!(timeout(HANDSHAKE, greeted).await, Ok(Ok(()))) {
        return;
    }
    let mut bytes = [0; READ_BYTES];
    loop {
        // Dropping either future here loses nothing: both a read and a wait for a message are cancel-safe.
        let done = tokio::select! {
            count = read.read(&mut bytes) => match count {
                Ok(count) => take(&bytes[..count], &mut write, &mut peer, &fresh).await,
                Err(error) => Err(error),
            },
            message = all.recv() => match message {
                Ok(message) if peer.wants(TOPIC) => send(&mut write, &message).await,
                // The numbers show what it missed.
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => Ok(()),
                Err(broadcast::error::RecvError::Closed) => return,
            },
        };
        if done.is_err() {
            return;
        }
    }
}

/// Handles the bytes that a subscriber sent; no bytes mean that it closed.
async fn take(
    bytes: &[u8],
    write: &mut OwnedWriteHalf,
    peer: &mut Subscriber,
    fresh: &mpsc::Sender<()>,
) -> io::Result<()> {
    if bytes.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    for said in peer.take(bytes).map_err(io::Error::other)? {
        match said {
            // A snapshot that is requested already will do.
            SubscriberInput::Subscribed => drop(fresh.try_send(())),
            SubscriberInput::Answer(answer) => send(write, &answer).await?,
        }
    }
    Ok(())
}

async fn send(write: &mut OwnedWriteHalf, bytes: &[u8]) -> io::Result<()> {
    timeout(WRITE, write.write_all(bytes)).await.map_err(io::Error::from)?
}

#[cfg(test)]
mod tests {
    use kvplane_conductor::engine::msgpack::Value;
    use kvplane_rpc::message::EventName;

    use super::*;

    fn report(part: EventReport, lost: u64, count: usize) -> NodeEvents {
        let (change, medium) = (ObjectChange::Stored, ObjectMedium::Ssd);
        let stored = |digest| ObjectEvent { change, medium, digest: Digest(digest), bytes: 5 };
        let events = (0..count as u128).map(stored).collect();
        NodeEvents { node: 7, incarnation: 1, shard: 2, part, first: 1, lost, events, names: Vec::new() }
    }

    fn sequence(message: &[u8]) -> u64 {
        assert_eq!(message[..4], [1, 0, 1, 8], "an empty topic, then eight bytes");
        u64::from_be_bytes(message[4..12].try_into().expect("eight bytes"))
    }

    #[test]
    fn batches_are_numbered_from_one_and_what_is_missing_leaves_a_gap() {
        let mut publisher = Publisher::new("test".to_owned());
        let first = publisher.messages(&report(EventReport::Live, 0, 130), 1000);
        assert_eq!(first.iter().map(|one| sequence(one)).collect::<Vec<_>>(), [1, 2, 3]);
        let after = publisher.messages(&report(EventReport::Live, 9, 1), 1000);
        assert_eq!(sequence(&after[0]), 5);
        // A snapshot begins with `cleared` events.
        let snapshot = publisher.messages(&report(EventReport::SnapshotBegins, 0, 0), 1000);
        let text = String::from_utf8_lossy(&snapshot[0]).into_owned();
        assert_eq!(text.matches("AllBlocksCleared").count(), 2, "{text}");
        assert!(text.contains("test/7/2"), "{text}");
        assert_eq!(publisher.event_id, 133);
    }

    #[test]
    fn events_tell_keys_also_of_what_is_removed() {
        let mut publisher = Publisher::new("test".to_owned());
        let mut stored = report(EventReport::Live, 0, 2);
        let name = |at, key: &[u8]| EventName { at, tenant: b"acme".to_vec(), key: key.to_vec() };
        stored.names = vec![name(0, b"model/0"), name(1, b"odd\xff")];
        let text = |messages: &[Arc<[u8]>]| String::from_utf8_lossy(&messages.concat()).into_owned();
        let told = text(&publisher.messages(&stored, 1));
        assert!(told.contains("model/0") && told.contains("odd\\xff") && told.contains("acme"), "{told}");
        let mut removed = report(EventReport::Live, 0, 2);
        removed.events.iter_mut().for_each(|event| event.change = ObjectChange::Removed);
        assert!(text(&publisher.messages(&removed, 1)).contains("model/0"));
        // The remembered names are limited.
        for at in 0..2000u128 {
            publisher.names.note(Digest(at), ("t".to_owned(), "k".repeat(100_000)));
        }
        assert!(publisher.names.bytes <= NAMES_BYTES && publisher.names.names.len() == publisher.names.order.len());
    }

    #[test]
    fn an_event_is_the_map_that_it_says() {
        let event = report(EventReport::Live, 0, 1).events[0];
        for (change, fields) in [(ObjectChange::Stored, 21), (ObjectChange::Removed, 18), (ObjectChange::Cleared, 18)] {
            let mut out = Writer::default();
            write_event(&mut out, "b", &ObjectEvent { change, ..event }, None, 3, 4);
            let bytes = out.finish();
            let Some(Value::Map(entries)) = Value::read(&bytes) else { panic!("{change:?}: no map") };
            assert_eq!(entries.len(), fields, "{change:?}");
        }
    }
}
