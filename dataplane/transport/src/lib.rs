//! Drivers that move bytes: tcp, shm, and the fault decorator.
