//! Ticket time under clock jumps, restarts, several control planes and lost state: it never goes back, new tickets are
//! valid, and no ticket lasts longer than its lifetime and grace.

use kvplane_ticket::{GRACE_S, HeardTime, TicketTime, TimeLine, UNHEARD_NS};
use proptest::prelude::*;

const SECOND_NS: u64 = 1_000_000_000;
const LIFETIME_S: u64 = 600;
/// Most that a restart may skip: the seconds reserved ahead.
const RESERVE_S: u64 = 60;

/// Publishes a control plane's time; a value that it makes durable goes to `durable`.
fn tell(time: &mut TicketTime, durable: &mut Option<u64>, now_ns: u64) -> u64 {
    if let Some(wanted) = time.wanted(now_ns) {
        *durable = Some(wanted);
        time.reserve(wanted);
    }
    time.now(now_ns)
}

#[test]
fn only_durable_values_are_published() {
    let mut time = TicketTime::begin(None, 1_000, LIFETIME_S, 5);
    assert_eq!((time.now(5), time.now(100 * SECOND_NS)), (1_000, 1_000), "nothing is reserved");
    assert_eq!(time.wanted(5), Some(1_000 + RESERVE_S));
    time.reserve(1_000 + RESERVE_S);
    assert_eq!(time.wanted(5 + 29 * SECOND_NS), None, "half of it is left");
    assert_eq!(time.wanted(5 + 30 * SECOND_NS), Some(1_030 + RESERVE_S));
    assert_eq!(time.now(5 + 61 * SECOND_NS), 1_000 + RESERVE_S, "it could not be made durable, and stands");
    // Less is reserved for tickets with a short lifetime.
    for (lifetime_s, reserve_s) in [(0, 2), (3, 2), (100, 10), (10_000, 60)] {
        assert_eq!(TicketTime::begin(Some(7), 1_000, lifetime_s, 0).wanted(0), Some(7 + reserve_s));
    }
    let passing = TicketTime::passing(1_000, 0);
    assert_eq!((passing.wanted(0), passing.now(9_000 * SECOND_NS)), (None, 10_000));
}

#[test]
fn a_clock_that_was_ahead_does_not_reject_new_tickets() {
    // A control plane of a version that used its wall clock is two hours ahead for a while, with the same key.
    let mut heard = HeardTime::default();
    let line = heard.hear(10_000, None, 0);
    assert_eq!((line, heard.now(0)), (TimeLine::default(), 10_000));
    let ahead = heard.hear(17_200, Some(line), SECOND_NS);
    assert_eq!((ahead, heard.now(SECOND_NS)), (line, 17_200));
    let back = heard.hear(10_020, Some(ahead), 20 * SECOND_NS);
    assert_eq!(heard.now(20 * SECOND_NS), 17_219, "it does not go back");
    assert!(back.local(10_020 + LIFETIME_S) > heard.now(20 * SECOND_NS), "a ticket of now is good");
    // The ticket is valid for its whole lifetime.
    let end_s = back.local(10_020 + LIFETIME_S);
    let told = heard.hear(10_020 + LIFETIME_S, Some(back), (20 + LIFETIME_S) * SECOND_NS);
    assert_eq!((told, heard.now((20 + LIFETIME_S) * SECOND_NS)), (back, end_s));
}

#[test]
fn control_planes_with_different_clocks_do_not_expire_each_others_tickets() {
    let mut heard = HeardTime::default();
    let one = heard.hear(10_000, None, 0);
    // Another control plane takes over without the state of the first, with keys of its own; then the first is heard
    // from once more.
    for ahead_s in [1_200i64, -1_200, 86_400] {
        let mut heard = heard;
        let other_s = 10_001u64.saturating_add_signed(ahead_s);
        let other = heard.hear(other_s, None, SECOND_NS);
        assert!(one.local(10_000 + LIFETIME_S) > heard.now(SECOND_NS), "tickets of the first");
        assert!(other.local(other_s + LIFETIME_S) > heard.now(SECOND_NS), "tickets of the second");
        assert_eq!(heard.hear(10_002, Some(one), 2 * SECOND_NS), one);
        assert_eq!(heard.hear(other_s + 2, Some(other), 3 * SECOND_NS), other);
        assert_eq!(heard.now(3 * SECOND_NS), 10_003);
    }
}

#[test]
fn epoch_time_stops_without_news_and_follows_the_next_control_plane() {
    let mut heard = HeardTime::default();
    assert_eq!(heard.now(5 * SECOND_NS), 0);
    let line = heard.hear(1_000, None, 0);
    assert_eq!(heard.now(UNHEARD_NS + 900 * SECOND_NS), 1_000 + UNHEARD_NS / SECOND_NS);
    assert_eq!(heard.hear(4_600, Some(line), 3_600 * SECOND_NS), line);
    assert_eq!(heard.now(3_600 * SECOND_NS), 4_600);
}

/// An event in a cluster.
#[derive(Clone, Debug)]
enum ClusterEvent {
    /// Time passes, in seconds, and the node hears from the control plane.
    Heard(u64),
    /// Time passes, in seconds, without contact.
    Silent(u64),
    /// Value of the wall clock of the control plane's host from now on.
    Clock(u64),
    /// The control plane restarts, or another one takes over, with the same durable state.
    Restart,
    /// The control plane restarts without its durable state.
    Lost,
}

fn happening() -> impl Strategy<Value = ClusterEvent> {
    prop_oneof![
        6 => (0u64..40).prop_map(ClusterEvent::Heard),
        2 => (0u64..5_000).prop_map(ClusterEvent::Silent),
        2 => prop_oneof![0u64..20_000, Just(0), Just(4_000_000_000)].prop_map(ClusterEvent::Clock),
        2 => Just(ClusterEvent::Restart),
        1 => Just(ClusterEvent::Lost),
    ]
}

proptest! {
    #[test]
    fn new_tickets_are_valid_and_expire_in_time(
        happenings in proptest::collection::vec(happening(), 1..60),
    ) {
        let (mut now_s, mut clock_s, mut durable) = (1_000u64, 10_000u64, None);
        let mut time = TicketTime::begin(durable, clock_s, LIFETIME_S, now_s * SECOND_NS);
        let (mut heard, mut known, mut told) = (HeardTime::default(), None, 0);
        // For each ticket: its true time of issue, its expiry in the verifier's time, and the time without contact
        // since.
        let mut tickets: Vec<(u64, u64, u64)> = Vec::new();
        for happening in happenings {
            match happening {
                ClusterEvent::Clock(shown_s) => clock_s = shown_s,
                ClusterEvent::Silent(passed_s) => {
                    now_s += passed_s;
                    tickets.iter_mut().for_each(|ticket| ticket.2 += passed_s);
                }
                ClusterEvent::Restart | ClusterEvent::Lost => {
                    if matches!(happening, ClusterEvent::Lost) {
                        // Its keys are lost too, and it may publish any time.
                        (durable, known, told) = (None, None, 0);
                    }
                    time = TicketTime::begin(durable, clock_s, LIFETIME_S, now_s * SECOND_NS);
                }
                ClusterEvent::Heard(passed_s) => {
                    now_s += passed_s;
                    let (now_ns, before) = (now_s * SECOND_NS, heard.now(now_s * SECOND_NS));
                    let made_s = tell(&mut time, &mut durable, now_ns);
                    prop_assert!(made_s >= told, "it went back from {told} to {made_s}");
                    told = made_s;
                    let line = heard.hear(made_s, known, now_ns);
                    prop_assert!(heard.now(now_ns) >= before);
                    prop_assert!(known.is_none_or(|known| known == line), "what is durable keeps its line");
                    known = Some(line);
                    let end_s = line.local(made_s + LIFETIME_S);
                    prop_assert!(heard.now(now_ns) < end_s + GRACE_S, "a ticket of now is not good");
                    tickets.push((now_s, end_s, 0));
                }
            }
            for (made_s, end_s, silent_s) in &tickets {
                let good = heard.now(now_s * SECOND_NS) < end_s + GRACE_S;
                let old_s = now_s - made_s;
                // A restart may skip the reserved seconds, and a second one directly after it the same again.
                if good {
                    let most_s = LIFETIME_S + 2 * GRACE_S + silent_s + 40;
                    prop_assert!(old_s <= most_s, "a ticket is good after {old_s} s, {silent_s} of them silent");
                }
            }
        }
    }
}
