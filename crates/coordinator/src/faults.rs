//! Faults on purpose: how the tests fail every step and kill every process at every boundary.
//!
//! An agent that is started with `TRANSHIP_FAULTS` set (a comma-separated list of `SIDE.STEP.WHEN.WHAT`, for instance
//! `source.freeze.after.die`) injects each of them once. Without the variable none exists.

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::time::Duration;

use tranship_types::Side;

use crate::Failure;

/// Before or after a step's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// After the journal entry, before the action.
    Before,
    /// After the action, before anything else.
    After,
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The step reports an error.
    Error,
    /// The step panics.
    Panic,
    /// The agent is killed (SIGKILL).
    Die,
    /// The criu of this side is killed (SIGKILL), if one runs.
    KillCriu,
    /// The link to the other agent is cut.
    Cut,
    /// The agent stops (SIGSTOP) until it is told to go on, so that something else can be done to it just there.
    Hold,
    /// The step takes so much longer.
    Delay(Duration),
}

impl FromStr for Fault {
    type Err = ();

    fn from_str(s: &str) -> Result<Self, ()> {
        Ok(match s {
            "error" => Fault::Error,
            "panic" => Fault::Panic,
            "die" => Fault::Die,
            "kill-criu" => Fault::KillCriu,
            "cut" => Fault::Cut,
            "hold" => Fault::Hold,
            _ => {
                let ms = s.strip_prefix("delay-").and_then(|ms| ms.parse().ok()).ok_or(())?;
                Fault::Delay(Duration::from_millis(ms))
            }
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Injection {
    side: Side,
    step: String,
    when: When,
    fault: Fault,
}

/// A specification that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the fault {0:?} is not of the form SIDE.STEP.WHEN.WHAT (source|destination, a step, before|after, error|panic|die|kill-criu|cut|hold|delay-MS)"
)]
pub struct FaultSpecError(String);

impl FromStr for Injection {
    type Err = FaultSpecError;

    fn from_str(s: &str) -> Result<Self, FaultSpecError> {
        let bad = || FaultSpecError(s.to_owned());
        let parts: Vec<&str> = s.split('.').collect();
        let [side, step, when, what] = parts[..] else { return Err(bad()) };
        Ok(Injection {
            side: match side {
                "source" => Side::Source,
                "destination" => Side::Destination,
                _ => return Err(bad()),
            },
            step: step.to_owned(),
            when: match when {
                "before" => When::Before,
                "after" => When::After,
                _ => return Err(bad()),
            },
            fault: what.parse().map_err(|()| bad())?,
        })
    }
}

/// The faults that are still to come.
#[derive(Debug, Default)]
pub struct FaultPlan(Mutex<Vec<Injection>>);

impl FaultPlan {
    /// Reads a comma-separated list; an empty one is a plan without faults.
    pub fn parse(spec: &str) -> Result<Self, FaultSpecError> {
        let list: Result<Vec<_>, _> =
            spec.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::parse).collect();
        Ok(Self(Mutex::new(list?)))
    }

    /// Has the fault happen that is due here, if any: what is not in a step's own power is left to `inject`.
    ///
    /// # Panics
    /// If the fault is a panic.
    pub(crate) fn pass(
        &self,
        side: Side,
        step: impl fmt::Display,
        when: When,
        inject: impl FnOnce(Fault),
    ) -> Result<(), Failure> {
        match self.due(side, &step, when) {
            None => Ok(()),
            Some(Fault::Error) => Err(Failure::new(format!("an injected fault at {step}"))),
            Some(Fault::Panic) => panic!("an injected panic at {step}"),
            Some(other) => {
                inject(other);
                Ok(())
            }
        }
    }

    /// The fault that is due here, if any; each is due once.
    pub fn due(&self, side: Side, step: impl fmt::Display, when: When) -> Option<Fault> {
        let mut list = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if list.is_empty() {
            return None;
        }
        let step = step.to_string();
        let at = list.iter().position(|i| i.side == side && i.step == step && i.when == when)?;
        Some(list.remove(at).fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_due_once_at_its_place() {
        let plan = FaultPlan::parse("source.freeze.after.die, destination.pager.before.error").unwrap();
        assert_eq!(plan.due(Side::Source, "freeze", When::Before), None);
        assert_eq!(plan.due(Side::Source, "freeze", When::After), Some(Fault::Die));
        assert_eq!(plan.due(Side::Source, "freeze", When::After), None);
        assert_eq!(plan.due(Side::Destination, "pager", When::Before), Some(Fault::Error));
        let panic = FaultPlan::parse("source.arm.before.panic").unwrap();
        assert_eq!(panic.due(Side::Source, "arm", When::Before), Some(Fault::Panic));
        let late = FaultPlan::parse("destination.restore.before.delay-3000").unwrap();
        let delay = Fault::Delay(Duration::from_secs(3));
        assert_eq!(late.due(Side::Destination, "restore", When::Before), Some(delay));
        assert!(FaultPlan::parse("destination.restore.before.delay-").is_err());
        assert!(FaultPlan::parse("source.freeze.after").is_err());
        assert!(FaultPlan::parse("").is_ok());
    }
}
