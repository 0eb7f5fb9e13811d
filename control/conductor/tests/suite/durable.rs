//! Restart of a Conductor from the durable state of an earlier one.

use crate::support;

use std::collections::BTreeMap;

use kvplane_conductor::conductor::{
    BlockChange, CacheBatch, CacheReport, CacheWanted, ClassTerms, Conductor, ConductorError, Durable, DurableInstance,
    EventSource, InstanceLoad, InstancePart, InstanceSpec, QueryPrompt, RegisterInstance, RequestStep,
};
use kvplane_conductor::index::Tiers;
use kvplane_conductor::policy::{PlacementPolicy, Slo};
use proptest::prelude::*;
use support::{SECOND, asked, assigned, batch, config, context, prompt, spec, stored};

const GRACE: u64 = 10 * SECOND;

/// A Conductor, and a disk with the changes that it reported as durable.
struct DurableDesk {
    conductor: Conductor,
    disk: BTreeMap<String, DurableInstance>,
    placement: Option<(PlacementPolicy, Slo)>,
    classes: BTreeMap<String, ClassTerms>,
    weights: BTreeMap<(String, String), u32>,
}

impl DurableDesk {
    fn new() -> Self {
        Self {
            conductor: Conductor::new(config(), 0),
            disk: BTreeMap::new(),
            placement: None,
            classes: BTreeMap::new(),
            weights: BTreeMap::new(),
        }
    }

    /// Stores the changes, as a host does after each call.
    fn keep(&mut self) {
        for change in self.conductor.take_durable() {
            match change {
                Durable::Instance(instance) => drop(self.disk.insert(instance.spec.instance.clone(), *instance)),
                Durable::Gone(name) => drop(self.disk.remove(&*name)),
                Durable::Placement(policy, slo) => self.placement = Some((policy, slo)),
                Durable::Class(name, Some(terms)) => drop(self.classes.insert(name, terms)),
                Durable::Class(name, None) => drop(self.classes.remove(&name)),
                Durable::Weight { tenant, flow, weight: Some(weight) } => {
                    self.weights.insert((tenant, flow), weight);
                }
                Durable::Weight { tenant, flow, weight: None } => drop(self.weights.remove(&(tenant, flow))),
            }
        }
        assert!(!self.conductor.has_durable());
    }

    /// Kills the process, and starts another one from the disk.
    fn restart(&mut self, now_ns: u64) {
        let mut config = config();
        if let Some((policy, slo)) = self.placement {
            (config.policy, config.refuses, config.scheduler.slo) = (policy, slo.is_some(), slo);
        }
        self.conductor = Conductor::new(config, 1 << 40);
        for (name, terms) in &self.classes {
            self.conductor.service().restore_class(name, *terms).expect("it was there before");
        }
        for ((tenant, flow), weight) in &self.weights {
            self.conductor.service().restore_weight(tenant, flow, *weight).expect("it was there before");
        }
        for instance in self.disk.values() {
            self.conductor.restore(instance.clone(), now_ns + GRACE).expect("it was there before");
        }
        assert!(!self.conductor.has_durable(), "unchanged state is not reported");
    }

    /// Returns the tokens of a prompt of twenty blocks that an instance is known to hold, and true if it is degraded.
    fn held(&mut self, name: &str) -> (u32, bool) {
        let found =
            self.conductor.query(&context(), QueryPrompt::Hashes(&prompt(1, 20)), 8, Tiers::SAID).expect("served");
        match found.holders.iter().find(|holding| &*holding.instance == name) {
            Some(holding) => (holding.dram_tokens / support::BLOCK, holding.degraded),
            None => (0, false),
        }
    }
}

fn publisher() -> EventSource {
    let (publisher, replay, topic) = ("tcp://h:1".to_owned(), "tcp://h:2".to_owned(), "kv".to_owned());
    EventSource { publisher, replay, topic }
}

#[test]
fn classes_and_weights_survive_a_restart() {
    let mut kept = DurableDesk::new();
    let terms = ClassTerms { priority: -1, ttft_ns: Some(SECOND) };
    kept.conductor.service().set_class("kept", Some(terms)).expect("valid");
    kept.conductor.service().set_class("gone", Some(terms)).expect("valid");
    kept.conductor.service().set_class("gone", None).expect("set before");
    kept.conductor.service().set_weight("t", "kept", Some(7)).expect("valid");
    kept.conductor.service().set_weight("", "gone", Some(8)).expect("valid");
    kept.conductor.service().set_weight("", "gone", None).expect("valid");
    kept.keep();
    kept.restart(0);
    assert_eq!(kept.conductor.service().classes().clone(), BTreeMap::from([("kept".to_owned(), terms)]));
    assert_eq!(kept.conductor.service().weights().collect::<Vec<_>>(), [("t", "kept", 7)]);
}

#[test]
fn registrations_holds_and_placement_survive_a_restart() {
    let mut kept = DurableDesk::new();
    kept.conductor.register(spec("quic", InstancePart::Prefill), 0).expect("room");
    let followed = RegisterInstance { events: Some(publisher()), report_ns: 0, ..spec("http", InstancePart::Mixed) };
    kept.conductor.register(InstanceSpec { has_vllm_hashes: true, ..followed.clone().into() }, 0).expect("room");
    kept.conductor.register(spec("gone", InstancePart::Decode), 0).expect("room");
    kept.conductor.deregister("gone", 1, 0).expect("known");
    kept.conductor.hold("quic", true, 0).expect("known");
    kept.conductor.set_placement(PlacementPolicy::RoundRobin, false, Slo::NONE, 0);
    kept.keep();
    let booked = kept.conductor.schedule(&asked("a", prompt(1, 20)), 0).expect("good");
    let reservation = assigned(&booked).reservation;
    // Neither a request nor a repeated registration changes the durable state.
    kept.conductor
        .register(InstanceSpec { has_vllm_hashes: true, ..followed.clone().into() }, 0)
        .expect("a repeated registration");
    kept.conductor.hold("quic", true, 0).expect("known");
    kept.conductor.report("quic", 1, InstanceLoad { seq: 1, ..InstanceLoad::default() }, 0).expect("known");
    assert_eq!(kept.conductor.take_durable(), vec![]);

    kept.restart(SECOND);
    let rows = kept.conductor.table(SECOND).instances;
    let shown: Vec<_> = rows
        .iter()
        .map(|row| (&*row.status.instance, row.status.incarnation, row.held, row.suspect, row.status.prefills))
        .collect();
    assert_eq!(shown, [("http", 1, false, false, 0), ("quic", 1, true, false, 0)]);
    assert_eq!(kept.conductor.placement().0, PlacementPolicy::RoundRobin);
    assert!(kept.conductor.instances().specs().any(|spec| *spec == followed), "its publisher is restored");
    assert!(kept.conductor.update(reservation, RequestStep::Alive, SECOND).is_err(), "a booking is of one process");
    // Another publisher under the same incarnation is another registration.
    let elsewhere = EventSource { replay: String::new(), ..publisher() };
    let other = RegisterInstance { events: Some(elsewhere), ..followed };
    assert!(matches!(
        kept.conductor.register(InstanceSpec { has_vllm_hashes: true, ..other.into() }, SECOND),
        Err(ConductorError::Conflict { .. })
    ));
    // Its next incarnation is not held, which is durable too.
    kept.conductor
        .register(RegisterInstance { incarnation: 2, ..spec("quic", InstancePart::Prefill) }, SECOND)
        .expect("a later incarnation");
    kept.keep();
    kept.restart(2 * SECOND);
    assert!(kept.conductor.table(0).instances.iter().all(|row| !row.held));
}

#[test]
fn token_bytes_do_not_depend_on_the_order_of_restoring() {
    let mut kept = DurableDesk::new();
    kept.conductor
        .register(RegisterInstance { token_bytes: 500, ..spec("z", InstancePart::Prefill) }, 0)
        .expect("room");
    // It gets the bytes per token of the other instances of its model.
    kept.conductor.register(spec("a", InstancePart::Prefill), 0).expect("room");
    kept.keep();
    kept.restart(0);
    kept.conductor
        .register(RegisterInstance { token_bytes: 500, ..spec("m", InstancePart::Prefill) }, 0)
        .expect("the same number");
    let odd = RegisterInstance { token_bytes: 501, ..spec("n", InstancePart::Prefill) };
    assert!(matches!(kept.conductor.register(odd, 0), Err(ConductorError::Conflict { .. })));
}

#[test]
fn silence_counts_after_the_restart_grace() {
    let mut kept = DurableDesk::new();
    kept.conductor.register(spec("p0", InstancePart::Prefill), 0).expect("room");
    kept.keep();
    kept.restart(100 * SECOND);
    let graced_ns = 100 * SECOND + GRACE;
    kept.conductor.tick(graced_ns + 2 * SECOND);
    assert!(kept.conductor.table(0).instances.iter().all(|row| !row.suspect));
    kept.conductor.tick(graced_ns + 3 * SECOND);
    assert!(kept.conductor.table(0).instances.iter().all(|row| row.suspect));
    kept.conductor.tick(graced_ns + 10 * SECOND);
    kept.keep();
    assert!(kept.disk.is_empty(), "a lost instance is not durable");
    kept.restart(200 * SECOND);
    assert!(kept.conductor.table(0).instances.is_empty());
}

#[test]
fn restored_instance_is_degraded_until_its_cache_is_known() {
    let restarted = || {
        let mut kept = DurableDesk::new();
        kept.conductor.register(spec("p0", InstancePart::Prefill), 0).expect("room");
        kept.conductor.cache("p0", 1, batch(0, vec![stored(prompt(1, 10))]), 0).expect("known");
        kept.keep();
        assert_eq!(
            (kept.held("p0"), kept.conductor.incomplete(&spec("p0", InstancePart::Prefill).pool())),
            ((10, false), false)
        );
        kept.restart(SECOND);
        assert_eq!(
            (kept.held("p0"), kept.conductor.incomplete(&spec("p0", InstancePart::Prefill).pool())),
            ((0, true), true)
        );
        assert!(kept.conductor.table(0).pools[0].incomplete);
        assert!(
            kept.conductor
                .register(spec("p0", InstancePart::Prefill), SECOND)
                .expect("a repeated registration")
                .answer
                .fresh
        );
        kept
    };
    let cache = |batch| {
        let mut kept = restarted();
        let wanted = kept.conductor.cache("p0", 1, batch, SECOND).expect("known").wanted;
        (kept.held("p0"), wanted)
    };
    // The cache is known from the first batch on, after a snapshot, or after a clear.
    assert_eq!(cache(batch(0, vec![stored(prompt(1, 3))])), ((3, false), CacheWanted::Nothing));
    let snapshot = CacheBatch { seq: 7, kind: CacheReport::Snapshot, changes: vec![stored(prompt(1, 4))] };
    assert_eq!(cache(snapshot), ((4, false), CacheWanted::Nothing));
    let cleared = vec![BlockChange::Cleared, stored(prompt(1, 5))];
    assert_eq!(cache(batch(9, cleared)), ((5, false), CacheWanted::Nothing));
    // It is not known from a later batch on, nor after a loss; batch number 1 may have a predecessor.
    assert_eq!(cache(batch(1, vec![stored(prompt(1, 6))])), ((6, true), CacheWanted::Snapshot));
    assert_eq!(cache(batch(2, vec![stored(prompt(1, 6))])), ((6, true), CacheWanted::Snapshot));
    let lost = CacheBatch { seq: 5, kind: CacheReport::Lost, changes: vec![stored(prompt(1, 7))] };
    assert_eq!(cache(lost), ((7, true), CacheWanted::Snapshot));
}

#[test]
fn restored_instance_without_cache_reports_is_not_degraded() {
    let mut kept = DurableDesk::new();
    kept.conductor.register(spec("p0", InstancePart::Prefill), 0).expect("room");
    let decodes = RegisterInstance { events: Some(publisher()), ..spec("d0", InstancePart::Decode) };
    kept.conductor.register(decodes, 0).expect("room");
    kept.keep();
    kept.restart(SECOND);
    assert!(!kept.conductor.incomplete(&spec("p0", InstancePart::Prefill).pool()));
    assert!(kept.conductor.table(0).instances.iter().all(|row| !row.status.degraded));
}

#[test]
fn forgotten_instance_is_degraded_after_its_return() {
    let mut kept = DurableDesk::new();
    kept.conductor.register(RegisterInstance { report_ns: 0, ..spec("e0", InstancePart::Mixed) }, 0).expect("room");
    kept.conductor.cache("e0", 1, batch(0, vec![stored(prompt(1, 10))]), 0).expect("known");
    let long_ns = kvplane_conductor::conductor::AWAY_FORGOTTEN_NS;
    assert!(kept.conductor.away("e0", 1, long_ns, long_ns).expect("known"));
    // The publisher is reachable, and could not replay anything.
    kept.conductor.reached("e0", 1, long_ns).expect("known");
    assert_eq!(kept.held("e0"), (0, true));
}

#[derive(Clone, Debug)]
enum Act {
    Register(u8, u64, u8),
    Deregister(u8),
    Hold(u8, bool),
    Report(u8),
    Cache(u8, u64, u8),
    Place(u8, bool),
    Pass(u64),
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..5u8, 1..3u64, 0..6u8).prop_map(|(name, incarnation, kind)| Act::Register(name, incarnation, kind)),
        1 => (0..5u8).prop_map(Act::Deregister),
        1 => (0..5u8, any::<bool>()).prop_map(|(name, held)| Act::Hold(name, held)),
        2 => (0..5u8).prop_map(Act::Report),
        3 => (0..5u8, 0..4u64, 0..3u8).prop_map(|(name, seq, kind)| Act::Cache(name, seq, kind)),
        1 => (0..4u8, any::<bool>()).prop_map(|(policy, promises)| Act::Place(policy, promises)),
        1 => (0..4 * SECOND).prop_map(Act::Pass),
        1 => Just(Act::Restart),
    ]
}

/// Returns the durable state of each instance, according to a Conductor that never restarts.
fn remembered(conductor: &mut Conductor, now_ns: u64) -> Vec<(String, u64, bool, RegisterInstance)> {
    let rows = conductor.table(now_ns).instances;
    let specs: BTreeMap<String, RegisterInstance> =
        conductor.instances().specs().map(|spec| (spec.instance.clone(), spec.clone())).collect();
    rows.iter()
        .map(|row| {
            (row.status.instance.to_string(), row.status.incarnation, row.held, specs[&*row.status.instance].clone())
        })
        .collect()
}

proptest! {
    /// A kill after any step keeps the same instances, and an instance is degraded unless the index knows everything
    /// that it holds.
    #[test]
    fn answered_changes_survive_a_kill(acts in prop::collection::vec(act(), 1..80)) {
        let mut kept = DurableDesk::new();
        let mut now_ns = 0;
        // By name: true if the instance has blocks that were not reported to this Conductor.
        let mut missing: BTreeMap<String, bool> = BTreeMap::new();
        for act in acts {
            match act {
                Act::Register(name, incarnation, kind) => {
                    let part = if name == 4 { InstancePart::Decode } else { InstancePart::Mixed };
                    let events = (kind == 5).then(publisher);
                    let token_bytes = [0, 0, 0, 64, 128, 0][usize::from(kind)];
                    let model = if kind == 4 { "other" } else { "m" }.to_owned();
                    let like = spec(&format!("i{name}"), part);
                    let spec = RegisterInstance { incarnation, events, token_bytes, model, ..like };
                    let of = |spec: &RegisterInstance| (spec.instance.clone(), spec.incarnation);
                    let is_new = !kept.conductor.instances().specs().any(|known| of(known) == of(&spec));
                    let name = spec.instance.clone();
                    if kept.conductor.register(spec, now_ns).is_ok() && is_new {
                        missing.insert(name, false);
                    }
                }
                Act::Deregister(name) => drop(kept.conductor.deregister(&format!("i{name}"), 9, now_ns)),
                Act::Hold(name, held) => drop(kept.conductor.hold(&format!("i{name}"), held, now_ns)),
                Act::Report(name) => {
                    for incarnation in 1..3 {
                        let (name, load) = (format!("i{name}"), InstanceLoad::default());
                        let _ = kept.conductor.report(&name, incarnation, load, now_ns);
                    }
                }
                Act::Cache(name, seq, kind) => {
                    let name = format!("i{name}");
                    let change = [CacheReport::Goes, CacheReport::Snapshot, CacheReport::Lost][usize::from(kind)];
                    for incarnation in 1..3 {
                        let batch = CacheBatch { seq, kind: change, changes: vec![stored(prompt(seq, 5))] };
                        if kept.conductor.cache(&name, incarnation, batch, now_ns).is_ok() && kind == 1 {
                            missing.insert(name.clone(), false);
                        } else if kind == 0 && seq == 0 {
                            // No batch preceded it, or the instance was known before.
                            missing.insert(name.clone(), false);
                        }
                    }
                }
                Act::Place(policy, promises) => {
                    let policy = PlacementPolicy::ALL[usize::from(policy)];
                    let slo = Slo { ttft_ns: SECOND, ..Slo::NONE };
                    let promises = promises && policy.heeds_promises();
                    kept.conductor.set_placement(policy, promises, if promises { slo } else { Slo::NONE }, now_ns);
                }
                Act::Pass(span_ns) => {
                    now_ns += span_ns;
                    kept.conductor.tick(now_ns);
                }
                Act::Restart => {
                    let (before, placement) = (remembered(&mut kept.conductor, now_ns), kept.conductor.placement());
                    let reporting: Vec<String> =
                        {
                        let reporting = kept.disk.values().filter(|one| one.reports_cache);
                        reporting.map(|one| one.spec.instance.clone()).collect()
                    };
                    kept.restart(now_ns);
                    prop_assert_eq!(remembered(&mut kept.conductor, now_ns), before);
                    prop_assert_eq!(kept.conductor.placement(), placement);
                    missing.extend(reporting.into_iter().map(|name| (name, true)));
                }
            }
            kept.keep();
            for row in kept.conductor.table(now_ns).instances {
                let row = &row.status;
                let missing = missing.get(&*row.instance).copied().unwrap_or(false) && row.part != InstancePart::Decode;
                prop_assert!(!missing || row.degraded, "{} is reported as complete", row.instance);
            }
        }
    }
}
