//! Tables of journal events, and the state of the journal after them.

use super::*;
use crate::store::{SpaceSpec, Store};
use crate::workflow::stored::record::EntryState;

/// An event of a journal. Places are numbers in the root branch.
#[derive(Debug, Clone, Copy)]
enum Event {
    Put(u32),
    Draft(u32),
    /// The poll is over.
    Release,
    WantAll,
    /// A commit takes what is pending and is in flight.
    Fly,
    /// The commit in flight lands, or is refused.
    Land,
    Refuse,
    Carry(u64),
    StopCarrying(u64),
}

/// A journal, and the entries of the commit in flight.
#[derive(Default)]
struct Play {
    journal: Journal,
    flight: Option<(u64, Vec<Pending>)>,
}

impl Play {
    fn of(events: &[Event]) -> Play {
        let mut play = Play::default();
        events.iter().for_each(|event| play.on(*event));
        play
    }

    fn on(&mut self, event: Event) {
        let journal = &mut self.journal;
        match event {
            Event::Put(number) => journal.put(&BranchPath::default().at(number), entry(""), None),
            Event::Draft(number) => journal.draft(&BranchPath::default().at(number), entry(""), None),
            Event::Release => journal.release(),
            Event::WantAll => _ = journal.want_all(),
            Event::Fly => {
                let taken = journal.take(&Commit::new());
                self.flight = Some((journal.fly(&taken), taken));
            }
            Event::Land => {
                let (flight, _) = self.flight.take().expect("a commit is in flight");
                journal.arrive(flight);
            }
            Event::Refuse => {
                let (flight, taken) = self.flight.take().expect("a commit is in flight");
                journal.put_back(taken);
                journal.arrive(flight);
            }
            Event::Carry(op) => _ = journal.carry(op),
            Event::StopCarrying(op) => _ = journal.stop_carrying(op),
        }
    }
}

/// Each row: events; then whether a commit is wanted, whether all entries are durable, whether a commit may be made.
#[test]
fn entries_are_durable_when_the_commit_that_holds_them_has_landed() {
    use Event::*;
    let table: &[(&[Event], [bool; 3])] = &[
        (&[], [false, true, true]),
        (&[Put(0)], [false, false, true]),
        (&[Put(0), WantAll], [true, false, true]),
        (&[WantAll, Put(0)], [false, false, true]),
        (&[Draft(0), WantAll], [false, false, true]),
        (&[Draft(0), WantAll, Release], [true, false, true]),
        (&[Put(0), WantAll, Fly], [false, false, false]),
        (&[Put(0), WantAll, Fly, Land], [false, true, true]),
        (&[Put(0), WantAll, Fly, Refuse], [true, false, true]),
        (&[Put(0), Fly, Put(1), WantAll, Land], [true, false, true]),
        (&[Put(0), Draft(1), WantAll, Fly, Land], [false, false, true]),
        (&[Put(0), Draft(1), WantAll, Fly, Land, Release], [true, false, true]),
        (&[Carry(7)], [false, true, false]),
        (&[Carry(7), StopCarrying(8)], [false, true, false]),
        (&[Carry(7), StopCarrying(7)], [false, true, true]),
        (&[Put(0), Fly, Carry(7), Land], [false, true, true]),
    ];
    for (number, (events, expected)) in table.iter().enumerate() {
        let Play { journal, .. } = Play::of(events);
        let said = [journal.is_wanted(), journal.is_durable(journal.stamps()), journal.is_idle()];
        assert_eq!(said, *expected, "row {number}: {events:?}");
    }
}

fn entry(name: &str) -> Entry {
    Entry {
        kind: Kind::Step,
        name: name.into(),
        argument: 0,
        since_us: 0,
        attempts: 0,
        failures: Vec::new(),
        progress: None,
        state: EntryState::Done("null".into()),
    }
}

/// A commit is refused after the code has made a newer entry at the same place: the newer entry stays.
#[test]
fn an_entry_that_is_put_back_does_not_replace_a_newer_one() {
    let (mut journal, place) = (Journal::default(), BranchPath::default().at(0));
    journal.put(&place, entry("old"), None);
    let taken = journal.take(&Commit::new());
    journal.put(&place, entry("new"), None);
    journal.put_back(taken);
    let taken = journal.take(&Commit::new());
    assert_eq!(taken.iter().map(|pending| &*pending.entry.name).collect::<Vec<_>>(), ["new"]);
}

/// A branch is dropped while its commit is in flight, and the commit is refused: its entries are gone.
#[test]
fn the_entries_of_a_dropped_branch_are_not_put_back() {
    let branch = BranchPath::default().fork(0, 1);
    for (is_given_up, left) in [(false, 2), (true, 1)] {
        let mut journal = Journal::default();
        journal.put(&branch.at(0), entry("in the branch"), None);
        journal.put(&BranchPath::default().at(1), entry("beside it"), None);
        let taken = journal.take(&Commit::new());
        let flight = journal.fly(&taken);
        if is_given_up {
            journal.give_up(&branch);
        }
        journal.put_back(taken);
        journal.arrive(flight);
        assert_eq!(journal.take(&Commit::new()).len(), left);
        assert!(journal.lost.is_empty(), "no commit is in flight any more");
    }
}

/// Two entries that write one key do not share a commit. The second entry waits for the next one.
#[tokio::test]
async fn a_commit_takes_each_key_once() {
    let space = Store::memory().await.unwrap().space(SpaceSpec::new("s")).await.unwrap();
    let effect = || Some(OpEffect::from(Part::default().put(&space.key("k"), Vec::new())));
    let mut journal = Journal::default();
    journal.put(&BranchPath::default().at(0), entry("first"), effect());
    journal.put(&BranchPath::default().at(1), entry("second"), effect());
    journal.want_all();
    let taken = journal.take(&Commit::new());
    assert_eq!((taken.len(), journal.is_wanted()), (1, true));
    let written = Commit::new().put(&space.key("k"), Vec::new());
    assert!(journal.take(&written).is_empty(), "the commit writes that key already");
    assert_eq!(journal.take(&Commit::new()).len(), 1);
}
