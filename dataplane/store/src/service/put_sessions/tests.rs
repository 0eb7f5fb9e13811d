//! Tests of put sessions with a store only.

use kvplane_proto::ids::{Incarnation, NodeId, ReservationId, ShardId, Version};
use kvplane_proto::map::ShardKey;
use kvplane_proto::{Digest, Status};

use super::PutSessions;
use crate::StoreConfig;
use crate::put_session::{NewPutSession, SealError};
use crate::service::types::TicketId;
use crate::store::Store;

const SHARD: ShardKey = ShardKey { node: NodeId(1), incarnation: Incarnation(2), shard: ShardId(3) };
const DIGEST: Digest = Digest(5);
const BYTES: u64 = 1000;

struct Bed {
    store: Store,
    put_sessions: PutSessions,
    /// Number of the put session, and its memory.
    number: u64,
    reservation: ReservationId,
}

impl Bed {
    fn new() -> Self {
        let config = StoreConfig { max_objects: 8, ..StoreConfig::for_pool(1 << 20) };
        let mut store = Store::new(config, Version(1)).expect("a valid configuration");
        let (reservation, _) = store.reserve(DIGEST, BYTES).expect("there is room");
        let mut put_sessions = PutSessions::default();
        let new = NewPutSession { client: 9, digest: DIGEST, bytes: BYTES, reservation, idle_ns: 1_000 };
        let number = put_sessions.begin(SHARD, &new, 0).expect("there is room");
        Self { store, put_sessions, number: number.to_bits(), reservation }
    }

    fn fill(&mut self, offset: u64, bytes: u64) -> Result<TicketId, Status> {
        let open = self.put_sessions.find(SHARD, 9, self.number).ok_or(Status::Stale)?;
        assert_eq!((open.digest, open.reservation), (DIGEST, self.reservation));
        self.put_sessions.fill(&self.store, &open, offset, bytes, 1).map(|(ticket, _)| ticket)
    }

    fn end(&mut self, ticket: TicketId, checksum: Option<u64>) -> Status {
        self.put_sessions.end_ticket(&mut self.store, ticket, checksum, 2)
    }
}

#[test]
fn ranges_are_read_when_they_are_filled() {
    let mut bed = Bed::new();
    let ticket = bed.fill(0, 600).expect("nobody fills it");
    assert_eq!(bed.fill(500, 10), Err(Status::Busy));
    let read = |bed: &mut Bed| bed.put_sessions.read(&bed.store, DIGEST, 100, 50).map(|found| found.ticket);
    assert_eq!(read(&mut bed), Err((Status::Pending, BYTES)));
    assert_eq!(bed.end(ticket, Some(3)), Status::Ok);
    let reader = read(&mut bed).expect("it is there");
    assert_eq!(bed.put_sessions.complete(SHARD, 9, bed.number).map(|_| ()), Err(SealError::Incomplete));
    assert_eq!(bed.end(reader, None), Status::Ok);
    assert!(bed.put_sessions.find(SHARD, 8, bed.number).is_none(), "it is another client's");
}

#[test]
fn a_put_session_that_ends_keeps_its_memory_while_it_is_filled() {
    let mut bed = Bed::new();
    let ticket = bed.fill(0, BYTES).expect("nobody fills it");
    let open = bed.put_sessions.find(SHARD, 9, bed.number).expect("it is open");
    let reservation = open.reservation;
    assert!(!bed.put_sessions.end(&mut bed.store, open.id, reservation));
    assert!(bed.put_sessions.fills(ticket, open.id));
    assert!(bed.store.reserved(reservation).is_some(), "bytes may still arrive there");
    assert_eq!(bed.end(ticket, Some(3)), Status::Stale);
    assert!(bed.store.reserved(reservation).is_none());
}

#[test]
fn readers_of_a_put_session_pin_the_committed_object() {
    let mut bed = Bed::new();
    let ticket = bed.fill(0, BYTES).expect("nobody fills it");
    assert_eq!(bed.end(ticket, Some(3)), Status::Ok);
    let reader = bed.put_sessions.read(&bed.store, DIGEST, 0, BYTES).map_err(|(status, _)| status);
    let reader = reader.expect("all of it is there").ticket;
    let complete = bed.put_sessions.complete(SHARD, 9, bed.number);
    let Ok((put_session, complete)) = complete else { panic!("all of it is there") };
    assert_eq!(complete.readers, 1);
    let version = bed.store.commit(complete.reservation, complete.checksum).expect("nothing else was put");
    bed.put_sessions.seal(&mut bed.store, put_session, complete.readers, DIGEST, Some(version));
    let pins = bed.store.free_pins();
    assert_eq!(bed.end(reader, None), Status::Ok);
    assert_eq!(bed.store.free_pins(), pins + 1);
}
