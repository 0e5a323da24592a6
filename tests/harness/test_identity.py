"""What starts cold: whatever shapes the bytes of KV cache is a part of the fingerprint, by its name."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.errors import ConfigError
from kvtide.geometry import GroupGeometry, GroupKind, KVGeometry
from kvtide.vllm.identity import fingerprint_of, refuse_random_hashes, weights_of


def geometry_of(blocks_per_chunk: int = 1, tokens: int = 16) -> KVGeometry:
    return KVGeometry((GroupGeometry(0, GroupKind.FULL_ATTENTION, tokens, blocks_per_chunk, tokens),))


class Served:
    """A configuration, as far as a fingerprint looks at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rope = {"rope_type": "yarn", "factor": 1.0}
        self.model = SimpleNamespace(
            model=str(folder),
            revision=None,
            dtype="torch.bfloat16",
            quantization=None,
            hf_config=SimpleNamespace(
                to_dict=lambda: {"rope_scaling": self.rope, "hidden_size": 64, "_name_or_path": str(folder)},
                _commit_hash=None,
            ),
        )
        self.cache = SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256")
        self.parallel = SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        )
        self.layout, self.geometry, self.speculative = "LBHNC", geometry_of(), None
        self.device = SimpleNamespace(device_type="cpu")
        self.attention = SimpleNamespace(backend=None)

    def fingerprint(self) -> Any:
        config = SimpleNamespace(
            model_config=self.model,
            cache_config=self.cache,
            parallel_config=self.parallel,
            speculative_config=self.speculative,
            device_config=self.device,
            attention_config=self.attention,
        )
        return fingerprint_of(config, SimpleNamespace(kv_cache_layout=self.layout), self.geometry)


def save(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + content)
    return folder


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return Served(save(tmp_path / "model", b"weights" * 500))


def test_the_same_files_elsewhere_are_the_same_model(served: Served, tmp_path: Path) -> None:
    other = Served(save(tmp_path / "copy", b"weights" * 500))
    assert other.fingerprint().digest == served.fingerprint().digest


CHANGES: dict[str, tuple[Callable[[Served], object], list[str]]] = {
    "other weights": (lambda one: save(one.folder, b"weighty" * 500), ["weights"]),
    "rope factor 1 -> 2": (lambda one: one.rope.update(factor=2.0), ["model"]),
    "tensor parallel": (lambda one: setattr(one.parallel, "tensor_parallel_size", 2), ["ranks"]),
    "KV dtype": (lambda one: setattr(one.cache, "cache_dtype", "fp8"), ["kv_cache_dtype"]),
    "dtype": (lambda one: setattr(one.model, "dtype", "torch.float16"), ["dtype"]),
    "quantisation": (lambda one: setattr(one.model, "quantization", "awq"), ["quantization"]),
    "layout": (lambda one: setattr(one, "layout", "BLHNC"), ["layout"]),
    "another device": (lambda one: setattr(one.device, "device_type", "cuda"), ["attention"]),
    "another backend of attention": (lambda one: setattr(one.attention, "backend", "TRITON"), ["attention"]),
    "larger chunks": (lambda one: setattr(one, "geometry", geometry_of(2)), ["groups"]),
    "larger blocks": (lambda one: setattr(one, "geometry", geometry_of(1, 32)), ["groups", "hashes"]),
    "another hash": (lambda one: setattr(one.cache, "prefix_caching_hash_algo", "sha256_cbor"), ["hashes"]),
    "a drafter": (
        lambda one: setattr(
            one,
            "speculative",
            SimpleNamespace(method="ngram", draft_model_config=None, uses_draft_kv_cache=lambda: False),
        ),
        ["drafter"],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_shapes_the_bytes_starts_cold_and_is_named(served: Served, change: str) -> None:
    # vLLM #49261, #56311, #55191
    before = served.fingerprint()
    apply, names = CHANGES[change]
    apply(served)
    after = served.fingerprint()
    assert after.digest != before.digest
    assert after.changed(before) == names


def test_a_model_of_the_hub_is_told_by_its_commit() -> None:
    config = SimpleNamespace(_commit_hash="abc123")
    model: Any = SimpleNamespace(model="org/name", revision="main", hf_config=config)
    assert weights_of(model) == "org/name@abc123"
    config._commit_hash, model.revision = None, None
    with pytest.raises(ConfigError, match="model = 'org/name': its commit is not known; give --revision"):
        weights_of(model)


def test_hashes_that_no_other_process_can_compute_are_refused_by_name() -> None:
    # LMCache #1139
    for algorithm in ("xxhash", "xxhash_cbor"):
        with pytest.raises(ConfigError, match=f"prefix_caching_hash_algo = '{algorithm}': its seed differs"):
            refuse_random_hashes(algorithm, {})
        refuse_random_hashes(algorithm, {"PYTHONHASHSEED": "7"})
    refuse_random_hashes("sha256", {})
