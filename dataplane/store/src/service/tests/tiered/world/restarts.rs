//! Processes that die and start again.

use crate::service::Tiering;
use kvplane_proto::map::SlotOwners;
use kvplane_tier::Event;

use super::{PEER, Path, World, service};

impl World {
    /// The process dies: what the device was not done with is done or not. The next one recovers.
    pub(in super::super) fn restart(&mut self) {
        self.die();
        self.begin();
        while !self.service.inspect().tier().expect("a tier").snapshot().is_recovered {
            self.step();
        }
    }

    /// As that, and callers come when the device has only just been opened.
    pub(in super::super) fn restart_in_haste(&mut self) {
        self.die();
        while !matches!(self.service.tier_mut().and_then(Tiering::poll_notice), Some(Event::Opened { .. })) {
            self.step();
        }
        self.own();
        self.join(PEER, Path::Stream);
        self.hear();
    }

    /// As [`Self::restart`], into a cluster of these owners. What the next incarnation asks of others is not answered
    /// yet.
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

    /// The incarnation is declared over, and goes on as another.
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
                // Whoever would have been told is gone.
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
