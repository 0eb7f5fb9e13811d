//! Tests of the store's public interface, in one binary: a module for each subject.

mod device_pool;
mod eviction;
mod far_pool;
mod followers;
mod kept;
mod retentions;
mod shadow;
mod shares;
mod store;
mod support;
mod tail_pages;
mod tenants;
mod utilisation;
