"""``--speculative-algorithm TOKEN_RECYCLING``: what SGLang asks of an algorithm."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from token_recycling.errors import TokenRecyclingError
from token_recycling.integrations.engines.options import ServingOptions

NAME = "TOKEN_RECYCLING"
NODES = 32  # of a draft, the root included, unless --speculative-num-draft-tokens says
# Attention that takes a mask over the nodes of a draft.
BACKENDS = ("aiter", "fa3", "flashinfer", "intel_amx", "triton")
BUILT_IN = SpeculativeAlgorithm.NGRAM


class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Is to the scheduler what SGLang's n-gram algorithm is; only the worker differs.

    Both draft without a model and verify a tree. What the base class lacks of the interface in
    the tested versions is taken from there, too.
    """

    def is_ngram(self) -> bool:
        """Take the scheduler's branches for drafts without a model."""
        return True

    def has_draft_kv(self) -> bool:
        """Drafts have no cache of their own."""
        return False

    def need_topk(self) -> bool:
        """The draft carries nothing from step to step but tokens."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Nor when prefill and decoding are apart."""
        return False

    def get_platform_worker_cls(self) -> None:
        """No platform replaces the worker."""

    def create_future_map(self, *args: Any, **options: Any) -> Any:
        """Relay what the n-gram algorithm relays."""
        from sglang.srt.managers.overlap_utils import FutureMap

        device, pool, *others = args
        return FutureMap(device, self, pool, *others, **options)

    def handle_server_args(self, server_args: Any) -> None:
        """Set what the user has not, and refuse what does not go together.

        Raises:
            TokenRecyclingError: an option, or an attention backend without tree masks.
            ValueError: SGLang's own reasons.
        """
        ServingOptions.from_environment()
        if resolved_view(server_args).speculative_num_draft_tokens is None:
            declare_resolution(server_args, NAME, speculative_num_draft_tokens=NODES)
        BUILT_IN.handle_server_args(server_args)
        view = resolved_view(server_args)
        if view.attention_backend not in (None, *BACKENDS):
            raise TokenRecyclingError(
                f"attention backend {view.attention_backend} takes no draft trees; choose one of "
                f"{', '.join(BACKENDS)}"
            )


def register_algorithm() -> None:
    """Make the algorithm known to this process."""

    def worker(server_args: Any) -> type:
        from token_recycling.integrations.sglang.worker import Worker

        return Worker

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)(worker)
