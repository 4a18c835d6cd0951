"""`KVTierConnector`: what vLLM constructs, once in its scheduler and once in each worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvtier import __version__
from kvtier.config import Settings, load_settings
from kvtier.errors import ConfigError
from kvtier_connectors.faults import CAUGHT
from kvtier_connectors.hooks import hook
from kvtier_connectors.vllm.asked import RequestOptions
from kvtier_connectors.vllm.identity import namespace_of
from kvtier_connectors.vllm.live import StepLimits
from kvtier_connectors.vllm.messages import StepPlan, StepReport
from kvtier_connectors.vllm.pages import Pages
from kvtier_connectors.vllm.scheduler import SchedulerSide
from kvtier_connectors.vllm.telemetry import KVTierMetrics, KVTierStats, hit_sources
from kvtier_connectors.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVTierConnector"]

logger = logging.getLogger("kvtier.vllm")

OPTIONS: dict[str, tuple[type, str]] = {
    "config": (str, "the name of a file"),
    "model": (str, "a string"),
    "settings": (dict, "an object, such as {'host.size': '8GiB'}"),
}
HASHES = ("sha256", "sha256_cbor")
TESTED = ("0.31.0", "0.32.0", "0.33.0")
"""Versions of vLLM that the tests run with: 0.32.0 as a whole, of the others the scheduler's side."""


class KVTierConnector(KVConnectorBase_V1):
    """A cache in host memory and on disk below vLLM's GPU pool: blocks are stored shortly before vLLM reuses them, and
    loaded when a prompt returns, if that beats computing.

    Options (`kv_connector_extra_config`): `config`, a TOML file of kvtier's settings; `settings`, some of them by
    dotted name; `model`, what identifies the weights, if they are not to be read for that.

    Loads are asynchronous; only blocks that are in host memory are promised. A best-effort cache: what goes wrong is
    computed.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError, with the option to change, for what cannot work."""
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        _check_supported(vllm_config)
        _check_version(vllm.__version__)
        parallel = vllm_config.parallel_config
        self._pages = Pages(kv_cache_config, parallel.tensor_parallel_size)
        self._errors: set[tuple[str, str]] = set()
        self._scheduler_side: SchedulerSide | None = None
        self._worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler_side = _open_scheduler(vllm_config, self._pages)
        else:
            self._worker_side = WorkerSide(self._pages, parallel.rank % parallel.tensor_parallel_size)

    def _report(self, where: str, error: BaseException) -> None:
        """Tell the first error of each kind and place: an exception in a connector's hook would end vLLM's engine."""
        kind = (where, type(error).__name__)
        if kind not in self._errors:
            self._errors.add(kind)
            logger.error("%s failed; vLLM goes on without it: %s", where, error, exc_info=error)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not stored is computed again."""
        return False

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The half beside vLLM's scheduler; only in that process."""
        assert self._scheduler_side is not None
        return self._scheduler_side

    @property
    def worker_side(self) -> WorkerSide:
        """The half in a worker; only there."""
        assert self._worker_side is not None
        return self._worker_side

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """False: the KV cache would lose its bytes, and it would not be told."""
        del kv_transfer_config
        return False

    # ---- vLLM's scheduler ----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind(kv_cache_manager, kv_cache_manager.block_pool)

    @hook(lambda: None)
    def on_new_request(self, request: Request) -> None:
        self.scheduler_side.start(request)

    @hook(lambda: cast("tuple[int | None, bool]", (0, False)))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.num_loadable(request, num_computed_tokens)

    @hook(lambda: None)
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        try:
            self.scheduler_side.allocated(request, blocks, num_external_tokens)
        except CAUGHT:
            self.scheduler_side.lost_track(request, blocks, num_external_tokens)
            raise

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._plan(scheduler_output) or self._plan_nothing() or self.scheduler_side.empty_plan()

    @hook(lambda: cast("StepPlan | None", None))
    def _plan_nothing(self) -> StepPlan:
        return self.scheduler_side.plan_nothing()

    @hook(lambda: cast("StepPlan | None", None))
    def _plan(self, scheduler_output: SchedulerOutput) -> StepPlan | None:
        return self.scheduler_side.plan(scheduler_output)

    @hook(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self.scheduler_side.take_report(report)

    @hook(lambda: cast("tuple[bool, dict[str, Any] | None]", (False, None)))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        self.scheduler_side.finished(request)
        return False, None

    @hook(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.is_busy

    @hook(lambda: False)
    def reset_cache(self) -> bool:
        return self.scheduler_side.reset()

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        return self._hit_sources(request, num_external_tokens) or super().get_external_cache_hit_sources(
            request, num_external_tokens
        )

    @hook(lambda: cast("dict[Any, int]", {}))
    def _hit_sources(self, request: Request, num_tokens: int) -> dict[Any, int]:
        return hit_sources(self.scheduler_side.hit_tokens(request.request_id), num_tokens)

    @hook(lambda: cast("Iterable[KVCacheEvent]", ()))
    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler_side.take_events()

    @hook(lambda: cast("KVTierStats | None", None))
    def get_kv_connector_stats(self) -> KVTierStats | None:
        return None if self._scheduler_side is None else self._scheduler_side.take_stats()

    # ---- vLLM's frontend -----------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return KVTierStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierMetrics:
        return KVTierMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- vLLM's workers ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._begin_step(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    @hook(lambda: None)
    def _begin_step(self, metadata: KVConnectorMetadata) -> None:
        if isinstance(metadata, StepPlan):
            self.worker_side.begin_step(metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were begun with the step."""
        del forward_context, kwargs

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No forward needs a load that is under way."""
        del layer_name

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, later."""
        del layer_name, kv_layer, attn_metadata, kwargs

    def wait_for_save(self) -> None:
        """No store is waited for."""

    @hook(lambda: cast("tuple[set[str] | None, set[str] | None]", (None, None)))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        del finished_req_ids
        return None, self.worker_side.take_received()

    @hook(lambda: cast("set[int]", set()))
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_lost()

    @hook(lambda: cast("StepReport | None", None))
    def build_connector_worker_meta(self) -> StepReport | None:
        return self.worker_side.report()

    @hook(lambda: None)
    def shutdown(self) -> None:
        """Idempotent."""
        if self._worker_side is not None:
            self._worker_side.close()
        if self._scheduler_side is not None:
            self._scheduler_side.close()


def _log_as_vllm_does() -> None:
    """vLLM sets up its own loggers alone: without a handler INFO is lost, and of a WARNING all but the words."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:  # whoever runs vLLM has set them up
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)


def _check_supported(vllm_config: VllmConfig) -> None:
    """What was computed is known from steps that end before the next one is scheduled, each token of which counts."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    found = {
        "asynchronous scheduling (start vLLM with --no-async-scheduling)": bool(scheduler.async_scheduling),
        "speculative decoding": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "sleep mode, in which the KV cache loses its bytes": bool(vllm_config.model_config.enable_sleep_mode),
    }
    if unsupported := [what for what, is_used in found.items() if is_used]:
        raise ConfigError(f"kvtier does not support {', '.join(unsupported)} yet")


def _check_version(version: str) -> None:
    if version.partition("+")[0] not in TESTED:
        logger.warning("kvtier is tested with vLLM %s, and not with %s", ", ".join(TESTED), version)


def _open_scheduler(vllm_config: VllmConfig, pages: Pages) -> SchedulerSide:
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    if unknown := sorted(extra.keys() - OPTIONS):
        raise ConfigError(f"kv_connector_extra_config has {unknown}; kvtier knows {sorted(OPTIONS)}")
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASHES:
        raise ConfigError(
            f"vLLM hashes blocks with {algorithm}, by which different prompts may be taken for one another: start it "
            f"with --prefix-caching-hash-algo sha256"
        )
    for option, (kind, words) in OPTIONS.items():
        if option in extra and (not isinstance(extra[option], kind) or not extra[option]):
            raise ConfigError(f"kv_connector_extra_config: {option} must be {words}, not {extra[option]!r:.100}")
    path = extra.get("config")
    try:
        settings = load_settings(None if path is None else Path(path), overrides=extra.get("settings"))
    except ConfigError as error:
        given = f"kv_connector_extra_config {sorted(extra)}: " if extra else ""
        raise ConfigError(f"{given}{error}") from None  # of two traces the operator needs neither
    namespace = namespace_of(vllm_config, pages, extra.get("model"))
    _warn_of_losses(vllm_config, settings)
    logger.info("kvtier %s keeps the KV cache of %s: %s", __version__, vllm_config.model_config.model, pages.name)
    scheduler, events = vllm_config.scheduler_config, vllm_config.kv_events_config
    step_budget = -(-scheduler.max_num_batched_tokens // pages.block_tokens) + scheduler.max_num_seqs
    return SchedulerSide(
        settings,
        namespace,
        RequestOptions(by_priority=scheduler.policy == "priority"),
        StepLimits(step_budget, pages.num_ranks),
        has_events=events is not None and events.enable_kv_cache_events,
    )


def _warn_of_losses(vllm_config: VllmConfig, settings: Settings) -> None:
    """Of options of vLLM's with which something is lost that need not be."""
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a copy that fails ends its request; set it to 'recompute'", policy
        )
    if settings.restore.on_failure == "fail":
        logger.warning("restore.on_failure is without effect: in vLLM kv_load_failure_policy decides what follows")
    is_killed = envs.VLLM_ENABLE_V1_MULTIPROCESSING and not getattr(vllm_config, "shutdown_timeout", 0)
    if settings.disk.path and is_killed:
        logger.warning(
            "vLLM kills its engine when it is told to stop, before what host memory holds is written to the disk: give "
            "it --shutdown-timeout 20"
        )
