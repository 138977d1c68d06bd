"""What holds how many users, what it costs, and where computing again is cheaper: the tables of docs/scaling.md.

    python benchmarks/scaling.py            print them
    python benchmarks/scaling.py --write    put them into docs/scaling.md
    python benchmarks/scaling.py --gpu-hour 4 --facts 500 ...

Arithmetic over stated inputs. Only what is marked as measured was measured by this project; no GPU was.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs" / "scaling.md"
GB = 1e9
HOURS = 730.0  # in a month


@dataclass(frozen=True)
class Inputs:
    """Everything the tables are made from; each can be given on the command line."""

    facts: int = 200  # Facts of one user. Assumed.
    fact_tokens: int = 22  # Tokens of a fact: those of the benchmarks.
    k: int = 50  # Facts in one prompt: those of the benchmarks.
    prompt_tokens: int = 50  # The rest of it: header and question.
    answer_tokens: int = 200  # Of an answer. Assumed.
    daily: float = 0.1  # Share of users who come on a day, once. Assumed.
    requests: int = 10  # Of such a user. Assumed.
    peak: float = 0.15  # Share of a day's users who come in its busiest hour. Assumed.
    session_hours: float = 0.25  # How long they stay. Assumed.
    layers: int = 32  # Of the model, with the next four: Llama-3.1-8B, from its config.json.
    kv_heads: int = 8
    head_size: int = 128
    parameters: float = 8.03e9
    int4: float = 0.28  # Bytes of an int4 record per bfloat16 byte: 4 of 16 bits, and scales. From the format.
    gpu_flops: float = 989e12  # Dense bfloat16, H100 SXM; NVIDIA's data sheet. Not measured here.
    utilisation: float = 0.4  # Of it, in prefill. Assumed.
    decode_per_s: float = 3000.0  # Output tokens per second of one GPU at a full batch. Assumed.
    slab_gb: float = 20.0  # Of 80 GB on the GPU, beside weights and paged cache. Assumed.
    host_gb: float = 200.0  # Of host memory, per GPU. Assumed.
    disk_gb: float = 4000.0  # Of local NVMe, per GPU. Assumed.
    hbm_gb_s: float = 3350.0  # H100 SXM; NVIDIA's data sheet. Not measured here.
    pcie_gb_s: float = 50.0  # PCIe 5.0 x16 is specified at 64. Not measured here.
    disk_gb_s: float = 6.0  # One PCIe 4.0 NVMe drive. Assumed.
    store_gb_s: float = 1.0  # From an object store, one stream per GPU. Assumed.
    gpu_hour: float = 2.5  # Dollars for a GPU with its host and disk. Assumed.
    disk_gb_month: float = 0.08  # Dollars for more disk than that. List price of a cloud's volumes; assumed.
    store_gb_month: float = 0.023  # Dollars in an object store. List price of a cloud; assumed.

    @property
    def bytes_per_token(self) -> float:
        """Of a bfloat16 record, all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    @property
    def packed(self) -> float:
        """Bytes of an int8 record per bfloat16 byte: a scale of two bytes for each head. From the format."""
        return (self.head_size + 2) / (2 * self.head_size)

    @property
    def user_bytes(self) -> float:
        """Records of one user in bfloat16."""
        return self.facts * self.fact_tokens * self.bytes_per_token

    @property
    def prefill_per_s(self) -> float:
        """Prompt tokens per second of one GPU: two operations per parameter and token."""
        return self.utilisation * self.gpu_flops / (2 * self.parameters)

    @property
    def request_bytes(self) -> float:
        """Records that one prompt injects, in bfloat16."""
        return self.k * self.fact_tokens * self.bytes_per_token

    @property
    def step_seconds(self) -> float:
        """The shortest step of an engine: its bfloat16 weights are read once."""
        return 2 * self.parameters / GB / self.hbm_gb_s

    def gpu_seconds(self, injected: bool) -> float:
        """Of one request: prefill and answer; loading goes on beside."""
        prompt = self.prompt_tokens + (0 if injected else self.k * self.fact_tokens)
        return prompt / self.prefill_per_s + self.answer_tokens / self.decode_per_s


# Name, bytes per token of a bfloat16 record, head size, and where they are from.
MODELS = (
    ("SmolLM2-135M", 23_040, 64, "measured: `bytes_per_token` of benchmarks/results/ttft-cpu.json"),
    ("Llama-3.1-8B", 2 * 2 * 32 * 8 * 128, 128, "from its config.json"),
    ("Qwen3-4B", 2 * 2 * 36 * 8 * 128, 128, "from its config.json"),
    ("Llama-3.1-70B", 2 * 2 * 80 * 8 * 128, 128, "from its config.json"),
)


def weights(given: Inputs) -> str:
    """What records weigh, by model."""
    rows = []
    for name, per_token, head_size, source in MODELS:
        fact = per_token * given.fact_tokens
        user = fact * given.facts
        packed = (head_size + 2) / (2 * head_size)
        rows.append([name, _size(per_token), _size(fact), _size(fact * given.k), _size(user), _size(user * packed),
                     _size(user * given.int4), source])  # fmt: skip
    heads = (
        "model",
        "a token",
        "a fact",
        f"{given.k} facts",
        f"a user's {given.facts} facts",
        "in int8",
        "in int4",
        "",
    )
    return _table(heads, rows)


def tiers(given: Inputs) -> str:
    """How long one prompt's records take from each tier, and how seldom a record may be used to be worth keeping."""
    again = given.k * given.fact_tokens / given.prefill_per_s
    # Both sides are per byte, so that the number of facts does not matter.
    compute = given.gpu_hour / 3600 / given.prefill_per_s / given.bytes_per_token * GB
    rows = []
    for name, gb, rate, price in (
        ("slab on the GPU", given.slab_gb, given.hbm_gb_s, None),
        ("host memory", given.host_gb, given.pcie_gb_s, None),
        ("disk", given.disk_gb, given.disk_gb_s, given.disk_gb_month),
        ("object store", None, given.store_gb_s, given.store_gb_month),
    ):
        load = given.request_bytes / GB / rate
        users = "any number" if gb is None else f"{gb * GB / given.user_bytes:,.0f}"
        packed = "any number" if gb is None else f"{gb * GB / given.user_bytes / given.packed:,.0f}"
        keep = "-" if price is None else _hours(compute / price * HOURS)
        keep_packed = "-" if price is None else _hours(compute / price * HOURS / given.packed)
        rows.append([name, "-" if gb is None else f"{gb:,.0f} GB", users, packed, f"{1000 * load:.2f} ms",
                     f"{1000 * load * given.packed:.2f} ms", keep, keep_packed])  # fmt: skip
    rows.append(["computed again", "-", "any number", "any number", f"{1000 * again:.1f} ms", "the same", "-", "-"])
    heads = ("tier", "per GPU", "users, bf16", "users, int8", f"{given.k} facts, bf16", "int8",
             "worth keeping if used every, bf16", "int8")  # fmt: skip
    return _table(heads, rows)


def fleets(given: Inputs) -> str:
    """GPUs and users: what is where in the busiest hour, and what it costs."""
    rows = []
    for gpus in (1, 8, 64):
        for users in (1_000, 10_000, 100_000, 1_000_000, 10_000_000):
            daily = users * given.daily
            present = daily * given.peak * given.session_hours
            per_s = daily * given.requests * given.peak / 3600
            needed = [per_s * given.gpu_seconds(injected) for injected in (True, False)]
            fits = needed[0] <= gpus
            cost = gpus * given.gpu_hour * HOURS / daily
            where = _where(given, gpus, present, 1.0), _where(given, gpus, present, given.packed)
            held = min(1.0, gpus * given.disk_gb * GB / (users * given.user_bytes * given.packed))
            rows.append([str(gpus), f"{users:,}", f"{present:,.0f}", *where, f"{held:.1%}",
                         *(f"{number:.2f}" for number in needed),
                         f"${cost:,.2f}" if fits else "too few GPUs"])  # fmt: skip
    heads = ("GPUs", "users", "there at once", "their records, bf16", "int8", "of all users on disk, int8",
             "GPUs busy, injected", "as text", "a month per daily user")  # fmt: skip
    return _table(heads, rows)


def _where(given: Inputs, gpus: int, present: float, share: float) -> str:
    """The tier that has room for the records of all who are there at once."""
    wanted = present * given.user_bytes * share / GB
    room = 0.0
    for name, per_gpu in (("slab", given.slab_gb), ("host", given.host_gb), ("disk", given.disk_gb)):
        room += gpus * per_gpu
        if wanted <= room:
            return f"{name} ({_size(wanted * GB)})"
    return f"computed again ({_size(wanted * GB)})"


def recomputing(given: Inputs) -> str:
    """What it costs to have a user's records made when they come, instead of keeping them."""
    together = given.facts * given.fact_tokens / given.prefill_per_s
    visits = given.daily * HOURS / 24
    rows = [
        [f"made again at each visit, {how}", f"{seconds:.2f} GPU s each time",
         f"${seconds / 3600 * given.gpu_hour * visits:.5f}"]
        for how, seconds in (("together with other work", together), ("each fact in a step of its own",
                                                                      given.facts * given.step_seconds))
    ]  # fmt: skip
    for name, price in (("disk", given.disk_gb_month), ("object store", given.store_gb_month)):
        for form, share in (("bf16", 1.0), ("int8", given.packed)):
            rows.append([f"kept on {name}, {form}" if name == "disk" else f"kept in an {name}, {form}",
                         _size(given.user_bytes * share), f"${given.user_bytes * share / GB * price:.5f}"])  # fmt: skip
    return _table(("a user's records are", "", "a month"), rows)


SECTIONS = {"weights": weights, "tiers": tiers, "fleets": fleets, "recomputing": recomputing}


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def _hours(hours: float) -> str:
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(text: str, given: Inputs) -> str:
    """The page with its tables made anew; each stands between two comments that name it, or this is a ValueError."""
    for name, made in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, behind = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"There is no place for the table {name!r}: no {begin} and {end}")
        text = f"{before}{begin}\n{made(given)}\n{end}{behind}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    for field in dataclasses.fields(Inputs):
        kind = type(field.default)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=f"{field.default:g}"
        )
    args = vars(parser.parse_args())
    write = args.pop("write")
    given = Inputs(**args)
    if write:
        DOCS.write_text(written(DOCS.read_text(encoding="utf-8"), given), encoding="utf-8")
        return 0
    print("\n\n".join(f"{name}\n\n{made(given)}" for name, made in SECTIONS.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
