//! Subscriber of the events that an engine publishes of its cache over ZeroMQ, or a master of its store, as long as it
//! is registered.
//!
//! Messages have a topic, a number and a batch. After a gap in the numbers, the missing batches are requested from the
//! engine's replay socket, if it has one; batches that it does not hold any more are lost, and the Conductor is
//! notified of the gap. After a reconnection, numbers that start over mean that the engine restarted, and so does
//! another batch with the number of the last one, which engines replay if they still have it. The subscriber
//! reconnects to an unreachable publisher; the longer it is unreachable, the less its engine's known cache counts
//! ([`kvplane_conductor::conductor::Conductor::away`]).

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_conductor::conductor::{
    BlockChange, CacheBatch, CacheReport, ConductorError, EventSource, FeedPosition, FollowedFeed,
};
use kvplane_conductor::engine::read_batch;
use kvplane_proto::Digest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::feeds::FeedCounts;
use super::host::ConductorHost;
use super::master::{FORGET, Master};
use crate::events::zmtp::message;
use crate::events::zmtp_client::{Kind, Peer, PeerInput, hello, subscription};

/// Deadline of connecting with the handshake, and of each part of a replay.
const DEADLINE: Duration = Duration::from_secs(5);
/// Backoff after a broken connection.
const AGAIN: Duration = Duration::from_millis(500);
/// Time within which attempts to confirm the blocks of a snapshot by a replay begin, before the blocks are dropped: no
/// other events of the engine are read meanwhile.
const CONFIRM_WITHIN: Duration = Duration::from_secs(15);
/// Backoff after the first of these attempts; it doubles.
const CONFIRM_AGAIN: Duration = Duration::from_millis(500);
/// Most batches of one replay: ten times what engines keep.
const REPLAYED: usize = 100_000;
/// Idle time after which TCP keepalives probe a publisher's host.
const IDLE: Duration = Duration::from_secs(10);
const READ_BYTES: usize = 64 << 10;

/// Source of events, and the feed that they belong to.
pub(super) struct EventOrigin {
    pub source: EventSource,
    pub feed: Feed,
}

/// Feed of events.
pub(super) enum Feed {
    /// Cache of an engine.
    Engine { instance: String, incarnation: u64, block_tokens: u32 },
    /// Store of a master.
    Master(Master),
}

/// Returns the address within `tcp://HOST:PORT`.
pub(super) fn address_of(url: &str) -> Option<&str> {
    let address = url.strip_prefix("tcp://").unwrap_or(url);
    let (host, port) = address.rsplit_once(':')?;
    (!host.is_empty() && host != "*" && port.parse::<u16>().is_ok_and(|port| port != 0)).then_some(address)
}

/// One ZeroMQ connection.
struct Line {
    stream: TcpStream,
    peer: Peer,
    heard: std::collections::VecDeque<PeerInput>,
}

impl Line {
    async fn open(url: &str, kind: Kind) -> io::Result<Self> {
        let address = address_of(url).ok_or_else(|| io::Error::other("no address"))?;
        let opening = async {
            let mut stream = TcpStream::connect(address).await?;
            // Both an idle publisher and a lost host are silent.
            kvplane_sys::net::enable_keepalive(stream.as_fd(), IDLE)?;
            stream.write_all(&hello(kind)).await?;
            let mut line = Self { stream, peer: Peer::default(), heard: std::collections::VecDeque::new() };
            match line.next().await? {
                PeerInput::Ready => Ok(line),
                _ => Err(io::Error::other("a message before READY")),
            }
        };
        timeout(DEADLINE, opening).await.map_err(io::Error::from)?
    }

    async fn next(&mut self) -> io::Result<PeerInput> {
        loop {
            if let Some(heard) = self.heard.pop_front() {
                return Ok(heard);
            }
            let mut bytes = vec![0; READ_BYTES];
            let count = self.stream.read(&mut bytes).await?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.heard.extend(self.peer.take(&bytes[..count]).map_err(io::Error::other)?);
        }
    }

    /// Receives the next message, and answers other input. Returns none if a new model came first.
    async fn message_or_model(&mut self, models: &mut watch::Receiver<u64>) -> io::Result<Option<Vec<Vec<u8>>>> {
        loop {
            // A read is cancel-safe.
            let heard = tokio::select! {
                heard = self.next() => heard?,
                Ok(()) = models.changed() => return Ok(None),
            };
            match heard {
                PeerInput::Message(parts) => return Ok(Some(parts)),
                PeerInput::Answer(answer) => timeout(DEADLINE, self.stream.write_all(&answer)).await??,
                PeerInput::Ready => {}
            }
        }
    }

    /// Receives the next message, and answers other input.
    async fn message(&mut self) -> io::Result<Vec<Vec<u8>>> {
        loop {
            match self.next().await? {
                PeerInput::Message(parts) => return Ok(parts),
                PeerInput::Answer(answer) => timeout(DEADLINE, self.stream.write_all(&answer)).await??,
                PeerInput::Ready => {}
            }
        }
    }
}

/// Follows the events until the instance is not registered any more in this incarnation.
pub(super) async fn follow(host: Arc<ConductorHost>, counts: Arc<FeedCounts>, followed: EventOrigin) {
    let unconfirmed = match &followed.feed {
        Feed::Engine { instance, incarnation, .. } => {
            host.look(|conductor, _| FollowedFeed::of(instance, *incarnation).unconfirmed(conductor))
        }
        Feed::Master(_) => None,
    };
    let mut subscriber = EventSubscriber { host, counts, followed, next: None, mark: None, unconfirmed, away: false };
    let mut away_since = None;
    loop {
        let began = Instant::now();
        match subscriber.connected().await {
            Err(FollowEnd::Gone) => return,
            // The publisher is unreachable, or there is none at that address.
            Err(FollowEnd::Broken(error)) => {
                // An attempt takes no longer than its deadline; a longer time means that there was a connection.
                if began.elapsed() > 2 * DEADLINE {
                    away_since = None;
                }
                let since = *away_since.get_or_insert_with(Instant::now);
                if let Feed::Master(master) = &mut subscriber.followed.feed
                    && since.elapsed() > FORGET
                {
                    (subscriber.next, away_since) = (None, None);
                    master.forget(true);
                }
                if let Err(FollowEnd::Gone) = subscriber.is_away(since.elapsed(), &error) {
                    return;
                }
                sleep(AGAIN).await;
            }
        }
    }
}

/// End of following over one connection.
enum FollowEnd {
    Broken(io::Error),
    Gone,
}

/// End of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplayEnd {
    /// The engine marked the end.
    Whole {
        /// True if the replay began with the batch that was applied last.
        proven: bool,
    },
    /// There is no replay socket, or it did not answer to the end.
    Cut,
    /// The batch that was applied last is another one: the engine has restarted.
    Foreign,
}

impl From<io::Error> for FollowEnd {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

struct EventSubscriber {
    host: Arc<ConductorHost>,
    counts: Arc<FeedCounts>,
    followed: EventOrigin,
    /// Number of the next batch.
    next: Option<u64>,
    /// Digest of the batch before it.
    mark: Option<u128>,
    /// Position of a snapshot that its publisher has not confirmed yet.
    unconfirmed: Option<FeedPosition>,
    /// True if the last attempt to reach the publisher failed.
    away: bool,
}

impl EventSubscriber {
    /// Records that the publisher has been unreachable for `elapsed`: the known cache of its engine counts for less and
    /// less.
    fn is_away(&mut self, elapsed: Duration, error: &io::Error) -> Result<(), FollowEnd> {
        let publisher = &self.followed.source.publisher;
        if !std::mem::replace(&mut self.away, true) {
            self.counts.note_lost_publisher();
            tracing::warn!(publisher, "a publisher of cache events is unreachable, retrying: {error}");
        }
        let Feed::Engine { instance, incarnation, .. } = &self.followed.feed else { return Ok(()) };
        let for_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        let said = self.host.with(|conductor, now_ns| Ok(conductor.away(instance, *incarnation, for_ns, now_ns)));
        match said {
            Ok(Err(ConductorError::UnknownInstance { .. } | ConductorError::StaleIncarnation { .. })) => {
                Err(FollowEnd::Gone)
            }
            Ok(Ok(true)) => {
                self.unconfirmed = None;
                if self.next.take().is_some() {
                    tracing::warn!(publisher, instance, "unreachable for too long: its cache counts as empty");
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Records that the publisher is reachable, and that the replay of missed batches is complete.
    fn is_back(&mut self) {
        if std::mem::replace(&mut self.away, false) {
            tracing::info!(
                publisher = self.followed.source.publisher,
                "a publisher of cache events is reachable again"
            );
        }
        if let Feed::Engine { instance, incarnation, .. } = &self.followed.feed {
            // An instance that is not registered any more is not followed for long.
            let _ = self.host.with(|conductor, now_ns| conductor.reached(instance, *incarnation, now_ns));
        }
    }

    async fn connected(&mut self) -> Result<std::convert::Infallible, FollowEnd> {
        let source = self.followed.source.clone();
        let mut line = Line::open(&source.publisher, Kind::Subscriber).await?;
        let words = subscription(source.topic.as_bytes());
        timeout(DEADLINE, line.stream.write_all(&words)).await.map_err(io::Error::from)??;
        // Batches published before this connection. Smaller numbers belong to an earlier incarnation.
        let mut before = self.unconfirmed.map(|position| position.next).or(self.next);
        let mut end = match self.unconfirmed {
            Some(position) => self.settle(position).await?,
            None => self.catch_up().await?,
        };
        if end == ReplayEnd::Foreign {
            before = None;
            end = self.replay(0, None).await?;
        }
        let replayed = matches!(end, ReplayEnd::Whole { .. });
        if replayed && self.next.is_none() && matches!(self.followed.feed, Feed::Engine { .. }) {
            // It has published nothing yet, so its cache is empty; the next number is 0.
            self.batch(u64::MAX, CacheReport::Snapshot, Vec::new(), None)?;
        }
        // Without a replay only the next batch tells whether some were missed.
        let mut is_back = replayed || self.next.is_none() || matches!(self.followed.feed, Feed::Master(_));
        if is_back {
            self.is_back();
        }
        let mut models = self.host.models();
        if let Feed::Master(master) = &self.followed.feed {
            // Models that were registered during the disconnection.
            master.tell_all().await;
        }
        loop {
            let Some(parts) = line.message_or_model(&mut models).await? else {
                if let Feed::Master(master) = &self.followed.feed {
                    master.tell_all().await;
                }
                continue;
            };
            let Some((seq, payload)) = numbered(&parts) else { continue };
            match self.next {
                Some(_) if before.is_some_and(|before| seq < before) => {
                    before = None;
                    self.began_anew(seq, payload).await?;
                }
                // The batch was replayed already.
                Some(next) if seq < next => {}
                Some(next) if seq > next => {
                    self.note_published(seq.saturating_add(1));
                    self.replay(next, None).await?;
                    let missing = self.next.is_none_or(|next| seq > next);
                    let change = if missing { CacheReport::Lost } else { CacheReport::Goes };
                    self.take(seq, change, payload)?;
                }
                _ => self.take(seq, CacheReport::Goes, payload)?,
            }
            if !std::mem::replace(&mut is_back, true) {
                self.is_back();
            }
        }
    }

    /// Handles an engine whose numbers start over: its former cache is gone.
    async fn began_anew(&mut self, seq: u64, payload: &[u8]) -> Result<(), FollowEnd> {
        if seq == 0 {
            return self.take(0, CacheReport::Snapshot, payload);
        }
        // The empty cache precedes number 0, so that batch 0 counts too if it is replayed.
        self.batch(u64::MAX, CacheReport::Snapshot, Vec::new(), None)?;
        self.note_published(seq.saturating_add(1));
        self.replay(0, None).await?;
        let missing = self.next.is_none_or(|next| seq > next);
        self.take(seq, if missing { CacheReport::Lost } else { CacheReport::Goes }, payload)
    }

    /// Applies the batches published since the last connection. If the last applied batch is another one there by now,
    /// the engine has restarted, whatever its numbers are: its former cache is gone.
    async fn catch_up(&mut self) -> Result<ReplayEnd, FollowEnd> {
        let end = match (self.next, self.mark) {
            (Some(next), Some(mark)) => match self.replay(next.saturating_sub(1), Some(mark)).await? {
                // It has neither the last batch nor a later one: it has published nothing yet.
                ReplayEnd::Whole { proven: false } if self.next == Some(next) => ReplayEnd::Foreign,
                end => end,
            },
            (next, _) => self.replay(next.unwrap_or(0), None).await?,
        };
        if end == ReplayEnd::Foreign {
            self.batch(u64::MAX, CacheReport::Snapshot, Vec::new(), None)?;
        }
        Ok(end)
    }

    /// Continues at the position of a snapshot, if the publisher is the one that the snapshot is of, and still has what
    /// followed: it replays the last batch that was applied, unchanged, and then the following ones. A replay that
    /// fails proves nothing, and is requested again from where it ended, a few times. Otherwise the blocks of the
    /// snapshot are dropped, and its events begin anew.
    async fn settle(&mut self, mut position: FeedPosition) -> Result<ReplayEnd, FollowEnd> {
        let (until, mut backoff) = (Instant::now() + CONFIRM_WITHIN, CONFIRM_AGAIN);
        let end = loop {
            (self.next, self.mark) = (Some(position.next), position.mark);
            let end = self.replay(position.next.saturating_sub(1), position.mark).await?;
            if end != ReplayEnd::Cut || Instant::now() + backoff >= until {
                break end;
            }
            let Feed::Engine { instance, incarnation, .. } = &self.followed.feed else { return Ok(end) };
            let feed = FollowedFeed::of(instance, *incarnation);
            // The batches before the end of the replay were applied. If one of them dropped the blocks, the next batch
            // tells what is missing, as after any replay that fails.
            let Some(reached) = self.host.look(|conductor, _| feed.unconfirmed(conductor)) else {
                self.unconfirmed = None;
                return Ok(end);
            };
            (position, self.unconfirmed) = (reached, Some(reached));
            tracing::warn!(instance, position = position.next, "a replay failed that confirms its blocks");
            sleep(backoff).await;
            backoff *= 2;
        };
        self.unconfirmed = None;
        let continues = end == ReplayEnd::Whole { proven: true };
        let Feed::Engine { instance, incarnation, .. } = &self.followed.feed else { return Ok(end) };
        let feed = FollowedFeed::of(instance, *incarnation);
        // An instance that is not registered any more is not followed for long.
        if continues {
            tracing::info!(instance, from = position.next, next = self.next, "its publisher continues after a restart");
            let _ = self.host.with(|conductor, _| feed.confirm(conductor));
        } else {
            tracing::warn!(
                instance,
                position = position.next,
                is_unanswered = end == ReplayEnd::Cut,
                "its publisher has restarted, no longer has the batches since, or does not replay them: its former \
                 blocks are dropped"
            );
            let _ = self.host.with(|conductor, _| feed.drop_unconfirmed(conductor));
            (self.next, self.mark) = (None, None);
        }
        Ok(if continues { end } else { ReplayEnd::Foreign })
    }

    /// Notes that the publisher has published all batches before `newest`.
    fn note_published(&self, newest: u64) {
        let Feed::Engine { instance, incarnation, .. } = &self.followed.feed else { return };
        // An instance that is not registered any more is not followed for long.
        let _ =
            self.host.with(|conductor, _| FollowedFeed::of(instance, *incarnation).note_published(conductor, newest));
    }

    /// Applies the batches from `from` on that the engine still holds. With `proof`, the batch `from` was applied
    /// before, with this digest: the replay ends at once if it is another one now.
    async fn replay(&mut self, from: u64, proof: Option<u128>) -> Result<ReplayEnd, FollowEnd> {
        let mut proven = false;
        if self.followed.source.replay.is_empty() {
            return Ok(ReplayEnd::Cut);
        }
        // Without a replay there is a gap, which is reported.
        let Ok(mut line) = Line::open(&self.followed.source.replay, Kind::Dealer).await else {
            return Ok(ReplayEnd::Cut);
        };
        let asked = message(&[b"", &from.to_be_bytes()]);
        if !matches!(timeout(DEADLINE, line.stream.write_all(&asked)).await, Ok(Ok(()))) {
            return Ok(ReplayEnd::Cut);
        }
        for _ in 0..REPLAYED {
            let Ok(Ok(parts)) = timeout(DEADLINE, line.message()).await else { return Ok(ReplayEnd::Cut) };
            let Some((seq, payload)) = numbered(&parts) else { return Ok(ReplayEnd::Cut) };
            if seq == u64::MAX {
                return Ok(ReplayEnd::Whole { proven });
            }
            if let Some(mark) = proof.filter(|_| seq == from) {
                if mark_of(payload) != mark {
                    return Ok(ReplayEnd::Foreign);
                }
                proven = true;
            }
            let change = match self.next {
                Some(next) if seq < next => continue,
                Some(next) if seq > next => CacheReport::Lost,
                // The oldest batch that the engine keeps may not be the first one it sent.
                None if seq > from => CacheReport::Lost,
                _ => CacheReport::Goes,
            };
            self.take(seq, change, payload)?;
        }
        Ok(ReplayEnd::Cut)
    }

    fn take(&mut self, seq: u64, change: CacheReport, payload: &[u8]) -> Result<(), FollowEnd> {
        let block_tokens = match &mut self.followed.feed {
            Feed::Engine { block_tokens, .. } => *block_tokens,
            Feed::Master(master) => {
                // A master's messages are numbered from 1.
                let missing = change == CacheReport::Lost || self.next.is_none();
                if change == CacheReport::Snapshot || missing {
                    master.forget(missing && seq > 1);
                }
                let (unread, foreign) = master.take(payload);
                self.counts.note_skipped(unread, foreign);
                self.next = Some(seq.wrapping_add(1));
                return Ok(());
            }
        };
        let read = read_batch(payload, block_tokens);
        let unread = read.as_ref().map_or(1, |batch| batch.unread);
        self.counts.note_skipped(unread, read.as_ref().map_or(0, |batch| batch.foreign));
        // A batch that cannot be read may have had removals.
        let change = if read.is_none() { CacheReport::Lost } else { change };
        let read = read.unwrap_or_default();
        self.batch(seq, change, read.events, Some(mark_of(payload)))
    }

    /// Applies a batch; `mark` is the digest of its message.
    fn batch(
        &mut self,
        seq: u64,
        kind: CacheReport,
        changes: Vec<BlockChange>,
        mark: Option<u128>,
    ) -> Result<(), FollowEnd> {
        let Feed::Engine { instance, incarnation, .. } = &self.followed.feed else {
            self.next = Some(seq.wrapping_add(1));
            return Ok(());
        };
        let batch = CacheBatch { seq, kind, changes };
        let mut gone = false;
        let _ = self.host.with(|conductor, now_ns| {
            let mut taken = conductor.cache(instance, *incarnation, batch, now_ns);
            gone =
                matches!(taken, Err(ConductorError::UnknownInstance { .. } | ConductorError::StaleIncarnation { .. }));
            if taken.is_err() && !gone {
                // The batch may have had removals.
                let lost = CacheBatch { seq, kind: CacheReport::Lost, changes: Vec::new() };
                taken = conductor.cache(instance, *incarnation, lost, now_ns);
            }
            if let Some(mark) = mark.filter(|_| taken.is_ok()) {
                FollowedFeed::of(instance, *incarnation).set_mark(conductor, mark)?;
            }
            taken
        });
        (self.next, self.mark) = (Some(seq.wrapping_add(1)), mark);
        if gone { Err(FollowEnd::Gone) } else { Ok(()) }
    }
}

/// Returns the digest of a batch. Engines put the time into each, so it differs between two incarnations.
fn mark_of(payload: &[u8]) -> u128 {
    Digest::of(b"batch", payload).0
}

/// Returns number and batch of a message: its last two parts.
fn numbered(parts: &[Vec<u8>]) -> Option<(u64, &[u8])> {
    let [.., seq, payload] = parts else { return None };
    Some((u64::from_be_bytes(seq.as_slice().try_into().ok()?), payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_need_a_host_and_a_port() {
        assert_eq!(address_of("tcp://10.0.0.1:5557"), Some("10.0.0.1:5557"));
        assert_eq!(address_of("host:1"), Some("host:1"));
        for none in ["", "tcp://", "tcp://*:5557", "tcp://host", "tcp://host:0", "tcp://host:99999", "ipc:///tmp/x"] {
            assert_eq!(address_of(none), None, "{none}");
        }
    }
}
