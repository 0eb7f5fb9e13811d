//! Tasks against owners with random answers, or none for a while.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_cluster::{ReplicaProgress, TaskLimits, TaskRefusal, TaskState, Tasks};
use kvplane_proto::Digest;
use kvplane_proto::rng::Rng;

const LIMITS: TaskLimits =
    TaskLimits { open: 5, kept: 4, objects: 6, all_objects: 20, under_way: 3, again_ns: 10, object_ns: 5_000_000_000 };

/// Whatever owners answer and clients cancel: the objects in progress stay within their limit, every object of a
/// succeeded task was reported to have a replica, unanswered requests end by their deadline, and no state is leaked.
#[test]
fn tasks_end_and_never_ask_for_more_than_they_may() {
    for seed in 0..300 {
        let rng = &mut Rng::new(seed, "tasks");
        let mut tasks = Tasks::new(LIMITS, 7);
        let (mut now_ns, mut out) = (0u64, BTreeMap::new());
        let mut there: BTreeSet<(u64, usize)> = BTreeSet::new();
        let (mut made, mut sizes) = (Vec::new(), BTreeMap::new());
        let patient = seed % 3 == 0;
        for step in 0..400u64 {
            now_ns += if patient { 1_000_000_000 } else { rng.below(30) };
            if rng.chance(0.3) {
                let count = rng.below(8) as usize;
                let digests = (0..count).map(|at| Digest(u128::from(step) << 8 | at as u128)).collect();
                match tasks.create(String::new(), format!("{step}"), digests, now_ns) {
                    Ok(id) => {
                        assert!(made.last().is_none_or(|last| *last < id) && id > 7, "seed {seed}");
                        made.push(id);
                        sizes.insert(id, count);
                    }
                    Err(TaskRefusal::Objects(objects)) => assert!(objects == 0 || objects > 6, "seed {seed}"),
                    Err(TaskRefusal::Full) => {
                        let open: Vec<_> = tasks.list(0).filter(|task| !task.state.is_over()).collect();
                        let objects: usize = open.iter().map(|task| task.objects).sum();
                        assert!(open.len() == 5 || objects + count > 20, "seed {seed}: below the limit");
                    }
                }
            }
            for (id, object, digest) in tasks.due(now_ns) {
                assert_eq!(digest.0 & 0xff, object as u128, "seed {seed}");
                let former = out.insert((id, object), ());
                assert!(former.is_none(), "seed {seed}: {id}.{object} was requested twice at a time");
            }
            let open = |id: &u64| tasks.get(*id).is_some_and(|task| !task.state.is_over());
            assert!(out.keys().filter(|(id, _)| open(id)).count() <= 3, "seed {seed}: {out:?}");
            let answered: Vec<(u64, usize)> = out.keys().copied().filter(|_| rng.chance(0.5)).collect();
            for (id, object) in answered {
                out.remove(&(id, object));
                let progress = match rng.below(40) {
                    0 => ReplicaProgress::Missing,
                    1 => ReplicaProgress::Alone,
                    2..20 if !patient => ReplicaProgress::There { bytes: 10 },
                    _ => ReplicaProgress::Coming,
                };
                if progress == (ReplicaProgress::There { bytes: 10 }) && open_task(&tasks, id) {
                    there.insert((id, object));
                }
                tasks.told(id, object, progress, now_ns);
            }
            if rng.chance(0.05) && !made.is_empty() {
                let id = made[rng.below(made.len() as u64) as usize];
                let was_open = open_task(&tasks, id);
                assert_eq!(tasks.cancel(id, now_ns), was_open, "seed {seed}");
            }
            for task in tasks.list(0) {
                let copied = there.iter().filter(|(id, _)| *id == task.id).count();
                assert_eq!((task.copied, task.bytes), (copied, 10 * copied as u64), "seed {seed}");
                assert_eq!(task.state == TaskState::Succeeded, copied == sizes[&task.id], "seed {seed}: {task:?}");
            }
            assert!(tasks.list(0).filter(|task| task.state.is_over()).count() <= 4, "seed {seed}");
        }
        time_passes(&mut tasks, &mut out, now_ns);
        assert!(tasks.list(0).all(|task| task.state.is_over()), "seed {seed}: {tasks:?}");
        assert_eq!(tasks.poll_timeout(), None, "seed {seed}");
    }
}

fn open_task(tasks: &Tasks, id: u64) -> bool {
    tasks.get(id).is_some_and(|task| !task.state.is_over())
}

/// Lets time pass while owners only report progress.
fn time_passes(tasks: &mut Tasks, out: &mut BTreeMap<(u64, usize), ()>, from_ns: u64) {
    let mut now_ns = from_ns;
    for _ in 0..200 {
        now_ns = tasks.poll_timeout().unwrap_or(now_ns).max(now_ns + 1_000_000_000);
        for (id, object) in core::mem::take(out).into_keys() {
            tasks.told(id, object, ReplicaProgress::Coming, now_ns);
        }
        out.extend(tasks.due(now_ns).into_iter().map(|(id, object, _)| ((id, object), ())));
    }
}
