//! Policies of other schedulers, for comparison with the Conductor's: those of the Mooncake paper and models of other
//! routers.

mod paper;
mod rejections;
mod rivals;

use kvplane_conductor::policy::{PlacementPolicy, Policy};

pub use paper::Algorithm1;
pub use rejections::{RejectingAlgorithm1, Rejection};
pub use rivals::{DynamoLike, SglangLike};

/// Returns every policy with its defaults and without rejection, in the order of display; this project's last.
#[must_use]
pub fn side_by_side() -> Vec<Box<dyn Policy>> {
    vec![
        PlacementPolicy::Random.make(false),
        PlacementPolicy::RoundRobin.make(false),
        PlacementPolicy::LoadBalance.make(false),
        Box::new(SglangLike::default()),
        Box::new(DynamoLike),
        Box::new(Algorithm1 { transfers: false, ..Algorithm1::default() }),
        Box::new(Algorithm1::default()),
        PlacementPolicy::Kvplane.make(false),
    ]
}
