//! Tests of nodes and control planes that end, restart, fall silent, join and leave.

pub(crate) mod absences;
pub(crate) mod cluster;
pub(crate) mod damage;
pub(crate) mod drains;
pub(crate) mod etcd;
pub(crate) mod kills;
pub(crate) mod moves;
pub(crate) mod networks;
pub(crate) mod outages;
pub(crate) mod process_groups;
pub(crate) mod replicas;
pub(crate) mod restarts;
pub(crate) mod silence;
mod successors;
pub(crate) mod waiting;
