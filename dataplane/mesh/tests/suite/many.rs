//! The largest world: 63 peers, within the memory that the settings give.

use kvplane_mesh::{MAX_RANKS, SendOutcome};

use crate::rig::{End, Way, until};

/// Returns the bytes of memory that this process has mapped for channels.
fn mapped_bytes() -> usize {
    let map = std::fs::read_to_string("/proc/self/maps").expect("a map");
    let channels = map.lines().filter(|line| line.contains("memfd:kvplane-mesh (deleted)"));
    let bytes = |range: &str| {
        let (from, to) = range.split_once('-')?;
        Some(usize::from_str_radix(to, 16).ok()? - usize::from_str_radix(from, 16).ok()?)
    };
    channels.filter_map(|line| bytes(line.split(' ').next()?)).sum()
}

#[test]
fn sixty_three_peers_fit_the_memory() {
    let mut config = Way::Shm.config("many", 0, 1);
    (config.payload_bytes, config.window_bytes) = (32 << 10, 20 << 20);
    let window_bytes = config.window_bytes;
    let mut hub = End::new(config);
    let mut others: Vec<End> = (1..MAX_RANKS as u8)
        .map(|rank| {
            let mut config = Way::Shm.config("many", rank, 1);
            config.payload_bytes = 32 << 10;
            End::new(config)
        })
        .collect();
    let peers: Vec<_> = others.iter().map(End::peer).collect();
    hub.mesh.set_peers(&peers);
    others.iter_mut().for_each(|end| end.mesh.set_peers(&[hub.peer()]));
    let mut ends: Vec<&mut End> = core::iter::once(&mut hub).chain(&mut others).collect();
    until(&mut ends, "the channels open", |ends| ends.iter().all(|end| !end.mesh.channels().open & end.others() == 0));
    // Each channel is mapped by both of its ends, which are in this process; their headers come on top.
    assert!(mapped_bytes() <= 2 * (window_bytes + MAX_RANKS * 16384), "{} bytes", mapped_bytes());
    let mut left = vec![20; MAX_RANKS];
    until(&mut ends, "frames", |ends| {
        for rank in 1..MAX_RANKS as u8 {
            left[usize::from(rank)] -=
                u64::from(left[usize::from(rank)] > 0 && ends[0].send(rank, 30_000) == SendOutcome::Sent);
        }
        for end in &mut ends[1..] {
            if end.received[0] == 20 && end.frames == 20 {
                end.frames += u64::from(end.send(0, 100) == SendOutcome::Sent);
            }
        }
        ends[1..].iter().all(|end| end.frames == 21) && ends[0].frames == 63
    });
}

impl End {
    /// Returns the mask of the ranks that this end of a star has channels with.
    fn others(&self) -> u64 {
        if self.rank == 0 { !1 } else { 1 }
    }
}
