//! Effect of a kill of the control plane on a replay: the hit rate in each second around it, beside that of the same
//! requests without a kill.

use std::time::Duration;

use serde::Serialize;

use super::own_cluster::KillTimes;

/// Seconds shown before the kill, and after it.
const SHOWN: (i64, i64) = (5, 15);
/// Part of the undisturbed hits from which on the hit rate counts as back.
const BACK: f64 = 0.95;

/// Arrival of a request since the start of its run, with its blocks and those that were not computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrivedRequest {
    pub(super) arrived: Duration,
    pub(super) blocks: u64,
    pub(super) hit_blocks: u64,
    /// True if the Conductor placed it, false if its client did.
    pub(super) asked: bool,
}

/// One second of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct SecondRow {
    /// Seconds since the kill.
    second: i64,
    requests: u64,
    /// Requests that their clients placed, because the Conductor did not answer in time.
    unasked: u64,
    hit_rate: f64,
    /// Hit rate of the same requests without a kill.
    undisturbed: f64,
}

/// Report of a kill.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Recovery {
    killed_s: f64,
    /// Seconds from the kill until the control plane listened again.
    away_s: f64,
    /// Seconds from the kill to the first second from which on the requests hit at least 95 % of the blocks that they
    /// hit without a kill, in that second and in all later ones together; none if there is none.
    back_after_s: Option<i64>,
    seconds: Vec<SecondRow>,
}

impl Recovery {
    /// Compares a run with a kill with one without, of the same requests.
    pub(super) fn of(
        times: KillTimes,
        killed: &[Option<ArrivedRequest>],
        undisturbed: &[Option<ArrivedRequest>],
    ) -> Self {
        let second =
            |request: &ArrivedRequest| (request.arrived.as_secs_f64() - times.killed.as_secs_f64()).floor() as i64;
        let both = || killed.iter().zip(undisturbed).filter_map(|(one, other)| Some(((*one)?, (*other)?)));
        let hits = |from: i64, to: i64| {
            let within = both().filter(|(one, _)| (from..to).contains(&second(one)));
            within.fold((0, 0), |(hit, without), (one, other)| (hit + one.hit_blocks, without + other.hit_blocks))
        };
        let is_back = |(hit, without): (u64, u64)| hit as f64 >= without as f64 * BACK;
        let last = both().map(|(one, _)| second(&one)).max().unwrap_or(0);
        let back_after_s = (0..=last).find(|from| is_back(hits(*from, from + 1)) && is_back(hits(*from, i64::MAX)));
        let row = |at: i64| {
            let (mut row, mut blocks, mut hit, mut without) =
                (SecondRow { second: at, ..SecondRow::default() }, 0, 0, 0);
            for (one, other) in both().filter(|(one, _)| second(one) == at) {
                row.requests += 1;
                row.unasked += u64::from(!one.asked);
                (blocks, hit, without) = (blocks + one.blocks, hit + one.hit_blocks, without + other.hit_blocks);
            }
            let rate = |hits: u64| hits as f64 / blocks.max(1) as f64;
            (row.hit_rate, row.undisturbed) = (rate(hit), rate(without));
            row
        };
        Self {
            killed_s: times.killed.as_secs_f64(),
            away_s: (times.ready - times.killed).as_secs_f64(),
            back_after_s,
            seconds: (-SHOWN.0..=SHOWN.1).map(row).filter(|row| row.requests > 0).collect(),
        }
    }

    /// Prints the report.
    pub(super) fn print(&self) {
        println!(
            "the control plane was killed after {:.1} s and listened again {:.2} s later",
            self.killed_s, self.away_s
        );
        println!("{:>8} {:>8} {:>8} {:>8} {:>12}", "second", "requests", "unasked", "hit rate", "undisturbed");
        for row in &self.seconds {
            println!(
                "{:>8} {:>8} {:>8} {:>8.3} {:>12.3}",
                row.second, row.requests, row.unasked, row.hit_rate, row.undisturbed
            );
        }
        match self.back_after_s {
            Some(seconds) => println!("the hit rate is back {seconds} s after the kill"),
            None => println!("the hit rate did not come back"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hit_rate_is_back_once_all_later_requests_hit_as_without_a_kill() {
        let run = |hits: &[u64]| -> Vec<Option<ArrivedRequest>> {
            let one = |(at, hit): (usize, &u64)| {
                let arrived = Duration::from_millis(500 + 1000 * at as u64);
                Some(ArrivedRequest { arrived, blocks: 10, hit_blocks: *hit, asked: at != 3 })
            };
            hits.iter().enumerate().map(one).collect()
        };
        let times = KillTimes { killed: Duration::from_secs(3), ready: Duration::from_millis(3500) };
        let without = run(&[5, 5, 5, 5, 5, 5, 5, 5]);
        let of = |hits: &[u64]| Recovery::of(times, &run(hits), &without);
        let found = of(&[5, 5, 5, 0, 2, 5, 5, 5]);
        assert_eq!((found.back_after_s, found.away_s), (Some(2), 0.5));
        let row = found.seconds.iter().find(|row| row.second == 0).unwrap();
        assert_eq!((row.requests, row.unasked, row.hit_rate, row.undisturbed), (1, 1, 0.0, 0.5));
        assert_eq!(of(&[5, 5, 5, 5, 5, 5, 5, 5]).back_after_s, Some(0));
        assert_eq!(of(&[5, 5, 5, 0, 0, 0, 0, 0]).back_after_s, None);
        assert_eq!(of(&[5, 5, 5, 0, 5, 0, 5, 5]).back_after_s, Some(3), "later requests miss again");
    }
}
