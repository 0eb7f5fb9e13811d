//! Tests of put sessions against twins that know the state of each byte.

use kvplane_proto::checksum::payload_checksum;
use proptest::prelude::*;

use super::*;

const CLIENT: u64 = 7;
const BYTES: u64 = 64;
const IDLE_NS: u64 = 100;

fn new_session(client: u64, digest: u128, bytes: u64, reservation: ReservationId) -> NewPutSession {
    NewPutSession { client, digest: Digest(digest), bytes, reservation, idle_ns: IDLE_NS }
}

fn room(number: u32) -> ReservationId {
    ReservationId { index: number, generation: 1 }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Begin { key: u8 },
    Fill { pick: usize, offset: u64, bytes: u64 },
    Filled { pick: usize, good: bool },
    Read { key: u8, offset: u64, bytes: u64 },
    Gone { pick: usize },
    Seal { pick: usize },
    End { pick: usize },
    Wait { ns: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    let range = || (0..BYTES, 1..40u64);
    prop_oneof![
        3 => (0..4u8).prop_map(|key| Op::Begin { key }),
        12 => (any::<usize>(), range()).prop_map(|(pick, (offset, bytes))| Op::Fill { pick, offset, bytes }),
        12 => (any::<usize>(), prop::bool::weighted(0.9)).prop_map(|(pick, good)| Op::Filled { pick, good }),
        3 => (0..4u8, range()).prop_map(|(key, (offset, bytes))| Op::Read { key, offset, bytes }),
        3 => any::<usize>().prop_map(|pick| Op::Gone { pick }),
        4 => any::<usize>().prop_map(|pick| Op::Seal { pick }),
        1 => any::<usize>().prop_map(|pick| Op::End { pick }),
        1 => (0..150u64).prop_map(|ns| Op::Wait { ns }),
    ]
}

/// Model of a put session: each byte is unwritten (0), being filled (1) or filled (2).
#[derive(Debug)]
struct Twin {
    id: PutSessionId,
    key: u8,
    reservation: ReservationId,
    bytes: Vec<u8>,
    open: bool,
    readers: u32,
    fills: u32,
}

fn value(key: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at * 37 + u64::from(key) * 11) as u8).collect()
}

/// Put sessions, their twins and the fills in flight.
#[derive(Default)]
struct Both {
    sessions: PutSessionTable,
    twins: Vec<Twin>,
    fills: Vec<(PutSessionId, u64, u64)>,
    reads: Vec<PutSessionId>,
    now_ns: u64,
    rooms: u32,
    freed: Vec<ReservationId>,
}

impl Both {
    fn twin(&mut self, id: PutSessionId) -> &mut Twin {
        self.twins.iter_mut().find(|twin| twin.id == id).expect("it is used")
    }

    fn step(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Begin { key } => self.begin(key),
            Op::Fill { pick, offset, bytes } if !self.twins.is_empty() => {
                self.fill(pick % self.twins.len(), offset, bytes)?;
            }
            Op::Filled { pick, good } if !self.fills.is_empty() => self.filled(pick % self.fills.len(), good),
            Op::Read { key, offset, bytes } => self.read(key, offset, bytes)?,
            Op::Gone { pick } if !self.reads.is_empty() => {
                let id = self.reads.swap_remove(pick % self.reads.len());
                self.freed.extend(self.sessions.read(id));
                self.twin(id).readers -= 1;
            }
            Op::Seal { pick } if !self.twins.is_empty() => self.seal(pick % self.twins.len())?,
            Op::End { pick } if !self.twins.is_empty() => {
                let at = pick % self.twins.len();
                if self.twins[at].open {
                    self.freed.extend(self.sessions.end(self.twins[at].id));
                    self.twins[at].open = false;
                }
            }
            Op::Wait { ns } => {
                self.now_ns += ns;
                while let Some((id, _)) = self.sessions.due(self.now_ns) {
                    self.freed.extend(self.sessions.end(id));
                    self.twin(id).open = false;
                }
            }
            _ => {}
        }
        self.check()
    }

    fn begin(&mut self, key: u8) {
        self.rooms += 1;
        let reservation = room(self.rooms);
        let id = self.sessions.begin(&new_session(CLIENT, key.into(), BYTES, reservation), self.now_ns);
        let (id, bytes) = (id.expect("few are open"), vec![0; BYTES as usize]);
        self.twins.push(Twin { id, key, reservation, bytes, open: true, readers: 0, fills: 0 });
    }

    fn fill(&mut self, at: usize, offset: u64, bytes: u64) -> Result<(), TestCaseError> {
        let twin = &mut self.twins[at];
        let range = offset as usize..(offset + bytes).min(BYTES) as usize;
        let all = |is: u8| twin.bytes[range.clone()].iter().all(|byte| *byte == is);
        let any = |is: u8| twin.bytes[range.clone()].contains(&is);
        let wanted = match () {
            () if !twin.open => Err(FillError::Stale),
            () if offset + bytes > BYTES => Err(FillError::OutOfRange),
            () if all(2) => Err(FillError::Filled),
            () if any(2) => Err(FillError::Overlap),
            () if any(1) => Err(FillError::Busy),
            () => Ok(()),
        };
        let strangers = self.sessions.fill(CLIENT + 1, twin.id, offset, bytes, self.now_ns);
        prop_assert_eq!(strangers, Err(FillError::Stale));
        prop_assert_eq!(self.sessions.fill(CLIENT, twin.id, offset, bytes, self.now_ns), wanted);
        if wanted.is_ok() {
            twin.bytes[range].fill(1);
            twin.fills += 1;
            self.fills.push((twin.id, offset, bytes));
        }
        Ok(())
    }

    fn filled(&mut self, at: usize, good: bool) {
        let (id, offset, bytes) = self.fills.swap_remove(at);
        let range = offset as usize..(offset + bytes) as usize;
        let key = self.twin(id).key;
        let checksum = good.then(|| payload_checksum(&value(key)[range.clone()]));
        self.freed.extend(self.sessions.filled(id, offset, bytes, checksum, self.now_ns));
        let twin = self.twin(id);
        twin.bytes[range].fill(if good { 2 } else { 0 });
        twin.fills -= 1;
    }

    fn read(&mut self, key: u8, offset: u64, bytes: u64) -> Result<(), TestCaseError> {
        let found = self.sessions.find(Digest(key.into()), offset, bytes);
        let twin = self.twins.iter().rev().find(|twin| twin.key == key && twin.open);
        prop_assert_eq!(found.map(|found| found.session), twin.map(|twin| twin.id), "the latest that is open");
        let (Some(found), Some(twin)) = (found, twin) else { return Ok(()) };
        let there = offset + bytes <= BYTES
            && twin.bytes[offset as usize..(offset + bytes) as usize].iter().all(|byte| *byte == 2);
        prop_assert_eq!((found.session, found.is_there), (twin.id, there));
        if there {
            self.sessions.reading(found.session);
            self.reads.push(found.session);
            self.twin(found.session).readers += 1;
        }
        Ok(())
    }

    fn seal(&mut self, at: usize) -> Result<(), TestCaseError> {
        let twin = &self.twins[at];
        let (id, readers, digest) = (twin.id, twin.readers, Digest(twin.key.into()));
        let complete = self.sessions.complete(CLIENT, id);
        if twin.open && twin.fills == 0 && twin.bytes.iter().all(|byte| *byte == 2) {
            let checksum = payload_checksum(&value(twin.key));
            let wanted = Complete { reservation: twin.reservation, checksum, readers };
            prop_assert_eq!(complete, Ok(wanted));
            self.sessions.seal(id, Some(Version(9)));
            prop_assert_eq!(self.sessions.complete(CLIENT, id), Err(SealError::Sealed(digest, Version(9))));
            self.reads.retain(|read| *read != id);
            self.twins.remove(at);
        } else {
            prop_assert!(complete.is_err());
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), TestCaseError> {
        for reservation in core::mem::take(&mut self.freed) {
            let at = self.twins.iter().position(|twin| twin.reservation == reservation).expect("freed once");
            let twin = self.twins.remove(at);
            prop_assert!(!twin.open && twin.readers == 0 && twin.fills == 0, "{:?} was in use", twin);
        }
        prop_assert!(self.twins.iter().all(|twin| twin.open || twin.readers + twin.fills > 0), "room is kept");
        prop_assert_eq!(self.sessions.len(), self.twins.len());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn put_sessions_match_their_model_and_free_no_memory_in_use(
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let mut both = Both::default();
        for op in ops {
            both.step(op)?;
        }
    }
}

#[test]
fn adjacent_ranges_are_accepted_at_the_limit_of_ranges() {
    let most = Limits::PUT_SESSION_RANGES as u64;
    let mut sessions = PutSessionTable::default();
    let id = sessions.begin(&new_session(CLIENT, 1, 4 * most, room(1)), 0).expect("it is the first");
    let fill = |sessions: &mut PutSessionTable, offset| sessions.fill(CLIENT, id, offset, 1, 0);
    let filled = |sessions: &mut PutSessionTable, offset, good: bool| {
        assert_eq!(sessions.filled(id, offset, 1, good.then(|| payload_checksum(&[0])), 0), None);
    };
    // Every second byte, so that no two ranges touch.
    for at in 0..most {
        assert_eq!(fill(&mut sessions, 2 * at), Ok(()));
        if at + 1 < most {
            filled(&mut sessions, 2 * at, true);
        }
    }
    assert_eq!(fill(&mut sessions, 2 * most), Err(FillError::Busy), "the last may fail yet");
    filled(&mut sessions, 2 * most - 2, true);
    assert_eq!(fill(&mut sessions, 2 * most), Err(FillError::TooMany));
    // A range between two filled ones, one behind a filled one, and one that fails first.
    for (offset, good) in [(1, true), (2 * most - 1, true), (5, false), (5, true)] {
        assert_eq!(fill(&mut sessions, offset), Ok(()), "{offset}");
        filled(&mut sessions, offset, good);
    }
    // Two of these joined others, so that two more separate ranges fit.
    for offset in [3 * most, 3 * most + 2] {
        assert_eq!(fill(&mut sessions, offset), Ok(()), "{offset}");
        filled(&mut sessions, offset, true);
    }
    assert_eq!(fill(&mut sessions, 3 * most + 4), Err(FillError::TooMany));
    // The session can be completed.
    for offset in 0..4 * most {
        match fill(&mut sessions, offset) {
            Err(FillError::Filled) => {}
            taken => {
                assert_eq!(taken, Ok(()), "{offset}");
                filled(&mut sessions, offset, true);
            }
        }
    }
    let whole = Complete { reservation: room(1), checksum: payload_checksum(&vec![0; 4 * most as usize]), readers: 0 };
    assert_eq!(sessions.complete(CLIENT, id), Ok(whole));
}

#[test]
fn the_lifecycle_is_as_declared() {
    let lines: Vec<_> = LIFECYCLE.iter().map(|(from, on, to)| format!("{from:?} --{on:?}--> {to:?}")).collect();
    assert_eq!(
        lines,
        [
            "Vacant --Begin--> Open",
            "Open --Seal--> Vacant",
            "Open --End--> Vacant",
            "Open --EndInUse--> Dying",
            "Dying --LastLeft--> Vacant",
        ]
    );
}

#[test]
fn a_client_with_many_put_sessions_leaves_room_for_others() {
    let mut sessions = PutSessionTable::default();
    let begin = |sessions: &mut PutSessionTable, client: u64, key: u64| {
        sessions.begin(&new_session(client, key.into(), BYTES, room(key as u32)), 0)
    };
    let taken = |sessions: &mut PutSessionTable, client: u64| {
        (0..4096).map_while(|key| begin(sessions, client, client << 32 | key)).collect::<Vec<_>>()
    };
    let first = taken(&mut sessions, 1);
    assert_eq!(first.len(), Limits::PUT_SESSIONS / 2);
    for client in 2..=8 {
        assert!(!taken(&mut sessions, client).is_empty(), "client {client} of those that came later");
    }
    assert!(sessions.len() < Limits::PUT_SESSIONS);
    let before = sessions.len();
    for id in first {
        assert!(sessions.end(id).is_some(), "nobody uses it");
    }
    assert_eq!(sessions.len(), before - Limits::PUT_SESSIONS / 2);
    // As many as are left then, less those of the other clients.
    assert_eq!(taken(&mut sessions, 1).len(), (Limits::PUT_SESSIONS - (before - Limits::PUT_SESSIONS / 2)).div_ceil(2));
}
