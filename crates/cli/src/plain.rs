//! Answers of an agent as a terminal may show them.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tranship_types::escaped;

/// The same answer with all its texts [escaped]. Names in it may be those of a container's programs, and causes the words of
/// another node. For people only: programs get what there is.
pub fn plain<T: Serialize + DeserializeOwned + Clone>(answer: &T) -> T {
    let plain = serde_json::to_value(answer).and_then(|mut value| {
        escape(&mut value);
        serde_json::from_value(value)
    });
    // What came as JSON can be written as JSON; names that were checked have nothing to escape.
    plain.unwrap_or_else(|_| answer.clone())
}

fn escape(value: &mut Value) {
    match value {
        Value::String(text) => *text = escaped(text),
        Value::Array(values) => values.iter_mut().for_each(escape),
        Value::Object(fields) => {
            *fields = std::mem::take(fields)
                .into_iter()
                .map(|(key, mut value)| {
                    escape(&mut value);
                    (escaped(&key), value)
                })
                .collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use tranship_types::{Blocker, BlockerKind};

    use super::*;
    use crate::show::report::tests::moved;

    #[test]
    fn texts_of_an_answer_are_escaped_and_all_else_is_kept() {
        let report = moved();
        assert_eq!(plain(&report), report);
        let mut hostile = Blocker::new(BlockerKind::Process, "", "");
        (hostile.cause, hostile.remedy) = ("\u{1b}]0;owned\u{7}".into(), "a\nb".into());
        let shown = plain(&hostile);
        assert_eq!((shown.cause.as_str(), shown.remedy.as_str()), ("\\u{1b}]0;owned\\u{7}", "a\\nb"));
    }
}
