//! Ids that are text. They are cloned often, so clones share the text.

/// Defines the type of an id: `text_id!(/** Names a thing. */ ThingId)`.
macro_rules! text_id {
    ($(#[$about:meta])* $id:ident) => {
        $(#[$about])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(transparent)]
        pub struct $id(std::sync::Arc<str>);

        impl std::ops::Deref for $id {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $id {
            fn from(text: &str) -> $id {
                $id(text.into())
            }
        }

        impl From<&String> for $id {
            fn from(text: &String) -> $id {
                $id(text.as_str().into())
            }
        }

        impl From<String> for $id {
            fn from(text: String) -> $id {
                $id(text.into())
            }
        }

        impl From<&$id> for $id {
            fn from(id: &$id) -> $id {
                id.clone()
            }
        }

        impl std::fmt::Display for $id {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl std::fmt::Debug for $id {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}
pub(crate) use text_id;
