//! Tests of the three forms of a report: they agree, and survive hostile names.

use super::*;
use crate::html::well_formed;

/// Builds a report with all fields set, of the shape that a replay has.
pub(crate) fn sample(title: &str, slow: f64) -> ReplayReport {
    let mut rng = kvplane_proto::rng::Rng::new(7, title);
    let mut operation = |operation, median_ns: f64, items: u64, bytes| {
        let mut latency = Latencies::new();
        for _ in 0..12_031 {
            let tail = (1.0 / (1.0 - rng.unit())).powf(0.35);
            latency.record((median_ns * slow * (0.6 + 0.5 * rng.unit()) * tail) as u64);
        }
        OperationReport::new(operation, &latency, items, bytes)
    };
    let timeline = (1u32..=240).map(|at| {
        let progress = f64::from(at) / 240.0;
        let rate = 0.33 * progress.powf(0.4);
        TimelinePoint {
            t_s: f64::from(at) * 0.25 * slow,
            requests: u64::from(at) * 50,
            hit_rate_blocks: rate * 0.995,
            model_hit_rate_blocks: rate,
            gigabytes_per_s: (3.1 + f64::from(at * 37 % 11) * 0.04) / slow,
        }
    });
    let hits = HitCounts { blocks: 288_500, hit_blocks: 94_100, tokens: 144_794_000, hit_tokens: 48_100_000 };
    ReplayReport {
        title: title.into(),
        trace: "../traces/conversation_trace.jsonl".into(),
        transport: title.into(),
        carried: [(title.to_lowercase(), 18_900_000_000)].into(),
        block_bytes: 65_536,
        pool_bytes: 2 << 30,
        clients: 4,
        wall_s: 60.0 * slow,
        requests: 12_031,
        hits,
        model_segmented_lru: HitCounts { hit_blocks: 94_900, ..hits },
        model_lru: HitCounts { hit_blocks: 92_000, ..hits },
        bytes_wrong: 0,
        evictions: 161_233,
        cpu_s_client: 14.2 * slow,
        cpu_s_server: Some(20.5 * slow),
        operations: vec![
            operation(Operation::Exists, 4_100.0, 288_500, 0),
            operation(Operation::Get, 61_000.0, 94_100, 94_100 * 65_536),
            operation(Operation::Put, 160_000.0, 194_400, 194_400 * 65_536),
        ],
        timeline: timeline.collect(),
    }
}

#[test]
fn rates_come_from_counts() {
    let run = sample("shm", 1.0);
    assert_eq!(run.bytes(), 288_500 * 65_536);
    assert!((run.gigabytes_per_s() - 288_500.0 * 65_536.0 / 60e9).abs() < 1e-12);
    assert!((run.cpu_s_per_gigabyte() - 34.7 / (288_500.0 * 65_536.0 / 1e9)).abs() < 1e-12);
    assert!((run.model_gap() + 800.0 / 288_500.0).abs() < 1e-12);
    let idle = ReplayReport { wall_s: 0.0, operations: vec![], ..run };
    assert_eq!((idle.gigabytes_per_s(), idle.cpu_s_per_gigabyte()), (0.0, 0.0));
}

#[test]
fn the_text_is_aligned() {
    let text = to_text(&[sample("shm", 1.0), sample("tcp", 4.0)]);
    let line =
        |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    assert_eq!(line("hit rate, blocks").split_whitespace().skip(3).collect::<String>(), "32.62%32.62%");
    assert_eq!(line("bytes wrong").split_whitespace().skip(2).collect::<Vec<_>>(), ["0", "0"]);
    assert_eq!(line("bytes wrong").len(), line("CPU s per GB").len());
    assert_eq!(text.lines().filter(|line| line.starts_with("tcp  ")).count(), 3);
    let hostile = ReplayReport { trace: "\u{1b}[2J".into(), ..sample("shm", 1.0) };
    assert!(to_text(&[hostile]).starts_with("trace: ?[2J\n"));
}

#[test]
fn the_json_has_counts_and_rates() {
    let json = to_json(&[sample("shm", 1.0)]);
    let run = &json["runs"][0];
    assert_eq!(run["hits"]["hit_blocks"], 94_100);
    assert_eq!(run["operations"][1]["operation"], "get");
    assert_eq!(run["derived"]["hit_rate_blocks"], 94_100.0 / 288_500.0);
    assert_eq!(run["cpu_s_server"], 20.5);
    assert!(run["timeline"].as_array().unwrap().len() == 240 && json["schema_version"] == 1);
}

#[test]
fn the_page_is_well_formed_and_hostile_names_are_inert() {
    let name = "</style><script>alert(1)</script>&\"'.jsonl";
    let hostile = ReplayReport { trace: name.into(), transport: name.into(), ..sample(name, 2.0) };
    for reports in [vec![], vec![sample("shm", 1.0), hostile]] {
        well_formed::check(page::page(&reports).body().trim());
        let html = to_html(&reports);
        assert!(!html.contains("<script") && !html.contains("http"));
        assert_eq!(html.matches("</style>").count(), 1);
        assert_eq!(html.matches("<svg").count(), 5);
        assert_eq!(html.matches("<desc").count(), 5);
    }
}

#[test]
fn runs_with_one_model_share_its_line() {
    let (one, mut other) = (sample("shm", 1.0), sample("tcp", 1.0));
    let lines =
        |other: &ReplayReport| to_html(&[one.clone(), other.clone()]).matches("segmented LRU model</li>").count();
    assert_eq!(lines(&other), 1);
    other.model_segmented_lru.hit_blocks += 1;
    assert_eq!(lines(&other), 2);
}

#[test]
fn wrong_bytes_raise_an_alarm() {
    let run = |bytes_wrong| to_html(&[ReplayReport { bytes_wrong, ..sample("shm", 1.0) }]);
    assert!(!run(0).contains("class=\"alarm\""));
    assert!(run(1).contains("class=\"alarm\""));
}

#[test]
fn a_long_run_and_an_empty_one_make_pages_too() {
    let mut run = sample("shm", 1.0);
    run.timeline = run.timeline.repeat(1000);
    assert!(to_html(&[run.clone()]).len() < 200_000);
    run.timeline.clear();
    run.operations = vec![OperationReport::new(Operation::Get, &Latencies::new(), 0, 0)];
    well_formed::check(page::page(&[run]).body().trim());
}

/// Writes sample pages for visual inspection, if the environment variable is set.
#[test]
fn pages_to_look_at() {
    let Some(directory) = std::env::var_os("KVPLANE_SAMPLE_PAGES") else { return };
    let path = std::path::Path::new(&directory).join("replay.html");
    write_html(&[sample("shm", 1.0), sample("tcp", 3.0)], &path).unwrap();
    println!("{}", to_text(&[sample("shm", 1.0), sample("tcp", 3.0)]));
}

#[test]
fn a_page_that_cannot_be_written_names_its_path() {
    let error = write_html(&[], std::path::Path::new("/nowhere/report.html")).unwrap_err();
    assert!(error.to_string().starts_with("cannot write report /nowhere/report.html: "));
}
