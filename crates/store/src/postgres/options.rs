//! How a store in PostgreSQL is opened: the options, and their checks. Knows no statement.

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::config::TargetSessionAttrs;

use crate::disk::RealDisk;
use crate::postgres::PostgresBackend;
use crate::postgres::address;
use crate::postgres::link::Address;
use crate::postgres::read_only::Frozen;
use crate::postgres::schema::check_name;
use crate::{Env, Limits, Result, Store, StoreError};

/// How a store in PostgreSQL is opened.
///
/// ```no_run
/// # async fn example() -> Result<(), latchwork_store::StoreError> {
/// use latchwork_store::PostgresOptions;
///
/// let options = PostgresOptions::new().schema("billing").connections(4);
/// let store = options.connect("postgres://app@localhost/app").await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PostgresOptions {
    pub(super) schema: String,
    pub(super) connections: usize,
    pub(super) transactions: usize,
    pub(super) is_pooled: bool,
    pub(super) lease: Duration,
    pub(super) patience: Duration,
    pub(super) env: Env,
    pub(super) has_upkeep: bool,
    pub(super) breakage: Breakage,
    password: Option<String>,
    limits: Limits,
}

/// How a store is broken on purpose.
#[cfg(feature = "testing")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostgresSabotage {
    /// The receipts of commit ids are not looked at.
    DropReceipts,
    /// The row with the generation is read without a lock.
    SkipLock,
    /// A commit whose answer was lost is sent again without looking whether it has landed.
    SendAgain,
}

/// What is broken: nothing, outside of tests.
#[derive(Clone, Copy, Default)]
pub(super) struct Breakage {
    pub(super) drops_receipts: bool,
    pub(super) skips_lock: bool,
    pub(super) sends_again: bool,
}

/// Everything but the password.
impl std::fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("PostgresOptions");
        shown.field("schema", &self.schema).field("connections", &self.connections);
        shown.field("transactions", &self.transactions);
        shown.field("is_pooled", &self.is_pooled).field("lease", &self.lease).field("patience", &self.patience);
        shown.field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Default for PostgresOptions {
    fn default() -> PostgresOptions {
        PostgresOptions {
            schema: "latchwork".into(),
            connections: 4,
            transactions: 8,
            is_pooled: false,
            lease: Duration::from_secs(60),
            patience: Duration::from_secs(30),
            env: Env::system(),
            has_upkeep: true,
            breakage: Breakage::default(),
            password: None,
            limits: Limits::default(),
        }
    }
}

impl PostgresOptions {
    /// The schema `latchwork`, four connections for reads, no pooler.
    ///
    /// ```
    /// # use latchwork_store::{PostgresOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = PostgresOptions::new().connect("postgres://app@localhost/app").await?;
    /// # Ok(()) }
    /// ```
    pub fn new() -> PostgresOptions {
        PostgresOptions::default()
    }

    /// The schema that holds the store. It is created if it is missing.
    ///
    /// ```
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().schema("billing");
    /// ```
    pub fn schema(mut self, schema: impl Into<String>) -> PostgresOptions {
        self.schema = schema.into();
        self
    }

    /// How many connections serve reads, beside one for commits, one that listens and one for leases and clean-up.
    ///
    /// ```
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().connections(8);
    /// ```
    pub fn connections(mut self, connections: usize) -> PostgresOptions {
        self.connections = connections;
        self
    }

    /// How many transactions of the user's own may be open at once, each on a connection of its own: see
    /// [`Store::postgres`]. A further one waits. Without any such transaction, none of these connections is opened.
    ///
    /// ```
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().transactions(16);
    /// ```
    pub fn transactions(mut self, transactions: usize) -> PostgresOptions {
        self.transactions = transactions;
        self
    }

    /// The connections go through a pooler in transaction mode: no statement is prepared, and commits of other
    /// processes are found by polling once a second.
    ///
    /// ```
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().behind_pooler();
    /// ```
    pub fn behind_pooler(mut self) -> PostgresOptions {
        self.is_pooled = true;
        self
    }

    /// How long views of this process keep history after it has stopped without closing the store.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().lease(Duration::from_secs(20));
    /// ```
    pub fn lease(mut self, lease: Duration) -> PostgresOptions {
        self.lease = lease;
        self
    }

    /// How long a commit waits for a server that cannot be reached before it fails.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::PostgresOptions;
    /// let options = PostgresOptions::new().patience(Duration::from_secs(5));
    /// ```
    pub fn patience(mut self, patience: Duration) -> PostgresOptions {
        self.patience = patience;
        self
    }

    /// Where time and chance come from.
    ///
    /// ```
    /// # use latchwork_store::{Env, PostgresOptions};
    /// let (env, clock) = Env::seeded(7);
    /// let options = PostgresOptions::new().env(env);
    /// ```
    pub fn env(mut self, env: Env) -> PostgresOptions {
        self.env = env;
        self
    }

    /// The largest sizes the store takes.
    ///
    /// ```
    /// # use latchwork_store::{Limits, PostgresOptions};
    /// let mut limits = Limits::default();
    /// limits.value_bytes = 64 << 10;
    /// let options = PostgresOptions::new().limits(limits);
    /// ```
    pub fn limits(mut self, limits: Limits) -> PostgresOptions {
        self.limits = limits;
        self
    }

    /// No task of its own renews the lease, cleans up or listens: [`Store::maintain`] does, when it is called. For
    /// tests that must run the same way every time.
    #[cfg(feature = "testing")]
    pub fn without_upkeep(mut self) -> PostgresOptions {
        self.has_upkeep = false;
        self
    }

    /// Breaks the store on purpose, so that tests can show that they would notice.
    #[cfg(feature = "testing")]
    pub fn sabotage(mut self, sabotage: PostgresSabotage) -> PostgresOptions {
        match sabotage {
            PostgresSabotage::DropReceipts => self.breakage.drops_receipts = true,
            PostgresSabotage::SkipLock => self.breakage.skips_lock = true,
            PostgresSabotage::SendAgain => self.breakage.sends_again = true,
        }
        self
    }

    /// The password of the user, if the connection string has none.
    pub fn password(mut self, password: impl Into<String>) -> PostgresOptions {
        self.password = Some(password.into());
        self
    }

    /// Opens the store, and creates it if there is none. `url` is a connection string of PostgreSQL. It may contain
    /// `sslmode` (`disable`, `prefer`, `require`, `verify-ca`, `verify-full`), `sslrootcert`, `sslcert` and `sslkey`,
    /// which mean what they mean to libpq.
    ///
    /// ```
    /// # use latchwork_store::{PostgresOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = PostgresOptions::new().schema("billing").connect("postgres://app@localhost/app").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(self, url: &str) -> Result<Store> {
        let mut address = self.address(url)?;
        // A standby has an older present.
        address.config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        let (env, limits) = (self.env.clone(), self.limits);
        let backend = PostgresBackend::connect(self, address).await?;
        Store::with_backend(Arc::new(backend), env, limits, Arc::new(RealDisk)).await
    }

    /// Opens a store to read it, as it is at this moment: later commits are not seen. Nothing is created or written,
    /// and the right to select is enough; a standby will do. All reads are in one transaction, so a store that stays
    /// open for long keeps PostgreSQL from cleaning up its tables.
    pub async fn connect_read_only(self, url: &str) -> Result<Store> {
        let address = self.address(url)?;
        let (env, limits) = (self.env.clone(), self.limits);
        let backend = Frozen::connect(self, address).await?;
        Store::with_backend(Arc::new(backend), env, limits, Arc::new(RealDisk)).await
    }

    /// Checks the options, and reads what a connection string says.
    fn address(&self, url: &str) -> Result<Address> {
        check_name(&self.schema)?;
        let invalid = |what: String| StoreError::Option { what };
        if !(1..=64).contains(&self.connections) {
            return Err(invalid(format!("{} connections for reads; there are 1 to 64", self.connections)));
        }
        if !(1..=1000).contains(&self.transactions) {
            return Err(invalid(format!("{} transactions at once; there are 1 to 1000", self.transactions)));
        }
        if self.lease < Duration::from_secs(1) {
            return Err(invalid(format!("a lease of {:?}; it is at least a second", self.lease)));
        }
        let (mut config, tls) = address::read(url)?;
        if let (None, Some(password)) = (config.get_password(), &self.password) {
            config.password(password);
        }
        // A silent network must not hold callers.
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(self.patience.max(Duration::from_secs(1)));
        }
        config.tcp_user_timeout(self.lease);
        Ok(Address { config, tls: tls.connector()? })
    }
}

impl Store {
    /// Opens a store in a PostgreSQL database, in the schema `latchwork`; see [`PostgresOptions`] for more.
    ///
    /// ```
    /// # use latchwork_store::{Result, Store};
    /// # async fn example() -> Result<()> {
    /// let store = Store::connect("postgres://app@localhost/app").await?;
    /// # Ok(()) }
    /// ```
    pub async fn connect(url: &str) -> Result<Store> {
        PostgresOptions::new().connect(url).await
    }
}
