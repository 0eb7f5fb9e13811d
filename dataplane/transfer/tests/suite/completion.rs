//! Completion of batches: learned by waiting, polling, a descriptor or a future, each exactly once.

use core::future::Future;
use core::pin::pin;
use core::task::{Context, Poll, Waker};
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;
use std::time::{Duration, Instant};

use kvplane_transfer::{Opcode, SubmitOptions, TaskState, TransferRequest};

use crate::rig::{PATIENCE, Way, block_on, check, fill, pair};

#[test]
fn writes_and_reads_by_address_over_every_transport() {
    for way in Way::all() {
        let (a, b, peer) = pair(way, 2 << 20);
        let there = b.region.address();
        fill(&a.region, 0, 1 << 20, 11);
        let write = a.request(Opcode::Write, 0, (peer, there + 4097), 1 << 20);
        let status = a.engine.submit(&[write], &SubmitOptions::default()).unwrap().wait();
        assert_eq!((status.state, status.transferred_bytes), (TaskState::Completed, 1 << 20));
        check(&b.region, 4097, 1 << 20, 11);
        let read = a.request(Opcode::Read, 1 << 20, (peer, there + 4097), 1 << 20);
        assert_eq!(a.engine.submit(&[read], &SubmitOptions::default()).unwrap().wait().ended, 1);
        check(&a.region, 1 << 20, 1 << 20, 11);
    }
}

/// Queries single tasks among a hundred thousand, each without the others.
#[test]
fn a_large_batch_reports_each_task() {
    const TASKS: usize = 100_000;
    let (a, b, peer) = pair(Way::Shm, 1 << 20);
    fill(&b.region, 0, 1 << 20, 12);
    let requests: Vec<TransferRequest> = (0..TASKS)
        .map(|task| a.request(Opcode::Read, task * 8, (peer, b.region.address() + task as u64 * 8), 8))
        .collect();
    // An emulated processor is slow.
    let options = SubmitOptions { deadline: Some(Duration::from_secs(600)), ..SubmitOptions::default() };
    let batch = a.engine.submit(&requests, &options).unwrap();
    let mut ended = 0;
    while !batch.is_done() {
        let status = batch.poll();
        assert!(status.ended >= ended, "a task that had ended has not");
        ended = status.ended;
        std::thread::yield_now();
    }
    assert_eq!(batch.status().ended, TASKS);
    for task in 0..TASKS {
        let status = batch.task_status(task);
        assert_eq!((status.state, status.transferred_bytes), (TaskState::Completed, 8), "task {task}");
    }
    check(&a.region, 0, TASKS * 8, 12);
}

/// No thread waits: the engine's progress thread drives the batch.
#[test]
fn a_batch_without_a_waiter_completes() {
    for (way, background) in Way::all().into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let (a, b, peer) = pair(way, 1 << 20);
        fill(&b.region, 0, 1 << 20, 13);
        let read = a.request(Opcode::Read, 0, (peer, b.region.address()), 1 << 20);
        for _ in 0..3 {
            let options = SubmitOptions { background, ..SubmitOptions::default() };
            let batch = a.engine.submit(&[read], &options).unwrap();
            let start = Instant::now();
            while !batch.is_done() {
                assert!(start.elapsed() < PATIENCE, "nobody drove it");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(batch.status().state, TaskState::Completed);
            check(&a.region, 0, 1 << 20, 13);
            // The progress thread is asleep when the next batch comes.
            std::thread::sleep(Duration::from_millis(40));
        }
    }
}

#[test]
fn the_descriptor_is_readable_once() {
    let (a, b, peer) = pair(Way::network(), 1 << 20);
    let read = a.request(Opcode::Read, 0, (peer, b.region.address()), 1 << 20);
    for when in 0..20 {
        let batch = a.engine.submit(&[read], &SubmitOptions::default()).unwrap();
        if when % 2 == 1 {
            batch.wait();
        }
        let mut event = std::fs::File::from(batch.completion_fd().unwrap().as_fd().try_clone_to_owned().unwrap());
        let mut count = [0; 8];
        let start = Instant::now();
        while event.read(&mut count).is_err() {
            assert!(start.elapsed() < PATIENCE, "the descriptor never became readable");
            std::thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(u64::from_ne_bytes(count), 1);
        assert!(batch.is_done());
        batch.wait();
        batch.completion_fd().unwrap();
        assert!(event.read(&mut count).is_err(), "it was written twice");
    }
}

struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_future_is_woken_once() {
    let (a, b, peer) = pair(Way::network(), 1 << 20);
    let read = a.request(Opcode::Read, 0, (peer, b.region.address()), 1 << 20);
    for _ in 0..20 {
        let batch = a.engine.submit(&[read], &SubmitOptions::default()).unwrap();
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut future = pin!(batch.completed());
        let first = future.as_mut().poll(&mut Context::from_waker(&waker));
        assert_eq!(block_on(batch.completed()).state, TaskState::Completed);
        let start = Instant::now();
        while first.is_pending() && count.0.load(Ordering::SeqCst) == 0 {
            assert!(start.elapsed() < PATIENCE, "the waker was not called");
            std::thread::yield_now();
        }
        assert!(matches!(future.poll(&mut Context::from_waker(&waker)), Poll::Ready(_)));
        assert!(count.0.load(Ordering::SeqCst) <= 1);
    }
}

#[test]
fn a_wait_can_time_out() {
    let (a, b, peer) = pair(Way::network(), 4 << 20);
    fill(&b.region, 0, 4 << 20, 14);
    let read = a.request(Opcode::Read, 0, (peer, b.region.address()), 4 << 20);
    let batch = a.engine.submit(&[read], &SubmitOptions::default()).unwrap();
    let mut waits = 0;
    let status = loop {
        waits += 1;
        match batch.wait_for(Duration::from_micros(10)) {
            Some(status) => break status,
            None => assert!(!batch.status().state.is_final() || batch.is_done(), "after {waits} waits"),
        }
    };
    assert_eq!(status.state, TaskState::Completed);
    check(&a.region, 0, 4 << 20, 14);
}
