//! Processes that continue with the memory of the one before them: by its image, or handed over.

mod drains;
mod kept_memory;
mod load;
mod upgrades;
