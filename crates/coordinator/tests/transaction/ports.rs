//! What does the steps, in the fake world. Each undo is done twice, and the second one must change nothing.

use tranship_coordinator::{DestinationPort, DestinationStep, Failure, Fault, Retry, SourcePort, SourceStep};
use tranship_types::{Phase, Side};

use crate::stage::{Request, Response, Scene, Stage};
use crate::world::World;

/// The source's port, for the migration of this number.
pub struct SourceEnd<'a>(pub &'a Stage, pub usize);

/// The destination's port, for the migration of this number.
pub struct DestinationEnd<'a>(pub &'a Stage, pub usize);

impl SourceEnd<'_> {
    /// Asks, and waits for the answer.
    pub fn request(&self, request: Request, wanted: &Response) -> Result<(), Failure> {
        let broken = || Failure::new("the link broke");
        if !self.0.turn(Side::Source, format_args!("asks {request:?}"), |scene| scene.ask(self.1, request)) {
            return Err(broken());
        }
        loop {
            let answer = self.0.turn(Side::Source, format_args!("waits: {wanted:?}"), Scene::answered);
            match answer.map_err(|()| broken())? {
                None => {}
                Some(Response::Failed(why)) => return Err(Failure::new(why)),
                Some(answer) => {
                    assert_eq!(answer, *wanted, "the answer to another question");
                    return Ok(());
                }
            }
        }
    }

    pub fn dial(&self) -> Result<(), Failure> {
        let made = self.0.turn(Side::Source, "dials", Scene::dial);
        made.then_some(()).ok_or_else(|| Failure::new("the destination cannot be reached"))
    }

    fn link(&self) -> Result<(), Failure> {
        match self.0.turn(Side::Source, "looks at the link", |scene| scene.linked()) {
            true => Ok(()),
            false => self.dial(),
        }
    }
}

impl SourcePort for SourceEnd<'_> {
    fn run(&mut self, step: SourceStep) -> Result<(), Failure> {
        self.0.turn(Side::Source, format_args!("does {step}"), |scene| scene.world.source_does(step));
        match step {
            SourceStep::Connect => self.dial()?,
            SourceStep::Offer => self.request(Request::Offer, &Response::Prepared)?,
            SourceStep::AwaitReady => self.request(Request::Ready, &Response::Ready)?,
            SourceStep::Deliver => {
                self.link()?;
                self.request(Request::Commit, &Response::Running)?;
            }
            SourceStep::Drain => {
                self.link()?;
                self.request(Request::Drained, &Response::Drained)?;
            }
            // Nothing depends on it: a destination that was not told remembers the migration.
            SourceStep::Release => drop(self.request(Request::Released, &Response::Drained)),
            _ => {}
        }
        let done = self.0.turn(Side::Source, format_args!("has done {step}"), |scene| {
            scene.fail_once(Side::Source, &step.to_string())
        });
        panic_or(self.0, done)
    }

    fn undo(&mut self, step: SourceStep) -> Result<(), Failure> {
        let undone = self.0.turn(Side::Source, format_args!("undoes {step}"), |scene| {
            scene.undo_twice(Side::Source, &step.to_string(), |world| world.source_undoes(step))
        });
        panic_or(self.0, undone)?;
        self.0.turn(Side::Source, format_args!("has undone {step}"), |_| Ok(()))
    }

    fn entered(&mut self, phase: Phase) {
        self.0.turn(Side::Source, format_args!("enters {phase}"), |_| ());
    }

    fn try_again(&mut self, step: SourceStep, failure: &Failure) -> Retry {
        assert_injected(&failure.message);
        self.0.turn(Side::Source, format_args!("will try {step} again: {failure}"), |scene| {
            if std::mem::take(&mut scene.stopping) {
                Retry::Stop
            } else if std::mem::take(&mut scene.word) {
                Retry::GiveUp(Failure::new("the operator says that the destination is lost"))
            } else {
                Retry::Again
            }
        })
    }

    fn inject(&mut self, fault: Fault) {
        inject(self.0, Side::Source, fault);
    }
}

impl DestinationPort for DestinationEnd<'_> {
    fn run(&mut self, step: DestinationStep) -> Result<(), Failure> {
        let migration = self.1;
        self.0.turn(Side::Destination, format_args!("does {step}"), |scene| {
            scene.world.destination_does(migration, step)
        })?;
        let done = self.0.turn(Side::Destination, format_args!("has done {step}"), |scene| {
            scene.fail_once(Side::Destination, &step.to_string())
        });
        panic_or(self.0, done)
    }

    fn undo(&mut self, step: DestinationStep) -> Result<(), Failure> {
        let undone = self.0.turn(Side::Destination, format_args!("undoes {step}"), |scene| {
            scene.undo_twice(Side::Destination, &step.to_string(), |world| world.destination_undoes(self.1, step))
        });
        panic_or(self.0, undone)?;
        self.0.turn(Side::Destination, format_args!("has undone {step}"), |_| Ok(()))
    }

    fn inject(&mut self, fault: Fault) {
        inject(self.0, Side::Destination, fault);
    }
}

impl Scene {
    fn fail_once(&mut self, side: Side, step: &str) -> Result<(), Failure> {
        match self.failing_action.take_if(|(at, name)| *at == side && name == step) {
            None => Ok(()),
            Some(_) => Err(Failure::new(format!("{step} does not work"))),
        }
    }

    fn undo_twice(&mut self, side: Side, step: &str, undo: impl Fn(&mut World)) -> Result<(), Failure> {
        if self.failing_undo.take_if(|(at, name)| *at == side && name == step).is_some() {
            return Err(Failure::new("it is stuck"));
        }
        undo(&mut self.world);
        let once = self.world.clone();
        undo(&mut self.world);
        assert_eq!(self.world, once, "undoing {step} twice is not undoing it once");
        Ok(())
    }
}

/// The error of an action or an undo, or a panic in its place. Not on the stage: whoever acts there must not panic.
fn panic_or(stage: &Stage, result: Result<(), Failure>) -> Result<(), Failure> {
    result.inspect_err(|failure| assert!(!stage.case.panics, "an injected panic: {failure}"))
}

/// What fails because of a panic fails because of one that was asked for; any other is that of an assertion of this
/// test.
pub fn assert_injected(message: &str) {
    let unexpected = message.contains("failed internally") && !message.contains("an injected panic");
    assert!(!unexpected, "{message}");
}

fn inject(stage: &Stage, side: Side, fault: Fault) {
    match fault {
        Fault::Die => stage.die(side),
        Fault::Cut => stage.turn(side, "loses the link", Scene::hang_up),
        Fault::Error | Fault::Panic | Fault::KillCriu | Fault::Hold | Fault::Delay(_) => {
            unreachable!("{fault:?} is no affair of this world's ports")
        }
    }
}
