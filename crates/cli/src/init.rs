//! `tranship init`: keys and certificates for the nodes, and what to do with them.

use std::fmt::Write;
use std::path::Path;

use tranship_transport::pki::{self, PkiError, PkiReport};
use tranship_types::NodeName;

/// Makes them below `dir`; returns what to tell the user.
pub fn init(dir: &Path, nodes: &[NodeName], renew: bool) -> anyhow::Result<String> {
    match pki::init(dir, nodes, renew) {
        Ok(report) => Ok(instructions(dir, &report)),
        Err(e @ PkiError::File { .. }) => {
            Err(anyhow::anyhow!("{:#}; run as root, or choose another place with --dir", anyhow::Error::from(e)))
        }
        Err(e) => Err(e.into()),
    }
}

/// Adds the certificates of these nodes to the revocation list in `dir`; returns what to tell the user.
pub fn revoke(dir: &Path, nodes: &[NodeName]) -> anyhow::Result<String> {
    let list = pki::revoke(dir, nodes)?;
    let (list, names) = (list.display(), nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(", "));
    Ok(format!(
        "The revocation list {list} has the certificates of {names} now. Copy it to every other node, and have its agent read it:\n\n  \
         scp {list} root@NODE:/etc/tranship/tls/\n  ssh root@NODE systemctl reload transhipd\n\n\
         Each agent's [tls] needs crl = \"/etc/tranship/tls/ca.crl\". A new certificate for such a node: `tranship init --renew`.\n"
    ))
}

fn instructions(dir: &Path, report: &PkiReport) -> String {
    let dir = dir.display();
    let ca = if report.ca_created {
        "Made a certificate authority"
    } else {
        "Used the certificate authority that was there"
    };
    let mut text =
        format!("{ca} ({}). Give each node its own three files, readable by root alone:\n\n", report.ca.display());
    for (node, files) in &report.nodes {
        let files = files.display();
        let _ = writeln!(text, "  ssh root@{node} install -d -m 700 /etc/tranship/tls");
        let _ = writeln!(text, "  scp {files}/{{ca.crt,node.crt,node.key}} root@{node}:/etc/tranship/tls/");
    }
    let _ = write!(
        text,
        "\nKeep {dir}/ca.key to yourself, no node needs it: whoever has it can pass for any node.\n\
         To add a node later, run `tranship init` with this --dir and the new node's name.\n"
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_is_told_its_files() {
        let nodes = ["a", "b"].map(|n| (n.parse().unwrap(), format!("/pki/{n}").into()));
        let report = PkiReport { ca: "/pki/ca.crt".into(), ca_created: true, nodes: nodes.into() };
        assert_eq!(
            instructions(Path::new("/pki"), &report),
            "\
Made a certificate authority (/pki/ca.crt). Give each node its own three files, readable by root alone:

  ssh root@a install -d -m 700 /etc/tranship/tls
  scp /pki/a/{ca.crt,node.crt,node.key} root@a:/etc/tranship/tls/
  ssh root@b install -d -m 700 /etc/tranship/tls
  scp /pki/b/{ca.crt,node.crt,node.key} root@b:/etc/tranship/tls/

Keep /pki/ca.key to yourself, no node needs it: whoever has it can pass for any node.
To add a node later, run `tranship init` with this --dir and the new node's name.
"
        );
    }
}
