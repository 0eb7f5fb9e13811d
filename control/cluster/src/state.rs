//! State machine of a member's lifecycle, as a declared table.
//!
//! A member is in the map while it is active, suspect or draining. A suspect keeps its slots: a short silence must not
//! move data. Only a first heartbeat makes a newcomer active, so that a join whose reply was lost never takes slots.

use kvplane_proto::state_machine;

state_machine! {
    /// State of a member.
    states MemberState {
        /// Accepted, not heard from since; not in the map.
        Joining,
        /// In the map and heard from recently.
        Active,
        /// In the map, but silent for longer than a heartbeat or two.
        Suspect,
        /// In the map without a share: its slots have new owners, which fetch the objects in them.
        Draining,
        /// Silent beyond the deadline; this incarnation is over.
        Dead,
        /// Left in order, or was removed by an operator, also after its death; this incarnation is over.
        Left,
    }
    /// Event of a member's lifecycle.
    events MemberEvent {
        /// A new incarnation of the node was accepted: a restart.
        Join,
        /// A new incarnation was accepted that continues the former one by a handover.
        Succeed,
        /// A heartbeat of the current incarnation arrived.
        Heartbeat,
        /// Silent for `suspect_after_ns`.
        Silence,
        /// The member is to give its slots away, for the rest of its line of incarnations or until `Undrain`.
        Drain,
        /// The member is to have its share again.
        Undrain,
        /// Silent for `heartbeat_deadline_ns`.
        Deadline,
        /// The current incarnation announced its departure, or an operator removed the member.
        Leave,
    }
    transitions {
        Joining | Draining | Dead | Left, Join => Joining;
        Active | Suspect, Join => Active;
        Joining | Dead | Left, Succeed => Joining;
        Active | Suspect, Succeed => Active;
        Draining, Succeed => Draining;
        Joining | Active | Suspect, Heartbeat => Active;
        Draining, Heartbeat => Draining;
        Dead | Left, Heartbeat => ignored;
        Active, Silence => Suspect;
        Joining | Active | Suspect, Drain => Draining;
        Draining | Dead | Left, Drain => ignored;
        Draining, Undrain => Active;
        Joining | Active | Suspect | Dead | Left, Undrain => ignored;
        Joining | Suspect | Draining, Deadline => Dead;
        Joining | Active | Suspect | Draining | Dead, Leave => Left;
        Left, Leave => ignored;
    }
}

impl MemberState {
    /// Returns true if the member is in the map; it owns its share of the slots there unless it is draining.
    #[must_use]
    pub const fn in_map(self) -> bool {
        matches!(self, Self::Active | Self::Suspect | Self::Draining)
    }

    /// Returns true if this incarnation is live: its deadline runs and its messages count.
    #[must_use]
    pub const fn is_live(self) -> bool {
        !matches!(self, Self::Dead | Self::Left)
    }
}

#[cfg(test)]
mod tests {
    use super::{MemberEvent, MemberState};
    use kvplane_proto::states::render;

    #[test]
    fn state_machine_has_the_expected_transitions() {
        assert_eq!(render(MemberState::ALL, MemberEvent::ALL, MemberState::on), TABLE);
    }
    const TABLE: &str = "\
Joining + Join -> Joining
Joining + Succeed -> Joining
Joining + Heartbeat -> Active
Joining + Drain -> Draining
Joining + Undrain -> (stale)
Joining + Deadline -> Dead
Joining + Leave -> Left
Active + Join -> Active
Active + Succeed -> Active
Active + Heartbeat -> Active
Active + Silence -> Suspect
Active + Drain -> Draining
Active + Undrain -> (stale)
Active + Leave -> Left
Suspect + Join -> Active
Suspect + Succeed -> Active
Suspect + Heartbeat -> Active
Suspect + Drain -> Draining
Suspect + Undrain -> (stale)
Suspect + Deadline -> Dead
Suspect + Leave -> Left
Draining + Join -> Joining
Draining + Succeed -> Draining
Draining + Heartbeat -> Draining
Draining + Drain -> (stale)
Draining + Undrain -> Active
Draining + Deadline -> Dead
Draining + Leave -> Left
Dead + Join -> Joining
Dead + Succeed -> Joining
Dead + Heartbeat -> (stale)
Dead + Drain -> (stale)
Dead + Undrain -> (stale)
Dead + Leave -> Left
Left + Join -> Joining
Left + Succeed -> Joining
Left + Heartbeat -> (stale)
Left + Drain -> (stale)
Left + Undrain -> (stale)
Left + Leave -> (stale)
";
}
