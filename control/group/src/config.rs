//! Times and limits of a world.

/// Times and limits of a [`crate::World`]. The defaults suit processes that report every 100 ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldConfig {
    /// Interval at which processes report, beside their changes.
    pub interval_ns: u64,
    /// Silence after which a process that refuses connections is dead.
    pub refused_ns: u64,
    /// Silence after which a process is dead that a collective waited for until its deadline: long enough for a process
    /// that a busy machine keeps from its core, and short enough for a view within the second after the deadline. It
    /// lasts up to four times as long while reports arrive late: three times the longest recent interval between them.
    pub overdue_ns: u64,
    /// Silence after which a process is dead in any case.
    pub silence_ns: u64,
    /// Time for which a broken connection between two live members may be restored before one of them is excluded.
    pub reconnect_ns: u64,
    /// Time within which a fenced view change ends: a member that has not been fenced by then is excluded.
    pub fence_ns: u64,
    /// Time for which a proposal waits until it is admissible.
    pub proposal_ns: u64,
    /// Time after a start of the control plane before the silence of the processes that it knows counts.
    pub grace_ns: u64,
    /// Time after which a group without a live process is forgotten.
    pub forget_ns: u64,
    /// Most groups.
    pub groups: usize,
    /// Most proposals of a group that wait.
    pub proposals: usize,
}

impl Default for WorldConfig {
    fn default() -> Self {
        const MS: u64 = 1_000_000;
        Self {
            interval_ns: 100 * MS,
            refused_ns: 250 * MS,
            overdue_ns: 750 * MS,
            silence_ns: 30_000 * MS,
            reconnect_ns: 1_000 * MS,
            fence_ns: 20_000 * MS,
            proposal_ns: 20_000 * MS,
            grace_ns: 1_000 * MS,
            forget_ns: 600_000 * MS,
            groups: 256,
            proposals: 64,
        }
    }
}
