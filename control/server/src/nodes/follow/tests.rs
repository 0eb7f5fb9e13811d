//! Orders, answers and watchers.

use kvplane_rpc::codec::decode;

use super::*;

fn order(line: &mut mpsc::Receiver<ItemFrame>) -> Option<Order> {
    let frame = line.try_recv().ok()?;
    Some(decode::<NodeOrder>(&frame).expect("an order").order)
}

fn report(first: u64) -> NodeEvents {
    NodeEvents {
        node: 1,
        incarnation: 5,
        shard: 0,
        part: EventReport::Live,
        first,
        lost: 0,
        events: Vec::new(),
        names: Vec::new(),
    }
}

#[test]
fn nodes_report_events_while_there_are_subscribers() {
    let mut follow = Follow::default();
    let mut early = follow.line(1, 5).expect("a line");
    assert_eq!(order(&mut early), None, "nobody watches");
    let watcher = follow.watch(10).expect("room");
    assert_eq!(order(&mut early), Some(Order::Follow { kept: KEPT, snapshot: 1 }));
    let mut late = follow.line(2, 6).expect("a line");
    assert_eq!(order(&mut late), Some(Order::Follow { kept: KEPT, snapshot: 1 }));
    // The next snapshot is delayed, so that several subscribers share it.
    let second = follow.watch(20).expect("room");
    assert_eq!(order(&mut early), None);
    assert_eq!(follow.tick(30), Some(10 + SNAPSHOT_EVERY_NS));
    assert_eq!(follow.tick(10 + SNAPSHOT_EVERY_NS), None);
    assert_eq!(order(&mut early), Some(Order::Follow { kept: KEPT, snapshot: 2 }));
    drop((watcher, second));
    follow.tick(20 + SNAPSHOT_EVERY_NS);
    assert_eq!(order(&mut early), Some(Order::Follow { kept: 0, snapshot: 2 }));
}

#[test]
fn subscriber_that_does_not_keep_up_loses_the_stream_alone() {
    let mut follow = Follow::default();
    let mut slow = follow.watch(0).expect("room");
    let mut quick = follow.watch(0).expect("room");
    for first in 0..=REPORTS as u64 {
        follow.publish(&report(first)).expect("a small report");
        let frame = quick.try_recv().expect("its turn");
        assert_eq!(decode::<Events>(&frame).expect("events").events.first, first);
    }
    assert_eq!((follow.watchers.len(), follow.published.cut_off), (1, 1));
    let mut taken = 0;
    while slow.try_recv().is_ok() {
        taken += 1;
    }
    assert_eq!(taken, REPORTS, "what it had room for, and then the end");
    follow.retain(|node, _| node != 1);
    let gone = decode::<Events>(&quick.try_recv().expect("its turn")).expect("events").events;
    assert_eq!((gone.part, gone.node, gone.events.len()), (EventReport::Gone, 1, 2));
}

#[test]
fn answers_find_their_questions() {
    let mut follow = Follow::default();
    assert!(follow.find(1, vec![9]).is_err(), "no such node");
    let mut line = follow.line(1, 5).expect("a line");
    let mut first = follow.find(1, vec![9]).expect("asked");
    let mut second = follow.find(1, vec![8]).expect("asked");
    assert_eq!(order(&mut line), Some(Order::Find { digests: vec![9] }));
    let answer = |number| AnswerOrder { node: 1, incarnation: 5, number, found: vec![KeyFound::default()] };
    follow.answered(AnswerOrder { node: 2, found: Vec::new(), ..answer(2) });
    assert!(second.try_recv().is_err(), "another node's answer");
    follow.answered(answer(2));
    follow.answered(answer(77));
    assert!(first.try_recv().is_err());
    assert_eq!(second.try_recv().map(|found| found.len()), Ok(1));
    drop(line);
    assert!(follow.find(1, vec![9]).is_err(), "it has gone");
    for _ in 0..2 * QUESTIONS {
        let _line = follow.line(1, 5).expect("a line");
        drop(follow.find(1, vec![9]).expect("questions that nobody waits for make room"));
    }
}
