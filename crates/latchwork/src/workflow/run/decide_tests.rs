//! Every situation of the driver, and the decision for it.

use super::*;

const NOW: Timestamp = Timestamp(1_000_000_000);

/// An execution whose record is up to date and whose code does something.
fn busy() -> Situation {
    Situation { now: NOW, is_stored: true, ..Situation::default() }
}

/// An execution whose record is up to date and whose operations only wait for a message.
fn waiting() -> Situation {
    Situation { only_waits: true, waits_for_message: true, is_sure: true, ..busy() }
}

fn later(left: Duration) -> RunAction {
    RunAction::Later(left)
}

#[test]
fn while_an_operation_is_busy_a_commit_is_made_only_if_one_is_wanted() {
    use RunAction::*;
    let half = IDLE / 2;
    let table = [
        ("nothing is wanted", busy(), Nothing),
        ("entries that can wait", Situation { is_pending: true, ..busy() }, Nothing),
        ("something is wanted", Situation { is_wanted: true, is_pending: true, ..busy() }, Commit),
        ("a commit is in flight", Situation { is_wanted: true, is_committing: true, ..busy() }, Nothing),
        ("it has to stop", Situation { is_wanted: true, is_stopping: true, ..busy() }, Nothing),
        ("it continues as new", Situation { continues: true, ..busy() }, Continue),
        ("it continues, during a commit", Situation { continues: true, is_committing: true, ..busy() }, Nothing),
        ("a body has begun", Situation { has_intent: true, is_pending: true, ..busy() }, later(IDLE)),
        ("for a while", Situation { has_intent: true, is_pending: true, idle: half, ..busy() }, later(IDLE - half)),
        ("for long", Situation { has_intent: true, is_pending: true, idle: IDLE, ..busy() }, Commit),
        ("it is not stored", Situation { is_stored: false, ..busy() }, MakeSure),
        ("and has nothing to do", Situation { is_stored: false, is_sure: true, ..busy() }, Commit),
        ("it is not stored, but wanted", Situation { is_stored: false, is_wanted: true, ..busy() }, Commit),
    ];
    for (what, situation, expected) in table {
        assert_eq!(decide(&situation), expected, "{what}");
    }
}

#[test]
fn an_execution_that_only_waits_leaves_memory_when_that_is_worth_it() {
    use RunAction::*;
    let (soon, far) = (Some(NOW.plus(IDLE)), Some(NOW.plus(IDLE * 2)));
    let timer = |until| Situation { until, waits_for_message: false, ..waiting() };
    let table = [
        ("the code may still be woken", Situation { is_sure: false, ..waiting() }, MakeSure),
        ("a message, just now", waiting(), later(IDLE)),
        ("a message, for a second", Situation { idle: IDLE, ..waiting() }, Suspend),
        ("a message, with something to write", Situation { is_pending: true, idle: IDLE, ..waiting() }, Commit),
        ("a message, with a changed record", Situation { is_changed: true, ..waiting() }, Commit),
        ("a message, woken for nothing", Situation { is_changed: true, is_stored_waiting: true, ..waiting() }, Suspend),
        ("a message, after a crash", Situation { is_suspect: true, ..waiting() }, Suspend),
        ("a message, not stored", Situation { is_stored: false, ..waiting() }, Commit),
        ("a message with a time limit", Situation { until: far, ..waiting() }, later(IDLE)),
        ("a timer", timer(far), Suspend),
        ("a timer, not stored: one commit does both", Situation { is_stored: false, ..timer(far) }, Suspend),
        ("a timer, with entries", Situation { is_pending: true, ..timer(far) }, Suspend),
        ("a timer that is due soon", timer(soon), Nothing),
        ("a timer that is due soon, with entries", Situation { is_pending: true, ..timer(soon) }, Commit),
        ("a commit is in flight", Situation { is_committing: true, ..timer(far) }, Nothing),
        ("it has to stop", Situation { is_stopping: true, ..timer(far) }, Nothing),
    ];
    for (what, situation, expected) in table {
        assert_eq!(decide(&situation), expected, "{what}");
    }
}
