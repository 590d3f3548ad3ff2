//! What a blackout was spent on, as pieces that do not overlap and add up to it.

/// A piece of a blackout.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Slice {
    /// The part of the work.
    pub name: String,
    /// How long, in ms.
    pub ms: f64,
}

/// Name of what no part accounts for.
pub const REST: &str = "between the parts";

/// Cuts a blackout into slices by its parts (name, begin, end; ms from the freeze), which may overlap: every moment counts
/// for the part that began last, which is the innermost one, or the latest to join others at work. The slices are in
/// the order in which they first appear and add up to `blackout_ms`.
pub fn slices(parts: &[(String, f64, f64)], blackout_ms: f64) -> Vec<Slice> {
    let clamp = |time: f64| time.clamp(0.0, blackout_ms);
    let mut edges: Vec<_> = parts.iter().flat_map(|p| [clamp(p.1), clamp(p.2)]).chain([0.0, blackout_ms]).collect();
    edges.sort_by(f64::total_cmp);
    edges.dedup();
    let mut slices: Vec<Slice> = Vec::new();
    for edge in edges.windows(2) {
        let (begin, end) = (edge[0], edge[1]);
        let at_work = parts.iter().filter(|p| p.1 <= begin && p.2 >= end);
        let name = at_work.max_by(|a, b| a.1.total_cmp(&b.1)).map_or(REST, |p| &p.0);
        match slices.iter_mut().find(|s| s.name == name) {
            Some(slice) => slice.ms += end - begin,
            None => slices.push(Slice { name: name.to_owned(), ms: end - begin }),
        }
    }
    slices
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(parts: &[(&str, f64, f64)], blackout: f64) -> Vec<(String, f64)> {
        let parts: Vec<_> = parts.iter().map(|p| (p.0.to_owned(), p.1, p.2)).collect();
        slices(&parts, blackout).into_iter().map(|s| (s.name, s.ms)).collect()
    }

    fn named(pairs: &[(&str, f64)]) -> Vec<(String, f64)> {
        pairs.iter().map(|(name, ms)| ((*name).to_owned(), *ms)).collect()
    }

    #[test]
    fn slices_add_up_to_the_blackout() {
        let found = cut(&[("before", -50.0, -1.0), ("dump", -5.0, 40.0), ("restore", 50.0, 200.0)], 100.0);
        assert_eq!(found, named(&[("dump", 40.0), (REST, 10.0), ("restore", 50.0)]));
    }

    #[test]
    fn an_inner_part_is_cut_out_of_the_outer_one() {
        let found = cut(&[("memory", 0.0, 100.0), ("dump", 10.0, 30.0)], 100.0);
        assert_eq!(found, named(&[("memory", 80.0), ("dump", 20.0)]));
    }

    #[test]
    fn without_parts_all_is_unaccounted_for() {
        assert_eq!(cut(&[], 7.0), named(&[(REST, 7.0)]));
    }
}
