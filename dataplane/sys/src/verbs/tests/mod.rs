//! Tests of verbs on software devices.
