"""The connector that vLLM loads: ``kv_connector_module_path="inferscale_mem.kv.connector"``.

``InferScaleConnector`` passes vLLM's hooks on: to ``SchedulerSide`` in the scheduler, to ``WorkerSide`` in workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

from inferscale_mem.config import AUTO, RECORD_DTYPES, parse_handle_key
from inferscale_mem.errors import ConfigError, UnsupportedModelError
from inferscale_mem.handles import verify_tag
from inferscale_mem.kv.connector.layers import bytes_per_token, find_layers, unsupported_cache, unsupported_config
from inferscale_mem.kv.connector.metadata import StepMetadata, WorkerReport
from inferscale_mem.kv.connector.scheduler import SchedulerSide
from inferscale_mem.kv.connector.worker import WorkerSide
from inferscale_mem.kv.directory import Directory, Verify
from inferscale_mem.kv.preamble import Preamble
from inferscale_mem.kv.slab import PAGE_SIZE
from inferscale_mem.orphan import end_with_parent
from inferscale_mem.types import Scope

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

DEFAULT_RECORD_BYTES = 1 << 30


class InferScaleConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's hooks. Settings (``kv_connector_extra_config``):

    ``record_bytes``: budget for records, per rank. ``record_dtype``: "auto" (default; as in the paged cache) or "int8",
    in which records are stored. ``preamble``: a file, see ``kv/preamble.py``. ``handle_key_file``: file with the hex
    key that signs handles and orders; it is read once. ``unsigned_orders``: True instead of a key where nobody but the
    app itself can reach the engine: then every order is obeyed, and handles are only compared with those the records
    were made with.
    ``on_unsupported``: "raise" (default) or "report" a model whose KV cannot be moved. ``end_with_parent``: True where
    the core runs in a process of its own, so that it ends with the one that started it.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        reasons = unsupported_config(vllm_config) + unsupported_cache(kv_cache_config)
        if reasons and extra.get("on_unsupported", "raise") == "raise":
            raise UnsupportedModelError(vllm_config.model_config.model, reasons)
        self._record_dtype = read_record_dtype(extra)
        page_bytes = PAGE_SIZE * bytes_per_token(kv_cache_config, self._record_dtype)
        self._num_pages = 0 if reasons else int(extra.get("record_bytes", DEFAULT_RECORD_BYTES)) // page_bytes
        self._supported = not reasons
        path = None if reasons else extra.get("preamble")
        self._preamble = Preamble.open(path) if path else None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            key = read_key(extra)
            directory = Directory(self._num_pages, PAGE_SIZE, page_bytes, _verifier(key))
            workers = vllm_config.parallel_config.world_size
            preamble = self._preamble.segment if self._preamble else None
            if preamble is not None:
                directory.install(str(preamble.record), preamble.token_ids)
            self._scheduler = SchedulerSide(directory, workers, reasons, key, self._record_dtype, preamble)
            if extra.get("end_with_parent") is True:
                end_with_parent()

    @property
    def requires_kv_delivery(self) -> bool:
        """Records are a cache: a lost one is made again."""
        return False

    # Scheduler side.

    def on_new_request(self, request: Request) -> None:
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return self._scheduling.num_new_matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduling.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduling.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        assert report is None or isinstance(report, WorkerReport)
        self._scheduling.update_output(report, connector_output.invalid_block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.request_finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.request_finished(request)

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._supported:
            layers = find_layers(self._vllm_config, self._kv_cache_config)
            self._worker = WorkerSide(layers, self._num_pages, self._record_dtype, self._preamble)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.erase(self._step)
            self._worker.capture(self._step)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._worker.take_report() if self._worker is not None else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before the forward pass starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Captured after the forward pass, from the paged cache."""

    @property
    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step


def read_key(extra: Mapping[str, Any]) -> bytes | None:
    """The handle key that the settings name.

    Raises:
        ConfigError: none is named and nobody said that this is right, or it cannot be read.
    """
    path = extra.get("handle_key_file")
    if path is None:
        if extra.get("unsigned_orders") is True:
            return None
        raise ConfigError(
            "The memory connector has no handle_key_file, so anybody could read and replace memories. Make one with "
            "`openssl rand -hex 32 > FILE; chmod 600 FILE` and give it in kv_connector_extra_config, or set "
            "unsigned_orders to true where nobody else can reach the engine."
        )
    try:
        with open(path, encoding="ascii") as file:
            return parse_handle_key(file.read())
    except (OSError, ValueError) as error:
        raise ConfigError(f"handle_key_file {path!r} cannot be read as hex digits: {error}") from error


def read_record_dtype(extra: Mapping[str, Any]) -> str:
    """In which records are stored.

    Raises:
        ConfigError: not one of ``RECORD_DTYPES``.
    """
    given = extra.get("record_dtype", AUTO)
    if given not in RECORD_DTYPES:
        raise ConfigError(f"The memory connector's record_dtype={given!r} is not known; use 'auto' or 'int8'.")
    return str(given)


def _verifier(key: bytes | None) -> Verify | None:
    if key is None:
        return None

    def verify(handle: str, store: str, scope: Scope) -> bool:
        return verify_tag(key, handle, store, scope)

    return verify
