//! The store's errors. Each message says what went wrong, where, and what to do. A lost race is not an error: it is a
//! value, [`crate::Refusal`].

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Generation, Key, SpaceId, Timestamp};

/// The crate's result.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Every failure of the store.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages explain the fields.
pub enum StoreError {
    /// A key without bytes.
    #[error("a key of space {space} is empty; a key has at least one byte")]
    EmptyKey { space: SpaceId },
    /// A key over the limit.
    #[error("key {key} has {length} bytes; the limit is {limit}")]
    KeyTooLong { key: Key, length: usize, limit: usize },
    /// A value over the limit.
    #[error("the value for {key} has {length} bytes; the limit is {limit}")]
    ValueTooLong { key: Key, length: usize, limit: usize },
    /// More checks and writes than a commit may have.
    #[error("the commit has {count} checks and writes; the limit is {limit}")]
    TooManyOperations { count: usize, limit: usize },
    /// More bytes than a commit may have.
    #[error("the commit has {length} bytes of keys, values and meta; the limit is {limit}")]
    CommitTooLarge { length: usize, limit: usize },
    /// Meta over the limit of values.
    #[error("the commit's meta has {length} bytes; the limit is {limit}")]
    MetaTooLong { length: usize, limit: usize },
    /// Two writes of one key in one commit.
    #[error("the commit writes {key} twice; a commit writes a key at most once")]
    WrittenTwice { key: Key },
    /// A key or range of a space that this store does not know.
    #[error("space {space} is not declared in this store; declare it with Store::space")]
    UnknownSpace { space: SpaceId },
    /// A name that no space can have.
    #[error("space name {name:?} is not allowed: {reason}")]
    SpaceName { name: String, reason: &'static str },
    /// A space was declared again with a rule that cannot change.
    #[error("space {name:?} was declared with {stored} and is now asked for with {asked}; that choice cannot change")]
    SpaceMismatch { name: String, stored: &'static str, asked: &'static str },
    /// A watch over a space without history.
    #[error("space {space} keeps no history and cannot be watched; declare it with a history")]
    NotWatchable { space: SpaceId },
    /// A read, check or watch at a generation that the space no longer keeps.
    #[error("generation {asked} of space {space} is no longer kept; the oldest left is {oldest}")]
    HistoryDropped { space: SpaceId, asked: Generation, oldest: Generation },
    /// A view at a time that is older than everything that is kept.
    #[error("what was committed up to {asked} is no longer kept; the oldest generation left is {oldest}")]
    TimeDropped { asked: Timestamp, oldest: Generation },
    /// A generation that no commit has taken.
    #[error("generation {asked} does not exist yet; the store is at {latest}")]
    FutureGeneration { asked: Generation, latest: Generation },
    /// A stamp that does not lie within its value.
    #[error("a stamp of 16 bytes at {offset} does not fit into the {length} bytes of key {key}")]
    Stamp { key: Key, offset: usize, length: usize },
    /// Two different commits under one id.
    #[error("commit id {id} was used before for a commit with other contents")]
    CommitIdReused { id: crate::CommitId },
    /// An option or limit with an impossible value.
    #[error("an option is out of bounds: {what}")]
    Option { what: String },
    /// The store was closed.
    #[error("the store is closed")]
    Closed,
    /// A commit to a store that was opened read-only.
    #[error("the store was opened to be read, and takes no commits")]
    ReadOnly,
    /// A write or sync failed, and the store stopped.
    #[error("the store has stopped: {cause}; open it again to go on from what was acknowledged")]
    Stopped {
        cause: Arc<str>,
        /// What the operating system said, if the cause was an I/O error.
        io: Option<std::io::ErrorKind>,
    },
    /// The answer to a commit was lost. The commit was applied, or it never will be: a read shows which.
    #[error("whether the commit landed is not known: {cause}")]
    Uncertain { cause: Arc<str> },
    /// Another process, or this one, has the directory open.
    #[error("{} is in use by process {owner}; one process opens a data directory at a time", path.display())]
    Locked { path: PathBuf, owner: String },
    /// A directory written by a later version.
    #[error("{} has format {found}; this version reads up to {supported}: use a newer version", path.display())]
    NewerFormat { path: PathBuf, found: u32, supported: u32 },
    /// A directory that is not a store.
    #[error("{} is not a Latchwork data directory: {reason}", path.display())]
    NotAStore { path: PathBuf, reason: &'static str },
    /// A snapshot into a directory that is not empty.
    #[error("{} is not empty; a snapshot is written to an empty or missing directory", path.display())]
    NotEmpty { path: PathBuf },
    /// Stored bytes are not what was written.
    #[error("{place} is damaged: {detail}")]
    Corrupt { place: String, detail: String },
    /// A restore from a snapshot of another store.
    #[error("the snapshot belongs to another store; restore it into an empty one")]
    ForeignSnapshot,
    /// A restore while views are open.
    #[error("a restore replaces everything; drop all views first (open views: {views})")]
    ViewsOpen { views: usize },
    /// An error that was written down, or that another process has sent: its class, and what it said.
    #[error("{message}")]
    Told { kind: ErrorKind, message: Arc<str> },
    /// A schema of a database that holds no store, opened to be read.
    #[error(
        "the database has no store in schema {schema:?}; name another schema, or open it for writing to create one"
    )]
    NoSchema { schema: String },
    /// A database server could not be reached, or refused a statement.
    #[error("cannot {action} the database: {cause}{}", fault.advice())]
    Server { action: &'static str, cause: Arc<str>, fault: ServerFault },
    /// The operating system returned an error.
    #[error("cannot {action} {}: {cause}", path.display())]
    Io { action: &'static str, path: PathBuf, cause: Arc<std::io::Error> },
}

/// Why a database server could not be reached, or refused a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerFault {
    /// The server did not answer, or closed the connection.
    Unreachable,
    /// TLS could not be agreed on, or the certificate of the server is not trusted.
    Tls,
    /// The server has no free connection, memory or disk space.
    NoResources,
    /// The server takes no writes: it is a standby, or it was set to be read-only.
    ReadOnly,
    /// The role may not do this, or may not connect.
    NoRights,
    /// The encoding of the database cannot be converted to UTF-8.
    Encoding,
    /// The server ended the statement, for example because of its `statement_timeout`.
    Cancelled,
    /// The server does not take the data. The same request always fails.
    Data,
    /// Anything else; the message of the server explains it.
    Other,
}

impl ServerFault {
    /// What to do, as the end of a message.
    fn advice(self) -> &'static str {
        match self {
            ServerFault::Unreachable | ServerFault::Data | ServerFault::Other => "",
            ServerFault::Tls => "; check sslmode, sslrootcert and the certificate of the server",
            ServerFault::NoResources => "; free resources of the server, or use fewer connections",
            ServerFault::ReadOnly => "; connect to a server that takes writes",
            ServerFault::NoRights => "; check the user, its password and its rights on the schema",
            ServerFault::Encoding => "; use a database whose encoding is UTF8",
            ServerFault::Cancelled => "; if it was statement_timeout or lock_timeout, raise it for this role",
        }
    }

    /// True if the same request always fails.
    fn is_invalid(self) -> bool {
        matches!(self, ServerFault::Data | ServerFault::Encoding)
    }
}

/// What a failure means to a caller. The layers above derive status codes, exit codes and retries from this alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request is not valid. The same request always fails.
    Invalid,
    /// The requested thing does not exist, or is no longer kept.
    NotFound,
    /// Another user of the store prevents the operation.
    Conflict,
    /// The store cannot answer at the moment.
    Unavailable,
    /// Stored bytes are not what was written.
    Corrupt,
}

impl StoreError {
    /// True if the same call may succeed later: the store cannot answer at the moment.
    ///
    /// ```
    /// # use latchwork_store::StoreError;
    /// let error = StoreError::Uncertain { cause: "the connection was lost".into() };
    /// assert!(error.is_passing() && !StoreError::Closed.is_passing());
    /// ```
    pub fn is_passing(&self) -> bool {
        self.kind() == ErrorKind::Unavailable && !self.is_final()
    }

    /// True if no call through this handle can succeed any more, because the store was closed or has stopped.
    ///
    /// ```
    /// # use latchwork_store::StoreError;
    /// assert!(StoreError::Closed.is_final());
    /// ```
    pub fn is_final(&self) -> bool {
        matches!(self, StoreError::Closed | StoreError::Stopped { .. })
    }

    /// What the operating system said, if this is an I/O error or the store has stopped for one.
    ///
    /// ```
    /// use std::io;
    ///
    /// use latchwork_store::StoreError;
    ///
    /// let error = StoreError::Stopped { cause: "no space left".into(), io: Some(io::ErrorKind::StorageFull) };
    /// assert_eq!(error.io_kind(), Some(io::ErrorKind::StorageFull));
    /// assert!(error.is_disk_full());
    /// ```
    pub fn io_kind(&self) -> Option<std::io::ErrorKind> {
        match self {
            StoreError::Stopped { io, .. } => *io,
            StoreError::Io { cause, .. } => Some(cause.kind()),
            _ => None,
        }
    }

    /// Whether the disk, or what this user may have of it, is full. An operator makes room and opens the store again;
    /// after another I/O error, the disk itself needs a look.
    ///
    /// ```
    /// # use latchwork_store::StoreError;
    /// assert!(!StoreError::Closed.is_disk_full());
    /// ```
    pub fn is_disk_full(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self.io_kind(), Some(StorageFull | QuotaExceeded))
    }

    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork_store::{ErrorKind, StoreError};
    /// assert_eq!(StoreError::Closed.kind(), ErrorKind::Unavailable);
    /// assert_eq!(StoreError::ReadOnly.kind(), ErrorKind::Invalid);
    /// ```
    pub fn kind(&self) -> ErrorKind {
        use StoreError::*;
        match self {
            EmptyKey { .. }
            | KeyTooLong { .. }
            | ValueTooLong { .. }
            | TooManyOperations { .. }
            | CommitTooLarge { .. }
            | MetaTooLong { .. }
            | WrittenTwice { .. }
            | SpaceName { .. }
            | SpaceMismatch { .. }
            | NotWatchable { .. }
            | FutureGeneration { .. }
            | CommitIdReused { .. }
            | Stamp { .. }
            | ReadOnly
            | Option { .. }
            | NewerFormat { .. }
            | NotAStore { .. }
            | NotEmpty { .. }
            | ForeignSnapshot => ErrorKind::Invalid,
            Server { fault, .. } if fault.is_invalid() => ErrorKind::Invalid,
            UnknownSpace { .. } | HistoryDropped { .. } | TimeDropped { .. } | NoSchema { .. } => ErrorKind::NotFound,
            Locked { .. } | ViewsOpen { .. } => ErrorKind::Conflict,
            Closed | Stopped { .. } | Uncertain { .. } | Io { .. } | Server { .. } => ErrorKind::Unavailable,
            Corrupt { .. } => ErrorKind::Corrupt,
            Told { kind, .. } => *kind,
        }
    }

    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>, cause: std::io::Error) -> Self {
        StoreError::Io { action, path: path.into(), cause: Arc::new(cause) }
    }

    pub(crate) fn corrupt(place: impl Into<String>, detail: impl Into<String>) -> Self {
        StoreError::Corrupt { place: place.into(), detail: detail.into() }
    }
}

/// An error as it is written down: its class and what it says. What only this process can make use of is left out.
#[derive(Serialize, Deserialize)]
struct Written {
    kind: ErrorKind,
    message: Arc<str>,
}

impl Serialize for StoreError {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Written { kind: self.kind(), message: self.to_string().into() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for StoreError {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<StoreError, D::Error> {
        let Written { kind, message } = Written::deserialize(deserializer)?;
        Ok(StoreError::Told { kind, message })
    }
}
