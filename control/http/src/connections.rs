//! Connections of a server: limits in all and per address, and the choice of connections to close.
//!
//! A connection is *idle* until the head of its request has arrived. When a limit is reached, the oldest idle
//! connection is closed for a new one; at the limit per address, the oldest of that address. So idle connections cannot
//! lock out probes. The number of concurrent requests is limited; probes are served beside them.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, Semaphore, SemaphorePermit, oneshot};

/// Limits of connections and requests.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Most connections in all.
    pub all: usize,
    /// Most connections from one address; for IPv6, from one network of 64 bits, as that is one host's.
    pub of_one_address: usize,
    /// Most concurrent requests, probes aside.
    pub requests: usize,
    /// Time for which an idle connection keeps its place, as its request may be in flight.
    pub grace: Duration,
}

/// Open connections.
pub(crate) struct Connections {
    limits: ConnectionLimits,
    open: Mutex<Open>,
    /// Notified when a connection has closed.
    left: Notify,
    requests: Semaphore,
}

#[derive(Default)]
struct Open {
    next: u64,
    by_age: BTreeMap<u64, Entry>,
    by_address: HashMap<IpAddr, usize>,
}

struct Entry {
    from: IpAddr,
    since: Instant,
    /// Closes the connection while it is idle.
    idle: Option<oneshot::Sender<()>>,
}

impl Open {
    fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.by_age.remove(&number)?;
        if let Some(count) = self.by_address.get_mut(&entry.from) {
            *count -= 1;
            if *count == 0 {
                self.by_address.remove(&entry.from);
            }
        }
        Some(entry)
    }

    /// Closes the oldest idle connection, of one address or of all, if its grace period has passed; otherwise returns
    /// the end of that period.
    fn shed(&mut self, of: Option<IpAddr>, now: Instant, grace: Duration) -> Result<(), Option<Instant>> {
        let mut idle = self.by_age.iter().filter(|(_, entry)| entry.idle.is_some());
        let (&number, oldest) = idle.find(|(_, entry)| of.is_none_or(|of| of == entry.from)).ok_or(None)?;
        let until = oldest.since + grace;
        if until > now {
            return Err(Some(until));
        }
        if let Some(told) = self.remove(number).and_then(|entry| entry.idle) {
            // The connection may have closed already.
            let _ = told.send(());
        }
        Ok(())
    }
}

/// Decision about a new connection.
pub(crate) enum Entrance {
    /// The connection has a place.
    Open(ConnectionSlot),
    /// Its address has too many connections: it is closed.
    TooMany,
    /// All places are taken, until a connection closes or, at the latest at this time, an idle one may be closed.
    Full(Option<Instant>),
}

/// A connection's place, held until this is dropped.
pub(crate) struct ConnectionSlot {
    connections: Arc<Connections>,
    number: u64,
}

impl Connections {
    pub(crate) fn new(limits: ConnectionLimits) -> Arc<Self> {
        let requests = Semaphore::new(limits.requests);
        Arc::new(Self { limits, open: Mutex::default(), left: Notify::new(), requests })
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        // The table is consistent at every point, so a panic elsewhere does not spoil it.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a place for a connection that was accepted at `now`. The receiver fires if the connection is to close
    /// while it is idle.
    pub(crate) fn enter(self: &Arc<Self>, from: IpAddr, now: Instant) -> (Entrance, oneshot::Receiver<()>) {
        let from = network_of(from);
        let (told, gives_way) = oneshot::channel();
        let mut open = self.open();
        let limits = &self.limits;
        if open.by_address.get(&from).is_some_and(|count| *count >= limits.of_one_address)
            && open.shed(Some(from), now, limits.grace).is_err()
        {
            return (Entrance::TooMany, gives_way);
        }
        if open.by_age.len() >= limits.all
            && let Err(until) = open.shed(None, now, limits.grace)
        {
            return (Entrance::Full(until), gives_way);
        }
        open.next += 1;
        let number = open.next;
        open.by_age.insert(number, Entry { from, since: now, idle: Some(told) });
        *open.by_address.entry(from).or_default() += 1;
        (Entrance::Open(ConnectionSlot { connections: Arc::clone(self), number }), gives_way)
    }

    /// Waits until a connection closes.
    pub(crate) async fn left(&self) {
        self.left.notified().await;
    }
}

impl ConnectionSlot {
    /// Marks the connection as busy, once the head of its request has arrived: it is not closed for another one any
    /// more.
    pub(crate) fn begin(&self) {
        if let Some(entry) = self.connections.open().by_age.get_mut(&self.number) {
            entry.idle = None;
        }
    }

    /// Waits for a request's permit; probes need none, as they are answered without waiting.
    pub(crate) async fn turn(&self, is_probe: bool) -> Option<SemaphorePermit<'_>> {
        if is_probe {
            return None;
        }
        // The semaphore is never closed.
        self.connections.requests.acquire().await.ok()
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.connections.open().remove(self.number);
        self.connections.left.notify_one();
    }
}

/// Maps addresses that are likely of one host to one address.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const LIMITS: ConnectionLimits =
        ConnectionLimits { all: 6, of_one_address: 3, requests: 2, grace: Duration::from_secs(1) };

    fn host(last: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, last).into()
    }

    fn enter(connections: &Arc<Connections>, from: IpAddr, at: Instant) -> (ConnectionSlot, oneshot::Receiver<()>) {
        match connections.enter(from, at) {
            (Entrance::Open(slot), gives_way) => (slot, gives_way),
            (Entrance::TooMany, _) => panic!("{from} has too many"),
            (Entrance::Full(_), _) => panic!("all places are taken"),
        }
    }

    #[test]
    fn an_idle_connection_is_closed_for_a_new_one_of_the_same_address() {
        let connections = Connections::new(LIMITS);
        let start = Instant::now();
        let mut first: Vec<_> = (0..3).map(|_| enter(&connections, host(1), start)).collect();
        // Their requests may be in flight.
        assert!(matches!(connections.enter(host(1), start).0, Entrance::TooMany));
        let later = start + LIMITS.grace;
        let fourth = enter(&connections, host(1), later);
        let told: Vec<bool> = first.iter_mut().map(|(_, gives_way)| gives_way.try_recv().is_ok()).collect();
        assert_eq!(told, [true, false, false], "the oldest");
        // Other addresses have places of their own.
        let other = enter(&connections, host(2), later);
        // A busy connection is not closed.
        first.iter().for_each(|(slot, _)| slot.begin());
        fourth.0.begin();
        assert!(matches!(connections.enter(host(1), later + LIMITS.grace).0, Entrance::TooMany));
        drop((first, fourth, other));
        assert!(connections.open().by_age.is_empty() && connections.open().by_address.is_empty());
    }

    #[test]
    fn the_oldest_idle_connection_is_closed_when_all_places_are_taken() {
        let connections = Connections::new(LIMITS);
        let start = Instant::now();
        let mut idle: Vec<_> = (0..6).map(|at| enter(&connections, host(1 + at / 3), start)).collect();
        let (entrance, _) = connections.enter(host(9), start);
        assert!(matches!(entrance, Entrance::Full(Some(until)) if until == start + LIMITS.grace));
        let ninth = enter(&connections, host(9), start + LIMITS.grace);
        assert!(idle[0].1.try_recv().is_ok());
        ninth.0.begin();
        idle.iter().for_each(|(slot, _)| slot.begin());
        let (entrance, _) = connections.enter(host(8), start + 9 * LIMITS.grace);
        assert!(matches!(entrance, Entrance::Full(None)), "nobody is idle");
    }

    #[test]
    fn addresses_of_one_network_are_one_host() {
        let of = |text: &str| network_of(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:3"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), host(1));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
