//! Roles of certificates that each command can use, from the callers that its calls allow, in the order in which
//! certificates are searched. docs/security.md shows them as a table.

use kvplane::rpc::Role;
use kvplane::rpc::conductor::WatchInstances;
use kvplane::rpc::groups::{DescribeWorld, ListWorlds};
use kvplane::rpc::message::{
    Drain, GetTicket, Leave, ListSegments, ListShards, ListTasks, ListTenants, ListTiers, OrderTiers, RotateTickets,
    SetTenant, Status, WatchEvents,
};
use kvplane::rpc::placement::ShowPlacement;
use kvplane::rpc::rights::CallMessage;

/// Search order of certificates for operators' commands. Commands never use a control plane's certificate.
const OPERATORS_FIRST: [Role; 4] = [Role::Admin, Role::Scheduler, Role::Client, Role::Node];
/// Search order of certificates for commands that access objects at nodes.
const CLIENTS_FIRST: [Role; 2] = [Role::Client, Role::Admin];

/// Calls of a group of commands.
struct Needs {
    /// Subcommands of `kvplane ctl`.
    commands: &'static [&'static str],
    /// Allowed roles of each call; every call of the list is made.
    calls: &'static [&'static [Role]],
    order: &'static [Role],
}

const NEEDS: [Needs; 11] = [
    Needs { commands: &["status"], calls: &[Status::CALLERS], order: &OPERATORS_FIRST },
    Needs { commands: &["shards", "top", "hot"], calls: &[ListShards::CALLERS], order: &OPERATORS_FIRST },
    Needs { commands: &["groups"], calls: &[ListWorlds::CALLERS, DescribeWorld::CALLERS], order: &OPERATORS_FIRST },
    Needs { commands: &["segments"], calls: &[ListSegments::CALLERS], order: &OPERATORS_FIRST },
    Needs { commands: &["events"], calls: &[WatchEvents::CALLERS], order: &OPERATORS_FIRST },
    Needs { commands: &["tier"], calls: &[ListTiers::CALLERS, OrderTiers::CALLERS], order: &OPERATORS_FIRST },
    Needs {
        commands: &["tenants", "tickets"],
        calls: &[ListTenants::CALLERS, SetTenant::CALLERS, RotateTickets::CALLERS],
        order: &OPERATORS_FIRST,
    },
    Needs {
        commands: &["conductor"],
        calls: &[WatchInstances::CALLERS, ShowPlacement::CALLERS],
        order: &OPERATORS_FIRST,
    },
    Needs { commands: &["remove", "drain"], calls: &[Leave::CALLERS, Drain::CALLERS], order: &OPERATORS_FIRST },
    Needs { commands: &["tasks"], calls: &[ListTasks::CALLERS, Status::CALLERS], order: &OPERATORS_FIRST },
    Needs {
        commands: &["put", "get", "size", "delete", "keys", "pins", "delete-matching", "delete-all", "copy"],
        calls: &[GetTicket::CALLERS],
        order: &CLIENTS_FIRST,
    },
];

/// Returns the roles in which a subcommand of `kvplane ctl` can do its work, the preferred one first; none if it calls
/// no control plane.
pub(super) fn of(command: &str) -> Vec<Role> {
    let needs = NEEDS.iter().find(|needs| needs.commands.contains(&command));
    let allowed = |needs: &Needs, role: &Role| needs.calls.iter().all(|callers| callers.contains(role));
    needs.map_or_else(Vec::new, |needs| needs.order.iter().copied().filter(|role| allowed(needs, role)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::ctl::Ctl;
    use clap::Args;

    const DOCS: &str = include_str!("../../../../docs/security.md");

    /// Rows of the table in docs/security.md: subcommands of ctl, and roles.
    fn documented() -> Vec<(Vec<String>, Vec<String>)> {
        let quoted = |cell: &str| -> Vec<String> {
            cell.split('`').skip(1).step_by(2).filter_map(|word| word.strip_prefix("ctl ").map(str::to_owned)).collect()
        };
        let rows = DOCS.lines().filter_map(|line| line.strip_prefix("| `ctl ").map(|_| line));
        let cells = rows.filter_map(|line| {
            let mut cells = line.trim_matches('|').split(" | ");
            Some((quoted(cells.next()?), cells.next()?.trim().split(", ").map(str::to_owned).collect()))
        });
        cells.collect()
    }

    #[test]
    fn every_command_of_ctl_has_its_roles_in_the_docs() {
        let documented = documented();
        for command in Ctl::augment_args(clap::Command::new("ctl")).get_subcommands() {
            let (name, roles) = (command.get_name(), of(command.get_name()));
            if matches!(name, "cert" | "upgrade") {
                // `cert` works on the authority's key, and `upgrade` calls a node of this host: no control plane.
                assert_eq!(roles, []);
                continue;
            }
            let shown: Vec<String> = roles.iter().map(ToString::to_string).collect();
            assert!(!shown.is_empty(), "ctl {name} is in no table of roles");
            let row = documented.iter().find(|(commands, _)| commands.iter().any(|command| command == name));
            let (_, said) = row.unwrap_or_else(|| panic!("ctl {name} is not in docs/security.md"));
            assert_eq!(*said, shown, "ctl {name} in docs/security.md");
        }
    }

    #[test]
    fn reading_needs_fewer_rights_than_changing() {
        assert_eq!(of("status"), [Role::Admin, Role::Scheduler]);
        assert_eq!(of("events"), [Role::Admin, Role::Scheduler, Role::Client]);
        assert_eq!(of("put"), [Role::Client, Role::Admin]);
        assert_eq!(of("tenants"), [Role::Admin]);
    }
}
