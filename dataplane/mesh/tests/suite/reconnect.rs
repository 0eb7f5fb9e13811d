//! Channels that end and begin: peers that are dropped, replaced, gone, or not who they should be.

use kvplane_mesh::{DownCause, MeshConfig, Peer, SendOutcome};

use crate::rig::{End, Fabric, Way, introduce, until};

#[test]
fn the_same_incarnation_begins_a_new_channel() {
    for way in Way::ALL {
        let fabric = Fabric::new(2);
        let end = |rank| End::new(fabric.config(way, "again", rank, 1));
        let (mut a, mut b) = (end(0), end(1));
        introduce(&mut [&mut a, &mut b]);
        for round in 1..=5 {
            // Frames that the other end may not have taken when the channel ends: it takes them before, or never.
            for _ in 0..5 {
                assert_eq!(a.send(1, 3000), SendOutcome::Sent);
                b.send(0, 70_000);
            }
            let peers = [a.peer(), b.peer()];
            // The end that connects, and the one that is connected to.
            let one = if round % 2 == 0 { &mut a } else { &mut b };
            one.mesh.set_peers(&[]);
            assert_eq!(one.send(1 - one.rank, 0), SendOutcome::Down);
            one.mesh.set_peers(&peers);
            let ups = round + 1;
            until(&mut [&mut a, &mut b], "both are up", |ends| ends.iter().all(|end| end.ups.len() == ups));
            assert_eq!((a.downs.len() + b.downs.len(), a.mesh.channels().open), (round, 2), "{way:?}");
            // Numbered from 0: nothing of the former channel arrives.
            let frames = (a.frames, b.frames);
            assert_eq!((a.send(1, 100_000), b.send(0, 5)), (SendOutcome::Sent, SendOutcome::Sent));
            until(&mut [&mut a, &mut b], "frames", |ends| {
                (ends[0].frames, ends[1].frames) == (frames.0 + 1, frames.1 + 1)
            });
        }
        let listed_again = a.ups.len();
        a.mesh.set_peers(&[a.peer(), b.peer()]);
        b.mesh.set_peers(&[b.peer(), a.peer()]);
        (0..1000).for_each(|_| _ = (a.take(), b.take()));
        assert_eq!(a.ups.len(), listed_again, "the same list changes nothing");
        drop((a, b));
        fabric.check();
    }
}

#[test]
fn a_new_incarnation_takes_the_place_of_the_former_one() {
    for way in Way::ALL {
        // The rank that connects is replaced, and the one that is connected to.
        for replaced in [0, 1] {
            let fabric = Fabric::new(2);
            let end = |rank, incarnation| End::new(fabric.config(way, "new", rank, incarnation));
            let (mut former, mut other) = (end(replaced, 7), end(1 - replaced, 1));
            introduce(&mut [&mut former, &mut other]);
            for _ in 0..5 {
                former.send(1 - replaced, 1000);
            }
            // The former one lives on, and goes on sending.
            let mut newer = end(replaced, 8);
            let peers = [newer.peer(), other.peer()];
            newer.mesh.set_peers(&peers);
            other.mesh.set_peers(&peers);
            until(&mut [&mut newer, &mut other, &mut former], "the newer one is up", |ends| {
                ends[2].send(1 - replaced, 0);
                ends[0].ups.len() == 1 && ends[1].ups.len() == 2
            });
            assert_eq!(newer.send(1 - replaced, 9000), SendOutcome::Sent);
            let before = other.frames;
            until(&mut [&mut newer, &mut other, &mut former], "its frame", |ends| {
                ends[2].send(1 - replaced, 0);
                ends[1].frames > before
            });
            assert_eq!((other.frames, other.downs.len()), (before + 1, 0), "{way:?}");
            assert_eq!(former.downs.len(), 1, "{way:?}: {:?}", former.downs);
            assert!(way == Way::Rdma || former.downs[0].1 == DownCause::Ended, "{way:?}: {:?}", former.downs);
            assert_eq!(former.mesh.channels().open, 0);
        }
    }
}

#[test]
fn an_address_that_nobody_listens_at_is_refused() {
    for way in Way::ALL {
        let fabric = Fabric::new(3);
        let end = |rank| End::new(fabric.config(way, "gone", rank, 1));
        let (mut a, mut b, mut c) = (end(0), end(1), end(2));
        introduce(&mut [&mut a, &mut b, &mut c]);
        // The middle one goes: one that it has connected to, and one that has connected to it.
        drop(b);
        until(&mut [&mut a, &mut c], "both see it", |ends| {
            ends.iter().all(|end| end.mesh.channels().refused == 2 && end.downs.len() == 1)
        });
        // An RDMA device may notice before the socket does.
        let expected = |downs: &[(u8, DownCause)]| way == Way::Rdma || downs == [(1, DownCause::Ended)];
        assert!(expected(&a.downs) && expected(&c.downs), "{way:?}: {:?} {:?}", a.downs, c.downs);
        assert_eq!((a.mesh.channels().open, c.mesh.channels().open), (4, 1));
        let malformed = Peer { rank: 5, incarnation: 1, address: "nonsense".to_owned() };
        a.mesh.set_peers(&[malformed, c.peer()]);
        assert_eq!((a.mesh.channels().open, a.mesh.channels().refused), (4, 1 << 5));
    }
}

#[test]
fn strangers_get_no_channel() {
    for way in Way::ALL {
        let fabric = Fabric::new(3);
        let mut a = End::new(fabric.config(way, "right", 0, 5));
        // Of another world; with an older list, that names a former incarnation of rank 0; with other settings.
        let mut others = [
            End::new(fabric.config(way, "wrong", 1, 1)),
            End::new(fabric.config(way, "right", 1, 1)),
            End::new(MeshConfig { payload_bytes: 4096, ..fabric.config(way, "right", 1, 1) }),
        ];
        let stale = Peer { incarnation: 4, ..a.peer() };
        let right = a.peer();
        let peer = others[0].peer();
        a.mesh.set_peers(&[peer]);
        others[0].mesh.set_peers(core::slice::from_ref(&right));
        others[1].mesh.set_peers(&[stale]);
        others[2].mesh.set_peers(&[right]);
        let [first, second, third] = &mut others;
        until(&mut [&mut a, first, second, third], "all are refused", |ends| ends[0].mesh.counters().refused >= 6);
        for end in [&a, first, second, third] {
            assert_eq!((end.ups.len(), end.mesh.channels().open), (0, 0), "{way:?}");
            assert_eq!(end.mesh.channels().refused & 1, 0, "a process listens there");
        }
    }
}

#[test]
fn a_caller_that_is_not_listed_yet_waits() {
    for way in Way::ALL {
        let fabric = Fabric::new(2);
        let end = |rank| End::new(fabric.config(way, "early", rank, 1));
        let (mut a, mut b) = (end(0), end(1));
        b.mesh.set_peers(&[a.peer()]);
        for _ in 0..2000 {
            a.take();
            b.take();
        }
        assert!(a.ups.is_empty() && b.ups.is_empty());
        a.mesh.set_peers(&[b.peer()]);
        until(&mut [&mut a, &mut b], "both are up", |ends| ends.iter().all(|end| end.ups.len() == 1));
        assert_eq!(a.mesh.counters().refused, 0, "{way:?}");
    }
}

/// Processes of one host that do not both use shared memory meet over TCP.
#[test]
fn lanes_that_are_missing_are_not_needed() {
    for (first, second) in [(Way::Shm, Way::Tcp), (Way::Tcp, Way::Shm)] {
        let end = |way: Way, rank| End::new(MeshConfig { tcp: true, ..way.config("mixed", rank, 1) });
        let (mut a, mut b) = (end(first, 0), end(second, 1));
        introduce(&mut [&mut a, &mut b]);
        assert_eq!(a.send(1, 777), SendOutcome::Sent);
        until(&mut [&mut a, &mut b], "a frame", |ends| ends[1].frames == 1);
        assert_eq!(b.mesh.counters().tcp.received.frames, 1);
    }
    // RDMA of one side only.
    let fabric = Fabric::new(2);
    for ways in [(Way::Rdma, Way::Tcp), (Way::Tcp, Way::Rdma)] {
        let (mut a, mut b) =
            (End::new(fabric.config(ways.0, "mixed", 0, 1)), End::new(fabric.config(ways.1, "mixed", 1, 1)));
        introduce(&mut [&mut a, &mut b]);
        assert_eq!(a.send(1, 777), SendOutcome::Sent);
        until(&mut [&mut a, &mut b], "a frame", |ends| ends[1].frames == 1);
        assert_eq!(b.mesh.counters().tcp.received.frames, 1);
    }
}
