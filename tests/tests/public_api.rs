//! Tests of every form of the public API, over both paths: a control plane, nodes and clients in one process.

use std::time::Duration;

use kvplane::{AsyncClient, BatchOutcome, Client, ClientConfig, Open, Put, PutOptions, Region, RegionOptions, Status};

mod bed;

use bed::{Bed, value};

#[test]
fn batches_are_started_and_finished_later() {
    let bed = Bed::start(2, 16 << 20);
    for shared in [true, false] {
        let mut client = Client::connect(&bed.client_config(shared)).expect("a client");
        let region = Region::allocate(&RegionOptions::new("open", 4 << 20)).expect("memory");
        let memory = client.register(std::sync::Arc::clone(&region));
        let key = |n: u32| format!("open-{shared}-{n}").into_bytes();
        for n in 0..64 {
            region.copy_in(n as usize * 8192, &value(n, 8192));
        }
        let batch = |from: u32, at: usize| -> Vec<_> {
            (from..from + 8).map(|n| (key(n), memory.slice(at + n as usize * 8192, 8192))).collect()
        };
        assert!(client.batches().next_finished().expect("nothing is open").is_none());
        let options = PutOptions::default();
        let puts: Vec<Open> =
            (0..8).map(|n| client.batches().start_puts(&batch(n * 8, 0), &options).expect("a start")).collect();
        assert_eq!(client.batches().count(), 8);
        // Blocking calls take no results of open batches.
        assert!(!client.exists(b"nothing").expect("an answer"));
        let mut seen = Vec::new();
        while let Some((open, finished)) = client.batches().next_finished().expect("a batch ends") {
            let BatchOutcome::Puts(outcomes) = finished else { panic!("not puts") };
            assert!(outcomes.iter().all(|outcome| matches!(outcome, Ok(Put::Stored(_)))), "{outcomes:?}");
            seen.push(open);
        }
        assert!(puts.iter().all(|open| seen.contains(open)) && seen.len() == 8);
        for n in 0..8 {
            client.batches().start_gets(&batch(n * 8, 2 << 20)).expect("a start");
        }
        let mut found = 0;
        while let Some((_, finished)) = client.batches().next_finished().expect("a batch ends") {
            let BatchOutcome::Gets(outcomes) = finished else { panic!("not gets") };
            found += outcomes.into_iter().filter(|got| matches!(got, Ok(Some(got)) if got.bytes == 8192)).count();
        }
        assert_eq!(found, 64);
        let mut bytes = vec![0; 8192];
        for n in 0..64 {
            region.copy_out((2 << 20) + n as usize * 8192, &mut bytes);
            assert!(bytes == value(n, 8192), "object {n}");
        }
        for _ in 0..256 {
            client.batches().start_gets(&[(key(0), memory.slice(0, 8192))]).expect("a start");
        }
        let refused = client.batches().start_gets(&[(key(0), memory.slice(0, 8192))]).expect_err("too many");
        assert!(refused.to_string().contains("256 batches are open"), "{refused}");
    }
}

#[test]
fn plain_and_batched_calls_over_two_nodes() {
    let bed = Bed::start(2, 16 << 20);
    for shared in [true, false] {
        let mut client = Client::connect(&bed.client_config(shared)).expect("a client");
        let keys: Vec<String> = (0..200).map(|n| format!("key-{shared}-{n}")).collect();
        for (n, key) in keys.iter().enumerate() {
            let put = client.put(key.as_bytes(), &value(n as u32, 100 + n)).expect("a put");
            assert!(matches!(put, Put::Stored(_)));
        }
        assert_eq!(client.put(keys[0].as_bytes(), b"other").expect("a put"), Put::Exists);
        for (n, key) in keys.iter().enumerate() {
            let got = client.get(key.as_bytes()).expect("a get");
            assert_eq!(got.as_deref(), Some(&value(n as u32, 100 + n)[..]), "{key}");
        }
        let sizes = client.batch_size(&keys).expect("sizes");
        assert!(sizes.iter().enumerate().all(|(n, size)| *size == Some(100 + n as u64)));
        let removed = client.batch_remove(&keys[..100]).expect("removes");
        assert!(removed.into_iter().all(|removed| removed));
        let there = client.batch_exists(&keys).expect("exists");
        assert!(there.iter().enumerate().all(|(n, &there)| there == (n >= 100)));
        assert_eq!(client.get(keys[5].as_bytes()).expect("a get"), None);
    }
    let objects: Vec<u64> = bed
        .nodes
        .iter()
        .map(|node| node.snapshots().expect("a living node")[0].store.expect("a store").objects)
        .collect();
    assert!(objects.iter().all(|&objects| objects > 20), "both nodes hold a share: {objects:?}");
}

#[test]
fn registered_memory_and_its_limits() {
    let bed = Bed::start(1, 4 << 20);
    let mut client = Client::connect(&bed.client_config(true)).expect("a client");
    let memory = client.register(Region::allocate(&RegionOptions::new("memory", 8 << 20)).expect("memory"));
    memory.region().copy_in(0, &value(1, 70_000));
    assert!(matches!(client.put_from(b"one", memory.slice(0, 70_000)), Ok(Put::Stored(_))));
    let got = client.get_into(b"one", memory.slice(1 << 20, 70_000)).expect("a get").expect("the object");
    let mut bytes = vec![0; got.bytes as usize];
    memory.region().copy_out(1 << 20, &mut bytes);
    assert_eq!(bytes, value(1, 70_000));
    let small = client.get_into(b"one", memory.slice(0, 10)).expect_err("ten bytes of room");
    assert_eq!(small.status(), Some(Status::BufferTooSmall));
    let large = client.put_from(b"large", memory.slice(0, 8 << 20)).expect_err("twice the pool");
    assert_eq!(large.status(), Some(Status::TooLarge), "{large}");
    let empty = client.put(b"empty", b"").expect_err("nothing to store");
    assert_eq!(empty.status(), Some(Status::Empty));
    assert!(client.put(b"", b"value").expect_err("no key").to_string().contains("key"));
    // A refused put leaves nothing behind.
    assert!(client.exists(b"one").expect("an answer"));
    let stats = bed.nodes[0].snapshots().expect("a living node")[0].store.expect("a store");
    assert_eq!((stats.objects, stats.reserved_bytes), (1, 0));
}

#[test]
fn tenants_do_not_meet() {
    let bed = Bed::start(1, 4 << 20);
    let mut ours = Client::connect(&bed.client_config(true)).expect("a client");
    let other = ClientConfig { tenant: "other".to_owned(), ..bed.client_config(true) };
    let mut theirs = Client::connect(&other).expect("a client");
    ours.put(b"key", b"ours").expect("a put");
    assert_eq!(theirs.get(b"key").expect("a get"), None);
}

#[test]
fn futures_run_many_at_once() {
    let bed = Bed::start(1, 16 << 20);
    for shared in [true, false] {
        let client = AsyncClient::connect(&bed.client_config(shared)).expect("a client");
        let region = Region::allocate(&RegionOptions::new("memory", 4 << 20)).expect("memory");
        let memory = client.register(region).expect("a registration");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let tasks = tokio::task::LocalSet::new();
        tasks.block_on(&runtime, async {
            let mut running = Vec::new();
            for n in 0..64usize {
                let (client, memory) = (client.clone(), memory.clone());
                running.push(tokio::task::spawn_local(async move {
                    let key = format!("future-{shared}-{n}");
                    memory.region().copy_in(n * 65_536, &value(n as u32, 30_000));
                    client.put_from(key.as_bytes(), memory.slice(n * 65_536, 30_000)).await.expect("a put");
                    let into = memory.slice(n * 65_536 + 32_768, 30_000);
                    let got = client.get_into(key.as_bytes(), into).await.expect("a get").expect("the object");
                    let mut bytes = vec![0; got.bytes as usize];
                    memory.region().copy_out(n * 65_536 + 32_768, &mut bytes);
                    assert_eq!(bytes, value(n as u32, 30_000));
                    assert!(client.remove(key.as_bytes()).await.expect("a remove"));
                }));
            }
            for task in running {
                task.await.expect("a task without a panic");
            }
            let items = [("a", memory.slice(0, 1000)), ("b", memory.slice(1000, 1000))];
            let puts = client.batch_put_from(&items).await.expect("a batch");
            assert!(puts.iter().all(|put| matches!(put, Ok(Put::Stored(_)))));
            let items = [("a", memory.slice(9000, 1000)), ("missing", memory.slice(8000, 1000))];
            let gets = client.batch_get_into(&items).await.expect("a batch");
            assert!(matches!((&gets[0], &gets[1]), (Ok(Some(_)), Ok(None))));
            for key in ["a", "b"] {
                assert!(client.remove(key.as_bytes()).await.expect("a remove"));
            }
            assert_eq!(client.batch_exists(&["future-true-0"]).await.expect("an answer"), [false]);
        });
    }
}

#[test]
fn the_data_path_needs_no_control_plane() {
    let mut bed = Bed::start(1, 8 << 20);
    let mut client = Client::connect(&bed.client_config(false)).expect("a client");
    client.put(b"before", b"value").expect("a put");
    let control = bed.control.take().expect("a control plane");
    control.shutdown(Duration::from_secs(5)).expect("an orderly end");
    assert_eq!(client.get(b"before").expect("a get").as_deref(), Some(&b"value"[..]));
    client.put(b"after", b"value").expect("a put");
    assert!(client.exists(b"after").expect("an answer"));
}
