//! What the options of a move come to on this node: the policy's limits, and the refusal of what makes no sense.

use std::time::Duration;

use tranship_api::{ErrorKind, ServiceError};
use tranship_memory::policy::Limits;
use tranship_types::MoveOptions;

/// What the policy of the rounds is to keep to.
pub fn limits(options: &MoveOptions) -> Limits {
    let defaults = Limits::default();
    Limits {
        budget: options.blackout_budget_ms.map_or(defaults.budget, |ms| Duration::from_millis(ms.into())),
        max_rounds: options.max_rounds.unwrap_or(defaults.max_rounds),
    }
}

/// Whether they make sense together: rather no move than one that ignores a wish.
pub fn check(options: &MoveOptions) -> Result<(), ServiceError> {
    if let Err(error) = options.check() {
        let text = error.to_string();
        let (cause, remedy) = text.split_once("; ").unwrap_or((&text, ""));
        return Err(ServiceError::new(ErrorKind::Invalid, cause, remedy));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranship_types::{Bandwidth, Mode};

    #[test]
    fn what_is_senseless_is_refused_with_a_remedy() {
        let precopy = MoveOptions::in_mode(Mode::Precopy);
        for (options, word) in [
            (MoveOptions { no_throttle: true, ..precopy.clone() }, "without safe"),
            (MoveOptions { bandwidth: Some(Bandwidth(0)), ..precopy.clone() }, "out of range"),
        ] {
            let error = check(&options).unwrap_err();
            assert!(error.body.message.contains(word) && !error.body.remedy.is_empty(), "{error}");
        }
        assert_eq!(check(&MoveOptions { safe: true, ..precopy.clone() }), Ok(()));
    }

    #[test]
    fn the_policy_gets_what_was_asked_for() {
        let asked = MoveOptions { blackout_budget_ms: Some(250), max_rounds: Some(3), ..MoveOptions::default() };
        assert_eq!(limits(&asked), Limits { budget: Duration::from_millis(250), max_rounds: 3 });
        assert_eq!(limits(&MoveOptions::default()), Limits::default());
    }
}
