"""The reference page of all settings: `python -m opendiloco.settings.reference docs/options.md` writes it anew."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from opendiloco.settings.join_settings import SECTIONS, LogSettings
from opendiloco.settings.setting import Setting, settings_of

HEADING = """\
# Settings

<!-- Made by `python -m opendiloco.settings.reference docs/options.md`: change opendiloco/settings/join_settings.py. -->

Everything that `diloco-peer join` can be told is a setting, and there are three ways to say it. The first of these that
says anything counts:

1. the option on the command line: `--upload-limit 20`
2. the environment variable: `DILOCO_UPLOAD_LIMIT=20`
3. the key in the configuration file: `upload_limit = 20`

Otherwise the default holds. The file is TOML, without tables: `~/.config/diloco-peer/config.toml` (or below
`XDG_CONFIG_HOME`), or the one that `diloco-peer --config FILE …` or `DILOCO_CONFIG` names. It is checked as a whole: an
unknown key or a wrong value is an error (exit code 2) that names the file, the key and the remedy. Where a setting has
several values, the option is repeated, the variable has them separated by spaces (folders by colons), and the key has a
list.

```sh
diloco-peer config show                             # each value, and where it comes from
diloco-peer config show --json --upload-limit 20    # the same for what `join --upload-limit 20` would go by
```

```toml
run = "diloco:tiny-…@/ip4/192.0.2.2/tcp/31337/p2p/12D3KooW…"
upload_limit = 20
data = ["~/texts"]
```

Other commands take what they share with `join` from the same places: `run`, `initial_peers`, `state`, `identity` where
it is this user's own, and the log. `bootstrap` takes only the log, lest a node look for itself. An invite that has
addresses comes before `initial_peers` in the variable or the file, which may be about another swarm; the option adds to
the invite. Where none of them says an address, those count at which volunteers of this machine met others of the run.
"""


def reference_page() -> str:
    """Return the page's text."""
    return "\n".join([HEADING, *_tables()])


def _tables() -> Iterator[str]:
    for section in SECTIONS:
        note = " (options of `diloco-peer` itself: before the command)" if section is LogSettings else ""
        yield f"## {section.TITLE}{note}\n"
        yield "| option | variable | key | default | meaning |"
        yield "| --- | --- | --- | --- | --- |"
        yield from map(_row, settings_of(section))
        yield ""


def _row(setting: Setting) -> str:
    value = "" if setting.is_flag else f" {setting.about.metavar or '|'.join(setting.choices) or 'TEXT'}"
    option = f"{setting.spelling.replace('/', ' / ')}{value}".replace("|", "\\|")
    shown = setting.default_text or ("required" if setting.is_required else "")
    return f"| `{option}` | `{setting.variable}` | `{setting.name}` | {shown} | {setting.about.help} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference_page(), encoding="utf-8")
