"""Data sets on the hub, of which a server of the test's own is a stand-in."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pytest
from pyarrow import parquet

COMMIT = "0123456789abcdef" * 2 + "01234567"
GOOD = {"README.md": b"---\nlicense: mit\n---\n# Texts\n", "data/train.jsonl": b'{"text": "one"}\n{"text": "two"}\n'}
CARD = "---\nconfigs:\n- config_name: default\n  {}\n---\n"

READ = """
import json, sys
from opendiloco.config.data import SourceSection
from opendiloco.data.corpus import open_corpus
from opendiloco.errors import DataError
for source, streaming in json.loads(sys.argv[1]):
    try:
        read = open_corpus(SourceSection(source=source, streaming=streaming)).documents()
        found = [one.text.decode() for one in read]
    except DataError as error:
        found = error.message
    print(json.dumps(found))
"""


class Hub:
    """A server of repositories, `files[name][path]`; it notes the requests for all else."""

    def __init__(self, port: int, files: dict[str, dict[str, bytes]]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.files = files
        self.others = list[str]()

    def read(self, *sources: tuple[str, bool], folder: Path) -> list[str | list[str]]:
        """Return each source's texts, or the message of the error that it is refused with."""
        environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"} | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(folder / "hub"),
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-c", READ, json.dumps(sources)]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        return [json.loads(line) for line in ended.stdout.splitlines()]


@contextmanager
def hub_of(files: dict[str, dict[str, bytes]]) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            asked = self.rfile.read(size).decode()
            path = unquote(urlsplit(self.path).path)
            api, _, rest = path.partition("/api/datasets/")
            name = "/".join((rest if not api else path.removeprefix("/datasets/")).split("/")[:2])
            if name not in hub.files:
                hub.others.append(f"{self.command} {self.path}")
                return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            held = hub.files[name]
            about = [
                {"type": "file", "path": path, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                for path, text in held.items()
            ]
            folders = sorted({str(Path(path).parent) for path in held} - {"."})
            about += [{"type": "directory", "path": one, "oid": COMMIT} for one in folders]
            if "/resolve/" in path:
                return self.resolve(held, path.partition(f"/resolve/{COMMIT}/")[2])
            if "/paths-info/" in path:
                found = [one for one in about if f"paths={one['path']}&" in f"{unquote(asked)}&"]
                return self.reply(200, json.dumps(found).encode())
            if "/tree/" in path:
                below = path.partition(f"/tree/{COMMIT}")[2].strip("/")
                deep = "recursive=True" in self.path
                found = [one for one in about if is_below(str(one["path"]), below, deep)]
                return self.reply(200, json.dumps(found).encode())
            siblings = [{"rfilename": path} for path in held]
            return self.reply(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

        def resolve(self, held: dict[str, bytes], file: str) -> None:
            if file not in held:
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            part = held[file][int(asked[1]) : int(asked[2]) + 1] if asked else held[file]
            tag = hashlib.sha1(held[file]).hexdigest()
            return self.reply(206 if asked else 200, part, {"ETag": f'"{tag}"'})

        def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            about = {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, "Content-Type": "application/json"}
            for key, value in (about | (headers or {})).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    for method in ("GET", "HEAD", "POST"):
        setattr(Handler, f"do_{method}", Handler.answer)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        hub = Hub(server.server_port, files)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield hub
        server.shutdown()
        thread.join()


def is_below(path: str, folder: str, deep: bool) -> bool:
    inner = path.removeprefix(f"{folder}/") if folder else path
    return (not folder or path.startswith(f"{folder}/")) and (deep or "/" not in inner)


def test_a_data_set_on_the_hub_is_read_whatever_lies_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "texts.py").write_text("raise AssertionError")
    rows, file = pa.table({"text": ["one", "two"]}), pa.BufferOutputStream()
    parquet.write_table(rows, file)
    with hub_of({"some/texts": GOOD, "some/rows": {"train.parquet": file.getvalue().to_pybytes()}}) as hub:
        sources = [(name, streaming) for name in hub.files for streaming in (False, True)]
        assert hub.read(*sources, folder=tmp_path) == [["one", "two"]] * 4


@pytest.mark.parametrize("streaming", [False, True])
def test_a_card_on_the_hub_names_nothing_elsewhere(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "private.jsonl").write_text('{"text": "not for strangers"}\n', encoding="utf-8")
    with hub_of({}) as elsewhere:
        entries = [
            f"data_files: {elsewhere.url}/a/train.jsonl",
            f"data_files: zip://a.jsonl::{elsewhere.url}/a/b.zip",
            f"data_files: {tmp_path}/private.jsonl",
            f"data_dir: {elsewhere.url}/a",
            f"data_dir: {tmp_path}",
            "data_files: data/train.jsonl\n  version: ../../../../../elsewhere",
        ]
        files = {
            f"some/evil{place}": GOOD | {"README.md": CARD.format(one).encode()} for place, one in enumerate(entries)
        }
        with hub_of(files) as hub:
            said = hub.read(*((name, streaming) for name in files), folder=tmp_path)
    assert all("is outside of the data set" in str(one) for one in said[:-1]), said
    assert "names another folder" in said[-1]
    assert elsewhere.others == []
    assert not list(tmp_path.rglob("elsewhere*"))
