//! Schedules and requests that make no sense are refused with an error that names the mistake.

use std::time::Duration;

use latchwork::store::{ErrorKind, Timestamp};
use latchwork::workflow::{Schedule, ScheduleError, WorkflowError};

use super::kit::{Kit, SECOND, at};

fn cron(expression: &str) -> Schedule {
    Schedule::cron("s", expression)
}

#[tokio::test]
async fn impossible_schedules_are_refused_when_they_are_put() {
    let kit = Kit::new().await;
    let daily = || cron("0 2 * * *");
    let long = "n".repeat(401);
    let cases: Vec<(Schedule, &str)> = vec![
        (Schedule::cron("", "0 2 * * *"), "\"\" cannot be the name of a schedule: it is empty"),
        (Schedule::cron(&long, "0 2 * * *"), "it is longer than 400 bytes"),
        (Schedule::cron("a\0b", "0 2 * * *"), "it holds a control character"),
        (cron("0 25 * * *"), "cron expression \"0 25 * * *\", at byte 2: \"25\" is not a valid hour; write 0 to 23"),
        (cron("0 2 * *"), "there are 4 fields; write 5, or 6 that begin with the second"),
        (cron("0 0 31 2 *"), "schedule \"s\" never fires"),
        (cron("0 0 30 2 *"), "never fires"),
        (daily().start(at(0)).end(at(60)), "never fires: it has no occurrence between its start and its end"),
        (daily().start(at(60)).end(at(60)), "ends before it starts"),
        (daily().start(at(60)).end(at(0)), "ends before it starts"),
        (daily().start(Timestamp(u64::MAX)), "never fires"),
        (daily().zone("Europe/Atlantis"), "there is no time zone \"Europe/Atlantis\""),
        (daily().zone(""), "there is no time zone"),
        (Schedule::every("s", Duration::ZERO), "an interval of 0ns is too short"),
        (Schedule::every("s", SECOND / 2), "an interval of 500ms is too short"),
        (Schedule::every("s", SECOND).jitter(2 * SECOND), "a jitter of 2s is longer than the interval of 1s"),
        (Schedule::every("s", SECOND).zone("Europe/Berlin"), "which is the same in all time zones"),
    ];
    for (schedule, told) in cases {
        let refused = kit.test.engine().schedules().put(schedule.workflow(&kit.report, 1)).await.unwrap_err();
        assert!(refused.to_string().contains(told), "{refused}");
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
        assert!(matches!(refused, WorkflowError::Schedule(_)), "{refused:?}");
    }
    let refused = kit.test.engine().schedules().put(daily()).await.unwrap_err();
    assert!(matches!(refused, WorkflowError::Schedule(ScheduleError::NoWorkflow { .. })));
    assert!(kit.test.engine().schedules().list().limit(10).await.unwrap().items.is_empty());
    // The longest possible name.
    let name = "n".repeat(400);
    let put = kit.test.engine().schedules().put(Schedule::every(&name, 60 * SECOND).workflow(&kit.report, 0)).await;
    assert_eq!(put.unwrap().name, name);
    assert!(kit.test.engine().schedules().trigger(&name).await.unwrap().len() <= 512);
}

#[tokio::test]
async fn a_schedule_needs_a_workflow_and_an_input_that_fits_it() {
    let kit = Kit::new().await;
    let put = async |name: &str, input: serde_json::Value| {
        kit.test.engine().schedules().put(cron("0 2 * * *").workflow_by_name(name, input)).await.unwrap_err()
    };
    assert!(matches!(put("nothing", 1.into()).await, WorkflowError::NotRegistered { .. }));
    assert!(matches!(put("report", "one".into()).await, WorkflowError::Input { .. }));
    let large = kit.test.engine().store().limits().value_bytes;
    assert!(matches!(put("report", "x".repeat(large).into()).await, WorkflowError::InputTooLong { .. }));
}

/// The check does not walk through a billion occurrences to find that they are too many.
#[tokio::test]
async fn impossible_backfills_are_refused() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    for schedule in [Schedule::every("s", SECOND), cron("* * * * * *"), cron("* * * * * *").zone("Europe/Berlin")] {
        kit.put(schedule.workflow(&kit.report, 0)).await;
        let refused = schedules.backfill("s", Timestamp(1), at(0)).await.unwrap_err();
        assert!(matches!(&refused, WorkflowError::Schedule(ScheduleError::BackfillTooLarge { limit: 10_000, .. })));
        assert!(refused.to_string().contains("more than 10000 occurrences"), "{refused}");
    }
    for (from, to, told) in [(at(0), at(1), "in the future"), (at(0), at(0), "not after"), (at(1), at(0), "not after")]
    {
        let refused = schedules.backfill("s", from, to).await.unwrap_err();
        assert!(refused.to_string().contains(told), "{refused}");
    }
    assert_eq!(kit.description().await.backfills, 0);
}

#[tokio::test]
async fn requests_that_are_not_handled_do_not_pile_up() {
    let kit = Kit::new().await;
    let schedules = kit.test.engine().schedules();
    kit.until(3600).await;
    kit.put(kit.minutely(100_000)).await;
    schedules.trigger("s").await.unwrap();
    kit.settle().await;
    for _ in 0..16 {
        schedules.backfill("s", at(60), at(120)).await.unwrap();
    }
    let refused = schedules.backfill("s", at(60), at(120)).await.unwrap_err();
    assert!(matches!(refused, WorkflowError::Schedule(ScheduleError::Busy { count: 16, .. })), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::Conflict);
}
