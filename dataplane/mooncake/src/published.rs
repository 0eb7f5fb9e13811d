//! Engine as the handshake daemon publishes it, and the notices that peers sent to it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::descriptor::{Descriptor, DescriptorError};
use crate::notice::Notice;
use crate::rdma_handshake::RdmaHandshake;

/// Engine that a daemon serves. The methods are called on the daemon's thread, which serves no other peer meanwhile:
/// they must answer from memory, at once.
pub trait Local: Send + Sync {
    /// Returns the segment's current descriptor, in JSON.
    fn descriptor(&self) -> Arc<str>;

    /// Takes a notice of a peer.
    ///
    /// # Errors
    /// If there is no room for it; the peer gets the error.
    fn notified(&self, notice: Notice) -> Result<(), NoticesFull>;

    /// Handles a peer's request for an RDMA connection, or its confirmation that its half of one is connected. Returns
    /// the reply, which may be a refusal.
    fn connect(&self, request: &RdmaHandshake) -> RdmaHandshake;
}

/// Function that makes the RDMA connections that peers request. It is called on the daemon's thread, which serves no
/// other peer meanwhile.
pub type Connector = Box<dyn Fn(&RdmaHandshake) -> RdmaHandshake + Send + Sync>;

/// Reason of the refusal if there is no RDMA.
const NO_RDMA: &str = "this engine has no RDMA transport: reach its segment over the TCP that its descriptor names";

/// Limits of the notices that are queued until the engine's user takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoticeLimits {
    /// Most notices.
    pub notices: usize,
    /// Most bytes of their texts.
    pub bytes: usize,
}

impl Default for NoticeLimits {
    fn default() -> Self {
        Self { notices: 4096, bytes: 16 << 20 }
    }
}

/// Error of a refused notice: the user of the engine does not take notices fast enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoticesFull {
    /// Notices queued.
    pub notices: usize,
    /// Bytes of their texts.
    pub bytes: usize,
}

impl fmt::Display for NoticesFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { notices, bytes } = self;
        write!(f, "the queue of notices is full: {notices} notices of {bytes} bytes were not taken yet")
    }
}

impl std::error::Error for NoticesFull {}

#[derive(Default)]
struct NoticeQueue {
    notices: VecDeque<Notice>,
    bytes: usize,
}

/// A [`Local`] whose descriptor is replaced as a whole and whose notices are in a bounded queue.
///
/// A full queue refuses the new notice, and the sender gets the error: a notice that was answered with success is never
/// dropped. (A stock engine ignores the answer.) Any thread may use it.
pub struct PublishedEngine {
    descriptor: Mutex<Arc<str>>,
    waiting: Mutex<NoticeQueue>,
    limits: NoticeLimits,
    max_message_bytes: usize,
    connector: OnceLock<Connector>,
}

impl PublishedEngine {
    /// Creates an engine with `descriptor`, of at most `max_message_bytes` in JSON.
    ///
    /// # Errors
    /// If it cannot be encoded.
    pub fn new(
        descriptor: &Descriptor,
        max_message_bytes: usize,
        limits: NoticeLimits,
    ) -> Result<Self, DescriptorError> {
        let text = encode(descriptor, max_message_bytes)?;
        let waiting = Mutex::default();
        Ok(Self { descriptor: Mutex::new(text), waiting, limits, max_message_bytes, connector: OnceLock::new() })
    }

    /// Replaces the descriptor. Later requests get the new one, as a whole. Returns its JSON, for central metadata.
    ///
    /// # Errors
    /// If it cannot be encoded; the old one stays.
    pub fn replace(&self, descriptor: &Descriptor) -> Result<Arc<str>, DescriptorError> {
        let text = encode(descriptor, self.max_message_bytes)?;
        *lock(&self.descriptor) = Arc::clone(&text);
        Ok(text)
    }

    /// Sets the connector that answers requests for RDMA connections; the first one stays.
    pub fn set_connector(&self, connector: Connector) {
        // A second one would do the same.
        let _ = self.connector.set(connector);
    }

    /// Takes the queued notices, oldest first.
    pub fn take_notices(&self) -> Vec<Notice> {
        let mut waiting = lock(&self.waiting);
        waiting.bytes = 0;
        std::mem::take(&mut waiting.notices).into()
    }
}

/// Encodes a descriptor. The type byte counts towards the frame's limit.
fn encode(descriptor: &Descriptor, max_message_bytes: usize) -> Result<Arc<str>, DescriptorError> {
    Ok(descriptor.encode(max_message_bytes.saturating_sub(1))?.into())
}

// The guarded data is consistent at every point, so a panic in another thread does not spoil it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Local for PublishedEngine {
    fn descriptor(&self) -> Arc<str> {
        Arc::clone(&lock(&self.descriptor))
    }

    fn notified(&self, notice: Notice) -> Result<(), NoticesFull> {
        let bytes = notice.name.len() + notice.message.len();
        let mut waiting = lock(&self.waiting);
        if waiting.notices.len() >= self.limits.notices || waiting.bytes + bytes > self.limits.bytes {
            return Err(NoticesFull { notices: waiting.notices.len(), bytes: waiting.bytes });
        }
        waiting.bytes += bytes;
        waiting.notices.push_back(notice);
        Ok(())
    }

    fn connect(&self, request: &RdmaHandshake) -> RdmaHandshake {
        match self.connector.get() {
            Some(connector) => connector(request),
            None => RdmaHandshake::refused(NO_RDMA),
        }
    }
}

impl fmt::Debug for PublishedEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let waiting = lock(&self.waiting).notices.len();
        f.debug_struct("PublishedEngine").field("waiting", &waiting).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(number: usize) -> Notice {
        Notice { name: format!("n{number}"), message: "abc".to_owned() }
    }

    fn published(limits: NoticeLimits) -> PublishedEngine {
        let descriptor = Descriptor::tcp("127.0.0.1:1", "127.0.0.1", 2);
        PublishedEngine::new(&descriptor, 1 << 20, limits).expect("a good descriptor")
    }

    #[test]
    fn notices_wait_in_order_up_to_a_limit_and_none_is_dropped() {
        let published = published(NoticeLimits { notices: 3, bytes: 1 << 10 });
        for number in 0..3 {
            published.notified(notice(number)).expect("room");
        }
        let full = published.notified(notice(3)).expect_err("no room");
        assert_eq!(full, NoticesFull { notices: 3, bytes: 15 });
        assert_eq!(published.take_notices(), [notice(0), notice(1), notice(2)]);
        assert_eq!(published.take_notices(), []);
        published.notified(notice(4)).expect("room again");
    }

    #[test]
    fn bytes_are_limited_too() {
        let published = published(NoticeLimits { notices: 100, bytes: 12 });
        published.notified(notice(0)).expect("room");
        published.notified(notice(1)).expect("room");
        assert!(published.notified(notice(2)).is_err());
        published.take_notices();
        published.notified(notice(3)).expect("room again");
    }

    #[test]
    fn a_descriptor_that_cannot_be_leaves_the_old_one() {
        let published = published(NoticeLimits::default());
        let before = published.descriptor();
        let mut descriptor = Descriptor::tcp("127.0.0.1:1", "127.0.0.1", 2);
        descriptor.buffers.push(crate::Buffer::new("cpu:0", 0, 1));
        assert!(published.replace(&descriptor).is_err());
        assert_eq!(published.descriptor(), before);
        descriptor.buffers[0].address = 4096;
        let text = published.replace(&descriptor).expect("a good one");
        assert!(text.contains("4096") && published.descriptor() == text);
    }
}
