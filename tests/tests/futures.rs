//! Tests of the async client's operations of several round trips: lists, sessions, objects in ranges and in stripes,
//! beside in-flight batches of other futures.

use std::time::Duration;

use kvplane::{
    AsyncClient, BeginOutcome, Buffer, ClientConfig, Fill, ObjectRange, Put, PutOptions, RangeOutcome, Region,
    RegionOptions, Slice,
};

mod bed;

use bed::{Bed, value};

const MIB: usize = 1 << 20;

fn client(bed: &Bed, shared: bool) -> (AsyncClient, Buffer) {
    let config = ClientConfig { stripe_bytes: MIB as u64, ..bed.client_config(shared) };
    let client = AsyncClient::connect(&config).expect("a client");
    let region = Region::allocate(&RegionOptions::new("memory", 16 * MIB)).expect("memory");
    let memory = client.register(region).expect("a registration");
    (client, memory)
}

fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(work)
}

fn read(memory: &Buffer, offset: usize, bytes: usize) -> Vec<u8> {
    let mut found = vec![0; bytes];
    memory.region().copy_out(offset, &mut found);
    found
}

#[test]
fn striped_objects_are_put_got_and_removed_as_any_others() {
    let bed = Bed::start(2, 32 * MIB as u64);
    for shared in [true, false] {
        let (client, memory) = client(&bed, shared);
        let (long, short) = (value(3, 5 * MIB + 77), value(4, 1000));
        memory.region().copy_in(0, &long);
        memory.region().copy_in(6 * MIB, &short);
        wait(async {
            let items = [("long", memory.slice(0, long.len())), ("short", memory.slice(6 * MIB, 1000))];
            let puts = client.batch_put_from(&items).await.expect("a batch");
            assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored(_)))), "{puts:?}");
            assert!(matches!(client.put_from(b"long", items[0].1).await, Ok(Put::Exists)));
            let sizes = client.batch_size(&["long", "short", "none"]).await.expect("sizes");
            assert_eq!(sizes, [Some(long.len() as u64), Some(1000), None]);
            assert_eq!(client.batch_exists(&["long", "none"]).await.expect("an answer"), [true, false]);
            let into = [("short", memory.slice(0, 1000)), ("long", memory.slice(8 * MIB, 6 * MIB))];
            let got = client.batch_get_into(&into).await.expect("a batch");
            assert!(matches!(&got[1], Ok(Some(got)) if got.bytes == long.len() as u64), "{got:?}");
            assert!(read(&memory, 8 * MIB, long.len()) == long && read(&memory, 0, 1000) == short);
            // A range across the border of two stripes, beside one of an object without stripes.
            let ranges = [
                ObjectRange { key: b"long", offset: MIB as u64 - 50, into: memory.slice(0, 100) },
                ObjectRange { key: b"short", offset: 10, into: memory.slice(200, 20) },
            ];
            let got = client.ranges().get(&ranges).await.expect("a batch");
            assert!(got.iter().all(|got| matches!(got, Ok(Some(_)))), "{got:?}");
            assert_eq!(read(&memory, 0, 100), long[MIB - 50..MIB + 50]);
            assert_eq!(read(&memory, 200, 20), short[10..30]);
            assert_eq!(client.batch_remove(&["none", "long", "short"]).await.expect("removes"), [false, true, true]);
            assert_eq!(client.get_into(b"long", memory.slice(0, 6 * MIB)).await.expect("a get"), None);
        });
    }
}

#[test]
fn lists_ranges_and_sessions_run_beside_batches_in_flight() {
    let bed = Bed::start(2, 32 * MIB as u64);
    for shared in [true, false] {
        let (client, memory) = client(&bed, shared);
        memory.region().copy_in(0, &value(9, 100_000));
        let whole = value(9, 100_000);
        wait(async {
            // Other futures send requests all the time, and each gets its own reply.
            let others: Vec<_> = (0..64)
                .map(|n: usize| {
                    let (client, memory) = (client.clone(), memory.clone());
                    std::thread::spawn(move || {
                        wait(async {
                            let key = format!("other-{n}");
                            client.put_from(key.as_bytes(), memory.slice(n * 100, 100 + n)).await.expect("a put");
                            client.batch_size(&[key]).await.expect("sizes")
                        })
                    })
                })
                .collect();
            let pieces = [memory.slice(60_000, 40_000), memory.slice(0, 60_000)];
            let puts = client
                .scatter_gather()
                .batch_put_from(&[("parts", &pieces[..])], &PutOptions::default())
                .await
                .expect("a batch");
            assert!(matches!(puts[0], Ok(Put::Stored(_))));
            let options = PutOptions::default();
            let begun = client.put_sessions().batch_open(&[("session", 100_000)], &options, Duration::from_secs(20));
            let Ok(BeginOutcome::Session(session)) = begun.await.expect("a batch").remove(0) else {
                panic!("it was begun")
            };
            let half = |at: usize| Fill { session: &session, offset: at as u64, from: memory.slice(at, 50_000) };
            assert!(client.put_sessions().fill(&[half(50_000)]).await.expect("a batch")[0].is_ok());
            let range = [ObjectRange { key: b"session", offset: 60_000, into: memory.slice(MIB, 1000) }];
            let there = client.ranges().get_as_they_come(&range).await.expect("a batch");
            assert!(matches!(there[0], Ok(RangeOutcome::Written)), "{there:?}");
            assert_eq!(read(&memory, MIB, 1000), whole[60_000..61_000]);
            assert!(client.put_sessions().fill(&[half(0)]).await.expect("a batch")[0].is_ok());
            assert!(matches!(
                client.put_sessions().batch_commit(&[&session]).await.expect("a batch")[0],
                Ok(Put::Stored(_))
            ));
            assert_eq!(client.put_sessions().batch_abort(&[&session]).await.expect("a batch"), [false]);
            assert!(client.get(b"session").await.expect("a get").as_deref() == Some(&whole[..]));
            let into: Vec<Slice> = vec![memory.slice(2 * MIB, 7), memory.slice(3 * MIB, 99_993)];
            let got = client.scatter_gather().batch_get_into(&[("parts", into)]).await.expect("a batch");
            assert!(matches!(&got[0], Ok(Some(got)) if got.bytes == 100_000));
            assert_eq!(read(&memory, 2 * MIB, 7), whole[60_000..60_007]);
            let mut reading = client.ranges().open_session(b"parts").await.expect("an answer").expect("the object");
            let range = [ObjectRange { key: b"parts", offset: 39_999, into: memory.slice(5 * MIB, 2) }];
            assert!(client.ranges().read_session(&mut reading, &range).await.expect("a range"));
            assert_eq!(read(&memory, 5 * MIB, 2), [whole[99_999], whole[0]]);
            for (n, other) in others.into_iter().enumerate() {
                assert_eq!(other.join().expect("a thread without a panic"), [Some(100 + n as u64)]);
            }
            let (mut listed, mut cursor) = (std::collections::BTreeSet::new(), None);
            loop {
                let page = client.keys().list(cursor).await.expect("a page");
                listed.extend(page.keys.into_iter().map(|key| key.key));
                cursor = page.next;
                if cursor.is_none() {
                    break;
                }
            }
            assert_eq!(listed.len(), 66);
            assert_eq!(client.keys().remove_matching("^other-").await.expect("a removal"), 64);
            let puts = client.put_with(b"copied", b"value".to_vec(), &PutOptions::default()).await;
            assert!(matches!(puts, Ok(Put::Stored(_))));
            assert!(client.with(|client| client.exists(b"copied").expect("an answer")).await.expect("a call"));
            assert_eq!(client.keys().remove_all(false).await.expect("a removal"), 3);
        });
    }
}
