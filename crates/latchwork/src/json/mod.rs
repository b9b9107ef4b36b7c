//! JSON as Latchwork stores, compares and orders it.
