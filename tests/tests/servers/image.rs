//! Images such as the official ones, made of Debian's packages that this machine has.

use anyhow::Result;
use serde_json::json;
use tranship_e2e::{Dialect, Managed};
use tranship_lab::Lab;

/// A server's image: its files and those of all packages that it depends on, and what an image says of how to run it.
pub struct Image {
    /// What it is called.
    pub name: &'static str,
    /// The packages, with all that they depend on; a path stands for the package that brings it.
    pub packages: &'static [&'static str],
    /// Packages of which nothing else is needed.
    pub alone: &'static [&'static str],
    /// The user that owns the data.
    pub owner: (&'static str, u32),
    /// The user that the server is started as.
    pub user: &'static str,
    /// The port that it listens on.
    pub port: u16,
    /// The volumes; the first one has the data.
    pub volumes: &'static [&'static str],
    /// The signal that stops it.
    pub stop_signal: &'static str,
    /// A shell's script that adds files of the image's own; its working directory becomes the root.
    pub own: &'static str,
    /// A shell's script that becomes the server.
    pub start: &'static str,
}

/// An archive of the image with one layer, in the form that `docker save` writes. The whole of `/bin` and the like is in `/usr`, as in Debian's images.
const BUILD: &str = r#"set -e
rm -rf --one-file-system /run/image; mkdir -p /run/image/root; cd /run/image
for package in $PACKAGES; do
    case $package in /*) dpkg -S "$(readlink -f "$package")" | cut -d: -f1 ;; *) echo "$package" ;; esac
done > asked
apt-cache depends --recurse --important --installed $(cat asked) base-files coreutils dash findutils grep hostname sed |
    grep -E '^[a-z0-9]' | grep -vE '^((lib)?perl|debconf|dpkg)' | sort -u > packages
dpkg-query -L $(cat packages) $ALONE | grep '^/.' | grep -vE '^/usr/share/(doc|fonts|icons|info|lintian|locale|man)(/|$)' |
    sed -E 's,^/(bin|sbin|lib|lib64)(/|$),/usr/\1\2,; s,^/,,' | sort -u |
    while IFS= read -r file; do if [ -e "/$file" ] || [ -L "/$file" ]; then echo "$file"; fi; done > files
tar -C / --no-recursion -c -T files | tar -C root -x
cd root
for link in bin sbin lib lib64; do ln -s "usr/$link" "$link"; done
for volume in $VOLUMES; do mkdir -p ".$volume"; chown "$ID:$ID" ".$volume"; done
printf '%s\n' root:x:0:0::/root:/bin/sh "$OWNER:x:$ID:$ID::/:/bin/sh" > etc/passwd
printf '%s\n' root:x:0: "$OWNER:x:$ID:" > etc/group
eval "$OWN"
cd ..
tar -C root -cf layer.tar .
layer=$(sha256sum layer.tar | cut -d' ' -f1)
echo '{"architecture": "'$(dpkg --print-architecture)'", "os": "linux", "config": '"$CONFIG"',
    "rootfs": {"type": "layers", "diff_ids": ["sha256:'$layer'"]}}' > config.json
echo '[{"Config": "config.json", "RepoTags": ["'"$NAME"'"], "Layers": ["layer.tar"]}]' > manifest.json
tar -cf image.tar config.json layer.tar manifest.json"#;

impl Image {
    /// Makes the image on node `a`, in this engine.
    pub fn make(&self, lab: &Lab, engine: &Managed) -> Result<()> {
        (engine.prepare)(lab)?;
        let volumes: serde_json::Map<_, _> = self.volumes.iter().map(|v| ((*v).to_owned(), json!({}))).collect();
        let port = format!("{}/tcp", self.port);
        let config = json!({
            "User": self.user,
            "ExposedPorts": { port: {} },
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "Cmd": ["/bin/sh", "-c", self.start],
            "Volumes": volumes,
            "StopSignal": self.stop_signal,
        });
        let variables = [
            ("NAME", self.name),
            ("PACKAGES", &self.packages.join(" ")),
            ("ALONE", &self.alone.join(" ")),
            ("OWNER", self.owner.0),
            ("ID", &self.owner.1.to_string()),
            ("VOLUMES", &self.volumes.join(" ")),
            ("OWN", self.own),
            ("CONFIG", &config.to_string()),
        ]
        .map(|(name, value)| format!("{name}={value}"));
        let variables = variables.iter().map(String::as_str);
        lab.check("a", &["env"].into_iter().chain(variables).chain(["sh", "-c", BUILD]).collect::<Vec<_>>())?;
        let load: &[&str] = match engine.dialect {
            Dialect::Docker => &["load", "--input"],
            Dialect::Ctr => &["images", "import"],
        };
        (engine.command)(lab, "a", &[load, &["/run/image/image.tar"]].concat())?;
        lab.check("a", &["rm", "-r", "--one-file-system", "/run/image"])?;
        Ok(())
    }
}
