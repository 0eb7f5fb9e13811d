//! State machines as declared tables.
//!
//! A machine lists its states, its events and every legal transition. An event that a state does not list is either
//! *stale* (declared as ignored: a late message, counted by the caller) or *illegal* (a bug in the caller, reported as
//! an error). The whole table can be printed, and a snapshot test pins it.

/// Result of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step<S> {
    /// The machine moved (perhaps to the same state).
    Moved(S),
    /// The event arrived too late to matter; the state is unchanged.
    Stale,
    /// No such transition: a bug in the sender of the event.
    Illegal,
}

/// Declares a state machine: `states`, `events`, `from + event => to` and `from + event => ignored`.
#[macro_export]
macro_rules! state_machine {
    (
        $(#[$state_doc:meta])* states $state:ident { $($(#[$s_doc:meta])* $s:ident,)* }
        $(#[$event_doc:meta])* events $event:ident { $($(#[$e_doc:meta])* $e:ident,)* }
        transitions { $($($from:ident)|+ , $on:ident => $to:tt;)* }
    ) => {
        $(#[$state_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
        pub enum $state { $($(#[$s_doc])* $s,)* }

        $(#[$event_doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum $event { $($(#[$e_doc])* $e,)* }

        impl $state {
            /// Every state.
            pub const ALL: &[Self] = &[$(Self::$s,)*];

            /// Returns the result of `event` in this state.
            #[must_use]
            pub const fn on(self, event: $event) -> $crate::states::Step<Self> {
                match (self, event) {
                    $($((Self::$from, $event::$on))|+ => $crate::state_machine!(@to $to),)*
                    #[allow(unreachable_patterns, reason = "a machine may be total")]
                    _ => $crate::states::Step::Illegal,
                }
            }
        }

        impl $event {
            /// Every event.
            pub const ALL: &[Self] = &[$(Self::$e,)*];
        }
    };
    (@to ignored) => { $crate::states::Step::Stale };
    (@to $to:ident) => { $crate::states::Step::Moved(Self::$to) };
}

/// Prints the transition table of a machine, one line for each pair of state and event that is not illegal.
#[must_use]
pub fn render<S: Copy + core::fmt::Debug, E: Copy + core::fmt::Debug>(
    states: &[S],
    events: &[E],
    on: impl Fn(S, E) -> Step<S>,
) -> String {
    let mut out = String::new();
    for &state in states {
        for &event in events {
            match on(state, event) {
                Step::Moved(to) => out.push_str(&format!("{state:?} + {event:?} -> {to:?}\n")),
                Step::Stale => out.push_str(&format!("{state:?} + {event:?} -> (stale)\n")),
                Step::Illegal => {}
            }
        }
    }
    out
}
