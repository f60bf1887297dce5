"""Defaults that several packages use; those of one class stand with it."""

CANDIDATES = 12  # k: candidates kept per token
PAPER_CANDIDATES = 8  # k of the paper's drafter, as published
DRAFTER = "adaptive"
AUTOMATIC_NODES = 80  # nodes below the root of a draft whose size is automatic (the paper's number)
LARGEST_DRAFT = 256  # nodes below the root
MAX_NEW_TOKENS = 256
PREFILL_CHUNK = 1024  # prompt tokens per forward, over all rows of a batch
CACHE_CHUNK = 256  # the KV cache grows by at least this many slots
WARM_SECONDS = 12.0  # most seconds for which a GPU's kernels are waited for after loading
TAUGHT_TOKENS = 30_000  # of the answers that ``token-recycling matrix teach`` learns from


def candidates_for(drafter: object) -> int:
    """Return the default k of a drafter, given by name or as an object."""
    return PAPER_CANDIDATES if drafter == "paper" else CANDIDATES
