//! A stored state. A removed state leaves a record that says so: unlike a state that was never written, it does not
//! read as its initial value.

use serde_json::Value;

use crate::store::Bytes;

const REMOVED: u8 = 0;
const PRESENT: u8 = 1;

/// The value of a key of the space `state`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum StateRecord {
    Removed,
    Present(Value),
}

impl StateRecord {
    pub(crate) fn of(state: Option<Value>) -> StateRecord {
        state.map_or(StateRecord::Removed, StateRecord::Present)
    }

    pub(crate) fn into_state(self) -> Option<Value> {
        match self {
            StateRecord::Removed => None,
            StateRecord::Present(value) => Some(value),
        }
    }
}

impl crate::record::Record for StateRecord {
    fn encode(&self) -> Bytes {
        let mut out = vec![Self::VERSION];
        match self {
            StateRecord::Removed => out.push(REMOVED),
            StateRecord::Present(value) => {
                out.push(PRESENT);
                serde_json::to_writer(&mut out, value).expect("JSON values can be written to memory");
            }
        }
        out.into()
    }

    fn read(_: u8, fields: &[u8]) -> Option<StateRecord> {
        match fields {
            [REMOVED] => Some(StateRecord::Removed),
            [PRESENT, json @ ..] => crate::json::parse_stored(json).map(StateRecord::Present),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record as _;
    use serde_json::json;

    #[test]
    fn a_record_comes_back_as_it_was_stored() {
        let deep = (0..127).fold(json!(1), |inner, _| json!([inner]));
        for record in [
            StateRecord::Removed,
            StateRecord::Present(json!(null)),
            StateRecord::Present(json!({"a": 1.5})),
            StateRecord::Present(deep),
        ] {
            assert_eq!(StateRecord::decode(&record.encode()), Ok(record));
        }
        for bytes in [&[][..], &[1], &[1, 0, 0], &[1, 1], &[2, 0], &[1, 1, b'{']] {
            assert!(StateRecord::decode(bytes).is_err(), "{bytes:?}");
        }
    }
}
