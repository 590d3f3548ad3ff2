/// A text in which characters that a terminal obeys are escaped (`\\u{1b}`, `\\n`): control characters, and those that change
/// the direction of what follows. Names and paths of a container's programs, and words of other nodes, may have any.
pub fn escaped(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut shown, c| {
        match is_obeyed(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
        shown
    })
}

/// Whether a terminal acts on a character rather than showing it.
fn is_obeyed(c: char) -> bool {
    let directs = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let ends_line = matches!(c, '\u{2028}' | '\u{2029}');
    c.is_control() || directs || ends_line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_escaped_and_nothing_else() {
        assert_eq!(escaped("ядро ü 日本 \\ \""), "ядро ü 日本 \\ \"");
        assert_eq!(escaped("\u{1b}[2J\r\n\u{9b}\u{7f}"), "\\u{1b}[2J\\r\\n\\u{9b}\\u{7f}");
        assert_eq!(escaped("gpj\u{202e}exe"), "gpj\\u{202e}exe");
    }
}
