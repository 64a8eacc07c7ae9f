# SPDX-License-Identifier: Apache-2.0
"""Shall a tier be a prefix of one code? KL of embedded and independent tiers on real models.

``PYTHONPATH=src python3 benchmarks/embedded_gate.py --models NAME=FILE.gguf ... --books FOLDER
--output FILE``

``FOLDER`` holds the books as ``NUMBER.txt`` and the calibration book in ``calibration``. Keys of
every layer are coded, rounded to what a page stores, decoded and attended by the dense model;
teacher forcing, the first tokens dense, in float32. Models that the output file already holds with
the same settings are not run again, so that several runs can share the work. Families of keys:

- ``plain``: independent tiers of cells of 0, 2, 4, 8 and 12 bits;
- ``independent``: independent tiers, cells of 6 and 10 bits as well;
- ``cut``: one embedded code, coded for all tiers, cut to the tier, radii computed from the codes;
- ``direct``: the same points, coded for the tier itself.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from embedded_code import (
    PAGE_TOKENS,
    TIERS,
    NestedValues,
    by_page,
    encode_chain,
    fit_embedded,
)

from sphkv.codec.calibration import key_frame_metric, query_moments
from sphkv.codec.codebook import CELL_BITS, CodebookFit, fit_plane_codebooks, metric_roots
from sphkv.codec.keys import SphericalCode, decode_keys, encode_keys
from sphkv.codec.slots import build_angle_codebook
from sphkv.codec.values import ValueCode, decode_values, encode_values, unbiased_scale
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.attachment import EagerPass, attach

CALIBRATION_BOOK = "10046"
BOOKS = ("10146", "10321", "10356", "7412")
DENSE_TOKENS = 4
MAX_DISTANCE = 4096
KEY_FAMILIES = ("plain", "independent", "cut", "direct")
VALUE_FAMILIES = ("independent", "uniform", "lloyd")
VALUE_TIERS = ((2.0, 3), (1.0, 2), (2.0, 4))
# More than a product's calibration spends, as the embedded fit does: effort shall not decide.
FIT = CodebookFit(iterations=10, refinements=8, stage_tokens=4096)
_LEAST_COSINE = 0.2
_LOGIT_ROWS = 256


class Pass(EagerPass):
    """A forward pass whose keys and values are changed or kept."""

    needs_mask = True

    def __init__(self, change):
        self._change = change

    def attend(self, call):
        """Attention of one layer over what ``change`` makes of its keys and values."""
        changed = self._change(call.layer, call.query, call.key, call.value)
        if changed is not None:
            call.key, call.value = changed
        return call.dense()

    def finish(self, *, is_failed):
        """Nothing is held."""


class Subject:
    """A model whose attention can be intercepted."""

    def __init__(self, path, device, num_layers):
        self.model, self.tokenizer = load_model(str(path))
        if num_layers:
            self.model.config.num_hidden_layers = num_layers
            decoder = self.model.base_model
            decoder.layers = decoder.layers[:num_layers]
        self.model.to(device)
        self.layout = describe_model(self.model)
        self.attachment = attach(self.model, self.layout)
        self.device = device

    def tokens(self, path, count):
        """The first tokens of a text, ``[count]``."""
        text = path.read_text(encoding="utf-8")[: 16 * count]
        ids = self.tokenizer(text)["input_ids"][:count]
        if len(ids) < count:
            raise ValueError(f"{path} has {len(ids)} tokens, not {count}")
        return torch.tensor(ids, device=self.device)

    def hidden(self, tokens, change):
        """Last hidden states ``[books, tokens, width]`` of ``tokens [books, tokens]``."""
        self.attachment.listen = lambda *_: Pass(change)
        try:
            output = self.layout.decoder(input_ids=tokens, use_cache=False)
        finally:
            self.attachment.listen = None
        return output.last_hidden_state

    def divergence(self, dense, coded):
        """KL in nats per token of each book, from hidden states of the dense and coded model."""
        found = []
        for one, other in zip(dense, coded, strict=True):
            total = 0.0
            for a, b in zip(one.split(_LOGIT_ROWS), other.split(_LOGIT_ROWS), strict=True):
                p, q = (self.model.lm_head(x).float().log_softmax(-1) for x in (a, b))
                total += float((p.exp() * (p - q)).sum(-1).double().sum())
            found.append(total / len(one))
        return found


class Codes:
    """What a model's calibration text tells: codes of keys and values of all families."""

    def __init__(self, subject, tokens):
        geometry = subject.layout.geometry
        self.layout, self.num_planes = subject.layout, geometry.head_dim // 2
        self.num_heads = geometry.num_kv_heads
        units, metrics, values = self._collect(subject, tokens)
        self.planes = fit_plane_codebooks(units, metrics, FIT)
        self.root, self.inverse = metric_roots(metrics)
        x = torch.einsum("hnij,htnj->hnti", self.root, units).flatten(0, 1).contiguous()
        self.mean = x.mean(1, keepdim=True)
        self.embedded = fit_embedded(x - self.mean, self.num_planes)
        self.books = {family: self._codebooks(family) for family in KEY_FAMILIES[:2]}
        self.values = {kind: NestedValues(kind, tokens.device) for kind in VALUE_FAMILIES[1:]}
        for nested in self.values.values():
            nested.calibrate(values)

    def _collect(self, subject, tokens):
        """Unit keys, metrics and some values of all layers, heads of all layers in one row."""
        positions = torch.arange(len(tokens), device=tokens.device)[DENSE_TOKENS:]
        units, metrics, values = [], [], []

        def keep(layer, query, key, value):
            rope = subject.layout.ropes[layer]
            query, key, value = (part[0, :, DENSE_TOKENS:].float() for part in (query, key, value))
            moments = query_moments(query, positions, rope, self.num_heads)
            metrics.append(key_frame_metric(moments, rope, max_distance=MAX_DISTANCE))
            z = rope.unrotate(rope.to_planes(key), positions)
            units.append(z / key.norm(dim=-1).clamp(min=1e-30)[..., None, None])
            values.append(value[:, :: max(1, value.shape[1] // 512)])

        subject.hidden(tokens[None], keep)
        return torch.cat(units), torch.cat(metrics), torch.cat(values)

    def _codebooks(self, family):
        """Angle codebooks of all layers' heads by tier."""
        planes = self.planes
        if family == "plain":
            is_new = torch.tensor([bits in (6, 10) for bits in CELL_BITS])
            is_new = is_new.to(planes.distortion.device)
            planes = replace(planes, distortion=planes.distortion.masked_fill(is_new, torch.inf))
        return {
            bits: build_angle_codebook(planes, round(bits * self.num_planes / 2)) for bits in TIERS
        }

    def distortions(self):
        """Error of the calibration keys by family and tier, summed over planes and heads."""
        found = {}
        for family, books in self.books.items():
            cells = [
                torch.searchsorted(
                    torch.tensor(CELL_BITS, device=book.plane_bits.device), book.plane_bits
                )
                for book in books.values()
            ]
            found[family] = [
                float(self.planes.distortion.gather(2, cell[..., None]).sum()) for cell in cells
            ]
        return found

    def change_keys(self, family, bits, layer, key):
        """Keys ``[books, heads, tokens, head_dim]`` as a tier of a family leaves them."""
        num_books, heads = key.shape[:2]
        rope = self.layout.ropes[layer]
        coded = key[:, :, DENSE_TOKENS:].float()
        positions = torch.arange(DENSE_TOKENS, key.shape[2], device=key.device)
        if family in self.books:
            at = torch.arange(layer * heads, (layer + 1) * heads, device=key.device)
            book = self.books[family][bits].rows(at.repeat(num_books))
            code = encode_keys(coded.flatten(0, 1), positions, book, rope)
            code = SphericalCode(code.codes, by_page(code.radius))
            decoded = decode_keys(code, positions, book, rope).view_as(coded)
        else:
            z = rope.unrotate(rope.to_planes(coded), positions)
            radius = coded.norm(dim=-1).clamp(min=1e-30)
            tier = TIERS.index(bits)
            direction, length = self._embed(
                z / radius[..., None, None], radius, layer, tier, is_cut=family == "cut"
            )
            decoded = rope.from_planes(rope.rotate(direction * length[..., None, None], positions))
        return torch.cat([key[:, :, :DENSE_TOKENS], decoded.to(key.dtype)], 2)

    def _embed(self, unit, radius, layer, tier, *, is_cut):
        """Coded directions and radii of unit keys ``[books, heads, tokens, planes, 2]``."""
        num_books, heads, tokens = unit.shape[:3]
        at = slice(layer * heads * self.num_planes, (layer + 1) * heads * self.num_planes)
        root, inverse = (part.flatten(0, 1)[at] for part in (self.root, self.inverse))
        by_plane = unit.permute(1, 3, 0, 2, 4).reshape(len(root), -1, 2)
        x = by_plane @ root.mT - self.mean[at]
        chain, units = self.embedded.chain.rows(at), self.embedded.units[:, at]
        weight = self.embedded.weight[at]
        if not is_cut:
            weight = torch.nn.functional.one_hot(units[tier], weight.shape[1]).to(weight.dtype)
        states = torch.stack(chain.prefixes(encode_chain(x, chain, weight)))

        def direction(tier):
            point = states[units[tier], torch.arange(len(root), device=x.device)] + self.mean[at]
            shaped = (point @ inverse.mT).view(heads, self.num_planes, num_books, tokens, 2)
            return shaped.permute(2, 0, 3, 1, 4)

        found = direction(tier)
        if not is_cut or tier == len(TIERS) - 1:
            return found, by_page(radius / _along(unit, found))
        whole = direction(len(TIERS) - 1)
        stored = by_page(radius / _along(unit, whole))
        # what a page still knows: the codes of the highest tier and its radius byte
        return found, by_page(stored * whole.square().sum((-1, -2)) / _along(whole, found))

    def change_values(self, family, bits, value):
        """Values ``[books, heads, tokens, head_dim]`` as a code of ``bits`` bits leaves them."""
        coded = value[:, :, DENSE_TOKENS:].float()
        if family == "independent":
            parts = []
            for part in coded.split(PAGE_TOKENS, 2):
                code = encode_values(part, bits=bits)
                scale = unbiased_scale(code.scale, bits)
                parts.append(decode_values(ValueCode(code.codes, scale, bits)))
            read = torch.cat(parts, 2)
        else:
            read = self.values[family].read(coded, bits)
        return torch.cat([value[:, :, :DENSE_TOKENS], read.to(value.dtype)], 2)


def _along(unit, coded):
    """Product of unit keys with their codes; the codes' length where they point away."""
    cosine, length = (unit * coded).sum((-1, -2)), coded.square().sum((-1, -2)).sqrt()
    return torch.where(cosine > _LEAST_COSINE * length, cosine, length.clamp(min=1e-6))


def settings():
    """Every measured setting: name, family and bits of keys, family and bits of values or None."""
    for family, bits in itertools.product(KEY_FAMILIES, TIERS):
        yield f"k{bits:g} {family}", (family, bits), None
    for (bits, value_bits), keys, values in itertools.product(
        VALUE_TIERS, ("independent", "cut"), VALUE_FAMILIES
    ):
        yield f"k{bits:g}v{value_bits} {keys} {values}", (keys, bits), (values, value_bits)


@torch.no_grad()
def measure(path, args, device):
    """KL of every setting and book of one model, and how long it took."""
    start = time.perf_counter()
    subject = Subject(path, device, args.layers)
    loaded = time.perf_counter()
    calibration = args.books / "calibration" / f"{CALIBRATION_BOOK}.txt"
    tokens = subject.tokens(calibration, args.calibration_tokens)
    codes = Codes(subject, tokens)
    fitted = time.perf_counter()
    books = torch.stack([subject.tokens(args.books / f"{b}.txt", args.tokens) for b in BOOKS])
    dense = subject.hidden(books, lambda *_: None)
    found = {}
    for name, keys, values in settings():

        def change(layer, _, key, value, keys=keys, values=values):
            value = value if values is None else codes.change_values(*values, value)
            return codes.change_keys(*keys, layer, key), value

        found[name] = subject.divergence(dense, subject.hidden(books, change))
        print(f"  {name:32s} {statistics.mean(found[name]):.5f}", flush=True)
    geometry = subject.layout.geometry
    return {
        "head_dim": geometry.head_dim,
        "layers": geometry.num_layers,
        "kv_heads": geometry.num_kv_heads,
        "kl": found,
        "distortion": codes.distortions(),
        "load_s": loaded - start,
        "fit_s": fitted - loaded,
        "measure_s": time.perf_counter() - fitted,
    }


def ratio(models, name, base):
    """Mean KL of a setting over that of another, with a 95% interval over draws of books.

    The mean is over models and books. All draws of books with repetition are counted, the same
    books for every model.
    """
    above = [[model["kl"][name][i] for model in models] for i in range(len(BOOKS))]
    below = [[model["kl"][base][i] for model in models] for i in range(len(BOOKS))]

    def of(draw):
        return sum(sum(above[i]) for i in draw) / sum(sum(below[i]) for i in draw)

    books = range(len(BOOKS))
    draws = sorted(of(draw) for draw in itertools.product(books, repeat=len(BOOKS)))
    edge = int(0.025 * len(draws))
    per_model = [
        sum(model["kl"][name]) / sum(model["kl"][base]) for model in models if model["kl"][base]
    ]
    return {
        "ratio": of(books),
        "low": draws[edge],
        "high": draws[-1 - edge],
        "geometric": math.exp(statistics.mean(map(math.log, per_model))),
        "per_model": per_model,
    }


def comparisons():
    """Pairs of settings whose ratio is of interest."""
    for bits in TIERS:
        for family in ("independent", "cut", "direct"):
            base = "plain" if family == "independent" else "independent"
            yield f"k{bits:g} {family}", f"k{bits:g} {base}"
    for bits, value_bits in VALUE_TIERS:
        tier = f"k{bits:g}v{value_bits}"
        for keys, values in itertools.product(("independent", "cut"), VALUE_FAMILIES):
            if (keys, values) != ("independent", "independent"):
                yield f"{tier} {keys} {values}", f"{tier} independent independent"


def print_table(record):
    """Every comparison over all models of a record."""
    names, models = list(record["models"]), list(record["models"].values())
    print(f"{'setting':32s} {'against':28s} {'ratio':>7s} {'95% of books':>15s}  {' '.join(names)}")
    for name, base in comparisons():
        found = record["ratios"][f"{name} / {base}"]
        interval = f"{found['low']:.3f}..{found['high']:.3f}"
        each = " ".join(f"{r:.3f}" for r in found["per_model"])
        print(f"{name:32s} {base:28s} {found['ratio']:7.3f} {interval:>15s}  {each}")
    for name, model in zip(names, models, strict=True):
        times = ", ".join(
            f"{part} {model[part + '_s']:.0f} s" for part in ("load", "fit", "measure")
        )
        print(f"{name}: head dim {model['head_dim']}, {times}")


def main():
    """Measure the models that are not in the record yet, write it and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, help="only the first layers, to try the script")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    args = parser.parse_args()
    about = {
        "books": list(BOOKS),
        "tokens": args.tokens,
        "calibration_book": CALIBRATION_BOOK,
        "calibration_tokens": args.calibration_tokens,
        "dense_tokens": DENSE_TOKENS,
        "layers": args.layers,
    }
    record = {"settings": about, "models": {}}
    if args.output.exists():
        held = json.loads(args.output.read_text())
        if held["settings"] != about:
            raise SystemExit(f"{args.output} has other settings: {held['settings']}")
        record["models"] = held["models"]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for entry in args.models:
        name, _, path = entry.partition("=")
        if name in record["models"]:
            continue
        print(name, flush=True)
        record["models"][name] = measure(path, args, torch.device(args.device))
        models = list(record["models"].values())
        record["ratios"] = {
            f"{name} / {base}": ratio(models, name, base) for name, base in comparisons()
        }
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    print_table(record)


if __name__ == "__main__":
    main()
