//! Tests of put sessions whose owner restarts, or hands its slots over, in the middle: they end, and harm no other
//! session.

use std::collections::BTreeSet;
use std::time::Duration;

use kvplane::{BeginOutcome, Client, Fill, Put, PutOptions, PutSession, Region, RegionOptions, Status};

use crate::support::{Process, Way, Workplace, health, text, wait_until};

const BYTES: usize = 2000;
const HALF: usize = BYTES / 2;

fn control(place: &Workplace, nodes: u64) -> (Process, Vec<Process>) {
    let control = Process::start(place.command(&["control", "--state", text(&place.path("state"))]));
    control.wait_for("metrics on");
    let nodes = (1..=nodes).map(|number| place.node(number, &["--pool", "8M", "--shards", "1"])).collect::<Vec<_>>();
    members(&control, nodes.len() as u64);
    (control, nodes)
}

fn members(control: &Process, count: u64) {
    let there = wait_until(|| (health(control.http())["members"] == count).then_some(()));
    assert_eq!(there, Some(()), "{count} members");
}

/// Client with two halves of memory, of `A`s and of `B`s.
struct Writer {
    client: Client,
    memory: kvplane::Buffer,
}

impl Writer {
    fn new(place: &Workplace, way: Way) -> Self {
        let mut client = place.client(way);
        let memory = client.register(Region::allocate(&RegionOptions::new("put-sessions", 2 * BYTES)).unwrap());
        memory.region().copy_in(0, &[b'A'; BYTES]);
        memory.region().copy_in(BYTES, &[b'B'; BYTES]);
        Self { client, memory }
    }

    fn begin(&mut self, key: &str) -> PutSession {
        let begun = wait_until(|| {
            self.client
                .put_sessions()
                .open(key.as_bytes(), BYTES as u64, &PutOptions::default(), Duration::from_secs(60))
                .ok()
        });
        match begun.expect("a session") {
            BeginOutcome::Session(session) => session,
            BeginOutcome::Exists => panic!("{key} exists"),
        }
    }

    /// Writes one half of a session.
    fn fill(&mut self, session: &PutSession, letter: u8, half: usize) -> Result<(), Option<Status>> {
        let from = self.memory.slice(usize::from(letter - b'A') * BYTES, HALF);
        let fill = Fill { session, offset: (half * HALF) as u64, from };
        self.client.put_sessions().fill(&[fill]).unwrap().pop().unwrap().map_err(|error| error.status())
    }

    /// Checks that the first session has ended, and that the second is written and has the written bytes.
    fn check(&mut self, over: &PutSession, goes_on: &PutSession, key: &str) {
        assert_eq!(self.fill(over, b'A', 1), Err(Some(Status::Stale)));
        assert_eq!(self.client.put_sessions().commit(over).unwrap_err().status(), Some(Status::Stale));
        assert_eq!(self.client.put_sessions().batch_abort(&[over]).unwrap(), [false]);
        assert_eq!(self.fill(goes_on, b'B', 0), Ok(()));
        assert_eq!(
            self.client.put_sessions().commit(goes_on).unwrap_err().status(),
            Some(Status::Pending),
            "half of it is there"
        );
        assert_eq!(self.fill(goes_on, b'B', 1), Ok(()));
        assert!(matches!(self.client.put_sessions().commit(goes_on), Ok(Put::Stored(_))));
        let value = self.client.get(key.as_bytes()).unwrap().expect("it was committed");
        assert!(
            value == [b'B'; BYTES],
            "{} bytes of another session",
            value.iter().filter(|byte| **byte != b'B').count()
        );
    }
}

#[test]
fn a_put_session_of_a_restarted_node_harms_no_other() {
    let place = Workplace::new("sessions-again");
    let (control, mut nodes) = control(&place, 1);
    for way in Way::BOTH {
        let mut writer = Writer::new(&place, way);
        let old = writer.begin("old");
        assert_eq!(writer.fill(&old, b'A', 0), Ok(()));
        nodes.remove(0).kill();
        nodes.push(place.node(1, &["--pool", "8M", "--shards", "1"]));
        members(&control, 1);
        let key = format!("new-{way:?}");
        let new = writer.begin(&key);
        writer.check(&old, &new, &key);
        assert_eq!(writer.client.get(b"old").unwrap(), None);
    }
    for mut node in nodes {
        assert!(node.stop().success());
    }
}

#[test]
fn a_put_session_whose_slot_migrates_harms_no_session_there() {
    let place = Workplace::new("sessions-moved");
    let (control, nodes) = control(&place, 2);
    for way in Way::BOTH {
        let mut writer = Writer::new(&place, way);
        // There are as many keys on both nodes as needed: some sessions on the first, which is drained, and some on the
        // second.
        let keys: Vec<String> = (0..16).map(|number| format!("{way:?}-{number}")).collect();
        let both = wait_until(|| {
            let owners: BTreeSet<_> = writer.client.placement().owners(&keys).unwrap().into_iter().flatten().collect();
            (owners.len() == 2).then_some(())
        });
        assert_eq!(both, Some(()), "each node owns some of the keys");
        let sessions: Vec<PutSession> = keys.iter().map(|key| writer.begin(key)).collect();
        for session in &sessions {
            assert_eq!(writer.fill(session, b'A', 0), Ok(()));
        }
        place.run(&["ctl", "drain", "1", "--wait", "60"]).well();
        // Sessions of the first node end as soon as the client has the new map. They must not write into those of the
        // second.
        let over = wait_until(|| {
            let moved =
                sessions.iter().position(|session| writer.fill(session, b'A', 0) == Err(Some(Status::Stale)))?;
            let goes_on = sessions.iter().position(|session| writer.fill(session, b'A', 0) == Ok(()))?;
            Some((moved, goes_on))
        });
        let (moved, _) = over.expect("a session of each node");
        let key = format!("{way:?}-next");
        let next = writer.begin(&key);
        writer.check(&sessions[moved], &next, &key);
        for (session, key) in sessions.iter().zip(&keys) {
            if writer.fill(session, b'B', 1) == Ok(()) {
                assert!(matches!(writer.client.put_sessions().commit(session), Ok(Put::Stored(_))));
                let value = writer.client.get(key.as_bytes()).unwrap().expect("it was committed");
                assert!(value[..HALF] == [b'A'; HALF] && value[HALF..] == [b'B'; HALF], "{key}");
            } else {
                assert_eq!(writer.client.get(key.as_bytes()).unwrap(), None, "{key}");
            }
        }
        place.run(&["ctl", "drain", "1", "--cancel"]).well();
    }
    drop((control, nodes));
}
