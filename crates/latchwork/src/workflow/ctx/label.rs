//! Tags and search attributes, which executions can be found by. A workflow changes its own labels in its commits.

use crate::store::Timestamp;
use crate::workflow::Failure;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::journal::replay::OpCall;
use crate::workflow::stored::record::{Attribute, Kind, Labels, WaitsFor};

/// The longest tag, attribute name or attribute text, in bytes.
const LONGEST: usize = 256;

/// How many tags, and how many attributes, an execution may have.
const MOST: usize = 64;

impl Ctx {
    /// Adds a tag. The execution can be found by it after the next commit.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.tag("urgent").await?;
    /// # Ok(()) }
    /// ```
    pub async fn tag(&self, tag: &str) -> Result<(), Failure> {
        self.label(&format!("tag {tag}"), 0, |labels| {
            labels.tags.insert(tag.into());
        })
        .await
    }

    /// Removes a tag.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.untag("urgent").await?;
    /// # Ok(()) }
    /// ```
    pub async fn untag(&self, tag: &str) -> Result<(), Failure> {
        self.label(&format!("untag {tag}"), 0, |labels| {
            labels.tags.remove(tag);
        })
        .await
    }

    /// Sets a search attribute. The execution can be found by it after the next commit.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.set_attribute("customer", "Ada").await?;
    /// # Ok(()) }
    /// ```
    pub async fn set_attribute(&self, name: &str, value: impl Into<Attribute>) -> Result<(), Failure> {
        let value = value.into();
        self.label(&format!("set {name}"), hash(&value), |labels| {
            labels.attributes.insert(name.into(), value);
        })
        .await
    }

    /// Removes a search attribute.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.remove_attribute("customer").await?;
    /// # Ok(()) }
    /// ```
    pub async fn remove_attribute(&self, name: &str) -> Result<(), Failure> {
        self.label(&format!("remove {name}"), 0, |labels| {
            labels.attributes.remove(name);
        })
        .await
    }

    async fn label(&self, name: &str, argument: u64, change: impl FnOnce(&mut Labels)) -> Result<(), Failure> {
        let call = OpCall { kind: Kind::Label, name, argument };
        self.replay(WaitsFor::Store, call, |operation| async move {
            let mut labels = self.run.with(|state| state.known.labels().clone());
            change(&mut labels);
            labels.check().map_err(|failure| operation.gave(failure))?;
            operation.done(&());
            self.run.with(|state| state.label(labels));
            Ok(())
        })
        .await
    }
}

impl Labels {
    /// Refuses labels that cannot be searched for.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let refuse = |what: String| Err(Failure::new(what).with_code("latchwork.labels").not_retryable());
        if self.tags.len() > MOST || self.attributes.len() > MOST {
            return refuse(format!("an execution has at most {MOST} tags and {MOST} attributes"));
        }
        let names = self.tags.iter().chain(self.attributes.keys());
        if let Some(name) = names.into_iter().find(|name| name.is_empty() || name.len() > LONGEST) {
            return refuse(format!("{name:?} cannot be a tag or an attribute: it must have 1 to {LONGEST} bytes"));
        }
        for (name, value) in &self.attributes {
            match value {
                Attribute::Text(text) if text.len() > LONGEST => {
                    return refuse(format!("attribute {name:?} is longer than {LONGEST} bytes"));
                }
                Attribute::Real(number) if !number.is_finite() => {
                    return refuse(format!("attribute {name:?} is {number}, which is not a finite number"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

macro_rules! attributes {
    ($($from:ty => $variant:ident),*) => {$(
        impl From<$from> for Attribute {
            fn from(value: $from) -> Attribute {
                Attribute::$variant(value.into())
            }
        }
    )*};
}

attributes!(bool => Boolean, i64 => Integer, i32 => Integer, u32 => Integer, f64 => Real, &str => Text, String => Text);

impl From<u64> for Attribute {
    /// A number that does not fit an [`i64`] becomes the nearest real number.
    fn from(value: u64) -> Attribute {
        i64::try_from(value).map_or(Attribute::Real(value as f64), Attribute::Integer)
    }
}

impl From<Timestamp> for Attribute {
    fn from(time: Timestamp) -> Attribute {
        Attribute::Time(time)
    }
}
