//! Something else to compute, for nodes that are to be busy.

use std::process::{Child, Stdio};

use anyhow::{Context, Result};
use tranship_lab::Lab;

/// A process that computes until it is dropped.
pub struct Hog(Child);

impl Drop for Hog {
    fn drop(&mut self) {
        // It has nothing to finish.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts as many of them on each node as the machine has cores.
pub fn start(lab: &Lab, nodes: [&str; 2]) -> Result<Vec<Hog>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let hog = |node: &str| {
        let mut command = lab.command(node, &["sh", "-c", "while :; do :; done"])?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Hog(command.spawn().with_context(|| format!("cannot make node {node} busy"))?))
    };
    nodes.iter().flat_map(|node| std::iter::repeat_n(*node, cores)).map(hog).collect()
}
