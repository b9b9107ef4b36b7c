//! `latch store verify`: reads everything, and reports all damage.

use anyhow::Result;
use latchwork::store::Damage;
use serde::{Deserialize, Serialize};

use crate::output::{Exit, Output, Problem, Table};
use crate::progress::shown;
use crate::target::{Looked, Target};

/// What was found, as it is printed and as a server sends it.
#[derive(Debug, Serialize, Deserialize)]
struct Verified {
    is_sound: bool,
    damage: Vec<DamageFields>,
}

#[derive(Debug, Serialize, Deserialize)]
struct DamageFields {
    place: String,
    detail: String,
}

impl Verified {
    fn of(damage: Vec<Damage>) -> Verified {
        let fields = |Damage { place, detail }| DamageFields { place, detail };
        Verified { is_sound: damage.is_empty(), damage: damage.into_iter().map(fields).collect() }
    }
}

pub(crate) async fn run(target: &Target, output: &mut Output<'_>) -> Result<()> {
    let verified = match target.look().await? {
        Looked::Server(client) => {
            let asked = client.long_post::<Verified>("/store:verify");
            shown(output.format(), "Reading everything", String::new, asked).await?
        }
        Looked::Store(store) => {
            let damage = shown(output.format(), "Reading everything", String::new, store.verify()).await;
            store.close().await?;
            Verified::of(damage?)
        }
    };
    output.one(&verified, |text| {
        if verified.is_sound {
            text.line("Nothing is damaged.");
            return;
        }
        let mut table = Table::new(&["PLACE", "DAMAGE"]);
        for damage in &verified.damage {
            table.row([damage.place.clone().into(), damage.detail.clone().into()]);
        }
        text.table(table);
    })?;
    match verified.damage.len() {
        0 => Ok(()),
        places => Err(Problem::new(Exit::Failed, format!("the store is damaged in {places} places")).into()),
    }
}
