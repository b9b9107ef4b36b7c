//! Locks.

mod outside;
mod promises;
mod within;
