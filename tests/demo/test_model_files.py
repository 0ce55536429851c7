"""The shipped folder: small, safe to load, and nothing in it of the machine that made it."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from safetensors import safe_open

from raymod.demo import model_path

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 6_000_000
FILES = sorted(path for path in model_path().rglob("*") if path.is_file())
NAMES = [path.relative_to(model_path()).as_posix() for path in FILES]
A_PATH = re.compile(r"^(~/|\.{0,2}/\w|[A-Za-z]:[\\/])")


def values(content: Any) -> Iterator[Any]:
    """All keys and values of a JSON tree that are not trees themselves."""
    if isinstance(content, dict):
        yield from content
        content = content.values()
    if isinstance(content, str) or not hasattr(content, "__iter__"):
        yield content
    else:
        for part in content:
            yield from values(part)


def test_the_folder_is_small() -> None:
    assert 0 < sum(path.stat().st_size for path in FILES) <= LARGEST_BYTES


def test_weights_are_safetensors_in_float32() -> None:
    weights = [path for path in FILES if path.suffix != ".json"]
    assert {path.suffix for path in weights} == {".safetensors"}
    assert len(weights) == 4
    for path in weights:
        with safe_open(path, framework="pt") as tensors:
            dtypes = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        assert dtypes == {"F32"}, path.name


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".json")])
def test_a_config_names_no_path(name: str) -> None:
    content = json.loads((model_path() / name).read_text(encoding="utf-8"))
    found = [value for value in values(content) if isinstance(value, str)]
    assert found
    assert "_name_or_path" not in found
    assert [value for value in found if A_PATH.match(value)] == []


@pytest.mark.parametrize("value", ["/home" + "/ann", "C:\\models", "~/x", "./model", "../model"])
def test_a_path_is_seen(value: str) -> None:
    tree = {"a": [{"b": value}]}
    assert [part for part in values(tree) if A_PATH.match(part)] == [value]


def test_it_loads_without_network_and_without_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]

    def refuse(*_: Any) -> None:
        raise AssertionError("loading the demo pipeline opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        pipe = FluxPipeline.from_pretrained(model_path())
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []
    assert type(pipe) is FluxPipeline
    assert type(pipe.transformer).__name__ == "FluxTransformer2DModel"
    assert {part.dtype for part in (pipe.transformer, pipe.vae, pipe.text_encoder)} == {
        torch.float32
    }


def test_importing_the_demo_does_not_import_torch() -> None:
    script = (
        "import sys, raymod.demo; raymod.demo.model_path();"
        "sys.exit(' '.join({'torch', 'diffusers', 'ray'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
