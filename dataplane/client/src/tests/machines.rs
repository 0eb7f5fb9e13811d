//! Snapshots of the declared state machines. A change here changes the protocol's behaviour: explain it in the commit.

use kvplane_proto::states::render;

use crate::{Endpoint, EndpointEvent};
use crate::{SliceEvent, SliceState};

#[test]
fn the_endpoint_machine_is_as_declared() {
    assert_eq!(render(Endpoint::ALL, EndpointEvent::ALL, Endpoint::on), ENDPOINT);
}

#[test]
fn the_slice_machine_is_as_declared() {
    assert_eq!(render(SliceState::ALL, SliceEvent::ALL, SliceState::on), SLICE);
}

const ENDPOINT: &str = "\
Idle + Connect -> Connecting
Idle + Gone -> (stale)
Connecting + Connected -> Greeting
Connecting + Reset -> Resetting
Connecting + Gone -> Idle
Greeting + Welcome -> Ready
Greeting + Reset -> Resetting
Greeting + Gone -> Idle
Ready + Reset -> Resetting
Ready + Gone -> Idle
Resetting + Connected -> (stale)
Resetting + Welcome -> (stale)
Resetting + Reset -> (stale)
Resetting + Gone -> Idle
";

const SLICE: &str = "\
Queued + Send -> Requested
Queued + Place -> Copying
Queued + Finish -> Done
Queued + Requeue -> Queued
Requested + Payload -> Receiving
Requested + Place -> Copying
Requested + Finish -> Done
Requested + Requeue -> Queued
Receiving + Finish -> Done
Receiving + Requeue -> Queued
Copying + Copied -> Committing
Copying + Finish -> Done
Copying + Requeue -> Queued
Committing + Finish -> Done
Committing + Requeue -> Queued
";
