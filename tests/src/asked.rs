//! What the environment asks of a test: which run of it, and how long.

use anyhow::{Context, Result};
use tranship_types::Mode;

/// A number or list from the environment; `None` if the variable is not set.
///
/// # Errors
/// If it makes no sense.
pub fn asked<T>(variable: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    parse(&text).map(Some).with_context(|| format!("{variable}={text} makes no sense"))
}

/// The modes that `TRANSHIP_MODES` names.
///
/// # Errors
/// If one of them is none.
pub fn asked_modes() -> Result<Option<Vec<Mode>>> {
    let named = |name: &str| Mode::ALL.into_iter().find(|mode| mode.to_string() == name);
    asked("TRANSHIP_MODES", |text| text.split(',').map(named).collect())
}

/// The arguments of a program that is given a seed, and what a variable passes on to it.
pub fn arguments(seed: u64, variable: &str) -> Vec<String> {
    let more = std::env::var(variable).unwrap_or_default();
    [format!("--seed={seed}")].into_iter().chain(more.split_whitespace().map(str::to_owned)).collect()
}
