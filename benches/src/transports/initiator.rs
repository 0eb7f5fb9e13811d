//! Initiator of transfers to a target in another process.

use std::time::Duration;

use kvplane::{Buffer, Pacing, Region, RegionOptions, Segment, Session, Transfer, TransferEngine};

use crate::Failure;
use crate::bed::{Directory, engine_config};
use crate::peer::Peer;

const DEADLINE: Duration = Duration::from_secs(10);

/// Session to a target, with memory of its own.
pub(super) struct Initiator {
    session: Session,
    segment: Segment,
    pub(super) buffer: Buffer,
    _engine: TransferEngine,
    _target: Peer,
}

impl Initiator {
    /// Opens a session with this pacing to a target that was started the same way.
    pub(super) fn open(
        target: Peer,
        way: &str,
        pacing: Pacing,
        memory: &RegionOptions,
        directory: &Directory,
    ) -> Result<Self, Failure> {
        // The local serving thread has nothing to do here and would only spin.
        let engine = TransferEngine::start(engine_config(way, "park", directory.text())?)?;
        let mut session = engine.session_with(pacing)?;
        let segment = session.open_segment(&target.said, DEADLINE)?;
        let buffer = session.register(Region::allocate(memory)?);
        Ok(Self { session, segment, buffer, _engine: engine, _target: target })
    }

    /// Carries out transfers, and waits for them.
    pub(super) fn run(&mut self, transfers: &[Transfer]) -> Result<(), Failure> {
        Ok(self.session.run(&self.segment, transfers, DEADLINE)?)
    }
}
