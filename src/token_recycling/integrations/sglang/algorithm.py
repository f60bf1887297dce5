"""SGLang's algorithm interface for ``--speculative-algorithm TOKEN_RECYCLING``."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from token_recycling.errors import TokenRecyclingError
from token_recycling.integrations.engines.options import ServingOptions

NAME = "TOKEN_RECYCLING"
NODES = 32  # of a draft, root included; default of --speculative-num-draft-tokens
# Attention backends that support a mask over the nodes of a draft.
BACKENDS = ("aiter", "fa3", "flashinfer", "intel_amx", "triton")
BUILT_IN = SpeculativeAlgorithm.NGRAM


class _Algorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Looks like SGLang's n-gram algorithm to the scheduler; only the worker differs.

    Both draft without a model and verify a tree. Methods that the base class lacks in the tested
    versions also behave as in the n-gram algorithm.
    """

    def is_ngram(self) -> bool:
        """Return True: the scheduler treats it as drafting without a model."""
        return True

    def has_draft_kv(self) -> bool:
        """Return False: drafts have no KV cache of their own."""
        return False

    def need_topk(self) -> bool:
        """Return False: drafts carry only tokens from step to step."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Return False: also with disaggregated prefill and decoding."""
        return False

    def get_platform_worker_cls(self) -> None:
        """Return None: no platform replaces the worker."""

    def create_future_map(self, *args: Any, **options: Any) -> Any:
        """Create the future map, as in the n-gram algorithm."""
        from sglang.srt.managers.overlap_utils import FutureMap

        device, pool, *others = args
        return FutureMap(device, self, pool, *others, **options)

    def handle_server_args(self, server_args: Any) -> None:
        """Set defaults and check that the options are compatible.

        Raises:
            TokenRecyclingError: an option is invalid, or the attention backend does not support
                tree masks.
            ValueError: raised by SGLang's own checks.
        """
        ServingOptions.from_environment()
        if resolved_view(server_args).speculative_num_draft_tokens is None:
            declare = getattr(overrides, "declare_resolution", None)
            if declare is None:  # 0.5.17
                server_args.speculative_num_draft_tokens = NODES
            else:
                declare(server_args, NAME, speculative_num_draft_tokens=NODES)
        BUILT_IN.handle_server_args(server_args)
        view = resolved_view(server_args)
        if view.attention_backend not in (None, *BACKENDS):
            raise TokenRecyclingError(
                f"attention backend {view.attention_backend} does not support draft trees; "
                f"choose one of {', '.join(BACKENDS)}"
            )


def register_algorithm() -> None:
    """Register the algorithm in this process."""

    def worker(server_args: Any) -> type:
        from token_recycling.integrations.sglang.worker import Worker

        return Worker

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=_Algorithm)(worker)
