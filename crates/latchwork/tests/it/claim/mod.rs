//! Claims.

mod firing;
mod kit;
mod validator;
