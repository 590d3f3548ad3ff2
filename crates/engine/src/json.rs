//! JSON whose shape nobody has checked: changes to it, for which `serde_json`'s own indexing panics where it is another
//! one, and what it says.

use serde_json::{Value, json};

/// The object under a key of an object. Where either is none, it becomes an empty one.
pub(crate) fn section<'a>(value: &'a mut Value, key: &str) -> &'a mut Value {
    if !value.is_object() {
        *value = json!({});
    }
    let section = &mut value[key];
    if !section.is_object() {
        *section = json!({});
    }
    section
}

/// The elements of an array; of anything else none.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// A text that is not empty.
pub(crate) fn said(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_takes_the_place_of_anything_else() {
        for mut value in [json!("x"), json!(7), json!([1]), json!({"linux": false}), Value::Null] {
            section(&mut value, "linux")["cgroupsPath"] = "/a".into();
            assert_eq!(value, json!({"linux": {"cgroupsPath": "/a"}}));
        }
        let mut kept = json!({"linux": {"seccomp": 1}, "hostname": "a"});
        section(&mut kept, "linux");
        assert_eq!(kept, json!({"linux": {"seccomp": 1}, "hostname": "a"}));
    }
}
