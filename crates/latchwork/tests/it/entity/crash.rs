//! Power loss at any moment of a life with entities: the test opens possible images of the disk and compares them with
//! what was acknowledged. `LATCHWORK_IMAGES` sets how many, `LATCHWORK_SEED` where to start; a violation prints how to
//! see that image again.

mod building;
mod life;
mod recovered;

use latchwork::store::disk::sim::{Event, Loss};

use self::life::Life;
use self::recovered::Recovered;

const LOSSES: usize = 5;

/// What the disk does with writes that it was not asked to sync.
fn loss(index: usize, seed: u64) -> Loss {
    match index {
        0 => Loss::Everything,
        1 => Loss::Nothing,
        2 => Loss::SomeWrites(seed),
        _ => Loss::SomeSectors(seed),
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number in the environment"))
}

/// Opens about `images` images of a life; some of them crash again while they finish half-done work.
async fn examine(life: &Life, images: u64, seed: u64) -> usize {
    const AGAIN: usize = 10;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut walk = life.recording.walk();
    let (mut acknowledged, mut opened) = (life.begin, 0);
    let share = images as f64 / ((life.recording.events().len() + 1) * LOSSES) as f64;
    loop {
        for index in 0..LOSSES {
            let (chosen, own, again) = (random.f64() < share, random.u64(..), random.usize(..AGAIN) == 0);
            if !chosen {
                continue;
            }
            let loss = loss(index, own);
            let disk = walk.image(loss);
            let place = format!("LATCHWORK_SEED={seed}, the power lost before event {} ({loss:?})", walk.point());
            let recovery = again.then(|| disk.record());
            let checked = Recovered::check(&disk, life, acknowledged, own).await;
            checked.unwrap_or_else(|what| panic!("{what}\n  {place}"));
            opened += 1;
            if let Some(recovery) = recovery {
                let recovery = recovery.stop();
                let point = random.usize(..=recovery.events().len());
                let disk = recovery.image(point, self::loss(random.usize(..LOSSES), own));
                let checked = Recovered::check_again(&disk, own).await;
                checked.unwrap_or_else(|what| panic!("{what}\n  {place}, and again before event {point}"));
                opened += 1;
            }
        }
        match walk.step() {
            Some(Event::Note(generation)) => acknowledged = *generation,
            Some(_) => {}
            None => return opened,
        }
    }
}

/// The power fails while entities are added, changed and removed, alone and together, and while indexes over several
/// batches of entities are built and dropped: between the declaration and the first batch, between two batches, before
/// the index is marked as ready, and in the middle of each of these commits.
#[tokio::test]
async fn a_power_loss_leaves_all_that_was_acknowledged() {
    const IMAGES_PER_LIFE: u64 = 100;
    let images = number("LATCHWORK_IMAGES", 200);
    let mut opened = 0;
    for seed in number("LATCHWORK_SEED", 1).. {
        let life = Life::live(seed, 250).await;
        opened += examine(&life, IMAGES_PER_LIFE.min(images), seed).await as u64;
        if opened >= images {
            break;
        }
    }
    println!("{opened} images");
}

/// The power fails while entities are first opened in a directory: some spaces are declared and others are not.
#[tokio::test]
async fn a_power_loss_during_the_first_opening_leaves_entities_with_all_their_history() {
    let images = number("LATCHWORK_IMAGES", 200) / 3;
    for seed in number("LATCHWORK_SEED", 1)..number("LATCHWORK_SEED", 1) + 4 {
        let life = Life::live(seed, 0).await;
        examine(&life, images / 4, seed).await;
    }
}
