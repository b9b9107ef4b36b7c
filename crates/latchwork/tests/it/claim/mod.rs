//! Claims.

mod validator;
