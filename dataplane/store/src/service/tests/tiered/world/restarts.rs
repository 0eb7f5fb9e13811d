//! Processes that die and restart.

use crate::service::Tiering;
use kvplane_proto::map::SlotOwners;
use kvplane_tier::Event;

use super::{PEER, Path, World, service};

impl World {
    /// Restarts after a crash: each operation in flight on the device is done or not. The next process recovers.
    pub(in super::super) fn restart(&mut self) {
        self.die();
        self.begin();
        while !self.service.inspect().tier().expect("a tier").snapshot().is_recovered {
            self.step();
        }
    }

    /// Like [`Self::restart`], with requests as soon as the device was opened.
    pub(in super::super) fn restart_in_haste(&mut self) {
        self.die();
        while !matches!(self.service.tier_mut().and_then(Tiering::poll_notice), Some(Event::Opened { .. })) {
            self.step();
        }
        self.own();
        self.join(PEER, Path::Stream);
        self.hear();
    }

    /// Like [`Self::restart`], into a cluster of these owners. Requests of the next incarnation to other shards are not
    /// answered yet.
    pub(in super::super) fn restart_among(&mut self, owners: &SlotOwners) {
        self.die();
        self.settle();
        self.service.follow(self.state, owners);
        self.join(PEER, Path::Stream);
        while !self.service.inspect().tier().expect("a tier").snapshot().is_recovered {
            self.step();
        }
        self.settle();
    }

    /// Declares the incarnation dead and continues as another.
    pub(in super::super) fn begin_incarnation_among(&mut self, owners: &SlotOwners) {
        let incarnation = super::super::super::rig::identity().incarnation;
        self.service.begin_incarnation(incarnation);
        while self.service.poll_output().is_some() {}
        self.service.peer_gone(PEER, self.now_ns);
        self.service.follow(self.state, owners);
        self.join(PEER, Path::Stream);
        self.settle();
    }

    fn die(&mut self) {
        while !self.ops.is_empty() {
            let op = self.ops.swap_remove(self.rng.below(self.ops.len() as u64) as usize);
            if self.rng.below(2) == 0 {
                // The callers of its result are gone.
                let _ = self.carry_out(&op);
            }
        }
        self.ssd_hits += self.service.inspect().tier().expect("a tier").snapshot().counters.hits;
        self.asked.clear();
        for key in std::mem::take(&mut self.volatile) {
            self.now_may(key, None);
        }
        self.incarnation += 1;
        (self.service, self.memory) = service(&self.device, self.incarnation, self.policy);
    }
}
