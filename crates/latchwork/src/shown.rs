//! `Debug` output of values that callers hold: only the fields that identify the value.

/// Implements `Debug` with the fields that identify a value: `shown!(Handle<O>, it => id: it.id)`.
macro_rules! shown {
    ($type:ident $(<$($of:ident),+>)?, $it:ident => $($name:ident: $value:expr),*) => {
        impl $(<$($of),+>)? std::fmt::Debug for $type $(<$($of),+>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let $it = self;
                f.debug_struct(stringify!($type))$(.field(stringify!($name), &$value))*.finish_non_exhaustive()
            }
        }
    };
}
