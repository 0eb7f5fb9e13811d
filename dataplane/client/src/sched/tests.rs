//! Unit tests of the scheduling decisions; the client's tests run them against a network.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use kvplane_proto::rng::Rng;
use kvplane_proto::states::render;

use super::classes::PROMOTE_NS;
use super::cuts::LEAST_BYTES;
use super::{
    Candidate, Choice, ClassQueue, Cuts, Health, HealthEvent, Kinds, Priority, Rail, Rate, RetryBudget, Ticket,
    cut_bytes, pick, share_behind,
};

const ANY: Kinds = Kinds { small: true, large: true };

fn ticket(priority: Priority, tenant: u32, weight: u16, bytes: u64) -> Ticket {
    Ticket { priority, tenant, weight, due_ns: u64::MAX, bytes, small: bytes <= 65_536 }
}

fn pop(queue: &mut ClassQueue, now_ns: u64) -> Option<u32> {
    let next = queue.next(ANY, now_ns)?;
    queue.take(next.place, now_ns);
    Some(next.item)
}

#[test]
fn the_health_machine_is_as_declared() {
    let expected = "\
Healthy + Failed -> Paused
Healthy + Connected -> (stale)
Healthy + Served -> (stale)
Paused + Failed -> Paused
Paused + Connected -> Probing
Paused + Served -> (stale)
Probing + Failed -> Paused
Probing + Connected -> (stale)
Probing + Served -> Healthy
";
    assert_eq!(render(Health::ALL, HealthEvent::ALL, Health::on), expected);
}

#[test]
fn classes_are_strict_and_do_not_starve() {
    let mut queue = ClassQueue::new();
    for item in 0..300 {
        queue.push(item, &ticket(Priority::ALL[item as usize / 100], 0, 1, 4096), 0);
    }
    let mut now_ns = 0;
    let mut order = Vec::new();
    while let Some(item) = pop(&mut queue, now_ns) {
        order.push((item, now_ns));
        now_ns += 1_000_000;
    }
    assert_eq!(order.len(), 300);
    let lows: Vec<u64> = order.iter().filter(|(item, _)| *item >= 200).map(|(_, at_ns)| *at_ns).collect();
    assert!(lows.windows(2).all(|pair| pair[1] - pair[0] <= PROMOTE_NS + 2_000_000), "{lows:?}");
    let early = order[..60].iter().filter(|(item, _)| *item < 100).count();
    assert!(early >= 45, "{early} of the first 60 are of the highest class");
}

#[test]
fn tenants_share_by_weight() {
    let mut queue = ClassQueue::new();
    for item in 0..3000 {
        let tenant = item % 3;
        queue.push(item, &ticket(Priority::Medium, tenant, [1, 2, 4][tenant as usize], 4096), 0);
    }
    let mut counts = [0u32; 3];
    for _ in 0..700 {
        counts[pop(&mut queue, 0).expect("an entry") as usize % 3] += 1;
    }
    assert!(counts.iter().zip([100, 200, 400]).all(|(&got, fair)| got.abs_diff(fair) <= 2), "{counts:?}");
}

#[test]
fn an_idle_tenant_gets_no_credit() {
    let mut queue = ClassQueue::new();
    for item in 0..1000 {
        queue.push(item, &ticket(Priority::Medium, 1, 1, 4096), 0);
    }
    (0..500).for_each(|_| assert!(pop(&mut queue, 0).is_some()));
    for item in 1000..1500 {
        queue.push(item, &ticket(Priority::Medium, 2, 1, 4096), 0);
    }
    let late = (0..100).filter(|_| pop(&mut queue, 0).expect("an entry") >= 1000).count();
    assert!((49..=51).contains(&late), "{late} of 100");
}

#[test]
fn earliest_due_time_goes_first_without_starving_the_rest() {
    let mut queue = ClassQueue::new();
    for item in 0..10 {
        queue.push(item, &ticket(Priority::Medium, 0, 1, 10), 0);
    }
    for item in 10..40 {
        let due_ns = 1_000_000_000 - u64::from(item);
        queue.push(item, &Ticket { due_ns, ..ticket(Priority::Medium, 0, 1, 10) }, 0);
    }
    let order: Vec<u32> = (0..40).map(|step| pop(&mut queue, step * 1_000_000).expect("an entry")).collect();
    let due: Vec<u32> = order.iter().copied().filter(|item| *item >= 10).collect();
    assert!(due.windows(2).all(|pair| pair[0] > pair[1]), "{due:?}");
    assert!(order[..15].contains(&0), "the oldest without a due time is served within its bound");
}

#[test]
fn small_slices_pass_large_ones_without_starving_them() {
    let mut queue = ClassQueue::new();
    for item in 0..100 {
        queue.push(item, &ticket(Priority::Medium, 0, 1, 256 << 10), 0);
    }
    assert_eq!(pop(&mut queue, 0), Some(0));
    for item in 100..10_000 {
        queue.push(item, &ticket(Priority::Medium, 0, 1, 4096), 0);
    }
    assert_eq!(pop(&mut queue, 0), Some(100), "a small one is next");
    let large = (0..6000).filter(|_| pop(&mut queue, 0).expect("an entry") < 100).count();
    assert!(large >= 5, "{large} large ones");
    assert!(queue.next(Kinds { small: false, large: true }, 0).is_some_and(|next| !next.small));
}

proptest! {
    #[test]
    fn every_entry_comes_once_in_its_tenants_order(
        steps in prop::collection::vec((0u8..10, 0u32..4, 0u8..3, 1u64..200_000, any::<bool>()), 1..400),
    ) {
        let mut queue = ClassQueue::new();
        let mut places: BTreeMap<u32, (u32, Ticket)> = BTreeMap::new();
        let mut last: BTreeMap<(Priority, bool, u32), u32> = BTreeMap::new();
        let mut gone = BTreeSet::new();
        let mut now_ns = 0;
        for (number, &(what, tenant, class, bytes, due)) in steps.iter().enumerate() {
            let item = number as u32;
            now_ns += bytes;
            match what {
                0..=5 => {
                    let due_ns = if due { now_ns + bytes * 7 % 10_000 } else { u64::MAX };
                    let ticket = Ticket { due_ns, ..ticket(Priority::ALL[usize::from(class)], tenant, 1, bytes) };
                    places.insert(item, (queue.push(item, &ticket, now_ns), ticket));
                }
                6 => {
                    if let Some((&item, &(place, _))) = places.iter().nth(tenant as usize) {
                        queue.remove(place);
                        places.remove(&item);
                    }
                }
                _ => {
                    let next = queue.next(ANY, now_ns);
                    prop_assert_eq!(next.is_some(), !places.is_empty());
                    let Some(next) = next else { continue };
                    queue.take(next.place, now_ns);
                    let (_, ticket) = places.remove(&next.item).expect("an entry that is there");
                    prop_assert!(gone.insert(next.item), "twice");
                    prop_assert_eq!((next.bytes, next.priority), (ticket.bytes, ticket.priority));
                    prop_assert_eq!(next.small, ticket.small);
                    if ticket.due_ns == u64::MAX {
                        let before = last.insert((ticket.priority, ticket.small, ticket.tenant), next.item);
                        prop_assert!(before.is_none_or(|before| before < next.item), "out of order");
                    }
                }
            }
            prop_assert_eq!(queue.len(), places.len());
            prop_assert_eq!(queue.bytes(), places.values().map(|(_, ticket)| ticket.bytes).sum::<u64>());
        }
        let mut drained = queue.drain();
        drained.sort_unstable();
        prop_assert_eq!(drained, places.keys().copied().collect::<Vec<_>>());
        prop_assert!(queue.is_empty() && queue.next(ANY, now_ns).is_none());
    }

    #[test]
    fn cuts_cover_the_range_and_fall_on_alignments(
        offset in 0u64..100_000,
        bytes in 1u64..5_000_000,
        slice in 4096u64..400_000,
        shift in 0u32..14,
        rails in 1usize..9,
    ) {
        let align = 1 << shift;
        let slice = cut_bytes(bytes, slice, rails);
        let cuts = Cuts::new(offset, bytes, slice, align);
        let found: Vec<(u64, u64)> = cuts.clone().collect();
        prop_assert_eq!(found.len() as u64, cuts.slices());
        let mut at = offset;
        for (position, &(start, bytes)) in found.iter().enumerate() {
            prop_assert_eq!(start, at);
            prop_assert!(bytes > 0 && bytes <= slice + slice / 4);
            at += bytes;
            if position + 1 < found.len() && slice >= 2 * align {
                prop_assert_eq!(at % align, 0);
            }
        }
        prop_assert_eq!(at, offset + bytes);
        if bytes <= LEAST_BYTES.min(slice) {
            prop_assert_eq!(found.len(), 1, "small ones are not cut");
        }
    }
}

#[test]
fn a_rate_is_bytes_over_time_and_small_slices_do_not_distort_it() {
    let mut rate = Rate::new(10_000_000_000);
    let mut now_ns = 0;
    rate.begin(now_ns);
    for _ in 0..200 {
        // Two slices end together after the time of both: the second adds no time.
        now_ns += 524_288;
        rate.served(1, 262_144, now_ns - 524_288, now_ns);
        rate.served(1, 262_144, now_ns - 524_288, now_ns);
    }
    assert!((0.95..1.05).contains(&rate.bytes_per_ns()), "{}", rate.bytes_per_ns());
    for _ in 0..1000 {
        rate.served_small(1, 64, now_ns, true, now_ns + 50_000);
        now_ns += 100_000;
    }
    assert!((0.95..1.05).contains(&rate.bytes_per_ns()), "{}", rate.bytes_per_ns());
    assert!((45_000.0..51_000.0).contains(&rate.latency_ns()), "{}", rate.latency_ns());
    // A rail that was unused for long gets another chance.
    now_ns += 60_000_000_000;
    assert!(rate.hopeful(true, now_ns) > 9.0 && rate.hopeful(false, now_ns) < 1.1);
    rate.begin(now_ns);
    assert!(rate.bytes_per_ns() > 9.0);
}

#[test]
fn a_failed_rail_regains_its_window() {
    let mut rail = Rail::new(1_000_000_000, 0);
    let slice = 256 << 10;
    let fill = |rail: &mut Rail, now_ns: u64| {
        let mut count = 0;
        while rail.has_room(false, rail.window_bytes(2_000_000, 512 << 10), false) {
            rail.book(slice, false, now_ns);
            count += 1;
        }
        (0..count).for_each(|_| {
            rail.unbook(slice, false);
            rail.done(slice, false, now_ns, now_ns + 300_000);
        });
        count
    };
    assert_eq!(fill(&mut rail, 0), 8);
    rail.failed(5_000_000, 1_000_000);
    assert!(!rail.is_hopeful(1_000_000) && rail.is_hopeful(5_000_000));
    assert_eq!(fill(&mut rail, 5_000_000), 0, "nothing before a lane is back");
    rail.connected();
    let bites: Vec<u32> = (0..5).map(|round| fill(&mut rail, 6_000_000 + round * 300_000)).collect();
    assert_eq!(bites[0], 1, "one slice proves it");
    assert!(bites.windows(2).all(|pair| pair[0] <= pair[1]) && bites[4] >= 8, "{bites:?}");
}

#[test]
fn a_far_rail_is_taken_only_when_the_near_one_is_much_busier() {
    let predict = |tier, bulk: u64| {
        let mut rail = Rail::new(1_000_000_000, tier);
        rail.book(bulk, false, 0);
        rail.predict_ns(100_000, false, 0)
    };
    assert!(predict(0, 300_000) < predict(1, 0) && predict(0, 500_000) > predict(1, 0));
    assert!(predict(1, 0) < predict(2, 0));
}

/// Rule for the windows of two rails.
#[derive(Clone, Copy, PartialEq)]
enum Windows {
    Own,
    Even,
    /// Even, and smaller while ahead.
    Held,
}

/// Simulates two rails with equal stated speeds under a long request; `serve(posted)` returns the bytes that each moves
/// in a step of 100 us, given what each has posted. Returns the bytes that each has carried.
fn two_rails(how: Windows, mut serve: impl FnMut([u64; 2]) -> [f64; 2]) -> [u64; 2] {
    const SLICE: u64 = 256 << 10;
    const STEP_NS: u64 = 100_000;
    let mut rails = [Rail::new(1_250_000_000, 0), Rail::new(1_250_000_000, 0)];
    let (mut posted, mut moved, mut carried) = ([vec![], vec![]], [0.0; 2], [0; 2]);
    for step in 0..200_000 {
        let now_ns = step * STEP_NS;
        let windows = [0, 1].map(|rail: usize| rails[rail].window_bytes(2_000_000, 2 * SLICE));
        let widest_ns = rails.iter().zip(windows).map(|(rail, window)| rail.window_ns(window)).fold(0.0, f64::max);
        // The first rail begins a little earlier.
        for rail in 0..if step < 100 { 1 } else { 2 } {
            let window = match how {
                Windows::Own => windows[rail],
                Windows::Even | Windows::Held => rails[rail].even_window_bytes(windows[rail], widest_ns),
            };
            let ahead = how == Windows::Held && rails[rail].share_ns() > share_behind(rails.iter()) + widest_ns;
            let window = if ahead { Rail::held_window_bytes(window) } else { window };
            while rails[rail].has_room(false, window, false) {
                rails[rail].book(SLICE, false, now_ns);
                posted[rail].push(now_ns);
            }
        }
        let bytes = serve([0, 1].map(|rail: usize| posted[rail].len() as u64 * SLICE));
        for rail in 0..2 {
            moved[rail] += bytes[rail];
            while moved[rail] >= SLICE as f64 && !posted[rail].is_empty() {
                moved[rail] -= SLICE as f64;
                carried[rail] += SLICE;
                rails[rail].unbook(SLICE, false);
                rails[rail].done(SLICE, false, posted[rail].remove(0), now_ns);
            }
        }
    }
    carried
}

proptest! {
    #[test]
    fn ports_of_one_machine_share_it_evenly(total in 3_000.0..100_000.0f64, bias in 0.75..1.33f64) {
        // The common bottleneck serves each in proportion to what it has posted, with a bias.
        let by_posted = |posted: [u64; 2]| {
            let weights = [posted[0] as f64 * bias, posted[1] as f64];
            let sum = (weights[0] + weights[1]).max(1.0);
            weights.map(|weight| total * weight / sum)
        };
        let carried = two_rails(Windows::Held, by_posted);
        let (least, most) = (carried[0].min(carried[1]), carried[0].max(carried[1]));
        prop_assert!(most - least <= most / 10, "{carried:?}");
    }

    #[test]
    fn ports_that_differ_carry_what_they_can(fast in 10_000.0..100_000.0f64, ratio in 1.0..8.0f64) {
        let each = [fast, fast / ratio];
        let alone = |posted: [u64; 2]| [0, 1].map(|rail: usize| if posted[rail] > 0 { each[rail] } else { 0.0 });
        let carried = two_rails(Windows::Held, alone);
        let seen = carried[0] as f64 / carried[1] as f64;
        prop_assert!((seen / ratio - 1.0).abs() < 0.1, "{carried:?}, {ratio}");
    }
}

/// One rail stalls now and then, more often than the other, and catches up afterwards.
#[test]
fn a_port_that_stood_still_catches_up() {
    let run = |how| {
        let (mut rng, mut still) = (Rng::new(5, "ports that stand still"), [0u32; 2]);
        let carried = two_rails(how, |posted| {
            for (port, odds) in [600, 2_400].into_iter().enumerate() {
                still[port] = if rng.below(odds) == 0 { 150 } else { still[port].saturating_sub(1) };
            }
            let weights = [0, 1].map(|port| if still[port] > 0 { 0.0 } else { posted[port] as f64 });
            let sum = (weights[0] + weights[1]).max(1.0);
            weights.map(|weight| 34_713.0 * weight / sum)
        });
        carried[0].abs_diff(carried[1]) as f64 / carried[0].max(carried[1]) as f64
    };
    let (even, held) = (run(Windows::Even), run(Windows::Held));
    println!("{:.1} % apart with even windows, {:.1} % where who is ahead is held", 100.0 * even, 100.0 * held);
    assert!(even > 0.15 && held < 0.05, "{even}, {held}");
}

/// With windows by measured rates alone, the rail that began first stays ahead, or behind, for good.
#[test]
fn windows_of_their_own_keep_ports_of_one_machine_apart() {
    let by_posted = |posted: [u64; 2]| {
        let sum = (posted[0] + posted[1]).max(1) as f64;
        posted.map(|posted| 34_713.0 * posted as f64 / sum)
    };
    let apart = |[one, other]: [u64; 2]| one.abs_diff(other) as f64 / one.max(other) as f64;
    let (own, even) = (two_rails(Windows::Own, by_posted), two_rails(Windows::Even, by_posted));
    println!(
        "{:.1} % apart with windows of their own, {:.1} % with even ones",
        100.0 * apart(own),
        100.0 * apart(even)
    );
    assert!(apart(own) > 0.15 && apart(even) < 0.03, "{own:?}, {even:?}");
}

#[test]
fn a_slow_rail_helps_but_does_not_get_the_last_slices() {
    let rail = |predicted_ns: f64, rate: f64, room| Candidate { predicted_ns, rate, room, avoid: false };
    let full_and_slow = [rail(2_200_000.0, 1.25, false), rail(1_700_000.0, 0.15, true)];
    assert_eq!(pick(full_and_slow.into_iter(), 1), Choice::Rail(1), "it would be done first");
    let slower = [rail(200_000.0, 1.25, false), rail(1_700_000.0, 0.15, true)];
    assert_eq!(pick(slower.into_iter(), 262_144), Choice::Wait, "the last slice waits for the fast one");
    assert_eq!(pick(slower.into_iter(), 64 << 20), Choice::Rail(1), "in the midst it helps");
    let avoided = [Candidate { avoid: true, ..rail(1.0, 1.0, true) }, rail(10.0, 1.0, true)];
    assert_eq!(pick(avoided.into_iter(), 1), Choice::Rail(1), "another than the one that failed it");
    assert_eq!(pick([].into_iter(), 1), Choice::Nowhere);
}

#[test]
fn retries_are_a_share_of_what_succeeds() {
    let mut budget = RetryBudget::new(10);
    assert_eq!((0..20).filter(|_| budget.spend(1)).count(), 10, "a burst");
    (0..50).for_each(|_| budget.earn());
    assert_eq!((0..20).filter(|_| budget.spend(1)).count(), 5, "a tenth");
    assert!(budget.spend(1_000_000_000), "time brings some back");
}

#[test]
fn an_overestimated_latency_decays() {
    let mut rail = Rail::new(1_000_000_000, 0);
    let mut now_ns = 1_000;
    let small = |rail: &mut Rail, took_ns: u64, now_ns: &mut u64| {
        rail.book(4096, true, *now_ns);
        rail.unbook(4096, true);
        rail.done(4096, true, *now_ns, *now_ns + took_ns);
        *now_ns += took_ns;
    };
    small(&mut rail, 20_004_096, &mut now_ns);
    assert!(rail.predict_ns(4096, true, now_ns) > 20e6);
    // While the rail is in use, its latency is not forgotten.
    rail.book(4096, true, now_ns);
    assert!(rail.predict_ns(4096, true, now_ns + 5_000_000_000) > 20e6);
    rail.unbook(4096, true);
    now_ns += 1_000_000_000;
    assert!(rail.predict_ns(4096, true, now_ns) < 30e3, "{}", rail.predict_ns(4096, true, now_ns));
    small(&mut rail, 14_096, &mut now_ns);
    assert!(rail.rate().latency_ns() < 20e3, "{}", rail.rate().latency_ns());
}

#[test]
fn a_rail_that_completes_slices_in_bursts_has_long_silences() {
    let mut rail = Rail::new(10_000_000_000, 0);
    let mut now_ns = 1_000;
    // Thirty-two slices, reported together every 160 ms.
    for _ in 0..4 {
        (0..32).for_each(|_| rail.book(256 << 10, false, now_ns));
        let posted_ns = now_ns;
        now_ns += 160_000_000;
        for _ in 0..32 {
            rail.unbook(256 << 10, false);
            rail.done(256 << 10, false, posted_ns, now_ns);
        }
    }
    assert!((150_000_000..=160_000_000).contains(&rail.silence_ns()), "{}", rail.silence_ns());
    // Idle time is not silence.
    now_ns += 10_000_000_000;
    rail.book(4096, true, now_ns);
    rail.unbook(4096, true);
    rail.done(4096, true, now_ns, now_ns + 1_000_000);
    assert!(rail.silence_ns() < 160_000_000);
    // The estimate follows soon after the rail is fast again.
    for _ in 0..10_000 {
        rail.book(4096, true, now_ns);
        rail.unbook(4096, true);
        rail.done(4096, true, now_ns, now_ns + 10_000);
        now_ns += 10_000;
    }
    assert!(rail.silence_ns() < 100_000, "{}", rail.silence_ns());
}
