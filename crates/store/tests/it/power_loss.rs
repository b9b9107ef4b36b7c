//! Power loss at any moment: images that a power loss could leave on the disk are opened, read and compared with what
//! was acknowledged. `LATCHWORK_IMAGES` sets the number of images, `LATCHWORK_SEED` the first seed. A violation prints
//! the values that reproduce its image.

use latchwork_store::Sabotage;
use latchwork_store::disk::sim::{Event, Loss, Recording};

use crate::crowd::crowd;
use crate::recovered::{Expected, check};
use crate::workload::{self, Run};

/// The number of images that were checked.
#[derive(Debug, Default)]
pub struct Report {
    pub images: usize,
    pub recoveries: usize,
}

/// An image that does not contain what it must.
#[derive(Debug)]
pub struct Violation {
    pub seed: u64,
    /// The event of the recording before which power was lost; `None` if the workload itself failed.
    pub point: Option<(usize, Loss)>,
    /// The same for a second power loss, during the recovery from the first.
    pub again: Option<(usize, Loss)>,
    pub what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n  LATCHWORK_SEED={}", self.what, self.seed)?;
        if let Some((point, loss)) = self.point {
            write!(f, " LATCHWORK_POINT={point} ({loss:?})")?;
        }
        self.again.map_or(Ok(()), |(point, loss)| write!(f, ", then in the recovery at event {point} ({loss:?})"))
    }
}

/// How the images of one recording are chosen.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub seed: u64,
    /// The approximate number of images.
    pub images: usize,
    /// After one of this many images, the recovery is interrupted by another power loss.
    pub again: usize,
    /// The only point to check, if set.
    pub point: Option<usize>,
}

const LOSSES: usize = 6;

fn loss(index: usize, seed: u64) -> Loss {
    match index {
        0 => Loss::Everything,
        1 => Loss::Nothing,
        2 | 3 => Loss::SomeWrites(seed),
        _ => Loss::SomeSectors(seed),
    }
}

/// Checks images of a run.
pub async fn examine(run: &Run, plan: Plan) -> Result<Report, Violation> {
    let mut random = fastrand::Rng::with_seed(plan.seed);
    let mut report = Report::default();
    let mut walk = run.recording.walk();
    let mut acknowledged = 0;
    let share = plan.images as f64 / ((run.recording.events().len() + 1) * LOSSES) as f64;
    loop {
        let here = plan.point.is_none_or(|point| point == walk.point());
        for index in 0..LOSSES {
            let (chosen, seed, twice) = (random.f64() < share, random.u64(..), random.usize(..plan.again) == 0);
            if !here || !(chosen || plan.point.is_some()) {
                continue;
            }
            let loss = loss(index, seed);
            let expected = Expected { ledger: &run.ledger, acknowledged, now: run.now, seed };
            report.images += 1;
            let violation =
                |(what, again)| Violation { seed: plan.seed, point: Some((walk.point(), loss)), again, what };
            let disk = walk.image(loss);
            if twice {
                let recovery = disk.record();
                let ledger = check(&disk, &expected).await.map_err(|what| violation((what, None)))?;
                let expected = Expected { ledger: &ledger, ..expected };
                report.recoveries += 1;
                report.images += crash_again(recovery.stop(), &expected).await.map_err(violation)?;
            } else {
                check(&disk, &expected).await.map_err(|what| violation((what, None)))?;
            }
        }
        match walk.step() {
            Some(Event::Note(generation)) => acknowledged = acknowledged.max(*generation),
            Some(_) => {}
            None => return Ok(report),
        }
    }
}

/// Checks images of a recovery.
async fn crash_again(recording: Recording, expected: &Expected<'_>) -> Result<usize, (String, Option<(usize, Loss)>)> {
    let mut random = fastrand::Rng::with_seed(expected.seed);
    let mut walk = recording.walk();
    let mut acknowledged = expected.acknowledged;
    let mut images = 0;
    loop {
        if random.usize(..1 + recording.events().len() / 8) == 0 {
            let seed = random.u64(..);
            let loss = loss(random.usize(..LOSSES), seed);
            let expected = Expected { acknowledged, seed, ..*expected };
            images += 1;
            check(&walk.image(loss), &expected).await.map_err(|what| (what, Some((walk.point(), loss))))?;
        }
        match walk.step() {
            Some(Event::Note(generation)) => acknowledged = acknowledged.max(*generation),
            Some(_) => {}
            None => return Ok(images),
        }
    }
}

/// Runs workloads from `seed` on until about `images` images were checked.
pub async fn lose_power(seed: u64, images: usize, sabotage: Option<Sabotage>) -> Result<Report, Violation> {
    const IMAGES_PER_RUN: usize = 400;
    let mut report = Report::default();
    for seed in seed.. {
        let wrong = |what| Violation { seed, point: None, again: None, what };
        let run = workload::alone(seed, 120, sabotage).await.map_err(wrong)?;
        let plan = Plan { seed, images: IMAGES_PER_RUN, again: 25, point: None };
        let looked = examine(&run, plan).await?;
        report.images += looked.images;
        report.recoveries += looked.recoveries;
        if report.images >= images {
            break;
        }
    }
    Ok(report)
}

/// The same with many callers and background threads.
pub async fn lose_power_in_a_crowd(seed: u64, images: usize, sabotage: Option<Sabotage>) -> Result<Report, Violation> {
    let wrong = |what| Violation { seed, point: None, again: None, what };
    let run = crowd(seed, 40, sabotage).await.map_err(wrong)?;
    examine(&run, Plan { seed, images, again: 50, point: None }).await
}

pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number in the environment"))
}

fn assert_held(result: Result<Report, Violation>) {
    match result {
        Ok(report) => println!("{report:?}"),
        Err(violation) => panic!("{violation}"),
    }
}

#[tokio::test]
async fn a_power_loss_leaves_every_acknowledged_commit() {
    let images = number("LATCHWORK_IMAGES", 2500) as usize;
    assert_held(lose_power(number("LATCHWORK_SEED", 1), images, None).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_power_loss_with_many_callers_leaves_every_acknowledged_commit() {
    let images = number("LATCHWORK_IMAGES", 2500) as usize / 4;
    assert_held(lose_power_in_a_crowd(number("LATCHWORK_SEED", 1), images, None).await);
}

#[tokio::test]
async fn one_point_of_a_power_loss_again() {
    let Ok(point) = std::env::var("LATCHWORK_POINT") else { return };
    let seed = number("LATCHWORK_SEED", 1);
    let run = workload::alone(seed, 120, None).await.unwrap();
    let plan = Plan { seed, images: 400, again: 25, point: Some(point.parse().unwrap()) };
    assert_held(examine(&run, plan).await);
}
