# SPDX-License-Identifier: Apache-2.0
"""The wheel alone: installed where there is no compiler, it decodes on the native kernels."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent

# README's example on a model that needs no file, with the backend named: `auto` would fall back.
EXAMPLE = """
import json, torch, sphkv, sphkv._kernels
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
)
model = LlamaForCausalLM(config).eval()
options = sphkv.CacheOptions(backend="native")
cache = sphkv.SphericalCache.for_model(model, budget="25%", options=options)
ids = torch.randint(0, 128, (1, 700))
output = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
print(json.dumps({
    "files": [sphkv.__file__, sphkv._kernels.__file__],
    "backend": cache.backend_name,
    "is_coded": cache.tier.is_coded,
    "num_tokens": output.shape[1],
    "bytes_per_token": cache.ledger().b_kv(cache.get_seq_length()),
}))
"""


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Output of a command, with nothing of this checkout in its environment."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    if path is not None:
        environment["PATH"] = str(path)
        for name in ("CC", "CXX"):
            environment.pop(name, None)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_wheel(folder: Path) -> Path:
    """The wheel that ``SPHKV_WHEEL`` names, or one built from this checkout."""
    given = os.environ.get("SPHKV_WHEEL")
    if given:
        return (CHECKOUT / given).resolve()
    for tool in ("pip", "scikit_build_core", "nanobind"):
        pytest.importorskip(tool, reason=f"building a wheel needs {tool}")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        pytest.skip("building a wheel needs a C++ compiler")
    build = ("-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", folder)
    run(sys.executable, *build, CHECKOUT, cwd=folder)
    return next(folder.glob("*.whl"))


def check_content(wheel: Path) -> None:
    """Kernels and their sources are in it, and nothing beside the package."""
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.startswith("sphkv/_kernels.")]
    assert "sphkv/py.typed" in names
    assert [name for name in names if name.endswith(".cu")]
    top = {name.split("/")[0] for name in names}
    assert top <= {"sphkv", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}


@pytest.mark.slow
def test_the_wheel_decodes_natively_where_there_is_no_compiler(tmp_path: Path):
    pytest.importorskip("transformers", reason="sphkv[transformers] is not installed")
    pytest.importorskip("pip", reason="installing a wheel needs pip")
    wheel = make_wheel(tmp_path)
    check_content(wheel)
    home, empty = tmp_path / "venv", tmp_path / "bin"
    empty.mkdir()
    venv.EnvBuilder(symlinks=True).create(home)
    python = home / "bin" / "python"
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", wheel, cwd=tmp_path, path=empty,
    )  # fmt: skip
    # torch and transformers are borrowed; a .pth file runs no .pth file of the folders it names,
    # so the editable install of this checkout stays out
    (site_packages,) = home.glob("lib/python*/site-packages")
    borrowed = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    (site_packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    about = json.loads(run(python, "-I", "-c", EXAMPLE, cwd=tmp_path, path=empty))
    assert all(Path(file).is_relative_to(site_packages) for file in about["files"]), about
    assert about["backend"] == "native"
    assert about["is_coded"]
    assert about["num_tokens"] == 708
    # dense bfloat16: keys and values of 64 elements in two heads of two layers. The share is that
    # of the longest context; tables and tails weigh more here.
    assert 0 < about["bytes_per_token"] < 0.5 * 2 * 64 * 2 * 2 * 2
