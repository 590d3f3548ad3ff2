//! Who moves after whom.

use std::collections::{BTreeMap, BTreeSet};

/// A container in its place in the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranked {
    /// Its name.
    pub name: String,
    /// The ranks of those that move before it; each is lower than its own.
    pub after: Vec<usize>,
    /// 0 where there are none, else one more than the highest of theirs.
    pub level: usize,
}

/// Why there is no order; the text says what, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// There is nothing to move.
    #[error("the group has no containers; name at least one")]
    Empty,
    /// A name that is not one of the group's.
    #[error("{of} depends on {name}, which is not in the group; add it to the group, or leave the dependency out")]
    Unknown {
        /// Who depends on it.
        of: String,
        /// The name.
        name: String,
    },
    /// Containers that wait for each other.
    #[error("{} depend on each other in a circle; leave one of these dependencies out", .0.join(" → "))]
    Cycle(Vec<String>),
    /// A level names a container that is not one of the group's.
    #[error("the levels name {0}, which is not in the group; add it to the group, or leave it out of the levels")]
    UnknownInLevels(String),
    /// A container that is in two levels.
    #[error("the levels name {0} twice; leave it in one of them")]
    TwiceInLevels(String),
    /// A container without a level.
    #[error("{0} is in no level; put it into one of them")]
    NotInLevels(String),
}

/// Puts containers, each with the names of what it depends on, into an order in which each comes after all of those.
/// Levels, where there are any, take the dependencies' place: each container then comes after all of the level before.
///
/// # Errors
/// Where there is no such order.
pub fn rank(
    depends_on: &BTreeMap<String, BTreeSet<String>>,
    levels: &[Vec<String>],
) -> Result<Vec<Ranked>, OrderError> {
    if depends_on.is_empty() {
        return Err(OrderError::Empty);
    }
    if levels.is_empty() { by_dependencies(depends_on) } else { by_levels(depends_on, levels) }
}

/// For each member of an order, the ranks of those of the level before it, where levels of another kind name the same members.
///
/// # Errors
/// Where they do not.
pub fn in_levels(ranked: &[Ranked], levels: &[Vec<String>]) -> Result<Vec<Vec<usize>>, OrderError> {
    let names = ranked.iter().map(|own| (own.name.clone(), BTreeSet::new())).collect();
    let levelled = by_levels(&names, levels)?;
    let rank_of = |other: usize| ranked.iter().position(|own| own.name == levelled[other].name);
    let before =
        |own: &Ranked| levelled.iter().filter(|l| l.name == own.name).flat_map(|l| &l.after).copied().collect();
    let before: Vec<Vec<usize>> = ranked.iter().map(before).collect();
    Ok(before.into_iter().map(|others| others.into_iter().filter_map(rank_of).collect()).collect())
}

fn by_levels(
    depends_on: &BTreeMap<String, BTreeSet<String>>,
    levels: &[Vec<String>],
) -> Result<Vec<Ranked>, OrderError> {
    let mut ranked: Vec<Ranked> = Vec::new();
    let mut before = 0..0;
    for (level, names) in levels.iter().filter(|names| !names.is_empty()).enumerate() {
        let first = ranked.len();
        for name in names {
            if !depends_on.contains_key(name) {
                return Err(OrderError::UnknownInLevels(name.clone()));
            }
            if ranked.iter().any(|r| r.name == *name) {
                return Err(OrderError::TwiceInLevels(name.clone()));
            }
            ranked.push(Ranked { name: name.clone(), after: before.clone().collect(), level });
        }
        before = first..ranked.len();
    }
    match depends_on.keys().find(|name| !ranked.iter().any(|r| r.name == **name)) {
        Some(missing) => Err(OrderError::NotInLevels(missing.clone())),
        None => Ok(ranked),
    }
}

fn by_dependencies(depends_on: &BTreeMap<String, BTreeSet<String>>) -> Result<Vec<Ranked>, OrderError> {
    for (of, names) in depends_on {
        if let Some(name) = names.iter().find(|name| !depends_on.contains_key(*name)) {
            return Err(OrderError::Unknown { of: of.clone(), name: name.clone() });
        }
    }
    let mut ranked: Vec<Ranked> = Vec::new();
    while ranked.len() < depends_on.len() {
        let rank_of = |name: &String| ranked.iter().position(|r| r.name == *name);
        let ready = |(name, names): (&String, &BTreeSet<String>)| {
            let after = names.iter().map(rank_of).collect::<Option<Vec<_>>>()?;
            rank_of(name).is_none().then(|| (name.clone(), after))
        };
        let next: Vec<_> = depends_on.iter().filter_map(ready).collect();
        if next.is_empty() {
            return Err(OrderError::Cycle(cycle(depends_on, |name| rank_of(name).is_some())));
        }
        let level = ranked.last().map_or(0, |last| last.level + 1);
        ranked.extend(next.into_iter().map(|(name, after)| Ranked { name, after, level }));
    }
    Ok(ranked)
}

/// A circle among those that have no place, each of which depends on another one: its first name is also its last.
fn cycle(depends_on: &BTreeMap<String, BTreeSet<String>>, placed: impl Fn(&String) -> bool) -> Vec<String> {
    let mut path: Vec<&String> = depends_on.keys().find(|name| !placed(name)).into_iter().collect();
    while let Some(next) = path.last().and_then(|last| depends_on[*last].iter().find(|name| !placed(name))) {
        let seen = path.iter().position(|name| *name == next);
        path.push(next);
        if let Some(start) = seen {
            return path[start..].iter().map(|name| (*name).clone()).collect();
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(text: &[(&str, &[&str])]) -> BTreeMap<String, BTreeSet<String>> {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        text.iter().map(|(name, after)| ((*name).to_owned(), names(after))).collect()
    }

    fn levels(text: &[&[&str]]) -> Vec<Vec<String>> {
        text.iter().map(|level| level.iter().map(|name| (*name).to_owned()).collect()).collect()
    }

    #[test]
    fn each_comes_after_what_it_depends_on() {
        let web = group(&[("app", &["db", "cache"]), ("cache", &[]), ("db", &[]), ("web", &["app", "cache"])]);
        let ranked = rank(&web, &[]).unwrap();
        let shown: Vec<_> = ranked.iter().map(|r| (r.name.as_str(), r.level, r.after.as_slice())).collect();
        assert_eq!(shown, [("cache", 0, &[][..]), ("db", 0, &[]), ("app", 1, &[0, 1]), ("web", 2, &[2, 0])]);
    }

    #[test]
    fn levels_take_the_dependencies_place() {
        let web = group(&[("app", &["db"]), ("db", &[]), ("web", &["app"])]);
        let ranked = rank(&web, &levels(&[&["web"], &[], &["db", "app"]])).unwrap();
        let shown: Vec<_> = ranked.iter().map(|r| (r.name.as_str(), r.level, r.after.as_slice())).collect();
        assert_eq!(shown, [("web", 0, &[][..]), ("db", 1, &[0]), ("app", 1, &[0])]);
    }

    #[test]
    fn other_levels_are_of_the_same_members() {
        let web = group(&[("app", &["db"]), ("db", &[]), ("web", &["app"])]);
        let ranked = rank(&web, &[]).unwrap();
        let names: Vec<_> = ranked.iter().map(|own| own.name.as_str()).collect();
        assert_eq!(names, ["db", "app", "web"]);
        assert_eq!(in_levels(&ranked, &levels(&[&["app"], &["web", "db"]])).unwrap(), [vec![1], vec![], vec![1]]);
        assert!(
            in_levels(&ranked, &levels(&[&["app"], &["db"]])).unwrap_err().to_string().contains("web is in no level")
        );
    }

    #[test]
    fn what_has_no_order_is_named() {
        let said = |members: &[(&str, &[&str])], names: &[&[&str]]| {
            rank(&group(members), &levels(names)).unwrap_err().to_string()
        };
        assert!(said(&[], &[]).contains("no containers"));
        assert!(said(&[("a", &["b"])], &[]).contains("a depends on b, which is not in the group"));
        assert!(said(&[("a", &["a"])], &[]).starts_with("a → a depend"));
        let circle = said(&[("a", &["d"]), ("b", &["c"]), ("c", &["d", "e"]), ("d", &["b"]), ("e", &[])], &[]);
        assert!(circle.starts_with("d → b → c → d depend"), "{circle}");
        let two: &[(&str, &[&str])] = &[("a", &[]), ("b", &[])];
        assert!(said(two, &[&["a"]]).contains("b is in no level"));
        assert!(said(two, &[&["a"], &["b", "a"]]).contains("a twice"));
        assert!(said(two, &[&["a", "c"]]).contains("c, which is not in the group"));
    }
}
