//! Counters of process groups for a scrape.

use kvplane_group::Counters;
use metrics::{Unit, counter, describe_counter};

use super::Worlds;
use crate::counts::MetricKind;

impl Worlds {
    /// Records all counters and gauges, in the recorder of this thread.
    pub(crate) fn record_metrics(&self) {
        let core = self.core();
        let mut counters = core.past;
        let (mut processes, mut groups, mut changing, mut participants) = (0, 0, 0, 0);
        for hosted in core.worlds.values() {
            counters += hosted.world.counters();
            processes += hosted.world.process_summaries().count() as u64;
            for group in hosted.world.group_summaries() {
                groups += 1;
                changing += u64::from(group.changing_ns.is_some());
                participants += group.view.participants().len() as u64;
            }
        }
        let gauges = [
            ("kvplane_worlds", "Worlds of processes with a live process or a group.", core.worlds.len() as u64),
            ("kvplane_world_processes", "Live processes of worlds.", processes),
            ("kvplane_process_groups", "Process groups.", groups),
            ("kvplane_process_group_participants", "Participants of the groups' views.", participants),
            ("kvplane_process_groups_changing", "Process groups whose view is changing.", changing),
        ];
        let counts = [
            ("kvplane_world_reports_total", "Reports of processes.", core.reports),
            ("kvplane_world_statuses_total", "Statuses that were sent to processes.", core.statuses),
            ("kvplane_world_rejections_total", "Calls of processes that their world rejected.", counters.rejections),
            (
                "kvplane_process_group_foundings_total",
                "Groups whose founding members became complete.",
                counters.foundings,
            ),
            ("kvplane_process_group_view_changes_total", "Views that replaced another one.", counters.view_changes),
        ];
        MetricKind::Gauge.record(&gauges);
        MetricKind::Counter.record(&counts);
        record_causes(&counters);
    }
}

/// Records deaths and exclusions by cause, and the duration of view changes.
fn record_causes(counters: &Counters) {
    let deaths = "kvplane_world_deaths_total";
    let help = "Processes that were declared dead, by the evidence beside their silence.";
    describe_counter!(deaths, Unit::Count, help);
    let of = counters.deaths;
    for (evidence, count) in [("refused", of.refused), ("overdue", of.overdue), ("silent", of.silent)] {
        counter!(deaths, "evidence" => evidence).absolute(count);
    }
    let exclusions = "kvplane_process_group_exclusions_total";
    let help = "Participants that a view change left out without a proposal, by cause.";
    describe_counter!(exclusions, Unit::Count, help);
    let of = counters.exclusions;
    let causes =
        [("ended", of.ended), ("unreachable", of.unreachable), ("unfenced", of.unfenced), ("behind", of.behind)];
    for (cause, count) in causes {
        counter!(exclusions, "cause" => cause).absolute(count);
    }
    let duration = "kvplane_process_group_view_change_microseconds_total";
    let help = "Time from the beginning of view changes until their views were published, all together.";
    describe_counter!(duration, Unit::Microseconds, help);
    counter!(duration).absolute(counters.view_change_ns / 1_000);
}
