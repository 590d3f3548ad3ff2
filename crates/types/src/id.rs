use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name or id that is not acceptable; the text says which and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {name:?} is not usable: {why}")]
pub struct InvalidName {
    /// What was being named, e.g. "node name".
    pub what: &'static str,
    /// The offending text, cut to 80 characters.
    pub name: String,
    /// The rule that it breaks.
    pub why: &'static str,
}

fn check(what: &'static str, name: &str, max: usize) -> Result<(), InvalidName> {
    let fail = |why| Err(InvalidName { what, name: name.chars().take(80).collect(), why });
    if name.is_empty() {
        return fail("it is empty");
    }
    if name.len() > max {
        return fail("it is too long");
    }
    if !name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')) {
        return fail("only letters, digits, '-', '_' and '.' are allowed");
    }
    if !name.as_bytes()[0].is_ascii_alphanumeric() {
        return fail("it must begin with a letter or digit");
    }
    Ok(())
}

/// Checks that engines can have a container of this name: one file name, without blanks and control characters.
///
/// # Errors
/// [`InvalidName`] with the rule that the name breaks.
pub fn check_container_name(name: &str) -> Result<(), InvalidName> {
    let why = match name {
        "" => "it is empty",
        _ if name.len() > 255 => "it is too long",
        _ if name.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control()) => "no container has it",
        _ => return Ok(()),
    };
    Err(InvalidName { what: "container name", name: name.chars().take(80).collect(), why })
}

macro_rules! name_type {
    ($(#[$doc:meta])* $ty:ident, $what:literal, $max:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        #[serde(try_from = "String", into = "String")]
        pub struct $ty(String);

        impl $ty {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $ty {
            type Err = InvalidName;
            fn from_str(s: &str) -> Result<Self, InvalidName> {
                check($what, s, $max)?;
                Ok(Self(s.to_owned()))
            }
        }

        impl TryFrom<String> for $ty {
            type Error = InvalidName;
            fn try_from(s: String) -> Result<Self, InvalidName> {
                s.parse()
            }
        }

        impl From<$ty> for String {
            fn from(n: $ty) -> String {
                n.0
            }
        }

        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }
    };
}

name_type!(
    /// The name of a node as its certificate states it (a DNS label: `b`, `rack3-host7`).
    NodeName, "node name", 63
);
name_type!(
    /// The id of one migration: unique over all nodes and time, short enough to type; safe as a file name.
    MigrationId, "migration id", 40
);

name_type!(
    /// The id of the move of a group of containers, of the same kind as a [`MigrationId`].
    GroupId, "group id", 40
);

/// Eight characters of Crockford's base 32.
fn letters(bytes: [u8; 5]) -> String {
    const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
    let bits = bytes.iter().fold(0u64, |acc, b| acc << 8 | u64::from(*b));
    (0..8).rev().map(|i| ALPHABET[(bits >> (5 * i) & 31) as usize] as char).collect()
}

impl MigrationId {
    /// Makes an id from 5 random bytes, e.g. `m-4k7tq0zd`.
    pub fn from_random(bytes: [u8; 5]) -> Self {
        Self(format!("m-{}", letters(bytes)))
    }
}

impl GroupId {
    /// What every one begins with.
    pub const PREFIX: &str = "g-";

    /// Makes an id from 5 random bytes, e.g. `g-4k7tq0zd`.
    pub fn from_random(bytes: [u8; 5]) -> Self {
        Self(format!("{}{}", Self::PREFIX, letters(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_a_directory_are_refused() {
        for bad in ["", "..", ".hidden", "a/b", "-x", "a b", "ü"] {
            assert!(bad.parse::<NodeName>().is_err(), "{bad:?}");
        }
        assert!("rack3-host7.example".parse::<NodeName>().is_ok());
    }

    #[test]
    fn names_that_no_engine_takes_are_refused_with_the_rule() {
        let long = "a".repeat(3000);
        for (name, why) in
            [("", "empty"), (long.as_str(), "too long"), ("../etc", "no container"), ("a b", "no container")]
        {
            let wrong = check_container_name(name).unwrap_err().to_string();
            assert!(wrong.contains(why) && wrong.len() < 150, "{wrong}");
        }
        for name in ["redis", "shop-db-1", "ядро", "a.b_c"] {
            assert_eq!(check_container_name(name), Ok(()));
        }
    }

    #[test]
    fn ids_differ_by_every_bit_and_parse_back() {
        let a = MigrationId::from_random([0, 0, 0, 0, 1]);
        let b = MigrationId::from_random([0x80, 0, 0, 0, 1]);
        assert_ne!(a, b);
        assert_eq!(a.as_str().parse::<MigrationId>().unwrap(), a);
        assert_eq!(a.as_str(), "m-00000001");
    }
}
