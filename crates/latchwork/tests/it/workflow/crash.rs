//! A crash at every commit: whatever the moment, the outcome is the same and every result is recorded once.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork::testing::crash_everywhere;
use latchwork::workflow::{Attempt, Ctx, Failure, Retry, workflow};

/// Fifty steps with timers between them and failures in them. The outcome contains the result of each step.
#[tokio::test]
async fn a_crash_at_any_commit_of_fifty_steps_changes_nothing() {
    let long = workflow("long").run(async |ctx: Ctx, seed: u64| {
        let mut results = Vec::new();
        let mut chosen = Vec::new();
        for number in 0..50u64 {
            if number % 7 == 3 {
                ctx.sleep(Duration::from_millis(number * 100)).await?;
            }
            if number % 11 == 5 {
                chosen.push(ctx.random().await);
            }
            let step = ctx.run_with("step", async |attempt: Attempt| {
                if number % 13 == 6 && attempt.number <= 2 {
                    return Err(Failure::new("not at first"));
                }
                Ok(seed * number)
            });
            results.push(step.input(&number).retry(Retry::exponential().max_attempts(5)).await?);
        }
        Ok((results, chosen.len()))
    });
    let expected: Vec<u64> = (0..50).map(|number| 3 * number).collect();
    let crashes = crash_everywhere(&long, 3, |outcome| {
        let (results, chosen) = outcome.result.as_ref().unwrap();
        assert_eq!((results, *chosen), (&expected, 5), "{:?}", outcome.crash);
    });
    let crashes = crashes.await;
    assert!(crashes > 100, "{crashes} crashes");
}

/// At least once, and no more often than needed: a body runs again only if the crash came while it ran or before its
/// result was committed.
#[tokio::test]
async fn bodies_run_again_only_where_their_result_was_lost() {
    let three = workflow("three").run(async |ctx: Ctx, ()| {
        for name in ["a", "b", "c"] {
            ctx.run(name, async || Ok(())).await?;
        }
        Ok(())
    });
    let mut seen = BTreeMap::new();
    let crashes = crash_everywhere(&three, (), |outcome| {
        outcome.result.as_ref().unwrap();
        let count = |name: &str| outcome.bodies.iter().filter(|body| *body == name).count();
        seen.insert((outcome.crash.commit, outcome.crash.side), ["a", "b", "c"].map(count));
    })
    .await;
    // Four commits: the start with the intent of a, a's result with the intent of b, b's with c's, c's with the end.
    assert_eq!(crashes, 8);
    let counts: Vec<[usize; 3]> = seen.into_values().collect();
    let expected = [
        [1, 1, 1], // before the start: nothing was stored, and the caller starts it again
        [1, 1, 1], // after the start: a has not begun
        [2, 1, 1], // before a's result is stored
        [1, 1, 1],
        [1, 2, 1],
        [1, 1, 1],
        [1, 1, 2],
        [1, 1, 1], // after the end
    ];
    assert_eq!(counts, expected);
}
