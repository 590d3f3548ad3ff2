//! Changes to JSON whose shape nobody has checked: `serde_json`'s own indexing panics where it is another one.

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
