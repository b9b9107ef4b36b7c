//! A year of awkward cron expressions in four time zones, against times that another implementation has computed.
//!
//! `year.txt` was made once by Python: croniter 6.2 computed the local times of each expression, without a zone, and
//! zoneinfo turned them into moments by the policy that docs/workflows/schedules.md states. If the hour field begins
//! with `*`: every moment that shows the local time, both of them in a repeated hour. If not: the first moment that
//! shows it, and the first moment after the gap if no moment does. The hash of all times is `hash = hash * 31 +
//! seconds`, modulo 2^64; if there are few times, the file lists them.

use latchwork::store::Timestamp;
use latchwork::workflow::Schedule;

use super::kit::{BEGIN, Kit};

const YEAR: &str = include_str!("year.txt");

/// A line of the file: the zone, the expression, how often it fires in 2026, the hash, and the times if there are few.
pub(super) fn lines() -> impl Iterator<Item = (&'static str, &'static str, usize, u64, Vec<u64>)> {
    YEAR.lines().filter(|line| !line.starts_with('#')).map(|line| {
        let mut fields = line.split('|');
        let mut next = || fields.next().unwrap();
        let (zone, expression) = (next(), next());
        let (count, hash) = (next().parse().unwrap(), next().parse().unwrap());
        let (mut times, mut last) = (Vec::new(), 0);
        for word in next().split_whitespace() {
            let (step, often) = word.split_once('*').unwrap_or((word, "1"));
            for _ in 0..often.parse().unwrap() {
                last += step.parse::<u64>().unwrap();
                times.push(last);
            }
        }
        (zone, expression, count, hash, times)
    })
}

#[tokio::test]
async fn a_year_of_awkward_expressions_fires_at_the_times_that_others_compute() {
    let kit = Kit::new().await;
    // A schedule fires only after the moment when it is put, and the beginning itself is an occurrence of some
    // expressions.
    kit.test.set_time(Timestamp((BEGIN - 1) * 1_000_000));
    let (schedules, mut checked) = (kit.test.engine().schedules(), 0);
    for (zone, expression, count, hash, times) in lines() {
        let schedule = Schedule::cron("s", expression).zone(zone).workflow(&kit.report, 0);
        schedules.put(schedule).await.unwrap();
        let next = schedules.next("s", count + 1).await.unwrap();
        let seconds: Vec<u64> = next.iter().map(|time| time.0 / 1_000_000).collect();
        assert!(seconds[count] >= BEGIN + 365 * 86_400, "{zone} {expression}: fires more than {count} times");
        let seconds = &seconds[..count];
        if !times.is_empty() {
            assert_eq!(seconds, times, "{zone} {expression}");
        }
        let hashed = seconds.iter().fold(0_u64, |hash, time| hash.wrapping_mul(31).wrapping_add(*time));
        assert_eq!(hashed, hash, "{zone} {expression}: {:?}…", &seconds[..count.min(20)]);
        schedules.delete("s").await.unwrap();
        checked += count;
    }
    assert!(checked > 2_000_000, "{checked}");
}
