//! Engines whose publisher is unreachable, and the state of their caches after they return.

use crate::support;

use kvplane_conductor::conductor::{
    AWAY_FORGOTTEN_NS, AWAY_SUSPECT_NS, BlockChange, CacheBatch, CacheReport, CacheWanted, Conductor, ConductorError,
    InstancePart, QueryPrompt, RegisterInstance, RequestStep, ScheduleRefusal, ScheduleReply,
};
use kvplane_conductor::index::Tiers;
use support::{SECOND, asked, assigned, batch, config, context, prompt, spec, stored};

/// Returns a Conductor with one engine that sends no load reports and holds ten blocks.
fn engine() -> Conductor {
    let mut conductor = Conductor::new(config(), 0);
    conductor.register(RegisterInstance { report_ns: 0, ..spec("e0", InstancePart::Mixed) }, 0).expect("room");
    conductor.cache("e0", 1, batch(0, vec![stored(prompt(1, 10))]), 0).expect("known");
    conductor
}

/// Returns the number of tokens that the engine is known to hold, and true if it is degraded.
fn held(conductor: &mut Conductor) -> Option<(u32, bool)> {
    let found = conductor.query(&context(), QueryPrompt::Hashes(&prompt(1, 10)), 4, Tiers::SAID).expect("served");
    found.holders.first().map(|held| (held.dram_tokens / support::BLOCK, held.degraded))
}

#[test]
fn unreachable_engine_is_excluded_then_forgotten_until_it_returns() {
    let mut conductor = engine();
    assert_eq!((held(&mut conductor), conductor.instances().unreachable()), (Some((10, false)), 0));
    let takes = |conductor: &mut Conductor, id: &str, at_ns| match conductor.schedule(&asked(id, prompt(2, 1)), at_ns) {
        Ok(ScheduleReply::Refused { why: ScheduleRefusal::NoInstance, .. }) => false,
        answer => {
            let placed = assigned(&answer.expect("good")).clone();
            conductor.update(placed.reservation, RequestStep::Ended, at_ns).expect("booked");
            &*placed.prefill == "e0"
        }
    };
    assert!(!conductor.away("e0", 1, SECOND, SECOND).expect("known"));
    assert_eq!(
        (held(&mut conductor), conductor.instances().unreachable()),
        (Some((10, true)), 1),
        "batches may have been lost"
    );
    assert!(takes(&mut conductor, "soon", SECOND));
    assert!(!conductor.away("e0", 1, AWAY_SUSPECT_NS, AWAY_SUSPECT_NS).expect("known"));
    assert!(!takes(&mut conductor, "later", AWAY_SUSPECT_NS), "no request is placed there");
    assert!(conductor.table(0).instances[0].suspect);
    assert!(conductor.away("e0", 1, AWAY_FORGOTTEN_NS, AWAY_FORGOTTEN_NS).expect("known"));
    assert_eq!(held(&mut conductor), Some((0, true)));
    // The engine is back, and repeats everything from the first batch on.
    conductor.cache("e0", 1, batch(0, vec![stored(prompt(1, 4))]), AWAY_FORGOTTEN_NS).expect("known");
    conductor.reached("e0", 1, AWAY_FORGOTTEN_NS).expect("known");
    assert_eq!((held(&mut conductor), conductor.instances().unreachable()), (Some((4, false)), 0));
    assert!(takes(&mut conductor, "back", AWAY_FORGOTTEN_NS));
    assert!(matches!(conductor.away("e0", 2, 0, 0), Err(ConductorError::UnknownInstance { .. })));
}

#[test]
fn engine_heard_from_otherwise_is_not_excluded() {
    let mut conductor = engine();
    let at_ns = 2 * AWAY_SUSPECT_NS;
    conductor.cache("e0", 1, batch(1, vec![]), at_ns).expect("known");
    conductor.away("e0", 1, at_ns, at_ns).expect("known");
    assert!(!conductor.table(at_ns).instances[0].suspect);
    // An engine that sends load reports is judged by these.
    conductor
        .register(RegisterInstance { report_ns: SECOND, incarnation: 2, ..spec("e0", InstancePart::Mixed) }, at_ns)
        .expect("a later incarnation");
    conductor.away("e0", 2, at_ns, 2 * at_ns).expect("known");
    assert!(!conductor.table(at_ns).instances[0].suspect);
}

#[test]
fn cleared_cache_is_known_despite_earlier_losses() {
    let mut conductor = engine();
    let lost = CacheBatch { seq: 5, kind: CacheReport::Lost, changes: vec![stored(prompt(1, 2))] };
    assert_eq!(conductor.cache("e0", 1, lost, 0).expect("known").wanted, CacheWanted::Snapshot);
    assert_eq!(held(&mut conductor), Some((2, true)));
    let cleared = batch(6, vec![BlockChange::Cleared, stored(prompt(1, 3))]);
    assert_eq!(conductor.cache("e0", 1, cleared, 0).expect("known").wanted, CacheWanted::Nothing);
    assert_eq!(held(&mut conductor), Some((3, false)));
}

#[test]
fn empty_snapshot_before_the_first_batch_is_accepted() {
    let mut conductor = engine();
    let nothing = CacheBatch { seq: u64::MAX, kind: CacheReport::Snapshot, changes: Vec::new() };
    assert_eq!(conductor.cache("e0", 1, nothing, 0).expect("known").next, 0);
    conductor.cache("e0", 1, batch(0, vec![stored(prompt(1, 2))]), 0).expect("known");
    conductor.cache("e0", 1, batch(1, vec![stored(prompt(1, 3))]), 0).expect("known");
    assert_eq!((held(&mut conductor), conductor.counts().duplicates), (Some((3, false)), 0));
}
